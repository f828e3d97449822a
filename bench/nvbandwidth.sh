#!/usr/bin/env bash
# `sidestream bench link` against NVIDIA's nvbandwidth, by turns in the same minute: pinned H2D and D2H by copy engine. Prints each turn and the
# ratio of the medians, and keeps what both programs printed: nvbandwidth-N.json, link-N.json; and the table, nvbandwidth.json.
#
#   nvbandwidth.sh NVBANDWIDTH --sidestream PROGRAM --out DIR [--device cuda:N] [--turns 5] [--within 2] [--quick 0]
#
# NVBANDWIDTH: the program, built from https://github.com/NVIDIA/nvbandwidth. --within: percent that the ratio may be off by. Exits 0 within, 1 not
# or failed, 2 for bad arguments, 77 where there is no such device.
#
# Like with like (nvbandwidth 0.8, doMemcpyCore in memcpy.cpp): it holds the stream with a kernel that spins until the host lets it go, and queues 4
# copies to warm up, an event, 16 copies of one pinned buffer (cuMemHostAlloc, on the GPU's NUMA node), an event. A sample is the bytes over the time
# between the events, 1e9 bytes a second; the result is the median of the samples (-i). bench link does the same with a spin that ends by itself, one
# copy to warm up, and 1 to 120 copies of consecutive buffers; it compares on the host what nvbandwidth compares on the device. The size of the buffer
# (-b) is made equal here: the largest that bench link had, up to 512 MiB. nvbandwidth's bidirectional tests have no twin here: they give the rate of
# one direction beside twice as many bytes in the other.
set -u
usage() { sed -n 's/^#   \(nvbandwidth\.sh \)/usage: \1/p' "$0" >&2; exit 2; }
nv=${1:-} program= out= device=cuda:0 turns=5 within=2 quick=0
[ $# -gt 0 ] && shift
while [ $# -gt 1 ]; do
    case $1 in
    --sidestream) program=$2 ;; --out) out=$2 ;; --device) device=$2 ;; --turns) turns=$2 ;; --within) within=$2 ;; --quick) quick=$2 ;;
    *) echo "nvbandwidth.sh: unknown option $1" >&2; usage ;;
    esac
    shift 2
done
[ $# = 0 ] && [ -n "$nv" ] && [ -n "$program" ] && [ -n "$out" ] || usage
[[ $turns =~ ^[1-9][0-9]?$ ]] || { echo "nvbandwidth.sh: --turns '$turns' is not a number from 1 to 99" >&2; exit 2; }
[ -x "$nv" ] || { echo "nvbandwidth.sh: no program '$nv'; build it from https://github.com/NVIDIA/nvbandwidth" >&2; exit 2; }
[ -x "$program" ] || { echo "nvbandwidth.sh: no program '$program'; give --sidestream build/sidestream" >&2; exit 2; }
mkdir -p "$out" || exit 1
rm -f "$out"/link-*.json "$out"/nvbandwidth-*.json "$out/nvbandwidth.json"
options=(bench link --json --device "$device")
[ "$quick" = 0 ] || options+=(--quick)

for ((turn = 1; turn <= turns; turn++)); do
    "$program" "${options[@]}" >"$out/link-$turn.json" 2>"$out/link-$turn.err"
    code=$?
    if [ $code -ne 0 ]; then
        cat "$out/link-$turn.err" >&2
        [ $code = 3 ] && exit 77
        exit 1
    fi
    [ -s "$out/link-$turn.err" ] || rm -f "$out/link-$turn.err"
    mib=$(python3 -c 'import json, sys
rows = json.load(open(sys.argv[1]))["suites"]["link"]["rows"]
print(max(r["bytes"] for r in rows if r["bytes"] <= 512 << 20) >> 20)' "$out/link-$turn.json") || exit 1
    "$nv" -j -b "$mib" -i 9 -t host_to_device_memcpy_ce device_to_host_memcpy_ce >"$out/nvbandwidth-$turn.json" 2>"$out/nvbandwidth-$turn.err" ||
        { cat "$out/nvbandwidth-$turn.json" "$out/nvbandwidth-$turn.err" >&2; exit 1; }
    [ -s "$out/nvbandwidth-$turn.err" ] || rm -f "$out/nvbandwidth-$turn.err"
done

exec python3 - "$out" "$device" "$turns" "$within" <<'PY'
import json
import statistics
import sys

out, device, turns, within = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
column = int(device.partition(":")[2]) if device.startswith("cuda:") else 0
names = {"h2d": "host_to_device_memcpy_ce", "d2h": "device_to_host_memcpy_ce"}
rates = {name: {"sidestream": [], "nvbandwidth": []} for name in names}
for turn in range(1, turns + 1):
    ours = json.load(open(f"{out}/link-{turn}.json"))
    row = max((r for r in ours["suites"]["link"]["rows"] if r["bytes"] <= 512 << 20), key=lambda r: r["bytes"])
    text = open(f"{out}/nvbandwidth-{turn}.json").read()
    theirs = {t["name"]: t for t in json.loads(text[text.index("{"):])["nvbandwidth"]["testcases"]}
    for name, test in names.items():
        if theirs[test]["status"] != "Passed":
            sys.exit(f"nvbandwidth.sh: {test}: {theirs[test]['status']}")
        rates[name]["sidestream"].append(row[f"{name}_gbps"])
        rates[name]["nvbandwidth"].append(float(theirs[test]["bandwidth_matrix"][0][column]))
        print(f"turn {turn} {name} {row['bytes'] >> 20} MiB: sidestream {rates[name]['sidestream'][-1]:.2f} GB/s, "
              f"nvbandwidth {rates[name]['nvbandwidth'][-1]:.2f} GB/s")
table, good = {}, True
for name, rate in rates.items():
    a, b = (statistics.median(rate[who]) for who in ("sidestream", "nvbandwidth"))
    held = abs(a / b - 1) <= within / 100
    good = good and held
    table[name] = {"sidestream_gbps": a, "nvbandwidth_gbps": b, "ratio": a / b, "within_percent": within, "held": held, "turns": rate}
    print(f"{name}: {a:.2f} / {b:.2f} = {a / b:.4f}: {'within' if held else 'NOT within'} {within:g} %")
with open(f"{out}/nvbandwidth.json", "w") as file:
    json.dump({"simulated": ours["simulated"], "device": ours["name"], "bytes": row["bytes"], "rates": table}, file, indent=2)
    file.write("\n")
sys.exit(0 if good else 1)
PY
