"""How tensors become sharded, and how the whole of one is seen."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from .options import Options

Intercept = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Box(torch.nn.Module):
    """The module whose parameters are sharded: theta<i> is the tensor at place i of the flat arguments."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._places = list(tensors)
        for place, tensor in tensors.items():
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(self, f"theta{place}", torch.nn.Parameter(whole))

    def by_place(self) -> dict[int, torch.Tensor]:
        return {place: getattr(self, f"theta{place}") for place in self._places}

    def forward(self, use: Callable[[dict[int, torch.Tensor]], Any]) -> Any:
        return use(self.by_place())


class Adapter(abc.ABC):
    """One implementation of sharded tensors, on one rank. All methods are collective."""

    shares = True  # a parameter is one thing, into which ranks cannot write values of their own

    def __init__(self, options: Options) -> None:
        self.options = options

    @abc.abstractmethod
    def shard(self, tensors: dict[int, torch.Tensor]) -> Box: ...

    @abc.abstractmethod
    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a sharded tensor as a plain one, and a plain tensor as it is."""

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of the ranks' gradients, sharded or not."""
        return parameter.grad

    @abc.abstractmethod
    def close(self, box: Box) -> None:
        """End the use of a module."""


class Unsharded(Adapter):
    """Leaves every tensor whole and adds up gradients by itself: all must be right, or the harness is wrong.

    Faults are planted by `intercept`, which gets the calls of torch functions on a parameter.
    """

    shares = False
    intercept: Intercept | None = None

    def shard(self, tensors: dict[int, torch.Tensor]) -> Box:
        box = Box(tensors)
        if self.intercept is not None:
            for name, parameter in list(box.named_parameters()):
                setattr(box, name, _intercepted(parameter.detach(), self.intercept))
        return box

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        own = parameter.grad
        total = torch.zeros(parameter.shape, dtype=parameter.dtype) if own is None else own.to_dense().clone()
        total = total.as_subclass(torch.Tensor).contiguous()
        torch.distributed.all_reduce(total)
        return total

    def close(self, box: Box) -> None:
        pass


def _intercepted(tensor: torch.Tensor, intercept: Intercept) -> torch.Tensor:
    """Return a parameter whose calls go to `intercept`."""

    class Intercepted(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return intercept(func, args, kwargs or {})

    return torch.Tensor._make_subclass(Intercepted, tensor, True)


class Tessera(Adapter):
    """The package, by public names only."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        from tessera import etp

        self._etp = etp
        self._group = etp.init_group(timeout=options.alarm)

    def shard(self, tensors: dict[int, torch.Tensor]) -> Box:
        # Few rows would otherwise be padded to those of one rank.
        divides = all(_rows(tensor) % self.options.ranks == 0 for tensor in tensors.values())
        self._etp.update_config(pad_for_alignment=0 if divides else 16)
        box = Box(tensors)
        self._etp.shard_module_(box, self._group, min_elements=0, reduction="sum")
        return box

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self._etp.whole(tensor)
        return whole

    def close(self, box: Box) -> None:
        self._etp.unshard_(box)


def _rows(tensor: torch.Tensor) -> int:
    """Return the number of rows that are cut: of a stack, those of one matrix."""
    return tensor.shape[1] if tensor.dim() == 3 else tensor.numel() // tensor.shape[-1]


ADAPTERS: dict[str, type[Adapter]] = {"tessera": Tessera, "unsharded": Unsharded}


def preload(name: str) -> None:
    """Import what ranks need, before they are forked."""
    if name == "tessera":
        import tessera.etp  # noqa: F401
