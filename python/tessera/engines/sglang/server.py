"""What runs in each scheduler of SGLang: it learns where weights go, receives versions, and installs them.

SGLang must not see an exception here: its scheduler ends the whole server with it. So nothing raises, and what came of
an update is told to the trainer beside SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed

from ..._bus.bus import connect
from ..._bus.patterns import optional
from ..._errors import CancelledError, DeadlineExceededError, Error, InvalidArgumentError
from ..._tensors.torch import torch_dtype
from .._learn import learn_map
from .._live import LiveWeights
from .._names import job_name
from .._updates import ANOTHER_FAILED, RankStatus, Verdict, fields_of, read
from .._waiting import seen_by_trainer
from ._verdicts import Teller

SETTINGS = "TESSERA_SGLANG"
_STATUS_BYTES = 8192  # of two texts, in JSON, and the other fields
_MOST_TEXT = 500  # characters, of up to 6 bytes in JSON
_RETRY_SECONDS = 0.2
_GRACE_SECONDS = 1.0  # the trainer calls once all ranks have told it that they have the version

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The JSON object in TESSERA_SGLANG: how a server finds its trainer on the bus; see tessera.connect().

    Attributes:
        engine: Name of this server's job, by which the trainer knows it.
        trainer: Name of the trainer's job.
        pair: The name under which both meet.
        store: URL of the store. None: as everywhere.
        batch: Name of the batch.
        timeout: Seconds to wait for the trainer.
        wire: Formats that tensors are quantised to on their way.
        delta: Receive changes only.
    """

    engine: str
    trainer: str = "trainer"
    pair: str = "weights"
    store: str | None = None
    batch: str = "default"
    timeout: float = 60
    wire: Any = None
    delta: bool = False

    @staticmethod
    def from_environment() -> Settings:
        given = os.environ.get(SETTINGS, "")
        try:
            settings = Settings(**json.loads(given))
            engine, trainer = (job_name(name, settings.pair) for name in (settings.engine, settings.trainer))
            return dataclasses.replace(settings, engine=engine, trainer=trainer)
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(f'{SETTINGS}={given}: give {{"engine": NAME}} ({error})') from None


class Group(Protocol):
    """What is used of SGLang's GroupCoordinator."""

    rank_in_group: int
    world_size: int
    cpu_group: Any


class Server:
    """One rank of a server. Its calls are made by all ranks, in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank = group.rank_in_group
        self._settings: Settings | None = None
        self._bus: Any = None
        self._batch: Any = None
        self._live: LiveWeights | None = None
        self._teller: Teller | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._installing = threading.Lock()  # or receiving

    def load(self, model: torch.nn.Module) -> None:
        """The first time it joins the bus, and from then on it receives in the background; each further time it
        installs what was received, on all ranks or on none. Collective. Never raises."""
        try:
            if self._live is None:
                self._tell(self._status(self._join(model), None))
            else:
                self._tell(self._status("", self._install()))
        except Exception:  # of the ranks' own group: another rank is gone, and the server with it
            _log.exception("tessera: an update was given up")
        self._receive_on()

    def close(self) -> None:
        """Leaves the bus."""
        self._leave()
        teller, self._teller = self._teller, None
        if teller is not None:
            teller.close()

    def _leave(self) -> None:
        self._stopping.set()
        bus, self._bus, self._live = self._bus, None, None
        if bus is not None:
            bus.close()  # ends a receive
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stopping.clear()

    def _join(self, model: torch.nn.Module) -> str:
        """Return why it has not joined; empty: it has."""
        error = ""
        try:
            self._meet(model, Settings.from_environment())
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        if self._agree(not error):
            return ""
        self._leave()
        return error or ANOTHER_FAILED

    def _meet(self, model: torch.nn.Module, settings: Settings) -> None:
        self._bus = connect(
            settings.pair,
            role=settings.engine,
            peer=settings.trainer,
            store=settings.store,
            rank=self._rank,
            world=self._group.world_size,
            timeout=settings.timeout,
        )
        with seen_by_trainer(self._bus, settings.batch, SETTINGS):
            if self._rank == 0 and self._teller is None:
                self._teller = Teller(
                    settings.pair, settings.trainer, settings.engine, settings.store, settings.timeout
                )
            offered = self._bus.manifest(settings.batch)
        checkpoint = {each.name: (each.shape, torch_dtype(each.dtype)) for each in offered}
        learned = learn_map(model, checkpoint)  # within an update parameters are as the loader wants them
        if learned.computed:
            named = ", ".join(f"{name}: {how}" for name, how in list(learned.computed.items())[:5])
            raise InvalidArgumentError(f"SGLang's loader computes parameters instead of copying them: {named}")
        if not learned.slices:
            named = ", ".join(list(checkpoint)[:5])
            raise InvalidArgumentError(f"SGLang's model takes nothing of what the trainer sends ({named}, ...)")
        staged = learned.staging()
        self._batch = self._bus.register(
            staged,
            settings.batch,
            direction="recv",
            map=learned.map,
            wire=optional(settings.wire),  # the trainer's, for names of which this rank may have none
            delta=settings.delta,
        )
        self._settings = settings
        self._live = LiveWeights(
            lambda: dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()]),
            learned,
            self._batch,
            staged,
            agree=lambda proposal: self._agree(proposal is not None),
            rank=self._rank,
        )

    def _receive_on(self) -> None:
        """Receives each version that the trainer sends, in a thread, also if the one before was not installed."""
        if self._live is not None and self._thread is None:
            self._thread = threading.Thread(target=self._receive, name="tessera-receive", daemon=True)
            self._thread.start()

    def _receive(self) -> None:
        live, batch, settings = self._live, self._batch, self._settings
        assert live is not None and settings is not None
        while not self._stopping.is_set():
            try:
                version = batch.wait_version(batch.version + 1, settings.timeout)
            except DeadlineExceededError:
                continue
            except CancelledError:  # the bus was closed
                return
            except Error:
                self._stopping.wait(_RETRY_SECONDS)
                continue
            with self._installing, torch.no_grad():
                live.receive(version, settings.timeout)  # keeps its error
            if batch.version < version:
                self._stopping.wait(_RETRY_SECONDS)

    def _install(self) -> Verdict:
        live, settings = self._live, self._settings
        assert live is not None and settings is not None
        idle = self._installing.acquire(timeout=_GRACE_SECONDS)
        try:
            newest = self._over_all(self._batch.version, torch.distributed.ReduceOp.MAX)
            if idle and self._batch.version < newest:  # a rank that has failed before
                live.receive(newest, settings.timeout)
            if not self._agree(idle and self._batch.version == newest):
                return Verdict(False, live.version, None, self._rank, f"not all ranks have received version {newest}")
            verdict = live.settle()
            return live.commit() if verdict.ok else verdict
        finally:
            if idle:
                self._installing.release()

    def _agree(self, ok: bool) -> bool:
        return self._over_all(int(ok), torch.distributed.ReduceOp.MIN) == 1

    def _over_all(self, value: int, operation: Any) -> int:
        """The smallest or largest of all ranks' values."""
        if self._group.world_size == 1:
            return value
        values = torch.tensor([value])
        torch.distributed.all_reduce(values, operation, group=self._group.cpu_group)
        return int(values)

    def _status(self, failure: str, verdict: Verdict | None) -> RankStatus:
        """Return what this rank says; without a verdict, of having joined."""
        live = self._live
        status = RankStatus(
            version=live.version if live is not None else 0,
            torn=live.torn if live is not None else False,
            failure=failure,
            verdict=verdict,
        )
        error = failure or status.error
        if error:
            _log.warning("tessera: rank %d: %s", self._rank, error)
        return status

    def _tell(self, own: RankStatus) -> None:
        """What all ranks say, by the first."""
        ranks = self._gathered(own)
        if self._teller is None:
            return
        try:
            self._teller.tell(ranks)
        except Exception:
            _log.exception("tessera: the trainer was not told of an update")

    def _gathered(self, own: RankStatus) -> Sequence[RankStatus]:
        if self._group.world_size == 1:
            return [own]
        text = json.dumps(fields_of(own.shortened(_MOST_TEXT))).encode()
        mine = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        all_ranks = [torch.zeros_like(mine) for _ in range(self._group.world_size)]
        torch.distributed.all_gather(all_ranks, mine, group=self._group.cpu_group)
        return [read(RankStatus, json.loads(each.numpy().tobytes().rstrip(b"\0"))) for each in all_ranks]


_server: Server | None = None


def load(model: torch.nn.Module, named_tensors: Any) -> None:
    """For `--custom-weight-loader`: SGLang calls it in each scheduler. `named_tensors` are not looked at: weights come
    by the bus. Never raises."""
    global _server
    try:
        if _server is None:
            from sglang.srt.distributed import get_world_group

            _server = Server(get_world_group())
        _server.load(model)
    except Exception:
        _log.exception("tessera: an update was given up")
