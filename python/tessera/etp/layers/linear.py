"""A linear layer that is constructed sharded."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from ..._arguments import choice, flag
from ..compile import left_out
from ._base import Declared, Init, Layer, Options, Output, initialiser, normal
from ._tensor_parallel import TensorParallel


class Linear(Layer):
    """x @ W.T + bias of W [out_features, in_features], whose rows are cut over the ranks of etp_group.

    A rank keeps, in `weight`, its rows [rows, in_features], and all of `bias`. The constructor is collective over the
    ETP group. On the meta device it is not: reset_parameters(), or shard_module_() of the model, then makes the
    parameters. Ranks of the ETP group train on different tokens, those of the tp_group on the same.

    Args:
        in_features, out_features: K and F, before tensor parallelism.
        bias: Whether there is one.
        return_bias: forward() returns (x @ W.T, bias) and does not add it.
        params_dtype: Of the parameters: float32, bfloat16 or float16. None: torch's default.
        init_method: Fills the whole weight. None: normal, of mean 0 and standard deviation 0.023. The bias begins at 0.
        parallel_mode: With a tp_group: "column" cuts out_features over its ranks, whose outputs are apart; "row" cuts
            in_features, and adds their outputs. The ETP group cuts the rows of what is left.
        tp_group: A torch ProcessGroup, orthogonal to the ETP group.
        sequence_parallel: Dim 0 of the input of "column", and of the output of "row", is cut over the tp_group.
        fuse_wgrad_accumulation: The weight's gradients are added to its main_grad, of this rank's rows in float32 or
            bfloat16, which the caller has set; weight.grad stays None, and weight.grad_added_to_main_grad becomes True.
        device: "cpu" or "meta"; None: torch's default.
        etp_group: Of etp.init_group(). None: the layer is not sharded.
        dp: A group of init_group() over an orthogonal axis, for data parallelism, as in shard_module_().
        weight_format: What travels, as in shard_module_(formats=). None: the weight as it is.
        native: The shard of a quantised weight_format is what travels; as in shard_module_(native=).
        masters: "all", or "trained", as in shard_module_(): native weights that are frozen when they are made keep
            none. Construct the layer on the meta device, and freeze it before reset_parameters() or shard_module_().
        publish, reduction, mode: As in shard_module_(); mode="inline" does not go with fuse_wgrad_accumulation.
        name: In messages, the same on all ranks. None: the class with a number.

    Throws InvalidArgumentError for arguments that do not go together, and MismatchError if ranks of the ETP group
    initialise it differently.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        init_method: Init | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        **options: Unpack[Options],
    ) -> None:
        mode = None if parallel_mode is None else choice("parallel_mode", parallel_mode, ("column", "row"))
        tensor_parallel = TensorParallel(tp_group, sequence_parallel, mode is not None)
        super().__init__(tensor_parallel, **options)
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = flag("return_bias", return_bias)
        self.parallel_mode = mode
        cut = {"column": 0, "row": 1}.get(mode or "")
        self._declare("weight", Declared((out_features, in_features), initialiser(init_method, normal), cut))
        if flag("bias", bias):
            zeros = torch.nn.init.zeros_
            self._declare("bias", Declared((out_features,), zeros, 0 if cut == 0 else None, sharded=False))
        else:
            self.register_parameter("bias", None)
        self._make()

    @left_out
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Output:
        """[..., F] of [..., K]; of this rank's parts with tensor parallelism.

        Args:
            inp: The input.
            is_first_microbatch: With publish="first_use": True quantises the weight now, if it has been updated; that
                is collective. None and False: its first use after the update does.
        """
        self._begin(is_first_microbatch)
        return self._linear(inp, "weight", self._value("bias"), self.parallel_mode, self.return_bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
