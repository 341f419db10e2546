"""Updates of a trainer's servers, beside each other: a server that is slow keeps no other one waiting."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from .._errors import CancelledError
from ._numbers import Number
from ._updates import EngineUpdate

_LOOK_SECONDS = 0.5  # for an interrupt that has come just before a wait, which Python notices after it only
_MARGIN_SECONDS = 0.9  # an update has a deadline of its own, and says then what was in its way


class Deadline:
    """The moment at which a call has to end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """In seconds; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def __lt__(self, other: Deadline) -> bool:
        return self._end < other._end


class Sent(NamedTuple):
    """A version on offer, and when the call that has sent it has to end."""

    number: Number
    deadline: Deadline


class Updates:
    """Runs an update of each server for each version that is sent, in a thread for each of them. One call at a time.

    The caller's thread may be interrupted anywhere: it waits in queues only, whose locks no interrupt leaves behind."""

    def __init__(
        self,
        urls: Mapping[str, str],
        update: Callable[[str, Sent], EngineUpdate],
        grace: float | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            urls: Of the servers, by their names.
            update: Makes a server take a version. It ends about when the version's deadline does.
            grace: Seconds for the other servers once one has the version. None: as long as the deadline.
            on_end: Called when one of them is busy no more.
        """
        self._urls = urls
        self._update = update
        self._grace = grace
        self._behind: set[str] = set()  # took longer than the grace; nobody waits until they are done
        self._closed = False
        self._workers = {name: _Worker(name, on_end) for name in urls}

    def run(self, sent: Sent) -> dict[str, EngineUpdate]:
        """Return what came of it, by server. A server that is still busy, as a call before was interrupted, is waited
        for, and then takes this version. An interrupt leaves updates under way."""
        replies: Replies = queue.SimpleQueue()
        self._behind = {name for name in self._behind if self._workers[name].busy}
        waiting = [name for name in self._urls if name not in self._behind]
        for name in waiting:
            self._ask(name, _Job(functools.partial(self._update, name, sent), replies, sent.deadline))
        results: dict[str, Any] = {}
        end = Deadline(sent.deadline.left + _MARGIN_SECONDS)
        while len(results) < len(waiting) and end.left:
            with contextlib.suppress(queue.Empty):
                name, update = replies.get(timeout=min(end.left, _LOOK_SECONDS))
                results[name] = update
                if self._grace is not None and isinstance(update, EngineUpdate) and update.ok:
                    end = min(end, Deadline(self._grace))
        if self._grace is not None:
            self._behind |= {name for name in waiting if name not in results}
        return {name: _raised(results.get(name)) or self._busy(name) for name in self._urls}

    def _busy(self, name: str) -> EngineUpdate:
        return EngineUpdate(False, None, f"{self._urls[name]} was busy with an earlier version")

    def for_each(self, work: Callable[[str], None]) -> None:
        """Do something for each server, beside each other. Raises what one of them does, once all have ended."""
        replies: Replies = queue.SimpleQueue()
        for name in self._urls:
            self._ask(name, _Job(functools.partial(work, name), replies))
        results: dict[str, Any] = {}
        while len(results) < len(self._urls):
            with contextlib.suppress(queue.Empty):
                name, result = replies.get(timeout=_LOOK_SECONDS)
                results[name] = result
        for result in results.values():
            _raised(result)

    def _ask(self, name: str, job: _Job) -> None:
        if self._closed:
            raise CancelledError("this trainer was closed by another thread")
        self._workers[name].ask(job)

    @property
    def busy(self) -> bool:
        """True while a server has an update under way."""
        return any(worker.busy for worker in self._workers.values())

    def abandon(self) -> None:
        """Begins no more updates. Waits for none."""
        self._closed = True
        for worker in self._workers.values():
            worker.ask(None)

    def close(self) -> None:
        """Waits until no server is busy any more. Idempotent."""
        self.abandon()
        for worker in self._workers.values():
            worker.join()


Replies: TypeAlias = "queue.SimpleQueue[tuple[str, Any]]"


class _Job(NamedTuple):
    work: Callable[[], Any]
    replies: Replies
    deadline: Deadline | None = None  # to begin


class _Worker:
    """The thread of one server, which does the last of the jobs that have come meanwhile."""

    def __init__(self, name: str, on_end: Callable[[], None]) -> None:
        self._name = name
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = True
        self._thread = threading.Thread(target=self._run, name=f"tessera-{name}", daemon=True)
        self._thread.start()

    def ask(self, job: _Job | None) -> None:
        """None: to end, without those that have not begun."""
        self._jobs.put(job)

    @property
    def busy(self) -> bool:
        return not self._idle or not self._jobs.empty()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            asked = [self._jobs.get()]
            self._idle = False
            while not self._jobs.empty():
                asked.append(self._jobs.get())
            job = None if None in asked else asked[-1]
            has_time = job is not None and (job.deadline is None or job.deadline.left > 0)
            result = _result_of(job.work) if job is not None and has_time else None
            self._idle = True
            if job is not None and has_time:
                job.replies.put((self._name, result))
            self._on_end()
            if None in asked:
                return


def _result_of(work: Callable[[], Any]) -> Any:
    """Return what it returns, or the exception that it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _raised(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result
