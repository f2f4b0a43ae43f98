#!/usr/bin/env bash
# Mutation testing of one module: mutmut changes the module in many small ways, one at a time, and the script prints the
# changes that no test detects. Each of them needs a test, or is in code that makes no difference.
#
#   bash scripts/mutation.sh data/batching.py
#   bash scripts/mutation.sh training/trainer.py tests/training/test_training.py tests/training/test_resuming.py
#
# mutmut finds by itself which of the tests reach a function. By default it starts with the tests of the module's package
# (tests/data in the first line); named tests or folders replace them. Tests marked slow are skipped.
#
# MUTATION_SAMPLE=N tries N changes, evenly spread over the module. MUTATION_ONLY="x_squash__mutmut_3 x_route__mutmut_5"
# tries the named changes. The changes are made in a temporary copy; MUTATION_FOLDER=/path keeps it there.
#
# Decorated functions (except class and static methods) and the texts of raised errors are not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
module="${1#src/recnmt_hf/}"
shift
if [ ! -f "src/recnmt_hf/$module" ]; then
    echo "There is no src/recnmt_hf/$module. Pass a module such as data/batching.py." >&2
    exit 2
fi
tests="$*"
if [ -z "$tests" ]; then
    tests="tests/${module%%/*}"
    [ -d "$tests" ] || tests="tests"
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
    # Slow tests would be run again for every change that they reach.
    printf "pytest_add_cli_args =\n    -p\n    no:cacheprovider\n    -m\n    not slow\n"
    printf "pytest_add_cli_args_test_selection =\n"
    printf "    %s\n" $tests
} > setup.cfg

# Names of the changes to try.
python - "src/recnmt_hf/$module" > changes.log <<'PYTHON'
import os
import pathlib
import sys

from mutmut.__main__ import get_mutant_name
from mutmut.mutation.file_mutation import mutate_file_contents

path = pathlib.Path(sys.argv[1])
every = mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
if not every:
    sys.exit(f"mutmut finds nothing to change in {path}.")
chosen = os.environ.get("MUTATION_ONLY", "").split() or every
count = min(int(os.environ.get("MUTATION_SAMPLE") or len(chosen)), len(chosen))
if count < 1 or not set(chosen) <= set(every):
    message = "MUTATION_SAMPLE must be at least 1, and MUTATION_ONLY must name changes of this module. Not among them:"
    sys.exit(f"{message} {sorted(set(chosen) - set(every))}.")
for i in range(count):
    print(get_mutant_name(path, chosen[i * len(chosen) // count]))
print(f"{count} of {len(every)} changes", file=sys.stderr)
PYTHON

# Subprocesses of the tests import the changed module too.
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
# The same as `mutmut show` for each change, in one process.
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
