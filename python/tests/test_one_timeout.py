"""A call has one deadline: what its first wait has used up is not there for the next one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback import Loopback
from tessera import _core, tensor_bus
from tessera._bus import attachment, bus


class Clock:
    """Stands still but for what a call is said to take."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    time = types.SimpleNamespace(monotonic=made.monotonic)
    for module in (attachment, bus, tensor_bus):
        monkeypatch.setattr(module, "time", time)
    return made


class Joined(Exception):
    """Ends a call once its second wait has begun."""


def _join(given: list[float]) -> Callable[..., Any]:
    def join(core: Any, pair: str, peer: Any, timeout: float, layout: Any) -> Any:
        given.append(timeout)
        raise Joined

    return join


@pytest.mark.parametrize(("taken", "left"), [(0, 10), (4, 6), (10, 0), (11, 0)])
@pytest.mark.parametrize("way", ["connect", "client"])
def test_joining_a_pair_has_what_the_store_has_left(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, way: str, taken: float, left: float
) -> None:
    given: list[float] = []
    made = _core.Bus

    def connected(**options: Any) -> Any:
        given.append(options["timeout"])
        clock.now += taken
        return made(**{**options, "timeout": 30.0})

    monkeypatch.setattr(_core, "Bus", connected)
    monkeypatch.setattr(bus if way == "connect" else tensor_bus, "join", _join(given))
    join = {
        "connect": lambda: bus.Connecting().connect("one-timeout", role="a", peer="b", rank=0, world=1, timeout=10),
        "client": lambda: tensor_bus.TensorBusClient(0).init_pair("one-timeout", "a", "b", 1, timeout=10),
    }
    with pytest.raises(Joined):
        join[way]()
    assert given == [10, left]


class Slow:
    """A pair, or a bus, whose calls take as long as they are said to; notes the time that each is given."""

    def __init__(self, real: Any, clock: Clock, given: dict[str, float], taken: float) -> None:
        self._real, self._clock, self._given, self._taken = real, clock, given, taken

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        place = {"all_gather": 2, "manifest": 1, "register_batch": 3}.get(name)
        if place is None:
            return call

        def slow(*arguments: Any) -> Any:
            self._given[name] = arguments[place]
            if name == "register_batch":
                raise Joined
            self._clock.now += self._taken
            return call(*arguments[:place], 30.0, *arguments[place + 1 :])

        return slow


def test_registering_has_one_deadline(loopback: Loopback, clock: Clock) -> None:
    given: dict[str, float] = {}
    batch = loopback.register({"w": torch.ones(3)}, timeout=10)
    inner = batch._attachment
    shares = inner._shares
    inner._shares = [
        attachment.Share(each.name, Slow(each.pair, clock, given, 4), each.registration) for each in shares
    ]
    inner._bus = Slow(inner._bus, clock, given, 4)
    try:
        with pytest.raises(Joined):
            batch.attach("send")
    finally:
        batch.close()
    assert given == {"all_gather": 10, "register_batch": 6}
