#!/usr/bin/env bash
# Every benchmark on a machine with a GPU, in under nine minutes, and one table.
#
#   run_all.sh OUT COMMIT DATE BUILD [DEVICE]
#
# OUT: a folder for the raw results and table.txt. BUILD: a folder with `sidestream` and, in it or in bench/ or test-gcc/bench/, the bench_
# programs. DEVICE: cuda; with sim everything runs small, on the model. What a step has no time left for is named and left out.
# BENCH_SECONDS (520) is the time for all; BENCH_DIR (TMPDIR or /tmp) is where the 8 GiB file goes.
set -u
[ $# -ge 4 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1 commit=$2 date=$3 build=$4 device=${5:-cuda}
here=$(cd "$(dirname "$0")" && pwd)
total=${BENCH_SECONDS:-520}
dir=${BENCH_DIR:-${TMPDIR:-/tmp}}
program=$build/sidestream
[ -x "$program" ] || { echo "run_all.sh: no $program" >&2; exit 2; }
mkdir -p "$out" || exit 1
rm -f "$out"/demo-*.json "$out"/run-*.json "$out/bench.json" "$out/results.jsonl"

bench() { # NAME: its program
    local path
    for path in "$build" "$build/bench" "$build/test-gcc/bench"; do
        [ -x "$path/bench_$1" ] && echo "$path/bench_$1" && return
    done
    echo "bench_$1"
}

step() { # NAME MOST-SECONDS COMMAND...
    local name=$1 most=$2 left=$((total - SECONDS)) began=$SECONDS code
    shift 2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 5 ]; then
        echo "== $name: left out, no time"
        return
    fi
    timeout "$most" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s"
    case $code in
    0) ;;
    77) tail -n 1 "$out/$name.log" ;;
    *) tail -n 5 "$out/$name.log" ;;
    esac
}

common=(--out "$out/results.jsonl" --device "$device" --commit "$commit" --date "$date")
demo=() alloc=() run=()
if [ "${device%%:*}" = sim ]; then
    demo=(--dims "256 512" --items 10)
    alloc=(--items 20 --most-mib 4 --repeats 2)
    run=(--gib 1 --repeats 2)
fi
step queue 40 "$(bench queue)" "${common[@]}"
step feed 30 "$(bench feed)" "${common[@]}"
step bench 90 bash -c 'exec "$0" bench pin stage --json --device "$1" >"$2"' "$program" "$device" "$out/bench.json"
step run 140 "$here/bench_run.sh" --sidestream "$program" --out "$out" --device "$device" --dir "$dir" ${run[@]+"${run[@]}"}
step alloc 60 "$(bench alloc)" "${common[@]}" ${alloc[@]+"${alloc[@]}"}
step demo 400 "$here/bench_demo.sh" --sidestream "$program" --out "$out" --device "$device" --items 10 \
    --deadline $((total - SECONDS - 40)) ${demo[@]+"${demo[@]}"}
[ "${device%%:*}" = sim ] || step demo-100 300 "$here/bench_demo.sh" --sidestream "$program" --out "$out" --device "$device" --items 100 \
    --repeats 3 --deadline $((total - SECONDS - 60))
echo
python3 "$here/collect.py" "$out" --commit "$commit" --date "$date"
