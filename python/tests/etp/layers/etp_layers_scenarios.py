"""Models of constructed layers, and the same in plain torch; each scenario returns what must be equal bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, batch, built, loss_of
from tessera import etp
from tessera.etp.phase import Phase
from torch.utils.checkpoint import checkpoint

EXPERTS, SKIPPED = 4, 2


def plain_linear(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    made = torch.nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu").to(dtype)
    torch.nn.init.normal_(made.weight, std=0.023)
    if bias:
        torch.nn.init.zeros_(made.bias)
    return made


class Layers(torch.nn.Module):
    """An embedding, two linear layers and a head, which may be the embedding's weight."""

    def __init__(self, run: Run, dtype: torch.dtype = torch.float32, tied: bool = False, **options: Any) -> None:
        super().__init__()
        if run.group is not None:
            options |= run.groups | {"params_dtype": dtype}
            self.emb = etp.Embedding(WORDS, WIDTH, **options)
            self.up = etp.Linear(WIDTH, HIDDEN, **options)
            self.down = etp.Linear(HIDDEN, WIDTH, bias=False, **options)
            self.head = etp.Linear(WIDTH, WORDS, bias=False, **options)
        else:
            self.emb = torch.nn.Embedding(WORDS, WIDTH, dtype=dtype)
            self.up = plain_linear(WIDTH, HIDDEN, dtype=dtype)
            self.down = plain_linear(HIDDEN, WIDTH, False, dtype)
            self.head = plain_linear(WIDTH, WORDS, False, dtype)
        if tied:
            self.head.weight = self.emb.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(ids)))


def layers(run: Run) -> Any:
    model = built(lambda: Layers(run))
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model), as_bytes(torch.rand(3))


def of_one_model_after_another(run: Run) -> Any:
    found = []
    for seed in (1, 2):
        model = built(lambda: Layers(run), seed)
        run.train(model, adamw(model.parameters()))
        found.append(run.weights(model))
    return found


def bfloat16(run: Run) -> Any:
    """A round is rounded once: plain torch would round after each micro-batch."""
    model = built(lambda: Layers(run, torch.bfloat16))
    optimizer = adamw(model.parameters())
    for _ in range(3):
        if run.group is not None:
            run.backward(model)
        else:
            sums = {each: torch.zeros(each.shape) for each in model.parameters()}
            for number in run.numbers():
                loss_of(model, number).backward()
                for each, total in sums.items():
                    total += each.grad.float() / run.size
                    each.grad = None
            for each, total in sums.items():
                each.grad = total.to(each.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return run.weights(model)


def tied(run: Run) -> Any:
    model = built(lambda: Layers(run, tied=True))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def checkpointed(run: Run) -> Any:
    model = built(lambda: Layers(run))
    block = model.block
    model.block = lambda x: checkpoint(block, x, use_reentrant=False)
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def frozen_at_run_time(run: Run) -> Any:
    model = built(lambda: Layers(run))
    optimizer = adamw(model.parameters())
    found = []
    for wanted in (True, False, True):
        model.up.requires_grad_(wanted)
        run.backward(model)
        found.append(run.gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, run.weights(model)


def gradients_of_some(run: Run) -> Any:
    """By backward(inputs=)."""
    model = built(lambda: Layers(run))
    for number in run.numbers():
        loss = loss_of(model, number)
        (loss if run.group is not None else loss / run.size).backward(inputs=[model.emb.weight, model.down.weight])
    found = run.gradients(model)
    model.zero_grad()
    run.train(model, adamw(model.parameters()), steps=1)
    return found, run.weights(model)


def loaded_and_initialised_again(run: Run) -> Any:
    model = built(lambda: Layers(run))
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=1)
    model.load_state_dict(
        {name: torch.full_like(each, 0.01) for name, each in built(lambda: Layers(Run(1))).state_dict().items()}
    )
    run.train(model, optimizer, steps=1)
    torch.manual_seed(4)
    if run.group is None:
        torch.nn.init.normal_(model.up.weight.data, std=0.023)
        torch.nn.init.zeros_(model.up.bias.data)
    else:
        model.up.reset_parameters()
    run.train(model, optimizer, steps=1)
    return run.weights(model)


def evaluated_and_clipped(run: Run) -> Any:
    model = built(lambda: Layers(run))
    seen = []
    for _ in range(2):
        run.train(
            model,
            adamw(model.parameters()),
            steps=1,
            before_step=lambda model: seen.append(as_bytes(etp.clip_grad_norm_(model.parameters(), 0.05))),
        )
        with torch.no_grad():
            seen.append(as_bytes(model(batch(5)[0])))
    return seen, run.weights(model)


def biases_apart(run: Run) -> Any:
    """return_bias: the caller adds them."""
    torch.manual_seed(5)
    if run.group is None:
        model: Any = plain_linear(WIDTH, HIDDEN)
    else:
        model = etp.Linear(WIDTH, HIDDEN, return_bias=True, **run.groups)

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        x = torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(number))
        if run.group is None:
            return (F.linear(x, model.weight) + 2 * model.bias).sin().sum()
        out, bias = model(x)
        return (out + 2 * bias).sin().sum()

    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


# --- experts


class Experts(torch.nn.Module):
    """Of tokens by their number; nobody has any for expert 0, and only even micro-batches for expert SKIPPED."""

    def __init__(self, run: Run, bias: bool, **options: Any) -> None:
        super().__init__()
        self.sharded = run.group is not None
        if run.group is not None:
            self.experts = etp.GroupedLinear(EXPERTS, WIDTH, HIDDEN, bias, **run.groups, **options)
            return
        self.experts = torch.nn.Module()
        for i in range(EXPERTS):
            one = plain_linear(WIDTH, HIDDEN, bias)
            self.experts.register_parameter(f"weight{i}", one.weight)
            if bias:
                self.experts.register_parameter(f"bias{i}", one.bias)

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        if self.sharded:
            return self.experts(x, splits)
        named = dict(self.experts.named_parameters())
        parts = [F.linear(part, named[f"weight{i}"], named.get(f"bias{i}")) for i, part in enumerate(x.split(splits))]
        return torch.cat(parts)


def expert_loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    splits = [0, 3, 5 if number % 2 == 0 else 0, 2]
    x = torch.rand(sum(splits), WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x, splits).sin().sum()


def experts(run: Run) -> Any:
    found = []
    for bias in (True, False):
        model = built(lambda bias=bias: Experts(run, bias))
        run.backward(model, expert_loss)
        found.append(run.gradients(model))
        run.train(model, adamw(model.parameters()), accumulation=2, loss=expert_loss)
        found.append(run.weights(model))
    return found


def experts_without_tokens(run: Run) -> Any:
    """Of odd micro-batches: a rank of several has none at all."""

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        splits = [0, 3, 5, 2] if number % 2 == 0 else [0] * EXPERTS
        x = torch.rand(sum(splits), WIDTH, generator=torch.Generator().manual_seed(number))
        return model(x, splits).sin().sum()

    model = built(lambda: Experts(run, True))
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def experts_some_of_them_frozen(run: Run) -> Any:
    model = built(lambda: Experts(run, False))
    model.experts.weight1.requires_grad_(False)
    run.train(model, adamw(p for p in model.parameters() if p.requires_grad), loss=expert_loss)
    return run.weights(model), model.experts.weight1.grad is None


def gradients_of_some_experts(run: Run) -> Any:
    """By backward(inputs=)."""
    model = built(lambda: Experts(run, True))
    for number in run.numbers():
        loss = expert_loss(model, number)
        wanted = [model.experts.weight1, model.experts.bias3]
        (loss if run.group is not None else loss / run.size).backward(inputs=wanted)
    return run.gradients(model)


def experts_under_autocast(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return expert_loss(model, number)

    model = built(lambda: Experts(run, True))
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


# --- norms


class Normed(torch.nn.Module):
    """The parameters of LayerNormLinear and LayerNormMLP, by their names."""

    def __init__(self, kind: str, weights: dict[str, tuple[int, ...]], norm: str, activation: str) -> None:
        super().__init__()
        self.kind, self.norm, self.activation = kind, norm, activation
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(WIDTH))
        if norm == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(WIDTH))
        for name, shape in weights.items():
            made = torch.zeros(shape)
            if len(shape) > 1:
                made.normal_(std=0.023)
            self.register_parameter(name, torch.nn.Parameter(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm == "RMSNorm":
            x = F.rms_norm(x, (WIDTH,), self.layer_norm_weight, 1e-5)
        else:
            x = F.layer_norm(x, (WIDTH,), self.layer_norm_weight, self.layer_norm_bias, 1e-5)
        if self.kind == "linear":
            return F.linear(x, self.weight, self.bias)
        x = F.linear(x, self.fc1_weight, self.fc1_bias)
        if self.activation == "swiglu":
            gate, rest = x.chunk(2, -1)
            x = F.silu(gate) * rest
        else:
            x = F.gelu(x, approximate="tanh")
        return F.linear(x, self.fc2_weight, self.fc2_bias)


def normed(on: Run, kind: str, norm: str, activation: str) -> Any:
    def made() -> Any:
        if on.group is not None and kind == "linear":
            return etp.LayerNormLinear(WIDTH, HIDDEN, normalization=norm, **on.groups)
        if on.group is not None:
            return etp.LayerNormMLP(WIDTH, HIDDEN, normalization=norm, activation=activation, **on.groups)
        if kind == "linear":
            return Normed(kind, {"weight": (HIDDEN, WIDTH), "bias": (HIDDEN,)}, norm, activation)
        rows = HIDDEN * (2 if activation == "swiglu" else 1)
        shapes = {"fc1_weight": (rows, WIDTH), "fc1_bias": (rows,)}
        return Normed(kind, shapes | {"fc2_weight": (WIDTH, HIDDEN), "fc2_bias": (WIDTH,)}, norm, activation)

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        x = torch.rand(3, 5, WIDTH, generator=torch.Generator().manual_seed(number))
        return model(x).sin().sum()

    model = built(made)
    on.train(model, adamw(model.parameters()), loss=loss)
    return on.weights(model)


def norms(run: Run) -> Any:
    return [normed(run, "linear", norm, "") for norm in ("LayerNorm", "RMSNorm")]


def perceptrons(run: Run) -> Any:
    return [
        normed(run, "mlp", norm, activation) for norm in ("LayerNorm", "RMSNorm") for activation in ("gelu", "swiglu")
    ]


# --- main_grad


def main_gradients(run: Run) -> Any:
    """Accumulated in f32 and in bf16; hooks are called once a micro-step, after the addition."""
    found: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = built(lambda: Layers(run, torch.bfloat16, **_fused(run)))
        weights = [each for each in model.parameters() if each.dim() > 1]
        seen: list[tuple[int, float]] = []
        for i, each in enumerate(weights):
            each.main_grad = torch.zeros_like(etp.local(each), dtype=dtype)
            _after_addition(run, each, seen, i)
        steps = 1 if dtype == torch.bfloat16 else 2  # rounds of bf16 are rounded once each
        for _ in range(steps):
            if run.group is None:
                _accumulate_plainly(run, model, weights)
            else:
                run.backward(model)
            assert all(each.grad is None for each in weights)
        found.append([as_bytes(_whole_main_grad(each)) for each in weights])
        if run.group is not None and run.size > 1:
            assert sorted(i for i, _ in seen) == sorted([*range(len(weights))] * steps)
            assert all(each.grad_added_to_main_grad for each in weights)
    return found


def _whole_main_grad(parameter: Any) -> torch.Tensor:
    """It is this rank's rows, as Megatron's optimisers have it."""
    if not isinstance(parameter, etp.LogicalTensor):
        return parameter.main_grad  # type: ignore[no-any-return]
    return etp.whole(etp.from_local(parameter.main_grad, like=parameter))


def _fused(on: Run) -> dict[str, Any]:
    return {} if on.group is None else {"fuse_wgrad_accumulation": True}


def _after_addition(on: Run, parameter: Any, seen: list[tuple[int, float]], i: int) -> None:
    if on.group is not None and on.size > 1:
        node = torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node
        parameter.register_grad_accum_hook(node, lambda *_: seen.append((i, float(parameter.main_grad.abs().sum()))))


def _accumulate_plainly(on: Run, model: torch.nn.Module, weights: list[Any]) -> None:
    """In f32, rounded once a micro-step."""
    sums = [each.main_grad.float() for each in weights]
    for number in on.numbers():
        loss_of(model, number).backward()
        for each, total in zip(weights, sums, strict=True):
            total += each.grad.float() / on.size
            each.grad = None
    for each, total in zip(weights, sums, strict=True):
        each.main_grad.copy_(total)


class HandWritten(torch.autograd.Function):
    """A user's own function, which writes the gradient where get_wgrad_tensor() says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, parameter: Any, full: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.parameter = parameter
        return x.mm(full.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        wgrad = ctx.parameter.get_wgrad_tensor()
        torch.mm(gradient.t(), x, out=wgrad)
        ctx.parameter.reduce_wgrad(wgrad)
        return None, None, None, None


def a_hand_written_function(run: Run) -> Any:
    torch.manual_seed(5)
    if run.group is None or run.size == 1:
        model: Any = plain_linear(WIDTH, HIDDEN, False)
    else:
        model = etp.Linear(WIDTH, HIDDEN, False, **run.groups)

    def loss(model: Any, number: int) -> torch.Tensor:
        x = torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(number))
        if run.group is None or run.size == 1:
            return F.linear(x, model.weight).sin().sum()
        full = model.weight.etp.gather(Phase.FORWARD)[0]
        return HandWritten.apply(x, torch.zeros((), requires_grad=True), model.weight, full).sin().sum()

    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)
