"""vLLM's own interface of a trainer, by the tensor bus. It needs vLLM on the trainer's side, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..._bus.bus import connect
from ..._errors import Error, InvalidArgumentError, UnavailableError
from .._names import job_name, one_of_each_pair
from .._numbers import Numbers
from .._ranks import Ranks
from .._updates import EngineUpdate, failed
from ._client import settled
from ._control import reached_by
from ._generation import trainer_base, trainer_options
from ._register import register
from ._settings import BACKEND
from ._sources import Held

_base = trainer_base()
_EXTRA_SECONDS = 20.0  # that rank 0 may take beside waiting


@dataclass
class TesseraTrainerInitInfo(_base.TrainerInitInfo):  # type: ignore[misc, name-defined]
    """What WeightTransferTrainerFactory.trainer_init() takes for this backend, beside a client of the engine and a
    source of weights::

        factory = vllm.distributed.weight_transfer.WeightTransferTrainerFactory
        trainer = factory.trainer_init(
            TesseraTrainerInitInfo(rank=rank), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
        )
        trainer.send_weights()

    Attributes:
        rank: Of this process in the trainer. Rank 0 calls the engine.
        world: Number of the trainer's processes. None: as everywhere; see tessera.connect().
        pair: The name under which both jobs meet.
        trainer: Name of the trainer's job.
        engine: Name of the engine's job.
        store: URL of the store. None: as everywhere.
        batch: Name of the batch.
        timeout: Seconds for each step.
        wire: Formats that tensors are quantised to on their way, as in Bus.register().
        delta: Send changes only.
    """

    backend: ClassVar[str] = BACKEND
    world: int | None = None
    pair: str = "weights"
    trainer: str = "trainer"
    engine: str = "engine"
    store: str | None = None
    batch: str = "default"
    timeout: float = 60
    wire: Any = None
    delta: bool = False

    def for_workers(self) -> dict[str, Any]:
        """worker.InitInfo, as plain values."""
        same = {name: getattr(self, name) for name in ("pair", "store", "batch", "timeout", "wire", "delta")}
        return same | {name: job_name(getattr(self, name), self.pair) for name in ("trainer", "engine")}


class TesseraTrainerEngine(_base.TrainerWeightTransferEngine[TesseraTrainerInitInfo]):  # type: ignore[misc, name-defined]
    """The trainer's side of the backend "tessera" of vLLM. The client must reach methods of workers: vLLM's own do, as
    does any that has LLM's collective_rpc().

    A ModuleSource stands for its module, whose tensors are sent from where they are. Other sources are iterated at each
    send. The version that vLLM shows is set once all ranks serve it, and not before.
    """

    init_info_cls = TesseraTrainerInitInfo

    _bus: Any = None
    _ranks: Any = None
    _last: EngineUpdate | None = None

    @classmethod
    def trainer_init(
        cls, init_info: TesseraTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TesseraTrainerEngine:
        """Joins the bus and makes the engine meet this job. Collective over the trainer's ranks.

        Raises:
            InvalidArgumentError: No source, or a client that cannot ask workers.
            UnavailableError: The client failed to reach the engine.
        """
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            **trainer_options(_base, init_info.rank),
        )
        try:
            engine._join(init_info)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def _join(self, info: TesseraTrainerInitInfo) -> None:
        self._timeout = info.timeout
        if self.is_sender:
            self._reached = reached_by(self.client, info.timeout + 10)
        with one_of_each_pair(info.pair):
            self._bus = connect(
                info.pair,
                role=job_name(info.trainer, info.pair),
                peer=[job_name(info.engine, info.pair)],
                store=info.store,
                rank=info.rank,
                world=info.world,
                timeout=info.timeout,
            )
        self._held = Held(_base, self.source, self._bus.rank, self._bus.world)
        self._batch = self._bus.register(
            self._held.tensors,
            info.batch,
            "staged",
            direction="send",
            timeout=info.timeout,
            wire=info.wire,
            delta=info.delta,
        )
        role, rank, world = self._bus.role, self._bus.rank, self._bus.world
        self._numbers = Numbers(world, lambda: int(self._batch.version))
        self._ranks = Ranks(info.pair, role, info.batch, info.store, rank, world, info.timeout)
        if self.is_sender:
            with self._telling(0):
                self._asked(lambda: self.client.init_weight_transfer_engine(info.for_workers()))
                refused = failed(self._reached.call("tessera_status", []))
                if refused:
                    raise UnavailableError(f"the engine: {refused}")
        else:
            self._ranks.wait_for_begin(3 * info.timeout + _EXTRA_SECONDS)
        self._batch.wait_peers(1, timeout=info.timeout)

    @property
    def last_update(self) -> EngineUpdate | None:
        """What came of the last send_weights(), on rank 0."""
        return self._last

    def send_weights(self) -> None:
        """Sends a version, and has the engine install it. Collective; weights may be changed once it returns. Requests
        run while the engine receives; between vLLM's start and finish it only settles and copies, between two steps.

        Raises:
            UnavailableError: The engine does not serve the version; it says why. It serves the one before, and the next
                call works. If it says that weights of two versions are mixed, pause the engine until one does. The
                other ranks raise what rank 0 does in this call or in the next one, once their part is on offer.
        """
        if self._bus is None:
            raise InvalidArgumentError("this engine of a trainer is shut down: make another one")
        before = self._last_number
        number = self._numbers.next(None)
        with self._telling(number.on_bus) if self.is_sender else contextlib.nullcontext():
            try:
                with self._numbers.sending(number):
                    self._held.refill()
                    if not self.is_sender:
                        state = self._ranks.wait_for_end(before, 3 * self._timeout + _EXTRA_SECONDS)
                    self._batch.send(number.on_bus).wait()
            except Exception:
                self._ranks.has_failed(number.on_bus)
                raise
            if not self.is_sender:
                self._ranks.raise_failure(state)
                return
            self._last = self._update(number.on_bus)
            if not self._last.ok:
                raise UnavailableError(f"version {number.on_bus} is not served: {self._last.error}")

    @property
    def _last_number(self) -> int:
        return 0 if self._numbers.last is None else self._numbers.last.on_bus

    @contextlib.contextmanager
    def _telling(self, call: int) -> Iterator[None]:
        """Tells the other ranks what is raised within, and the end of it."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._ranks.tell(lambda state: state.after(call, error))

    def _update(self, version: int) -> EngineUpdate:
        call = self._reached.call
        try:
            ranks = call("tessera_receive", [version, self._timeout])
            if failed(ranks):
                return EngineUpdate.of(ranks).after(version, "")
            ranks = settled(call("tessera_status", []), lambda: call("tessera_status", []))
            if any(each.updating for each in ranks):
                self._asked(self.client.finish_weight_update)  # of an update that was interrupted
            info = {"min_version": version, "timeout": self._timeout, "received": True}
            self._asked(self.client.start_weight_update)
            self._asked(lambda: self.client.update_weights(info))
            self._asked(self.client.finish_weight_update)
            answer = EngineUpdate.of(call("tessera_status", []), when_mixed="the engine must be paused")
            if answer.version:
                self._asked(lambda: self._reached.set_version(str(answer.version)))
        except UnavailableError as error:
            return EngineUpdate(False, None, str(error))
        return answer.after(version, "")

    @staticmethod
    def _asked(work: Any) -> None:
        """Runs a call of the client, whose errors are whatever its author chose."""
        try:
            work()
        except Error:
            raise
        except Exception as error:
            raise UnavailableError(f"the client: {type(error).__name__}: {error}") from error

    def shutdown(self) -> None:
        """Leaves the bus, on other ranks once rank 0's last call has ended. The engine goes on with what it has."""
        bus, self._bus = self._bus, None
        ranks, self._ranks = self._ranks, None
        try:
            if ranks is not None and not ranks.leads:
                ranks.wait_until_idle(self._last_number, 3 * self._timeout)
        finally:
            if ranks is not None:
                ranks.close()
            if bus is not None:
                bus.close(linger=0)  # servers take a version only when they are asked to


register()  # vLLM runs plugins in its own processes only
