# cast: whole checkpoints. What the files are; killed at any point and gone on with; refusals and their codes.
. "$CLI_TESTS/lib.bash"

cat >make.py <<'PY'
import json, os, random, struct

WIDTH = {"F32": 4, "F16": 2, "I64": 8, "BF16": 2}

def save(path, tensors, metadata, end):
    header, data = {"__metadata__": metadata}, []
    at = 0
    for name, (dtype, shape) in tensors.items():
        n = WIDTH[dtype]
        for dim in shape:
            n *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        data.append(random.randbytes(n))
        at += n
    text = json.dumps(header).encode()
    text += b" " * ((end - len(text)) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + b"".join(data))

random.seed(5)
save("one", {"w\n": ("F32", [300, 1000]), "z": ("F32", [0, 3]), "i": ("I64", [5]), "norm.a": ("F32", [7]), "b": ("F32", []), "h": ("BF16", [3])},
     {"format": "pt", "by": "a\"b"}, 3)
save("large", {"w": ("F32", [3 << 20])}, {}, 1)
os.mkdir("many")
save("many/a", {"x": ("F32", [10000])}, {"format": "pt"}, 0)
save("many/b", {"y": ("F32", [100000])}, {"format": "pt"}, 0)
open("many/model.safetensors.index.json", "w").write(json.dumps({"metadata": {"total_size": 440000}, "weight_map": {"x": "a", "y": "b"}}))
os.mkdir("model")
save("model/m-1", {"x": ("F32", [1000])}, {"format": "pt"}, 0)
save("model/m-2", {"y": ("I64", [10])}, {"format": "pt"}, 5)
open("model/model.safetensors.index.json", "w").write(json.dumps({"metadata": {"total_size": 4080}, "weight_map": {"x": "m-1", "y": "m-2"}}, indent=2))
PY
py make make.py
t file 0 '' '4 of 6 tensors cast, 1.1 MiB to 586.* (simulated device)' cast one new.st --to bf16 -d sim
cat >check.py <<'PY'
import json, struct, sys

def load(path):
    data = open(path, "rb").read()
    n, = struct.unpack("<Q", data[:8])
    assert n % 8 == 0 or path == "one", path
    h = json.loads(data[8 : 8 + n])
    return h.pop("__metadata__"), {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]]) for k, v in h.items()}

def bf16(data):
    out = []
    for u, in struct.iter_unpack("<I", data):
        out.append(u >> 16 | 0x40 if u & 0x7fffffff > 0x7f800000 else (u + 0x7fff + (u >> 16 & 1)) >> 16)
    return struct.pack(f"<{len(out)}H", *out)

kept = sys.argv[2:]
before, old = load("one")
after, new = load(sys.argv[1])
assert before == after and list(before) == list(after), after
rank = {"I64": 0, "F32": 1, "BF16": 2}
assert list(new) == sorted(new, key=lambda name: (rank[new[name][0]], name)), list(new)
for name, (dtype, shape, data) in old.items():
    want = ("BF16", shape, bf16(data)) if dtype == "F32" and name not in kept else (dtype, shape, data)
    assert new[name] == want, name
PY
py file-content check.py new.st
t json 0 '*"cast_tensors": 4*"bytes_in": 12000*"bottleneck": "*' '*' cast one json --to bf16 -d sim --json
t select 0 '' '*2 of 6 tensors cast*' cast one some --to=bf16 -d sim --select 'w*' --select '[nb]*' --except 'norm.*'
py select-content check.py some norm.a z
t there 1 '' "*output *new.st is there; *--force*" cast one new.st --to f16 -d sim
t force 0 '' '*' cast one new.st --to f16 -d sim --force
t nothing 0 '' '*warning: no tensor is cast*' cast one same --to bf16 -d sim --select i
if cmp -s one same; then ok nothing-content; else fail nothing-content "not the same"; fi

t shards 0 '' '1 of 2 tensors cast*' cast model/ new/ --to bf16 -d sim
if cmp -s model/m-2 new/m-2 && grep -q '"total_size": 2080$' new/model.safetensors.index.json; then ok shards-content; else fail shards-content "$(ls new)"; fi
t shards-read 0 '*BF16*' '' ls new
t shards-there 1 '' '*not empty*' cast model new --to bf16 -d sim --force
t shards-file 1 '' '*is a file, and the input a folder of shards*' cast model one --to bf16 -d sim

# What was mistyped: before any work.
t no-select 2 '' "*no tensor of 'one' matches --select 'nobody'; 'sidestream ls' lists them" cast one typo --to bf16 -d sim --select 'w*' --select nobody
t no-except 2 '' "*no tensor of 'one' matches --except 'norm'; *" cast one typo --to bf16 -d sim --except 'norm.*' --except norm
t no-except-shards 2 '' "*no tensor of 'model' matches --except 'z'; *" cast model typo --to bf16 -d sim --except z
t pipe-out 2 '' "*OUT is '-': a cast reads and writes files*'./-'*" cast one - --to bf16 -d sim
t pipe-in 2 '' "*IN is '-': *" cast - typo --to bf16 -d sim
t slash 1 '' '*typo/ is not there, and the input one file; name a file in a folder' cast one typo/ --to bf16 -d sim
ln -s nowhere dangling
t dangling 1 '' '*dangling is a link to nowhere, which is not there; *' cast one dangling --to bf16 -d sim
rm dangling
printf '\x93NUMPY\1\0\x76\0{' >n.npy
t npy 1 '' '*n.npy is a .npy file; cast takes safetensors*' cast n.npy typo --to bf16 -d sim --select x
mkdir typo.cast-part
echo mine >typo.cast-part/notes.txt
t restart-strangers 1 '' '*typo.cast-part/notes.txt is of no cast * move it away*' cast model typo --to bf16 -d sim --restart
if [ "$(cat typo.cast-part/notes.txt)" = mine ]; then ok restart-spares; else fail restart-spares "notes.txt is gone"; fi
rm -r typo.cast-part
if compgen -G '*typo*' >/dev/null || [ -e - ]; then fail refused-clean "$(ls)"; else ok refused-clean; fi

# Rights: of files, and of folders that are there.
umask 022
chmod 600 one
t mode 0 '' '*' cast one private --to bf16 -d sim
chmod 644 one
if [ "$(stat -c %a private)" = 600 ]; then ok mode-kept; else fail mode-kept "$(stat -c %a private)"; fi
mkdir there dot
chmod 2770 there
before=$(stat -c '%i %a' there)
t there-empty 0 '' '*' cast model there --to bf16 -d sim
if [ "$(stat -c '%i %a' there)" = "$before" ] && diff -r new there; then ok folder-kept; else fail folder-kept "$(ls -la there)"; fi
cd dot
if "$SIDESTREAM" cast ../model . --to bf16 -d sim 2>../err && diff -r ../new .; then cd ..; ok dot; else cd ..; fail dot "$(ls -la dot)"; fi

# Tensors of 8 bits, whose scales are not used.
cat >eight.py <<'PY'
import json, struct
h = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "w_scale_inv": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
open("eight", "wb").write(struct.pack("<Q", len(h)) + h + bytes(8))
PY
py make-eight eight.py
t scales 0 '' '*warning: F8 tensors are cast without the scales*' cast eight up --to bf16 -d sim
t no-scales 0 '' '1 of 2 tensors cast*' cast eight down --to f8e4m3 -d sim

# Without a GPU the CPU casts, and says so; cuda insists.
if "$SIDESTREAM" cast eight cuda --to bf16 -d cuda >out 2>err; then
    skip fallback "there is a GPU"
elif [ -e cuda ]; then
    fail fallback "-d cuda failed, and made its output"
else
    t fallback 0 '' "*no usable GPU: the software device casts, on the CPU; '-d cuda' insists on one*simulated device*" cast eight auto --to bf16
    SIDESTREAM_DEVICE=sim t named-sim 0 '' '*2 of 2 tensors cast*' cast eight sim --to bf16
    if grep -q 'no usable GPU' err; then fail named-sim-quiet "it was asked for"; else ok named-sim-quiet; fi
fi

t itself 1 '' '*is the input itself*' cast one ./one --to bf16 -d sim --force
t folder 1 '' '*is a folder, and the input one file*' cast one model --to bf16 -d sim
t absent 1 '' '*No such file*' cast absent out2 --to bf16 -d sim
t no-place 1 '' '*No such file or directory' cast one none/out --to bf16 -d sim
t no-type 2 '' '*want --to*' cast one out2 -d sim
t bad-type 2 '' "*--to 'i8'*" cast one out2 --to i8 -d sim
t bad-piece 2 '' '*no power of two*' cast one out2 --to f16 --piece 5K -d sim
t no-out 2 '' '*want IN OUT*' cast one --to f16 -d sim
if compgen -G '*.cast-*' >/dev/null; then fail nothing-left "$(ls)"; else ok nothing-left; fi

# Bit for bit what PyTorch casts, where there is one.
torch=${SIDESTREAM_TEST_PYTHON:-python3}
if ! under thread && ! under address && "$torch" -c 'import numpy, torch; torch.float8_e4m3fn' 2>/dev/null; then
    "$torch" "$CLI_TESTS/ckcast_torch.py" make torch.in
    for to in bf16 f16 f8e4m3 f8e5m2 f32; do
        t torch-$to-run 0 '' '*' cast torch.in torch.out --to $to --force -d sim --piece 64K
        if why=$("$torch" "$CLI_TESTS/ckcast_torch.py" check torch.in torch.out $to 2>&1); then ok torch-$to; else fail torch-$to "$(tail -n 1 <<<"$why")"; fi
    done
else
    skip torch "no PyTorch, or a sanitizer"
fi

mkdir small
if [ "$(id -u)" -eq 0 ] && mount -t tmpfs -o size=512k none small 2>/dev/null; then
    t disk-full 1 '' '*small/out takes * bytes more, and * are free there: No space left on device' cast one small/out --to bf16 -d sim
    if [ -z "$(ls -A small)" ]; then ok disk-full-clean; else fail disk-full-clean "left $(ls -A small)"; fi
    umount small
else
    skip disk-full "cannot mount a small file system"
fi

# Mount points: a folder is filled, a file cannot be replaced. In a name space of their own, which ends with the shell.
cat >mounted.sh <<'SH'
mount -t tmpfs none mnt && mount --bind file bound || exit 1
"$SIDESTREAM" cast model mnt --to bf16 -d sim 2>err
diff -r new mnt && ls -A mnt >listed
"$SIDESTREAM" cast one bound --to bf16 -d sim --force 2>err2
[ $? -eq 1 ] && cat bound >still
SH
mkdir mnt
echo mine >file
: >bound
if have unshare && unshare -m bash -c 'mount -t tmpfs none mnt && mount --bind file bound' 2>/dev/null; then
    unshare -m bash mounted.sh
    if [ "$(wc -l <listed)" = 3 ] && [ -z "$(ls -A mnt)" ]; then ok mount-filled; else fail mount-filled "$(cat err listed)"; fi
    if [[ "$(cat err2)" == *'bound is a mount point, which no other file can replace; name another file' ]] && [ "$(cat still)" = mine ]; then
        ok mount-refused
    else
        fail mount-refused "$(cat err2)"
    fi
    if compgen -G '*.cast-*' >/dev/null; then fail mount-clean "$(ls)"; else ok mount-clean; fi
else
    skip mount "cannot mount"
fi

# Where the rest lies, and how it is called: beside the name, and in a folder that was there.
mkdir full
t rest 1 '' '*pieces are in rest.cast-part; the same command goes on there*' cast many rest/ --to bf16 -d sim:h200,fail=400 --piece 4K --pinned 16K
t rest-inside 1 '' '*pieces are in full/.cast-part; the same command goes on there*' cast many full/ --to bf16 -d sim:h200,fail=400 --piece 4K --pinned 16K
t rest-is-no-model 1 '' '*full holds an unfinished cast; give its command again*' ls full
if [ "$(stat -c %a rest.cast-part rest.cast-part/a rest.cast-journal full/.cast-part/b full/.cast-journal | xargs)" = '700 600 600 600 600' ]; then ok rest-mode; else fail rest-mode "$(ls -lR rest.cast-part full)"; fi
t rest-again 0 '' '*were there already*' cast many rest/ --to bf16 -d sim --piece 4K
t rest-inside-again 0 '' '*were there already*' cast many full/ --to bf16 -d sim --piece 4K
if diff -r rest full; then ok rest-content; else fail rest-content "$(ls -la rest full)"; fi
(ulimit -f 300 && t size-limit 1 '' '*File too large*' cast one limit --to bf16 -d sim --piece 4K --sync 1B)
[ -e limit ] && fail size-limit-output "it is there"

# Killed whenever the journal has grown; in the end the file is the same.
"$SIDESTREAM" cast large whole --to bf16 -d sim --piece 4K 2>/dev/null
for attempt in 1 2 3; do
    kills=0
    rm -f killed killed.cast-* log
    for signal in KILL INT KILL TERM KILL KILL; do
        before=$(stat -c %s killed.cast-journal 2>/dev/null || echo 200)
        "$SIDESTREAM" cast large killed --to bf16 -d sim --piece 4K --sync 1B >/dev/null 2>>log &
        pid=$!
        while kill -0 $pid 2>/dev/null && [ "$(stat -c %s killed.cast-journal 2>/dev/null || echo 0)" -le $before ]; do :; done
        kill -$signal $pid 2>/dev/null
        wait $pid 2>/dev/null
        [ -e killed ] && break
        kills=$((kills + 1))
    done
    # It may have been killed between its last two steps, when the file is there and the journal not yet gone.
    if [ $kills -gt 0 ] && { [ ! -e killed ] || { grep -q 'were there already' log && [ ! -e killed.cast-journal ]; }; }; then break; fi
done
if [ ! -e killed ]; then
    t options 1 '' '*was begun to BF16, not F16: *--restart*' cast large killed --to f16 -d sim --piece 4K
    "$SIDESTREAM" cast large killed --to bf16 -d sim --piece 4K --sync 1B >/dev/null 2>>log
fi
if cmp -s whole killed; then ok killed; else fail killed "another file after $kills kills: $(tail -n 3 log)"; fi
if [ $kills -gt 0 ] && grep -q 'were there already' log; then ok gone-on; else fail gone-on "$kills kills, nothing was there: $(tail -n 3 log)"; fi
if compgen -G 'killed.*' >/dev/null; then fail killed-clean "$(ls)"; else ok killed-clean; fi
finish
