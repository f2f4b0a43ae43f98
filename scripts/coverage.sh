#!/usr/bin/env bash
# Which lines and branches the tests reach: a table of what they do not, and coverage.xml; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
exec python -m pytest -n "${RECNMT_TEST_WORKERS:-2}" --cov --cov-report=term --cov-report=xml "$@"
