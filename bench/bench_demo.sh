#!/usr/bin/env bash
# The textbook exercise over sizes: time against the bound, and against the reordered textbook. One JSON file a run, named
# demo-DIM-MATH-ITEMS[-results].json; bench/collect.py makes the table of them.
#
#   bench_demo.sh --sidestream PROGRAM --out DIR [--device cuda] [--dims "1024 2048 4096 8192"] [--maths "fp32 tf32"]
#                 [--items "10 100"] [--results-items "10"] [--max-gib 7] [--repeats 5] [--deadline SECONDS]
#
# A run takes its matrices twice in host memory (pageable and pinned); those of more than --max-gib are left out, and said so.
# --deadline: what has not begun by then is left out, too. Exits 77 where there is no such device.
set -u
program= out= device=cuda dims="1024 2048 4096 8192" maths="fp32 tf32" items="10 100" results_items="10" max_gib=7 repeats=5
deadline=1000000
while [ $# -gt 1 ]; do
    case $1 in
    --sidestream) program=$2 ;; --out) out=$2 ;; --device) device=$2 ;; --dims) dims=$2 ;; --maths) maths=$2 ;;
    --items) items=$2 ;; --results-items) results_items=$2 ;; --max-gib) max_gib=$2 ;; --repeats) repeats=$2 ;;
    --deadline) deadline=$2 ;;
    *) echo "bench_demo.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
[ -n "$program" ] && [ -n "$out" ] || { echo "bench_demo.sh: --sidestream and --out are needed" >&2; exit 2; }
mkdir -p "$out" || exit 1
failed=0

run() { # DIM MATH ITEMS SUFFIX OPTION...
    local dim=$1 math=$2 count=$3 name=demo-$1-$2-$3$4
    shift 4
    if [ $((dim * dim * 4 * count)) -gt $((max_gib << 30)) ]; then
        echo "left out: $name takes $((dim * dim * 4 * count >> 20)) MiB, over --max-gib $max_gib"
        return
    fi
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "left out: $name, no time"
        return
    fi
    "$program" demo --device "$device" --dim "$dim" --math "$math" --items "$count" --depth 2,3,4 --repeats "$repeats" \
        --json "$@" >"$out/$name.json" 2>"$out/$name.err"
    local code=$?
    if [ $code = 3 ]; then
        head -n 1 "$out/$name.err"
        rm -f "$out/$name.json"
        exit 77
    fi
    if [ $code != 0 ]; then
        echo "FAILED: $name: exit code $code: $(tail -n 1 "$out/$name.err")"
        failed=1
    fi
}

# The small ones first: a deadline costs the largest.
for count in $items; do
    for dim in $dims; do
        for math in $maths; do
            run "$dim" "$math" "$count" ""
            case " $results_items " in *" $count "*) run "$dim" "$math" "$count" -results --results ;; esac
        done
    done
done
exit $failed
