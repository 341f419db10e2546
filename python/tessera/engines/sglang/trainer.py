"""The training side of SGLang servers."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from ..._bus.bus import connect
from ..._closing import Closing, close_at_exit
from ..._errors import Error, UnavailableError
from .._http import RefusedError, call
from .._names import job_name, one_of_each_pair
from .._numbers import Number
from .._ranks import Ranks
from .._sends import Sends
from .._under_way import Deadline, Sent
from .._updates import EngineUpdate, RankStatus, served
from .._urls import named_urls
from .._waiting import Callers
from ._verdicts import Reader
from .server import SETTINGS

LOADER = "tessera.engines.sglang.load"
_POLL_SECONDS = 0.005
_ANSWER_SECONDS = 0.25  # after the deadline
_UNKNOWN = "which weights its ranks hold is not known, and the server is left paused"


class Trainer(Closing):
    """Sends a model's weights to SGLang servers; every rank of the trainer makes one and calls send()::

        trainer = tessera.engines.sglang.Trainer(model, {"engine0": "http://localhost:30000"})
        for batch in data:
            ...
            updates = trainer.send()     # {"engine0": EngineUpdate(ok=True, version=1, ...)}

    Weights may be DTensors in any layout: nothing is gathered. Names are those of the checkpoint that the server would
    load; `map` says where a model's differ. A server that is slow, fails or is gone delays and harms no other one; one
    that was started again gets the newest version with the next send().

    It has met no SGLang: see tessera.engines.sglang.
    """

    def __init__(
        self,
        model: Any,
        engines: str | Iterable[str] | Mapping[str, str],
        *,
        pair: str = "weights",
        role: str = "trainer",
        store: str | None = None,
        rank: int | None = None,
        world: int | None = None,
        batch: str = "default",
        timeout: float = 60,
        pause: str = "abort",
        flush_cache: bool = True,
        **options: Any,
    ) -> None:
        """Joins the bus; servers meet this job with the first send(). Collective over the trainer's ranks.

        Args:
            model: A torch module, or {name: tensor}.
            engines: The servers' URLs, by the names that TESSERA_SGLANG gives them; of one or several without names
                these are engine0, engine1 and so on.
            pair: Tells this experiment from others that share a store, such as all on one machine. The servers name it,
                too.
            pause: What happens to running requests while weights are installed, as in SGLang's /pause_generation:
                "abort", "retract" or "in_place".
            flush_cache: Drop what the server has computed with the old weights, which it refuses while requests are
                kept: give False with "retract" and "in_place".
            options: Of Bus.register(), such as map=, wire= and delta=.
        """
        self._engines = urls = named_urls(engines, "SGLang")
        self._timeout = timeout
        self._pause = pause
        self._flush_cache = flush_cache
        self._jobs = {name: job_name(name, pair) for name in urls}
        role, peers = job_name(role, pair), list(self._jobs.values())
        with one_of_each_pair(pair):
            self._bus = connect(pair, role=role, peer=peers, store=store, rank=rank, world=world, timeout=timeout)
        try:
            self._batch = self._bus.register(model, batch, "staged", direction="send", timeout=timeout, **options)
            self._callers = Callers(self._bus, batch, timeout)
            ranks = Ranks(pair, role, batch, store, self._bus.rank, self._bus.world, timeout)
        except BaseException:
            self._bus.abandon()
            raise
        self._readers = {name: Reader(pair, role, job, store, timeout) for name, job in self._jobs.items()}
        self._ranks: dict[str, int] = {}
        self._deadlines: dict[str, Deadline] = {}  # of the last version, by server
        self._sends = Sends(self._bus, self._batch, ranks, urls, self._update, timeout)
        self._held: set[str] = set()  # left paused: their ranks may hold weights of several versions
        try:
            self._sends.begin(lambda name: None, timeout)
        except BaseException:
            self.abandon()
            raise
        close_at_exit(self)

    def send(self, version: int | None = None) -> dict[str, EngineUpdate]:
        """Sends a version, and has every server install it. Collective; the model may be changed once it returns.

        Returns what came of it by server on rank 0, and {} on the other ranks. Does not raise for a server that fails.
        Calls of several threads come one after the other. After an interrupt the next call waits for what is under way.
        Takes no longer than the time-out by more than a second.

        Args:
            version: An integer that grows, from 0. None: the last one + 1; the first is 1.

        Raises:
            InvalidArgumentError: The version is not newer than the last, or a tensor was freed, resized, or replaced by
                one that does not fit. The next call counts on as if there had been none.
            Error: On the other ranks: what rank 0 has raised, in this call or in the one before. This version is on
                offer all the same.
        """
        return self._sends.send(version)

    def _update(self, name: str, sending: Sent) -> EngineUpdate:
        sent = sending.number
        self._deadlines[name] = sending.deadline
        try:
            if not self._attached(name):
                self._sends.wait_for_ranks(sending)
                update, joined = self._session(name, sent)
                if not joined:
                    return update
            self._await(name, sent.on_bus)
            update, joined = self._session(name, sent)
            if joined:  # it was started again meanwhile
                self._await(name, sent.on_bus)
                update, _ = self._session(name, sent)
            return update
        except Error as error:
            hint = "" if self._attached(name) else self._callers.hint(name, SETTINGS)
            return EngineUpdate(False, None, f"{error}{hint}")

    def _attached(self, name: str) -> bool:
        peer = self._batch.peers.get(self._jobs[name])
        return peer is not None and peer.attached

    def _await(self, name: str, version: int) -> None:
        """Until all its ranks have received the version. Where they do not in time, they say why when they install."""
        deadline = self._deadlines[name]
        while deadline.left:
            peer = self._batch.peers.get(self._jobs[name])
            if peer is not None and peer.attached and peer.version >= version:
                return
            time.sleep(_POLL_SECONDS)

    def _session(self, name: str, sent: Number) -> tuple[EngineUpdate, bool]:
        """One call of the loader in all ranks, and whether the server has only joined by it."""
        body = self._asked(name)
        began = time.monotonic()
        try:
            self._post(name, "pause_generation", {"mode": self._pause})  # which may happen without an answer
            ranks, refused = self._load(name, body)
        except BaseException:
            with contextlib.suppress(Error):
                self._go_on(name)
            raise
        self._go_on(name)
        update, joined = EngineUpdate.of(ranks, pause=time.monotonic() - began), ranks[0].verdict is None
        if update.version:  # as ranks count, which is as the bus does
            update = dataclasses.replace(update, version=update.version - sent.offset)
        if not joined:
            update = update.after(sent.version, update.run)
        if update.ok and not joined:
            self._post(name, "update_weight_version", {"new_version": str(update.version), "abort_all_requests": False})
        if update.ok and refused is not None:
            update = dataclasses.replace(update, ok=False, error=f"the weights are installed, and {refused}")
        return update, joined and not ranks[0].failure

    def _go_on(self, name: str) -> None:
        if name not in self._held:
            self._post(name, "continue_generation", {})

    def _asked(self, name: str) -> dict[str, Any]:
        """What makes SGLang call the loader in all ranks."""
        payload = base64.b64encode(pickle.dumps([], protocol=4)).decode()
        return {
            "serialized_named_tensors": [payload] * self._ranks_of(name),
            "load_format": LOADER,
            "flush_cache": self._flush_cache,
            "selector": "target",
        }

    def _load(self, name: str, body: Mapping[str, Any]) -> tuple[list[RankStatus], Error | None]:
        """What each rank says after the loader has run, and what SGLang has refused. Where it is not known what ranks
        hold, the server is held from then on. Raises Error."""
        reader, deadline = self._readers[name], self._deadlines[name]
        after, hurry = reader.newest(), threading.Event()
        self._begin(name)
        try:
            with concurrent.futures.ThreadPoolExecutor(1, "tessera-verdict") as beside:
                telling = beside.submit(
                    reader.read, after, hurry, deadline.left
                )  # it meets the server while that joins
                refused = _error_of(lambda: self._post(name, "update_weights_from_tensor", body))
                if isinstance(refused, RefusedError):
                    hurry.set()  # a verdict would have been told before
                untold = _error_of(telling.result)
            if untold is None:
                ranks = telling.result()
                (self._held.add if served(ranks) is None else self._held.discard)(name)
            elif not isinstance(refused, RefusedError) and self._attached(name):  # without, there is nothing to install
                self._held.add(name)
        finally:
            ended = _error_of(lambda: self._post(name, "end_weight_update", {}))
        if untold is not None:
            error = str(refused or untold)
            raise UnavailableError(f"{error}; {_UNKNOWN}" if name in self._held else error)
        return ranks, refused or ended

    def _begin(self, name: str) -> None:
        try:
            self._post(name, "begin_weight_update", {"selector": "target"})
        except UnavailableError as error:
            if "already open" not in str(error):
                raise
            self._post(name, "end_weight_update", {})  # of a trainer that has died within
            self._post(name, "begin_weight_update", {"selector": "target"})

    def _ranks_of(self, name: str) -> int:
        """The number of tensor-parallel ranks, each of which takes a payload of its own."""
        if name not in self._ranks:
            url = self._engines[name]
            found = call(url, "server_info", timeout=self._most(name), method="GET").get("tp_size")
            if not isinstance(found, int) or not 1 <= found <= 1 << 16:
                raise UnavailableError(f"{url}/server_info says that tp_size is {found!r}")
            self._ranks[name] = found
        return self._ranks[name]

    def _most(self, name: str) -> float:
        """Return for how long a call may take. What leaves a server paused is tried to be undone after the deadline."""
        return self._deadlines[name].left + _ANSWER_SECONDS

    def _post(self, name: str, path: str, body: Any) -> dict[str, Any]:
        url = self._engines[name]
        answer = call(url, path, body, timeout=self._most(name))
        if answer.get("success", True) is not True:
            raise RefusedError(f"{url}/{path} refused: {str(answer.get('message'))[:500]}")
        return answer

    def close(self) -> None:
        """Leaves the bus, once no server is busy any more: each rank waits for that. Servers go on with what they have.

        Raises:
            Error: On the other ranks: what rank 0's last send() has raised.
        """
        try:
            self._sends.close()
        finally:
            self._close_readers()

    def abandon(self) -> None:
        self._sends.abandon()
        self._close_readers()

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Error) if error is not None else contextlib.nullcontext():
            self.close()

    @property
    def closed(self) -> bool:
        return self._bus.closed


def _error_of(work: Callable[[], Any]) -> Error | None:
    try:
        work()
    except Error as error:
        return error
    return None
