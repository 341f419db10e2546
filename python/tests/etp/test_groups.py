"""Where a group comes from."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import tempfile
import threading
import time
from typing import Any

import tessera
import torch
import torch.distributed
from etp_models import Run, adamw, batch, built, plainly
from jobs import Jobs, Rank
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch


def _trained(run: Run, steps: int = 3) -> dict[str, bytes]:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()), steps)
    return run.weights(model)


def _over_a_mesh(rank: int) -> tuple[int, int, dict[str, bytes]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    with etp.init_group(mesh["etp"]) if rank % 2 else etp.init_group(mesh=mesh["etp"]) as group:
        return group.rank, group.size, _trained(Run(2, group.rank, group))


def test_an_axis_of_a_mesh() -> None:
    found = launch(_over_a_mesh, 4)
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert all(weights == plainly(_trained, 2) for _, _, weights in found)


def _over_a_process_group(rank: int) -> Any:
    own = torch.distributed.new_group([0, 1])
    found = None
    if rank < 2:
        group = etp.init_group(own, name="first")
        torch.distributed.destroy_process_group(own)  # it is not needed any more
        with group:
            found = repr(group), _trained(Run(2, rank, group))
    torch.distributed.barrier()  # gloo connects late, and the others would lose a rank that has ended
    return found


def test_a_process_group() -> None:
    first, second, _ = launch(_over_a_process_group, 3)
    assert first == ("Group('first', rank=0, size=2)", plainly(_trained, 2))
    assert second[1] == first[1]


def _over_a_store(rank: Rank) -> dict[str, bytes]:
    torch.set_num_threads(1)
    with etp.init_group(store="auto", rank=rank.rank, size=rank.world) as group:
        return _trained(Run(rank.world, rank.rank, group))


def test_a_store_without_torch_distributed() -> None:
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, Jobs(pathlib.Path(folder), forked=True) as jobs:
        jobs.start("etp", _over_a_store, world=2)
        assert jobs.results()["etp"] == [plainly(_trained, 2)] * 2


def _interrupted(rank: int) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    group = etp.init_group(timeout=60)
    model = etp.shard_module_(built(), group)
    torch.distributed.barrier()
    if rank == 1:
        torch.distributed.barrier()  # never begins the update
        return ""
    main = threading.main_thread()
    threading.Thread(target=lambda: (time.sleep(0.3), signal.pthread_kill(main.ident or 0, signal.SIGINT))).start()
    try:
        with etp.update(model):
            pass
    except KeyboardInterrupt:
        torch.distributed.barrier()
        return "interrupted"
    return "not interrupted"


def test_ctrl_c_ends_a_wait_for_other_ranks() -> None:
    assert launch(_interrupted, 2) == ["interrupted", ""]


def _killed(rank: Rank) -> str:
    try:
        with etp.init_group(store="auto", rank=rank.rank, size=rank.world) as group:
            model = etp.shard_module_(built(), group)
            rank.tell(os.getpid())
            if rank.rank == 1:
                rank.hear()
            with etp.update(model):
                pass
    except tessera.PeerLostError as error:
        return str(error)
    return "not lost"


def test_a_killed_rank_ends_the_waits_of_others() -> None:
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, Jobs(pathlib.Path(folder), forked=True) as jobs:
        ranks = jobs.start("etp", _killed, world=2)
        for rank in ranks:
            rank.hear()
        ranks[1].kill()
        assert "rank 1" in ranks[0].result()


FAILURES = 6


def _one_fails(rank: int) -> tuple[str, dict[str, bytes]]:
    def fails(gradient: torch.Tensor) -> None:
        raise RuntimeError("a user's hook")

    said = ""
    with etp.init_group(timeout=60) as group:
        run = Run(2, rank, group)
        model = run.sharded(built())
        optimizer = adamw(model.parameters())
        for _ in range(FAILURES):  # gradients lie where those of failed backwards did, sooner or later
            x = model.emb(batch(7)[0])
            if rank == 0:
                x.register_hook(fails)
            try:
                model.head(model.block(x)).sum().backward()
            except (RuntimeError, tessera.CancelledError) as error:
                said = str(error)
            optimizer.zero_grad()
            run.train(model, optimizer, 2)
        return said, run.weights(model)


def test_a_backward_that_fails_on_one_rank_is_an_error_of_all_and_the_next_step_is_right() -> None:
    (first, weights), (second, others) = launch(_one_fails, 2)
    assert first == "a user's hook"
    assert second == "rank 0: RuntimeError: a user's hook (in a backward)"
    assert weights == others == plainly(functools.partial(_trained, steps=2 * FAILURES), 2)
