#!/bin/sh
# Makes .venv with dflash-chat installed in it, or says in one line what this machine lacks.
#
#   bootstrap.sh          what the demo needs
#   bootstrap.sh --dev    and what the tests need
#   bootstrap.sh --check  only print the Python that would be used
#
# PYTHON=/path/to/python3.x chooses the interpreter; else PATH, pyenv and uv are searched.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

oldest_macos=14   # MLX's wheels are tagged macosx_14_0_arm64
oldest_glibc=2.35 # and manylinux_2_35
get_python="install Python 3.12 or uv (https://docs.astral.sh/uv)"

die() {
    echo "dflash-chat: $*" >&2
    exit 1
}

is_set() { [ "$(sysctl -n "$1" 2>/dev/null)" = 1 ]; }

# Accepts the Python $1 and sets $python, or sets $problem (or $old, a lesser problem).
accept() {
    # Written for Python 2.7 too. The base of a virtual environment outlives it, and pyenv's
    # shims. Debian packages ensurepip, without which venv fails, apart from Python.
    facts=$("$1" -c '
import platform, sys
try:
    import ensurepip, venv
    state = "fit"
except ImportError:
    state = "bare"
if sys.version_info < (3, 11):
    state = "old"
python = getattr(sys, "_base_executable", sys.executable)
print("%s %d.%d %s %s" % (state, sys.version_info[0], sys.version_info[1], platform.machine(), python))
' 2>/dev/null) || return 1
    read -r state version machine path <<END
$facts
END
    if [ "$state" = old ]; then
        old=${old:-$1 is Python $version}
        return 1
    elif [ "$system" = Darwin ] && [ "$machine" != arm64 ]; then
        reason="$1 is an $machine Python and MLX needs an arm64 one: $get_python"
        is_set sysctl.proc_translated && reason="this terminal runs under Rosetta and so does $1: \
switch off 'Open using Rosetta' in the terminal app's Get Info"
    elif [ "$state" = bare ]; then
        reason="$1 cannot make virtual environments: apt install python$version-venv, or $get_python"
    else
        python=$path
        return 0
    fi
    problem=${problem:-$reason}
    return 1
}

search() {
    old='' problem='' python=''
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a command"
        accept "$PYTHON" && return
        die "PYTHON: ${problem:-${old:-$PYTHON does not run}${old:+, 3.11 or later is needed}}"
    fi

    # What PATH offers goes first: with pyenv, that is the version its user selected.
    IFS=:
    # shellcheck disable=SC2086
    set -- $PATH
    unset IFS
    for directory in "$@" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin; do
        for name in python3.13 python3.12 python3.11 python3.14 python3; do
            [ -x "$directory/$name" ] && accept "$directory/$name" && return
        done
    done

    if command -v uv >/dev/null; then
        if [ "$mode" = --check ]; then
            python="uv's Python 3.12"
            return
        fi
        uv python install --quiet 3.12 &&
            accept "$(uv python find --python-preference only-managed 3.12)" && return
        die "${problem:-uv could not provide Python 3.12: see what uv python install 3.12 says}"
    fi
    die "${problem:-no Python 3.11 or later and no uv${old:+ ($old)}: $get_python}"
}

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >.venv/pip.log 2>&1 && return
    if grep -q 'No matching distribution found for mlx' .venv/pip.log; then
        die "MLX has no build for Python $version on $(uname -sm): on Linux it needs glibc $oldest_glibc (no musl), x86_64 or aarch64"
    fi
    die "pip: $(tail -n 1 .venv/pip.log) (all of it: .venv/pip.log)"
}

mode=${1:-}
case $mode in
'' | --dev | --check) ;;
*) die "unknown argument $mode, see the head of $0" ;;
esac

system=$(uname -s)
if [ "$system" = Darwin ]; then
    is_set hw.optional.arm64 || die "MLX needs Apple Silicon, this Mac has an Intel processor"
    macos=$(sw_vers -productVersion)
    [ "${macos%%.*}" -ge $oldest_macos ] ||
        die "MLX needs macOS $oldest_macos or later, this is $macos: update macOS"
fi

if [ "$mode" = --check ]; then
    search
    echo "$python"
    exit
fi

# .venv/made-from names the Python that a complete environment was made from. An environment that
# no longer runs, runs under Rosetta, or is of another Python than the one asked for is replaced.
made_from=$(cat .venv/made-from 2>/dev/null) || made_from=''
if [ -n "${PYTHON:-}" ]; then
    search
    [ "$python" = "$made_from" ] || made_from=''
fi
if [ -z "$made_from" ] || ! accept .venv/bin/python; then
    search
    rm -rf .venv
    "$python" -m venv .venv || die "$python could not make .venv"
    echo "$python" >.venv/made-from
fi

key="$(cat pyproject.toml scripts/bootstrap.sh | cksum) $PWD "
installed=$(cat .venv/installed 2>/dev/null) || installed=''
case $installed in
"$key$mode" | "$key--dev") exit ;;
esac
echo "dflash-chat: installing into .venv (Python $version), the first time takes a minute or two" >&2
if [ "$mode" = --dev ]; then
    install --editable '.[dev,metal-tests]'
    # The authors' implementation, to compare with. Its own dependencies pin other releases than
    # ours; what its MLX part imports is here already.
    install --no-deps dflash==0.1.0
else
    install --editable .
fi
echo "$key$mode" >.venv/installed
