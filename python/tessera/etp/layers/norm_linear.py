"""Norms with the linear layers behind them, constructed sharded."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F

from ..._arguments import choice, flag
from ..._errors import InvalidArgumentError
from ..compile import left_out
from ._base import Declared, Init, Layer, Options, Output, initialiser, normal
from ._tensor_parallel import TensorParallel


class NormLayer(Layer):
    """A layer that begins with LayerNorm or RMSNorm over the last dim."""

    def _declare_norm(self, features: int, eps: float, normalization: str, zero_centered_gamma: bool) -> None:
        self.normalization = choice("normalization", normalization, ("LayerNorm", "RMSNorm"))
        if not isinstance(eps, (int, float)) or not eps >= 0:
            raise InvalidArgumentError(f"{self.name}: eps={eps!r}: give a number that is not negative")
        self.eps = float(eps)
        self.zero_centered_gamma = flag("zero_centered_gamma", zero_centered_gamma)
        self._features = features
        zeros, ones = torch.nn.init.zeros_, torch.nn.init.ones_
        gamma = zeros if zero_centered_gamma else ones
        self._declare("layer_norm_weight", Declared((features,), gamma, sharded=False))
        if normalization == "LayerNorm":
            self._declare("layer_norm_bias", Declared((features,), zeros, sharded=False))
        else:
            self.register_parameter("layer_norm_bias", None)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        gamma = self._tp.whole(self._value("layer_norm_weight"))
        assert gamma is not None
        if self.zero_centered_gamma:
            gamma = gamma + 1
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (self._features,), gamma, self.eps)
        return F.layer_norm(x, (self._features,), gamma, self._tp.whole(self._value("layer_norm_bias")), self.eps)


def _with_norm(out: Output, normed: torch.Tensor | None) -> Any:
    """As TransformerEngine returns them: (out[, bias][, normed])."""
    if normed is None:
        return out
    return (*out, normed) if isinstance(out, tuple) else (out, normed)


class LayerNormLinear(NormLayer):
    """norm(x) @ W.T + bias, of W [out_features, in_features].

    Its parameters are `layer_norm_weight` [in_features], `layer_norm_bias` (LayerNorm only), `weight` and `bias`; norms
    and biases are whole on every rank. Other arguments are those of etp.Linear.

    Args:
        eps: Added to the variance.
        normalization: "LayerNorm" or "RMSNorm".
        parallel_mode: None or "column"; with sequence_parallel the norm is taken of this rank's part of the sequence.
        return_layernorm_output: forward() returns norm(x), too, as the last of a tuple: with sequence_parallel, of this
            rank's part.
        zero_centered_gamma: The norm's weight is 1 + layer_norm_weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        init_method: Init | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        **options: Unpack[Options],
    ) -> None:
        mode = None if parallel_mode is None else choice("parallel_mode", parallel_mode, ("column",))
        super().__init__(TensorParallel(tp_group, sequence_parallel, mode is not None), **options)
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = flag("return_bias", return_bias)
        self.return_layernorm_output = flag("return_layernorm_output", return_layernorm_output)
        self.parallel_mode = mode
        self._declare_norm(in_features, eps, normalization, zero_centered_gamma)
        cut = 0 if mode else None
        self._declare("weight", Declared((out_features, in_features), initialiser(init_method, normal), cut))
        if flag("bias", bias):
            self._declare("bias", Declared((out_features,), torch.nn.init.zeros_, cut, sharded=False))
        else:
            self.register_parameter("bias", None)
        self._make()

    @left_out
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., F] of [..., K]; with return_bias and return_layernorm_output a tuple (out, bias, normed) of what is
        asked for. is_first_microbatch as Linear's."""
        self._begin(is_first_microbatch)
        normed = self._normed(inp)
        out = self._linear(normed, "weight", self._value("bias"), self.parallel_mode, self.return_bias)
        return _with_norm(out, normed if self.return_layernorm_output else None)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, normalization={self.normalization!r}"


class LayerNormMLP(NormLayer):
    """act(norm(x) @ W1.T + b1) @ W2.T + b2.

    Its parameters are `layer_norm_weight` [hidden_size], `layer_norm_bias` (LayerNorm only), `fc1_weight`
    [ffn_hidden_size, hidden_size], `fc1_bias`, `fc2_weight` [hidden_size, ffn_hidden_size] and `fc2_bias`. With
    "swiglu" fc1 has 2 * ffn_hidden_size rows: those of the gate, then those that it gates. Other arguments are those of
    etp.Linear and LayerNormLinear.

    Args:
        activation: "gelu" (its tanh approximation) or "swiglu": silu(gate) * rest.
        init_method, output_layer_init_method: Fill W1 and W2. None: as Linear's.
        set_parallel_mode: With a tp_group: fc1 is "column", fc2 is "row".
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        set_parallel_mode: bool = False,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            TensorParallel(tp_group, sequence_parallel, flag("set_parallel_mode", set_parallel_mode)), **options
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation = choice("activation", activation, ("gelu", "swiglu"))
        self.return_bias = flag("return_bias", return_bias)
        self.return_layernorm_output = flag("return_layernorm_output", return_layernorm_output)
        self._declare_norm(hidden_size, eps, normalization, zero_centered_gamma)
        halves = 2 if activation == "swiglu" else 1
        rows, zeros = halves * ffn_hidden_size, torch.nn.init.zeros_
        self._declare("fc1_weight", Declared((rows, hidden_size), initialiser(init_method, normal), 0, halves))
        if flag("bias", bias):
            self._declare("fc1_bias", Declared((rows,), zeros, 0, halves, sharded=False))
        self._declare(
            "fc2_weight", Declared((hidden_size, ffn_hidden_size), initialiser(output_layer_init_method, normal), 1)
        )
        if flag("bias", bias):
            self._declare("fc2_bias", Declared((hidden_size,), zeros, sharded=False))
        else:
            self.register_parameter("fc1_bias", None)
            self.register_parameter("fc2_bias", None)
        self._make()

    @left_out
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden_size] of [..., hidden_size]; tuples and is_first_microbatch as LayerNormLinear's."""
        self._begin(is_first_microbatch)
        normed = self._normed(inp)
        inner = self._linear(normed, "fc1_weight", self._value("fc1_bias"), "column")
        assert isinstance(inner, torch.Tensor)
        if self.activation == "swiglu":
            gate, rest = inner.chunk(2, -1)
            inner = F.silu(gate) * rest
        else:
            inner = F.gelu(inner, approximate="tanh")
        out = self._linear(inner, "fc2_weight", self._value("fc2_bias"), "row", self.return_bias)
        return _with_norm(out, normed if self.return_layernorm_output else None)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, {self.normalization!r}, {self.activation!r}"
