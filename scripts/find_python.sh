#!/bin/sh
# Print the path of a Python >= 3.12 that really runs, or say on stderr what to install and exit 1.
# Each candidate is run: a pyenv shim can exist for a version that is not active, and then fails.
# A candidate must have venv and ensurepip, or `python -m venv` would fail later.

check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12)); '

try_python() {
    command -v "$1" >/dev/null 2>&1 || return 1
    "$1" -c "$check" >/dev/null 2>&1 || return 1
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}

[ -n "$PYTHON" ] && { try_python "$PYTHON" || { echo "PYTHON=$PYTHON: not a Python >= 3.12 that runs and has venv; unset PYTHON or name another" >&2; exit 1; }; }

for name in python3.12 python3.13 python3; do
    try_python "$name"
done

for root in "$PYENV_ROOT" "$HOME/.pyenv"; do
    [ -n "$root" ] || continue
    for version in 3.12 3.13; do
        for candidate in "$root"/versions/"$version"*/bin/python; do
            [ -x "$candidate" ] && try_python "$candidate"
        done
    done
done

cat >&2 <<'MESSAGE'
No Python >= 3.12 with the venv module was found: looked at python3.12, python3.13, python3 and pyenv's versions.
Install one and run the command again, for example:
  Debian, Ubuntu:  apt-get install python3.12 python3.12-venv
  Fedora:          dnf install python3.12
  macOS:           brew install python@3.12
  pyenv:           pyenv install 3.12
or name one that is elsewhere:  make install PYTHON=/path/to/python3.12
MESSAGE
exit 1
