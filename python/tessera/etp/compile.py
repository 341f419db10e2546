"""torch.compile leaves this package out of its graphs: a use of a sharded weight is a break between two of them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from .._errors import UnimplementedError

_Kind = TypeVar("_Kind", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

COMPILED = "_orig_mod."  # before the names of what torch.compile() has returned
_opaque: set[type] = set()
_SHOWS_REASONS = "reason" in inspect.signature(torch.compiler.disable).parameters  # else names of functions (torch 2.6)
_told: list[bool] = []
_told_here: ContextVar[bool] = ContextVar("tessera_etp_left_out", default=False)


def _reason() -> str:
    return (
        "weights that tessera.etp has sharded are gathered between two graphs, so that there cannot be one graph: "
        "compile without fullgraph=True"
    )


def opaque(attributes: Iterable[str] = ()) -> Callable[[_Kind], _Kind]:
    """A class of tensors that the compiler cannot make inputs of a graph: a function of one is a break. It would read
    attributes once, while it compiles, and guards see other values of them than a program does: those whose value
    depends on where they are read are breaks, too."""

    def made(kind: _Kind) -> _Kind:
        _opaque.add(kind)
        for name in attributes:
            setattr(kind, name, _read_each_time(getattr(torch.Tensor, name)))
        return kind

    return made


def _read_each_time(attribute: Any) -> property:
    """torch's own attribute, read by a function that the compiler does not look into."""
    return property(
        left_out(lambda tensor: attribute.__get__(tensor)), lambda tensor, value: attribute.__set__(tensor, value)
    )


def left_out(function: _Function) -> _Function:
    """Tells the compiler why there is a break at this function, which it shows with fullgraph=True and in its logs."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _reason()  # type: ignore[attr-defined]
    if not _SHOWS_REASONS:
        function.__qualname__ += f": {_reason()}"
    return function


def leave_out_of_graphs() -> None:
    """To be called in each thread that may compile a model: the compiler keeps settings by context. It imports the
    compiler, as torch's optimisers do."""
    if _told_here.get():
        return
    if "torch._dynamo" not in sys.modules:
        # Errors that it handles while it is imported keep the frames of who imports it, and a model with them, until
        # Python's collector of cycles comes: a thread has no such frames.
        importing = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="tessera-import")
        importing.start()
        importing.join()
    from torch._dynamo import config, trace_rules

    if not _told:
        trace_rules.add("tessera.etp")
        _told.append(True)
    if hasattr(config, "nontraceable_tensor_subclasses"):  # torch 2.8 and newer
        config.nontraceable_tensor_subclasses |= _opaque
    _told_here.set(True)


def refuse_compiled_autograd(name: str) -> None:
    """Throws within a backward that the compiler runs as graphs: gradients of sharded weights are no tensors there."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is not None and compiler.in_compiled_autograd_region:
        raise UnimplementedError(
            f"{name} is sharded, and torch's compiled autograd cannot pass through it: leave "
            "torch._dynamo.config.compiled_autograd off; compiled forwards have compiled backwards without it"
        )


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module within what torch.compile() has returned; others as they are."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while compiler is not None and isinstance(model, compiler.OptimizedModule):
        model = model._orig_mod
    return model


def suspend() -> Callable[[], None]:
    """Frames of this thread are not compiled until what it returns is called, or the compiled function that is under
    way ends."""
    callback = set_eval_frame(None)

    def go_on() -> None:
        set_eval_frame(callback)

    return go_on


@contextlib.contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Have compiled functions that are called here, with fullgraph=True, too, run as they are written, as an
    optimiser's step may compile parts of itself."""
    with torch.compiler.set_stance("force_eager"):
        yield


def stance() -> Any:
    """Return what the program has told the compiler to do with compiled functions (torch.compiler.set_stance)."""
    from torch._dynamo import eval_frame

    return eval_frame._stance  # which nothing public tells


@contextlib.contextmanager
def calls_by(known: Any) -> Iterator[None]:
    """Have compiled functions run as a stance says, also within uncompiled_calls()."""
    from torch._dynamo import eval_frame

    before = eval_frame._set_stance(known)
    try:
        yield
    finally:
        eval_frame._set_stance(before)
