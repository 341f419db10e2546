"""A list of experts that is constructed sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from ..._arguments import choice, elements, flag, whole
from ..._errors import InvalidArgumentError
from ..compile import left_out
from ..experts import Experts
from ..fast import applied
from ..modules import dtypes_of
from ..phase import Phase
from ..uses import expects_backward, refuse_twice
from ._base import Declared, Init, Layer, Options, initialiser, normal
from ._tensor_parallel import TensorParallel


class _Products(torch.autograd.Function):
    """x_e @ W_e.T + bias_e of each expert's rows of x, one behind the other. Every expert that trains gets a gradient,
    of zeros where it has no rows, as in plain torch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor | None,
        experts: Experts,
        splits: list[int],
        dtype: torch.dtype,
        *biases: torch.Tensor,
    ) -> torch.Tensor:
        phase = experts.model.phase()
        ctx.experts, ctx.splits, ctx.dtype = experts, splits, dtype
        ctx.trained = [anchor is not None and not each.frozen for each in experts.weights]
        full, ctx.versions = experts.gather(phase, anchor is not None and expects_backward(phase))
        if anchor is not None:
            ctx.save_for_backward(x)
        return multiply(x, full, splits, dtype, biases)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        experts: Experts = ctx.experts
        refuse_twice(experts.weights[0])
        experts.model.enter_backward()
        gradient = gradient.contiguous()
        parts = torch.split(gradient, ctx.splits)
        dgrad = None
        if ctx.needs_input_grad[0]:
            full, _ = experts.gather(Phase.BACKWARD, versions=ctx.versions)
            dgrad = gradient.new_empty((gradient.shape[0], full[0].shape[1]))
            for part, weight, into in zip(parts, full, torch.split(dgrad, ctx.splits), strict=True):
                torch.mm(part, weight.to(ctx.dtype), out=into)
            del full
        if any(ctx.trained):
            (x,) = ctx.saved_tensors
            buffers = []
            for each, trains, part, given in zip(
                experts.weights, ctx.trained, parts, torch.split(x, ctx.splits), strict=True
            ):
                if not trains or not each.wanted():
                    continue
                buffer, into = each.room()
                if into.dtype == ctx.dtype:
                    torch.mm(part.t(), given, out=into)
                else:
                    into.copy_(part.t().mm(given))
                buffers.append(buffer)
            if buffers:
                experts.model.runtime.produce_experts(buffers)
        return dgrad, None, None, None, None, *parts[: len(ctx.needs_input_grad) - 5]


def multiply(
    x: torch.Tensor, full: list[torch.Tensor], splits: list[int], dtype: torch.dtype, biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[tokens, F] of x [tokens, K]."""
    out = x.new_empty((x.shape[0], full[0].shape[0]))
    for i, (part, into) in enumerate(zip(torch.split(x, splits), torch.split(out, splits), strict=True)):
        weight = full[i].to(dtype).t()
        if biases:
            torch.addmm(biases[i], part, weight, out=into)
        else:
            torch.mm(part, weight, out=into)
    return out


apply_products = applied(_Products)


class GroupedLinear(Layer):
    """num_gemms linear layers, each for some of the tokens: experts. Parameters `weight0`, `bias0`, `weight1`, ...

    The weights are gathered, quantised and reduced as one list. Other arguments are those of etp.Linear. parallel_mode
    cuts parameters over the tp_group; as in TransformerEngine, the layer does not communicate over it: the caller adds
    the outputs of "row", and the gradients of the input of "column".

    Args:
        num_gemms: How many, E.
        in_features, out_features: K and F of each, before tensor parallelism.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        init_method: Init | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        **options: Unpack[Options],
    ) -> None:
        mode = None if parallel_mode is None else choice("parallel_mode", parallel_mode, ("column", "row"))
        super().__init__(TensorParallel(tp_group, cuts=mode is not None), **options)
        self.num_gemms = whole("num_gemms", num_gemms, 1)
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.return_bias = mode, flag("return_bias", return_bias)
        if bias and not return_bias and mode == "row" and self._tp.size > 1:
            raise InvalidArgumentError(
                f"{self.name}: bias=True with parallel_mode='row': every rank of the tp_group would add it, and the "
                "caller adds their outputs: give bias=False, or return_bias=True and add it afterwards"
            )
        cut = {"column": 0, "row": 1}.get(mode or "")
        self._experts = [f"weight{i}" for i in range(num_gemms)]
        self._biases = [f"bias{i}" for i in range(num_gemms)] if flag("bias", bias) else []
        for i, weight in enumerate(self._experts):
            self._declare(weight, Declared((out_features, in_features), initialiser(init_method, normal), cut))
            if bias:
                zeros = torch.nn.init.zeros_
                self._declare(f"bias{i}", Declared((out_features,), zeros, 0 if cut == 0 else None, sharded=False))
        self._make()

    @left_out
    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """[..., F] of [..., K].

        Args:
            inp: The tokens of expert 0, then those of expert 1, and so on.
            m_splits: How many each expert has, here; 0 is possible. Such an expert gets a gradient of zeros from this
                rank.
            is_first_microbatch: As Linear's.
        """
        self._begin(is_first_microbatch)
        x = inp.reshape(-1, inp.shape[-1])
        splits = self._splits(m_splits, x.shape[0])
        biases = [self._value(name) for name in self._biases]
        added = [] if self.return_bias else biases
        out = self._products(x, splits, added)
        out = out.view(*inp.shape[:-1], out.shape[1])
        return (out, biases) if self.return_bias else out

    def _splits(self, m_splits: Sequence[int], tokens: int) -> list[int]:
        given = elements(f"{self.name}: m_splits", m_splits, "the number of tokens of each expert")
        splits = [whole(f"{self.name}: m_splits has", each) for each in given]
        if len(splits) != self.num_gemms or min(splits) < 0 or sum(splits) != tokens:
            raise InvalidArgumentError(
                f"{self.name}: m_splits has {len(splits)} counts that sum to {sum(splits)}: {self.num_gemms} are "
                f"needed, none below 0, that sum to the input's {tokens} tokens"
            )
        return splits

    def _products(self, x: torch.Tensor, splits: list[int], biases: list[torch.Tensor]) -> torch.Tensor:
        weights = self._weights_named(self._experts)
        if not self._are_listed or len(weights) < len(self._experts):
            parts = zip(torch.split(x, splits), self._experts, biases or [None] * len(splits), strict=True)  # type: ignore[list-item]
            return torch.cat([self._product(*each) for each in parts])
        experts = Experts(weights)
        given, dtype = dtypes_of(x, weights[0])
        x = x.to(dtype)
        biases = [each.to(dtype) for each in biases]
        trains = any(not each.frozen for each in weights)
        if torch.is_grad_enabled() and (trains or x.requires_grad or any(each.requires_grad for each in biases)):
            anchor = experts.anchor() if trains else None
            out = apply_products(x, anchor, experts, splits, dtype, *biases)
        else:
            full, _ = experts.gather(experts.model.phase())
            out = multiply(x, full, splits, dtype, biases)
        return out.to(given)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.num_gemms}, {self.in_features}, {self.out_features}"
