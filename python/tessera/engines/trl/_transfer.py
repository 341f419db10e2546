"""TRL's WeightTransferProtocol over a Trainer for vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ..._closing import Closing
from ..._errors import MismatchError, UnavailableError
from .._updates import EngineUpdate
from ..vllm import Trainer

_log = logging.getLogger(__name__)


class WeightTransfer(Closing):
    """What TRL's AsyncGRPOTrainer takes as `weight_transfer`. TRL calls it on its main process, with whole tensors.

    The server goes on with its requests while weights travel: pause() does nothing, and the Trainer pauses it only for
    the copies into place. TRL gathers a tensor at a time; they are kept in host memory, once here and once in the copy
    that is on offer.

    It follows TRL 1.16, whose trainer has not run with it: that needs a GPU.
    """

    def __init__(self, server: str, *, engine: str = "engine0", tolerated: int = 0, **options: Any) -> None:
        """Does nothing else: each rank makes one, and the main process uses it.

        Args:
            server: URL of the vLLM server.
            engine: Name of its job on the bus.
            tolerated: Failed updates in a row with which training goes on, as the server goes on with the weights that
                it had; one more raises.
            options: Of tessera.engines.vllm.Trainer, such as wire= and timeout=.
        """
        self._engines = {engine: server}
        self._engine = engine
        self._tolerated = tolerated
        self._options = options
        self._trainer: Trainer | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._failures = 0
        #: What came of the last update.
        self.last: EngineUpdate | None = None

    def init_weight_transfer(self) -> None:
        """Nothing: the first weights make the connection, as TRL tells no shapes before."""

    def pause(self) -> None:
        """Nothing: see the class."""

    def resume(self) -> None:
        """Nothing: see the class."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes all pairs, which TRL's other processes gather with this one, sends them, and has the server install
        them.

        Raises:
            UnavailableError: More updates in a row have failed than are tolerated.
            MismatchError: The names or shapes are others than at first.
        """
        self._take(iterator)
        if self._trainer is None:
            self._trainer = Trainer(self._weights, self._engines, rank=0, world=1, **self._options)
        update = self.last = self._trainer.send()[self._engine]
        self._failures = 0 if update.ok else self._failures + 1
        if self._failures > self._tolerated:
            raise UnavailableError(f"{self._engines[self._engine]} serves version {update.version}: {update.error}")
        if not update.ok:
            _log.warning("tessera: %s goes on with version %s: %s", self._engine, update.version, update.error)

    def _take(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        first = not self._weights
        wrong = ""
        with torch.no_grad():
            left = set(self._weights)
            for name, tensor in iterator:  # to the end: the other processes gather, too
                kept = self._weights.get(name)
                if first:
                    self._weights[name] = tensor.detach().to("cpu", copy=True)
                elif kept is None or kept.shape != tensor.shape:
                    wrong = wrong or f"{name} {tuple(tensor.shape)}"
                else:
                    kept.copy_(tensor)
                left.discard(name)
        if wrong or (left and not first):
            raise MismatchError(
                f"TRL sends other weights than at first: {wrong or 'without ' + min(left)}; make another WeightTransfer"
            )

    def destroy(self) -> None:
        """What TRL calls at the end of training."""
        self.close()

    def close(self) -> None:
        """Leaves the bus. The server goes on with what it has."""
        trainer, self._trainer = self._trainer, None
        self._weights = {}
        if trainer is not None:
            trainer.close()
