"""Extended tensor parallelism for PyTorch: every rank keeps 1/N of each weight, its gradient and its optimiser state.

    from tessera import etp

    group = etp.init_group()                       # over torch's default process group
    etp.shard_module_(model, group)                # in place, before the optimiser is made
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).loss.backward()                       # gathers weights as they are used, reduces their gradients
    etp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

The full weight exists only around the operation that uses it. Ranks of a group work on different tokens; the result is
that of the unsharded model over all of them, bit for bit (docs/design/etp.md says under which conditions).

Collective calls are made by all ranks of a group in one order: shard_module_(), the end of a backward, an optimiser's
step, update(), summon(), unshard_(), clip_grad_norm_(), load_optimizer_state_dict(). This package imports
torch.
"""

from .._core import Forecast, PoolReport, WeightReport
from ._chains import Stream, classify_etp_chains, streams, wait_async_comms
from ._config import set_cuda_graph_scope, update_config
from ._exact.conditions import Condition, Exactness, exactness
from ._exact.verify import Difference, Verification, verify
from ._forecast import forecast
from ._group import Group, init_group
from ._optim.muon import Muon
from ._optim.norms import clip_grad_norm_
from ._optim.optimizers import allow_optimizer
from ._report import Report, explain, report
from ._shard import shard_module_, unshard_
from ._states.optimizer import load_optimizer_state_dict, optimizer_state_dict
from ._surface import tag_etp_params_with_names, wrap_module_params_etp
from ._views import from_local, local, update, whole
from ._weights.stack import Expert, Stack
from ._weights.weight import Weight
from .join import join
from .layers import Embedding, GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, vocab_parallel_cross_entropy
from .summoning import summon
from .tensor import LogicalTensor

__all__ = [
    "Condition",
    "Difference",
    "Embedding",
    "Exactness",
    "Expert",
    "Forecast",
    "Group",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LogicalTensor",
    "Muon",
    "PoolReport",
    "Report",
    "Stack",
    "Stream",
    "Verification",
    "Weight",
    "WeightReport",
    "allow_optimizer",
    "classify_etp_chains",
    "clip_grad_norm_",
    "exactness",
    "explain",
    "forecast",
    "from_local",
    "init_group",
    "join",
    "load_optimizer_state_dict",
    "local",
    "optimizer_state_dict",
    "report",
    "set_cuda_graph_scope",
    "shard_module_",
    "streams",
    "summon",
    "tag_etp_params_with_names",
    "unshard_",
    "update",
    "update_config",
    "verify",
    "vocab_parallel_cross_entropy",
    "wait_async_comms",
    "whole",
    "wrap_module_params_etp",
]
