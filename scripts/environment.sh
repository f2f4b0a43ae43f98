# Create or reuse the project's virtual environment; sourced by the other scripts. `RECNMT_EXTRAS` are the extras that a
# script needs (default: dev).
# Another place for it: RECNMT_VENV=/path. Another interpreter (3.11 or newer): PYTHON=python3.12. Other versions of the
# packages: RECNMT_CONSTRAINTS=scripts/lowest_constraints.txt.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RECNMT_VENV:-$root/.venv}"
python="${PYTHON:-python3}"
constraints="${RECNMT_CONSTRAINTS:-$root/scripts/constraints.txt}"

if [ ! -x "$venv/bin/python" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "recnmt_hf needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1)." >&2
        echo "Install a newer Python and run PYTHON=python3.12 bash scripts/..." >&2
        exit 1
    fi
    echo "Making a virtual environment in $venv."
    "$python" -m venv "$venv"
fi

# Install once, and again when the requirements have changed, or more extras are needed.
extras="${RECNMT_EXTRAS-dev}"
wanted="$(cat "$root/pyproject.toml" "$constraints" | cksum)"
installed="$(cat "$venv/installed-for" 2>/dev/null || true)"
if [ "$installed" != "$wanted $extras" ] && [ "$installed" != "$wanted dev" ]; then
    echo "Installing recnmt_hf and the pinned packages (some minutes the first time)."
    # Python compiles a module when it is first loaded, and most are never loaded.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$constraints" -e "$root${extras:+[$extras]}"
    echo "$wanted $extras" > "$venv/installed-for"
fi
export PATH="$venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # compiled modules are kept for the next process
