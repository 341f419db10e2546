"""One exception class for each kind of failure of the core."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback
from tessera import _core, _errors

ERRORS = Path(__file__).resolve().parents[2] / "src" / "base" / "error.cc"
KINDS = _errors.Error.__subclasses__()


def core_codes() -> set[str]:
    names = ERRORS.read_text().partition("to_string(ErrorCode code)")[2].partition("\n}")[0]
    return set(re.findall(r'case ErrorCode::\w+:\s+return "([a-z-]+)";', names)) - {"ok"}


def test_each_code_of_the_core_has_one_class() -> None:
    assert len(core_codes()) == 13
    assert sorted(kind.code for kind in KINDS) == sorted(core_codes())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_class_is_public_and_goes_between_processes(kind: type[tessera.Error]) -> None:
    assert getattr(tessera, kind.__name__) is kind
    assert kind.__module__ == "tessera"
    again = pickle.loads(pickle.dumps(kind("tensor w: why")))
    assert type(again) is kind and str(again) == "tensor w: why"


BUILTIN = {
    tessera.InvalidArgumentError: ValueError,
    tessera.NotFoundError: LookupError,
    tessera.DeadlineExceededError: TimeoutError,
    tessera.PeerLostError: ConnectionError,
    tessera.UnimplementedError: NotImplementedError,
}


def test_what_python_has_a_class_for_is_caught_by_it() -> None:
    for kind in KINDS:
        assert issubclass(kind, BUILTIN.get(kind, Exception))


def mismatch(loopback: Loopback) -> None:
    loopback.transfer({"w": np.zeros(2)}, {"v": np.zeros(2)})


def deadline(loopback: Loopback) -> None:
    loopback.trainer.manifest("unknown", timeout=0.1)


def twice(loopback: Loopback) -> None:
    options: Any = {"role": "trainer", "peer": ["nobody"], "rank": 0, "world": 1, "namespace": "loopback"}
    with tessera.connect("weights", **options) as one, tessera.connect("weights", **options) as two:
        for bus in (one, two):
            bus.register({"w": np.zeros(2)}, "twice", direction="send")


def cut_by_two_axes(loopback: Loopback) -> None:
    _core.sliced_layout(tessera.Layout("2,2:S0,S0"), (8,), [(0, 3, 1, False)])


# What the core raises, as a caller meets it.
RAISED: dict[type[tessera.Error], Callable[[Loopback], Any]] = {
    tessera.InvalidArgumentError: lambda loopback: tessera.Layout("2:Q"),
    tessera.MismatchError: mismatch,
    tessera.DeadlineExceededError: deadline,
    tessera.AlreadyExistsError: twice,
    tessera.UnimplementedError: cut_by_two_axes,
    tessera.UnavailableError: lambda loopback: tessera.connect(
        "weights", role="a", peer="b", rank=0, world=1, store="tcp://127.0.0.1:1", timeout=0.5
    ),
}


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.code)
def test_the_core_raises_it(kind: type[tessera.Error], loopback: Loopback) -> None:
    with pytest.raises(kind) as caught:
        RAISED[kind](loopback)
    assert type(caught.value) is kind
