"""The outputs that a document shows are those of its commands.

    docs_check.py FILE PROGRAM

Each ```console block: a line "$ sidestream ...", then its output; "..." stands for any lines. Run in the folder above the document's.
"""
import pathlib
import re
import shlex
import subprocess
import sys


def shown_as(output: list[str], shown: list[str]) -> str:
    """The shown line that does not come where it should; empty where all do."""
    at, gap = 0, False
    for line in shown:
        if line == "...":
            gap = True
            continue
        while gap and at < len(output) and output[at] != line:
            at += 1
        if at == len(output) or output[at] != line:
            return line
        at, gap = at + 1, False
    return "" if gap or at == len(output) else f"the output goes on: {output[at]}"


def main() -> None:
    document, program = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    blocks = re.findall(r"^```console\n\$ sidestream (.*?)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{document} shows no command"
    for command, shown in blocks:
        done = subprocess.run([program, *shlex.split(command)], cwd=document.parent.parent, text=True, capture_output=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        wrong = shown_as(done.stdout.splitlines(), shown.splitlines())
        assert not wrong, f"{command}: {wrong}"


if __name__ == "__main__":
    main()
