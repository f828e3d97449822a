# Every option with values that it must refuse: zero, negative, absurd, without a unit, not a number. The message names the option and the form.
. "$CLI_TESTS/lib.bash"

head -c 8192 /dev/zero >in

count() { # OPTION MOST COMMAND...
    local option=$1 most=$2 bad
    shift 2
    for bad in 0 -1 1.5 x '' 1K 99999999999999999999999 $((most + 1)); do
        t "$option=$bad" 2 '' "*--$option: '*' is not a whole number from 1 to $most*" "$@" "--$option=$bad"
    done
}
list() { # OPTION MOST
    local option=$1 most=$2 bad
    for bad in 0 -1 , '' 1, ,1 3..1 1..x x 1..$((most + 1)) 99999999999999999999; do
        t "$option=$bad" 2 '' "*--$option: '*' is not a list such as 2,3,4 or 1..4 of numbers from 1 to $most*" demo "--$option=$bad"
    done
}

count items 10000 demo
count repeats 100 demo
count dim 65536 demo
t dim=17 2 '' '*--dim: 17 is not a multiple of 16; 32 is*' demo --dim=17
list depth 64
list streams 16
t math 2 '' "*--math: 'fp64' is not fp32, tf32 or bf16*" demo --math=fp64
t demo-svg 2 '' '*--svg: the name is empty*' demo --svg=
t demo-trace 2 '' '*--trace: the name is empty*' demo --trace=
t demo-one-name 2 '' "sidestream: output 'o' is named for two things; *" demo -d sim --dim=64 --svg=o --trace=o
t demo-argument 2 '' "*'extra' is too much*" demo extra
t devices-argument 2 '' "*'extra' is too much*" devices extra

count depth 64 run checksum in
count threads 64 run checksum in
chunk() { t "chunk=$1" 2 '' "*--chunk: '*'*$2*" run checksum in "--chunk=$1"; }
chunk 8 'has no unit; write 8B, 8K or 8M'
chunk 8X 'no unit that is known'
chunk 8MB 'may mean two things'
chunk 0M 'is zero'
chunk -8M 'is negative'
chunk x 'is not an amount; want bytes such as 64M'
chunk '' 'is not an amount'
chunk 1.M 'is not an amount'
chunk 1..5M 'is not an amount'
chunk nanM 'is not an amount'
chunk 512B 'is out of range; 1K to 4G are possible'
chunk 5G 'is out of range'
chunk 99999999999999999999G 'is not an amount'
chunk 9999999999999T 'more than any machine has'
chunk 1500B 'is not a multiple of 1 KiB'
for good in 1K 4KiB 1.5M 2048B 8m 1g; do
    t "chunk=$good" 0 'XXH3 (in) = *' '*' run checksum in -d sim "--chunk=$good"
done
t run-svg 2 '' '*--svg: the name is empty*' run checksum in --svg=
t run-trace 2 '' '*--trace: the name is empty*' run checksum in --trace=
t run-none 2 '' '*want OP INPUT*' run
t run-one 2 '' '*want OP INPUT*' run checksum
t run-four 2 '' "*'d' is too much*" run cast:f32:f16 in out d
t run-empty-input 2 '' '*INPUT is empty*' run checksum ''
for op in nonsense cast cast: cast:f32 cast:f32: cast:f32:f64 cast:f32:f32 cast::f16 cast:f32:f16:f32 CHECKSUM; do
    t "op=$op" 2 '' "sidestream: no operation '$op'; there are checksum, and cast:FROM:TO between two of f32, f16 and bf16" run $op in out
done
t checksum-output 2 '' "sidestream: checksum writes no file; leave out 'out'" run checksum in out
t cast-no-output 2 '' 'sidestream: cast:f32:f16 needs a file to write*' run cast:f32:f16 in
t output-is-input 2 '' "sidestream: output 'in' is the input itself*" run cast:f32:f16 in in
ln -s in link
ln in hard
t output-links-to-input 2 '' "sidestream: output 'link' is the input itself*" run cast:f32:f16 in link
t output-is-input-too 2 '' "sidestream: output 'hard' is the input itself*" run cast:f32:f16 in hard
[ -e out ] && [ -s out ] && fail no-output 'something was written'
clean nothing-left
finish
