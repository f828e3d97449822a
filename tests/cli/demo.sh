# The demo on the software device, where times are exact: textbook equals serial, reordered and sidestream meet the bound.
. "$CLI_TESTS/lib.bash"

cat >check.py <<'PY'
import json, sys
d = json.load(open("out"))
mode = sys.argv[1]
keys = {"device", "name", "simulated", "dim", "math", "items", "item_bytes", "result_bytes", "repeats", "results", "transfer_s",
        "compute_s", "result_s", "transfer_alone_s", "result_alone_s", "bound_s", "schedules", "errors"}
assert set(d) == keys, set(d) ^ keys
rows = {r["name"]: r for r in d["schedules"]}
for r in d["schedules"]:
    assert set(r) == {"name", "depth", "streams", "time_s", "speedup", "bound_ratio", "compute_busy", "copy_hidden", "checksum"}, r
    assert r["checksum"] == d["schedules"][0]["checksum"] and len(r["checksum"]) == 16
    assert abs(r["bound_ratio"] - r["time_s"] / d["bound_s"]) < 1e-6
    assert abs(r["speedup"] - rows["pinned"]["time_s"] / r["time_s"]) < 1e-6
    assert r["bound_ratio"] >= 0.98 and 0 <= r["compute_busy"] <= 1 and 0 <= r["copy_hidden"] <= 1, r
assert d["errors"] == [] and d["simulated"] is True
n, t, c, o = d["items"], d["transfer_s"], d["compute_s"], d["result_s"] or 0
ours = [r for r in d["schedules"] if r["name"].startswith("sidestream")]
assert ours
if mode == "plain":
    assert o == 0 and abs(d["bound_s"] - ((n - 1) * max(t, c) + t + c)) < 1e-9
    assert abs(rows["pinned"]["time_s"] - n * (t + c)) < 1e-9
    assert rows["textbook"]["time_s"] >= 0.99 * rows["pinned"]["time_s"]
    assert rows["textbook"]["copy_hidden"] == 0
if mode != "one-engine":
    assert abs(rows["textbook-reordered"]["bound_ratio"] - 1) < 0.02, rows
    assert all(r["bound_ratio"] <= 1.02 for r in ours if r["depth"] >= 2), ours
assert rows["pageable"]["time_s"] > rows["pinned"]["time_s"]
if len(sys.argv) > 2:
    assert [(r["depth"], r["streams"]) for r in ours] == eval(sys.argv[2]), ours
PY

small="demo -d sim --dim 128 --items 7"
t plain 0 '{*}' '' $small --json
py plain-json check.py plain '[(2, 1), (3, 1), (4, 1)]'
t results 0 '{*}' '' $small --results --json
py results-json check.py results
t depths-streams 0 '{*}' '' $small --depth 3,2 --streams 1..3 --json
py depths-streams-json check.py plain '[(3, 1), (2, 1), (3, 2), (3, 3)]'
t bf16 0 '*"math": "bf16"*"item_bytes": 32768*' '' $small --math bf16 --json
py bf16-json check.py plain
t tf32 0 '{*}' '' $small --math tf32 --json
py tf32-json check.py plain
t compute-bound 0 '{*}' '' demo -d sim:h200,fp32_tflops=1 --dim 128 --items 7 --json
py compute-bound-json check.py plain
t one-engine 0 '{*}' '' demo -d sim:one-copy-engine --dim 128 --items 7 --results --json
py one-engine-json check.py one-engine
t one-item 0 '{*}' '' demo -d sim --dim 64 --items 1 --json
py one-item-json check.py results
seeds="1 2 3 4 5 6 7 8 9 10 11 12"
if under thread; then seeds="1 2 3"; fi
for seed in $seeds; do # a missing wait shows in about one of three
    t "seed=$seed" 0 '{*}' '' demo -d sim:h200,seed=$seed,check=1 --dim 64 --items 20 --results --streams 2 --json
done

t text 0 '*simulated H200*bound*schedule*pageable*pinned*textbook*textbook-reordered*sidestream-2*equal, bit for bit*H2D*│*compute*┬*covers compute i*' '' $small
LANG=en_US.ISO-8859-1 LC_ALL= t ascii 0 '*schedule*H2D *|*+|*' '' $small
if LC_ALL=C grep -q '[^ -~]' out; then fail ascii-only "bytes over 126"; else ok ascii-only; fi
t files 0 '*' '' $small --svg d.svg --trace d.json
cat >files.py <<'PY'
import json, xml.dom.minidom
svg = xml.dom.minidom.parse("d.svg")
texts = [t.firstChild.data for t in svg.getElementsByTagName("text")]
assert {"textbook", "textbook-reordered", "sidestream-2"} <= set(texts), texts
events = [e for e in json.load(open("d.json"))["traceEvents"] if e["ph"] == "X"]
assert len(events) == 14 and {e["args"]["item"] for e in events} == set(range(7)), events
PY
py files-read files.py
t svg-folder 1 '' "sidestream: cannot write output 'none/d.svg': No such file or directory" $small --svg none/d.svg
t svg-full 1 '*' "sidestream: writing output '/dev/full': No space left on device" $small --svg /dev/full
under thread || # multiplies 1024 x 1024 on one thread
    t stdout-default 0 '*1024 x 1024*' '' demo -d sim --items 1 --depth 2
t device-memory 4 '' 'sidestream: the demo needs * of device memory and 1 MiB is free; lower --items, --dim or --depth' demo -d sim:h200,memory=1M --dim 256
t too-large 4 '' 'sidestream: the demo needs * lower --items, --dim or --depth' demo -d sim --dim 65536 --items 10000
t no-kernels 3 '' 'sidestream: *kernels*' demo -d sim:h200,kernels=0
# A device that fails at its Nth call: an error, never a hang, a crash or a success.
for nth in 2 20 60 100 300; do
    t "fail=$nth" 1 '*' 'sidestream: *scripted*' demo -d sim:h200,fail=$nth --dim 64
done
for nth in 30 60 300; do
    t "hang=$nth" 5 '' 'sidestream: * did not *' demo -d sim:h200,hang=$nth --dim 64
    t "lose=$nth" 1 '*' 'sidestream: *' demo -d sim:h200,lose=$nth --dim 64
done
t no-memory-left 4 '' 'sidestream: *' demo -d sim:h200,fail=60,fail_status=no_device_memory --dim 64
clean nothing-left

SIDESTREAM_DISABLE=1 t disabled 0 '{*}' '*' $small --json
# Some 20 schedules, each short: what is in flight is awaited.
"$SIDESTREAM" demo -d sim --dim 128 --items 400 --depth 1..8 --streams 1..12 >out 2>err </dev/null &
pid=$!
until_it catches_int $pid
sleep 0.3
kill -INT $pid
wait $pid
code=$?
if [ $code -eq 130 ] && [ ! -s out ]; then ok interrupted; else fail interrupted "exit code $code"; fi
finish
