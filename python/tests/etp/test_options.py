"""update_config(): every option does what it says, or is refused."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import tessera
import torch
from etp_models import Run, adamw, built, configured, loss_of
from tessera import etp
from torch_ranks import launch

COMMAND = pathlib.Path(tessera.__file__).parent / "bin" / "tessera"


def _quantised(run: Run, together: bool) -> Any:
    with configured(coalesce_amax_allreduce=together):
        model = run.sharded(built(), formats={".*": "nvfp4"})
    run.train(model, adamw(model.parameters()))
    return run.weights(model), etp.report(model).max_exchanges


def _by_exchanges(rank: int) -> list[Any]:
    with etp.init_group(timeout=30) as group:
        return [_quantised(Run(2, rank, group), together) for together in (True, False)]


def test_amaxes_are_exchanged_together_or_one_by_one() -> None:
    for (weights, exchanges), (others, more) in launch(_by_exchanges, 2):
        assert weights == others
        assert (exchanges, more) == (4, 3 * 4)  # three weights; at the start, and in three updates


def _disagreeing(rank: int) -> str:
    with (
        etp.init_group(timeout=30) as group,
        configured(coalesce_amax_allreduce=rank == 0),
        pytest.raises(tessera.MismatchError) as caught,
    ):
        etp.shard_module_(built(), group, formats={".*": "nvfp4"})
    return str(caught.value)


def test_ranks_that_exchange_in_other_ways_are_told() -> None:
    assert all("amaxes exchanged together" in each and "one by one" in each for each in launch(_disagreeing, 2))


OTHER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "mode": ("deferred", "inline"),
    "nonfinite": ("error", "propagate"),
    "buffers": ("broadcast", "mean"),
    "experts": ((), [["0.weight", "1.weight"]]),
}


def _two() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def _given_other_options(rank: int) -> tuple[dict[str, str], bool]:
    texts = {}
    with etp.init_group(timeout=30) as group:
        for name, values in OTHER_OPTIONS.items():
            with pytest.raises(tessera.Error) as caught:
                etp.shard_module_(_two(), group, **{name: values[rank]})
            texts[name] = str(caught.value)
        model = etp.shard_module_(built(), group)
        return texts, bool(loss_of(model, rank).isfinite())


def test_options_of_a_model_that_differ_between_ranks_are_named() -> None:
    (first, trains), (second, trains_too) = launch(_given_other_options, 2)
    assert trains and trains_too
    for name in OTHER_OPTIONS:
        assert f"{name}= is" in first[name] and first[name] == second[name], first[name]


def _in_line(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group, configured(async_reduction=False):
        model = etp.shard_module_(built(), group)
        (gradient,) = torch.autograd.grad(loss_of(model, rank), [model.up.weight])
        found["whole"] = isinstance(gradient, etp.LogicalTensor) and gradient.shape == model.up.weight.shape
        model = etp.shard_module_(built(), group, mode="deferred")
        with pytest.raises(tessera.UnimplementedError, match="cannot give it as a value"):
            torch.autograd.grad(loss_of(model, rank), [model.up.weight])
        layer = etp.Linear(32, 32, etp_group=group)
        (gradient,) = torch.autograd.grad(layer(torch.ones(4, 32)).sum(), [layer.weight])
        found["layer"] = isinstance(gradient, etp.LogicalTensor) and gradient.shape == (32, 32)
    return found


def test_without_async_reduction_weights_are_inputs_of_autograd() -> None:
    for found in launch(_in_line, 2):
        assert found == {"whole": True, "layer": True}


def _counted(model: Any) -> tuple[int, int, int]:
    report = etp.report(model)
    return report.on_demand, report.prefetched, report.mispredicted


def _first_step(rank: int) -> list[Any]:
    found: list[Any] = []
    with etp.init_group(timeout=30) as group, configured(prefetch="on", map_weights=False):
        run = Run(2, rank, group)
        model = run.sharded(built())
        for _ in range(3):
            before = _counted(model)
            run.backward(model)
            found.append(tuple(now - then for now, then in zip(_counted(model), before, strict=True)))
        adamw(model.parameters()).step()
        found.append(_counted(model)[2])
    return found


def test_a_first_step_is_prefetched_from_its_second_micro_batch_on() -> None:
    for first, second, third, mispredicted in launch(_first_step, 2):
        uses = first[0]
        assert first == (uses, 0, 0) and uses > 4
        assert second == (1, uses - 1, 0)  # its beginning is not expected yet
        assert third == (0, uses, 0)
        assert mispredicted == 1  # that of a fourth one


def _written_outside(rank: int) -> str:
    with etp.init_group(timeout=30) as group, configured(check=True):
        model = etp.shard_module_(built(), group)
        if rank == 0:
            model.up.weight.etp.local[3].zero_()
        try:
            with etp.update(model):
                return ""
        except tessera.DataLossError as error:
            return str(error)


def test_check_finds_a_write_outside_of_updates() -> None:
    first, second = launch(_written_outside, 2)
    assert '"up.weight": row 3 has been written since version 1' in first
    assert second.startswith("rank 0: etp.update() has failed: DataLossError")


def test_what_is_refused_changes_nothing() -> None:
    before = dict(vars(etp.config.config))
    for options, message in (
        ({"distance": 3, "check_param_states": False}, "check_param_states=False: transitions"),
        ({"distance": 3, "depth": 1}, "Unknown ETP config option: depth"),
        ({"coalesce_amax_allreduce": 1}, "coalesce_amax_allreduce 1: give True or False"),
        ({"async_reduction": None}, "async_reduction None: give True or False"),
        ({"schedule_log": 3}, "schedule_log 3: give a str"),
        ({"stream_bytes_per_second": 0}, "stream_bytes_per_second 0: give a number above 0"),
        ({"stream_bytes_per_second": "fast"}, "stream_bytes_per_second 'fast': give a number above 0"),
    ):
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            etp.update_config(**options)
        assert message in str(caught.value)
        assert vars(etp.config.config) == before
    etp.update_config(check_param_states=True)


def _logged(rank: int, folder: pathlib.Path) -> None:
    with etp.init_group(timeout=30) as group, configured(schedule_log=str(folder / "{group}-{rank}.etplog")):
        models = [
            etp.shard_module_(built(), group, formats={"up.*": "nvfp4"}, native=native) for native in ((), ["up.*"])
        ]
        run = Run(2, rank, group)
        for model in models:
            run.train(model, adamw(model.parameters()))
            etp.unshard_(model)


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not built")
def test_schedules_are_logged_and_checked(tmp_path: pathlib.Path) -> None:
    launch(functools.partial(_logged, folder=tmp_path), 2)
    logs = sorted(tmp_path.rglob("*.etplog"))
    assert len(logs) == 4  # of two models on two ranks
    for model in (logs[:2], logs[2:]):
        for arguments in (["check"], ["trace", "--out", str(tmp_path / "trace.json")]):
            command = [sys.executable, "-m", "tessera", "etp", *arguments, *map(str, model)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
        assert '"subject":"up.weight"' in (tmp_path / "trace.json").read_text()


def test_a_log_for_several_ranks_names_them(tmp_path: pathlib.Path) -> None:
    for message in launch(functools.partial(_one_log, path=str(tmp_path / "one.etplog")), 2):
        assert "would record their schedule in" in message


def _one_log(rank: int, path: str) -> str:
    with (
        etp.init_group(timeout=30) as group,
        configured(schedule_log=path),
        pytest.raises(tessera.InvalidArgumentError) as caught,
    ):
        etp.shard_module_(built(), group)
    return str(caught.value)
