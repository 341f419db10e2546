"""The training side of vLLM servers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from ..._bus.bus import connect
from ..._closing import Closing, close_at_exit
from ..._errors import Error, InvalidArgumentError, UnavailableError
from .._http import Late, NotUp
from .._names import job_name, one_of_each_pair
from .._numbers import Number
from .._ranks import Ranks
from .._sends import Sends
from .._under_way import Sent
from .._updates import EngineUpdate
from .._urls import named_urls
from .._waiting import Callers
from ._client import NOT_MET, PAUSES, Server
from ._replicas import jobs_of
from ._settings import NAMED_BY

_JOIN_SECONDS = 20.0  # of a server, beside waiting for the trainer


class Trainer(Closing):
    """Sends a model's weights to vLLM servers; every rank of the trainer makes one and calls send()::

        trainer = tessera.engines.vllm.Trainer(model, {"engine0": "http://localhost:8000"})
        for batch in data:
            ...
            updates = trainer.send()     # {"engine0": EngineUpdate(ok=True, version=1, ...)}

    Weights may be DTensors in any layout: nothing is gathered. Names are those of the checkpoint that the server would
    load; `map` says where a model's differ. A server that fails or is gone harms no other one. One that starts later,
    or again, is joined by the first send() that finds it. A trainer that was started again counts its versions from 1
    again; servers go on with the last one's until the first send().

    Attributes:
        run: Identity of this Trainer, on rank 0.
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
        pause: str = "keep",
        clear_cache: bool = True,
        grace: float | None = None,
        data_parallel: int | Mapping[str, int] = 1,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        """Joins the bus, and makes those servers meet this job that answer. Collective over the trainer's ranks.

        Args:
            model: A torch module, or {name: tensor}.
            engines: The servers' URLs, by the names that their jobs get on the bus; of one or several without names
                these are engine0, engine1 and so on. The servers are started with VLLM_PLUGINS=tessera, or with
                VLLM_SERVER_DEV_MODE=1.
            pair: Tells this experiment from others that share a store, such as all on one machine.
            pause: What happens to running requests while weights are installed, as in vLLM's /pause: "keep" (a request
                may have tokens of two versions), "wait" (requests end with the version with which they began, and the
                update waits for them) or "abort".
            clear_cache: Whether vLLM forgets what it has computed of requests, which those that go on compute again
                with the new weights: a pause longer by that. If not, their next tokens also come of keys and values
                of the old weights, and so do those of later requests with the same beginning.
            grace: Seconds that a send() waits for the other servers once one has the version. Those that take longer go
                on, and miss the versions that are sent until they are done. None: it waits for all.
            data_parallel: The servers' --data-parallel-size, of all or by name. Above 1 they need VLLM_PLUGINS=tessera.
            api_key: That the servers want. Default: VLLM_API_KEY.
            options: Of Bus.register(), such as map=, wire= and delta=.

        Raises:
            UnavailableError: A server refuses; it names it, on every rank. One that is not up is tried again by each
                send().
        """
        urls = named_urls(engines, "vLLM")
        if pause not in PAUSES:
            raise InvalidArgumentError(f"pause={pause!r}: give one of {', '.join(PAUSES)}")
        key = api_key if api_key is not None else os.environ.get("VLLM_API_KEY")
        replicas = _replicas_of(urls, data_parallel)
        self._servers = {
            name: Server(url, key, timeout, pause, clear_cache, replicas[name]) for name, url in urls.items()
        }
        self.run = uuid.uuid4().hex[:16]
        peers = [job for name in urls for job in jobs_of(job_name(name, pair), replicas[name])]
        role, self._pair = job_name(role, pair), pair
        with one_of_each_pair(pair):
            self._bus = connect(pair, role=role, peer=peers, store=store, rank=rank, world=world, timeout=timeout)
        try:
            self._batch = self._bus.register(model, batch, "staged", direction="send", timeout=timeout, **options)
            self._callers = Callers(self._bus, batch, timeout)
            ranks = Ranks(pair, role, batch, store, self._bus.rank, self._bus.world, timeout)
        except BaseException:
            self._bus.abandon()
            raise
        self._sends = Sends(self._bus, self._batch, ranks, urls, self._update, timeout, grace)
        try:
            self._init = {"pair": pair, "trainer": role, "store": store, "batch": batch, "timeout": timeout}
            self._init |= {name: options[name] for name in ("wire", "delta") if name in options}
            self._sends.begin(self._meet_if_up, 3 * timeout + _JOIN_SECONDS)
        except BaseException:
            self._sends.abandon()
            raise
        close_at_exit(self)

    def _meet_if_up(self, name: str) -> None:
        with contextlib.suppress(NotUp):
            self._meet(name)

    def _meet(self, name: str) -> None:
        self._servers[name].join({**self._init, "engine": job_name(name, self._pair), "run": self.run})

    def send(self, version: int | None = None) -> dict[str, EngineUpdate]:
        """Sends a version, and has every server install it. Collective; the model may be changed once it returns.

        Returns what came of it by server on rank 0, and {} on the other ranks. Does not raise for a server that fails.
        Calls of several threads come one after the other. After an interrupt the next call waits for what is under way.
        Takes no longer than the time-out by more than a second: a server that is late then may install the version all
        the same, or a newer one once it is back.

        Args:
            version: An integer that grows, from 0. None: the last one + 1; the first is 1.

        Raises:
            InvalidArgumentError: The version is not newer than the last, or a tensor was freed, resized, or replaced by
                one that does not fit. The next call counts on as if there had been none.
            Error: On the other ranks: what rank 0 has raised, in this call or in the one before. This version is on
                offer all the same.
        """
        return self._sends.send(version)

    def _update(self, name: str, sent: Sent) -> EngineUpdate:
        server, number = self._servers[name], sent.number
        with server.until(sent.deadline):
            try:
                answer = server.update(number, self.run)
                if answer.error == NOT_MET:  # it was started late, or again
                    self._sends.wait_for_ranks(sent)
                    self._meet(name)
                    answer = server.update(number, self.run)
                return answer.after(number.version, self.run)
            except UnavailableError as error:
                return self._failed(name, error, number)

    def _failed(self, name: str, error: UnavailableError, number: Number) -> EngineUpdate:
        """With the version that it serves, if it says so; that may be the new one."""
        server = self._servers[name]
        if isinstance(error, NotUp):
            return EngineUpdate(False, None, f"{error}{self._callers.hint(name, NAMED_BY)}")
        with contextlib.suppress(UnavailableError):
            now = server.status()
            is_there = now.run == self.run and now.version == number.version and not server.may_be_paused
            if isinstance(error, Late) and is_there:
                return dataclasses.replace(now, ok=True, error="")
            return EngineUpdate(False, now.version, str(error), run=now.run)
        return EngineUpdate(False, None, str(error))

    def close(self) -> None:
        """Leaves the bus, once no server is busy any more: each rank waits for that. Servers go on with what they have.

        Raises:
            Error: On the other ranks: what rank 0's last send() has raised.
        """
        self._sends.close()

    def abandon(self) -> None:
        self._sends.abandon()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Error) if error is not None else contextlib.nullcontext():
            self.close()

    @property
    def closed(self) -> bool:
        return self._bus.closed


def _replicas_of(engines: Iterable[str], given: int | Mapping[str, int]) -> dict[str, int]:
    """By server."""
    found = {name: given.get(name, 1) if isinstance(given, Mapping) else given for name in engines}
    known = not isinstance(given, Mapping) or given.keys() <= found.keys()
    if not known or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in found.values()):
        raise InvalidArgumentError(f"data_parallel={given!r}: give each server's --data-parallel-size, by its name")
    return found


def trainer(model: Any, engines: str | Iterable[str] | Mapping[str, str], **options: Any) -> Trainer:
    """A Trainer of these servers, as Trainer() makes it."""
    return Trainer(model, engines, **options)
