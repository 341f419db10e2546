"""After the same global micro-batches, 1, 2 and 4 ranks have equal bytes of weights, optimiser states and norms; in
every combination of formats, accumulation, recomputation and optimisers, and whatever is prefetched.

One rank is plain torch without the package, unless a format travels.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import etp_matrix
import pytest
import torch
from etp_matrix import ALL, COVERING, POLICIES, Case, same_uses, train
from etp_models import Loss, Run, built, loss_of, on_ranks, plainly
from tessera import etp

STEPS = 3
MANY_STEPS = 200


def _on_one(case: Case, steps: int, loss: Loss = etp_matrix.loss_of) -> Any:
    torch.set_num_threads(1)
    return train(Run(1, 0, etp.init_group() if case.gather else None), case, steps, loss=loss)


def require_equal(ranks: list[Any], expected: Any) -> None:
    for rank in ranks:
        assert [name for name in expected if rank[name] != expected[name]] == []
        assert rank.keys() == expected.keys()


@pytest.fixture(scope="module", params=[2, 4])
def covering(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return on_ranks({str(case): functools.partial(train, case=case, steps=STEPS) for case in COVERING}, request.param)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_every_number_of_ranks_gives_the_same_bytes(covering: dict[str, list[Any]], case: Case) -> None:
    require_equal(covering[str(case)], _on_one(case, STEPS))


def test_the_covering_set_has_every_pair_of_values() -> None:
    columns = ("gather", "accumulation", "recompute", "fused")
    for first in columns:
        for second in columns:
            pairs = [{(getattr(case, first), getattr(case, second)) for case in cases} for cases in (ALL, COVERING)]
            assert pairs[0] == pairs[1], (first, second)


POLICY_CASE = next(case for case in ALL if case.gather == "nvfp4" and case.accumulation == 4 and case.recompute)


@pytest.fixture(scope="module")
def policies() -> dict[str, list[Any]]:
    run = functools.partial(train, case=POLICY_CASE, steps=STEPS, loss=same_uses)
    return on_ranks({policy: functools.partial(run, policy=policy) for policy in POLICIES}, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_a_bit(policies: dict[str, list[Any]], policy: str) -> None:
    require_equal(policies[policy], _on_one(POLICY_CASE, STEPS, same_uses))


THIRD = 3


def _gradients_of_three(run: Run) -> Any:
    """Of 12 micro-batches. In one process it is their sum by three, and the sum of their magnitudes."""
    model = run.sharded(built())
    if run.group is not None:
        for _ in range(4):
            run.backward(model)
        return run.whole(model.up.weight.grad), run.whole(model.emb.weight.grad)
    sums, magnitudes = [0.0, 0.0], [0.0, 0.0]
    for number in range(12):
        loss_of(model, number).backward()
        for i, parameter in enumerate((model.up.weight, model.emb.weight)):
            sums[i] = sums[i] + parameter.grad
            magnitudes[i] = magnitudes[i] + parameter.grad.abs()
        model.zero_grad()
    return [each / THIRD for each in sums], [each / THIRD for each in magnitudes]


def test_three_ranks_are_within_the_bound_of_rounding() -> None:
    """Of 12 additions, the rounded third, the products and a division: 27 roundings of half a unit in the last place,
    each of at most the sum of magnitudes."""
    expected, magnitudes = plainly(_gradients_of_three, 1)
    differs = False
    for rank in on_ranks({"three": _gradients_of_three}, THIRD)["three"]:
        for found, wanted, magnitude in zip(rank, expected, magnitudes, strict=True):
            error = (found.double() - wanted.double()).abs()
            assert bool((error <= 27 * 2.0**-24 * 1.001 * magnitude.double()).all()), error.max()
            differs = differs or bool(error.any())
    assert differs


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_bytes_after_many_steps(case: Case, size: int) -> None:
    scenario = functools.partial(train, case=case, steps=MANY_STEPS)
    ranks = on_ranks({"many": scenario}, size)["many"]
    expected = _after_many_steps(case)
    if not case.gather:
        _require_close(ranks[0]["norms"], expected["norms"])
        expected = expected | {"norms": ranks[0]["norms"]}
    require_equal(ranks, expected)


def _require_close(norms: bytes, plain: bytes) -> None:
    """Plain torch has the stack of experts as one tensor, and adds in another order: at most 256 squares in each of
    eight sums, these, and those of 20 parameters, in f64, on either side. The root halves what that rounds."""
    pairs = zip(*(struct.unpack(f"{MANY_STEPS}d", each) for each in (norms, plain)), strict=True)
    assert [(step, a, b) for step, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=300 * 2.0**-53)] == []


@functools.cache
def _after_many_steps(case: Case) -> Any:
    return _on_one(case, MANY_STEPS)
