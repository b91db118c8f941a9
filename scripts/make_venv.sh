#!/bin/sh
# Create or update .venv in the checkout and install the package with its test extras. Stops at the first failing step
# with one line that says which step it was.

fail() {
    echo "install: $1" >&2
    exit 1
}

cd "$(dirname "$0")/.." || exit 1
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    python=$(sh scripts/find_python.sh) || exit 1
    echo "install: creating .venv with $python"
    "$python" -m venv --clear .venv || fail "could not create .venv with $python; is its venv module whole?"
fi
echo "install: installing combined_1f1b and its test extras into .venv (the first time downloads torch)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" -c constraints.txt ||
    fail "pip could not install the package; the lines above say why"
