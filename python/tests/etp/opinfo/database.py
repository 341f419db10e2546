"""Operations of torch's own OpInfo database, with what its list operations lack there."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch

from .modes import Call

SAMPLES_READ = 300  # at most, of the thousands that some operations have


@dataclass
class Sample:
    """Arguments of one call."""

    input: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    outputs_for_grad: Callable[[Any], Any] = lambda output: output  # without what has no defined gradient


@dataclass(frozen=True)
class Operation:
    name: str
    variants: Mapping[Call, Callable[..., Any]]
    make_samples: Callable[[], Iterable[Sample]]
    supports_out: bool = False
    is_list: bool = False  # element by element: earlier elements of a refused one stay written

    def samples(self, seed: int) -> list[Sample]:
        """Return samples that are the same in every process."""
        number = random.Random(f"{seed} {self.name}").getrandbits(32)
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number)
        return list(itertools.islice(self.make_samples(), SAMPLES_READ))


@functools.cache
def load() -> dict[str, Operation]:
    """Return all operations by name."""
    from .lists import list_operations  # which imports this module

    invocations = _import_invocations()
    operations = [_from_info(info) for info in invocations.op_db if info.supports_dtype(torch.float32, "cpu")]
    return {operation.name: operation for operation in [*operations, *list_operations(invocations)]}


def _import_invocations() -> ModuleType:
    """Import torch's database with sizes of samples that 2 and 3 ranks divide."""
    arguments, sys.argv = sys.argv, sys.argv[:1]  # torch would parse them
    try:
        from torch.testing._internal.opinfo import core

        core.XS, core.S, core.M, core.L = 6, 6, 12, 24  # for 3, 5, 10 and 20
        from torch.testing._internal import common_methods_invocations

        return common_methods_invocations
    finally:
        sys.argv = arguments


def _from_info(info: Any) -> Operation:
    variants = {
        Call.FUNCTION: info.op,
        Call.METHOD: info.method_variant,
        Call.OPERATOR: info.operator_variant,
        Call.INPLACE: info.inplace_variant,
        Call.INPLACE_OPERATOR: info.inplace_operator_variant,
    }
    return Operation(
        f"{info.name}.{info.variant_test_name}".strip("."),
        {call: function for call, function in variants.items() if function is not None},
        functools.partial(_samples_of, info),
        supports_out=info.supports_out,
    )


def _samples_of(info: Any) -> Iterator[Sample]:
    from torch.testing._internal.opinfo.core import UnaryUfuncInfo

    for sample in info.sample_inputs_func(info, "cpu", torch.float32, False):
        first = sample.input
        if isinstance(info, UnaryUfuncInfo) and first.dim() == 1 and first.numel() % 6 == 0:
            first = first.reshape(6, -1)  # most of these have no samples of two dims
        yield Sample(first, tuple(sample.args), dict(sample.kwargs), sample.output_process_fn_grad)
