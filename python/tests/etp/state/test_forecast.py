"""What a model will take, told before it is sharded: what the sharded one tells, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import Tied, built, configured
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch


class Several(torch.nn.Module):
    """A stack, a convolution, weights of a list, a layer of this package without a group, frozen and bf16 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = torch.nn.Parameter(torch.randn(3, 40, 32))
        self.conv = torch.nn.Conv1d(16, 33, 5)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 48, bias=False) for _ in range(3))
        self.grouped = etp.GroupedLinear(2, 32, 64)
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)
        self.low = torch.nn.Linear(96, 64, dtype=torch.bfloat16)
        self.output_layer = torch.nn.Linear(32, 130)


LISTED = [f"experts.{i}.weight" for i in range(3)]
Case = tuple[Callable[[], torch.nn.Module], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "as it is": (Tied, {}, {}),
    "formats": (Tied, {"formats": {"up.*": "nvfp4", "emb.*": "mxfp8", ".*": "bf16"}}, {}),
    "native": (Tied, {"formats": {".*": "mxfp8"}, "native": [r"up\.weight"], "compute_dtype": torch.bfloat16}, {}),
    "several": (Several, {"experts": [LISTED]}, {}),
    "several in formats": (Several, {"formats": {".*": "mxfp8"}, "min_elements": 4000}, {"distance": 3}),
    "no stacks": (Several, {"stacks": lambda name, parameter: False}, {"expert_distance": 1}),
    "filtered": (Several, {"filter": lambda name, parameter: "expert" in name}, {"cap_bytes": 10_000}),
    "without prefetches": (Tied, {}, {"prefetch": "off", "pad_for_alignment": 64}),
}


def _both(groups: dict[str, Any], rank: int, ranks: int, replicas: int) -> dict[str, tuple[str, str, str]]:
    """Forecasts before, of the same on the meta device, and after."""
    found = {}
    for name, (kind, options, config) in CASES.items():
        if ranks * replicas == 1 and "formats" not in options:  # shard_module_() leaves it as it is
            continue
        with configured(**{"prefetch": "on", **config}):
            model = built(kind)
            asked = {"rank": rank, "replicas": replicas, **options}
            before = etp.forecast(model, ranks, **asked)
            with torch.device("meta"):
                on_meta = kind()
            if isinstance(on_meta, Several):
                on_meta.frozen.requires_grad_(False)
            without_memory = etp.forecast(on_meta, ranks, **asked)
            etp.shard_module_(model, groups["group"], dp=groups["dp"], **options)
            found[name] = repr(before), repr(without_memory), repr(etp.forecast(model))
    return found


def _on_rank(rank: int, ranks: int, replicas: int) -> dict[str, tuple[str, str, str]]:
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "etp"))
    with etp.init_group(mesh=mesh["etp"]) as group, etp.init_group(mesh=mesh["dp"], name="dp") as dp:
        groups = {"group": group, "dp": dp if replicas > 1 else None}
        return _both(groups, group.rank, ranks, replicas)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_it_is_that_of_the_sharded_model(ranks: int, replicas: int) -> None:
    found = launch(functools.partial(_on_rank, ranks=ranks, replicas=replicas), ranks * replicas)
    for name in CASES:
        for rank, each in enumerate(found):
            if name in each:
                before, without_memory, after = each[name]
                assert before == without_memory == after, f"{name}, rank {rank}"
        assert any(name in each for each in found) or (ranks * replicas == 1 and "formats" not in CASES[name][1])
    if ranks == 3:  # 33 rows of the convolution: the last rank has one
        assert len({each["several"][0] for each in found}) == 2


def test_a_model_of_any_size_is_possible() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(40)])
    whole = 4 << 32
    for maps in (True, False):
        with configured(prefetch="on", map_weights=maps):
            told = etp.forecast(model, 8)
        assert (told.parameters, told.gradients) == (40 * whole // 8, 40 * whole // 8)
        assert (told.gathered, told.produced, told.publication) == (0 if maps else 2 * whole, 3 * whole, 0)
        assert told.total == told.parameters + told.gradients + told.gathered + told.produced + told.replicated


def test_what_cannot_be_told_is_refused() -> None:
    model = torch.nn.Linear(64, 64)
    for arguments, text in (
        ({"ranks": 2, "rank": 2}, "rank 2: give a whole number from 0 to 1"),
        ({"ranks": 0}, "ranks 0: give"),
        ({"ranks": 2, "formats": {"x": "bf16"}}, "gives no weight its format"),
        ({"ranks": 2, "formats": {".*": "int4"}}, "int4"),
    ):
        with pytest.raises(tessera.InvalidArgumentError, match=text):
            etp.forecast(model, **arguments)
    with pytest.raises(tessera.InvalidArgumentError, match="of no model"):
        etp.forecast(None, 2)
    with pytest.raises(tessera.NotFoundError, match="shard_module_"):
        etp.forecast(model)
    with etp.init_group(store="auto", rank=0, size=1) as group:
        etp.shard_module_(model, group, formats={".*": "bf16"})
        with pytest.raises(tessera.AlreadyExistsError, match="leave ranks= out"):
            etp.forecast(model, 2)
