"""Maps between the names of checkpoints and those that training and serving frameworks use in memory.

The names on the bus are those of the checkpoint on Hugging Face, with one tensor for each expert's projection. A job
that holds its tensors in this form needs no map; other jobs pass one:

    bus.register(model, map=maps.transformers(model.config))              # transformers 5 stacks the experts
    bus.register(params, map=maps.engine(config, tp_rank, tp_size))       # as vLLM lays a model out: fused, and sharded

A `config` is transformers' object, or the dict that config.json holds. Dense Llama, Mistral and Qwen models, Mixtral
and Qwen's mixtures of experts are known: see MODEL_TYPES.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _core
from ._arguments import sizes, whole
from ._bus.mapping import Mapped, Part
from ._bus.patterns import optional as optional
from ._errors import InvalidArgumentError, UnimplementedError

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""What config.model_type may be."""

_Rule = Callable[[re.Match[str], Any], list[Part]]
_EXPERTS = "num_experts", "moe_intermediate_size", ("gate_proj", "up_proj", "down_proj")
_EXPERTS_OF_MIXTRAL = "num_local_experts", "intermediate_size", ("w1", "w3", "w2")
"""Of a mixture of experts: where the config has their number and their width, and what their projections are called."""


def transformers(config: Any) -> Callable[[str, Any], Mapped]:
    """The map of a model of transformers 5 as it is in memory: experts stacked as `experts.gate_up_proj [E, 2I, H]` and
    `experts.down_proj [E, H, I]` become one tensor an expert; every other name is the checkpoint's already, but for
    Mixtral's `mlp`, which is `block_sparse_moe` there.

    Parameters may be plain, or DTensors, with the experts on any dims. (Transformers' own tensor parallel plan packs
    `gate_up_proj` in an order that its DTensor does not show: write Parts of your own for it.)

    Raises UnimplementedError for a model that is not known.
    """
    _require_known(config)
    number, width, (gate, up, down) = _experts_of(config)

    def saved(name: str) -> str:
        return name.replace(".mlp.", ".block_sparse_moe.") if _is_mixtral(config) else name

    def first(match: re.Match[str], tensor: Any) -> list[Part]:
        experts, middle = _count(config, number), _count(config, width)
        return [
            Part(f"{saved(match[1])}{expert}.{name}.weight", whole=(expert, rows))
            for expert in range(experts)
            for name, rows in ((gate, slice(0, middle)), (up, slice(middle, 2 * middle)))
        ]

    def second(match: re.Match[str], tensor: Any) -> list[Part]:
        experts = _count(config, number)
        return [Part(f"{saved(match[1])}{expert}.{down}.weight", whole=expert) for expert in range(experts)]

    return _by_rules(
        {r"(.*\.experts\.)gate_up_proj": first, r"(.*\.experts\.)down_proj": second},
        lambda name, tensor: saved(name),
    )


def engine(
    config: Any,
    tp_rank: int,
    tp_size: int,
    *,
    ranks: Sequence[int] | None = None,
    expert_parallel: bool = False,
) -> Callable[[str, Any], Mapped]:
    """The map of one rank's parameters in a serving engine that lays a model out as vLLM does.

    `qkv_proj` is [q_r; k_r; v_r], `gate_up_proj` [gate_r; up_r], each a rank's share of the rows; with fewer kv heads
    than ranks, tp_size / kv heads neighbours hold the same one. `o_proj` and `down_proj` are sharded by columns; the
    rows of `embed_tokens` and `lm_head` in equal blocks. Rows after the vocabulary are padding, which is
    neither sent nor written. `experts.w13_weight` is [E, 2I/tp, H] ([gate_r; up_r] of each expert), `experts.w2_weight`
    [E, H, I/tp]. Everything else is replicated. The map may be used for sending as well as for receiving.

    Args:
        config: That of the model.
        tp_rank: This rank in its tensor-parallel group.
        tp_size: Number of ranks in that group.
        ranks: The group's ranks on the bus, in its order. None: 0 to tp_size - 1. Groups that hold the same tensors
            are replicas of each other.
        expert_parallel: Whether each rank holds an equal block of the experts, each of them whole.

    Raises:
        InvalidArgumentError: Heads that tp_size does not divide, or a rank that is not in the group. As a tensor is
            registered: one that is not laid out as said.
        UnimplementedError: A model that is not known.
    """
    _require_known(config)
    return _by_rules(*_Engine(config, tp_rank, tp_size, ranks, expert_parallel).rules())


class _Engine:
    def __init__(
        self, config: Any, tp_rank: int, tp_size: int, ranks: Sequence[int] | None, expert_parallel: bool
    ) -> None:
        tp_size, tp_rank = whole("tp_size", tp_size, 1, _MOST), whole("tp_rank", tp_rank, 0, _MOST)
        group = list(range(tp_size)) if ranks is None else list(sizes("ranks", ranks))
        if not 0 <= tp_rank < tp_size or len(group) != tp_size:
            raise InvalidArgumentError(f"tp_rank {tp_rank} of tp_size {tp_size}, ranks {group}: they do not agree")
        self._rank = tp_rank
        self._size = tp_size
        self._expert_parallel = expert_parallel
        self._heads = _count(config, "num_attention_heads", lowest=1)
        self._kv_heads = _count(config, "num_key_value_heads", self._heads, lowest=1)
        self._head_dim = _count(config, "head_dim", 0) or _count(config, "hidden_size") // self._heads
        self._vocabulary = _count(config, "vocab_size")
        number, _, (self._gate, self._up, self._down) = _experts_of(config)
        self._experts = _count(config, number, 0)
        if self._heads % tp_size or max(self._kv_heads, tp_size) % min(self._kv_heads, tp_size):
            raise InvalidArgumentError(
                f"{self._heads} heads and {self._kv_heads} kv heads cannot be shared out to {tp_size} ranks evenly"
            )
        self._mesh = _core.Mesh([tp_size], ["tp"], group)
        self._everywhere = _core.Layout(self._mesh, [_core.Replicate()])
        self._alone = _core.Layout(_core.Mesh([1], ranks=[group[tp_rank]]), [_core.Replicate()])
        self._rows = _core.Layout(self._mesh, [_core.Shard(0)])
        self._columns = _core.Layout(self._mesh, [_core.Shard(1)])
        replicas = max(tp_size // self._kv_heads, 1)
        self._kv_rows = self._rows
        if replicas > 1:
            mesh = _core.Mesh([self._kv_heads, replicas], ["tp", "replica"], group)
            self._kv_rows = _core.Layout(mesh, [_core.Shard(0), _core.Replicate()])

    def rules(self) -> tuple[dict[str, _Rule], Callable[[str, Any], Mapped]]:
        return {
            r"(.*)qkv_proj\.(weight|bias)": self._qkv,
            r"(.*)gate_up_proj\.(weight|bias)": self._gate_up,
            r".*(?:o_proj|down_proj)\.weight": self._by_columns,
            r"(?:.*\.)?(?:embed_tokens|lm_head)\.(?:weight|bias)": self._vocabulary_rows,
            r"(.*\.experts\.)(?:routed_experts\.)?w13_weight": self._w13,  # newer: in a module of its own
            r"(.*\.experts\.)(?:routed_experts\.)?w2_weight": self._w2,
        }, lambda name, tensor: Part(name, layout=self._everywhere)

    def _qkv(self, match: re.Match[str], tensor: Any) -> list[Part]:
        rows, *rest = tensor.shape
        q = self._heads // self._size * self._head_dim
        kv = max(self._kv_heads // self._size, 1) * self._head_dim
        if rows != q + 2 * kv:
            raise InvalidArgumentError(
                f"tensor {match[0]}: it has {rows} rows; q, k and v of rank {self._rank} of {self._size} have {q}, "
                f"{kv} and {kv} ({self._heads} heads, {self._kv_heads} kv heads, head_dim {self._head_dim})"
            )
        all_q, all_kv = self._heads * self._head_dim, self._kv_heads * self._head_dim
        return [
            Part(f"{match[1]}q_proj.{match[2]}", slice(0, q), self._rows, (all_q, *rest)),
            Part(f"{match[1]}k_proj.{match[2]}", slice(q, q + kv), self._kv_rows, (all_kv, *rest)),
            Part(f"{match[1]}v_proj.{match[2]}", slice(q + kv, rows), self._kv_rows, (all_kv, *rest)),
        ]

    def _gate_up(self, match: re.Match[str], tensor: Any) -> list[Part]:
        rows, *rest = tensor.shape
        half = self._half(match[0], rows)
        shape = (half * self._size, *rest)
        return [
            Part(f"{match[1]}gate_proj.{match[2]}", slice(0, half), self._rows, shape),
            Part(f"{match[1]}up_proj.{match[2]}", slice(half, rows), self._rows, shape),
        ]

    def _by_columns(self, match: re.Match[str], tensor: Any) -> list[Part]:
        rows, columns = tensor.shape
        return [Part(match[0], None, self._columns, (rows, columns * self._size))]

    def _vocabulary_rows(self, match: re.Match[str], tensor: Any) -> list[Part]:
        rows, *rest = tensor.shape
        if rows * self._size < self._vocabulary:
            raise InvalidArgumentError(
                f"tensor {match[0]}: {rows} rows on each of {self._size} ranks are less than the vocabulary of "
                f"{self._vocabulary}"
            )
        bounds = [min(rank * rows, self._vocabulary) for rank in range(self._size + 1)]
        layout = _core.Layout(self._mesh, [_core.RaggedShard(0, bounds)])
        held = slice(0, bounds[self._rank + 1] - bounds[self._rank])
        return [Part(match[0], held, layout, (self._vocabulary, *rest))]

    def _w13(self, match: re.Match[str], tensor: Any) -> list[Part]:
        experts, rows, hidden = tensor.shape
        half = self._half(match[0], rows)
        layout, size = (self._alone, half) if self._expert_parallel else (self._rows, half * self._size)
        return [
            Part(f"{match[1]}{expert}.{name}.weight", (at, part), layout, (size, hidden))
            for at, expert in enumerate(self._own_experts(match[0], experts))
            for name, part in ((self._gate, slice(0, half)), (self._up, slice(half, rows)))
        ]

    def _w2(self, match: re.Match[str], tensor: Any) -> list[Part]:
        experts, hidden, columns = tensor.shape
        layout, size = (self._alone, columns) if self._expert_parallel else (self._columns, columns * self._size)
        return [
            Part(f"{match[1]}{expert}.{self._down}.weight", at, layout, (hidden, size))
            for at, expert in enumerate(self._own_experts(match[0], experts))
        ]

    def _own_experts(self, name: str, held: int) -> range:
        """The experts in the tensor, which holds `held` of them."""
        share = self._experts // self._size if self._expert_parallel else self._experts
        if held != share or (self._expert_parallel and self._experts % self._size):
            how = f"shared out to {self._size} ranks" if self._expert_parallel else "each on every rank"
            raise InvalidArgumentError(f"tensor {name}: it has {held} experts, of {self._experts}, {how}")
        first = self._rank * share if self._expert_parallel else 0
        return range(first, first + share)

    def _half(self, name: str, rows: int) -> int:
        if rows % 2:
            raise InvalidArgumentError(f"tensor {name}: its {rows} rows are not two equal halves, gate and up")
        return rows // 2


def _by_rules(rules: dict[str, _Rule], otherwise: Callable[[str, Any], Mapped]) -> Callable[[str, Any], Mapped]:
    compiled = [(re.compile(pattern), rule) for pattern, rule in rules.items()]

    def apply(name: str, tensor: Any) -> Mapped:
        for pattern, rule in compiled:
            if match := pattern.fullmatch(name):
                return rule(match, tensor)
        return otherwise(name, tensor)

    return apply


def _is_mixtral(config: Any) -> bool:
    return bool(_get(config, "model_type", None) == "mixtral")


def _experts_of(config: Any) -> tuple[str, str, tuple[str, str, str]]:
    return _EXPERTS_OF_MIXTRAL if _is_mixtral(config) else _EXPERTS


def _require_known(config: Any) -> None:
    if config is None or isinstance(config, str | bytes | int | float | list | tuple | type):
        raise InvalidArgumentError(
            f"config {reprlib.repr(config)}: give transformers' config, or the dict of config.json"
        )
    kind = _get(config, "model_type", None)
    if kind is not None and kind not in MODEL_TYPES:
        raise UnimplementedError(
            f"model type {kind!r}: its names are not known, only those of {', '.join(MODEL_TYPES)}; give your own map"
        )


_REQUIRED = object()
_MOST = 1 << 31


def _count(config: Any, field: str, default: Any = _REQUIRED, *, lowest: int = 0) -> int:
    return whole(f"config: {field}", _get(config, field, default), lowest)


def _get(config: Any, field: str, default: Any = _REQUIRED) -> Any:
    value = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise InvalidArgumentError(f"config: it has no {field}")
    return default
