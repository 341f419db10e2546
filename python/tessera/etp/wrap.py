"""Sharding by names of parameters, for models that are put together module by module."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._arguments import elements, flag
from .._errors import InvalidArgumentError
from .group import Group
from .parameter import LogicalParameter
from .refusals import require_module
from .shard import shard_module_
from .state_names import note_names
from .telling import collective


@collective("wrap_module_params_etp()")
def wrap_module_params_etp(
    module: torch.nn.Module, names: Iterable[str], group: Group, is_grouped: bool | None = None
) -> torch.nn.Module:
    """shard_module_() of these parameters, whatever their size; the others stay whole. Collective.

    Args:
        is_grouped: They are experts, in this order: of one shape, gathered and quantised together. None: they are if
            there are several and the module's class is called GroupedLinear, as TransformerEngine's is.
    """
    listed = elements("names", names, "a list of names of parameters")
    wanted = set(listed)
    unknown = wanted - {name for name, _ in module.named_parameters()}
    if unknown:
        raise InvalidArgumentError(
            f"wrap_module_params_etp: {type(module).__name__} has no parameter {', '.join(sorted(unknown))}"
        )
    if is_grouped is None:
        grouped = len(listed) > 1 and any(kind.__name__ == "GroupedLinear" for kind in type(module).__mro__)
    else:
        grouped = flag("is_grouped", is_grouped)
    return shard_module_(
        module,
        group,
        filter=lambda name, _: name in wanted,
        min_elements=0,
        experts=[listed] if grouped else (),
    )


def tag_etp_params_with_names(model: torch.nn.Module) -> None:
    """Names sharded parameters, in messages, as the model does: those of modules that were sharded before they became
    its parts."""
    require_module(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, LogicalParameter):
            parameter.etp.rename(name)
    note_names(model)
