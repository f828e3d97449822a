# run cast:FROM:TO against exact arithmetic in Python, and what happens to the output file when things go wrong.
. "$CLI_TESTS/lib.bash"

if have python3; then
    types="f32 f16 bf16"
    if under thread; then types=f32; fi
    for from in $types; do
        python3 "$CLI_TESTS/cast_check.py" make $from in.$from 40000
        for to in f32 f16 bf16; do
            [ $from = $to ] && continue
            t $from-$to-run 0 '' '*' run cast:$from:$to in.$from out.$to -d sim --chunk 4K
            py $from-$to "$CLI_TESTS/cast_check.py" check $from $to in.$from out.$to
        done
    done
else
    skip values "no python3"
fi

head -c 4000000 /dev/urandom >in
: >empty
head -c 4001 in >odd
t empty 0 '' '' run cast:f32:bf16 empty empty.out -d sim
if [ -f empty.out ] && [ ! -s empty.out ]; then ok empty-output; else fail empty-output "not an empty file"; fi
t odd 1 '' "sidestream: input 'odd' has 4001 bytes, which is no multiple of 4, the size of an f32" run cast:f32:bf16 odd out -d sim
t odd16 1 '' "sidestream: input 'odd' has 4001 bytes, which is no multiple of 2, the size of an f16" run cast:f16:f32 odd out -d sim
[ -e out ] && [ -s out ] && [ "$(stat -c %s out)" -gt 100000 ] && fail odd-output "written"
t json 0 '*"bytes_in": 4000000*"bytes_out": 2000000*"checksum": null*' '*GB/s*bottleneck*' run cast:f32:bf16 in a -d sim --json
t other-chunk 0 '' '*' run cast:f32:bf16 in b -d sim --chunk 7K --depth 2 --threads 3
if cmp -s a b; then ok same-whatever-the-chunk; else fail same-whatever-the-chunk "outputs differ"; fi
for seed in 1 2 3; do
    t "seed=$seed" 0 '' '*' run cast:f32:bf16 in b -d sim:h200,seed=$seed,check=1 --chunk 64K
    cmp -s a b || fail "seed=$seed-output" "outputs differ"
done

# Output files.
(umask 027 && "$SIDESTREAM" run cast:f32:bf16 in mode -d sim 2>/dev/null)
if [ "$(stat -c %a mode)" = 640 ]; then ok mode-by-umask; else fail mode-by-umask "mode $(stat -c %a mode)"; fi
chmod 604 mode
"$SIDESTREAM" run cast:f32:bf16 in mode -d sim 2>/dev/null
if [ "$(stat -c %a mode)" = 604 ]; then ok mode-kept; else fail mode-kept "mode $(stat -c %a mode)"; fi
echo old >target
ln -s target link
t through-link 0 '' '*' run cast:f32:bf16 in link -d sim
if [ -L link ] && cmp -s a target; then ok link-kept; else fail link-kept "the link was replaced"; fi
mkdir folder
t output-folder 1 '' "sidestream: output 'folder' is a directory; *" run cast:f32:bf16 in folder -d sim
t output-no-folder 1 '' "sidestream: cannot write output 'none/out': No such file or directory" run cast:f32:bf16 in none/out -d sim
t output-null 0 '' '*' run cast:f32:bf16 in /dev/null -d sim
if [ -c /dev/null ]; then ok null-kept; else fail null-kept "/dev/null was replaced"; fi
t output-full-device 1 '' "sidestream: cast:f32:bf16 of 'in' to '/dev/full': *No space left on device" run cast:f32:bf16 in /dev/full -d sim
echo old >keep
(ulimit -f 1000 && t size-limit 1 '' "sidestream: cast:f32:bf16 of 'in' to 'keep': *File too large" run cast:f32:bf16 in keep -d sim --chunk 64K --depth 2)
if [ "$(cat keep)" = old ]; then ok old-kept; else fail old-kept "the old output is gone"; fi
mkdir small
if [ "$(id -u)" -eq 0 ] && mount -t tmpfs -o size=1m none small 2>/dev/null; then
    t disk-full 1 '' "sidestream: cast:f32:bf16 of 'in' to 'small/out': *No space left on device" run cast:f32:bf16 in small/out -d sim --chunk 64K
    if [ -z "$(ls -A small)" ]; then ok disk-full-clean; else fail disk-full-clean "left $(ls -A small)"; fi
    umount small
else
    skip disk-full "cannot mount a small file system"
fi
for nth in 20 40 60 80; do
    t "fail=$nth" 1 '' "sidestream: *" run cast:f32:bf16 in gone -d sim:h200,fail=$nth --chunk 64K
    [ -e gone ] && fail "fail=$nth-output" "it is there" && rm gone
done
clean nothing-left

# Signals: nothing under the final name, nothing beside it, 130.
truncate -s 3G large
for signals in INT TERM INT,INT TERM,INT; do
    "$SIDESTREAM" run cast:f32:bf16 large big -d sim --chunk 1M >out 2>err </dev/null &
    pid=$!
    for _ in $(seq 100); do
        compgen -G 'big.sidestream-*' >/dev/null && break
        sleep 0.02
    done
    sleep 0.1
    for signal in ${signals//,/ }; do
        kill -$signal $pid
    done
    wait $pid
    code=$?
    if [ $code -ne 130 ]; then
        fail "signal-$signals" "exit code $code"
    elif [ -e big ]; then
        fail "signal-$signals" "the output is there"
    else
        clean "signal-$signals"
    fi
done
finish
