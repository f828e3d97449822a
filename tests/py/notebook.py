"""Runs a notebook's cells one after the other in one process, with what they print and display: no Jupyter needed.

    python3 tests/py/notebook.py examples/python/overlap.ipynb            # prints, fails where a cell does
    python3 tests/py/notebook.py examples/python/overlap.ipynb --save     # and keeps the outputs in the file
"""
import contextlib
import io
import json
import os
import pathlib
import sys
import types
from typing import Any

Output = dict[str, Any]


def stand_in_for_ipython(outputs: list[Output]) -> None:
    """`from IPython.display import SVG, display`, where display keeps what it is given."""
    class SVG:
        def __init__(self, data: str) -> None:
            self.data = data

    def display(drawing: SVG) -> None:
        outputs.append({"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": drawing.data.splitlines(True)}})

    module = types.ModuleType("IPython.display")
    module.SVG, module.display = SVG, display  # type: ignore[attr-defined]
    sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), module


def run(path: pathlib.Path) -> Any:
    """The notebook with its outputs, which are printed too. Whatever a cell raises comes out, with the cell's number in the traceback."""
    notebook = json.loads(path.read_text())
    outputs: list[Output] = []
    stand_in_for_ipython(outputs)
    sys.path[:] = [os.path.abspath(folder) for folder in sys.path]
    os.chdir(path.parent)
    sys.path.insert(0, str(path.resolve().parent))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = printed.getvalue()
        stream = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}] if text else []
        cell["outputs"], cell["execution_count"] = stream + outputs[:], number
        outputs.clear()
        for output in cell["outputs"]:
            print("".join(output.get("text") or output["data"]["image/svg+xml"]).rstrip("\n"), flush=True)
    return notebook


def main() -> None:
    path = pathlib.Path(sys.argv[1]).resolve()
    notebook = run(path)
    if "--save" in sys.argv:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
