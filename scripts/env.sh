# Sourced by the scripts here: finds Python, makes .venv whole, and sets
#   root  the repository's folder
#   bin   the environment's bin folder
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/.venv/bin
unset PYTHONPATH PYTHONHOME

# python3.11 first: it is the version that the lock was made with.
find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        [[ -n $name ]] && command -v "$name" >/dev/null || continue
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            printf '%s\n' "$name"
            return 0
        fi
    done
    echo "tierd: error: Python 3.11 or newer with the venv module is needed and was not found;" \
        "install it (on Debian: python3.11 and python3.11-venv), or name one: PYTHON=/path/to/python3.11" >&2
    return 1
}

python=$(find_python) || exit 1
"$python" "$root/scripts/setup_venv.py" || exit $?
