"""Programs that change a model's modules before or after it is sharded, written once for plain and sharded training;
each returns what must be equal bytes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from etp_models import Run, adamw, as_bytes, built
from tessera import etp
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, prune

SIZE = 64


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(96, SIZE)
        self.a = torch.nn.Linear(SIZE, SIZE)
        self.b = torch.nn.Linear(SIZE, SIZE)
        self.extra: torch.nn.Module | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(self.emb(ids)).tanh())
        return x if self.extra is None else self.extra(x)


def ids(number: int, words: int = 96) -> torch.Tensor:
    return torch.randint(0, words, (4, 6), generator=torch.Generator().manual_seed(300 + number))


def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    return model(ids(number)).square().mean()


def seeded(make: Any, seed: int = 11) -> Any:
    torch.manual_seed(seed)
    return make()


def _trained(run: Run, model: Any, steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> Any:
    run.train(model, optimizer or adamw(model.parameters()), steps=steps, loss=loss)
    return run.weights(model)


# --- parameters that come, go, and are replaced


def late_head(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    model.extra = seeded(lambda: torch.nn.Linear(SIZE, 5))
    return _trained(run, model)


def late_head_that_is_sharded(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    model.extra = seeded(lambda: torch.nn.Linear(SIZE, 96))
    optimizer = adamw(model.parameters())  # which holds it before it is adopted
    return _trained(run, model, optimizer=optimizer), model.extra.weight in optimizer.state


def late_head_that_is_evaluated_first(run: Run) -> Any:
    """In inference mode, in which nothing that is trained may be made."""
    model = run.sharded(built(Net))
    model.extra = seeded(lambda: torch.nn.Linear(SIZE, 96))
    model.b.weight = model.a.weight
    with torch.inference_mode():
        model(ids(0))
    return _trained(run, model), model.extra.weight.is_inference()


def replaced_layer(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    model.b = seeded(lambda: torch.nn.Linear(SIZE, 40))
    return _trained(run, model)


def replaced_parameter(run: Run) -> Any:
    model = run.sharded(built(Net))
    model.b.weight = seeded(lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE) / 8))
    return _trained(run, model)


def replaced_in_place_of_none(run: Run) -> Any:
    """`_parameters[name] = x` and `del` call no hook."""
    model = run.sharded(built(Net))
    _trained(run, model)
    model.b._parameters["weight"] = seeded(lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE) / 8))
    del model.a.bias
    model.a.bias = None
    return _trained(run, model)


def replaced_past_the_hooks(run: Run) -> Any:
    """Replace weights by tensors that come from sharded ones, which stay sharded."""
    found = []
    for put in (
        lambda module, new: module._parameters.__setitem__("weight", new),
        lambda module, new: module._parameters.update(weight=new),
        lambda module, new: setattr(module, "_parameters", {**module._parameters, "weight": new}),
        lambda module, new: module.__dict__.update(_parameters={**module._parameters, "weight": new}),
    ):
        for trains_before in (False, True):
            model = run.sharded(built(Net))
            if trains_before:
                _trained(run, model)
            put(model.b, torch.nn.Parameter(model.b.weight.detach() * 0.5))
            found.append(_trained(run, model))
    return found


def past_the_hooks_without_the_root(run: Run) -> Any:
    model = run.sharded(built(Net))

    def of_parts(model: Any, number: int) -> torch.Tensor:
        return model.b(model.a(model.emb(ids(number)))).square().mean()

    run.train(model, adamw(model.parameters()), loss=of_parts)
    model.b._parameters["weight"] = torch.nn.Parameter(model.b.weight.detach() * 0.5)
    model.a._parameters["weight"] = seeded(lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE) / 8))
    run.train(model, adamw(model.parameters()), loss=of_parts)
    return run.weights(model)


def swapped(run: Run) -> Any:
    """Swap by torch.utils.swap_tensors(), after which a parameter is another one, and the same object."""
    found = []
    for root in (True, False):
        model = run.sharded(built(Net))
        a, b = model.a.weight, model.b.weight
        torch.utils.swap_tensors(a, b)

        def of_parts(model: Any, number: int) -> torch.Tensor:
            return model.b(model.a(model.emb(ids(number)))).square().mean()

        run.backward(model, loss if root else of_parts)
        found.append(run.gradients(model))
        model.zero_grad()
        found.append((_trained(run, model), model.a.weight is a))
        new = seeded(lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE) / 8))
        torch.utils.swap_tensors(model.b.weight, new)
        found.append(_trained(run, model))
    return found


def swapped_by_loads(run: Run) -> Any:
    model = run.sharded(built(Net))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(seeded(Net).state_dict())
        found = _trained(run, model)
        model.float()
        model._apply(lambda tensor: tensor * 0.5 if tensor.is_floating_point() else tensor)
        return found, _trained(run, model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def modules_in_place(run: Run) -> Any:
    model = run.sharded(built(Net))
    model._modules = {**model._modules, "b": seeded(lambda: torch.nn.Linear(SIZE, 40))}
    return _trained(run, model)


def former_memory(run: Run) -> Any:
    """Keep what has had a parameter's memory, and write into it, where the parameter gets other memory."""
    model = run.sharded(built(Net))
    weight = model.b.weight
    data, taken, row, turned, flat, part = (
        weight.data,
        weight.detach(),
        weight.data[3],
        weight.detach().t(),
        weight.data.view(-1),
        weight.detach()[:, 5:9],
    )
    kept = weight[7]
    weight.data = torch.full((SIZE, SIZE), 0.25)
    row.fill_(7)
    part.mul_(2)
    data.add_(1)
    found = [as_bytes(run.whole(each).detach()) for each in (data, taken, row, turned, flat, part, kept, weight)]
    weight.data[2].data = torch.ones(SIZE)  # a view gets other memory, and the parameter does not
    weight.detach().data = torch.ones(SIZE, SIZE)
    return found, as_bytes(run.whole(weight).detach()), _trained(run, model)


def frozen_amid(run: Run) -> Any:
    """Freeze between a forward and its backward."""
    model = run.sharded(built(Net))

    def freezes(model: Any, number: int) -> torch.Tensor:
        value = loss(model, number)
        model.a.requires_grad_(False)
        model.emb.weight.requires_grad_(False)
        return value

    run.backward(model, freezes)
    names = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    found = run.gradients(model)
    model.requires_grad_(True)
    return names, found, _trained(run, model)


class OnSphere(torch.nn.Parameter):
    """A parameter whose class says how it is to be trained."""

    def __new__(cls, data: torch.Tensor) -> OnSphere:
        made: OnSphere = torch.Tensor._make_subclass(cls, data, True)
        return made

    def project(self) -> None:
        self.copy_(self / self.norm(dim=1, keepdim=True))


def parameters_of_a_class(run: Run) -> Any:
    """Train parameters of a subclass, which optimisers ask for their methods, also one that comes later."""
    model = built(Net)
    model.a.weight = OnSphere(model.a.weight.detach().clone())
    model = run.sharded(model)
    for _ in range(3):
        for _ in range(2):
            _trained(run, model, steps=1, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            with torch.no_grad():
                for parameter in model.parameters():
                    if isinstance(parameter, OnSphere):
                        parameter.project()
        model.b.weight = OnSphere(torch.eye(SIZE))
    return run.weights(model), [type(each).__name__ == "OnSphere" for each in model.parameters()]


def order_of_states(run: Run) -> Any:
    model = run.sharded(built(Net))
    optimizer = adamw(model.parameters())
    found = []
    for _ in range(2):
        _trained(run, model, optimizer=optimizer)
        found.append([tuple(state["exp_avg"].shape) for state in optimizer.state.values()])
        model.extra = seeded(lambda: torch.nn.Linear(SIZE, 5))
        optimizer.add_param_group({"params": list(model.extra.parameters())})
    return found, list(optimizer.state_dict()["state"])


def adapter_by_hook(run: Run) -> Any:
    model = run.sharded(built(Net))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.a.low = seeded(lambda: torch.nn.Linear(SIZE, 4, bias=False))
    model.a.high = seeded(lambda: torch.nn.Linear(4, SIZE, bias=False))
    model.a.register_forward_hook(lambda module, args, out: out + module.high(module.low(args[0])))
    return _trained(run, model, optimizer=adamw(p for p in model.parameters() if p.requires_grad))


def without_the_root(run: Run) -> Any:
    model = run.sharded(built(Net))
    model.head = seeded(lambda: torch.nn.Linear(SIZE, 8))

    def of_parts(model: Any, number: int) -> torch.Tensor:
        return model.head(model.a(model.emb(ids(number)))).square().mean()

    run.train(model, adamw(model.parameters()), loss=of_parts)
    return run.weights(model)


def head_alone(run: Run) -> Any:
    """Trained on features, in a forward that no sharded weight has a part in."""
    model = run.sharded(built(Net))
    model.extra = seeded(lambda: torch.nn.Linear(SIZE, 5))

    def of_features(model: Any, number: int) -> torch.Tensor:
        features = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))
        return model.extra(features).square().mean()

    run.train(model, adamw(model.extra.parameters()), steps=1, loss=of_features)
    run.train(model, torch.optim.SGD(model.extra.parameters(), lr=0.1), loss=of_features)
    return run.weights(model)


def older_optimizer(run: Run) -> Any:
    """One that holds a parameter whose place another one has taken leaves its memory alone."""
    model = run.sharded(built(Net))
    optimizer = adamw(model.parameters())
    model.b.weight = torch.nn.Parameter(model.b.weight)
    return _trained(run, model, optimizer=optimizer)


def tied_later(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    model.extra = torch.nn.Linear(SIZE, 96, bias=False)
    model.extra.weight = model.emb.weight
    found = _trained(run, model)
    assert model.extra.weight is model.emb.weight
    model.extra.weight = seeded(lambda: torch.nn.Parameter(torch.randn(96, SIZE)))  # and untied
    return found, _trained(run, model)


def gone_and_back(run: Run) -> Any:
    model = run.sharded(built(Net))
    optimizer = adamw(model.parameters())
    _trained(run, model, optimizer=optimizer)
    b, model.b = model.b, torch.nn.Identity()
    run.train(model, optimizer, loss=loss)
    model.b = b
    return _trained(run, model, optimizer=optimizer)


def gone_and_back_with_gradients(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    run.backward(model, loss)
    b, model.b = model.b, torch.nn.Identity()
    found = [as_bytes(run.whole(b.weight.grad))]
    run.backward(model, loss)
    found.append(as_bytes(run.whole(b.weight.grad)))
    with torch.no_grad():
        b.weight.sub_(b.weight.grad, alpha=0.5)
    model.b = b
    run.backward(model, loss)
    return found, run.gradients(model), run.weights(model)


def resized_embedding(run: Run) -> Any:
    """As resize_token_embeddings() does."""
    model = run.sharded(built(Net))
    _trained(run, model)
    old = model.emb
    new = seeded(lambda: torch.nn.Embedding(104, SIZE))
    new.weight.data[:96] = old.weight.data[:96]
    old.weight = torch.nn.Parameter(new.weight.detach().clone())
    old.num_embeddings = 104

    def longer(model: Any, number: int) -> torch.Tensor:
        return model(ids(number, 104)).square().mean()

    run.train(model, adamw(model.parameters()), loss=longer)
    return run.weights(model)


def accumulated_before(run: Run) -> Any:
    """A head that comes between two micro-batches."""
    model = run.sharded(built(Net))
    run.backward(model, loss)
    model.extra = seeded(lambda: torch.nn.Linear(SIZE, 5))
    run.backward(model, loss)
    return run.gradients(model)


def parameters_of_parameters(run: Run) -> Any:
    """New ones that are made of sharded ones."""
    model = run.sharded(built(Net))
    _trained(run, model)
    model.a.weight = torch.nn.Parameter(model.a.weight.detach() * 0.5)
    model.b.weight = torch.nn.Parameter(model.b.weight)
    model.b.bias = torch.nn.Parameter(model.b.bias.data.clone())
    model.copied = torch.nn.Parameter(model.emb.weight.data.clone())
    found = _trained(run, model)
    return found, isinstance(model.b.weight, torch.nn.Parameter)


# --- parametrizations and their kin


def _changed(run: Run, change: Any, after: bool) -> Any:
    model = built(Net)
    if after:
        model = run.sharded(model)
        _trained(run, model)
    else:
        _trained_plainly(model)
    change(model)
    if not after:
        model = run.sharded(model)
    trained = _trained(run, model)
    buffers = {name: as_bytes(buffer) for name, buffer in model.named_buffers()}
    with torch.no_grad():
        return trained, buffers, as_bytes(model(ids(99)))


def _trained_plainly(model: Any) -> None:
    """What all ranks do alike."""
    optimizer = adamw(model.parameters())
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


def _weight_norm(model: Any) -> None:
    torch.nn.utils.weight_norm(model.a)


def _weight_norm_parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.a)


def _spectral_norm(model: Any) -> None:
    """Each forward is one more iteration, of which one process does those of all micro-batches: none here."""
    seeded(lambda: torch.nn.utils.spectral_norm(model.a))
    model.a.eval()


def _spectral_norm_parametrized(model: Any) -> None:
    seeded(lambda: parametrizations.spectral_norm(model.a))
    model.a.eval()


def _orthogonal(model: Any) -> None:
    parametrizations.orthogonal(model.a)


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _symmetric(model: Any) -> None:
    parametrize.register_parametrization(model.b, "weight", Symmetric())


def _pruned(model: Any) -> None:
    prune.l1_unstructured(model.a, "weight", 0.3)
    prune.ln_structured(model.b, "weight", 0.25, n=2, dim=0)


def _pruned_for_good(model: Any) -> None:
    _pruned(model)
    prune.remove(model.a, "weight")


_CHANGES = {
    each.__name__.lstrip("_"): each
    for each in (
        _weight_norm,
        _weight_norm_parametrized,
        _spectral_norm,
        _spectral_norm_parametrized,
        _orthogonal,
        _symmetric,
        _pruned,
        _pruned_for_good,
    )
}


def changes_before(run: Run) -> Any:
    return {name: _changed(run, change, False) for name, change in _CHANGES.items()}


def changes_after(run: Run) -> Any:
    return {name: _changed(run, change, True) for name, change in _CHANGES.items()}


def changes_undone(run: Run) -> Any:
    found = []
    for change, undo in (
        (_weight_norm, lambda model: torch.nn.utils.remove_weight_norm(model.a)),
        (_symmetric, lambda model: parametrize.remove_parametrizations(model.b, "weight")),
    ):
        model = run.sharded(built(Net))
        change(model)
        _trained(run, model)
        undo(model)
        found.append(_trained(run, model))
    return found


def merged_adapter(run: Run) -> Any:
    """As PEFT merges and unmerges."""
    model = run.sharded(built(Net))
    model.a.low, model.a.high = (seeded(lambda: torch.nn.Linear(SIZE, SIZE, bias=False)) for _ in range(2))
    _trained(run, model)
    delta = (run.whole(model.a.high.weight) @ run.whole(model.a.low.weight)).detach()
    model.a.weight.data += delta
    with torch.no_grad():
        merged = as_bytes(model(ids(5)))
    model.a.weight.data -= delta
    model.a.weight.data = model.a.weight.data + delta
    return merged, _trained(run, model)


# --- summon


def summoned(run: Run) -> Any:
    """Writes, replacements and other shapes are carried back."""
    from tessera import etp

    model = run.sharded(built(Net))
    optimizer = adamw(model.parameters())
    _trained(run, model, optimizer=optimizer)
    kept = model.emb.weight
    with etp.summon(model):
        assert run.group is None or type(model.a.weight) is torch.nn.Parameter
        model.a.weight.data += 0.125
        with torch.no_grad():
            model.b.weight[3] = 0.5
            model.a.bias.zero_()
        model.b.weight.requires_grad_(False)
        new = torch.full((104, SIZE), 0.25)
        new[:96] = model.emb.weight.detach()
        model.emb.weight.data = new
        model.emb.num_embeddings = 104
        model.extra = seeded(lambda: torch.nn.Linear(SIZE, SIZE))
    assert model.emb.weight is kept and not model.b.weight.requires_grad
    first = run.weights(model)
    with etp.summon(model):
        model.extra.weight = torch.nn.Parameter(torch.ones(70, SIZE))
        model.extra.bias = None
    return first, _trained(run, model)


# --- copies


def averaged(run: Run) -> Any:
    model = run.sharded(built(Net))
    optimizer = adamw(model.parameters())
    swa = torch.optim.swa_utils
    averages = [
        swa.AveragedModel(model),
        swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)),
        swa.AveragedModel(model, avg_fn=lambda average, new, number: 0.5 * average + 0.5 * new),
    ]
    for _ in range(3):
        _trained(run, model, steps=1, optimizer=optimizer)
        for average in averages:
            average.update_parameters(model)
    return run.weights(model), [run.weights(average) for average in averages]


def copied(run: Run) -> Any:
    model = run.sharded(built(Net))
    _trained(run, model)
    second = copy.deepcopy(model)
    part = copy.deepcopy(model.b)
    one = copy.deepcopy(model.a.weight)
    trained = _trained(run, second)

    def of_part(part: Any, number: int) -> torch.Tensor:
        return part(torch.ones(3, SIZE) * number).square().mean()

    run.train(part, torch.optim.SGD(part.parameters(), lr=0.1), loss=of_part)
    with torch.no_grad():
        one.lerp_(model.a.weight, 0.5).add_(1)
    third = copy.deepcopy(second)
    return trained, run.weights(part), as_bytes(run.whole(one)), run.weights(model), _trained(run, third)


def copied_with_changes(run: Run) -> Any:
    """Copies, and summons, of a model that no forward has seen since it was changed."""
    from tessera import etp

    model = run.sharded(built(Net))
    model.b = seeded(lambda: torch.nn.Linear(SIZE, 5))
    average = torch.optim.swa_utils.AveragedModel(model)
    model.extra = seeded(lambda: torch.nn.Linear(5, 5))
    with etp.summon(model):
        model.a.weight.data += 1
    optimizer = adamw(model.parameters())
    _trained(run, model, optimizer=optimizer)
    return run.weights(model), run.weights(average), _trained(run, average.module)


# --- modules


class Codes(torch.nn.Module):
    """Methods that are not forward, submodules that are called without their root, a write to a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.act = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(inplace=True))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.net.a.weight, self.net.a.bias)

    def score(self, number: int) -> torch.Tensor:
        x = self.encode(self.net.emb(ids(number)))
        y = self.net.b(self.act(x))
        y += x
        y = self.net.b(y)
        y.mul_(0.5)
        return torch.cdist(y.flatten(0, 1), self.net.emb.weight).mean() + y.square().mean()


def methods(run: Run) -> Any:
    model = run.sharded(built(Codes))
    run.train(model, adamw(model.parameters()), loss=lambda model, number: model.score(number))
    with torch.no_grad():
        nearest = torch.cdist(model.encode(torch.ones(2, SIZE)), model.net.emb.weight).argmin(-1)
        return run.weights(model), as_bytes(nearest), as_bytes(model.net.emb.weight[torch.tensor([3, 95])])


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias)) * weight.shape[0]


class Product(torch.autograd.Function):
    """Written by hand, as Liger's kernels are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ weight, flat.t() @ x.reshape(-1, x.shape[-1])


@torch.library.custom_op("tessera_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.data_ptr() != 0
    return x @ weight.t()


product.register_autograd(
    lambda ctx, gradient: (
        gradient @ ctx.saved_tensors[1],
        gradient.reshape(-1, SIZE).t() @ ctx.saved_tensors[0].reshape(-1, SIZE),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Foreign(torch.nn.Module):
    """TorchScript, an autograd function, an operator of an extension, on sharded weights."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.net, self.which = Net(), which

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, weight, bias = self.net.emb(tokens), self.net.a.weight, self.net.a.bias
        if self.which == "script":
            return scripted(x, weight, bias)
        return Product.apply(x, weight) if self.which == "function" else product(x, weight)


def foreign_functions(run: Run) -> Any:
    found = {}
    for which in ("script", "function", "operator"):
        model = run.sharded(built(lambda which=which: Foreign(which)))
        found[which] = _trained(run, model)
    return found


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(96, SIZE)
        self.part = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.part(self.emb(tokens))


def scripted_parts(run: Run) -> Any:
    """Modules of TorchScript, whose code sees no sharded weight: theirs stay whole."""
    model = run.sharded(built(Scripted))
    _trained(run, model)
    model.part = seeded(lambda: torch.jit.script(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU())))
    return _trained(run, model)


class Shapes(torch.nn.Module):
    """What takes other kernels by shapes and strides: bits are those of plain torch."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.a, self.which = torch.nn.Linear(SIZE, SIZE), which
        self.emb = torch.nn.Embedding(96, SIZE)
        self.bilinear = torch.nn.Bilinear(SIZE, SIZE, 8)
        self.attention = torch.nn.MultiheadAttention(SIZE, 4, batch_first=True)
        self.layer = torch.nn.TransformerEncoderLayer(SIZE, 4, 128, 0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        if self.which == "column":
            return self.a(x[:, :1]) + self.a(x.transpose(0, 1)[:1].transpose(0, 1))
        if self.which == "functional":
            return F.linear(x[:, :1], self.a.weight, self.a.bias) + x[:, 1:2] @ self.a.weight
        if self.which == "strided":
            turned = self.a(x.flatten(0, 1).t().contiguous().t())
            return self.a(x.transpose(0, 1)).flatten(0, 1) + turned
        if self.which == "twice":
            return torch.einsum("bsk,fk,gf->bsg", x, self.a.weight, self.a.weight)
        if self.which == "bilinear":
            return self.bilinear(x, x.tanh())
        if self.which == "layer":
            return self.layer(x)
        return self.attention(x, x, x, need_weights=False)[0]


def shapes(run: Run) -> Any:
    found = {}
    for which in ("column", "functional", "strided", "twice", "bilinear", "attention", "layer"):
        model = run.sharded(built(lambda which=which: Shapes(which)))
        found[which] = _trained(run, model)
        model.eval()
        with torch.no_grad():
            found[which + ", eval"] = as_bytes(model(ids(9)))
        if which != "functional":  # which torch takes apart otherwise for a subclass of Tensor: other last bits
            with torch.inference_mode():
                found[which + ", inference"] = as_bytes(model(ids(9)))
    return found


class Masked(torch.nn.Module):
    """Encoders, which take fast paths without gradients: padding is zero behind some, and may be NaN behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(96, SIZE)
        layer = torch.nn.TransformerEncoderLayer(SIZE, 4, 128, 0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.plainly = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.layer = layer
        self.transformer = torch.nn.Transformer(SIZE, 4, 1, 1, 128, 0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor, all_padded: bool = False) -> torch.Tensor:
        x = self.emb(tokens)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[0, 3:] = True
        if all_padded:
            mask[1] = True
        outputs = [module(x, src_key_padding_mask=mask) for module in (self.encoder, self.plainly, self.layer)]
        outputs.append(self.transformer(x, x, src_key_padding_mask=mask, memory_key_padding_mask=mask))
        return torch.cat([self.encoder(x), *outputs])


def masks(run: Run) -> Any:
    model = run.sharded(built(Masked))
    _trained(run, model)
    model.eval()
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            outputs += [model(ids(9), all_padded).detach().nan_to_num(7.0) for all_padded in (False, True)]
    return [as_bytes(output) for output in outputs]


class Products(torch.nn.Module):
    """Two layers, for other kinds of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(SIZE, 48)
        self.down = torch.nn.Linear(48, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def _rows(number: int, count: int) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(number))


def nested_inputs(run: Run) -> Any:
    weights = []
    for layout in (torch.jagged, torch.strided):
        model = run.sharded(built(Products))

        def loss(model: Any, number: int, layout: torch.layout = layout) -> torch.Tensor:
            x = torch.nested.nested_tensor([_rows(number, 3), _rows(number + 50, 5)], layout=layout)
            return model(x).to_padded_tensor(0.0).square().mean()

        run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        weights.append(run.weights(model))
    return weights


def derivatives_forwards(run: Run) -> Any:
    """Train by dual numbers, and transform a model whose parameters are all replaced by plain ones."""
    model = run.sharded(built(Products))

    def loss(model: Any, number: int) -> torch.Tensor:
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(_rows(number, 4), _rows(number + 50, 4)))
            return forward_ad.unpack_dual(y).tangent.square().mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    plain = {name: etp.whole(parameter).detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.grad(lambda held: torch.func.functional_call(model, held, (_rows(7, 2),)).sum())(plain)
    return [as_bytes(value) for named in (plain, gradients) for value in named.values()]


# --- strides


class Image(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.second = torch.nn.ConvTranspose2d(32, 16, 3)
        self.turned = torch.nn.Linear(SIZE, SIZE)
        self.turned.weight = torch.nn.Parameter((torch.randn(SIZE, SIZE) / 8).t())
        self.experts = torch.nn.Parameter(torch.randn(4, SIZE, SIZE).transpose(1, 2) / 8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        y = self.turned(x.flatten(1)[:, :SIZE])
        return x.square().mean() + (y @ self.experts[1]).square().mean() + (y @ self.experts[2].t()).square().mean()


def images(number: int) -> torch.Tensor:
    return torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(number))


def strides(run: Run) -> Any:
    model = run.sharded(built(Image))
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, loss=lambda model, number: model(images(number)))
    run.backward(model, lambda model, number: model(images(number)))
    kept = [(name, each.stride(), each.grad.stride()) for name, each in model.named_parameters()]
    state = {name: each.stride() for name, each in model.state_dict().items()}
    second = {name: each.stride() for name, each in copy.deepcopy(model).named_parameters()}
    moments = [optimizer.state[each]["exp_avg"].stride() for each in model.parameters()]
    return run.weights(model), run.gradients(model), kept, state, second, moments
