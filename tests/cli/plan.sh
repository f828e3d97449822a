# Plans, on the software device's model and on profiles: figures, advice, traces, drawings, and what is refused.
. "$CLI_TESTS/lib.bash"

docs=$CLI_TESTS/../../docs
small="--items=100 --bytes=64M --compute=2.7ms"

cat >check.py <<'PY'
import json, sys
d = json.load(open("out"))
keys = {"machine", "work", "h2d_s", "compute_s", "d2h_s", "stage_s", "serial_s", "pageable_s", "overlapped_s", "bound_s", "speedup",
        "speedup_most", "transfer_share", "bound", "verdict", "verdict_text", "compute_busy", "depth", "chunk_bytes", "device_bytes",
        "pinned_bytes", "depths", "advice"}
assert set(d) - {"trace_s"} == keys, set(d) ^ keys
base = d["pageable_s"] if d["work"]["pageable"] and d["pageable_s"] else d["serial_s"]
assert abs(d["speedup"] - base / d["overlapped_s"]) < 1e-6
assert d["overlapped_s"] >= 0.999 * d["bound_s"] and 0 <= d["compute_busy"] <= 1 and 0 <= d["transfer_share"] <= 1
assert [r["depth"] for r in d["depths"]] == list(range(1, 9))
if d["depth"] <= 8:
    assert abs(d["depths"][d["depth"] - 1]["time_s"] - d["overlapped_s"]) < 1e-12
assert all(r["device_bytes"] == d["depths"][0]["device_bytes"] * r["depth"] for r in d["depths"])
for a in d["advice"]:
    assert set(a) == {"id", "text", "time_s", "faster"} and a["faster"] >= 1.02
    assert abs(a["faster"] - d["overlapped_s"] / a["time_s"]) < 1e-6
assert [a["faster"] for a in d["advice"]] == sorted((a["faster"] for a in d["advice"]), reverse=True)
for test in sys.argv[1:]:
    ids = {a["id"] for a in d["advice"]}
    assert eval(test), (test, d)
PY

# ---- figures

t plain 0 '{*}' '' plan -d sim $small --json
py plain-json check.py 'd["machine"]["figures"] == "simulated"' 'd["bound"] == "compute"' 'd["verdict"] == "pays"' 'd["depth"] == 2' \
    'abs(d["overlapped_s"] - (100 * 2.7e-3 + d["h2d_s"])) < 1e-8' 'abs(d["serial_s"] - 100 * (2.7e-3 + d["h2d_s"])) < 1e-8' \
    'ids == {"compute"}' 'd["advice"][0]["faster"] > 1.9'
t text 0 '*machine*simulated H200 (sim:h200)*simulated: of a model, not of hardware*serial*392 ms*overlapped*271 ms*1.45x with 2 buffers*limited by*compute*Overlap pays: 1.45x.*' '' plan -d sim $small
t link-bound 0 '{*}' '' plan -d sim --items=1000 --bytes=64M --compute=10us --json
py link-bound-json check.py 'd["bound"] == "h2d"' 'd["verdict"] == "not"' '"dtype" in ids' \
    'abs([a for a in d["advice"] if a["id"] == "dtype"][0]["faster"] - 2) < 0.05'
t results 0 '{*}' '' plan -d sim --items=100 --bytes=64M --result-bytes=64M --compute=100us --json
py results-json check.py 'd["d2h_s"] > 1e-3' '{"dtype", "results"} & ids' 'd["work"]["result_bytes"] == 64 << 20'
t one-engine 0 '{*}' '' plan -d sim:one-copy-engine --items=100 --bytes=64M --result-bytes=64M --compute=100us --json
py one-engine-json check.py 'd["bound"] == "link"' '"results" in ids'
t pageable 0 '{*}' '' plan -d sim --items=20 --bytes=64M --compute=1ms --pageable --json
py pageable-json check.py 'd["pageable_s"] > d["serial_s"]' 'd["pinned_bytes"] > 0' 'd["chunk_bytes"] <= 4 << 20'
t pageable-text 0 '*pageable*the same with plain copies*pinned memory to stage through, in pieces of*' '' plan -d sim --items=20 --bytes=64M --compute=1ms --pageable
t jitter 0 '{*}' '' plan -d sim --items=1000 --bytes=64M --compute=1.2ms --jitter=50% --json
py jitter-json check.py 'd["depth"] > 2' 'd["work"]["jitter"] == 0.5'
t jitter-form 0 '{*}' '' plan -d sim --items=1000 --bytes=64M --compute=1.2ms --jitter=0.5 --json
py jitter-form-json check.py 'd["work"]["jitter"] == 0.5'
t source 0 '*limited by  the source*a source twice as fast*' '' plan -d sim $small --source=10ms
t streams 0 '*4 compute streams*change nothing here*' '' plan -d sim $small --streams=4
t depth-one 0 '{*}' '' plan -d sim $small --depth=1 --json
py depth-one-json check.py 'd["bound"] == "depth"' 'd["depth"] == 1' 'ids >= {"depth"}'
t depth-many 0 '*     20 *<- planned*' '' plan -d sim $small --depth=20
t one-item 0 '{*}' '' plan -d sim --items=1 --bytes=64M --compute=1ms --json
py one-item-json check.py 'd["verdict"] == "not"' '"smaller" in ids' '"one item" in d["verdict_text"]'
t one-tiny 0 '*1.00x with 1 buffer*Overlap does not pay: 1.00x; one item has nothing to overlap with but its own end.*' '' \
    plan "--machine=$CLI_TESTS/plan_h200.json" --items=1 --bytes=4K --compute=1us
t one-pageable 0 '*Staging by threads pays: 3.??x; one item has nothing else to overlap with.*' '' \
    plan "--machine=$CLI_TESTS/plan_h200.json" --items=1 --bytes=64M --compute=1ms --pageable
t tiny-items 0 '*100 % of the serial time is not compute*Overlap does not pay: *; the items are too small or too few: *' '' \
    plan "--machine=$CLI_TESTS/plan_h200.json" --items=1000000 --bytes=1B --compute=1ns
t deep-few 0 '{*}' '' plan "--machine=$CLI_TESTS/plan_h200.json" --items=3 --bytes=8K --compute=33us --depth=64 --json
py deep-few-json check.py 'd["bound"] != "depth"' '"depth" not in ids'
t long 0 '*serial *10 days *overlapped *10 days *' '' plan -d sim:h200,memory=63T --items=10 --bytes=1T --compute=86400s
t many 0 '{*}' '' plan --items=1000000000000 --bytes=1T --compute=1s --budget=40T --json -d sim:h200,memory=63T
py many-json check.py 'd["overlapped_s"] > 1e12'
t tiny 0 '{*}' '' plan -d sim --items=1 --bytes=1B --compute=1ns --json
py tiny-json check.py

# ---- budgets

t budget 0 '{*}' '' plan -d sim $small --jitter=1 --budget=130M --json
py budget-json check.py 'd["depth"] == 2' 'd["depths"][1]["fits"] and not d["depths"][2]["fits"]' '"budget" in ids'
t budget-text 0 '*over the budget*' '' plan -d sim $small --budget=130M
t budget-small 2 '' 'sidestream: no plan: one slot takes 67108864 bytes, * --budget sets it' plan -d sim $small --budget=32M
t budget-depth 2 '' 'sidestream: no plan: depth 3 takes *: use depth 2*' plan -d sim $small --budget=130M --depth=3
t device-small 2 '' "sidestream: no plan: *; it is the device's memory" plan -d sim:h200,memory=32M $small
t budget-large 0 '*' 'sidestream: --budget is more than the device has; planning for its 200 MiB' plan -d sim:h200,memory=200M $small --budget=1G

# ---- profiles

cp "$CLI_TESTS/plan_h200.json" h200.json # estimated
t machine 0 '*NVIDIA H200 (profile h200.json)*estimated from the link*bench --save*1.45x with 2 buffers*' '' plan --machine=h200.json $small
t machine-json 0 '{*}' '' plan --machine=h200.json $small --json
py machine-json-read check.py 'd["machine"]["figures"] == "estimated"' 'd["machine"]["h2d_gbps"] == 55.45'
sed 's/"estimated"/"measured"/; s/"taken": ""/"taken": "2026-11-30T08:15:00Z"/' h200.json >measured.json
t measured 0 '*figures     measured 2026-11-30T08:15:00Z*' '' plan --machine=measured.json $small
SIDESTREAM_DEVICE=nonsense t machine-needs-no-device 0 '*NVIDIA H200*' '' plan --machine=h200.json $small
t small-items 0 '*limited by  the host*larger items: * as one*' '' plan --machine=h200.json --items=1000 --bytes=64K --compute=5us
t machine-none 1 '' 'sidestream: --machine: no machine profile none.json: No such file or directory' plan --machine=none.json $small
sed 's/55.45/-1/' h200.json >bad.json
t machine-bad 1 '' 'sidestream: --machine: bad.json, line 10, byte 39 (offset 258): -1 is out of range*' plan --machine=bad.json $small
head -c 300 h200.json >cut.json
t machine-cut 1 '' 'sidestream: --machine: cut.json, line * (offset 300): the text ends*' plan --machine=cut.json $small
sed 's/"sidestream_machine": 1/"sidestream_machine": 2/' h200.json >newer.json
t machine-newer 1 '' 'sidestream: --machine: newer.json, line 2, *a profile of version 2*' plan --machine=newer.json $small
t machine-folder 1 '' 'sidestream: --machine: . is not a regular file' plan --machine=. $small
t machine-twice 2 '' '*--machine and --device each name a machine; give one of them*' plan --machine=h200.json -d sim $small
printf 'x' >env.json # of no business to the software device
SIDESTREAM_MACHINE=env.json t env-sim 0 '*simulated H200*' '' plan -d sim $small

# ---- traces

t make-trace 0 '*' '' demo -d sim --dim=256 --items=12 --results --trace=run.json
t from 0 '{*}' '' plan -d sim --from=run.json --json
py from-json check.py 'd["work"]["items"] == 12' 'd["work"]["item_bytes"] == 262144' 'd["work"]["result_bytes"] == 262144' \
    'abs(d["overlapped_s"] - d["trace_s"]) < 0.02 * d["trace_s"]'
t from-text 0 '*trace * the run that the figures are from*' '' plan -d sim --from=run.json
t from-changed 0 '{*}' '' plan -d sim --from=run.json --items=1000 --compute=1ms --bytes=1M --result-bytes=2M --json
py from-changed-json check.py '(d["work"]["items"], d["work"]["item_bytes"], d["work"]["result_bytes"], d["work"]["compute_s"]) == (1000, 1 << 20, 2 << 20, 1e-3)'
trace() { # NAME ERR TEXT [ARGUMENT...]
    local name=$1 err=$2
    printf '%s' "$3" >"$name.json"
    shift 3
    t "$name" 1 '' "sidestream: trace '$name.json'$err" plan -d sim --from="$name.json" "$@"
}
x='{"ph":"X","ts":0,"dur":5'
trace trace-empty ', line 1, byte *' ''
trace trace-text ', line 1, byte *' 'hello'
trace trace-cut ', line 1, byte *' '{"traceEvents":[{"ph":"X"'
trace trace-other ': no list "traceEvents"*' '{"events":[]}'
trace trace-list ': no list "traceEvents"*' '[1,2]'
trace trace-none ': no events of category H2D, compute or D2H*' '{"traceEvents":[1,null,{"ph":"X","cat":"kernel","ts":1,"dur":1}]}'
trace trace-no-item ': no event names its item*' "{\"traceEvents\":[$x,\"cat\":\"H2D\",\"args\":{\"bytes\":5}}]}"
trace trace-bad-item ': traceEvents\[0\]: args.item is not a whole number' "{\"traceEvents\":[$x,\"cat\":\"H2D\",\"args\":{\"item\":-1,\"bytes\":5}}]}"
trace trace-bad-bytes ': traceEvents\[0\]: args.bytes is not a whole number' "{\"traceEvents\":[$x,\"cat\":\"H2D\",\"args\":{\"item\":1,\"bytes\":\"5\"}}]}"
trace trace-no-bytes ': traceEvents\[0\]: args.bytes is not a whole number' "{\"traceEvents\":[$x,\"cat\":\"D2H\",\"args\":{\"item\":1}}]}"
trace trace-bad-time ': traceEvents\[0\]: ts or dur is not a number*' '{"traceEvents":[{"ph":"X","cat":"compute","ts":0,"dur":-1,"args":{"item":0}}]}'
trace trace-no-compute ' has no compute*give --compute' "{\"traceEvents\":[$x,\"cat\":\"H2D\",\"args\":{\"item\":0,\"bytes\":5}}]}"
trace trace-no-copies ' has no copies to the device*give --bytes' "{\"traceEvents\":[$x,\"cat\":\"compute\",\"args\":{\"item\":0}}]}"
trace trace-foreign ': no events of category H2D, compute or D2H*give --items, --bytes and --compute instead' \
    '{"schemaVersion":1,"traceEvents":[{"ph":"X","cat":"gpu_memcpy","ts":1,"dur":5,"args":{"bytes":100}}]}'
trace trace-far-bytes ': traceEvents\[0\]: *args.bytes more than 1 TiB' "{\"traceEvents\":[$x,\"cat\":\"H2D\",\"args\":{\"item\":0,\"bytes\":9000000000000000000}}]}"
trace trace-far-time ': traceEvents\[0\]: dur is more than a day*' '{"traceEvents":[{"ph":"X","cat":"compute","ts":0,"dur":1e300,"args":{"item":0}}]}'
printf '{"traceEvents":[{"ph":"X","ts":-90,"dur":5,"cat":"H2D","args":{"item":0,"bytes":9}},{"ph":"X","ts":-80,"dur":5,"cat":"compute","args":{"item":0}}]}' >before.json
t trace-before-zero 0 '{*}' '' plan -d sim --from=before.json --json
py trace-before-zero-json check.py 'abs(d["trace_s"] - 15e-6) < 1e-12'
t trace-completed 0 '{*}' '' plan -d sim --from=trace-no-compute.json --compute=1ms --json
t trace-missing 1 '' "sidestream: trace 'none.json': No such file or directory" plan -d sim --from=none.json
t trace-folder 1 '' "sidestream: trace '.': not a regular file" plan -d sim --from=.
# An item of several pieces, out of order, and what belongs to no item.
cat >pieces.json <<JSON
{"traceEvents":[{"ph":"M","name":"x"},$x,"cat":"compute","args":{"item":1}},$x,"cat":"H2D","args":{"item":1,"bytes":100}},
$x,"cat":"H2D","args":{"item":0,"bytes":60}},$x,"cat":"H2D","args":{"item":0,"bytes":40}},$x,"cat":"compute","args":{"item":0}},
{"ph":"X","ts":7.5,"dur":2.5,"cat":"D2H","args":{"item":0,"bytes":8}},$x,"cat":"D2H","args":{"item":1,"bytes":8}},
$x,"cat":"H2D","args":{"bytes":"not counted"}}]}
JSON
t pieces 0 '{*}' '' plan -d sim --from=pieces.json --json
py pieces-json check.py '(d["work"]["items"], d["work"]["item_bytes"], d["work"]["result_bytes"]) == (2, 100, 8)' \
    'abs(d["work"]["compute_s"] - 5e-6) < 1e-15' 'abs(d["trace_s"] - 10e-6) < 1e-12'

# ---- drawing

cp "$docs/h200.json" doc.json
t svg 0 '*' '' plan --machine=doc.json --items=100 --bytes=64M --compute=1.2ms --result-bytes=64M --svg=p.svg
cat >svg.py <<'PY'
import xml.dom.minidom
svg = xml.dom.minidom.parse("p.svg")
lines = svg.getElementsByTagName("polyline")
assert [l.getElementsByTagName("title")[0].firstChild.data for l in lines] == ["4 buffers", "3 buffers", "2 buffers", "1 buffer"]
two = [tuple(map(float, p.split(","))) for p in lines[2].getAttribute("points").split()]
assert len(two) > 50 and all(a[0] < b[0] for a, b in zip(two, two[1:])), two
assert all(0 < x < 760 and 0 < y < 440 for x, y in two)
top = min(two, key=lambda p: p[1])
assert 0.5 < (top[0] - 64) / (760 - 64 - 28) < 0.75, top # two of three lanes are copies: the best is where all three are equal
texts = [t.firstChild.data for t in svg.getElementsByTagName("text")]
assert any(t.startswith("this work: 67 %, 2.6") for t in texts), texts
assert not svg.getElementsByTagName("script") and not svg.getElementsByTagName("style")
PY
py svg-read svg.py
if sed 's,profile doc.json,profile docs/h200.json,' p.svg | cmp -s - "$docs/will-overlap-pay.svg"; then
    ok svg-of-the-document
else
    fail svg-of-the-document "docs/will-overlap-pay.svg is not what its command draws"
fi
t svg-pageable 0 '*' '' plan -d sim --items=3 --bytes=1M --compute=1us --pageable --source=1ms --jitter=2 --svg=q.svg
t svg-folder 1 '' "sidestream: cannot write output 'none/p.svg': No such file or directory" plan -d sim $small --svg=none/p.svg
t svg-full 1 '*' "sidestream: writing output '/dev/full': No space left on device" plan -d sim $small --svg=/dev/full
clean nothing-left

# A signal: nothing printed, or the figures and no drawing.
cat >interrupt.py <<'PY'
import os, signal, subprocess, sys
slow = "plan -d sim --items=1700 --bytes=1K --result-bytes=26M --compute=1ms --pageable --jitter=150% --svg=slow.svg".split()
for number in (signal.SIGINT, signal.SIGTERM):
    p = subprocess.Popen([os.environ["SIDESTREAM"], *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not any(f.startswith("slow.svg.") for f in os.listdir(".")) and p.poll() is None:
        pass # the drawing is opened before anything takes long
    p.send_signal(number)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err.startswith(b"sidestream: interrupted"), (p.returncode, err)
    assert not [f for f in os.listdir(".") if f.startswith("slow.svg")]
PY
py interrupted interrupt.py

# ---- what is refused

refuses() { # NAME TEXT ARGUMENT...
    local name=$1 text=$2
    shift 2
    t "$name" 2 '' "$text" plan -d sim "$@"
}
for bad in 0 -1 1.5 x '' 1K 99999999999999999999999; do
    refuses "items=$bad" "*--items: '*' is not a whole number from 1 to 1000000000000*" "--items=$bad" --bytes=1M --compute=1ms
    refuses "streams=$bad" "*--streams: '*' is not a whole number from 1 to 16*" $small "--streams=$bad"
    refuses "depth=$bad" "*--depth: '*' is not a whole number from 1 to 64*" $small "--depth=$bad"
done
for option in bytes result-bytes budget; do
    refuses "$option=8" "*--$option: '8' has no unit; write 8B, 8K or 8M*" $small "--$option=8"
    refuses "$option=0M" "*--$option: '0M' is zero*" $small "--$option=0M"
    refuses "$option=-8M" "*--$option: '-8M' is negative*" $small "--$option=-8M"
    refuses "$option=8MB" "*--$option: '8MB': MB may mean two things*" $small "--$option=8MB"
    refuses "$option=99T" "*--$option: '99T' is out of range*" $small "--$option=99T"
    refuses "$option=" "*--$option: '' is not an amount*" $small "--$option="
done
for option in compute source; do
    refuses "$option=5" "*--$option: '5' has no unit; write 5s, 5ms or 5us*" $small "--$option=5"
    refuses "$option=0ms" "*--$option: '0ms' is zero*" $small "--$option=0ms"
    refuses "$option=-1ms" "*--$option: '-1ms' is negative*" $small "--$option=-1ms"
    refuses "$option=nan" "*--$option: 'nan' is not a time*" $small "--$option=nan"
    refuses "$option=2d" "*--$option: '2d' has no unit that is known*" $small "--$option=2d"
    refuses "$option=1000000s" "*--$option: '1000000s' is out of range*" $small "--$option=1000000s"
done
refuses jitter=3 "*--jitter: '3' is out of range; 0 to 2 (200%) are possible*" $small --jitter=3
refuses jitter=201% "*--jitter: '201%' is out of range*" $small --jitter=201%
for bad in x -0.1 '' 5ms 1.; do
    refuses "jitter=$bad" "*--jitter: '$bad' is not a share; want one such as 0.3 or 30%*" $small "--jitter=$bad"
done
refuses nothing '*--items is missing; want --items=N --bytes=B --compute=T*or --from=TRACE*'
refuses no-bytes '*--bytes is missing*' --items=5 --compute=1ms
refuses no-compute '*--compute is missing*' --items=5 --bytes=1M
refuses argument "*'extra' is too much; plan takes options only*" $small extra
for option in svg from machine; do
    refuses "$option-empty" "*--$option: the name is empty*" $small "--$option="
done
t no-device 3 '' "sidestream: cannot open device 'cuda:77'*" plan -d cuda:77 $small
t bad-spec 2 '' "sidestream: cannot open device 'sim:nonsense'*" plan -d sim:nonsense $small

py document "$CLI_TESTS/docs_check.py" "$docs/will-overlap-pay.md" "$SIDESTREAM"
finish
