#!/usr/bin/env bash
# Trains a tiny model on the generated English-German corpus, translates unseen sentences and scores them.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v recnmt > /dev/null; then  # not installed yet
    RECNMT_EXTRAS="" source scripts/environment.sh
fi
out="${1:-outputs/quickstart}"

echo
echo "1/3  Training a tiny Transformer on 20,000 generated sentence pairs (a few minutes on two CPU cores), and"
echo "     translating 500 sentences it has not seen, and 500 nested deeper than any it has seen."
recnmt train scripts/recipes/quickstart.yaml --output "$out" --overwrite

echo
echo "2/3  Source, output and reference, and the scores by length."
recnmt corpus --output "$out-corpus"
recnmt evaluate "$out/model-test.de" --references "$out-corpus/test.de" --source "$out-corpus/test.en" \
    --length-edges 10 20 30 --examples 3

echo
echo "3/3  Translating one more sentence with the model in $out/model."
echo "The lazy daughter says that our old students who are big see my letter." | recnmt translate "$out/model"
