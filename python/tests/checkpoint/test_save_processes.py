"""Real ranks: one is killed while its group saves, and the others say so."""

from __future__ import annotations

import pathlib

import pytest
import tessera
import torch
from etp_models import as_bytes
from jobs import Jobs, Rank
from killing import die, stepping
from saved_files import bytes_of, tensors_of
from tessera import checkpoint, etp
from torch_ranks import join_group


def _model(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(32, 61), torch.nn.Linear(61, 40))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _killed(rank: Rank, folder: pathlib.Path, step: str) -> str:
    """Rank 1 is killed before its first `step`. Returns what the other says."""
    join_group(rank)
    with etp.init_group(timeout=60) as group:
        model = etp.shard_module_(_model(1.0), group)
        checkpoint.save(model, None, folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        victim = step if rank.rank == 1 else ""
        with stepping(-1, die) as steps:
            counted = steps.before

            def before(name: str) -> None:
                if name == victim:
                    rank.tell()
                    rank.hear()  # is killed here
                counted(name)

            steps.before = before  # type: ignore[method-assign]
            with pytest.raises(tessera.PeerLostError) as caught:
                checkpoint.save(model, None, folder)
        rank.tell(str(caught.value))
        rank.hear()
    return ""


@pytest.mark.parametrize("step", ["create", "write_slice", "sync"])
def test_the_others_say_that_a_rank_is_lost(folder: pathlib.Path, step: str) -> None:
    saved = folder / "saved"
    with Jobs(folder, forked=True) as jobs:
        ranks = jobs.start("torch", _killed, saved, step, world=2)
        ranks[1].hear()
        ranks[1].kill()
        assert "save: " in ranks[0].hear()
        ranks[0].kill()
    assert bytes_of(tensors_of(saved)) == bytes_of(_model(1.0).state_dict())
    model = _model(0.0)
    checkpoint.load(model, None, saved)
    checkpoint.save(model, None, saved)
    assert bytes_of(tensors_of(saved)) == bytes_of(_model(1.0).state_dict())
    assert len(list(saved.iterdir())) == 2


def _over_a_store(rank: Rank, folder: pathlib.Path) -> dict[str, bytes]:
    """Without torch.distributed."""
    with etp.init_group(store="auto", rank=rank.rank, size=rank.world) as group:
        model = etp.shard_module_(_model(float(rank.world)), group)
        checkpoint.save(model, None, folder)
        again = etp.shard_module_(_model(0.0), group)
        checkpoint.load(again, None, folder)
        return {name: as_bytes(etp.whole(parameter)) for name, parameter in again.named_parameters()}


def test_ranks_that_met_by_a_store(folder: pathlib.Path) -> None:
    with Jobs(folder, forked=True) as jobs:
        jobs.start("etp", _over_a_store, folder / "saved", world=2)
        expected = {name: as_bytes(parameter) for name, parameter in _model(2.0).named_parameters()}
        assert jobs.results()["etp"] == [expected] * 2
    assert len(list((folder / "saved").glob("model-1-*-of-00002.safetensors"))) == 2
