# What ls prints of files, folders and shards; refusals and their codes.
. "$CLI_TESTS/lib.bash"

cat >make.py <<'PY'
import json, os, struct, sys

def save(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if path.startswith("one"):
        text += b" " * ((1 - len(text)) % 4)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)

f32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
save("one.safetensors", {"__metadata__": {"format": "pt", "no\u001bte": "a\\b\u009b"}, "w\u001b[1m": f32,
                         "big": {"dtype": "U8", "shape": [0, 2**64 - 1], "data_offsets": [24, 24]}}, bytes(24))
save("twice.safetensors", b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1")
save("blank.safetensors", b" {}", b"")
os.mkdir("model")
for i, name in enumerate("ab"):
    save(f"model/m-{i}.safetensors", {name: f32}, bytes(24))
open("model/model.safetensors.index.json", "w").write(json.dumps({"weight_map": {"a": "m-0.safetensors", "b": "m-1.safetensors"}}))
open("v.npy", "wb").write(b"\x93NUMPY\x01\x00\x37\x00{'descr': '<i2', 'fortran_order': False, 'shape': (2,)}" b"1234")
open("model/ghost.json", "w").write(json.dumps({"weight_map": {"a": "m-0.safetensors", "ghost": "m-0.safetensors"}}))
open("m.pt", "wb").write(b"PK\3\4" + bytes(60))
os.mkfifo("pipe")
open("r.raw", "wb").write(b"12345")
PY
py make make.py
t text 0 'one.safetensors: 2 tensors, *; 1 not aligned to their dtype
  metadata    format = pt
  metadata    no\\x1bte = a\\\\b\\u009b
*dtype*shape*bytes*align*name
*F32  *\[2, 3\]  *24 * w\\x1b\[1m
*U8  *\[0, 18446744073709551615\]  *0 * big' '' ls one.safetensors
t shards 0 '*model/m-0.safetensors: 1 tensor,* a
*model/m-1.safetensors: 1 tensor,* b' '' ls model
t others 0 '*v.npy: 1 tensor*I16 *\[2\] *4 * v
*r.raw: 1 tensor*U8 *\[5\] * r.raw' '' ls v.npy r.raw
t format 0 '*v.npy: 1 tensor*U8*\[69\]*v.npy' '' ls --format=raw v.npy
t twice 1 '*r.raw: 1 tensor*' 'sidestream: twice.safetensors, offset 62: tensor "x" stands twice, at offset 10 too' ls twice.safetensors r.raw
t lenient 0 '*1 tensor,*' '' ls --lenient twice.safetensors
t strict-spec 1 '' 'sidestream: blank.safetensors, offset 8: the header does not begin with *' ls --strict-spec blank.safetensors
t blank 0 '*0 tensors,*' '' ls blank.safetensors
t absent 1 '' 'sidestream: cannot open absent: No such file or directory' ls absent
t fifo 1 '' 'sidestream: pipe is no regular file' ls pipe
t pickle 1 '' 'sidestream: m.pt is no safetensors file; it looks like a zip file, *' ls m.pt
t ghost 1 '' 'sidestream: model/ghost.json, offset 41: weight_map has tensor "ghost" in m-0.safetensors, but no shard has it' ls model/ghost.json
t none 2 '' '*want the files to list*' ls
t both 2 '' '*exclude each other*' ls --lenient --strict-spec r.raw
t bad-format 2 '' "*--format 'zip': want*" ls --format=zip r.raw
t json 1 '{*}' '*twice*' ls --json one.safetensors twice.safetensors model
cat >check.py <<'PY'
import json
d = json.load(open("out"))
assert set(d) == {"tensors", "metadata", "files", "refused"}, d
assert d["metadata"] == {"format": "pt", "no\u001bte": "a\\b\u009b"}, d
w, big, a, b = d["tensors"]
assert (w["name"], w["dtype"], w["shape"], w["begin"], w["end"], w["file"]) == ("w\u001b[1m", "F32", [2, 3], 0, 24, 0), w
assert (big["shape"], big["begin"], big["end"]) == ([0, 2**64 - 1], 24, 24), big
assert (a["file"], b["file"], b["name"], b["begin"], b["bytes"]) == (1, 2, "b", 0, 24), d
for t in d["tensors"]:
    f = d["files"][t["file"]]
    assert t["offset"] == f["data"] + t["begin"] and t["offset"] % t["align"] == 0, t
assert [f["tensors"] for f in d["files"]] == [2, 1, 1] and d["files"][2]["path"] == "model/m-1.safetensors", d
assert len(d["refused"]) == 1 and d["refused"][0]["argument"] == 1 and "twice" in d["refused"][0]["why"], d
PY
py json-keys check.py
finish
