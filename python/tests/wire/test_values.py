"""Mesh, placements and Layout are values: compared, hashed, printed, copied, pickled; errors say what is wrong and
where."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import tessera
from hypothesis import given
from hypothesis import strategies as some
from tessera import Layout, Mesh, Partial, RaggedShard, Replicate, Shard, StridedShard

# What makes each value, and what it is printed as. (Text: values that outlive the interpreter look like leaks.)
VALUES = {
    "Replicate()": "Replicate()",
    "Shard(0)": "Shard(0)",
    "Shard(dim=-1)": "Shard(-1)",
    "StridedShard(0, 2)": "StridedShard(0, 2)",
    "StridedShard(1, split_factor=3)": "StridedShard(1, 3)",
    "RaggedShard(0, [0, 3, 3, 8])": "RaggedShard(0, (0, 3, 3, 8))",
    "Partial()": "Partial('sum')",
    "Partial('max')": "Partial('max')",
    "Layout('dp=2,tp=2:R,S0')": "Layout('dp=2,tp=2:R,S0')",
    "Layout('dp=2,tp=2@0,2,1,3:S0*2,S0')": "Layout('dp=2,tp=2@0,2,1,3:S0*2,S0')",
    "Mesh((2, 2))": "Mesh(2,2)",
    "Mesh((2, 2), names=('dp', 'tp'))": "Mesh(dp=2,tp=2)",
    "Mesh((2,), ranks=(4, 5))": "Mesh(2@4-5)",
}


def made(text: str) -> Any:
    return eval(text, vars(tessera))


@pytest.mark.parametrize("text", VALUES)
def test_a_value_is_printed_copied_and_pickled(text: str) -> None:
    value = made(text)
    assert repr(value) == VALUES[text]
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert hash(other) == hash(value)
        assert type(other) is type(value)
    if not isinstance(value, Mesh):
        assert made(repr(value)) == value


def test_values_differ() -> None:
    for one in VALUES:
        for other in VALUES:
            assert (made(one) == made(other)) == (one == other), (one, other)
        for stranger in (1, None, "Shard(0)", object()):
            assert made(one) != stranger
    assert len({made(text) for text in VALUES}) == len(VALUES)


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Mesh((2,)).names = ("a",)  # type: ignore[misc]


def test_a_mesh() -> None:
    mesh = Mesh((2, 3), names=("dp", "tp"), ranks=range(10, 16))
    assert (mesh.shape, mesh.names, mesh.ranks) == ((2, 3), ("dp", "tp"), (10, 11, 12, 13, 14, 15))
    assert (mesh.ndim, mesh.size, len(mesh)) == (2, 6, 6)
    assert mesh.coordinate(14) == (1, 1)
    assert mesh.coordinate(3) is None
    assert 14 in mesh
    assert 3 not in mesh


def test_a_layout() -> None:
    layout = Layout(Mesh((2, 2), names=("dp", "tp")), [Replicate(), Shard(-1)])
    assert layout == Layout("dp=2,tp=2:R,S-1")
    assert layout.bind((4, 5)) == Layout("dp=2,tp=2:R,S1")
    assert layout.placements == (Replicate(), Shard(-1))
    assert layout.shifted(4).mesh.ranks == (4, 5, 6, 7)
    assert layout.with_ranks([3, 2, 1, 0]) == Layout("dp=2,tp=2@3,2,1,0:R,S-1")
    assert layout.local_shape((4, 5), 1) == (4, 2)
    assert layout.owned((4, 5), 1) == [((0, 4),), ((3, 5),)]
    assert layout.owned((4, 5), 9) is None
    assert Layout("2:R").owned((), 0) == []  # one element


# --- text


names = some.sampled_from(["", "dp", "tp", "dp_shard", "a-b", "x.y", "R", "S0"])


@some.composite
def layouts(draw: some.DrawFn) -> Layout:
    sizes = draw(some.lists(some.integers(1, 3), min_size=1, max_size=4))
    labels = draw(some.lists(names, min_size=len(sizes), max_size=len(sizes)))
    labels = [label if label not in labels[:i] else "" for i, label in enumerate(labels)]
    count = 1
    for size in sizes:
        count *= size
    ranks = draw(some.lists(some.integers(0, 200), min_size=count, max_size=count, unique=True))
    dims = some.integers(-3, 5)
    placement = some.one_of(
        some.builds(Replicate),
        some.builds(Shard, dims),
        some.builds(StridedShard, dims, some.integers(1, 9)),
        some.builds(Partial, some.sampled_from(["sum", "avg", "min", "max", "product"])),
        some.builds(RaggedShard, dims, some.lists(some.integers(0, 9), min_size=2, max_size=4).map(sorted)),
    )
    return Layout(Mesh(sizes, labels, ranks), [draw(placement) for _ in sizes])


@given(layouts())
def test_text_says_all_of_a_layout(layout: Layout) -> None:
    assert Layout(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert pickle.loads(pickle.dumps(layout.mesh)) == layout.mesh
    assert eval(repr(layout)) == layout


@pytest.mark.parametrize(
    ("text", "at", "why"),
    [
        ("", 1, "expected an axis"),
        ("dp=2", 5, "expected"),
        ("dp=x:R", 4, 'a size of 1 to 1048576, got "x"'),
        ("dp=2,tp=0:R,R", 9, "a size of 1"),
        ("dp=2:Q", 6, "expected a placement (R, S<dim>, S<dim>*<factor>, G<dim>[<bound>;...], Psum|Pavg|Pmin|Pmax|"),
        ("dp=2:S", 7, "expected a dim"),
        ("2:S0*0", 6, "a split factor of at least 1"),
        ("2@0,x:R", 5, 'got "x"'),
        ("2:R,", 5, "got the end"),
        ("2:R junk", 4, "junk"),
    ],
)
def test_bad_text_is_shown_with_its_position(text: str, at: int, why: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(f'layout "{text}" at {at}: ')) as caught:
        Layout(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Mesh((2, 2), ranks=[0, 1, 1, 2]), "rank 1 is twice in the mesh"),
        (lambda: Mesh((2, 2), ranks=[0, 1, 2]), "3"),
        (lambda: Mesh((2, 0)), "mesh axis 1 has size 0"),
        (lambda: Mesh(()), "a mesh of 0 axes: it must have 1 to 8"),
        (lambda: Mesh((2,), names=("a", "b")), "mesh of 1 axes: 2 names are given"),
        (lambda: Mesh((2, 2), names=("a", "a")), 'two mesh axes are named "a"'),
        (lambda: Mesh((2,), names=("a b",)), "letters, digits, '_', '-' and '.'"),
        (lambda: Layout(Mesh((2,)), []), "0 placements for a mesh of 1 axes"),
        (lambda: Layout("2:S3").bind((4, 4)), 'placement "S3" on shape 4x4: there is no dim 3 among 2'),
        (lambda: Layout("2:G0[0;3;5]").bind((6,)), "the bounds go from 0 to 5 where the dim goes from 0 to 6"),
        (lambda: Layout("2,2:Psum,Pmax").bind((4,)), "one tensor has one operation"),
        (lambda: Partial("median"), 'Partial("median"): sum, avg, min, max and product are possible'),
        (lambda: StridedShard(0, 0), "split_factor 0"),
    ],
)
def test_a_value_that_makes_no_sense_says_why(make: Any, why: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(why)):
        make()


class Grid:
    """An object that is not a mesh of any library."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Layout(Grid(), [Shard(0)]), r"mesh <.*>: give a tessera\.Mesh or torch's DeviceMesh, not .*\.Grid"),
        (lambda: Layout([2, 2], [Shard(0)]), r"mesh \[2, 2\]: give .*, not builtins\.list"),
        (
            lambda: Layout(Mesh((2,)), [5]),
            r"placement 5 \(builtins\.int\) is not one that Tessera knows: Replicate, Shard",
        ),
        (lambda: Layout(Mesh((2,)), [Grid()]), r"placement <.*> \(.*\.Grid\) is not one that Tessera knows"),
        (lambda: tessera.layout_of(5), r"a builtins\.int has no layout of its own"),  # type: ignore[arg-type]
        (lambda: tessera.plan((4,), "f33", "2:R", "2:R"), "dtype 'f33' is not one that Tessera moves: f64, f32"),
        (lambda: tessera.plan((4,), "f32", 7, "2:R"), "layout 7: give a tessera.Layout, its text"),  # type: ignore[arg-type]
    ],
)
def test_a_stranger_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        make()


@pytest.mark.parametrize("written", ["f32", "F32", "float32", "fp32", "torch.float32"])
def test_a_dtype_may_be_written_as_the_command_takes_it(written: str) -> None:
    assert tessera.plan((4,), written, "2:R", "2:R").dtype == "f32"
