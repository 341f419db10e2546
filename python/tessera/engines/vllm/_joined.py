"""How a worker of vLLM meets the trainer, and what it then has of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.distributed.parallel_state import get_world_group

from ..._bus.bus import Connecting
from ..._bus.patterns import optional
from ..._errors import Error, InvalidArgumentError
from ..._tensors.torch import torch_dtype
from .._learn import LearnedMap, learn_map
from .._live import LiveWeights, Plan, Serving, one_rank
from .._pages import StagedPages
from .._vote import StoreVote, group_store
from .._waiting import seen_by_trainer
from ._computed import Computed
from ._generation import worker_base
from ._layers import plan_of
from ._meta import on_meta
from ._replicas import job_of, rank_of
from ._settings import NAMED_BY, copies_always

_base = worker_base()
_MOST_NAMED = 5


@dataclass
class InitInfo(_base.WeightTransferInitInfo):  # type: ignore[misc, name-defined]
    """How a worker finds the trainer on the bus; see tessera.connect().

    Attributes:
        pair: The name under which both jobs meet.
        trainer: Name of the trainer's job.
        engine: Name of this engine's job. With data parallelism each further replica is a job "NAME-dpN" of its own.
        store: URL of the store. None: as everywhere.
        batch: Name of the batch.
        timeout: Seconds to wait for the trainer.
        wire: Formats that tensors are quantised to on their way.
        delta: Send changes only.
        run: Identity of the trainer's run: one that was started again counts versions from 1 again.
        refused: Why this is not what was given, if that cannot be used.
    """

    pair: str = "weights"
    trainer: str = "trainer"
    engine: str = "engine"
    store: str | None = None
    batch: str = "default"
    timeout: float = 60
    wire: Any = None
    delta: bool = False
    run: str = ""
    refused: str = ""

    @classmethod
    def parsed(cls, given: Mapping[str, Any]) -> InitInfo:
        """Of fields by name. Does not raise: see `refused`."""
        try:
            return cls(**given)
        except TypeError as error:
            return cls(refused=f"init_info: {error}")


class Configured(Protocol):
    """What a vLLM configuration says here."""

    model_config: Any
    parallel_config: Any


class Joined:
    """One worker's place on the bus, and its weights. Made in three steps: meet() and register() wait for others, and
    may run in a thread while requests are served; learn() needs the model for itself, for milliseconds.

    Not thread-safe: one step at a time. Each may raise, and nothing has changed then but what close() ends.
    """

    def __init__(
        self, model: torch.nn.Module, config: Configured, info: InitInfo, serving: Serving, meeting: str
    ) -> None:
        """
        Args:
            serving: What the model's weights are.
            meeting: Names the votes of the engine's ranks: the same on all of them, and of this meeting only.
        """
        self.info = info
        self.live: LiveWeights | None = None
        self._model = model
        self._config = config
        self._serving = serving
        self._engine = job_of(info.engine, config.parallel_config.data_parallel_index)
        self._rank, self._world = rank_of(get_world_group(), config.parallel_config)
        self.agree = one_rank if self._world == 1 else self._voters(meeting)
        self._connecting = Connecting()
        self._bus: Any = None
        self._offered: Any = None
        self._learned: LearnedMap | None = None
        self._computed: Computed | None = None

    def _voters(self, meeting: str) -> StoreVote:
        store = group_store(f"tessera/{self._engine}/{meeting}")
        return StoreVote(store, self._rank, self._world, self.info.timeout)

    def meet(self, is_loading: bool = False) -> None:
        """Waits for the trainer, and for what it offers. `is_loading`: this engine has chosen its name by itself."""
        info = self.info
        if info.refused:
            raise InvalidArgumentError(info.refused)
        self._bus = self._connecting.connect(
            info.pair,
            role=self._engine,
            peer=info.trainer,
            store=info.store,
            rank=self._rank,
            world=self._world,
            timeout=info.timeout,
        )
        with seen_by_trainer(self._bus, info.batch, NAMED_BY) if is_loading else contextlib.nullcontext():
            self._offered = self._bus.manifest(info.batch)

    def learn(self) -> None:
        """Where what is offered goes in the model. Its parameters are put aside for that moment."""
        checkpoint = {each.name: (each.shape, torch_dtype(each.dtype)) for each in self._offered}
        learned = learn_map(self._model, checkpoint, meta=on_meta).cast_on_the_way()
        if not learned.slices and not learned.by_loader:
            named = ", ".join(list(checkpoint)[:_MOST_NAMED])
            raise InvalidArgumentError(f"vLLM's model takes nothing of what the trainer sends ({named}, ...)")
        self._computed = Computed(self._model, learned, checkpoint)
        self._learned = self._computed.learned

    def register(self, is_loading: bool = False) -> None:
        """Makes memory for what this worker takes, and registers it. `is_loading`: parameters may still move."""
        learned, computed, info = self._learned, self._computed, self.info
        assert learned is not None and computed is not None
        copies = is_loading or info.delta or copies_always()  # changes are added to what was received before
        pages = None if copies else StagedPages(lambda: tensors_of(self._model), learned)
        received = learned.staging() if pages is None else pages.staged
        batch = self._bus.register(
            received,
            info.batch,
            direction="recv",
            map=learned.map,
            wire=optional(info.wire),  # the trainer's, for names of which this rank may have none
            delta=info.delta,
        )
        results = {learned.key(each): torch.empty(each.shape, dtype=each.dtype) for each in learned.results}

        def plan(staged: Mapping[str, torch.Tensor]) -> Plan:
            made = plan_of(self._model, learned, staged, self._config.model_config.dtype)
            return made if pages is None else pages.applied(made)

        self.live = LiveWeights(
            lambda: tensors_of(self._model),
            learned,
            batch,
            {**received, **results},
            agree=self.agree,
            rank=self._rank,
            prepare=computed.run if computed.needed else None,
            plan=plan,
            serving=self._serving,
            run=info.run,
        )

    def load(self, timeout: float, is_strict: bool) -> None:
        """The last step while vLLM loads the model: waits for the newest version and puts it where the loader would.
        `is_strict`: each parameter must come from the trainer."""
        assert self.live is not None and self._learned is not None
        given = {piece.parameter for piece in self._learned.pieces}
        missing = [name for name, _ in self._model.named_parameters() if name not in given]
        if is_strict and missing:
            more = ", ..." if len(missing) > _MOST_NAMED else ""
            raise InvalidArgumentError(
                f"the trainer sends nothing for {', '.join(missing[:_MOST_NAMED])}{more}: register these tensors, too, "
                "or start the server with a checkpoint"
            )
        self.live.load(timeout)

    def close(self) -> None:
        """Leaves the bus, which ends what waits on it."""
        self._bus, self.live = None, None
        with contextlib.suppress(Error):
            self._connecting.close()


def tensors_of(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Its parameters and buffers, by name; what is tied by each of its names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
