"""What load() makes of a checkpoint that is not the model's as it is: other dtypes, ties on one side only, another kind
of optimiser, hostile names; and the state that is saved beside the tensors."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tessera
import torch
from etp_models import as_bytes, built
from safetensors.torch import save_file
from tessera import checkpoint, etp
from torch_ranks import launch


class Words(torch.nn.Module):
    """An embedding, and a head that may be tied to it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.head = torch.nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


def _words(tied: bool, seed: int = 1) -> Any:
    return built(functools.partial(Words, tied), seed)


def _stepped(model: Any, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# --- ties


def _ties(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=60) as group:
        for sharded in (False, True):

            def made(tied: bool, seed: int, sharded: bool = sharded) -> Any:
                model = _words(tied, seed)
                return etp.shard_module_(model, group) if sharded else model

            how = "sharded" if sharded else "plain"
            untied = made(False, 1)
            checkpoint.save(untied, None, folder / f"untied {how}")
            tied = made(True, 2)
            before = as_bytes(etp.whole(tied.embed.weight))
            try:
                checkpoint.load(tied, None, folder / f"untied {how}")
            except tessera.InvalidArgumentError as error:
                found[f"refused, {how}"] = str(error)
            found[f"untouched, {how}"] = as_bytes(etp.whole(tied.embed.weight)) == before
            loaded = checkpoint.load(tied, None, folder / f"untied {how}", strict=False)
            found[f"told, {how}"] = loaded.unexpected == ["head.weight"] and not loaded.missing
            found[f"taken, {how}"] = as_bytes(etp.whole(tied.head.weight)) == as_bytes(etp.whole(untied.embed.weight))
            # Equal ones are one.
            with torch.no_grad():
                untied.head.weight.copy_(untied.embed.weight)
            checkpoint.save(untied, None, folder / f"equal {how}")
            again = made(True, 3)
            loaded = checkpoint.load(again, None, folder / f"equal {how}")
            found[f"equal, {how}"] = (loaded.unexpected, loaded.missing) == ([], []) and (
                as_bytes(etp.whole(again.embed.weight)) == as_bytes(etp.whole(untied.embed.weight))
            )
            # And the other way round: both get what was one.
            checkpoint.save(tied, None, folder / f"tied {how}")
            other = made(False, 4)
            checkpoint.load(other, None, folder / f"tied {how}")
            found[f"both, {how}"] = (
                as_bytes(etp.whole(other.embed.weight))
                == as_bytes(etp.whole(other.head.weight))
                == as_bytes(etp.whole(tied.embed.weight))
            )
    return found


def test_ties_on_one_side_only(folder: pathlib.Path) -> None:
    for found in launch(functools.partial(_ties, folder=folder), 2):
        said = {what: found.pop(what) for what in list(found) if what.startswith("refused")}
        assert len(said) == 2
        assert all("embed.weight and head.weight are one parameter of this model" in text for text in said.values())
        assert found == dict.fromkeys(found, True)


def test_another_programs_file_with_two_tensors_for_one_parameter(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    ones = torch.ones(64, 32)
    save_file({"embed.weight": ones, "head.weight": 2 * ones}, path)
    with pytest.raises(tessera.InvalidArgumentError, match="one parameter of this model"):
        checkpoint.load(_words(True), None, folder)
    save_file({"embed.weight": ones, "head.weight": ones.clone()}, path)
    model = _words(True)
    checkpoint.load(model, None, folder)
    assert bool((model.head.weight == 1).all())
    save_file({"embed.weight": ones}, path)
    with pytest.raises(tessera.InvalidArgumentError, match=r"missing: head\.weight"):
        checkpoint.load(_words(False), None, folder)


def test_states_that_nobody_reads_are_told(folder: pathlib.Path) -> None:
    untied = _words(False)
    optimizer = _stepped(untied)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    checkpoint.save(untied, optimizer, folder)
    tied = _words(True)
    its = torch.optim.AdamW(tied.parameters())
    with pytest.raises(tessera.InvalidArgumentError, match=r"nobody reads its states of optimisers of head\.weight"):
        checkpoint.load(tied, its, folder)
    assert checkpoint.load(tied, its, folder, strict=False).unexpected == ["optimizer: head.weight"]


# --- dtypes


def _cast(rank: int, folder: pathlib.Path) -> list[str]:
    wrong = []
    with etp.init_group(timeout=60) as group:
        full = etp.shard_module_(_words(False), group)
        checkpoint.save(full, _stepped(full), folder / "f32")
        wanted = {name: etp.whole(each).detach() for name, each in full.named_parameters()}
        for dtype in (torch.bfloat16, torch.float16):
            half = etp.shard_module_(_words(False, seed=2).to(dtype), group)
            optimizer = torch.optim.AdamW(half.parameters(), lr=1e-2)
            with pytest.raises(tessera.InvalidArgumentError, match=r"embed\.weight is f32 \[64, 32\], in the model"):
                checkpoint.load(half, None, folder / "f32")
            checkpoint.load(half, optimizer, folder / "f32", cast=True)
            if any(not torch.equal(etp.whole(each), wanted[n].to(dtype)) for n, each in half.named_parameters()):
                wrong.append(str(dtype))
            moment = optimizer.state[half.embed.weight]["exp_avg"]
            if moment.dtype is not dtype or moment.shape != half.embed.weight.shape:
                wrong.append(f"{dtype}: moments")
    return wrong


def test_cast(folder: pathlib.Path) -> None:
    assert launch(functools.partial(_cast, folder=folder), 2) == [[], []]


def test_only_floating_point_is_cast(folder: pathlib.Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    checkpoint.save(model, None, folder)
    other = torch.nn.Module()
    other.register_buffer("count", torch.zeros(3))
    with pytest.raises(tessera.InvalidArgumentError, match=r"count is i64 \[3\], in the model f32"):
        checkpoint.load(other, None, folder, cast=True)


# --- other kinds of optimisers


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        ("AdamW", "SGD", "its optimiser is torch's AdamW, and this one SGD"),
        ("Adam", "AdamW", "its optimiser is torch's Adam, and this one AdamW"),
        ("SGD", "Adam", "its optimiser is torch's SGD, and this one Adam"),
        ("RMSprop", "Adagrad", "its optimiser is torch's RMSprop, and this one Adagrad"),
    ],
)
def test_another_kind_of_optimiser_is_refused_when_it_is_loaded(
    folder: pathlib.Path, saved: str, loaded: str, says: str
) -> None:
    model = _words(False)
    checkpoint.save(model, _stepped(model, getattr(torch.optim, saved)), folder)
    other = _words(False, seed=2)
    before = as_bytes(other.embed.weight)
    with pytest.raises(tessera.InvalidArgumentError, match=says):
        checkpoint.load(other, getattr(torch.optim, loaded)(other.parameters(), lr=0.1), folder)
    assert as_bytes(other.embed.weight) == before


def test_an_option_that_needs_another_state_is_refused(folder: pathlib.Path) -> None:
    model = _words(False)
    optimizer = _stepped(model)
    checkpoint.save(model, optimizer, folder)
    name = next(folder.glob("optimizer-*.index.json"))
    index = json.loads(name.read_text())
    index["metadata"]["kind"] = ""  # as of an older version
    for entry in index["metadata"]["state"].values():
        entry["tensors"].remove("exp_avg_sq")
    name.write_text(json.dumps(index))
    with pytest.raises(tessera.InvalidArgumentError, match=r"that of embed\.weight lacks exp_avg_sq"):
        checkpoint.load(model, torch.optim.AdamW(model.parameters()), folder)


# --- beside the tensors


def _extra(rank: int, folder: pathlib.Path, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=60) as group:
        model = etp.shard_module_(_words(False), group)
        optimizer = _stepped(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for _ in range(3):
            schedule.step()
        torch.manual_seed(100 + rank)
        random.seed(rank)
        numpy.random.seed(rank)
        given = {
            "schedule": schedule,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
            "loader": {"epoch": 2, "seen": [rank, 5], "by shard": {0: (1, None), "x": b"bytes"}},
        }
        checkpoint.save(model, optimizer, folder / "here", extra=given)
        drawn = (torch.rand(3), random.random(), float(numpy.random.rand()))
        again = etp.shard_module_(_words(False, seed=2), group)
        its = torch.optim.AdamW(again.parameters(), lr=0.5)
        its_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(its, 10)
        loaded = checkpoint.load(again, its, folder / "here", extra={"schedule": its_schedule})
        own = loaded.extra[rank]
        torch.set_rng_state(own["torch"])
        random.setstate(own["python"])
        numpy.random.set_state(own["numpy"])
        found["drawn"] = (
            torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1] and numpy.random.rand() == drawn[2]
        )
        found["schedule"] = its_schedule.state_dict() == schedule.state_dict()
        found["loader"] = [each["loader"]["seen"][0] for each in loaded.extra] == list(range(size))
        found["keys"] = own["loader"]["by shard"] == {0: (1, None), "x": b"bytes"}
    return found


def test_other_state_beside_the_tensors(folder: pathlib.Path) -> None:
    for found in launch(functools.partial(_extra, folder=folder, size=2), 2):
        assert found == dict.fromkeys(found, True)
    # On another number of ranks: what all have saved alike is given; of what is each rank's own, the program decides.
    model = _words(False)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loaded = checkpoint.load(model, optimizer, folder / "here", extra={"schedule": schedule})
    assert (schedule.last_epoch, len(loaded.extra)) == (3, 2)

    class Loader:
        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(tessera.InvalidArgumentError, match="extra 'loader' was saved by 2 ranks, each its own, and 1"):
        checkpoint.load(model, None, folder / "here", extra={"loader": Loader()})
    with pytest.raises(tessera.NotFoundError, match="extra 'other' was not saved"):
        checkpoint.load(model, None, folder / "here", extra={"other": Loader()})
    # The next save takes the files' place.
    checkpoint.save(model, None, folder / "here")
    assert not list((folder / "here").glob("extra-*"))
    assert checkpoint.load(model, None, folder / "here").extra == []


class Custom:
    """A class of a program."""


def test_objects_of_a_program_are_made_only_where_it_says_so(folder: pathlib.Path) -> None:
    model = _words(False)
    checkpoint.save(model, None, folder, extra={"mine": Custom()})
    with pytest.raises(tessera.InvalidArgumentError, match=r"load\(unpickle=True\)"):
        checkpoint.load(model, None, folder)
    assert type(checkpoint.load(model, None, folder, unpickle=True).extra[0]["mine"]) is Custom
    path = next(folder.glob("extra-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(tessera.DataLossError, match=f"{path}: the file is damaged"):
        checkpoint.load(model, None, folder, unpickle=True)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ([1], "give a mapping of names"),
        ({3: 1}, "extra: the key"),
        ({"x": lambda: None}, "extra 'x': it cannot be pickled"),
    ],
)
def test_extra_that_cannot_be_saved_is_refused(folder: pathlib.Path, extra: Any, says: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=says):
        checkpoint.save(_words(False), None, folder, extra=extra)
    assert not list(folder.glob("*model*"))


# --- names

NAMES = ["a\udc80b", "\ud800", "nul\0", "new\nline", "\x1b[31m", "a" * 70_000, "\u202e", "", "é\u0301", "\U0010ffff"]
PROGRAM = """
import sys, torch, tessera
from tessera import checkpoint
folder, name = sys.argv[1], eval(sys.argv[2])
for make in (lambda m: m.register_buffer(name, torch.ones(3)), lambda m: m._buffers.__setitem__(name, torch.ones(3)),
             lambda m: m._parameters.__setitem__(name, torch.nn.Parameter(torch.ones(3)))):
    model = torch.nn.Module()
    try:
        make(model)
        checkpoint.save(model, None, folder)
        checkpoint.load(model, None, folder)
        other = torch.nn.Module()
        other._buffers[name] = torch.ones(5)
        checkpoint.load(other, None, folder)
    except (tessera.Error, KeyError) as error:
        print(repr(str(error))[:200])
"""


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_end_in_an_error(folder: pathlib.Path, name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), ascii(name)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
