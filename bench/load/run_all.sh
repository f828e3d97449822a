#!/usr/bin/env bash
# Loads beside other loaders, beside compute, and casts: all in some nine minutes on a machine with a GPU, raw results and a table.
#
#   run_all.sh OUT COMMIT DATE PYTHON [PROGRAM] [DISK]
#
# OUT: a folder for load.jsonl, the tables and the logs. PYTHON: one that has torch, sidestream, and those loaders that are to be compared. PROGRAM: build/sidestream, for the
# casts; '' leaves them out. DISK: a folder on the disk, 38 GiB (/tmp). BENCH_SECONDS (400): for the comparison; the rest takes some two minutes.
set -u
[ $# -ge 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd) commit=$2 date=$3 python=$4 program=${5:-} disk=${6:-/tmp}
[ -z "$program" ] || program=$(cd "$(dirname "$program")" && pwd)/$(basename "$program")
cd "$(dirname "$0")" || exit 1
common=(--out "$out/load.jsonl" --commit "$commit" --date "$date")
rm -f "$out/load.jsonl"

step() { # NAME MOST-SECONDS COMMAND...
    local name=$1 most=$2 began=$SECONDS code
    shift 2
    timeout "$most" "$@" >"$out/$name.txt" 2>"$out/$name.log"
    code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s"
    cat "$out/$name.txt"
    [ $code = 0 ] || tail -n 5 "$out/$name.log"
}

step compare 600 "$python" compare.py "${common[@]}" --disk "$disk" --seconds "${BENCH_SECONDS:-400}" --keep
step overlap 100 "$python" overlap.py /dev/shm/sidestream-load/D1 "${common[@]}"
rm -rf "$disk/sidestream-load" /dev/shm/sidestream-load
[ -z "$program" ] || step cast 200 "$python" cast.py --program "$program" --disk "$disk" "${common[@]}"
