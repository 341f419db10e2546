"""Maps that are learned from loaders: writing by the map is what the loader does, bit for bit."""

import math
import random

import pytest
import torch
from loaders import LOADERS, Loading
from tessera import InvalidArgumentError, UnimplementedError, engines


def filled(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def values(checkpoint, seed=0):
    return {name: filled(shape, dtype, seed + i) for i, (name, (shape, dtype)) in enumerate(checkpoint.items())}


def tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_writing_by_the_map_is_what_the_loader_does(name, rank):
    loading: Loading = LOADERS[name](rank, 2)
    model = loading.model
    before = {key: (tensor, tensor.data_ptr(), tensor.clone()) for key, tensor in tensors(model).items()}
    learned = engines.learn_map(model, loading.checkpoint)
    for key, tensor in tensors(model).items():
        old, address, value = before[key]
        assert tensor is old and tensor.data_ptr() == address and torch.equal(tensor, value)
    assert dict(learned.computed) == {} and learned.by_loader == ()

    checkpoint = values(loading.checkpoint)
    mine = {key: tensor.detach().clone() for key, tensor in tensors(model).items()}
    learned.install_from(mine, checkpoint)
    model.load_weights(iter(checkpoint.items()))
    for key, tensor in tensors(model).items():
        assert torch.equal(mine[key], tensor), key
    assert dict(learned.untouched) == loading.untouched
    assert set(learned.unused) == loading.unused


@pytest.mark.parametrize("name", LOADERS)
def test_ranks_together_take_no_more_than_the_checkpoint_and_what_is_replicated(name):
    loadings = [LOADERS[name](rank, 2) for rank in range(2)]
    taken = sum(engines.learn_map(each.model, each.checkpoint).elements for each in loadings)
    whole = sum(math.prod(shape) for shape, _ in loadings[0].checkpoint.values())
    unused = sum(math.prod(loadings[0].checkpoint[name][0]) for name in loadings[0].unused)
    assert taken == whole + loadings[0].replicated - unused


class Module(torch.nn.Module):
    """Its loader is given."""

    def __init__(self, load, **parameters):
        super().__init__()
        for name, shape in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self._load = load

    def load_weights(self, weights):
        self._load(self, dict(weights))


F32 = torch.float32


def test_what_is_computed_is_named_with_the_operation_and_its_tensors():
    def load(module, weights):
        module.a.copy_(-torch.exp(weights["a_log"]))
        module.b.copy_(weights["b"])

    model = Module(load, a=(4,), b=(4,))
    learned = engines.learn_map(model, {"a_log": ((4,), F32), "b": ((4,), F32), "more": ((2,), F32)})
    assert set(learned.computed) == {"a"} and "aten.neg" in learned.computed["a"]
    assert learned.by_loader == ("a_log",) and learned.unused == ("more",)
    assert [piece.parameter for piece in learned.pieces] == ["b"]


def test_what_is_computed_becomes_a_piece_of_what_the_loader_has_made():
    def load(module, weights):
        module.a.copy_(-torch.exp(weights["a_log"]))
        module.b.copy_(weights["b"])

    checkpoint = {"a_log": torch.randn(4, 2), "b": torch.randn(4)}
    model = Module(load, a=(4, 2), b=(4,))
    known = engines.learn_map(model, checkpoint)
    learned = known.with_loader(checkpoint)
    assert {each.tensor for each in learned.slices} == {"a_log", "b"} and known.nbytes == learned.nbytes - 32
    [result] = learned.results
    assert result.shape == (4, 2) and learned.key(result) not in learned.staging()
    with pytest.raises(InvalidArgumentError, match="is not a slice of this map"):
        learned.map(learned.key(result))

    staged = learned.staging()
    for key, memory in staged.items():
        memory.copy_(checkpoint[learned.map(key).name])
    staged[learned.key(result)] = -torch.exp(checkpoint["a_log"])
    mine = {"a": torch.zeros(4, 2), "b": torch.zeros(4)}
    learned.install(mine, staged)
    model.load_weights(iter(checkpoint.items()))
    assert torch.equal(mine["a"], model.a) and torch.equal(mine["b"], model.b)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(2),
        lambda p: p.add_(torch.ones(4)),
        lambda p: p[1:].fill_(1),
        lambda p: p.copy_(p.flip(0)),
    ],
)
def test_what_is_changed_after_it_was_loaded_is_computed(change):
    def load(module, weights):
        module.a.copy_(weights["a"])
        change(module.a)

    learned = engines.learn_map(Module(load, a=(4,)), {"a": ((4,), F32)})
    assert set(learned.computed) == {"a"} and learned.by_loader == ("a",)


def test_two_tensors_in_one_place_are_refused_by_name():
    def load(module, weights):
        module.embedding.copy_(weights["embed"])
        module.embedding.copy_(weights["lm_head"])

    checkpoint = {"embed": ((4, 2), F32), "lm_head": ((4, 2), F32)}
    with pytest.raises(InvalidArgumentError, match="embedding: tensors embed and lm_head are both loaded"):
        engines.learn_map(Module(load, embedding=(4, 2)), checkpoint)


def test_a_tensor_that_is_loaded_twice_counts_once():
    def load(module, weights):
        module.a.copy_(weights["a"])
        module.a.copy_(weights["a"])

    learned = engines.learn_map(Module(load, a=(4,)), {"a": ((4,), F32)})
    assert len(learned.pieces) == 1


def test_a_loader_that_reads_values_is_refused_and_the_model_is_as_it_was():
    def load(module, weights):
        if weights["a"].sum().item() > 0:
            module.a.copy_(weights["a"])

    model = Module(load, a=(4,))
    kept = model.a
    with pytest.raises(UnimplementedError, match="needs values"):
        engines.learn_map(model, {"a": ((4,), F32)})
    assert model.a is kept and not model.a.is_meta


def test_an_error_of_the_loader_is_passed_on_and_the_model_is_as_it_was():
    model = Module(lambda module, weights: weights["b"], a=(4,))
    with pytest.raises(KeyError, match="b"):
        engines.learn_map(model, {"a": ((4,), F32)})
    assert not model.a.is_meta


def test_a_parameter_that_is_replaced_by_a_view_of_the_checkpoint():
    def load(module, weights):
        module.a.data = weights["a"][2:].t()

    model = Module(load, a=(4, 3))
    learned = engines.learn_map(model, {"a": ((5, 4), F32)})
    checkpoint = {"a": filled((5, 4), F32, 1)}
    mine = {"a": torch.zeros(4, 3)}
    learned.install_from(mine, checkpoint)
    assert torch.equal(mine["a"], checkpoint["a"][2:].t())


def test_staged_pieces_and_views_of_the_place_itself_give_the_same():
    loading = LOADERS["fused"](1, 2)
    learned = engines.learn_map(loading.model, loading.checkpoint)
    checkpoint = values(loading.checkpoint)
    staged, mine = learned.staging(), {key: torch.zeros_like(each) for key, each in tensors(loading.model).items()}
    direct = {key: torch.zeros_like(each) for key, each in mine.items()}
    for key, memory in staged.items():
        part = learned.map(key)
        memory.copy_(checkpoint[part.name][part.source or ...])
    for piece in learned.pieces:
        piece.view(direct[piece.parameter]).copy_(staged[learned.key(piece.source)])
    learned.install(mine, staged)
    loading.model.load_weights(iter(checkpoint.items()))
    for key, tensor in tensors(loading.model).items():
        assert torch.equal(mine[key], tensor) and torch.equal(direct[key], tensor)
    with pytest.raises(InvalidArgumentError, match="not a slice"):
        learned.map("qkv#99")


@pytest.mark.parametrize("seed", range(60))
def test_random_views_that_are_copied(seed):
    """Loaders of random slices, transpositions, reshapes, concatenations and clones."""
    chance = random.Random(seed)
    shape = [chance.randint(1, 6) for _ in range(chance.randint(1, 4))]

    def changed(tensor, log):
        for _ in range(chance.randint(0, 5)):
            kind = chance.choice(["slice", "permute", "clone", "reshape", "cat", "select", "expand", "pad"])
            dim = chance.randrange(tensor.dim()) if tensor.dim() else 0
            if kind == "slice" and tensor.dim() and tensor.shape[dim] > 1:
                begin = chance.randrange(tensor.shape[dim])
                log.append((kind, dim, begin, chance.randint(1, 3)))
            elif kind == "permute" and tensor.dim():
                log.append((kind, chance.sample(range(tensor.dim()), tensor.dim())))
            elif kind == "reshape":
                log.append((kind, chance.choice([(-1,), (1, *tensor.shape), (*tensor.shape, 1)])))
            elif kind == "cat" and tensor.dim():
                log.append((kind, dim))
            elif kind == "select" and tensor.dim() > 1:
                log.append((kind, dim, chance.randrange(tensor.shape[dim])))
            elif kind == "expand" and tensor.dim() < 5:
                log.append((kind, chance.randint(1, 3)))
            elif kind == "pad" and tensor.dim():
                log.append((kind, chance.randint(0, 2), chance.randint(0, 2)))
            elif kind == "clone":
                log.append((kind,))
            else:
                continue
            tensor = applied(tensor, log[-1])
        return tensor

    log: list = []
    result = changed(torch.zeros(shape), log)

    def load(module, weights):
        tensor = weights["w"]
        for step in log:
            tensor = applied(tensor, step)
        module.a.copy_(tensor)

    model = Module(load, a=tuple(result.shape))
    learned = engines.learn_map(model, {"w": (tuple(shape), F32)})
    assert not learned.computed
    checkpoint = {"w": torch.arange(1, math.prod(shape) + 1, dtype=F32).reshape(shape)}
    mine = {"a": torch.zeros(result.shape)}
    learned.install_from(mine, checkpoint)
    model.load_weights(checkpoint.items())
    assert torch.equal(mine["a"], model.a), log


def applied(tensor, step):
    kind, *rest = step
    if kind == "slice":
        dim, begin, every = rest
        index = [slice(None)] * tensor.dim()
        index[dim] = slice(begin, None, every)
        return tensor[tuple(index)]
    if kind == "permute":
        return tensor.permute(*rest[0])
    if kind == "reshape":
        return tensor.reshape(rest[0])
    if kind == "cat":
        return torch.cat([tensor, tensor], dim=rest[0])
    if kind == "select":
        return tensor.select(*rest)
    if kind == "expand":
        return tensor.expand(rest[0], *tensor.shape)
    if kind == "pad":
        return torch.nn.functional.pad(tensor, tuple(rest))
    return tensor.clone()


@pytest.mark.parametrize("name", LOADERS)
def test_slices_that_are_cast_on_the_way_have_their_parameters_dtype(name):
    loading = LOADERS[name](0, 2)
    wide = {key: (shape, torch.float32) for key, (shape, _) in loading.checkpoint.items()}
    learned = engines.learn_map(loading.model, wide)
    cast = learned.cast_on_the_way()
    assert [each.ranges for each in cast.slices] == [each.ranges for each in learned.slices]
    for piece in cast.pieces:
        assert piece.source.dtype == cast.forms[piece.parameter].dtype
    checkpoint = values(wide)
    mine = {key: tensor.detach().clone() for key, tensor in tensors(loading.model).items()}
    staged = cast.staging()
    for key, memory in staged.items():
        part = cast.map(key)
        memory.copy_(checkpoint[part.name][part.source or ...])
    cast.install(mine, staged)
    loading.model.load_weights(iter(checkpoint.items()))
    assert all(torch.equal(mine[key], tensor) for key, tensor in tensors(loading.model).items())


def test_a_slice_for_parameters_of_two_dtypes_and_one_that_the_bus_cannot_cast_stay_as_they_are():
    model = torch.nn.Module()
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float64), ("c", torch.bfloat16)):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False))

    def load(weights):
        given = dict(weights)
        for name, source in (("a", "both"), ("b", "both"), ("c", "whole")):
            getattr(model, name).data.copy_(given[source])

    learned = engines.learn_map(model, {"both": ((4,), torch.float32), "whole": ((4,), torch.int32)}, load=load)
    assert {each.tensor: each.dtype for each in learned.cast_on_the_way().slices} == {
        "both": torch.float32,
        "whole": torch.int32,
    }
    assert all(piece.cast for piece in learned.cast_on_the_way().pieces)
