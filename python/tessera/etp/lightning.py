"""A strategy for Lightning's Trainer: it shards the module instead of wrapping it in DistributedDataParallel.

    from tessera.etp.lightning import ETPStrategy
    Trainer(accelerator="cpu", devices=2, strategy=ETPStrategy()).fit(module)

All else is Lightning's: launching or torchrun, samplers, precision, clipping, accumulation, checkpoints, which are
plain files of whole tensors that a Trainer with any strategy, or plain torch, loads.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from .._errors import InvalidArgumentError
from .digests import is_plain_tensor
from .group import init_group
from .shard import shard_module_
from .tensor import LogicalTensor

__all__ = ["ETPStrategy"]


class ETPStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning is not there where types are checked
    """Train a LightningModule whose weights are sharded over all processes of the Trainer, which are on one host.

    The module is sharded when fit() sets it up: behind configure_model() and before configure_optimizers(), with the
    values that rank 0 has. One that configure_model() has sharded is left as it is. It stays sharded after fit(): its
    state_dict() reads as the whole. After the import of this module, `Trainer(strategy="etp")` makes one without
    options.

    Args:
        shard: Options of shard_module_(), such as {"formats": {".*": "bf16"}}.
        options: Those of Lightning's DDPStrategy that do not concern its wrapper, such as `timeout`.
    """

    strategy_name = "etp"

    def __init__(self, *, shard: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        if self._ddp_kwargs:
            raise InvalidArgumentError(
                f"ETPStrategy({', '.join(sorted(self._ddp_kwargs))}): there is no such option, and no "
                "DistributedDataParallel that it could be for: options of shard_module_() are given as shard={...}"
            )
        self._shard = dict(shard or {})

    def configure_ddp(self) -> None:
        """Shard the module, which Lightning would wrap here, with rank 0's values, as that does. Collective."""
        if self.num_nodes > 1:
            raise InvalidArgumentError(f"ETPStrategy on {self.num_nodes} nodes: the ranks of a group are on one host")
        assert isinstance(self.model, torch.nn.Module)
        if not any(isinstance(parameter, LogicalTensor) for parameter in self.model.parameters()):
            self._broadcast(self.model)
            shard_module_(self.model, init_group(), **self._shard)

    def _broadcast(self, module: torch.nn.Module) -> None:
        """Give all ranks rank 0's parameters and buffers: programs need not seed them alike."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and is_plain_tensor(tensor):
                values = tensor.detach().contiguous()
                torch.distributed.broadcast(values, 0)
                if values.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(values)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="Sharded training (tessera.etp)")


ETPStrategy.register_strategies(StrategyRegistry)
