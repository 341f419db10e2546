"""Small models whose loaders copy as those of serving engines do: fused, sharded, stacked, transposed, padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BF16, F32 = torch.bfloat16, torch.float32
Checkpoint = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
HIDDEN = 8


@dataclass
class Loading:
    model: torch.nn.Module
    checkpoint: Checkpoint
    untouched: dict[str, int] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    replicated: int = 0  # elements that the second rank takes, too


class Loaded(torch.nn.Module):
    """Parameters with a loader each, called with (parameter, tensor, key)."""

    def __init__(self, stacked: Iterable[tuple[str, str, Any]] = ()) -> None:
        super().__init__()
        self.stacked = list(stacked)  # (name in the model, name in the checkpoint, key)

    def add(self, name: str, shape: tuple[int, ...], loader: Callable[..., None], dtype: torch.dtype = BF16) -> None:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        parameter.weight_loader = loader
        self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            found = [(target, key) for target, source, key in self.stacked if source == name] or [(name, None)]
            for target, key in found:
                if target in parameters:
                    parameters[target].weight_loader(parameters[target], tensor, key)


def whole(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
    parameter.data.copy_(tensor)


def shard_of(rank: int, world: int, dim: int) -> Callable[..., None]:
    def load(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        size = tensor.shape[dim] // world
        parameter.data.copy_(tensor.narrow(dim, rank * size, size))

    return load


def fused(rank: int, world: int) -> Loading:
    """q, k, v of 4 heads and 1 kv head, gate and up; norms whole."""
    heads, width = 4 // world, 2
    rows = {"q": (0, heads * width), "k": (heads * width, width), "v": ((heads + 1) * width, width)}

    def qkv(parameter: torch.Tensor, tensor: torch.Tensor, key: str) -> None:
        at, size = rows[key]
        part = tensor.narrow(0, rank * size if key == "q" else 0, size)  # a kv head is on all ranks
        parameter.data.narrow(0, at, size).copy_(part)

    def gate_up(parameter: torch.Tensor, tensor: torch.Tensor, key: int) -> None:
        size = parameter.shape[0] // 2
        parameter.data[key * size : (key + 1) * size] = tensor.chunk(world, 0)[rank]

    model = Loaded(
        [("qkv", each, each) for each in "qkv"] + [("gate_up", "gate", 0), ("gate_up", "up", 1)],
    )
    model.add("qkv", ((heads + 2) * width, HIDDEN), qkv)
    model.add("gate_up", (2 * 12 // world, HIDDEN), gate_up)
    model.add("o", (HIDDEN, 8 // world), shard_of(rank, world, 1))
    model.add("norm", (HIDDEN,), whole)
    checkpoint = {
        "q": ((8, HIDDEN), BF16),
        "k": ((2, HIDDEN), BF16),
        "v": ((2, HIDDEN), BF16),
        "gate": ((12, HIDDEN), BF16),
        "up": ((12, HIDDEN), BF16),
        "o": ((HIDDEN, 8), BF16),
        "norm": ((HIDDEN,), BF16),
    }
    return Loading(model, checkpoint, replicated=2 * 2 * HIDDEN + HIDDEN)


def experts(rank: int, world: int) -> Loading:
    """w1, w3 and w2 of 4 experts, stacked and sharded; a router that is cast."""
    middle = 6 // world

    def w13(parameter: torch.Tensor, tensor: torch.Tensor, key: tuple[int, int]) -> None:
        expert, half = key
        parameter.data[expert].narrow(0, half * middle, middle).copy_(tensor.narrow(0, rank * middle, middle))

    def w2(parameter: torch.Tensor, tensor: torch.Tensor, key: int) -> None:
        parameter.data[key].copy_(tensor.narrow(1, rank * middle, middle))

    stacked: list[tuple[str, str, Any]] = []
    checkpoint: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"router": ((4, HIDDEN), BF16)}
    for expert in range(4):
        stacked += [("w13", f"{expert}.w1", (expert, 0)), ("w13", f"{expert}.w3", (expert, 1))]
        stacked += [("w2", f"{expert}.w2", expert)]
        checkpoint |= {f"{expert}.{name}": ((6, HIDDEN), BF16) for name in ("w1", "w3")}
        checkpoint[f"{expert}.w2"] = ((HIDDEN, 6), BF16)
    model = Loaded(stacked)
    model.add("w13", (4, 2 * middle, HIDDEN), w13)
    model.add("w2", (4, HIDDEN, middle), w2)
    model.add("router", (4, HIDDEN), whole, F32)
    return Loading(model, checkpoint, replicated=4 * HIDDEN)


def expert_parallel(rank: int, world: int) -> Loading:
    """Each rank has half of the experts, from one stacked and transposed tensor."""

    def load(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        local = tensor.chunk(world, 0)[rank]
        for i, expert in enumerate(local.unbind(0)):
            parameter.data[i] = expert.t()

    model = Loaded()
    model.add("experts", (4 // world, 5, HIDDEN), load)
    return Loading(model, {"experts": ((4, HIDDEN, 5), BF16)})


def padded_vocabulary(rank: int, world: int) -> Loading:
    """11 words padded to 16; rows after them are zeros."""
    rows = 16 // world

    def load(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        begin, end = rank * rows, min((rank + 1) * rows, 11)
        parameter[: end - begin].data.copy_(tensor[begin:end])
        parameter[end - begin :].data.fill_(0)

    model = Loaded()
    model.add("embedding", (rows, HIDDEN), load)
    missing = {"embedding": 5 * HIDDEN} if rank == 1 else {}
    return Loading(model, {"embedding": ((11, HIDDEN), BF16), "rotary": ((4,), F32)}, missing, {"rotary"})


def interleaved(rank: int, world: int) -> Loading:
    """GPT-NeoX: rows are [head, (q, k, v), width] in the checkpoint, [(q, k, v), head, width] in the engine."""

    def load(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        heads = tensor.view(4, 3, 2, *tensor.shape[1:]).transpose(0, 1)
        heads = heads.narrow(1, rank * 4 // world, 4 // world)
        parameter.data.copy_(heads.reshape(parameter.shape))

    model = Loaded()
    model.add("qkv", (24 // world, HIDDEN), load)
    model.add("bias", (24 // world,), load)
    return Loading(model, {"qkv": ((24, HIDDEN), BF16), "bias": ((24,), BF16)})


def transposed(rank: int, world: int) -> Loading:
    """GPT-2: [in, out] in the checkpoint; q, k and v beside each other."""

    def load(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        parts = [each.chunk(world, 1)[rank] for each in tensor.chunk(3, 1)]
        parameter.data.copy_(torch.cat(parts, dim=1).t().contiguous())

    model = Loaded()
    model.add("c_attn", (24 // world, HIDDEN), load)
    return Loading(model, {"c_attn": ((HIDDEN, 24), BF16)})


def repeated(rank: int, world: int) -> Loading:
    """A kv head that is repeated for each of four; a bias that is padded; a scale for each row."""

    def kv(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        parameter.data.copy_(tensor.unsqueeze(0).expand(4, *tensor.shape).reshape(parameter.shape))

    def pad(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        parameter.data.copy_(torch.nn.functional.pad(tensor, (1, 2)))

    def scale(parameter: torch.Tensor, tensor: torch.Tensor, key: Any) -> None:
        parameter.data.copy_(tensor)  # [1] to [3, 2]

    model = Loaded()
    model.add("kv", (8, HIDDEN), kv)
    model.add("bias", (7,), pad)
    model.add("scale", (3, 2), scale)
    model.add("twice", (6, 2), lambda p, t, key: p.data.copy_(t.repeat(2, 1)))
    model.add("picked", (2, 3), lambda p, t, key: p.data.copy_(t.index_select(0, torch.tensor([3, 1]))))
    checkpoint = {
        "kv": ((2, HIDDEN), BF16),
        "bias": ((4,), BF16),
        "scale": ((1,), F32),
        "twice": ((3, 2), BF16),
        "picked": ((4, 3), BF16),
    }
    return Loading(model, checkpoint, {"bias": 3}, replicated=16 + 4 + 1 + 6 + 12 - 2 * 6)


def tied(rank: int, world: int) -> Loading:
    """One parameter by two names, loaded by the first."""
    model = Loaded([("lm_head", "embedding", None)])
    model.add("lm_head", (4, HIDDEN), whole)
    model.register_parameter("embedding", model.lm_head)
    return Loading(model, {"embedding": ((4, HIDDEN), BF16)}, replicated=4 * HIDDEN)


LOADERS: dict[str, Callable[[int, int], Loading]] = {
    each.__name__: each
    for each in (fused, experts, expert_parallel, padded_vocabulary, interleaved, transposed, repeated, tied)
}
