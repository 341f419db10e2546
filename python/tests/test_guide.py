"""The snippets of the user guide do what it says: all programs of a page are started together, as jobs of their own.

The first line of a snippet has its name; `# train.py: torchrun --nproc-per-node 2` says how it is started.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tessera

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
LIMIT = 300.0
MEASURED = ("whole gradients", "both:")  # of docs/guide/etp-memory.md: these differ between runs


def programs(page: Path) -> dict[str, str]:
    """Programs by the name in their first line."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    named = [(re.match(r"# (\w+\.py)(: torchrun .*)?\n", block), block) for block in blocks]
    assert all(name for name, _ in named), f"{page.name}: a snippet does not begin with the name of its program"
    found = {name.group(1): block for name, block in named if name}
    assert len(found) == len(blocks), f"{page.name}: two snippets have one name"
    return found


def outputs(page: Path) -> dict[str, list[str]]:
    """What stands below a program as its output, by line, without empty ones."""
    pair = r"^```python\n# (\w+\.py)[^`]*?^```\n\n```text\n(.*?)^```"
    found = re.findall(pair, page.read_text(), re.MULTILINE | re.DOTALL)
    return {name: [line for line in text.splitlines() if line.strip()] for name, text in found}


def require_output(line: str, said: str) -> None:
    """Raise unless a program has said that line once. The last figure of one that begins with MEASURED is its own.

    torchrun's ranks write unbuffered into one pipe: a line that several of them print may come in pieces of each.
    """
    if not line.startswith(MEASURED):
        assert said.splitlines().count(line) == 1, f"{line!r} is not there once:\n{said}"
        return
    told, _ = line.rsplit(maxsplit=1)
    (found,) = [each for each in said.splitlines() if each.startswith(told)]
    forecast, measured = map(float, found.split()[-2:])
    assert measured > 0
    if line.startswith("whole gradients"):
        assert measured <= forecast, found
    else:  # arenas of shared memory, and what malloc keeps, come on top
        assert measured > forecast / 2, found


def command(text: str, program: Path) -> list[str]:
    launcher = re.match(r"# \w+\.py: torchrun (.*)\n", text)
    if not launcher:
        return [sys.executable, str(program)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *launcher.group(1).split(), str(program)]


def absolute_path() -> str:
    """Python's, for programs that run in another folder."""
    return os.pathsep.join(os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)


PAGES = [page for page in sorted(GUIDE.glob("*.md")) if programs(page)]


def test_the_guide_has_snippets() -> None:
    assert {page.stem for page in PAGES} >= {"quickstart", "tensors", "versions"}
    assert set(outputs(GUIDE / "etp-memory.md")) == {"before.py", "memory.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path, runtime_dir: Path) -> None:
    pytest.importorskip("torch")
    started = []
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text)
        started.append(
            subprocess.Popen(
                command(text, tmp_path / name),
                cwd=tmp_path,
                env={**os.environ, "TESSERA_NAMESPACE": page.stem, "PYTHONPATH": absolute_path()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    for name, lines in outputs(page).items():
        for line in lines:
            require_output(line, said[list(programs(page)).index(name)])
    if page.stem == "quickstart":
        assert "now at version 3" in "".join(said)
    if page.stem == "shipping":
        trained, served = (re.findall(r"version 30 is -?\d+", text) for text in said[:2])
        assert trained == served != []


def test_the_programs_of_the_readme_run(tmp_path: Path, runtime_dir: Path) -> None:
    pytest.importorskip("torch")
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "send.py").write_text(f"import torch\nmodel, step = torch.nn.Linear(2, 2), 7\n{block}")
    (tmp_path / "recv.py").write_text(
        "import tessera, torch\n"
        'bus = tessera.connect("weights", role="inference", peer="trainer")\n'
        "model = torch.nn.Linear(2, 2)\n"
        "print(bus.register(model).recv())\n"
    )
    environment = {**os.environ, "TESSERA_NAMESPACE": "readme"}
    programs = [
        subprocess.Popen([sys.executable, tmp_path / name], env=environment, stdout=subprocess.PIPE, text=True)
        for name in ("send.py", "recv.py")
    ]
    try:
        said = [program.communicate(timeout=LIMIT)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0]
    assert said[1] == "7\n"


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in tessera.__all__ if not re.search(rf"tessera\.{name}\b", page)]
    assert missing == ["__version__"]


def test_the_reference_has_every_public_name_of_packages_for_torch() -> None:
    pytest.importorskip("torch")
    from tessera import checkpoint, etp

    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in checkpoint.__all__ if f"tessera.checkpoint.{name}\n" not in page] == []
    assert [name for name in etp.__all__ if not re.search(rf"tessera\.etp\.{name}\b", page)] == []


@pytest.mark.parametrize("package", ["", ".vllm", ".sglang", ".megatron", ".verl", ".trl"])
def test_the_reference_has_every_public_name_of_packages_for_engines(package: str) -> None:
    pytest.importorskip("torch")
    full = f"tessera.engines{package}"
    names = importlib.import_module(full).__all__
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in names if not re.search(rf":: {re.escape(full)}\.{name}(\(|$)", page, re.MULTILINE)] == []
