"""Imports between modules of the package: no cycles, and torch in only one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import tessera

PACKAGE = Path(tessera.__file__).parent
TORCH = "tessera._tensors.torch"
FOR_TORCH = ("tessera.etp", "tessera.checkpoint", "tessera.engines")


def modules(package: Path) -> dict[str, Path]:
    """By dotted name; of what is compiled, the stub. A folder is its __init__.py."""
    found = {}
    for path in sorted(package.rglob("*.py*")):
        if path.suffix not in (".py", ".pyi"):
            continue
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, node: ast.AST | None = None) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether for types only) of every import in `node`, in functions and for type checkers too; of the
    whole module `name` by default."""
    for child in ast.iter_child_nodes(node or ast.parse(path.read_text())):
        if isinstance(child, ast.Import):
            yield from ((each.name, False) for each in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = base[: len(base) - child.level + 1] if child.level else []
            whole = ".".join(base + ([child.module] if child.module else []))
            yield from ((f"{whole}.{each.name}", False) for each in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from ((each, True) for each, _ in imported(name, path, child))
        else:
            yield from imported(name, path, child)


def graph(package: Path, for_types: bool = True) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, `for_types` also for type checkers only."""
    paths = modules(package)
    arrows: dict[str, set[str]] = {}
    for name, path in paths.items():
        arrows[name] = set()
        for each, only_for_types in imported(name, path):
            if only_for_types and not for_types:
                continue
            while each not in paths and "." in each:
                each = each.rpartition(".")[0]  # a name in a module
            if each in paths:
                arrows[name].add(each)
    return arrows


def rooms(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Likewise, of folders; a module that is in none stands for itself."""
    return {
        of: {room(to) for name, them in arrows.items() if room(name) == of for to in them} - {of}
        for of in map(room, arrows)
    }


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """A cycle, if there is one."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_modules() -> None:
    """Counts what runs: an annotation may name any class of its folder."""
    arrows = graph(PACKAGE, for_types=False)
    assert {"tessera._bus.batch", TORCH, "tessera.maps"} <= arrows.keys()
    assert "tessera._bus.handle" in arrows["tessera._bus.batch"]
    assert circle(arrows) == []


def test_no_circle_of_folders() -> None:
    arrows = rooms(graph(PACKAGE))
    assert "tessera._tensors" in arrows["tessera._bus"]
    assert circle(arrows) == []


def test_the_package_itself_is_imported_by_none_of_its_modules() -> None:
    """It imports them all."""
    assert [name for name, them in graph(PACKAGE).items() if "tessera" in them] == []


@pytest.mark.parametrize(
    "text",
    [
        "from .b import x",
        "from . import b",
        "import made.b",
        "def f():\n    from .b import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x",
        "try:\n    from made import b\nexcept ImportError:\n    pass",
    ],
)
def test_a_circle_is_found(tmp_path: Path, text: str) -> None:
    package = tmp_path / "made"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "a.py").write_text(text)
    (package / "b.py").write_text("from .inner.c import y\nx = y")
    (package / "inner" / "c.py").write_text("y = 1")
    assert circle(graph(package)) == []
    (package / "inner" / "c.py").write_text("from ..a import f as y")
    assert set(circle(graph(package))) == {"made.a", "made.b", "made.inner.c"}
    assert set(circle(rooms(graph(package)))) == {"made.a", "made.b", "made.inner"}


def test_torch_is_imported_in_one_place() -> None:
    """Except for types, and for the packages that are for torch only, which their users import themselves."""
    importing = {
        name
        for name, path in modules(PACKAGE).items()
        for each, for_types in imported(name, path)
        if each.partition(".")[0] == "torch" and not for_types and room(name) not in FOR_TORCH
    }
    assert importing == {TORCH}
    others = {name: them for name, them in graph(PACKAGE).items() if room(name) not in FOR_TORCH}
    assert not any(room(each) in FOR_TORCH for them in others.values() for each in them)
