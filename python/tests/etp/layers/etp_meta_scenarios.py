"""Models on the meta device, and models that mix constructed layers with others; as the same models of plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from etp_layers_scenarios import Experts, plain_linear
from etp_models import HIDDEN, WIDTH, WORDS, Run, Tied, adamw, as_bytes, batch, built, loss_of
from tessera import etp


class Buffered(Tied):
    """With running statistics, which reset_parameters() fills."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torch.nn.BatchNorm1d(HIDDEN)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        up = self.running(self.norm(self.up(x)).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(up))


def on_the_meta_device(run: Run) -> Any:
    """Values and random numbers are those of a model that was made in host memory."""
    torch.manual_seed(7)
    if run.group is None:
        model = Buffered()
    else:
        with torch.device("meta"):
            model = Buffered()
        run.sharded(model)
    found = [run.weights(model), as_bytes(torch.rand(3)), model.head.weight is model.emb.weight]
    model.eval()  # running statistics differ between ranks
    run.train(model, adamw(model.parameters()))
    return found, run.weights(model)


def on_the_meta_device_by_init(run: Run) -> Any:
    def init(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_()

    torch.manual_seed(7)
    if run.group is None:
        model = Tied()
        torch.manual_seed(7)
        weights = [model.emb.weight, model.up.weight, model.up.bias, model.norm.weight, model.norm.bias]
        for parameter in (*weights, model.down.weight, torch.empty_like(model.head.weight)):
            parameter.data.normal_()
    else:
        with torch.device("meta"):
            model = Tied()
        run.sharded(model, init=init)
    return run.weights(model), as_bytes(torch.rand(3))


def on_the_meta_device_then_loaded(run: Run) -> Any:
    state = built(Tied).state_dict()
    model: Any = Tied()
    if run.group is not None:
        with torch.device("meta"):
            model = Tied()
        run.sharded(model)
    model.load_state_dict(state)
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


class Mixed(torch.nn.Module):
    """An embedding that is constructed sharded and is the head's weight, layers of both kinds, a norm of torch."""

    def __init__(self, run: Run, device: str = "cpu") -> None:
        super().__init__()
        device = "cpu" if run.group is None else device
        if run.group is not None:
            self.emb: Any = etp.Embedding(WORDS, WIDTH, device=device, **run.groups)
            self.up = torch.nn.Linear(WIDTH, HIDDEN, device=device)
            self.down = etp.Linear(HIDDEN, WIDTH, device=device, **run.groups)
        else:
            self.emb = torch.nn.Embedding(WORDS, WIDTH)
            self.up = torch.nn.Linear(WIDTH, HIDDEN)
            self.down = plain_linear(HIDDEN, WIDTH)
        self.norm = torch.nn.LayerNorm(HIDDEN, device=device)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False, device=device)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.head(x + self.down(F.gelu(self.norm(self.up(x)))))


def layers_in_a_model_that_is_sharded(run: Run) -> Any:
    model = run.sharded(built(lambda: Mixed(run)))
    run.train(model, adamw(model.parameters()), accumulation=2)
    found = [run.weights(model)]
    with run.update(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    run.train(model, adamw(model.parameters()))
    found.append(run.weights(model))
    model.load_state_dict(built(lambda: Mixed(Run(1)), 9).state_dict())
    run.train(model, adamw(model.parameters()))
    if run.group is None:
        return found, run.weights(model), as_bytes(model(batch(3)[0]))
    trained = run.weights(model)
    with etp.summon(model):
        plain = built(lambda: Mixed(Run(1)))
        plain.load_state_dict(model.state_dict())
        whole = as_bytes(plain(batch(3)[0]))
    run.backward(model)
    etp.unshard_(model)
    assert type(model.up) is torch.nn.Linear
    assert isinstance(model.down.weight, etp.LogicalTensor) or run.size == 1
    return found, trained, whole


class Normed(torch.nn.Module):
    """Layers that were constructed sharded with a norm between, which is too small to be sharded."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        grouped = run.group is not None
        self.up: Any = etp.Linear(WIDTH, HIDDEN, **run.groups) if grouped else plain_linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.down: Any = etp.Linear(HIDDEN, WIDTH, **run.groups) if grouped else plain_linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def layers_with_a_plain_norm(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        return model(torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(number))).sin().sum()

    model = run.sharded(built(lambda: Normed(run)))
    norms = []
    run.train(
        model,
        adamw(model.parameters()),
        accumulation=2,
        loss=loss,
        before_step=lambda model: norms.append(as_bytes(etp.clip_grad_norm_(model.parameters(), 0.05))),
    )
    found = run.weights(model)
    model.load_state_dict(built(lambda: Normed(Run(1)), 9).state_dict())
    run.train(model, adamw(model.parameters()), loss=loss)
    if run.group is not None:
        etp.unshard_(model)
    return norms, found, run.weights(model)


class Ungrouped(torch.nn.Module):
    """Layers that were constructed without a group."""

    def __init__(self, run: Run, device: str) -> None:
        super().__init__()
        self.sharded = run.group is not None
        if self.sharded:
            self.emb: Any = etp.Embedding(WORDS, WIDTH, device=device)
            self.up: Any = etp.Linear(WIDTH, WIDTH, device=device)
            self.experts: Any = etp.GroupedLinear(4, WIDTH, HIDDEN, device=device)
        else:
            self.emb = torch.nn.Embedding(WORDS, WIDTH)
            self.up = plain_linear(WIDTH, WIDTH)
            self.experts = Experts(run, True).experts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.up(self.emb(ids.flatten()))
        return self.experts(x, SPLITS) if self.sharded else Experts.forward(self, x, SPLITS)  # type: ignore[arg-type]


SPLITS = [0, 3, 20, 1]


def layers_without_a_group_in_a_model(run: Run) -> Any:
    """They are sharded as other modules are, and their experts are gathered as a list."""
    found: list[Any] = []
    for device, mode in (("cpu", "deferred"), ("meta", "deferred"), ("cpu", "inline")):
        torch.manual_seed(7)
        model = run.sharded(Ungrouped(run, device), min_elements=256, mode=mode)
        if run.group is not None and run.size > 1:
            weight = model.experts.weight1
            assert isinstance(model.up.weight, etp.LogicalTensor) and weight.etp.model is model.up.weight.etp.model
            assert weight.etp.expert_idx == (1 if mode == "deferred" else None)
        run.train(model, adamw(model.parameters()), loss=lambda model, number: model(batch(number)[0]).sin().sum())
        found.append(run.weights(model))
    if run.group is not None:
        etp.unshard_(model)
        assert type(model.up.weight) is torch.nn.Parameter
    return found, {name: as_bytes(each) for name, each in model.state_dict().items()}


class Head(torch.nn.Module):
    """A plain layer that has the weight of one that was constructed sharded."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        grouped = run.group is not None
        self.emb: Any = etp.Embedding(WORDS, WIDTH, **run.groups) if grouped else torch.nn.Embedding(WORDS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False, device="meta")
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids))


def a_plain_head_that_is_tied_to_a_layer(run: Run) -> Any:
    """Without shard_module_(): its state is logical, and can be loaded."""
    model = built(lambda: Head(run))
    run.train(model, adamw(model.parameters()), accumulation=2)
    state = model.state_dict()
    found = [{name: as_bytes(etp.whole(x) if isinstance(x, etp.LogicalTensor) else x) for name, x in state.items()}]
    for values in (built(lambda: Head(Run(1)), 9).state_dict(), state):
        model.load_state_dict(values)
        run.train(model, adamw(model.parameters()))
        found.append(run.weights(model))
    return found


def layers_on_the_meta_device_in_a_model(run: Run) -> Any:
    torch.manual_seed(7)
    model = Mixed(run, "meta")
    if run.group is not None:
        run.sharded(model)
    found = [run.weights(model), as_bytes(torch.rand(3))]
    run.train(model, adamw(model.parameters()))
    return found, run.weights(model)


def layers_on_the_meta_device(run: Run) -> Any:
    torch.manual_seed(7)
    if run.group is None:
        layer: Any = plain_linear(WIDTH, WORDS)
    else:
        layer = etp.Linear(WIDTH, WORDS, **run.groups, device="meta")
        assert layer.weight.is_meta
        layer.reset_parameters()
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH).requires_grad_(False), layer)
    run.train(model, adamw(layer.parameters()), loss=loss_of)
    return run.weights(layer)
