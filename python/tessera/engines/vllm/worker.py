"""What runs in each worker of vLLM: it learns where weights go, stages versions, and installs them.

vLLM must not see an exception that only one rank raises: its executor would leave the other ranks' answers in their
queues, and answer the next call with them. Not even if all of them raise. So nothing does: status() tells what failed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from ..._errors import InvalidArgumentError, UnavailableError
from .._live import LiveWeights, Serving
from .._pages import ExchangedPages
from .._updates import RankStatus, Verdict, fields_of
from ._generation import worker_base, worker_class
from ._joined import InitInfo, Joined

_base = worker_base()
_DEFAULT_TIMEOUT = 60.0


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):  # type: ignore[misc, name-defined]
    """Attributes:
    min_version: The oldest version to take. None: any that is newer than the last.
    timeout: Seconds until there is one.
    received: The version was received by receive() before; only what is left is done.
    offset: How much larger numbers on the bus, such as min_version, are than the trainer's own.
    """

    min_version: int | None = None
    timeout: float = _DEFAULT_TIMEOUT
    received: bool = False
    offset: int = 0


class TesseraWeightTransferEngine(_base.WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc, name-defined]
    """The backend "tessera" of vLLM."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _joined: Joined | None = None
    _verdict: Verdict | None = None
    _thread: threading.Thread | None = None
    _failure: str = ""
    _config: Any = None
    _meetings = 0

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._serving = _LOADED.pop(self.model) if self.model in _LOADED else Serving()
        add_methods()

    # --- vLLM's own interface, whose calls answer nothing

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo.parsed(init_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meets the trainer and learns the map, on all ranks or on none. Weights stay as they are. Raises
        InvalidArgumentError with data parallelism, of which vLLM's own interface hears too little."""
        replica = self.vllm_config.parallel_config.data_parallel_index
        if replica > 0:  # on all its ranks, so that they stay in step
            raise InvalidArgumentError(
                f"replica {replica} of this engine: vLLM's own trainer interface hears only of the first replica; use "
                "tessera.engines.vllm.Trainer(..., data_parallel=)"
            )
        self.attempt(lambda: self._join(init_info))

    def _join(self, info: InitInfo) -> None:
        joined = self._begin_to_join(info)
        failed: Exception | None = None
        try:
            if not joined.agree("left"):  # else one might join a rank that is about to leave
                raise UnavailableError("not all ranks have left the trainer before")
            for step in (joined.meet, joined.learn, joined.register):
                step()
        except Exception as error:
            failed = error
        if not joined.agree(None if failed is not None else "met"):
            self.shutdown()
            raise failed or InvalidArgumentError("another rank failed")

    def start_weight_update(self) -> None:
        """Nothing: vLLM's own preparation would take the live weights away before new ones are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.attempt(lambda: self._stage(UpdateInfo(**update_info)))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stages a version; requests may run."""
        self.attempt(lambda: self._stage(update_info))

    def _stage(self, update_info: UpdateInfo) -> None:
        live = self._require_live()
        if update_info.received:
            self._settled()
            self._verdict = live.settle()
        else:
            self._verdict = live.stage(update_info.min_version, update_info.timeout)

    def finish_weight_update(self) -> None:
        """Installs what is staged."""
        self.attempt(self._commit)

    def _commit(self) -> None:
        committed = self._require_live().commit()  # also if nothing is staged here: other ranks may wait
        if self._verdict is None or self._verdict.ok:
            self._verdict = committed

    def shutdown(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()  # ends what waits on the bus
        self._settled()

    # --- the same in steps, which wait in a thread while requests are served

    def meet(self, info: InitInfo) -> None:
        """Begins to meet the trainer; learn() goes on, once status() says that it is not busy."""
        self._begin("tessera-meet", self._begin_to_join(info).meet)

    def learn(self) -> None:
        """The second step: learns the map, then begins to register."""
        joined = self._joined
        if joined is not None and joined.live is None:
            joined.learn()
            self._begin("tessera-register", joined.register)

    def receive(self, update_info: UpdateInfo) -> None:
        """Begins to receive a version. One at a time: a second call while it runs does nothing."""
        live = self._require_live()

        def work() -> None:
            with torch.no_grad():
                live.receive(update_info.min_version, update_info.timeout, update_info.offset)

        self._begin("tessera-receive", work)

    def settle_and_commit(self) -> None:
        """After receive(): what is left of an update. It fails if a rank still receives."""
        live = self._require_live()
        try:
            self._verdict = settled = live.settle()
        finally:
            committed = live.commit()  # on all ranks, whatever came of it
        if settled.ok:
            self._verdict = committed

    def attempt(self, work: Callable[[], None]) -> dict[str, Any]:
        """Does it, and returns status(), which says what it raised."""
        self._failure = ""
        try:
            work()
        except Exception as error:
            self._fail(error)
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return which version this rank serves, and how weights are installed: the fields of a RankStatus."""
        live, serving = self._live, self._serving
        plan = live.plan if live is not None else None
        changes = plan.changes if plan is not None else ()
        return fields_of(
            RankStatus(
                version=serving.version,
                run=serving.run,
                torn=serving.torn,
                trainer=live.run if live is not None else None,
                failure=self._failure,
                verdict=self._verdict,
                busy=self._busy(),
                received=live.received if live is not None else None,
                ready=live.ready if live is not None else False,
                in_place=len(plan.pieces) if plan is not None else 0,
                exchanged=sum(len(each.names) for each in changes if isinstance(each, ExchangedPages)),
                rebuilt=sum(not isinstance(each, ExchangedPages) for each in changes),
            )
        )

    @property
    def _live(self) -> LiveWeights | None:
        return self._joined.live if self._joined is not None else None

    def _begin_to_join(self, info: InitInfo) -> Joined:
        self._meetings += 1
        self.shutdown()
        self._verdict = None
        if self._config is None:
            # One that is set and unset in a thread would change under what runs beside it: it is a global.
            self._config = set_current_vllm_config(self.vllm_config)
            self._config.__enter__()
        self._joined = Joined(self.model, self.vllm_config, info, self._serving, str(self._meetings))
        return self._joined

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        if self._busy():
            return

        def attempted() -> None:
            try:
                work()
            except Exception as error:
                self._fail(error)

        self._thread = threading.Thread(target=attempted, name=name, daemon=True)
        self._thread.start()

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _settled(self) -> None:
        if self._thread is not None:
            self._thread.join()  # what it waits for has a deadline
            self._thread = None

    def _require_live(self) -> LiveWeights:
        live = self._live
        if live is None:
            raise InvalidArgumentError("no trainer is known: call /init_weight_transfer_engine first")
        return live


_LOADED: weakref.WeakKeyDictionary[torch.nn.Module, Serving] = weakref.WeakKeyDictionary()


def loaded(model: torch.nn.Module, serving: Serving) -> None:
    """For the engine of `model`, which vLLM makes once it has loaded it."""
    _LOADED[model] = serving


class Extension:
    """Methods of workers, for collective_rpc(). vLLM's workers get them with the first engine of this backend, unless
    `--worker-extension-cls` has given them a subclass of this."""

    weight_transfer_engine: TesseraWeightTransferEngine

    def tessera_meet(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """The first step of meeting a trainer."""
        engine = self.weight_transfer_engine
        return engine.attempt(lambda: engine.meet(InitInfo.parsed(init_info)))

    def tessera_learn(self) -> dict[str, Any]:
        """The second one."""
        engine = self.weight_transfer_engine
        return engine.attempt(engine.learn)

    def tessera_leave(self) -> dict[str, Any]:
        """Ends what tessera_meet() began. Weights stay as they are."""
        engine = self.weight_transfer_engine
        return engine.attempt(engine.shutdown)

    def tessera_receive(
        self, min_version: int | None = None, timeout: float = _DEFAULT_TIMEOUT, offset: int = 0
    ) -> dict[str, Any]:
        """Begins to receive a version while requests are served."""
        engine = self.weight_transfer_engine
        return engine.attempt(lambda: engine.receive(UpdateInfo(min_version, timeout, offset=offset)))

    def tessera_commit(self) -> dict[str, Any]:
        """Installs what was received, on all ranks or on none; while it runs, no request does."""
        engine = self.weight_transfer_engine
        return engine.attempt(engine.settle_and_commit)

    def tessera_status(self) -> dict[str, Any]:
        """And whether vLLM has an update under way, which one that was interrupted leaves behind."""
        return {**self.weight_transfer_engine.status(), "updating": getattr(self, "_weight_update_active", False)}


def add_methods() -> None:
    """So that `--worker-extension-cls` is not needed."""
    base = worker_class()
    if base is None:
        return
    for name, method in vars(Extension).items():
        if name.startswith("tessera_") and not any(hasattr(each, name) for each in _with_subclasses(base)):
            setattr(base, name, method)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _with_subclasses(each)
