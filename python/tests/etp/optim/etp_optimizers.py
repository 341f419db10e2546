"""Optimisers that users write or import, none of which knows of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lookahead(torch.optim.Optimizer):
    """Steps of another optimiser, and slow weights behind them (Zhang et al., 2019)."""

    def __init__(self, base: torch.optim.Optimizer, alpha: float = 0.5, every: int = 2) -> None:
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.base, self.alpha, self.every, self.count = base, alpha, every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                if self.count % self.every == 0:
                    state["slow"].add_(parameter - state["slow"], alpha=self.alpha)
                    parameter.copy_(state["slow"])
        return loss


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), as it is copied from repository to repository."""

    def __init__(self, parameters: Any, base: Callable[..., Any], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _with_gradients(self) -> Iterable[tuple[dict[str, Any], torch.Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        norm = torch.norm(torch.stack([each.grad.norm(p=2) for _, each in self._with_gradients()]), p=2)
        for group, parameter in self._with_gradients():
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * (group["rho"] / (norm + 1e-12)).to(parameter))
        self.zero_grad()
        closure()
        for _, parameter in self._with_gradients():
            parameter.data = self.state[parameter].pop("old")
        self.base.step()
        self.zero_grad()
        return loss


class Decayed(torch.optim.AdamW):
    """A subclass that calls super().step()."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)
        return super().step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024): gradients at y, averages in x."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def swap(self, to_average: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    z = self.state[parameter]["z"]
                    parameter.lerp_(z, 1 - 1 / group["beta"] if to_average else 1 - group["beta"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta, weight = group["beta"], 1 / (group["k"] + 1)
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = torch.clone(parameter)
                parameter.lerp_(state["z"], weight)
                parameter.add_(parameter.grad, alpha=group["lr"] * (beta * (1 - weight) - 1))
                state["z"].sub_(parameter.grad, alpha=group["lr"])


class Layerwise(torch.optim.Optimizer):
    """Trust ratios of whole layers, clipping within the step, parts of parameters, states of several kinds."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.5)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["momentum"] = torch.zeros_like(parameter)
                    state["plain"] = torch.zeros(parameter.shape)
                    state["maximum"] = parameter.grad.new_zeros(parameter.shape[:1])
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["plain"].copy_(parameter.grad.sign())
                rows = parameter.grad.abs().reshape(parameter.shape[0], -1).amax(1)
                torch.maximum(state["maximum"], rows, out=state["maximum"])
                ratio = parameter.norm() / (state["momentum"].norm() + 1e-6)
                parameter.add_(state["momentum"] * ratio.clamp(max=1.0), alpha=-group["lr"])
                parameter.sub_(state["plain"], alpha=1e-4 / float(1 + state["maximum"].sum()))
                parameter[0].mul_(0.99)
                if parameter.dim() > 1:
                    parameter.t()[1].add_(1e-3)


class ByHand(torch.optim.Optimizer):
    """A step as in tutorials, on .data."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad.data


class Promised(torch.optim.Optimizer):
    """Momentum, element by element, as allow_optimizer() wants it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=group["lr"])
        return loss


class Normalised(Promised):
    """A step that looks at whole gradients, in spite of what is promised of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class SometimesNormalised(Promised):
    """The same, where `normalises(parameter, its group, its state before the step)`."""

    def __init__(self, parameters: Any, normalises: Callable[[Any, dict[str, Any], dict[str, Any]], bool]) -> None:
        super().__init__(parameters)
        self.normalises = normalises

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.normalises(parameter, group, self.state[parameter]):
                    parameter.grad.div_(parameter.grad.norm())
        super().step()


class Compiled(torch.optim.Optimizer):
    """A step that compiles what it computes of a parameter, as one graph, as torchao's does."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    compiled = torch.compile(_with_momentum, fullgraph=True, dynamic=False, backend="eager")
                    compiled(parameter.detach(), parameter.grad, momentum, group["lr"])
        return loss


def _with_momentum(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, lr: float) -> None:
    momentum.copy_(momentum.float().lerp(gradient.float(), 0.1))
    parameter.copy_(parameter.float() - lr * momentum)


class Coded(torch.Tensor):
    """A state in bf16 that looks like float32, as packages make them: a wrapper that knows a few operations."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    codes: torch.Tensor

    def __init__(self, *_: Any) -> None:
        pass

    def __tensor_flatten__(self) -> Any:
        return ["codes"], []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *rest = args
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(first.codes)
        if func is torch.ops.aten.copy_.default and isinstance(first, cls):
            first.codes.copy_(rest[0].to(torch.bfloat16))
            return first
        if func is torch.ops.aten.lerp.Scalar:
            return first.codes.float().lerp(*rest)
        raise NotImplementedError(f"Coded: {func}")


class LowBit(torch.optim.Optimizer):
    """Momentum whose state is of a class of its own."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = Coded(torch.zeros(parameter.shape, dtype=torch.bfloat16))
                    average = state["momentum"].lerp(parameter.grad, 0.1)
                    state["momentum"].copy_(average)
                    parameter.sub_(average, alpha=group["lr"])


class Around:
    """What is no optimiser, and puts a state of its own beside that of the one it has, as ScheduleFreeWrapper does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.zero_grad = base.param_groups, base.state, base.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "z" not in state:
                state["z"] = torch.clone(parameter)
            state["z"].lerp_(parameter, 0.5)
        self.base.step()
