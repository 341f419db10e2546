"""A rank reads states of optimisers alone, as it reads parameters, while the others train on: what it reads is what the
last update has left."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tessera
import torch
from etp_generic_scenarios import Experts
from etp_models import Tied, as_bytes, built, loss_of
from safetensors.torch import load_file, save_file
from tessera import etp
from torch_ranks import launch

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fused AMSGrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
}


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, ranks: int, rank: int | None) -> None:
    """One step of reduction="sum"; without a rank, that of all ranks in one process."""
    for each in range(ranks) if rank is None else [rank]:
        loss_of(model, number * ranks + each).backward()
    optimizer.step()
    optimizer.zero_grad()


def facts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: facts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [facts(each) for each in value]
    return (tuple(value.shape), as_bytes(value)) if isinstance(value, torch.Tensor) else value


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value))


def _plain(kind: Any, maker: str, steps: int, ranks: int) -> Any:
    torch.set_num_threads(1)
    model = built(kind)
    optimizer = MAKERS[maker](model)
    for number in range(steps):
        step(model, optimizer, number, ranks, None)
    return facts(state_of(model, optimizer))


FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": {"formats": {".*": "mxfp8"}},
    "native": {"formats": {".*": "nvfp4"}, "native": [".*"]},
    "bf16": {"formats": {".*": "bf16"}},
}


def _saves_alone(rank: int, size: int, kind: Any, maker: str, saver: int, format: str = "") -> list[bytes]:
    """One rank saves after each step; the others go on at once."""
    saved = []
    with etp.init_group(timeout=30) as group:
        options = FORMATS.get(format, {})
        model = etp.shard_module_(built(kind), group, reduction="sum", min_elements=256, **options)
        optimizer = MAKERS[maker](model)
        for number in range(4):
            step(model, optimizer, number, size, rank)
            if rank == saver:
                time.sleep(0.02)
                saved.append(packed(state_of(model, optimizer)))
    return saved


@pytest.mark.parametrize(
    ("size", "kind", "maker", "saver"),
    [
        (2, Tied, "AdamW", 0),
        (2, Tied, "fused AMSGrad", 1),
        (3, Tied, "SGD", 0),
        (3, Experts, "RMSprop", 2),
        (2, Experts, "Adagrad", 0),
    ],
)
def test_one_rank_saves_model_and_optimiser_alone(size: int, kind: Any, maker: str, saver: int) -> None:
    saved = launch(functools.partial(_saves_alone, size=size, kind=kind, maker=maker, saver=saver), size)[saver]
    for steps, content in enumerate(saved, 1):
        found = unpacked(content)
        tensors = [each for entry in found["optimizer"]["state"].values() for each in entry.values()]
        assert all(type(each) is torch.Tensor for each in tensors)
        assert facts(found) == _plain(kind, maker, steps, size)


def _saves_together(rank: int, size: int, kind: Any, format: str) -> list[Any]:
    """All ranks read after each step."""
    read = []
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(kind), group, reduction="sum", min_elements=256, **FORMATS[format])
        optimizer = MAKERS["AdamW"](model)
        for number in range(4):
            step(model, optimizer, number, size, rank)
            group.core.exchange("a step of all ranks", b"")
            with etp.summon(model):
                weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
            read.append(facts({"model": weights, "optimizer": unpacked(packed(optimizer.state_dict()))}))
    return read


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("size", "kind", "saver"), [(2, Tied, 0), (3, Tied, 2), (2, Experts, 1)])
def test_one_rank_saves_masters_of_formatted_weights_alone(size: int, kind: Any, saver: int, format: str) -> None:
    alone = functools.partial(_saves_alone, size=size, kind=kind, maker="AdamW", saver=saver, format=format)
    saved = [facts(unpacked(content)) for content in launch(alone, size)[saver]]
    assert saved == launch(functools.partial(_saves_together, size=size, kind=kind, format=format), size)[saver]


def _goes_on(rank: int, size: int, content: bytes) -> Any:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(seed=9), group, reduction="sum")
        optimizer = MAKERS["AdamW"](model)
        state = unpacked(content)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        alone = facts(unpacked(packed(optimizer.state_dict()))) if rank == size - 1 else None
        for number in range(4, 6):  # as the two ranks before: six micro-batches each
            for each in range(rank, 6, size):
                loss_of(model, number * 6 + each).backward()
            optimizer.step()
            optimizer.zero_grad()
        return alone, facts(unpacked(packed(state_of(model, optimizer)))) if rank == 0 else None


def test_a_file_of_one_rank_goes_on_on_any_number_of_ranks() -> None:
    torch.set_num_threads(1)
    plain = built()
    its = MAKERS["AdamW"](plain)
    for number in range(4):
        step(plain, its, number, 6, None)
    content = packed(state_of(plain, its))
    expected = facts(its.state_dict())
    for number in range(4, 6):
        step(plain, its, number, 6, None)
    for size in (2, 3):
        results = launch(functools.partial(_goes_on, size=size, content=content), size)
        assert results[-1][0] == expected
        assert results[0][1] == facts(state_of(plain, its))


def _writes_files(rank: int, folder: pathlib.Path) -> None:
    """One rank writes by other libraries, and copies that were made before; the other goes on."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, reduction="sum")
        optimizer = MAKERS["AdamW"](model)
        step(model, optimizer, 0, 2, rank)
        if rank == 1:
            copied = copy.deepcopy(state_of(model, optimizer))
            moments = {str(key): entry["exp_avg"] for key, entry in optimizer.state_dict()["state"].items()}
            save_file(moments, folder / "moments.safetensors")
            weights = {name: each for name, each in model.state_dict().items() if name != "head.weight"}
            save_file(weights, folder / "weights.safetensors")
            numpy.savez(folder / "moments.npz", **{f"m{key}": each.numpy() for key, each in moments.items()})
            torch.save(copied, folder / "copied.pt")
        step(model, optimizer, 1, 2, rank)


def test_other_libraries_write_whole_tensors_alone(folder: pathlib.Path) -> None:
    launch(functools.partial(_writes_files, folder=folder), 2)
    expected = _plain(Tied, "AdamW", 1, 2)
    assert facts(torch.load(folder / "copied.pt")) == expected
    moments = [entry["exp_avg"] for entry in expected["optimizer"]["state"].values()]
    assert [facts(each) for _, each in sorted(load_file(folder / "moments.safetensors").items())] == moments
    found = numpy.load(folder / "moments.npz")
    assert [facts(torch.from_numpy(found[f"m{key}"])) for key in range(len(moments))] == moments
    weights = {name: facts(each) for name, each in load_file(folder / "weights.safetensors").items()}
    assert weights == {name: each for name, each in expected["model"].items() if name != "head.weight"}


def _shares(rank: int, folder: pathlib.Path) -> list[str]:
    """What programs see of the memory of a state_dict(), on one rank."""
    wrong = []
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, min_elements=256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = model.state_dict()
        for number in range(2):  # the same state_dict: its values are the model's
            if rank == 1:
                kept = {name: tensor for name, tensor in state.items() if name != "head.weight"}
                save_file(kept, folder / "kept.safetensors")
                expected = {name: etp.whole(tensor).detach() for name, tensor in kept.items()}
                if facts(load_file(folder / "kept.safetensors")) != facts(expected):
                    wrong.append(f"values of save {number}")
                tied, other = state["emb.weight"], state["head.weight"]
                if tied.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
                    wrong.append("tied parameters are two in memory")
                if tied.view(-1)[-1].data_ptr() != tied.data_ptr() + tied.nbytes - tied.element_size():
                    wrong.append("a view is elsewhere")
                if state["up.weight"].data_ptr() == tied.data_ptr():
                    wrong.append("two parameters are one in memory")
                loaded = unpacked(packed(state))
                if loaded["emb.weight"].data_ptr() != loaded["head.weight"].data_ptr():
                    wrong.append("tied parameters are two in a file")
            step(model, optimizer, number, 2, rank)
    return wrong


def test_values_of_tied_parameters_share_memory(folder: pathlib.Path) -> None:
    assert launch(functools.partial(_shares, folder=folder), 2) == [[], []]


def _memory(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = MAKERS["AdamW"](model)
        step(model, optimizer, 0, 2, rank)
        states: Any = model.up.weight.etp.model.states
        rows = sum(
            etp.local(each).numel() * 4
            for entry in optimizer.state.values()
            for each in entry.values()
            if isinstance(each, etp.LogicalTensor)
        )
        found["counted"] = etp.report(model).state_bytes == states.bytes == rows > 0
        optimizer.state.clear()
        gc.collect()
        found["let go"] = states.bytes
        # A rank that reads what another has let go is refused by name.
        optimizer = MAKERS["AdamW"](model)
        step(model, optimizer, 1, 2, rank)
        kept = optimizer.state[model.up.weight]["exp_avg"]
        if rank == 1:
            del kept
            optimizer.state.clear()
            gc.collect()
        with etp.update(model):
            pass
        if rank == 0:
            with pytest.raises(
                tessera.InvalidArgumentError, match=r"'exp_avg' of up\.weight: rank 1 has no such state"
            ):
                kept.sum()
        reference = weakref.ref(states)
        del model, optimizer, states
        if rank == 0:
            del kept
        gc.collect()
        found["freed"] = reference() is None
    return found


def test_memory_of_states_goes_with_the_optimiser() -> None:
    for found in launch(_memory, 2):
        assert found == {"counted": True, "let go": 0, "freed": True}


def _waits(rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = MAKERS["AdamW"](model)
        step(model, optimizer, 0, 2, rank)
        state = optimizer.state[model.up.weight]["exp_avg"]
        states: Any = model.up.weight.etp.model.states
        group.core.exchange("stepped", b"")
        if rank == 1:  # as within an update
            states.begin()
            group.core.exchange("begun", b"")
            time.sleep(0.3)
            with torch.no_grad():
                etp.local(state).fill_(2.0)
            states.end()
            group.core.exchange("read", b"")
            return None
        states._count += 2  # what this rank has done itself
        group.core.exchange("begun", b"")
        value = float(etp.local(state).sum()) + float(state[model.up.weight.etp.rows[1] :].sum())
        expected = float(etp.local(state).sum()) + 2.0 * state[model.up.weight.etp.rows[1] :].numel()
        states._count, states._timeout = states._count + 2, 0.5
        with pytest.raises(tessera.DeadlineExceededError, match=r"rank 1 has not ended .* step after 0\.5 s"):
            state.sum()
        states._count -= 2
        group.core.exchange("read", b"")
        return abs(value - expected) < 1e-3


def test_a_read_waits_for_an_update_that_is_under_way() -> None:
    assert launch(_waits, 2)[0]


def _reads_first_states(rank: int, frozen: bool) -> list[bytes]:
    """Read states that a constructor has made: before the first step, or of a weight that is never stepped."""
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = MAKERS["Adagrad"](model)
        own = [
            torch.full_like(model.up.weight, 3.0),
            torch.zeros_like(model.emb.weight),
            torch.ones_like(model.up.weight),
        ]
        if frozen:
            model.up.weight.requires_grad_(False)
            step(model, optimizer, 0, 2, rank)
        alone = 1 - int(frozen)
        found = []
        if rank == alone:
            torch.save(optimizer.state_dict(), io.BytesIO())
            found = [as_bytes(each) for each in unpacked(packed(own))]
            found.append(as_bytes(etp.whole(optimizer.state[model.up.weight]["sum"])))
        torch.distributed.barrier()
        return found


@pytest.mark.parametrize("frozen", [False, True])
def test_states_before_a_first_step_are_read_alone(frozen: bool) -> None:
    shape, words = built().up.weight.shape, built().emb.weight.shape
    wanted = [torch.full(shape, 3.0), torch.zeros(words), torch.ones(shape), torch.full(shape, 0.1)]
    found = launch(functools.partial(_reads_first_states, frozen=frozen), 2)
    assert found[1 - int(frozen)] == [as_bytes(each) for each in wanted]


def _writes(rank: int) -> Any:
    """Writes outside of a step wait for readers, too."""
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = MAKERS["AdamW"](model)
        step(model, optimizer, 0, 2, rank)
        state = optimizer.state[model.up.weight]["exp_avg"]
        read = []
        for _ in range(20):
            read.append(float(state.abs().max()))
            if rank == 0:
                time.sleep(0.002)
            with torch.no_grad():
                state.mul_(0.5)
        return read


def test_writes_of_states_wait_for_readers() -> None:
    first, second = launch(_writes, 2)
    assert first == second
    assert all(after == before / 2 for before, after in itertools.pairwise(first))


def test_plain_torch_goes_on_from_the_file() -> None:
    content = launch(functools.partial(_saves_alone, size=2, kind=Tied, maker="AdamW", saver=0), 2)[0][-1]
    torch.set_num_threads(1)
    model = built(seed=3)
    optimizer = MAKERS["AdamW"](model)
    state = unpacked(content)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step(model, optimizer, 4, 2, None)
    assert facts(state_of(model, optimizer)) == _plain(Tied, "AdamW", 5, 2)


KILLED = """
import os, signal, sys, time
import tessera, torch
from tessera import etp

group = etp.init_group(store='auto', timeout=20)
torch.manual_seed(0)
model = etp.shard_module_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), group)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
begun = time.monotonic()
try:
    optimizer.state[model[0].weight]["exp_avg"].sum()
except tessera.Error as error:
    print(type(error).__name__, error, flush=True)
assert time.monotonic() - begun < 10
os._exit(0)
"""


def test_a_killed_rank_is_told_and_leaves_nothing(folder: pathlib.Path) -> None:
    before = set(os.listdir("/dev/shm"))
    path = folder / "program.py"
    path.write_text(KILLED)
    common = {**os.environ, "TESSERA_NAMESPACE": folder.name, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
    assert "PeerLostError" in said[0]
    assert "rank 1" in said[0]
    assert set(os.listdir("/dev/shm")) <= before
