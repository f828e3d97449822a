# bench pin, stage, blocks, overlap: what they print, what they keep in the profile's figures, sick devices, shares, faults, signals.
. "$CLI_TESTS/lib.bash"

# For ThreadSanitizer each suite once: it takes minutes for what the other variants do in seconds.
if under thread; then
    for suite in pin stage overlap; do
        t $suite-threads 0 '*simulated*' '' bench $suite -d sim --quick
    done
    skip figures "ThreadSanitizer: of each suite one run"
    finish
    exit
fi

t pin 0 '*simulated*pin: seconds per GiB*pool, default threads*pool, one thread*no huge pages*allocator*in place, touched*in place, untouched*' '' \
    bench pin -d sim
t stage 0 '*simulated*stage: *GB/s*threads*memcpy alone*to the device*default*' '' bench stage -d sim
t blocks 0 '*simulated*blocks: *H2D*plain copy*loop*batch*gather*D2H*pack*' '' bench blocks -d sim --quick

t pin-json 0 '{*}' '' bench pin -d sim --json
cat >check_pin.py <<'PY'
import json
pin = json.load(open("out"))["suites"]["pin"]
ways = {row["way"]: row for row in pin["rows"]}
assert set(ways) == {"pool", "pool-1-thread", "pool-small-pages", "driver", "in-place-touched", "in-place-untouched"}, ways
for row in ways.values():
    assert row["pin_s_per_gib"]["median"] > 0 and row["unpin_s_per_gib"]["median"] > 0, row
assert ways["pool"]["registered"] and not ways["driver"]["registered"], ways
assert not ways["pool-small-pages"]["huge_pages"], ways
PY
py pin-figures check_pin.py
t pin-refused 0 "*default threads*driver's allocator*in place, touched*refused: *cannot pin*" '' bench pin -d sim:refuse_register=1
t pin-impossible 4 '*' 'sidestream: pin: *cannot be pinned*' bench pin -d sim:refuse_pinning=1

t stage-json 0 '{*}' '' bench stage -d sim --quick --json
cat >check_stage.py <<'PY'
import json
stage = json.load(open("out"))["suites"]["stage"]
rows = stage["rows"]
assert stage["item_bytes"] * stage["items"] > 0 and [row["default"] for row in rows].count(True) == 1 and rows[-1]["default"], rows
for row in rows:
    assert row["threads"] >= 1 and row["memcpy_gbps"]["median"] > 0, row
    # Staging costs no virtual time: the model's link is what is left.
    assert 0.9 < row["of_link"] <= 1.01, row
PY
py stage-figures check_stage.py
t stage-no-kernels 0 '*stage: *' '' bench stage -d sim:kernels=0
t stage-share 4 '*' '*more memory than --share leaves*' bench stage -d sim:memory=64M --share=1

t blocks-json 0 '{*}' '' bench blocks -d sim --json
cp out blocks1
cat >check_blocks.py <<'PY'
import json
whole = json.load(open("out"))
blocks = whole["suites"]["blocks"]
assert blocks["product_dim"] > 0 and blocks["product_s"] > 0, blocks
seen = set()
rate = {}
chosen = {}
for row in blocks["rows"]:
    key = row["kind"], row["path"], row["block_bytes"], row["count"]
    assert key not in seen
    seen.add(key)
    rate[key] = row["gbps"]["median"]
    assert row["beside_gbps"]["median"] > 0 and row["product_s"]["median"] > 0, row
    if row.get("chosen"):
        assert (row["kind"], row["block_bytes"], row["count"]) not in chosen
        chosen[row["kind"], row["block_bytes"], row["count"]] = row["path"]
    assert ("slow_down" in row) == (row["path"] != "plain"), row
    # The model's engines do not disturb each other.
    assert abs(row["beside_gbps"]["median"] / row["gbps"]["median"] - 1) < 1e-6, row
    assert abs(row.get("slow_down", 1) - 1) < 1e-6, row
assert {key[:2] for key in seen} == {("h2d", p) for p in ("plain", "loop", "batch", "gather")} | {
    ("d2h", p) for p in ("plain", "loop", "batch", "gather", "pack")}
# No path slows the model's products, so the fastest one is chosen; of equals, any.
assert chosen.keys() == {(key[0], *key[2:]) for key in seen}
for (kind, size, count), path in chosen.items():
    fastest = max(rate[key] for key in seen if (key[0], *key[2:]) == (kind, size, count) and key[1] != "plain")
    assert rate[kind, path, size, count] >= fastest * 0.999999, (kind, size, count, path)
assert max(rate.values()) <= whole["link"]["peak_gbps"], rate
assert min(key[2] for key in seen) == 1024 and max(key[2] for key in seen) == 2 << 20
memory = whole["memory"]
assert 0 < memory["host_peak_bytes"] <= memory["host_limit_bytes"] and 0 < memory["device_peak_bytes"] <= memory["device_limit_bytes"]
PY
py blocks-figures check_blocks.py
t blocks-again 0 '{*}' '' bench blocks -d sim --json
if cmp -s <(grep -v host_limit out) <(grep -v host_limit blocks1); then ok blocks-same-figures; else fail blocks-same-figures "two runs on the software device differ"; fi
t blocks-no-kernels 0 '*no products beside: *kernels=0*unsupported*gather is not supported: *pack is not supported: *' '' \
    bench blocks -d sim:kernels=0 --quick
t blocks-share 4 '*' '*more than the * that --share=1 leaves' bench blocks -d sim:memory=64M --share=1
t blocks-small-share 0 '*Taken at most: * device memory.' '' bench blocks -d sim:memory=64M --share=50 --quick

t overlap 0 '*simulated*overlap: *depth 1*depth 4*spin*' '' bench overlap -d sim --quick
t overlap-json 0 '{*}' '' bench overlap -d sim --streams 1..3 --json
cat >check_overlap.py <<'PY'
import json
rows = json.load(open("out"))["suites"]["overlap"]["rows"]
assert {row["depth"] for row in rows if row["streams"] == 1} >= {1, 2, 3, 4} and {row["streams"] for row in rows} == {1, 2, 3}
ratios = {row["compute_s"] / row["copy_s"] for row in rows}
assert min(ratios) < 0.2 and max(ratios) > 9, ratios
for row in rows:
    n, t, c, time_s = row["items"], row["copy_s"], row["compute_s"], row["time_s"]["median"]
    assert abs(row["bound_s"] - ((n - 1) * max(t, c) + t + c)) < 1e-9, row
    # The model's engines: two slots reach the bound, one slot is serial; and the plan knows it.
    assert abs(row["plan_s"] / time_s - 1) < 1e-2, row
    assert abs(time_s / (n * (t + c) if row["depth"] == 1 else row["bound_s"]) - 1) < 1e-3, row
PY
py overlap-figures check_overlap.py
t overlap-no-kernels 0 '*overlap: not measured, the device has no kernels*' '' bench overlap -d sim:kernels=0
t overlap-one-engine 0 '*overlap: *' '' bench overlap -d sim:one-copy-engine --quick
t overlap-streams 2 '' '*--streams: *' bench overlap -d sim --streams 0

# Whatever fails, it is said, and no crash. The last one is past the end of the run.
suites="pin stage blocks overlap" numbers="1 3 9 33 110 400 1600"
if under address; then numbers="2 33 400"; fi
for suite in $suites; do
    bad= ended=
    for fault in fail lose hang; do
        for n in $numbers $([ $fault != fail ] || echo 1000000); do
            timeout --kill-after=5 60 "$SIDESTREAM" bench $suite --quick -d sim:$fault=$n >out 2>err </dev/null
            code=$?
            case $code in
            0) ended=$n ;;
            1 | 2 | 3 | 4 | 5) [ -s err ] || bad="$bad $fault=$n says nothing" ;;
            *) bad="$bad $fault=$n exits $code" ;;
            esac
        done
    done
    if [ -n "$bad" ]; then
        fail $suite-faults "$bad"
    elif [ -z "$ended" ]; then
        fail $suite-faults "no run came to its end: $ended"
    else
        ok $suite-faults
    fi
done

# Ctrl-C: the samples would take much longer than the wait.
for suite in pin stage blocks overlap; do
    "$SIDESTREAM" bench $suite --samples 100 -d sim >out 2>err </dev/null &
    pid=$!
    until_it catches_int $pid
    sleep 0.3
    kill -INT $pid
    wait $pid
    code=$?
    if [ $code -eq 130 ] && grep -q interrupted err; then
        ok $suite-interrupted
    else
        fail $suite-interrupted "exit code $code"
    fi
done
finish
