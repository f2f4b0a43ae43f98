#!/usr/bin/env bash
# Trains a tiny model on the generated English-German corpus, translates unseen sentences and scores them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
out="${1:-outputs/quickstart}"

echo
echo "1/3  Training a tiny Transformer on 20,000 generated sentence pairs (a few minutes on two CPU cores)."
recnmt corpus "$out-corpus"
recnmt train scripts/recipes/quickstart.yaml --output "$out" --overwrite

echo
echo "2/3  Translating 500 sentences it has not seen, and 500 nested deeper than any it has seen."
for split in test test_deep; do
    recnmt translate "$out/model" --input "$out-corpus/$split.en" --output "$out-corpus/$split.out.de" --on-long split
done

echo
echo "3/3  Source, output and reference, and the scores."
recnmt evaluate "$out-corpus/test.out.de" --references "$out-corpus/test.de" --source "$out-corpus/test.en" \
    --length-edges 10 20 --examples 6
recnmt evaluate "$out-corpus/test_deep.out.de" --references "$out-corpus/test_deep.de" \
    --source "$out-corpus/test_deep.en" --length-edges 20 30 --examples 2

echo
echo "The model is in $out/model. Try it:"
echo "    echo 'The old farmer invites the girl that the dog follows.' | recnmt translate $out/model"
