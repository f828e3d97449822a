# What the command-line tests share; sourced. A script ends with `finish`.
#
#     t NAME CODE OUT ERR ARGUMENT...   runs sidestream; stdout and stderr must match the globs OUT and ERR as a whole, the code CODE.
#                                       OUT or ERR '' means: nothing. Leaves them in the files `out` and `err`.
#     ok NAME / fail NAME WHY / skip NAME WHY
#     under NAME                        true in the variant of a sanitizer: address, thread. Programs are 5 to 20 times as slow there
#     py NAME FILE ARGUMENT...          a Python program reads `out`; it fails by an assertion
script=$(basename "${BASH_SOURCE[1]}" .sh)
: "${CLI_TIMEOUT:=120}"

ok() { echo "ok $script/$1"; }
fail() {
    echo "FAIL $script/$1: $2"
    sed 's/^/  | /' err 2>/dev/null | head -n 20
}
skip() { echo "skip $script/$1 # $2"; }
finish() { echo "# end"; }
under() { [[ ${SIDESTREAM_TEST_SANITIZER:-none} == *"$1"* ]]; }
have() { command -v "$1" >/dev/null 2>&1; }

t() {
    local name=$1 code=$2 out=$3 err=$4 got
    shift 4
    timeout --kill-after=5 "$CLI_TIMEOUT" "$SIDESTREAM" "$@" >out 2>err </dev/null
    got=$?
    if [ $got -ne "$code" ]; then
        fail "$name" "exit code $got, not $code"
    elif [[ "$(cat out)" != $out ]]; then
        fail "$name" "stdout does not match '$out': $(head -c 300 out)"
    elif [[ "$(cat err)" != $err ]]; then
        fail "$name" "stderr does not match '$err'"
    else
        ok "$name"
    fi
}

py() {
    local name=$1 why
    shift
    if ! have python3; then
        skip "$name" "no python3"
    elif why=$(python3 "$@" 2>&1); then
        ok "$name"
    else
        fail "$name" "$(echo "$why" | tail -n 3 | tr '\n' ' ')"
    fi
}

# The program that runs as PID has come to a point, whatever that took: it catches SIGINT; it has FILE open. At most 60 s.
catches_int() { [ "/proc/$1/exe" -ef "$SIDESTREAM" ] && (( 0x$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status") & 2 )); }
has_open() {
    local fd
    for fd in "/proc/$1"/fd/*; do
        [ "$fd" -ef "$2" ] && return 0
    done
    return 1
}
until_it() { # catches_int PID | has_open PID FILE
    local tries
    for tries in $(seq 3000); do
        { "$@" || [ ! -e "/proc/$2/exe" ]; } 2>/dev/null && return
        sleep 0.02
    done
}

# No unfinished file was left in this folder.
clean() {
    if compgen -G '*.sidestream-*' >/dev/null; then
        fail "$1" "left $(echo *.sidestream-*)"
    else
        ok "$1"
    fi
}
