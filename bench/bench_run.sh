#!/usr/bin/env bash
# A file in the page cache through the program: checksum and cast, against the link that the program measures by itself. One JSON file a run,
# run-checksum-N.json and run-cast-N.json; bench/collect.py makes the rows of them.
#
#   bench_run.sh --sidestream PROGRAM --out DIR [--device cuda] [--dir /tmp] [--gib 8] [--repeats 5] [--verify 1]
#
# --dir: where the file is made (random bytes; twice --gib must be free). Results are checked: the checksum against the software device's, which
# computes on the CPU, and the cast of the first 2 GiB against the software device's and cast_reference.py's. The cast runs twice, since it
# measures the disk. Exits 77 where there is no such device.
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
    [ $i -le 2 ] || continue
    json=$out/run-cast-$i.json
    rm -f "$work/cast"
    "$program" run cast:f32:bf16 "$file" "$work/cast" --device "$device" --json >"$json" 2>"$json.err" ||
        fail "cast: $(tail -n 1 "$json.err")"
done
[ "$(tr ' ' '\n' <<<"$sums" | sort -u | grep -c .)" = 1 ] || fail "checksums differ:$sums"
if [ "$verify" = 1 ]; then
    "$program" run checksum "$file" --device sim --json >"$work/sim.json" 2>/dev/null
    [ " $(field "$work/sim.json" checksum)" = "${sums:0:17}" ] || fail "the CPU's checksum is $(field "$work/sim.json" checksum), not$sums"
    rm -f "$work/cast"
    [ "$gib" -le 2 ] || truncate -s 2G "$file"
    "$program" run cast:f32:bf16 "$file" "$work/cast" --device "$device" 2>/dev/null || fail "cast of 2 GiB"
    "$program" run cast:f32:bf16 "$file" "$work/cast.sim" --device sim 2>/dev/null || fail "cast on the CPU"
    cmp "$work/cast" "$work/cast.sim" && echo "cast of $(stat -c %s "$file") bytes: $device and sim are byte-identical" || fail "the cast differs from the CPU's"
    python3 "$(dirname "$0")/cast_reference.py" "$file" "$work/cast"
    case $? in 0 | 77) ;; *) fail "the cast differs from the reference" ;; esac
fi
for kind in checksum cast; do
    for ((i = 1; i <= repeats; i++)); do
        [ -e "$out/run-$kind-$i.json" ] || continue
        echo "$kind $i: $(field "$out/run-$kind-$i.json" gbps) GB/s, link $(field "$out/run-$kind-$i.json" link_gbps)"
    done
done
exit $failed
