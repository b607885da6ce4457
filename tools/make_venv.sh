#!/bin/sh
# make_venv.sh FOLDER MINIMUM PYTHON...: a virtual environment in FOLDER, made by the first PYTHON that runs and is
# new enough. Pythons that pyenv holds are looked at too. On failure two lines say what is missing, and exit 2.
set -eu
folder=$1
minimum=$2
shift 2

new_enough() {
    # Runs it, since the shims of pyenv are on PATH for versions that are not active, and then fail.
    "$1" -c "import sys; sys.exit(sys.version_info < tuple(map(int, '$minimum'.split('.'))))" 2>/dev/null
}

pyenv_pythons() {
    command -v pyenv >/dev/null || return 0
    for name in "$@"; do
        case $name in python3.*) ls -d "$(pyenv root)/versions/${name#python}".*/bin/python3 2>/dev/null || true ;; esac
    done
}

chosen=
for candidate in "$@" $(pyenv_pythons "$@"); do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
        chosen=$candidate
        break
    fi
done
if [ -z "$chosen" ]; then
    echo "No Python $minimum or later among: $*." >&2
    echo "Install one (Debian: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python ..." >&2
    exit 2
fi
if ! "$chosen" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$chosen cannot make a virtual environment: its venv or ensurepip module is missing." >&2
    echo "Install it (Debian: apt install python3-venv) and run make again." >&2
    exit 2
fi
"$chosen" -m venv "$folder"
