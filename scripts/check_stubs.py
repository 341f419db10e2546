"""Checks that the committed stub of tessera._core matches the module.

check_stubs.py FOLDER           compares FOLDER/_core.pyi; exit status 1 and a diff if it is out of date
check_stubs.py FOLDER --write   writes it
"""

from __future__ import annotations

import difflib
import importlib
import pathlib
import sys

from nanobind.stubgen import StubGen


def main(folder: str, *options: str) -> int:
    module = importlib.import_module("tessera._core")
    generator = StubGen(module)
    generator.put(module)
    made = generator.get()
    path = pathlib.Path(folder) / "_core.pyi"
    if "--write" in options:
        path.write_text(made)
        return 0
    committed = path.read_text() if path.exists() else ""
    if made == committed:
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(committed.splitlines(True), made.splitlines(True), str(path), "the module as built")
    )
    print(f"{path} is out of date: python {sys.argv[0]} {folder} --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
