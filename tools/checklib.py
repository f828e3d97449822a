"""What the checks share: the tree to look at, the C files in it, and how a result is told.

Each check is a program: `check-NAME [--root DIR]` prints "ok NAME", "FAIL NAME: why" or "skip NAME # why" and exits 1 on FAIL.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

CODE_FOLDERS = ["include", "src", "cli", "tests", "examples", "bench", "python"]

_COMMENT_OR_STRING = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


def parser(doc: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=doc.split("\n")[0])
    result.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent,
                        help="the tree to look at")
    return result


def root_from_args(doc: str) -> pathlib.Path:
    return parser(doc).parse_args().root


def c_files(root: pathlib.Path, suffixes: tuple[str, ...] = (".c", ".h")) -> Iterator[pathlib.Path]:
    """Files of the code folders, relative to the root, sorted."""
    for folder in CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(root)


def without_comments(text: str, strings: bool = True) -> str:
    """The code with comments blanked, and strings too unless `strings`; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        if strings and token[0] in "\"'":
            return token
        return (token[0] * 2 if token[0] in "\"'" else " ") + "\n" * token.count("\n")

    return _COMMENT_OR_STRING.sub(blank, text)


def report(name: str, problems: list[str], most: int = 40) -> None:
    """Tells the result and exits."""
    if not problems:
        print(f"ok {name}")
        sys.exit(0)
    print(f"FAIL {name}: {len(problems)} found")
    for problem in problems[:most]:
        print(f"  {problem}")
    if len(problems) > most:
        print(f"  and {len(problems) - most} more")
    sys.exit(1)


def skip(name: str, why: str) -> None:
    print(f"skip {name} # {why}")
    sys.exit(0)


def tool_python() -> str:
    """The Python of tools/setup where there is one, else that in PATH."""
    own = pathlib.Path(__file__).resolve().parent.parent / os.environ.get("BUILD", "build") / ".venv/bin/python"
    return str(own) if own.exists() else "python3"


def test_python() -> str:
    """The Python that runs the package's tests."""
    return os.environ.get("SIDESTREAM_TEST_PYTHON") or tool_python()


def launcher(variant: str) -> list[str | pathlib.Path]:
    """What to put before a test program's command: older ThreadSanitizers do not start where addresses are very random."""
    bits = pathlib.Path("/proc/sys/vm/mmap_rnd_bits")
    if not variant.endswith("tsan") or not bits.exists() or int(bits.read_text()) <= 28 or shutil.which("setarch") is None:
        return []
    works = subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    return ["setarch", "-R"] if works else []
