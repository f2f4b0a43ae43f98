#!/usr/bin/env bash
# Mutation testing of one module: changes it in many small ways, one at a time, and prints the changes that no test
# notices. Each of them is a missing test, or code that makes no difference.
#
#   bash scripts/mutation.sh data/batching.py                       # with the tests of the table below
#   bash scripts/mutation.sh training/trainer.py tests/training/test_training.py tests/training/test_resuming.py
#
# A large module has many hundreds of changes. MUTATION_SAMPLE=N tries N of them, spread evenly over the module;
# MUTATION_ONLY="x_squash__mutmut_3 x_route__mutmut_5" tries those of the given names, as when a test has been added for
# what was printed.
#
# Tests that are marked slow are left out. The changes are made in a copy, which is deleted at the end
# (MUTATION_FOLDER=/path keeps it there). Functions with decorators other than classmethod and staticmethod, and the
# wording of raised errors, are left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

# Module, and the tests that are to notice its changes; a module may have several rows. A module that is not named: the
# test file of its own name; one of models/ without one: all tests of models. The tests of the toys notice nothing: they
# run copies of the models' files.
table="
data/files.py                   tests/data/test_files.py tests/data/test_text.py
evaluation/forced_decoding.py   tests/evaluation/test_translator.py tests/evaluation/test_alignment.py
evaluation/significance.py      tests/evaluation/test_significance.py tests/evaluation/test_metrics.py
models/attention.py             tests/models/test_attention.py
models/attention.py             tests/models/test_fast_paths.py::test_attention_by_plain_matmuls
models/capsule_routing.py       tests/models/test_gret.py::test_routing_without_votes_equals_routing
models/capsule_routing.py       tests/models/test_gret.py::test_squash_of_zero
models/initialization.py        tests/models/test_recurrent_ground.py
models/initialization.py        tests/models/test_rnmt.py::test_initialisation_of_the_paper
models/position_embeddings.py   tests/models/test_nmt_transformer.py::test_positions_from_an_offset_by_number_or_by_ids
models/position_embeddings.py   tests/models/test_nmt_transformer.py::test_sequences_beyond_the_position_table_are_refused
models/recurrent_cache.py       tests/models/test_recurrent_ground.py
models/recurrent_layers.py      tests/models/test_recurrent_ground.py
models/relation_pairs.py        tests/models/test_rnmt.py::test_pairs_pass_gradcheck_in_any_tiles
models/relation_pairs.py        tests/models/test_rnmt.py::test_tiles_cover_each_pair_once_and_stay_small
models/relative_attention.py    tests/models/test_nmt_transformer.py::test_equations
models/relative_attention.py    tests/models/test_nmt_transformer.py::test_tables_of_relative_positions
models/seq2seq_loss.py          tests/models/test_fast_paths.py
models/seq2seq_outputs.py       tests/models/test_recurrent_ground.py
models/source_memory.py         tests/models/test_recurrent_ground.py
training/checkpoints.py         tests/training/test_checkpoints.py tests/training/test_checkpoint_folders.py
"

if [ $# -eq 0 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
module="${1#src/recnmt_hf/}"
shift
if [ ! -f "src/recnmt_hf/$module" ]; then
    echo "There is no src/recnmt_hf/$module. Remedy: name a module as in data/batching.py." >&2
    exit 2
fi
if [ $# -gt 0 ]; then
    tests="$*"
else
    tests="$(awk -v module="$module" '$1 == module { $1 = ""; print }' <<< "$table")"
    name="$(basename "$module" .py)"
    name="${name#modeling_}"
    own="tests/$(dirname "$module")/test_${name#configuration_}.py"
    if [ -z "$tests" ] && [ -f "$own" ]; then
        tests="$own"
    elif [ -z "$tests" ] && [[ "$module" == models/* ]]; then
        tests="tests/models"
    elif [ -z "$tests" ]; then
        echo "Which tests are to notice changes of $module? Remedy: name them after the module." >&2
        exit 2
    fi
fi

source scripts/environment.sh
if ! python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mutmut") is None)'; then
    python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[mutation]"
fi

folder="${MUTATION_FOLDER:-}"
if [ -z "$folder" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
cp -r src tests scripts model_cards README.md CHANGELOG.md pyproject.toml "$folder"
cd "$folder"
{
    echo "[mutmut]"
    echo "source_paths = src"
    echo "only_mutate = src/recnmt_hf/$module"
    echo "do_not_mutate_patterns = raise \w+\("
    echo "use_git_change_detection = false"
    printf "also_copy =\n    src\n    scripts\n    model_cards\n    README.md\n    CHANGELOG.md\n"
    # Tests of more than ten seconds would be run for every change of what they reach.
    printf "pytest_add_cli_args =\n    -p\n    no:cacheprovider\n    -m\n    not slow\n"
    printf "pytest_add_cli_args_test_selection =\n"
    printf "    %s\n" $tests
} > setup.cfg

# The changes to be tried, by name.
python - "src/recnmt_hf/$module" > changes.log <<'PYTHON'
import os
import pathlib
import sys

from mutmut.__main__ import get_mutant_name
from mutmut.mutation.file_mutation import mutate_file_contents

path = pathlib.Path(sys.argv[1])
every = mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
chosen = os.environ.get("MUTATION_ONLY", "").split() or every
count = min(int(os.environ.get("MUTATION_SAMPLE") or len(chosen)), len(chosen))
if count < 1 or not set(chosen) <= set(every):
    message = "MUTATION_SAMPLE must be at least 1, and MUTATION_ONLY must name changes of this module. Not among them:"
    sys.exit(f"{message} {sorted(set(chosen) - set(every))}.")
for i in range(count):
    print(get_mutant_name(path, chosen[i * len(chosen) // count]))
print(f"{count} of {len(every)} changes", file=sys.stderr)
PYTHON

# Subprocesses of the tests are to see the changed module too.
mkdir -p mutants/src
export PYTHONPATH="$folder/mutants/src" OMP_NUM_THREADS=1
mutmut run --max-children "${RECNMT_TEST_WORKERS:-2}" $(cat changes.log) 2>&1 | tr '\r' '\n' > run.log || {
    tail -n 40 run.log
    exit 1
}
mutmut results --all true | grep -v ": not checked$" > results.log || true
echo
echo "$module with$(printf ' %s' $tests):"
sed 's/.*: //' results.log | sort | uniq -c
# `mutmut show` for each of them, without starting it as many times.
python - <<'PYTHON'
import re

from mutmut.__main__ import find_mutant, get_diff_for_mutant

for line in open("results.log", encoding="utf-8"):
    name, _, outcome = line.strip().rpartition(": ")
    if outcome in ("survived", "no tests", "suspicious"):
        lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()
        changes = [change for change in lines if re.match(r"[-+] |@@", change)]
        print(f"\n# {name.rpartition('.')[2]}: {outcome}", *changes, sep="\n")
PYTHON
