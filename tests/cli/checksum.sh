# run checksum against xxhsum -H3, around every edge of XXH3's blocks and of the items.
. "$CLI_TESTS/lib.bash"

seed() { openssl enc -aes-128-ctr -nosalt -K 00 -iv 00 </dev/zero 2>/dev/null; }
have openssl || seed() { cat /dev/urandom; }
seed | head -c 5000000 >all

compare() { # NAME FILE ARGUMENT...
    local name=$1 file=$2
    shift 2
    t "$name" 0 "$(xxhsum -H3 "$file" 2>/dev/null)" '*' run checksum "$file" -d sim "$@"
}

if have xxhsum && [[ "$(printf a | xxhsum -H3 2>/dev/null)" == 'XXH3 (stdin) = '* ]]; then
    for bytes in 0 1 240 241 1023 1024 1025 1087 1088 1089 2048 2049 65536 65537 1000000 5000000; do
        head -c $bytes all >"f$bytes"
        under thread && [ $((bytes % 1024)) -gt 1 ] && continue
        compare "bytes=$bytes" "f$bytes"
    done
    for chunk in 1K 3K 64K 1M 1G; do
        compare "chunk=$chunk" f1000000 --chunk $chunk
    done
    compare depth=1 f1000000 --chunk 16K --depth 1
    compare depth=64 f1000000 --chunk 4K --depth 64
    compare threads=1 f1000000 --chunk 16K --threads 1
    compare threads=7 f1000000 --chunk 16K --threads 7
    "$SIDESTREAM" run checksum -d sim f65537 >sums 2>/dev/null
    if xxhsum --check sums >/dev/null 2>&1; then ok xxhsum-reads-it; else fail xxhsum-reads-it "xxhsum --check refuses $(cat sums)"; fi
else
    skip xxhsum "no xxhsum with -H3"
    for bytes in 0 1 240 241 1023 1024 1025 65537; do
        head -c $bytes all >"f$bytes"
    done
    head -c 1000000 all >f1000000
fi

t empty 0 'XXH3 (f0) = 2d06800538d394c2' '' run checksum f0 -d sim
t json 0 '{*}' '*' run checksum f1000000 -d sim --chunk 64K --json --svg r.svg --trace r.json
cat >check.py <<'PY'
import json, xml.dom.minidom
d = json.load(open("out"))
keys = {"op", "input", "output", "device", "simulated", "bytes_in", "bytes_out", "time_s", "gbps", "link_gbps", "link_share", "bottleneck",
        "stages", "checksum"}
assert set(d) == keys, set(d) ^ keys
assert d["bytes_in"] == 1000000 and d["bytes_out"] == 0 and len(d["checksum"]) == 16 and d["output"] is None
assert [s["name"] for s in d["stages"]] == ["source", "h2d", "compute", "d2h", "sink"]
assert all(s["busy"] is None or 0 <= s["busy"] <= 1 for s in d["stages"])
assert d["bottleneck"] in ("source", "link", "compute", "sink") and 0 < d["link_share"] <= 1.01
xml.dom.minidom.parse("r.svg")
events = [e for e in json.load(open("r.json"))["traceEvents"] if e["ph"] == "X"]
assert sum(e["args"]["bytes"] for e in events if e["cat"] == "H2D") == 1000000 // 1024 * 1024, events
PY
py json-keys check.py
SIDESTREAM_VALIDATE=1 t validate 0 "$(cat out >/dev/null; "$SIDESTREAM" run checksum f1000000 -d sim 2>/dev/null)" '*' run checksum f1000000 -d sim --chunk 16K
SIDESTREAM_DISABLE=1 t disabled 0 "$("$SIDESTREAM" run checksum f1000000 -d sim 2>/dev/null)" '*' run checksum f1000000 -d sim --chunk 16K

mkfifo pipe
mkdir folder
t missing 1 '' "sidestream: cannot read input 'none': No such file or directory" run checksum none -d sim
t pipe 1 '' "sidestream: input 'pipe' is a pipe; *" run checksum pipe -d sim
t folder 1 '' "sidestream: input 'folder' is a directory; *" run checksum folder -d sim
t device-file 1 '' "sidestream: input '/dev/zero' is a device or socket; *" run checksum /dev/zero -d sim
if [ "$(id -u)" -ne 0 ]; then
    chmod 000 f1
    t unreadable 1 '' "sidestream: cannot read input 'f1': Permission denied" run checksum f1 -d sim
else
    skip unreadable "root reads everything"
fi
t no-gpu 3 '' "sidestream: cannot open device 'cuda:99': *" run checksum f1000000 -d cuda:99
t no-kernels 3 '' "sidestream: checksum of 'f1000000': *kernels*" run checksum f1000000 -d sim:h200,kernels=0
t no-device-memory 4 '' "sidestream: checksum of 'f1000000': *" run checksum f1000000 -d sim:h200,memory=64K

for nth in 3 5 6 8; do # a device that hangs: its memory is kept, nothing is waited for twice
    t "hang=$nth" 5 '' '*' run checksum f1000000 -d sim:h200,hang=$nth
    t "lose=$nth" 1 '' '*' run checksum f1000000 -d sim:h200,lose=$nth
done

# A file that shrinks while it is read.
truncate -s 3G shrinking
"$SIDESTREAM" run checksum shrinking -d sim --chunk 1M >out 2>err </dev/null &
pid=$!
until_it has_open $pid shrinking
sleep 0.2
truncate -s 1M shrinking
wait $pid
code=$?
if [ $code -eq 1 ] && [ ! -s out ] && grep -q "^sidestream: checksum of 'shrinking': " err; then
    ok shrinking
else
    fail shrinking "exit code $code"
fi
finish
