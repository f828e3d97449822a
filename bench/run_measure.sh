#!/usr/bin/env bash
# `bench`, `doctor` and `plan` on a machine with a GPU, in some six minutes: all suites, NVIDIA's nvbandwidth beside them, and how far off plans are.
#
#   run_measure.sh OUT COMMIT DATE BUILD [DEVICE] [NVBANDWIDTH] [PYTHON]
#
# OUT: a folder for the raw results. BUILD: as for plan_accuracy.sh. DEVICE: cuda; with sim it runs small, on the model. NVBANDWIDTH: the program, built from its public
# source; '' leaves the comparison out. PYTHON: one that can import torch and sidestream. Exits 1 where a step fails or misses its target; each step's code is printed.
set -u
[ $# -ge 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd) commit=$2 date=$3 build=$(cd "$4" && pwd) device=${5:-cuda} nvbandwidth=${6:-} python=${7:-}
here=$(cd "$(dirname "$0")" && pwd)
program=$build/sidestream worst=0 quick=()
[ -x "$program" ] || { echo "run_measure.sh: no $program" >&2; exit 2; }
[ "${device%%:*}" != sim ] || quick=(--quick)

step() { # NAME MOST-SECONDS COMMAND...: its output to NAME.log
    local name=$1 most=$2 began=$SECONDS code
    shift 2
    timeout "$most" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s"
    [ $code -eq 0 ] || [ "$name" = doctor ] || worst=1
}

{
    echo "commit $commit, date $date, device $device"
    uname -srm
    "$program" devices --device "$device"
} >"$out/machine.txt" 2>&1
step doctor 60 "$program" doctor --device "$device"
for suite in link launch pin stage blocks overlap; do
    step "bench-$suite" 120 bash -c 'exec "$@" >"$0"' "$out/bench-$suite.json" "$program" bench $suite --json --device "$device" \
        ${quick[@]+"${quick[@]}"} --save="$out/profile.json"
done
step bench-text 150 "$program" bench all --quick --device "$device"
[ -z "$nvbandwidth" ] || step nvbandwidth 120 "$here/nvbandwidth.sh" "$nvbandwidth" --sidestream "$program" --out "$out/nvbandwidth" --device "$device"
step plan 300 "$here/plan_accuracy.sh" "$out/plan" "$commit" "$date" "$build" "$device" "$python"
cat "$out/plan.log"
exit $worst
