"""What gloo refuses, and that what stands in for torch is right and would be noticed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .cases import SEED, Case, Grid, Side
from .reference import DTYPES, NANS, REFUSED, as_carrier, cast, rank_order, to_bytes, whole


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_gloo_refuses_is_what_is_listed(dtype: str) -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    tensor = torch.zeros(8, dtype=torch.uint8).view(DTYPES[dtype])
    if dtype not in REFUSED:
        group.broadcast(tensor, 0).wait()
        return
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        group.broadcast(tensor, 0).wait()


def _partial_case(op: str, dtype: str, content: str, processes: tuple[int, ...] = (0, 1, 2, 3)) -> Case:
    src, dst = Side(Grid((len(processes),), processes), (f"P{op}",)), Side(Grid((1,), (0,)), ("R",))
    return Case(SEED, "hand", 0, (50,), dtype, dtype, src, dst, content)


def test_the_rank_order_sum_is_one_of_its_own() -> None:
    """Else random floats would show nothing: in another order, or in bf16, it has other bits."""
    case = _partial_case("sum", "bf16", "floats")
    terms = [whole(case, term) for term in range(4)]
    expected = (((terms[0].float() + terms[1]) + terms[2]) + terms[3]).bfloat16()
    assert torch.equal(rank_order(case), expected)
    backwards = _partial_case("sum", "f32", "floats", (3, 2, 1, 0))
    assert to_bytes(rank_order(backwards)) != to_bytes(rank_order(_partial_case("sum", "f32", "floats")))
    assert not torch.equal(((terms[0] + terms[1]) + terms[2]) + terms[3], expected)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", ["i8", "u16", "u64", "i32", "f16", "c64"])
def test_small_integers_have_one_result_in_any_order(op: str, dtype: str) -> None:
    if dtype == "c64" and op in ("min", "max"):
        return
    results = {
        to_bytes(rank_order(_partial_case(op, dtype, "integers", processes)))
        for processes in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0))
    }
    assert len(results) == 1


def test_nans_of_a_cast_are_one_value() -> None:
    payload = torch.tensor([0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for target in ("f64", "f16", "bf16"):
        mask = (1 << 8 * DTYPES[target].itemsize) - 1
        assert {int(code) & mask for code in as_carrier(cast(payload, target))} == {NANS[target]}
    assert cast(payload, "f32") is payload  # no cast, no change
