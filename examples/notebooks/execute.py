"""Execute a notebook and write its outputs into it, without Jupyter: `python examples/notebooks/execute.py train_and_plot.ipynb`.

Cells run in one namespace, in order. An output is what was printed, and what the last expression shows (`_repr_svg_`, else `repr`).
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: Path) -> list[str]:
    """The sources of the code cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What the cell printed, and the value of its last expression (None without one). Raises what the cell raises."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last is not None else None
    return printed.getvalue(), value


def _outputs(printed: str, value: Any, number: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"image/svg+xml": value._repr_svg_()} if hasattr(value, "_repr_svg_") else {}
        data["text/plain"] = repr(value) if not data else "<a picture>"
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def main(file: Path) -> None:
    """Execute the notebook and write its outputs."""
    notebook, names, number = json.loads(file.read_text()), {}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            printed, value = run_cell("".join(cell["source"]), names)
            cell |= {"execution_count": number, "outputs": _outputs(printed, value, number)}
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
