"""Names that differ by a wrapper or a prefix: the error suggests a map=, which makes the transfer right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tessera
from ranks import transfer

torch = pytest.importorskip("torch")

Tensors = dict[str, Any]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 4)
        self.v = torch.nn.Linear(4, 4, bias=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(4)


def plain(seed: int, **heads: int) -> Tensors:
    torch.manual_seed(seed)
    weights = {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}
    return weights | {name.replace("_", "."): torch.randn(size) for name, size in heads.items()}


def within(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def compiled(tensors: Tensors) -> Tensors:
    """Returns a state_dict as of a model whose layers are compiled one by one, and the model itself."""
    return {
        re.sub(r"^(layers\.\d\.)?", r"_orig_mod.\1_orig_mod." if "layers" in name else "_orig_mod.", name): tensor
        for name, tensor in tensors.items()
    }


def wrapped(tensors: Tensors) -> Tensors:
    """Names tensors as FSDP1 does what it has wrapped, layer by layer, under DistributedDataParallel."""
    return {
        "module." + re.sub(r"^(layers\.\d\.)", r"\1_fsdp_wrapped_module.", name): tensor
        for name, tensor in tensors.items()
    }


def adapted(tensors: Tensors) -> Tensors:
    """As PEFT names the base model and its adapters."""
    named = {
        "base_model.model." + re.sub(r"\.(q|v)\.", r".\1.base_layer.", name): tensor for name, tensor in tensors.items()
    }
    return named | {"base_model.model.layers.0.q.lora_A.default.weight": torch.ones(2, 4)}


def body(tensors: Tensors) -> Tensors:
    """As a model with a head names them: the head keeps its name."""
    return {name if name.startswith("head.") else "model." + name: tensor for name, tensor in tensors.items()}


def error_of(offered: Tensors, taken: Tensors) -> str:
    with pytest.raises(tessera.MismatchError) as caught:
        transfer([(offered, None)], [(taken, None)])
    return str(caught.value)


def suggested(message: str) -> dict[str, Any]:
    """The maps that a message suggests, by job."""
    advice = re.search(r"(?:all \d+ names match|\d+ of the \d+ names match|the name matches) if (.*)", message)
    assert advice, message
    clauses = re.split(r", and (?=sender registers)", advice[1].splitlines()[0])
    maps = dict(clause.split(" registers with map=", 1) for clause in clauses)
    return {job: eval(text, {"re": re}) for job, text in maps.items()}


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        (lambda of: within(of, "module."), lambda of: of),
        (lambda of: of, lambda of: within(of, "module.")),
        (lambda of: of, lambda of: within(of, "model.")),
        (lambda of: within(of, "transformer."), lambda of: within(of, "model.")),
        (compiled, lambda of: of),
        (lambda of: of, compiled),
        (wrapped, lambda of: of),
        (lambda of: of, wrapped),
        (wrapped, compiled),
        (wrapped, lambda of: within(of, "model.")),
        (lambda of: within(of, "model."), wrapped),
        (lambda of: of, adapted),
        (adapted, lambda of: of),
        (body, lambda of: of),
        (lambda of: of, body),
    ],
    ids=[
        "DDP to plain", "plain to DDP", "plain to model", "transformer to model", "compiled to plain",
        "plain to compiled", "FSDP to plain", "plain to FSDP", "FSDP to compiled", "FSDP to model", "model to FSDP",
        "plain to adapters", "adapters to plain", "body to plain", "plain to body",
    ],
)  # fmt: skip
def test_the_map_of_the_message_makes_the_transfer_right(offered: Any, taken: Any) -> None:
    source, target = plain(1, head_bias=5), plain(2, head_bias=5)
    sent, received = offered(source), taken(target)
    maps = suggested(error_of(sent, received))
    assert maps.keys() <= {"sender", "receiver"}
    only = {name: value for name, value in received.items() if "lora" not in name}  # what the sender has
    transfer([(sent, maps.get("sender"))], [(only, maps.get("receiver"))])
    for name, value in source.items():
        assert torch.equal(target[name], value), name


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ({"embed.weight": (6, 4)}, {"embed.weight": (6, 4), "head.weight": (6, 4)}),
        ({"a.weight": (4,), "b.weight": (4,)}, {"weight": (4,)}),
        (
            {"layers.0.q.weight": (4,), "layers.0.v.weight": (4,)},
            {"layers.1.q.weight": (4,), "layers.1.v.weight": (4,)},
        ),
        ({"module.a": (4,), "module.b": (4,)}, {"a": (5,), "b": (5,)}),
    ],
    ids=["another tensor of that shape", "one of two", "another layer", "another shape"],
)
def test_no_map_is_suggested_that_would_move_another_tensor(
    offered: dict[str, tuple[int, ...]], taken: dict[str, tuple[int, ...]]
) -> None:
    message = error_of(
        {name: np.ones(shape) for name, shape in offered.items()},
        {name: np.zeros(shape) for name, shape in taken.items()},
    )
    assert "does not offer" in message
    assert "map=" not in message
