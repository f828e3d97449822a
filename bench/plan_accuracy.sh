#!/usr/bin/env bash
# How far off is a plan? Measures the machine profile in one process; then, in others, what the plan says of cases that the profile has not seen, beside what they take.
#
#   plan_accuracy.sh OUT COMMIT DATE BUILD [DEVICE] [PYTHON]
#
# OUT: a folder for machine.json, bench.log, plan_accuracy.log (the table), plan_torch.log and results.jsonl. BUILD: a folder with `sidestream` and, in it or in bench/ or
# test-gcc/bench/, bench_plan_accuracy. DEVICE: cuda; with sim it runs small, on the model. PYTHON: one that can import torch and sidestream, for real
# training loops; without it those are left out. Exits 1 where a target is missed.
set -u
[ $# -ge 4 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd) commit=$2 date=$3 build=$(cd "$4" && pwd) device=${5:-cuda} python=${6:-}
here=$(cd "$(dirname "$0")" && pwd)
program=$build/sidestream
for path in "$build" "$build/bench" "$build/test-gcc/bench"; do
    [ -x "$path/bench_plan_accuracy" ] && break
done
[ -x "$program" ] && [ -x "$path/bench_plan_accuracy" ] || { echo "plan_accuracy.sh: no sidestream or no bench_plan_accuracy in $build" >&2; exit 2; }
export SIDESTREAM_MACHINE=$out/machine.json
rm -f "$SIDESTREAM_MACHINE"

if [ "${device%%:*}" = sim ]; then # its profile is its own model
    unset SIDESTREAM_MACHINE
elif ! "$program" bench link launch stage pin --device "$device" --save="$SIDESTREAM_MACHINE" >"$out/bench.log" 2>&1; then
    tail -n 5 "$out/bench.log"
    echo "plan_accuracy.sh: the machine profile could not be measured" >&2
    exit 1
fi
"$path/bench_plan_accuracy" --device "$device" --out "$out/results.jsonl" --commit "$commit" --date "$date" >"$out/plan_accuracy.log" 2>&1
code=$?
case $code in
77) tail -n 1 "$out/plan_accuracy.log"; exit 77 ;;
0 | 1) sed -n '/^|predicted/,$p' "$out/plan_accuracy.log" ;;
*) tail -n 5 "$out/plan_accuracy.log" ;;
esac
if [ -n "$python" ]; then
    "$python" "$here/torch/plan.py" --device "${device%%:*}" --sidestream "$program" --out "$out/torch.jsonl" --commit "$commit" >"$out/plan_torch.log" 2>&1 || code=1
    tail -n 12 "$out/plan_torch.log"
fi
exit $code
