"""What a trainer asks of one vLLM server: by the routes of our plugin, or by vLLM's own ones for development."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..._errors import UnavailableError
from .._http import Late, NoEngine, NotFound, NotUp, call
from .._numbers import Number
from .._under_way import Deadline
from .._updates import EngineUpdate, RankStatus, failed, read, served, shown

PAUSES = ("keep", "wait", "abort")
NOT_MET = "it has not met this trainer"
_POLL_SECONDS = (0.002, 0.05)  # the first, and the longest
_EXTRA_SECONDS = 10.0  # for what a server does besides waiting for the trainer
_STATUS_SECONDS = 10.0  # of a server in trouble
_ANSWER_SECONDS = 0.3  # after a deadline, for the server to say what it has waited for, or what it serves
_MOST_SHOWN = 500


def statuses(where: str, method: str, results: Any) -> list[RankStatus]:
    """Return what workers have answered, if it is what they should. Throws UnavailableError."""
    try:
        if isinstance(results, Sequence) and results:
            return [read(RankStatus, each) for each in results]
    except ValueError:
        pass
    raise UnavailableError(f"{where}: {method} answered {str(results)[:_MOST_SHOWN]}")


def settled(ranks: list[RankStatus], look: Callable[[], list[RankStatus]]) -> list[RankStatus]:
    """Return their statuses once no worker is busy, by further looks; what a worker waits for has a deadline there."""
    wait, longest = _POLL_SECONDS
    while any(each.busy for each in ranks):
        time.sleep(wait)
        wait = min(longest, wait * 2)
        ranks = look()
    return ranks


def serves_already(ranks: list[RankStatus], min_version: int | None, offset: int) -> bool:
    """Return whether all ranks serve a version that suffices, of the trainer that they have met: a request for an
    earlier one has brought it, as workers take the newest. They would wait for a newer one in vain."""
    run, version = served(ranks) or ("", 0)
    is_of_trainer = run != "" and {rank.trainer for rank in ranks} == {run}
    return min_version is not None and is_of_trainer and version >= min_version - offset


def unchanged(ranks: list[RankStatus]) -> EngineUpdate:
    """Return what it comes to that nothing was to be done, whatever came of updates before."""
    return EngineUpdate.of([dataclasses.replace(rank, failure="", verdict=None) for rank in ranks])


class Server:
    """One vLLM server. Each call has a deadline, and checks what it is answered; raises UnavailableError."""

    def __init__(
        self, url: str, key: str | None, timeout: float, pause: str, clear_cache: bool = True, replicas: int = 1
    ) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        self._pause = pause
        self._clear_cache = clear_cache
        self._replicas = replicas
        self._has_plugin: bool | None = None
        self._deadline: Deadline | None = None  # of the call under way
        self.may_be_paused = False  # by steps

    @contextlib.contextmanager
    def until(self, deadline: Deadline) -> Iterator[None]:
        """Calls within end by then, or a moment later. What a server waits for ends by then as well, so that it can say
        what it has waited for."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None

    def _most(self, seconds: float) -> float:
        """Return for how long a call may take, of `seconds`."""
        return seconds if self._deadline is None else min(seconds, self._deadline.left + _ANSWER_SECONDS)

    def _patience(self) -> float:
        """Return for how long a server may wait for a version."""
        seconds = self._timeout if self._deadline is None else min(self._timeout, self._deadline.left)
        if seconds <= 0:
            raise Late(f"{self.url} was busy until the time for this version was over")
        return seconds

    def join(self, init: Mapping[str, Any]) -> None:
        """Makes it meet the trainer."""
        body = {"init": init} | ({"replicas": self._replicas} if self._replicas > 1 else {})
        answer = self._by("v1/tessera/join", body, lambda: self._join_by_steps(init))
        failure = failed(answer.ranks)
        if failure or any(each.trainer != init["run"] for each in answer.ranks):
            raise UnavailableError(f"{self.url}: {failure or answer.error or NOT_MET}")

    def update(self, number: Number, run: str) -> EngineUpdate:
        """Makes it take a version that was sent. `run`: the trainer that it must have met."""
        body = {"min_version": number.on_bus, "timeout": self._patience(), "pause": self._pause, "run": run}
        body |= {} if self._clear_cache else {"clear_cache": False}
        body |= {"offset": number.offset} if number.offset else {}
        return self._by("v1/tessera/update", body, lambda: self._update_by_steps(number, run))

    def status(self) -> EngineUpdate:
        """Ask which version it serves."""
        if self._has_plugin:
            return self._answer("v1/tessera/status", None, self._most(_STATUS_SECONDS), "GET")
        return EngineUpdate.of(self._call("tessera_status", timeout=_STATUS_SECONDS))

    def _by(self, path: str, body: Mapping[str, Any], steps: Callable[[], EngineUpdate]) -> EngineUpdate:
        """By the plugin, or where it is not loaded by `steps`."""
        if self._has_plugin is not False:
            try:
                answer = self._answer(path, body, self._most(2 * self._timeout + _EXTRA_SECONDS))
                self._has_plugin = True
                return answer
            except NotFound:
                pass
            except NotUp:
                self._has_plugin = None  # it may be started in another way
                raise
            except NoEngine as error:
                raise UnavailableError(f"{self.url} is no vLLM server: {error}") from None
        try:
            answer = steps()
        except NotFound as error:
            raise UnavailableError(
                f"{self.url} has no routes for updates ({error}): start vLLM with VLLM_PLUGINS=tessera in its "
                f"environment, or give the URL of a vLLM server"
            ) from None
        self._has_plugin = False
        return answer

    def _answer(self, path: str, body: Any, timeout: float, method: str = "POST") -> EngineUpdate:
        answer = call(self.url, path, body, timeout=timeout, key=self._key, method=method)
        try:
            update = read(EngineUpdate, answer)
        except ValueError:
            update = None
        if update is None or not update.ranks:
            raise UnavailableError(f"{self.url}/{path} answered {str(answer)[:_MOST_SHOWN]}")
        judged = EngineUpdate.of(update.ranks, pause=update.pause)  # the ranks' word counts, not its sum
        error = update.error or judged.error or ("" if update.ok else "it says that this did not work, and not why")
        return dataclasses.replace(judged, ok=not error, error=error)

    # --- without the plugin for endpoints: a trainer that dies between pause and resume leaves the server paused

    def _join_by_steps(self, init: Mapping[str, Any]) -> EngineUpdate:
        self._require_one_replica()
        self._call("tessera_leave")  # all ranks, before one of them comes back
        ranks = self._settled(self._call("tessera_meet", init))
        if not failed(ranks):
            ranks = self._settled(self._call("tessera_learn"))
        if failed(ranks):
            self._call("tessera_leave")
        else:
            self._show(ranks)  # what --load-format tessera has loaded, or an earlier trainer has sent
        return EngineUpdate.of(ranks, failed(ranks))

    def _update_by_steps(self, number: Number, run: str) -> EngineUpdate:
        ranks = self._call("tessera_status")
        if any(each.trainer != run for each in ranks):
            return EngineUpdate.of(ranks, NOT_MET)
        if serves_already(ranks, number.on_bus, number.offset):
            self._go_on()
            return unchanged(ranks)
        ranks = self._settled(ranks)  # of a call that was given up
        more = [number.offset] if number.offset else []
        ranks = self._call("tessera_receive", number.on_bus, self._patience(), *more)
        if failed(ranks):
            return EngineUpdate.of(ranks)
        ranks = self._settled(ranks)
        if not all(each.ready for each in ranks):
            return EngineUpdate.of(self._call("tessera_commit"))  # installs nothing, and says why
        began = time.monotonic()
        self.may_be_paused = True
        try:
            self._post(
                f"pause?mode={self._pause}" + ("" if self._clear_cache else "&clear_cache=false")
            )  # with "wait", it may take longer than anybody waits
            ranks = self._call("tessera_commit")
        except UnavailableError:
            if served(self._call("tessera_status", timeout=_STATUS_SECONDS)) is not None:
                self._go_on()
            raise
        if served(ranks) is not None:
            self._show(ranks)
            self._go_on()
        return EngineUpdate.of(ranks, pause=time.monotonic() - began)

    def _go_on(self) -> None:
        if self.may_be_paused:
            self._post("resume")
            self.may_be_paused = False

    def _require_one_replica(self) -> None:
        """Of several, /collective_rpc tells only what the first one answers."""
        count = self._replicas
        with contextlib.suppress(UnavailableError, KeyError, TypeError, ValueError):  # an older vLLM does not tell
            config = call(
                self.url,
                "server_info?config_format=json",
                timeout=self._most(_STATUS_SECONDS),
                key=self._key,
                method="GET",
            )
            count = max(count, int(config["vllm_config"]["parallel_config"]["data_parallel_size"]))
        if count > 1:
            raise UnavailableError(f"{self.url} has {count} replicas: start it with VLLM_PLUGINS=tessera")

    def _show(self, ranks: list[RankStatus]) -> None:
        version = shown(ranks)
        if version is not None:
            self._post("update_weight_version", {"new_version": str(version)})

    def _settled(self, ranks: list[RankStatus]) -> list[RankStatus]:
        def look() -> list[RankStatus]:
            self._patience()
            return self._call("tessera_status")

        return settled(ranks, look)

    def _call(self, method: str, *args: Any, timeout: float | None = None) -> list[RankStatus]:
        answer = self._post("collective_rpc", {"method": method, "args": args}, timeout)
        return statuses(self.url, method, answer.get("results"))

    def _post(self, path: str, body: Any = None, timeout: float | None = None) -> dict[str, Any]:
        return call(self.url, path, body, timeout=self._most(timeout or self._timeout + _EXTRA_SECONDS), key=self._key)
