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
from .chains import Stream, classify_etp_chains, streams, wait_async_comms
from .config import set_cuda_graph_scope, update_config
from .exactness import Condition, Exactness, exactness
from .forecast import forecast
from .group import Group, init_group
from .join import join
from .layers import Embedding, GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, vocab_parallel_cross_entropy
from .muon import Muon
from .norms import clip_grad_norm_
from .optim import allow_optimizer
from .optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from .report import Report, explain, report
from .shard import shard_module_, unshard_
from .stack import Expert, Stack
from .summon import summon
from .tensor import LogicalTensor
from .verify import Difference, Verification, verify
from .views import from_local, local, update, whole
from .weight import Weight
from .wrap import tag_etp_params_with_names, wrap_module_params_etp

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
