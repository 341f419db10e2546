"""What runs in each worker of vLLM: it learns where weights go, stages versions, and installs them.

vLLM must not see an exception that only one rank raises: its executor would leave the other ranks' answers in their
queues, and answer the next call with them. So nothing raises once it is initialised: a Verdict tells what failed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..._bus.bus import connect
from ..._errors import InvalidArgumentError
from ..._tensors.torch import torch_dtype
from .._learn import learn_map
from .._live import LiveWeights, Verdict
from ._layers import plan_of
from ._meta import on_meta


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How a worker finds the trainer on the bus; see tessera.connect().

    Attributes:
        pair: The name under which both jobs meet.
        trainer: Name of the trainer's job.
        engine: Name of this engine's job. With data parallelism each replica is a job "NAME-dpN" of its own.
        store: URL of the store. None: as everywhere.
        batch: Name of the batch.
        timeout: Seconds to wait for the trainer.
        wire: Formats that tensors are quantised to on their way.
        delta: Send changes only.
    """

    pair: str = "weights"
    trainer: str = "trainer"
    engine: str = "engine"
    store: str | None = None
    batch: str = "default"
    timeout: float = 60
    wire: Any = None
    delta: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Attributes:
    min_version: The oldest version to take. None: any that is newer than the last.
    timeout: Seconds until there is one.
    """

    min_version: int | None = None
    timeout: float = 60


class TesseraWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The backend "tessera" of vLLM."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _bus: Any = None
    _live: LiveWeights | None = None
    _verdict: Verdict | None = None
    _thread: threading.Thread | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meets the trainer and learns the map. May raise: nothing has changed."""
        self.shutdown()
        parallel = self.parallel_config
        group = get_world_group()
        engine = init_info.engine
        if parallel.data_parallel_size > 1:
            engine = f"{engine}-dp{parallel.data_parallel_index}"
        bus = connect(
            init_info.pair,
            role=engine,
            peer=init_info.trainer,
            store=init_info.store,
            rank=group.rank_in_group,
            world=group.world_size,
            timeout=init_info.timeout,
        )
        try:
            self._join(bus, init_info, group)
        except BaseException:
            bus.close()
            raise
        self._bus = bus

    def _join(self, bus: Any, init_info: InitInfo, group: Any) -> None:
        offered = bus.manifest(init_info.batch)
        checkpoint = {each.name: (each.shape, torch_dtype(each.dtype)) for each in offered}
        learned = learn_map(self.model, checkpoint, meta=on_meta)
        if not learned.slices:
            named = ", ".join(list(checkpoint)[:5])
            raise InvalidArgumentError(f"vLLM's model takes nothing of what the trainer sends ({named}, ...)")
        staged = learned.staging()
        batch = bus.register(
            staged,
            init_info.batch,
            direction="recv",
            map=learned.map,
            wire=init_info.wire,
            delta=init_info.delta,
        )
        self._live = LiveWeights(
            lambda: _tensors(self.model),
            learned,
            batch,
            staged,
            agree=lambda ok: _agree(ok, group),
            rank=group.rank_in_group,
            plan=lambda memory: plan_of(self.model, learned, memory, self.model_config.dtype),
        )

    def start_weight_update(self) -> None:
        """Nothing: vLLM's own preparation would take the live weights away before new ones are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stages a version; requests may run. Never raises: see status()."""
        self._verdict = self._require_live().stage(update_info.min_version, update_info.timeout)

    def finish_weight_update(self) -> None:
        """Installs what is staged. Never raises: see status()."""
        live = self._require_live()
        if live.staged is not None:
            self._verdict = live.commit()

    def receive_in_background(self, update_info: UpdateInfo) -> None:
        """The slow part of receive_weights(), in a thread. One at a time: a second call while it runs does nothing."""
        live = self._require_live()
        if self._receiving():
            return

        def work() -> None:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                live.receive(update_info.min_version, update_info.timeout)

        self._thread = threading.Thread(target=work, name="tessera-receive", daemon=True)
        self._thread.start()

    def _receiving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def settle_and_commit(self) -> None:
        """After receive_in_background(): what is left of an update. Never raises: see status()."""
        live = self._require_live()
        if self._thread is not None:
            self._thread.join()  # receive() has a deadline
            self._thread = None
        self._verdict = live.settle()
        if self._verdict.ok:
            self._verdict = live.commit()

    def status(self) -> dict[str, Any]:
        """The last Verdict of this rank, and how weights are installed."""
        live = self._live
        verdict = dataclasses.asdict(self._verdict) if self._verdict is not None else None
        plan = live.plan if live is not None else None
        return {
            "version": live.version if live is not None else 0,
            "receiving": self._receiving(),
            "torn": live.torn if live is not None else False,
            "verdict": verdict,
            "in_place": len(plan.pieces) if plan is not None else None,
            "rebuilt": len(plan.changes) if plan is not None else None,
        }

    def shutdown(self) -> None:
        bus, self._bus, self._live = self._bus, None, None
        if bus is not None:
            bus.close()  # ends a receive
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _require_live(self) -> LiveWeights:
        if self._live is None:
            raise InvalidArgumentError("no trainer is known: call /init_weight_transfer_engine first")
        return self._live


class Extension:
    """Methods that `--worker-extension-cls` gives vLLM's workers: an update in one call, whose answers are values."""

    weight_transfer_engine: TesseraWeightTransferEngine

    def tessera_receive(self, min_version: int | None = None, timeout: float = 60) -> dict[str, Any]:
        """Begins to receive a version while requests are served; see status()["receiving"]."""
        self.weight_transfer_engine.receive_in_background(UpdateInfo(min_version, timeout))
        return self.weight_transfer_engine.status()

    def tessera_commit(self) -> dict[str, Any]:
        """Installs what was received, on all ranks or on none; while it runs, no request does."""
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            self.weight_transfer_engine.settle_and_commit()
        return self.weight_transfer_engine.status()

    def tessera_status(self) -> dict[str, Any]:
        return self.weight_transfer_engine.status()


def _tensors(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _agree(ok: bool, group: Any) -> bool:
    if group.world_size == 1:
        return ok
    failed = torch.tensor([0 if ok else 1])
    torch.distributed.all_reduce(failed, group=group.cpu_group)
    return int(failed) == 0
