#!/usr/bin/env bash
# Prints what CHANGELOG.md says of a version (0.1.0 or v0.1.0), for the notes of its release.
set -euo pipefail
version="${1:?Which version? As in: bash scripts/release_notes.sh 0.1.0}"
notes="$(awk -v heading="## ${version#v}" '/^## / { found = $0 == heading; next } found' "$(dirname "$0")/../CHANGELOG.md")"
if [ -z "$notes" ]; then
    echo "CHANGELOG.md says nothing of version ${version#v}. Remedy: give it a section '## ${version#v}'." >&2
    exit 1
fi
echo "$notes"
