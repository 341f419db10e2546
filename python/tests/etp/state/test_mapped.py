"""Weights that modules read in their owners' memory: the same bytes, and nobody is hurt by who keeps one."""

from __future__ import annotations

import functools
import os
from typing import Any

import etp_mapped_scenarios
import pytest
import torch
from etp_mapped_scenarios import HIDDEN, MAPPED, WIDTH, WORDS, Wide, loss_of
from etp_models import Run, adamw, as_bytes, built, configured, on_grid, on_ranks, plainly, scenarios_of
from tessera import etp
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import launch

SCENARIOS = scenarios_of(vars(etp_mapped_scenarios))


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected


def test_replicas_read_their_own() -> None:
    name = "accumulation_and_evaluation"
    found = on_grid({name: SCENARIOS[name]}, 2, 2)
    expected = plainly(SCENARIOS[name], 4)
    assert all(rank == expected for rank in found[name])


class Keeping(TorchDispatchMode):
    """Keeps every tensor that has the shape of the wide layer's weight, as a profiler might."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, torch.Tensor) and tuple(each.shape) == (WIDTH, HIDDEN) and not each.is_contiguous():
                self.kept.append(each)  # the transposed weight in forward
        return func(*args, **(kwargs or {}))


def _keep(rank: int) -> tuple[int, int, list[bool]]:
    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model = run.sharded(built(Wide))
        optimizer = adamw(model.parameters())
        kept, copies = [], []
        for number in range(3):
            with torch.no_grad(), Keeping() as keeping:
                loss_of(model, number)
            kept.append(keeping.kept[0])
            copies.append(as_bytes(kept[-1].t()))
            run.train(model, optimizer, steps=1, loss=loss_of)
        before = etp.report(model).gathered_bytes
        same = [as_bytes(each.t()) == copy for each, copy in zip(kept, copies, strict=True)]
        etp.unshard_(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        same += [as_bytes(each.t()) == copy for each, copy in zip(kept, copies, strict=True)]
        return before, len(set(copies)), same


def test_who_keeps_one_keeps_its_values() -> None:
    for before, versions, same in launch(_keep, 2):
        assert before >= 3 * WIDTH * HIDDEN * 4  # each has got memory of its own
        assert versions == 3
        assert same == [True] * 6


def _write(rank: int) -> tuple[list[Any], list[Any]]:
    """What an operation with the parameter gives may be written by other means than torch's; its own values are
    read-only there."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Wide), group)
        before = [loss_of(model, number).item() for number in range(2)]
        values = model.up.weight.t().detach().numpy()
        assert values.shape == (WIDTH, HIDDEN)
        with pytest.raises(ValueError, match="read-only"):
            values[...] = rank
        for each in (etp.whole(model.up.weight), model.up.weight * 1, model.up.weight.t().contiguous()):
            written = each.detach().numpy()
            written[...] = rank
            assert (written == rank).all()
        return before, [loss_of(model, number).item() for number in range(2)]


def test_a_write_into_what_an_operation_gives_stays_there() -> None:
    expected = [loss_of(built(Wide), number).item() for number in range(2)]
    for before, after in launch(_write, 2):
        assert before == after == expected


def _fork(rank: int) -> tuple[list[float], int]:
    """A data loader's worker has the mappings, too, and ends."""
    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model = run.sharded(built(Wide))
        optimizer = adamw(model.parameters())
        statuses = 0
        losses = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0)
            run.train(model, optimizer, steps=1, loss=loss_of)
            losses.append(loss_of(model, number).item())
            statuses += os.waitpid(child, 0)[1]
        return losses, statuses


def test_forked_children_end_without_harm() -> None:
    run = Run(2)
    model = built(Wide)
    optimizer = adamw(model.parameters())
    expected = []
    torch.set_num_threads(1)
    for number in range(3):
        run.train(model, optimizer, steps=1, loss=loss_of)
        expected.append(loss_of(model, number).item())
    for losses, statuses in launch(_fork, 2):
        assert losses == expected
        assert statuses == 0


def _options(rank: int, options: dict[str, Any]) -> tuple[int, int, int, int, str, str]:
    with etp.init_group(timeout=30) as group, configured(prefetch="on", **options):
        forecast = repr(etp.forecast(built(Wide), 2, rank=rank))
        model = etp.shard_module_(built(Wide), group)
        told = repr(etp.forecast(model))
        optimizer = adamw(model.parameters())
        for number in range(3):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = etp.report(model)
        assert report.gathered_peak_bytes == etp.forecast(model).gathered
        return report.mapped, report.mapped_bytes, report.bytes_gathered, report.gathered_peak_bytes, forecast, told


@pytest.mark.parametrize("options", [{}, {"map_weights": False}, {"check": True}, {"stream_bytes_per_second": 1e12}])
def test_reports_and_forecasts_know_what_is_copied(options: dict[str, Any]) -> None:
    sizes = {"emb.weight": WORDS * WIDTH, "up.weight": WIDTH * HIDDEN, "down.weight": WIDTH * HIDDEN}
    assert tuple(sizes) == MAPPED
    for mapped, mapped_bytes, gathered, peak, forecast, told in launch(functools.partial(_options, options=options), 2):
        assert forecast == told
        assert (mapped_bytes, mapped) == ((0, 0) if options else (4 * sum(sizes.values()), 3 * 7))
        mixes = WIDTH * WIDTH * 4  # of the operation by hand: always copied
        assert gathered > 3 * 2 * mixes if options else gathered == 3 * 2 * mixes
        assert peak > mixes if options else peak == mixes


def _paced(rank: int) -> float:
    """A paced gather takes its time, which nothing may shorten."""
    with etp.init_group(timeout=30) as group, configured(prefetch="off", stream_bytes_per_second=1e6):
        model = etp.shard_module_(torch.nn.Linear(WIDTH, HIDDEN), group)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        return etp.report(model).exposed_seconds


def test_paced_streams_copy() -> None:
    for exposed in launch(_paced, 2):
        assert exposed > WIDTH * HIDDEN * 4 / 1e6 * 0.9
