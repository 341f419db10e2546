"""Comparison of parameters between ranks before a step, beside what they write into sharded tensors: which are trained,
and those that every rank has whole (norms, biases), with their gradients.

A program may write into these as into any plain tensor, and nobody meets for that: `if rank == 0: bias.zero_()` would
leave each rank with a model of its own. Ranks compare one checksum in a meeting that the step has anyway, and look for
the name only if it differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from .._errors import MismatchError
from .digests import bytes_of, comparable_digest, is_plain_tensor
from .telling import json_of, known

if TYPE_CHECKING:
    from .model import ShardedModel


def checksum_of(model: ShardedModel) -> tuple[int, int]:
    """Return numbers that are equal on ranks that train the same parameters, and have the same whole ones."""
    with DisableTorchFunctionSubclass():
        trained = [each.requires_grad for _, each in _parameters(model)]
        # A gradient's bytes do not say whose it is.
        given = [replicated.added_gradient is not None for replicated in model.replicated]
        return zlib.crc32(bytes(trained + given)), checksum(tensor for _, tensor in _whole(model))


def require_same_before(what: str, model: ShardedModel, settings: str = "") -> None:
    """Throw if they, or the settings of a step, differ before what is called `what`. Collective."""
    if model.size == 1:
        return
    own = json.dumps([*checksum_of(model), zlib.crc32(settings.encode())]).encode()
    answers = model.core.exchange("what a step depends on", own)
    other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
    if other is not None:
        refuse_difference_before(what, model)
        raise known(
            MismatchError(
                f"{what}: ranks 0 and {other} differ in parameters, or in a setting (lr, weight_decay, ...): give all "
                "ranks the same; no weight was written"
            )
        )


def refuse_difference_before(what: str, model: ShardedModel) -> None:
    """Throw with the name of the first parameter that differs, if one does. Collective: all ranks know that something
    differs."""
    with DisableTorchFunctionSubclass():
        trained = {name: bool(each.requires_grad) for name, each in _parameters(model)}
        sums = {name: checksum([tensor]) for name, tensor in _whole(model)}
    subject = "what differs"
    answers = json_of(
        model.core.exchange(subject, json.dumps([trained, sums]).encode()),
        subject,
        lambda told: len(told) == 2 and all(isinstance(each, dict) for each in told),
    )
    for rank in range(1, len(answers)):
        difference = _difference(answers[0], answers[rank], rank)
        if difference:
            raise known(MismatchError(f"{what}: {difference}: give all ranks the same; no weight was written"))


def _difference(first: list[dict[str, Any]], other: list[dict[str, Any]], rank: int) -> str:
    for name in {**first[0], **other[0]}:
        trains = [each[0].get(name) for each in (first, other)]
        if trains[0] != trains[1]:
            words = ["trained" if each else "frozen" if each is not None else "no parameter" for each in trains]
            return f"{name} is {words[0]} on rank 0 and {words[1]} on rank {rank}"
    for name in {**first[1], **other[1]}:
        if first[1].get(name) != other[1].get(name):
            return f"{name} differs between ranks 0 and {rank}, and is no sharded tensor, but whole on every rank"
    return ""


def _parameters(model: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for weight in model.weights:
        yield weight.name, weight.parameter
    for replicated in model.replicated:
        yield replicated.name, replicated.parameter


def _whole(model: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what every rank has whole."""
    for replicated in model.replicated:
        parameter = replicated.parameter
        gradient = replicated.added_gradient
        for name, tensor in ((replicated.name, parameter), (f"the gradient of {replicated.name}", gradient)):
            if tensor is not None:
                yield name, tensor


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a sum of the bytes of tensors, quicker for all of a dtype at once than one by one."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    total = 0
    for tensor in tensors:
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if is_plain_tensor(plain):
            by_dtype.setdefault(plain.dtype, []).append(plain)
        else:  # of another package's class
            total = zlib.crc32(comparable_digest(plain).encode(), total)
    for listed in by_dtype.values():
        flat = torch._C._nn.flatten_dense_tensors(listed)
        total = zlib.crc32(bytes_of(flat).numpy().data, total)
    return total
