"""torch's helpers for states, get_model_state_dict() and its like, with all options: what they give of a sharded model
is what they give of one in plain torch, and each side loads what the other has given."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_models import Tied, as_bytes, built, loss_of
from tessera import etp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch_ranks import launch

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "on the CPU": {"cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "full and flat": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
    "without frozen ones": {"ignore_frozen_params": True, "full_state_dict": True, "strict": False},
    "without strictness": {"strict": False},
}
LOADS: dict[str, dict[str, Any]] = {
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "default": {},
}
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fused AMSGrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "SGD in groups": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1]},
        ],
        lr=0.1,
        momentum=0.9,
    ),
}


def _made(frozen: bool, seed: int = 7) -> Any:
    model = built(Tied, seed)
    model.down.weight.requires_grad_(not frozen)
    return model


def _train(model: Any, optimizer: torch.optim.Optimizer, number: int, ranks: int, rank: int | None) -> None:
    """One step; without a rank, that of all ranks in one process."""
    for each in range(ranks) if rank is None else [rank]:
        loss_of(model, number * ranks + each).backward()
    optimizer.step()
    optimizer.zero_grad()


def _facts(value: Any) -> Any:
    """What a state has, of plain and of logical tensors alike."""
    if isinstance(value, dict):
        return {key: _facts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_facts(each) for each in value]
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), as_bytes(etp.whole(value)))
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter)


def _or_error(get: Callable[..., Any], model: Any, optimizer: Any) -> Any:
    """torch refuses some combinations of options."""
    try:
        return get(model, optimizer)
    except (KeyError, RuntimeError, NotImplementedError) as error:
        return {"error": type(error).__name__}


def _compare(rank: int, size: int, maker: str, frozen: bool) -> list[str]:
    warnings.simplefilter("ignore")
    wrong = []
    with etp.init_group(timeout=30) as group:
        plain = _made(frozen)
        sharded = etp.shard_module_(_made(frozen), group, reduction="sum")
        its, own = MAKERS[maker](plain), MAKERS[maker](sharded)
        for number in range(2):
            _train(plain, its, number, size, None)
            _train(sharded, own, number, size, rank)
        for name, given in OPTIONS.items():
            options = StateDictOptions(**given)
            for what, get in {
                "model": lambda m, o, options=options: get_model_state_dict(m, options=options),
                "optimizer": lambda m, o, options=options: get_optimizer_state_dict(m, o, options=options),
                "both": lambda m, o, options=options: get_state_dict(m, o, options=options),
                "submodule": lambda m, o, options=options: get_model_state_dict(m, submodules={m.up}, options=options),
            }.items():
                expected, found = _or_error(get, plain, its), _or_error(get, sharded, own)
                if _facts(found) != _facts(expected):
                    wrong.append(f"{what}, {name}: another state")
                if given.get("full_state_dict") and not _is_plain(found):
                    wrong.append(f"{what}, {name}: not plain")
        wrong += _loaded(rank, size, maker, frozen, group, plain, its, sharded, own)
    return wrong


def _set(model_state: Any, state: Any, options: StateDictOptions, model: Any, optimizer: Any) -> None:
    set_model_state_dict(model, dict(model_state), options=options)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)


def _loaded(
    rank: int, size: int, maker: str, frozen: bool, group: Any, plain: Any, its: Any, sharded: Any, own: Any
) -> list[str]:
    wrong = []
    continued = built(Tied)
    continued.down.weight.requires_grad_(not frozen)
    continued.load_state_dict(plain.state_dict())
    expected_optimizer = MAKERS[maker](continued)
    # torch's load shares the tensors that it is given.
    set_optimizer_state_dict(continued, expected_optimizer, copy.deepcopy(get_optimizer_state_dict(plain, its)))
    for number in range(2, 4):
        _train(continued, expected_optimizer, number, size, None)
    expected = _facts(continued.state_dict())
    for name, given in LOADS.items():
        for source, (model, optimizer) in {"plain": (plain, its), "sharded": (sharded, own)}.items():
            for flat in (False, True) if name == "default" else (False,):  # torch itself loads no full and flat ones
                gets = StateDictOptions(
                    full_state_dict="full" in name or "rank" in name, flatten_optimizer_state_dict=flat
                )
                model_state, state = get_state_dict(model, optimizer, options=gets)
                if given.get("broadcast_from_rank0") and rank != 0:
                    model_state, state = {}, {}
                options = StateDictOptions(**given, flatten_optimizer_state_dict=flat)
                others = []
                for again in (_made(frozen, seed=8), etp.shard_module_(_made(frozen, seed=8), group, reduction="sum")):
                    if source == "sharded" and name == "default" and not others:
                        others.append(expected)  # plain torch takes no LogicalTensor into its moments
                        continue
                    another = MAKERS[maker](again)

                    refused = _or_error(functools.partial(_set, model_state, state, options), again, another)
                    if refused is None:
                        for number in range(2, 4):
                            _train(again, another, number, size, rank if len(others) == 1 else None)
                    others.append(refused or _facts(again.state_dict()))
                if others[1] != others[0] or ("error" not in others[0] and others[0] != expected):
                    told = others[1].get("error", "training goes on otherwise")
                    wrong.append(f"{name} from {source}{', flat' if flat else ''}: {told}")
    return wrong


@pytest.mark.parametrize(
    ("size", "maker", "frozen"),
    [(2, "AdamW", False), (2, "fused AMSGrad", True), (3, "SGD in groups", False), (3, "AdamW", True)],
)
def test_helpers_give_and_take_what_they_do_in_plain_torch(size: int, maker: str, frozen: bool) -> None:
    for found in launch(functools.partial(_compare, size=size, maker=maker, frozen=frozen), size):
        assert found == []
