# load: whole files, shards, selections; what was read is what the files hold; figures that belong together.
. "$CLI_TESTS/lib.bash"

have python3 || { skip all "no python3 to make files with"; finish; exit; }
cat >make.py <<'PY'
import json, random, struct
random.seed(1)

def make(path, tensors, pad=0):
    head, at = {}, 0
    for name, size in tensors:
        head[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode() + b" " * pad
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + random.randbytes(at))

make("one.safetensors", [("a", 100000), ("b", 0), ("c", 4097), ("d", 200000)])
make("odd.safetensors", [("a", 5), ("b", 64), ("c", 1)], 3)
make("many.safetensors", [(f"t.{i}", 16 * (i % 30)) for i in range(3000)])
make("none.safetensors", [])
make("s1.safetensors", [(f"layers.{i}.w", 50000) for i in range(8)])
make("s2.safetensors", [(f"layers.{i}.w", 50000) for i in range(8, 12)])
weights = {f"layers.{i}.w": "s1.safetensors" if i < 8 else "s2.safetensors" for i in range(12)}
json.dump({"metadata": {}, "weight_map": weights}, open("model.safetensors.index.json", "w"))
open("raw.bin", "wb").write(random.randbytes(70000))
PY
python3 make.py

for where in device host; do
    for file in one odd many none; do
        t "$file-$where" 0 '*loaded *verified*' '' load "$file.safetensors" -d sim --verify --to $where --piece 8K --pinned 32K
    done
    t "shards-$where" 0 'loaded     12 tensors, * from 2 files *verified*' '' load model.safetensors.index.json -d sim --verify --to $where
    t "raw-$where" 0 'loaded     1 tensor, 68.4 KiB from 1 file*verified*' '' load raw.bin --format raw -d sim --verify --to $where
done
t pread 0 '*read       * 297.0 KiB in *verified*' '' load one.safetensors -d sim --backend pread --verify
t repeat 0 '*load 1 *load 3 *verified*' '' load one.safetensors -d sim --repeat 3 --verify
t select 0 'loaded     5 tensors, 244.1 KiB *verified*' '' load model.safetensors.index.json -d sim --select 'layers.[0-2].w' --select 'layers.1?.w' --verify
t aligned 0 '*aligned    * were placed anew*' '' load odd.safetensors -d sim
SIDESTREAM_DISABLE=1 t disabled 0 '*verified*' '' load one.safetensors -d sim --piece 4K --verify
SIDESTREAM_VALIDATE=1 t validate 0 '*verified*' '' load many.safetensors -d sim --piece 4K --pinned 8K --verify

t json 0 '{*}' '' load model.safetensors.index.json -d sim --json --piece 16K --pinned 64K --verify --repeat 2
cat >check.py <<'PY'
import json
d = json.load(open("out"))
assert d["tensors"] == 12 and d["files"] == 2 and d["bytes"] == 600000 and d["moved_bytes"] == 0 and d["verified"] is True, d
assert d["piece_bytes"] == 16384 and d["pinned_bytes"] <= 65536 and d["slots"] * d["piece_bytes"] == d["pinned_bytes"], d
assert sum(r["pieces"] for r in d["read"]) == d["pieces"] == d["copies"] and sum(r["bytes"] for r in d["read"]) == 600000, d
assert len(d["times_s"]) == 2 and d["times_s"][1] == d["time_s"] > 0 and d["gbps"] > 0 and d["link_from"] == "of the model", d
assert d["bottleneck"] in ("link", "disk", "page cache", "memory", "pins", "too small") and d["simulated"] is True, d
assert d["arena_bytes"] >= 600000 and all(0 <= v for v in d["stages"].values()), d
PY
py json-keys check.py
t json-host 0 '*"link_gbps": null*"verified": null*' '' load one.safetensors -d sim --json --to host

mkfifo pipe
mkdir folder
head -c 1000 one.safetensors >short.safetensors
t missing 1 '' "sidestream: cannot open none.st: No such file or directory" load none.st -d sim
t pipe 1 '' "sidestream: pipe is no regular file" load pipe -d sim
t folder 1 '' "sidestream: no \*.safetensors in the folder folder" load folder -d sim
t short 1 '' "sidestream: short.safetensors, offset 1000: the file ends within tensor *" load short.safetensors -d sim
t no-match 2 '' "sidestream: no tensor of 'one.safetensors' matches --select 'x'; *" load one.safetensors --select x -d sim
t too-large 4 '' "sidestream: loading 'one.safetensors': *choose fewer*" load one.safetensors -d sim:h200,memory=100000
for nth in 5 9 15; do
    t "lose=$nth" 1 '' 'sidestream: *' load one.safetensors -d sim:h200,lose=$nth --piece 16K
done
# The example of docs/load-a-checkpoint.md, with the files of this test; the page shows it word by word.
example=$(dirname "$SIDESTREAM")/examples/example_load
if [ -x "$example" ]; then
    program=$SIDESTREAM SIDESTREAM=$example
    t example-index 0 '*load: layers.9.w *U8 * 50000 bytes*12 tensors, 0.6 MB in *first number of layers.9.w is ?? (U8)' '' --device sim model.safetensors.index.json layers.9.w
    t example-folder 0 '*and 2 others*' '' --device sim .
    t example-none 0 'load: 0 tensors, 0.0 MB *' '' --device sim none.safetensors
    t example-no-file 1 '' 'load: side_checkpoint_open: cannot open absent: No such file or directory' --device sim absent
    t example-no-name 1 '*' 'load: side_checkpoint_find: no tensor is named "x"' --device sim one.safetensors x
    t example-usage 2 '' 'usage: *PATH*' a b c
    SIDESTREAM=$program
else
    skip example "the examples are not built"
fi
cat >page.py <<'PY'
import re, sys
page, example = (open(path).read() for path in sys.argv[1:])
blocks = re.findall(r"^```c\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
shown = [block for block in blocks if block.startswith("static side_status")]
assert len(shown) == 2 and all(block in example for block in shown), [block for block in shown if block not in example]
PY
py page-shows-the-example page.py "$CLI_TESTS/../../docs/load-a-checkpoint.md" "$CLI_TESTS/../../examples/load.c"

t no-argument 2 '' '*want a FILE*' load
t two-arguments 2 '' "*'b' is too much*" load a b
t bad-backend 2 '' "*--backend 'x'*" load one.safetensors --backend x
t bad-piece 2 '' "*--piece: '5000B' is not a multiple of 4 KiB*" load one.safetensors --piece 5000B
t bad-where 2 '' "*--to 'disk'*" load one.safetensors --to disk
t no-device 3 '' '*cannot open device*' load one.safetensors -d cuda:99
finish
