"""The notebook of the guide does what it shows: its cells are run, and their outputs are those that it was saved with.

python python/tests/test_notebook.py        # saves them again
"""

from __future__ import annotations

import ast
import json
import pprint
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "guide" / "plans.ipynb"


def run(source: str, names: dict[str, Any]) -> Any:
    """The value of the last expression, if it ends with one."""
    body = ast.parse(source)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, str(NOTEBOOK), "exec"), names)
    return (
        eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if isinstance(last, ast.Expr) else None
    )


def output_of(value: Any) -> list[dict[str, Any]]:
    """As Jupyter saves it."""
    if value is None:
        return []
    data = {"text/plain": pprint.pformat(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return [{"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}]


def outputs(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    names: dict[str, Any] = {}
    return [output_of(run("".join(cell["source"]), names)) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_shows_what_it_does() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    saved = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert outputs(notebook) == saved
    drawn = [out for cell in saved for out in cell if "<svg" in "".join(out["data"].get("text/html", []))]
    assert len(drawn) >= 4


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, shown in zip(code, outputs(notebook), strict=True):
        cell["outputs"] = shown
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0)
