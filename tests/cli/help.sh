# Help, version, and commands that are not there.
. "$CLI_TESTS/lib.bash"

t help 0 'Usage: sidestream COMMAND*demo*devices*run*Exit codes:*0  ok*1 *2 *3 *4 *5 *6 *130 *' '' --help
t help-word 0 'Usage: sidestream COMMAND*' '' help
t version 0 'sidestream [0-9]*.[0-9]*.[0-9]*' '' --version
t no-command 2 '' 'Usage: sidestream COMMAND*'
t unknown-near 2 '' "sidestream: no command 'dmeo'; did you mean 'demo'?" dmeo
t unknown-prefix 2 '' "sidestream: no command 'dev'; did you mean 'devices'?" dev
t unknown-far 2 '' "sidestream: no command 'frobnicate'; *--help*" frobnicate
t unknown-empty 2 '' "sidestream: no command ''*" ''
t option-first 2 '' "sidestream: option '--device' comes before the command*" --device sim demo
for command in bench demo devices ls plan run; do
    t $command-help 0 "Usage: sidestream $command*--device=SPEC*--json*Exit codes:*130  interrupted*" '' $command --help
    t $command-unknown-option 2 '' "sidestream $command: unrecognized option '--nonsense'*" $command --nonsense
    t $command-device-missing 2 '' "sidestream $command: option '--device' requires an argument*" $command --device
    t $command-device-empty 2 '' "sidestream $command: --device ''*" $command --device=
done
finish
