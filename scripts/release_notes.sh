#!/usr/bin/env bash
# Print the section of CHANGELOG.md for a version (0.1.0 or v0.1.0), as the notes of its release.
set -euo pipefail
version="${1:?Pass a version, e.g. bash scripts/release_notes.sh 0.1.0}"
notes="$(awk -v heading="## ${version#v}" '/^## / { found = $0 == heading; next } found' "$(dirname "$0")/../CHANGELOG.md")"
if [ -z "$notes" ]; then
    echo "CHANGELOG.md has no section for version ${version#v}. Add the heading '## ${version#v}'." >&2
    exit 1
fi
echo "$notes"
