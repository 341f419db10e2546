"""Signals that wait until ranks have changed something together.

Ctrl-C ends a wait for other ranks at once, and they are told. Where all ranks have come, and each now changes its part,
one that left would have another model than they: there a signal waits for the end, which is near.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import ShardedModel

_PATIENCE = 1.0  # seconds, for ranks that have been stopped amid it
_Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def together(model: ShardedModel, what: str) -> Iterator[None]:
    """Have all ranks come, then put off signals of this thread until all have made a change.

    A rank that was interrupted before it came refuses this call, and nothing has been changed on any of them.
    Collective.

    Args:
        what: Name of the call for messages of ranks that wait for others.
    """
    with put_off():
        model.core.exchange(what, b"")
        yield


@contextmanager
def put_off() -> Iterator[None]:
    """Call Python's handlers of signals at the end; of one that comes again, or has waited too long, at once."""
    if threading.current_thread() is not threading.main_thread():  # only that one is interrupted
        yield
        return
    handlers: dict[int, _Handler] = {}
    waiting: list[int] = []
    timers: list[threading.Timer] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in waiting:
            waiting.remove(number)
            handlers[number](number, frame)
            return
        waiting.append(number)
        timer = threading.Timer(_PATIENCE, signal.pthread_kill, (threading.main_thread().ident, number))
        timer.name, timer.daemon = "tessera-signal", True
        timers.append(timer)
        timer.start()

    for each in signal.valid_signals():
        handler = signal.getsignal(each)
        if callable(handler):
            handlers[int(each)] = handler
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.join()
        with ExitStack() as called:  # all of them, also where one raises
            for number in reversed(waiting):
                called.callback(handlers[number], number, None)
