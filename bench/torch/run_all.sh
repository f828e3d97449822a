#!/usr/bin/env bash
# Every benchmark of the PyTorch package on a machine with a GPU, in under nine minutes, and one table.
#
#   run_all.sh OUT COMMIT
#
# OUT: a folder for the raw samples (torch.jsonl), each benchmark's own table (NAME.log) and table.txt. PyTorch, timm, torchvision and accelerate
# must be importable, and sidestream. BENCH_SECONDS (520): the time for all; what has none left is named and left out.
set -u
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd) commit=$2 total=${BENCH_SECONDS:-520}
cd "$(dirname "$0")" || exit 1
rm -f "$out/torch.jsonl"

step() { # NAME MOST-SECONDS ARGUMENTS...
    local name=$1 most=$2 left=$((total - SECONDS)) began=$SECONDS code
    shift 2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 10 ]; then
        echo "== $name: left out, no time"
        return
    fi
    timeout "$most" python3 "$name.py" --out "$out/torch.jsonl" --commit "$commit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s"
    [ $code = 0 ] || tail -n 5 "$out/$name.log"
}

step small 30
step classic 40
step sweep 150
step jitter 60
step ready 90
step race 90
step memory 60
step real 200
python3 collect.py "$out"
