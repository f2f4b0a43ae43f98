#!/usr/bin/env bash
# Installs what the tests need into the project's own environment and runs those that are not slow. Arguments go to pytest:
# "bash scripts/test.sh -m slow" runs the slow ones, "bash scripts/test.sh tests" all.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
# Neighbouring tests share fixtures: each worker takes its own part of them, and from the other's when it has none left.
[ $# -gt 0 ] || set -- -m "not slow"
exec python -m pytest -n "${RECNMT_TEST_WORKERS:-2}" --dist worksteal "$@"
