# What devices prints, and specs that do not open.
. "$CLI_TESTS/lib.bash"

t list 0 '*sim*simulated*memory*link*copies*compute*' '' devices
t sim 0 'sim:h200*simulated H200*times are of a model*' '' devices -d sim
t one-engine 0 '*one copy engine: H2D and D2H take turns*' '' devices --device=sim:one-copy-engine
t bad-profile 2 '' "sidestream: cannot open device 'sim:nonsense': *" devices -d sim:nonsense
t bad-key 2 '' "sidestream: cannot open device 'sim:h200,nonsense=1': *" devices -d sim:h200,nonsense=1
t bad-spec 2 '' "sidestream: cannot open device 'gpu': *" devices -d gpu
t bad-long 2 '' 'sidestream: --device *longer than 63 characters' devices -d sim:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
t no-such-gpu 3 '' "sidestream: cannot open device 'cuda:99': *" devices -d cuda:99
t json 0 '{*}' '' devices --json
cat >check.py <<'PY'
import json
d = json.load(open("out"))
assert set(d) == {"devices", "no_gpu"}, d
assert d["devices"], d
for one in d["devices"]:
    assert isinstance(one["simulated"], bool) and one["memory_bytes"] > 0 and one["link"]["kind"], one
sim = d["devices"][-1]
assert sim["simulated"] and sim["spec"].startswith("sim"), sim
assert (d["no_gpu"] is None) == any(not one["simulated"] for one in d["devices"]), d
PY
py json-keys check.py
finish
