# Bench on the software device, where times are exact: what it measures must be the model's own numbers. Its other suites: bench_suites.sh.
. "$CLI_TESTS/lib.bash"

cat >check.py <<'PY'
import json, sys
d = json.load(open("out"))
h2d, d2h, latency, both, pageable = (float(x) for x in sys.argv[1:])
assert d["simulated"] is True and "simulated" in d["name"] and d["errors"] == []
m = d["memory"]
assert 0 < m["host_peak_bytes"] <= m["host_limit_bytes"] and 0 < m["device_peak_bytes"] <= m["device_limit_bytes"], m
l = d["suites"]["link"]
near = lambda a, b, by=0.01: abs(a - b) <= by * b + 1e-9
for name, gbps in ("h2d", h2d), ("d2h", d2h), ("pageable_h2d", min(h2d, pageable)), ("pageable_d2h", min(d2h, pageable)):
    assert near(l["fit"][name]["gbps"], gbps) and near(l["fit"][name]["latency_s"], latency), (name, l["fit"][name])
    for r in l["rows"]:
        s = r[name + "_s"]
        exact = latency + r["bytes"] / (gbps * 1e9)
        assert near(s["median"], exact, 0.001) and s["least"] <= s["median"] <= s["most"], (name, r["bytes"], s, exact)
        assert len(s["samples"]) == d["samples"]
        assert near(r[name + "_gbps"], r["bytes"] / s["median"] / 1e9, 1e-6)
assert near(l["fit"]["both_gbps"], both) and near(l["fit"]["both_h2d_gbps"], both * h2d / (h2d + d2h), 0.1), l["fit"]
large, small = l["latency"]["behind_bytes"], l["latency"]["bytes"]
for name, gbps in ("h2d", h2d), ("d2h", d2h):
    alone = latency + small / (gbps * 1e9)
    behind = alone + latency + large / (gbps * 1e9)
    for clock in ("device_s", "host_s"):
        assert near(l["latency"][name + "_alone"][clock]["median"], alone, 0.001), (name, clock, l["latency"])
        assert near(l["latency"][name + "_behind"][clock]["median"], behind, 0.002), (name, clock, l["latency"], behind)
assert [r["bytes"] for r in l["rows"]][0] == 4096 and l["link_in_use"]["slower_than_possible"] is False
PY
cat >launch.py <<'PY'
import json, sys
d = json.load(open("out"))
kernels = sys.argv[1] == "kernels"
assert d["errors"] == [] and d["clock"] == ("device" if kernels else "host")
l = d["suites"]["launch"]
c = l["calls"]
near = lambda a, b: abs(a - b) <= 2e-9
assert set(c) == {"copy", "record", "wait", "query_busy", "query_done"} | ({"op"} if kernels else set())
copy = 7700e-9 + 4096 / 55.3e9
assert all(near(c["copy"][k]["median"], copy) for k in ("in_a_row_s", "alone_s", "known_s")), c["copy"]
assert all(c[k]["host_s"]["median"] == 0 for k in c if k != "query_busy")  # queueing costs no virtual time
assert near(c["query_busy"]["host_s"]["median"], 1e-6 if kernels else 0)   # nothing is held back without kernels
for k in ("handover_copy_s", "handover_op_s", "handover_pipeline_s") if kernels else ():
    assert near(l[k]["median"], 0), l[k]
assert near(l["queue_s"]["median"], 0) and near(l["start_s"]["median"], 0), l
PY

b="bench -d sim"
t link 0 '{*}' '' $b link --json
py link-model check.py 55.3 55.3 7.7e-6 110.6 10
t quick 0 '{*"quick": true*}' '' $b link --json --quick
py quick-model check.py 55.3 55.3 7.7e-6 110.6 10
t one-engine 0 '{*}' '' bench link --json -d sim:one-copy-engine
py one-engine-model check.py 55.3 55.3 7.7e-6 55.3 10
t uneven 0 '{*}' '' bench link --json --samples 3 -d sim:h200,h2d_gbps=20,d2h_gbps=40,copy_latency_ns=5000,pageable_gbps=4
py uneven-model check.py 20 40 5e-6 60 4
t a100 0 '{*simulated A100*}' '' bench link --json --quick -d sim:a100-pcie4
t no-kernels 0 '{*"clock": "host"*}' '' bench link launch --json --quick -d sim:h200,kernels=0
py no-kernels-link check.py 55.3 55.3 7.7e-6 110.6 10
py no-kernels-launch launch.py copies
t launch 0 '{*}' '' $b launch --json
py launch-model launch.py kernels
for seed in 1 2 3 4 5; do # a missing wait shows as a wrong byte
    t "seed=$seed" 0 '{*"errors": \[\]*}' '' bench link launch --json --quick -d sim:h200,seed=$seed,check=1
done
t text 0 '*simulated: times are of a model*1 sample of each figure, timed by device events*link:*63.0 GB/s*4 KiB*H2D *7.70 us*55.3 GB/s*behind*launch:*event record*Taken at most:*' \
    '' $b link launch --quick
t host-clock 0 "*the host's clock: there are no kernels*" '' bench launch -d sim:h200,kernels=0

# A copy faster than the link can be.
t too-fast 6 '{*measuring error*}' 'sidestream: measuring error: H2D * faster than the 63.0 that the link can do*' \
    bench link --json --quick -d sim:h200,h2d_gbps=70,copy_latency_ns=100
# Within the share of what there is.
t share 0 '*Within --share=25 copies of at most 256 KiB fit.*256 KiB*' '' bench link -d sim:h200,memory=8M
t share-none 4 '*' 'sidestream: link needs * --share=1 leaves less' bench link --share=1 -d sim:h200,memory=8M
t share-launch 4 '*' 'sidestream: 4 KiB of device memory is more than * --share=1 leaves' bench launch --share=1 -d sim:h200,memory=100K
t one-sample 0 '{*"samples": 7,*}' '' $b launch --json --samples 7

# Profiles. XDG_CACHE_HOME: nothing of the user's is touched.
export XDG_CACHE_HOME=$PWD/cache
cat >profile.py <<'PY'
import json, sys
p = json.load(open(sys.argv[1]))
assert p["sidestream_machine"] == 1 and p["from"] == "simulated" and p["copy_engines"] == 2, p
near = lambda a, b: abs(a - b) <= 0.01 * b
for name, gbps in ("h2d", float(sys.argv[2])), ("d2h", 55.3), ("pageable_h2d", 10), ("pageable_d2h", 10):
    assert near(p[name]["gbps"], gbps) and near(p[name]["latency_s"], 7.7e-6), (name, p[name])
assert near(p["both_gbps"], float(sys.argv[2]) + 55.3) and p["queue_s"] == p["handover_s"] == p["start_s"] == 0, p
PY
t save-file 0 '*' "sidestream: the simulated profile is saved in 'p.json'"$'\n'"sidestream: not measured, so kept from the software device's model: pin, stage, blocks" \
    bench link launch --quick -d sim:h200,h2d_gbps=40 --save=p.json
py save-file-read profile.py p.json 40
# A second run keeps what the file has, and of another device's file nothing.
sed -zi 's/"pin_s_per_gib": [^,]*/"pin_s_per_gib": 0.777/; s/,[^,]*"check"[^}]*}\n*$/\n}\n/' p.json # changed on purpose: without its checksum
t save-more 0 '*' '*not measured, so kept from the profile that was there: pin, stage, blocks, launch' \
    bench link --quick -d sim:h200,h2d_gbps=40 --save=p.json
if grep -q '"pin_s_per_gib": 0.777' p.json; then ok save-kept; else fail save-kept "$(grep pin_s p.json)"; fi
t save-other 0 '*' "*not measured, so kept from the software device's model: pin, stage, blocks, launch" bench link --quick -d sim --save=p.json
t save-folder 0 '{*"saved": "*/cache/sidestream/machine-*.json"*}' "sidestream: the simulated profile is saved in '$PWD/cache/sidestream/machine-*.json'*" \
    $b link launch --quick --json --save
py save-folder-read profile.py cache/sidestream/machine-*.json 55.3
t save-again 0 '*' '*' $b launch --quick --save
t not-saved 0 '{*"saved": null*}' '' $b launch --quick --json
t save-special 2 '' "sidestream: --save: '/dev/null' is there already and is not a file" $b launch --save=/dev/null
t save-nowhere 1 '' "sidestream: cannot write output '/proc/p.json': *" $b launch --save=/proc/p.json
t save-empty 2 '' "sidestream bench: --save: the name is empty; *" $b --save=
t save-wrong 6 '*' 'sidestream: measuring error: *nothing is saved' \
    bench link --quick -d sim:h200,h2d_gbps=70,copy_latency_ns=100 --save=wrong.json
t save-failed 1 '' 'sidestream: *' bench link --quick --json -d sim:h200,fail=300 --save=wrong.json
if [ -e wrong.json ]; then fail save-wrong-file "it is there"; else ok save-wrong-file; fi

# Arguments.
t no-suite 2 '' "sidestream bench: 'lnk' is nothing to measure; want link, *or all*" $b lnk
t samples 2 '' "sidestream bench: --samples: '0' is not a whole number from 1 to 100*" $b --samples 0
t share-large 2 '' "sidestream bench: --share: '91' is not a whole number from 1 to 90*" $b --share 91
t share-unit 2 '' "sidestream bench: --share: '25%' is not *" $b --share=25%
t streams 2 '' "sidestream bench: --streams: '9' is not a list *" $b --streams 9
t no-device 3 '' "sidestream: cannot open device 'cuda:99'*" bench -d cuda:99
if "$SIDESTREAM" $b launch >/dev/full 2>err; then fail full "exit code 0"; else ok full; fi

# A device that fails at its Nth call: an error, never a hang, a crash or a success.
for nth in 2 20 60 100 300 600; do
    t "fail=$nth" 1 '' 'sidestream: *scripted*' bench link launch --quick --json -d sim:h200,fail=$nth
done
for nth in 2 30 90; do
    t "hang=$nth" 5 '' 'sidestream: *' bench link --quick --json -d sim:h200,hang=$nth
    t "lose=$nth" 1 '' 'sidestream: *' bench link --quick --json -d sim:h200,lose=$nth
done
t no-pinning 4 '' 'sidestream: *' bench link --json -d sim:h200,refuse_pinning=1

"$SIDESTREAM" $b link launch --json --samples 100 --save=interrupted.json >out 2>err </dev/null &
pid=$!
until_it catches_int $pid
sleep 0.3
kill -INT $pid
wait $pid
code=$?
if [ $code -eq 130 ] && [ ! -s out ] && [ ! -e interrupted.json ]; then ok interrupted; else fail interrupted "exit code $code"; fi
clean nothing-left

# The comparison with nvbandwidth, against a program that prints what nvbandwidth would.
cat >nv <<'SH'
#!/bin/sh
echo "$*" >nv.arguments
cat <<JSON
{"nvbandwidth": {"testcases": [
 {"name": "host_to_device_memcpy_ce", "status": "Passed", "bandwidth_matrix": [["$(cat nv.rate)"]]},
 {"name": "device_to_host_memcpy_ce", "status": "Passed", "bandwidth_matrix": [["45.96"]]}]}}
JSON
SH
chmod +x nv
compare="$CLI_TESTS/../../bench/nvbandwidth.sh"
echo 45.9 >nv.rate
if ! have python3; then
    skip nvbandwidth "no python3"
elif ! "$compare" ./nv --sidestream "$SIDESTREAM" --out kept --device sim --turns 2 --quick 1 >out 2>err; then
    fail nvbandwidth "$(cat out)"
elif ! grep -q '^h2d: 45.97 / 45.90 = 1.001.: within 2 %$' out || [ "$(ls kept)" != "$(printf '%s\n' link-1.json link-2.json nvbandwidth-1.json nvbandwidth-2.json nvbandwidth.json)" ] ||
    ! grep -q -- '-b 2 ' nv.arguments; then
    fail nvbandwidth "$(cat out; ls kept)"
else
    ok nvbandwidth
    echo 44.9 >nv.rate
    "$compare" ./nv --sidestream "$SIDESTREAM" --out kept --device sim --turns 1 --quick 1 >out 2>err
    if [ $? = 1 ] && grep -q '^h2d: .* NOT within 2 %$' out; then ok nvbandwidth-off; else fail nvbandwidth-off "$(cat out)"; fi
fi
finish
