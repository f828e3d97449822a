#!/usr/bin/env bash
# A file in the page cache through the program: checksum and cast, against the link that the program measures by itself. One JSON file a run,
# run-checksum-N.json and run-cast-N.json; bench/collect.py makes the rows of them.
#
#   bench_run.sh --sidestream PROGRAM --out DIR [--device cuda] [--dir /tmp] [--gib 8] [--repeats 5] [--verify 1]
#
# --dir: where the file is made (random bytes; twice --gib must be free). Results are checked against the software device, which computes on
# the CPU: the checksum of the whole file, and the cast's first 64 MiB. Exits 77 where there is no such device.
set -u
program= out= device=cuda dir=${TMPDIR:-/tmp} gib=8 repeats=5 verify=1
while [ $# -gt 1 ]; do
    case $1 in
    --sidestream) program=$2 ;; --out) out=$2 ;; --device) device=$2 ;; --dir) dir=$2 ;; --gib) gib=$2 ;;
    --repeats) repeats=$2 ;; --verify) verify=$2 ;;
    *) echo "bench_run.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
[ -n "$program" ] && [ -n "$out" ] || { echo "bench_run.sh: --sidestream and --out are needed" >&2; exit 2; }
mkdir -p "$out" || exit 1
work=$(mktemp -d "$dir/sidestream-bench.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
file=$work/file
head -c 4096 /dev/urandom >"$file"
"$program" run checksum "$file" --device "$device" >/dev/null 2>"$work/err"
[ $? != 3 ] || { echo "bench_run.sh: skipped: $(head -n 1 "$work/err")"; exit 77; }
# Eight writers: one reads the kernel's random numbers too slowly.
truncate -s "${gib}G" "$file" || exit 1
mib=$((gib * 1024 / 8))
for i in 0 1 2 3 4 5 6 7; do
    dd if=/dev/urandom of="$file" bs=1M count=$mib seek=$((i * mib)) conv=notrunc status=none &
done
wait
sync "$file"
cat "$file" >/dev/null

field() { sed -n "s/^ *\"$2\": \"\{0,1\}\([^\",]*\)\"\{0,1\},*$/\1/p" "$1" | head -n 1; }
failed=0
fail() { echo "FAILED: $*"; failed=1; }

sums=
for ((i = 1; i <= repeats; i++)); do # by turns
    json=$out/run-checksum-$i.json
    "$program" run checksum "$file" --device "$device" --json >"$json" 2>"$json.err" || fail "checksum: $(tail -n 1 "$json.err")"
    sums="$sums $(field "$json" checksum)"
    json=$out/run-cast-$i.json
    rm -f "$work/cast"
    "$program" run cast:f32:bf16 "$file" "$work/cast" --device "$device" --json >"$json" 2>"$json.err" ||
        fail "cast: $(tail -n 1 "$json.err")"
done
[ "$(tr ' ' '\n' <<<"$sums" | sort -u | grep -c .)" = 1 ] || fail "checksums differ:$sums"
if [ "$verify" = 1 ]; then
    "$program" run checksum "$file" --device sim --json >"$work/sim.json" 2>/dev/null
    [ " $(field "$work/sim.json" checksum)" = "${sums:0:17}" ] || fail "the CPU's checksum is $(field "$work/sim.json" checksum), not$sums"
    head -c 64M "$file" >"$work/head"
    "$program" run cast:f32:bf16 "$work/head" "$work/head.cast" --device sim --json >/dev/null 2>&1
    head -c 32M "$work/cast" | cmp -s - "$work/head.cast" || fail "the cast differs from the CPU's"
fi
for kind in checksum cast; do
    for ((i = 1; i <= repeats; i++)); do
        echo "$kind $i: $(field "$out/run-$kind-$i.json" gbps) GB/s, link $(field "$out/run-$kind-$i.json" link_gbps)"
    done
done
exit $failed
