"""tessera.maps.engine, which knows models by name, against maps that are learned from loaders."""

import contextlib
import math

import pytest
import torch
from engine_marks import needs_vllm
from loaders import LOADERS
from tessera import engines, maps
from tessera._bus.mapping import compile_map
from vllm_configs import CONFIGS, save_configuration


def numbered(checkpoint):
    """Tensors of which no two elements are equal."""
    found, at = {}, 0
    for name, (shape, _) in checkpoint.items():
        found[name] = torch.arange(at, at + math.prod(shape)).reshape(shape)
        at += math.prod(shape)
    return found


def written(forms, install):
    """Parameters of numbers: where an element of the checkpoint went, and -1 where none did."""
    made = {name: torch.empty_strided(form.shape, form.strides, dtype=torch.int64).fill_(-1) for name, form in forms}
    install(made)
    return made


def by_learned_map(forms, learned, checkpoint):
    return written(forms, lambda made: learned.install_from(made, numbered(checkpoint)))


def by_engine_map(forms, checkpoint, mapping, rank, names):
    numbers = {names(name): each for name, each in numbered(checkpoint).items()}

    def install(made):
        for name, tensor in made.items():
            for part in compile_map(mapping)(names(name), tensor):
                place = tensor if part.local is None else tensor[part.local]
                shape = part.shape or tuple(place.shape)
                assert numbers[part.name].shape == tuple(shape), part
                if (held := part.layout.bind(shape).owned(shape, rank)) is not None:
                    place.copy_(numbers[part.name][tuple(slice(*interval) for (interval,) in held)])

    return written(forms, install)


def require_same(model, learned, checkpoint, mapping, rank, names=lambda name: name):
    forms = [(name, learned.forms[name]) for name, _ in model.named_parameters()]
    mine = by_engine_map(forms, checkpoint, mapping, rank, names)
    for name, expected in by_learned_map(forms, learned, checkpoint).items():
        assert torch.equal(mine[name], expected), name


IN_MODEL = {
    **{each: f"model.layers.0.self_attn.{each}_proj.weight" for each in ("q", "k", "v", "o", "qkv")},
    **{each: f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "gate_up")},
    **{f"{expert}.w1": f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in range(4)},
    **{f"{expert}.w3": f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(4)},
    **{f"{expert}.w2": f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(4)},
    "w13": "model.layers.0.mlp.experts.w13_weight",
    "w2": "model.layers.0.mlp.experts.w2_weight",
    "router": "model.layers.0.mlp.gate.weight",
    "norm": "model.norm.weight",
    "embedding": "model.embed_tokens.weight",
    "rotary": "rotary",
}
SMALL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "hidden_size": 8,
    "vocab_size": 11,
    "num_experts": 4,
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["fused", "experts", "padded_vocabulary"])
def test_a_known_layout_is_what_a_loader_does(name, rank):
    loading = LOADERS[name](rank, 2)
    learned = engines.learn_map(loading.model, loading.checkpoint)
    require_same(loading.model, learned, loading.checkpoint, maps.engine(SMALL, rank, 2), rank, IN_MODEL.__getitem__)


def test_another_layout_is_noticed():
    loading = LOADERS["fused"](0, 2)
    learned = engines.learn_map(loading.model, loading.checkpoint)
    with pytest.raises(AssertionError):
        require_same(loading.model, learned, loading.checkpoint, maps.engine(SMALL, 1, 2), 1, IN_MODEL.__getitem__)


@needs_vllm
@pytest.mark.parametrize(
    ("name", "tp", "expert_parallel"),
    [
        (name, tp, False)
        for name, given in CONFIGS.items()
        if given["model_type"] in maps.MODEL_TYPES
        for tp in (1, 2, 4)
    ]
    + [("qwen3_moe", 2, True), ("qwen2_moe", 4, True)],
)
def test_a_known_layout_is_what_vllm_does(name, tp, expert_parallel, tmp_path):
    from tessera.engines._checkpoints import described
    from tessera.engines.vllm import _shadow

    folder = save_configuration(CONFIGS[name], tmp_path)
    checkpoint, _ = described(folder)
    config = _shadow.config_of(folder, tp, expert_parallel=expert_parallel)
    with _shadow.group(config):
        for rank in range(tp):
            model = _shadow.as_rank(config, rank)
            learned = engines.learn_map(model, checkpoint, meta=lambda model: contextlib.nullcontext())
            mapping = maps.engine(CONFIGS[name], rank, tp, expert_parallel=expert_parallel)
            require_same(model, learned, checkpoint, mapping, rank)
