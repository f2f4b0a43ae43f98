#!/usr/bin/env bash
# What only a GPU can show: the tests marked `gpu`, the speed of every family beside MarianMT, and of the families with Triton
# kernels with and without them.
#
#   bash scripts/benchmarks/gpu.sh [further arguments of compare.py, such as --rounds 3]
set -euo pipefail
cd "$(dirname "$0")/../.."

failed=0
python -m pytest -q -m gpu || failed=1

compare() {
    echo
    python scripts/benchmarks/compare.py --dtype bfloat16 --label-smoothing 0.1 "$@" || failed=1
}

families=(nmt_transformer marian biarn_transformer rpe_transformer onlstm_transformer gret rnmt vrnmt gcn_rnmt)
compare "${families[@]}" --train-batch-size 128 --generate-batch-size 16 1 64 "$@"
compare "${families[@]}" --modes train --train-batch-size 800 --mean-length 13 "$@"

# The same models, which do not find Triton.
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cp -r src/recnmt_hf/models "$folder"
sed -i 's/^    import triton$/    raise ImportError/' "$folder/models/kernels_triton.py"
recurrent=(onlstm_transformer rnmt rnmt:relation_layers=0 vrnmt gcn_rnmt biarn_transformer
    nmt_transformer:decoder_autoregression=ssru)
compare "${recurrent[@]}" --against "$folder/models" --modes train --train-batch-size 128 "$@"
exit "$failed"
