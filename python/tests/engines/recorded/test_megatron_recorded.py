"""The service against Megatron-Core's base class and its callers as they were recorded; the package is not needed."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch

BASE = "megatron.core.resharding.copy_services.base"


class CopyService016(ABC):
    """Of 0.16.1."""

    @abstractmethod
    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int) -> None: ...

    @abstractmethod
    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int) -> None: ...

    @abstractmethod
    def run(self) -> None: ...


class CopyService019(ABC):
    """Of 0.19.2, whose constructor asks torch.distributed for the rank."""

    requires_process_group_barrier = True

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = self.world_size = -1
        self.initialised = True

    @abstractmethod
    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None: ...

    @abstractmethod
    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None: ...

    @abstractmethod
    def run(self) -> None: ...

    def close(self) -> None:
        raise NotImplementedError


def service_over(base: type, monkeypatch: pytest.MonkeyPatch) -> Any:
    for end in range(1, BASE.count(".") + 2):
        name = ".".join(BASE.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[BASE].CopyService = base  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "tessera.engines.megatron.service", raising=False)
    module = importlib.import_module("tessera.engines.megatron.service")
    monkeypatch.delitem(sys.modules, "tessera.engines.megatron.service")
    return module.CopyService


def executed_016(service: Any, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    """As execute_reshard_plan() calls a service there."""
    submit_send_with_id = getattr(service, "submit_send_with_id", None)
    submit_recv_with_id = getattr(service, "submit_recv_with_id", None)
    assert submit_send_with_id is not None and submit_recv_with_id is not None
    for i, tensor in enumerate(sends):
        submit_send_with_id(i, tensor, 0) if i else service.submit_send(tensor, 0)
    for i, tensor in reversed(list(enumerate(receives))):
        submit_recv_with_id(i, tensor, 0) if i else service.submit_recv(tensor, 0)
    service.run()


def executed_019(service: Any, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    """Likewise. A transform sends two tensors of one task."""
    for i, tensor in enumerate(sends):
        service.submit_send(tensor, 0, task_id=i // 2)
    for i, tensor in enumerate(receives):
        service.submit_recv(tensor, 0, task_id=i // 2)
    service.run()
    assert service.requires_process_group_barrier is False


@pytest.mark.parametrize(
    ("base", "executed"), [(CopyService016, executed_016), (CopyService019, executed_019)], ids=["0.16.1", "0.19.2"]
)
def test_a_plan_is_executed_as_the_release_does_it(base: Any, executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service_over(base, monkeypatch)
    with made() as service:
        assert isinstance(service, base) and (service.rank, service.world_size, service.group) == (0, 1, None)
        assert getattr(service, "initialised", True)
        for turn in range(2):
            sends = [torch.full((2, 3), float(10 * turn + i)) for i in range(4)]
            receives = [torch.zeros(2, 3) for _ in sends]
            executed(service, sends, receives)
            assert all(torch.equal(*pair) for pair in zip(sends, receives, strict=True))
    service.close()


@pytest.mark.parametrize("base", [CopyService016, CopyService019], ids=["0.16.1", "0.19.2"])
def test_every_call_of_the_base_class_is_one_of_ours(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service_over(base, monkeypatch)
    for name in base.__abstractmethods__:
        theirs = list(inspect.signature(getattr(base, name)).parameters)
        assert list(inspect.signature(getattr(made, name)).parameters)[: len(theirs)] == theirs


def test_the_base_class_is_as_it_was_recorded() -> None:
    installed = pytest.importorskip(BASE, reason="megatron-core is not installed").CopyService
    recorded = CopyService019 if hasattr(installed, "requires_process_group_barrier") else CopyService016
    assert installed.__abstractmethods__ == recorded.__abstractmethods__
    for name in installed.__abstractmethods__:
        both = [list(inspect.signature(getattr(each, name)).parameters) for each in (installed, recorded)]
        assert both[0] == both[1], name
