# Sourced by train.sh and test.sh, not run by itself:  . "$ROOT/scripts/setup_venv.sh"
#
# In:  ROOT    the root of this repository, absolute.
#      PYTHON  set by the user: use this interpreter and install nothing.
# Out: PYTHON  the interpreter to use, exported; PYTHONPATH begins with ROOT, exported.
#
# Without PYTHON it makes $ROOT/.venv and installs this project there, editable, with everything it needs and with
# what its tests need, in the versions of constraints.txt. A second call finds the hash of constraints.txt and
# pyproject.toml unchanged and installs nothing. Needs Python 3.11 or later as python3.

setup_venv() {
    local venv="$ROOT/.venv" constraints="$ROOT/scripts/constraints.txt" wanted
    wanted=$(cat "$constraints" "$ROOT/pyproject.toml" | cksum)
    PYTHON="$venv/bin/python"
    if [ -x "$PYTHON" ] && [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup_venv.sh: needs Python 3.11 or later as python3; or set PYTHON to an interpreter" >&2
        return 1
    fi
    echo "Installing into $venv (once; a few minutes)" >&2
    [ -x "$PYTHON" ] || python3 -m venv "$venv" || return
    # Without build isolation the build, too, uses only what constraints.txt pins.
    "$PYTHON" -m pip install --quiet --constraint "$constraints" setuptools || return
    "$PYTHON" -m pip install --quiet --constraint "$constraints" --no-build-isolation --editable "$ROOT[test]" || return
    echo "$wanted" >"$venv/.installed"
}

if [ -z "${PYTHON:-}" ]; then
    setup_venv || exit 1
elif [[ $PYTHON == */* && $PYTHON != /* ]]; then
    PYTHON="$PWD/$PYTHON" # the caller changes directory
fi
export PYTHON
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
