# Is the machine set up right? Machines in any state are doctor_check.py's; here are arguments, forms, and this machine.
. "$CLI_TESTS/lib.bash"

t help 0 'Usage: sidestream doctor*--loaded*--root=DIR*--device=SPEC*--json*Exit codes*64  bad argument*' '' doctor --help
t unknown-option 64 '' "sidestream doctor: unrecognized option '--nonsense'*" doctor --nonsense
t argument 64 '' "*'extra' is too much*" doctor extra
t device-missing 64 '' "*option '--device' requires an argument*" doctor --device
t device-empty 64 '' "*--device ''*" doctor --device=
t device-nonsense 64 '' "sidestream: --device: *" doctor --device=gpu
t device-sim-nonsense 64 '' "sidestream: --device: *" doctor --device=sim:nonsense
t root-empty 64 '' '*--root: the name is empty*' doctor --root=
t root-missing 64 '' "sidestream: --root 'nowhere': No such file or directory" doctor --root nowhere
echo >file
t root-file 64 '' "sidestream: --root 'file' is not a folder*" doctor --root file
mkdir empty
t root-device-nonsense 64 '' "sidestream: --device 'gpu': with --root it is auto, cuda, cuda:N or sim" doctor --root empty --device=gpu
t root-device-huge 64 '' "sidestream: --device 'cuda:99999999999999999999'*" doctor --root empty --device=cuda:99999999999999999999
t loaded-alone 64 '' '*--loaded tells of a copy: it needs --root*' doctor --loaded

# A root without anything: no GPU, and nothing else to tell.
t empty 1 'warn  gpu *no NVIDIA GPU*why  *fix  *ok    *skip  driver *0 fail, 1 warn, * ok, * skip' '' doctor --root empty
t empty-sim 0 'ok    *skip  gpu *0 fail, 0 warn, *' '' doctor --root empty -d sim
t empty-json 1 '{*"worst": "warn"*"root": "empty"*}' '' doctor --json --root empty

# What opens here.
t one-engine 1 '*warn  copy-engines *sim:one-copy-engine has 1 (simulated)*why *fix *' '' doctor -d sim:one-copy-engine
t no-such-gpu 2 "*fail  open *'cuda:99' does not open: *" '' doctor -d cuda:99
"$SIDESTREAM" doctor --json >out 2>err </dev/null
code=$?
[ $code -le 2 ] && [ ! -s err ] && ok this || fail this "exit code $code"
cat >check.py <<'PY'
import json
import sys
d = json.load(open("out"))
code = int(sys.argv[1])
statuses = [c["status"] for c in d["checks"]]
assert d["worst"] == next((s for s in ("fail", "warn") if s in statuses), "ok") == ("ok", "warn", "fail")[code], d
assert d["device"] and isinstance(d["simulated"], bool) and d["root"] is None, d
ids = {c["id"] for c in d["checks"]}
lacks = {doc: sorted(i for i in ids if i not in open(doc).read()) for doc in sys.argv[2:]}
assert not any(lacks.values()), lacks
PY
if [ -d "$CLI_TESTS/../../docs" ]; then
    py this-json check.py $code "$CLI_TESTS/../../docs/troubleshooting.md" "$CLI_TESTS/../../man/sidestream-doctor.1"
else
    py this-json check.py $code
fi
"$SIDESTREAM" doctor -d sim >/dev/full 2>err
[ $? -eq 74 ] && ok full || fail full 'not 74'

if ! have python3; then
    skip machines 'no python3'
elif under thread; then
    skip machines 'one thread: ThreadSanitizer has nothing to see'
else
    python3 -B "$CLI_TESTS/doctor_check.py" || fail machines "doctor_check.py ended with $?"
fi
finish
