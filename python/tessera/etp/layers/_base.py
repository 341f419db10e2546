"""What constructed layers have in common: how their parameters are declared, made and cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch._C import DisableTorchFunctionSubclass

from ..._arguments import choice, flag, optional_text, text, whole
from ..._errors import InvalidArgumentError
from ..config import is_inline
from ..group import Group
from ..main_grad import main_grad_of
from ..making import add_weight, digest_of, is_plain, require_same_digests
from ..model import ShardedModel
from ..module_states import watch_parts, watch_ties
from ..modules import Constructed, apply_linear
from ..parameter import LogicalParameter
from ..views import update
from ..weight import Weight, can_shard
from ._runtime import LayersModel, Policy
from ._tensor_parallel import TensorParallel

Init = Callable[[torch.Tensor], Any]
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]

_STD = 0.023  # TransformerEngine's


def normal(tensor: torch.Tensor) -> None:
    torch.nn.init.normal_(tensor, std=_STD)


def initialiser(given: Init | None, otherwise: Init) -> Init:
    """What an argument says."""
    if given is not None and not callable(given):
        raise InvalidArgumentError(f"init_method {given!r}: give a callable that fills the tensor that it is given")
    return given or otherwise


@dataclasses.dataclass(frozen=True)
class Declared:
    """A parameter of a layer.

    Attributes:
        shape: Of the whole, before tensor parallelism cuts it.
        init: Fills the whole.
        cut: The dim that tensor parallelism cuts; None: every rank of the tp_group has it whole.
        halves: Into how many blocks of rows it falls that are cut apart: 2 for a gate and what it gates.
        sharded: Over the ETP group.
    """

    shape: tuple[int, ...]
    init: Init
    cut: int | None = None
    halves: int = 1
    sharded: bool = True


class Options(TypedDict, total=False):
    """Arguments of every layer; Linear documents them."""

    etp_group: Group | None
    dp: Group | None
    weight_format: str | None
    native: bool
    masters: str
    params_dtype: torch.dtype | None
    device: torch.device | str | None
    publish: str
    reduction: str
    mode: str | None
    fuse_wgrad_accumulation: bool
    name: str | None


class Layer(Constructed):
    """Its parameters are made by reset_parameters(): in the constructor, unless `device` is "meta".

    Every rank fills each parameter whole and keeps its rows, one parameter after another: values, and the state of the
    random numbers, are those of an unsharded layer with the same seed.
    """

    def __init__(
        self,
        tensor_parallel: TensorParallel,
        *,
        etp_group: Group | None = None,
        dp: Group | None = None,
        weight_format: str | None = None,
        native: bool = False,
        masters: str = "all",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        publish: str = "update",
        reduction: str = "mean",
        mode: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        weight_format = optional_text("weight_format", weight_format)
        for argument, group in (("etp_group", etp_group), ("dp", dp)):
            if group is not None and not isinstance(group, Group):
                raise InvalidArgumentError(f"{kind}: {argument}={group!r}: give what etp.init_group() returns")
        for argument, value in (("weight_format", weight_format), ("dp", dp)):
            if value and etp_group is None:
                raise InvalidArgumentError(f"{kind}: {argument}={value!r} needs an etp_group=")
        if flag("native", native) and is_plain(weight_format):
            raise InvalidArgumentError(
                f"{kind}: native=True needs a quantised weight_format=, not {weight_format or None!r}"
            )
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if not can_shard(dtype):
            raise InvalidArgumentError(f"{kind}: params_dtype={dtype}: float32, bfloat16 and float16 are possible")
        where = torch.get_default_device() if device is None else torch.device(device)
        if where.type not in ("cpu", "meta"):
            raise InvalidArgumentError(f"{kind}: device={where}: layers are in host memory, or on the meta device")
        self.etp_group = etp_group
        self.weight_format = weight_format
        self.native = native
        self.masters = choice("masters", masters, ("all", "trained"))
        self.params_dtype = dtype
        self.fuse_wgrad_accumulation = flag("fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        self._device = where
        self._policy = Policy(
            choice("publish", publish, ("update", "first_use")),
            choice("reduction", reduction, ("mean", "sum")),
            is_inline(mode),
            dp,
        )
        if self.fuse_wgrad_accumulation and self._policy.inline:
            raise InvalidArgumentError(
                f"{kind}: fuse_wgrad_accumulation=True with mode='inline', whose gradients are autograd's own: "
                "leave one of them out"
            )
        self._tp = tensor_parallel
        self._declared: dict[str, Declared] = {}
        self._experts: list[str] = []  # parameters that are used as a list
        self._are_listed = False  # they are gathered as one
        if tensor_parallel.size > 1:
            watch_parts(self)
            watch_ties()
        if name is None:
            number = 0 if etp_group is None else etp_group.layers_made
            name = f"{kind}{number}"
        if etp_group is not None:
            etp_group.layers_made += 1
        self.name = text("name", name)

    # --- parameters

    @property
    def has_group(self) -> bool:
        return self.etp_group is not None

    @property
    def replicas(self) -> int:
        return self._policy.replicas

    @property
    def _shards(self) -> bool:
        group = self.etp_group
        return group is not None and (group.size * self.replicas > 1 or bool(self.weight_format))

    @property
    def _groups(self) -> list[Group]:
        """Whose ranks have, or share, the same part."""
        return [each for each in (self.etp_group, self._policy.dp) if each is not None] if self._shards else []

    def _declare(self, name: str, declared: Declared) -> None:
        for each in declared.shape:
            whole(f"{self.name}.{name}: an extent", each, 1)
        shape = self._shape_of(name, declared)
        self._declared[name] = declared
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=self.params_dtype, device="meta")))

    def _shape_of(self, name: str, declared: Declared) -> tuple[int, ...]:
        """After tensor parallelism has cut it."""
        return self._tp.shape_of(declared.shape, declared.cut, declared.halves, f"{self.name}.{name}")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Also of an assignment, which ties layers."""
        declared = self.__dict__.get("_declared", {}).get(name)
        if declared is not None and isinstance(param, torch.nn.Parameter):
            given = param.shape
            if given != self._shape_of(name, declared):
                raise InvalidArgumentError(
                    f"{self.name}.{name} is {self._shape_of(name, declared)}, and what is put in its place "
                    f"{tuple(given)}: a tied weight needs that shape, after tensor parallelism has cut it"
                )
            if self._shards and declared.sharded and not isinstance(param, LogicalParameter) and not param.is_meta:
                raise InvalidArgumentError(
                    f"{self.name}.{name} is sharded, and a whole tensor is put in its place, whose gradients nobody "
                    "would add over the ranks: give the other module this layer's weight, or write rows within "
                    "etp.update()"
                )
        super().register_parameter(name, param)

    def _make(self) -> None:
        """At the end of a constructor."""
        if self._device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises all parameters, with the values of an unsharded layer; makes those that are on the meta device.
        Collective over the ETP group: every rank comes with the same random state."""
        fresh = {name for name in self._declared if self._parameters[name].is_meta}  # type: ignore[union-attr]
        with torch.no_grad(), torch.device("cpu"):  # whatever the default is
            if fresh:
                self._make_parameters(fresh)
                return
            with update(self):
                self._fill(self._rewrite)

    def _fill(self, put: Callable[[str, Declared, torch.nn.Parameter], None]) -> None:
        """Calls it with each parameter that is filled, one after another."""
        for group in self._groups if self._tp.size > 1 else ():
            self._tp.require_orthogonal(group, self.name)
        digests = []
        for name, declared in self._declared.items():
            full = self._filled(name, declared)
            if self._groups:
                digests.append(digest_of(f"{self.name}.{name}", full))
            put(name, declared, full)
        for group in self._groups:
            require_same_digests(group, [f"{self.name}.{name}" for name in self._declared], digests)

    def _make_parameters(self, names: set[str]) -> None:
        """In place of those on the meta device; others are tied to a layer that has initialised them."""
        self._require_frozen(names)
        model = None
        if self._shards and self.etp_group is not None:
            model = LayersModel.of(self.etp_group, self._policy)

        def put(name: str, declared: Declared, full: torch.nn.Parameter) -> None:
            if name in names:
                self._parameters[name] = self._made(name, declared, full, model)

        try:
            self._fill(put)
        except Exception:
            if model is not None:
                model.take_no_more()
            raise
        if model is None:
            return
        self.list_experts(model)
        model.start(self)

    def _require_frozen(self, names: set[str]) -> None:
        weights = [self._parameters[name] for name in names if self._declared[name].sharded]
        frozen = self.native and any(each is not None and not each.requires_grad for each in weights)
        if self.masters == "trained" and weights and not frozen:
            raise InvalidArgumentError(
                f"{self.name}: masters='trained': no native weight is frozen when it is made: give native=True and "
                "device='meta', and freeze weights by requires_grad_(False) before reset_parameters() or "
                "shard_module_()"
            )

    @property
    def listed(self) -> list[str]:
        return self._experts

    def list_experts(self, model: ShardedModel) -> None:
        experts = [each.number for each in self._weights_named(self._experts) if each.model is model]
        self._are_listed = 1 < len(experts) == len(self._experts) and not model.inline
        if self._are_listed:
            model.runtime.add_experts(experts)

    def _filled(self, name: str, declared: Declared) -> torch.nn.Parameter:
        full = torch.full(declared.shape, torch.nan, dtype=self.params_dtype)
        declared.init(full)
        if bool(full.flatten()[0].isnan()) and bool(full.isnan().all()):
            raise InvalidArgumentError(
                f"{self.name}.{name} has no values after its init_method, which has to fill the tensor that it is given"
            )
        old = self._parameters[name]
        cut = self._tp.cut_of(declared.shape, declared.cut, declared.halves)
        part = full if cut is None else cut.part_of(full)
        with DisableTorchFunctionSubclass():
            return torch.nn.Parameter(part, requires_grad=old is None or old.requires_grad)

    def _rewrite(self, name: str, declared: Declared, full: torch.nn.Parameter) -> None:
        old = self._parameters[name]
        assert old is not None
        if isinstance(old, LogicalParameter):
            begin, end = old.etp.rows
            old.etp.make_rows()
            old.etp.local.copy_(full[begin:end])
        else:
            old.copy_(full)

    def _made(
        self, name: str, declared: Declared, full: torch.nn.Parameter, model: LayersModel | None
    ) -> torch.nn.Parameter:
        """In place of one on the meta device."""
        old = self._parameters[name]
        made: torch.nn.Parameter | None = getattr(old, "etp_made", None)  # by a layer that is tied to this one
        if made is not None:
            return made
        made = full
        if model is not None and declared.sharded:
            weight = add_weight(
                model,
                f"{self.name}.{name}",
                full,
                full.shape,
                self.weight_format,
                native=self.native,
                planes_only=self.masters == "trained" and self.native and not full.requires_grad,
                copied=self._policy.inline,
            )
            weight.fuses = self.fuse_wgrad_accumulation
            made = weight.parameter
        elif model is not None and model.size > 1:
            model.add_replicated(self, f"{self.name}.{name}", full)
        elif declared.sharded and self.fuse_wgrad_accumulation:
            _add_to_main_grad(full, f"{self.name}.{name}")
        if self._tp.group is not None:
            self._tp.mark(made, declared.cut, self._tp.cut_of(declared.shape, declared.cut, declared.halves))
        old.etp_made = made  # type: ignore[union-attr]
        return made

    def weights(self) -> list[Weight]:
        """Those that are sharded."""
        return self._weights_named(self._declared)

    def _weights_named(self, names: Any) -> list[Weight]:
        found = [self._parameters.get(name) for name in names]
        return [each.etp for each in found if isinstance(each, LogicalParameter)]

    # --- forward

    def _begin(self, is_first_microbatch: bool | None) -> None:
        """Of a forward."""
        weights = self.weights()
        if not weights:
            return
        model = weights[0].model
        if isinstance(model, LayersModel):
            model.follow(self, weights)
        if is_first_microbatch and self._policy.publish == "first_use":
            weights[0].model.runtime.publish([each.number for each in weights])

    def _product(self, x: torch.Tensor, name: str, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ W.T + bias."""
        parameter = self._parameters[name]
        if isinstance(parameter, LogicalParameter):
            return apply_linear(x, parameter, bias, False)
        assert parameter is not None
        return torch.nn.functional.linear(x, parameter, bias)

    def _value(self, name: str) -> Any:
        """Return a bias, or a norm's parameter: pruning and parametrizations put other tensors in its place."""
        return getattr(self, name)

    def _linear(
        self, x: torch.Tensor, name: str, bias: torch.Tensor | None, mode: str | None, apart: bool = False
    ) -> Output:
        """Of a weight by tensor parallelism's mode; with its bias `apart` on request."""
        if mode == "column":
            x = self._tp.to_column(x)
        if mode != "row" or self._tp.size == 1:
            out = self._product(x, name, None if apart else bias)
            return (out, bias) if apart else out
        out = self._tp.from_row(self._product(x, name, None))
        bias = self._tp.whole(bias)
        if apart:
            return out, bias
        return out if bias is None else out + bias.to(out.dtype)


def _add_to_main_grad(parameter: torch.nn.Parameter, name: str) -> None:
    """What the runtime does for a sharded weight."""

    def add(given: torch.Tensor) -> None:
        gradient, given.grad = given.grad, None
        if gradient is not None:
            main_grad_of(given, name, given.shape).add_(gradient)
            given.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
