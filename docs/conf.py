"""The site of the documentation: `scripts/docs.sh` builds it from these pages and from the package's docstrings."""

from __future__ import annotations

import json
from typing import Any

import tessera
from myst_parser.parsers.sphinx_ import MystParser

project = "Tessera"
author = "The Tessera authors"
release = version = tessera.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"Tessera {version}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False


class NotebookParser(MystParser):
    """Reads a notebook as a page: its cells, and the outputs that it was saved with. Nothing is run."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse("\n\n".join(map(page_of, json.loads(inputstring)["cells"])), document)


def page_of(cell: dict[str, Any]) -> str:
    """A cell as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(page_of_output(output["data"]) for output in cell["outputs"])])


def page_of_output(data: dict[str, list[str]]) -> str:
    if "text/html" in data:
        return "```{raw} html\n" + "".join(data["text/html"]) + "\n```"
    return "```text\n" + "".join(data["text/plain"]) + "\n```"


def hide_constructor(
    app: Any, what: str, name: str, thing: object, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """`:exclude-members: __init__` also hides what a class is constructed from: users get its objects from calls."""
    hidden = what == "class" and signature and "__init__" in (options.exclude_members or ())
    return ("", None) if hidden else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", hide_constructor)
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
