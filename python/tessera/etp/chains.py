"""Chains: weights that captured graphs have and others, the streams that these move on, and waiting for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from .. import _core
from .._arguments import choice, elements, flag, text
from .config import graphs
from .model import models_of_this_process
from .views import models_of

_CHAINS = ("GRAPHED", "UNGRAPHED")


def classify_etp_chains(
    model: torch.nn.Module, scope: Iterable[str] | None = None, *, moe_shared_expert_overlap: bool | None = None
) -> None:
    """Says which weights belong to captured graphs, by the names that they were sharded by; docs/design/etp.md has the
    rules. A weight that is planned in another chain already is an error.

    Args:
        scope: "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba". None: set_cuda_graph_scope()'s.
        moe_shared_expert_overlap: Shared experts are computed beside the others, and not captured. None: likewise.
    """
    names = graphs.names if scope is None else elements("scope", scope, "a set of names, such as {'attn'}")
    overlap = graphs.moe_shared_expert_overlap
    if moe_shared_expert_overlap is not None:
        overlap = flag("moe_shared_expert_overlap", moe_shared_expert_overlap)
    for each in models_of(model):
        each.runtime.classify({text("scope", name) for name in names}, overlap)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream on which weights or gradients move beside the computation: a thread of this process.

    Attributes:
        name: Its own, also in schedule logs.
        chain: "GRAPHED" or "UNGRAPHED".
        group: The name of the etp.Group.
        kind: "gather" or "reduce".
    """

    name: str
    chain: str
    group: str
    kind: str
    _runtime: _core.EtpRuntime = dataclasses.field(repr=False)

    @property
    def idle(self) -> bool:
        """Whether what it was given has ended."""
        return all(each.idle for each in self._runtime.streams() if each.name == self.name)

    def synchronize(self) -> None:
        """Waits until what it was given has ended, at most the group's timeout. One that reduces waits for gradients of
        other ranks."""
        self._runtime.synchronize(self.chain, self.kind == "gather")


def streams(chain: str | None = None) -> list[Stream]:
    """Those that the models of this process have so far: a stream is made at its first use. Chains, and models, have
    streams of their own, and so have gathers and reductions.

    Args:
        chain: "GRAPHED" or "UNGRAPHED". None: both.
    """
    wanted = _CHAINS if chain is None else (choice("chain", chain, _CHAINS),)
    return [
        Stream(each.name, each.chain, model.group.name, "gather" if each.gathers else "reduce", model.runtime)
        for model in models_of_this_process()
        for each in model.runtime.streams()
        if each.chain in wanted
    ]


def wait_async_comms(chain: str | None = None, reductions: bool = True) -> None:
    """Waits for what moves beside the computation, of all models of this process: adds every gradient that any rank has
    produced, which is collective, and ends gathers that are under way.

    The end of a backward adds gradients: this is for ranks that had none, while others had.

    Args:
        chain: Whose gathers are waited for, "GRAPHED" or "UNGRAPHED". None: all. Ranks add gradients of both chains
            together.
        reductions: False: waits for gathers only, and is not collective.
    """
    gathers = "" if chain is None else choice("chain", chain, _CHAINS)
    adds = flag("reductions", reductions)
    models = models_of_this_process()
    for model in models if adds else ():
        model.drain()
    for model in models:
        model.runtime.synchronize(gathers, True)
