"""plan(): its arguments and errors, and the properties of a Plan."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy
import pytest
import tessera
import torch
from dtypes import DTYPES, NAMES
from tessera import InvalidArgumentError, Layout, Mesh, Replicate, Shard, plan


def test_the_table_has_every_dtype() -> None:
    assert sorted(NAMES) == sorted(tessera._core.dtypes())


@pytest.fixture
def rows_to_columns() -> tessera.Plan:
    """Ranks 0 and 1 have two rows each, ranks 1 to 3 want two columns each."""
    return plan((4, 6), "f32", "2:S0", "3@1-3:S1")


@pytest.mark.parametrize(("name", "numpy_type", "torch_type"), DTYPES, ids=NAMES)
def test_dtypes_of_every_library_are_understood(name: str, numpy_type: Any, torch_type: torch.dtype) -> None:
    given = [name, torch_type]
    if numpy_type is not None:
        given += [numpy_type, numpy.dtype(numpy_type)]
    for dtype in given:
        made = plan((4, 8), dtype, "2:S0", "1:R")
        assert made.dtype == name
        assert made.stats["bytes_delivered"] == 32 * tessera._core.bits_of(name) // 8


def test_layouts_may_be_text_or_values_or_pairs() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    text = "dp=2,tp=2:R,S1"
    given: list[Any] = [text, Layout(text), Layout(mesh, [Replicate(), Shard(1)]), (mesh, [Replicate(), Shard(-1)])]
    dumps = {plan((4, 6), "bf16", layout, "1:R").dump() for layout in given}
    assert len(dumps) == 1
    assert plan([4, 6], "bf16", text, "1:R").src == Layout(text)


def test_a_plan_says_what_it_is(rows_to_columns: tessera.Plan) -> None:
    assert rows_to_columns.shape == (4, 6)
    assert rows_to_columns.dtype == "f32"
    assert rows_to_columns.src == Layout("2:S0")
    assert rows_to_columns.dst == Layout("3@1-3:S1")
    assert repr(rows_to_columns) == "Plan(4x6 f32: 2:S0 -> 3@1-3:S1, 6 routes, 80 bytes moved)"


def test_routes_tell_who_gives_what_to_whom(rows_to_columns: tessera.Plan) -> None:
    told = [(route.src, route.dsts, route.kind, route.region, route.bytes) for route in rows_to_columns.routes]
    assert told == [
        (0, [1], "p2p", "[0:2][0:2]", 16),
        (0, [2], "p2p", "[0:2][2:4]", 16),
        (0, [3], "p2p", "[0:2][4:6]", 16),
        (1, [1], "local", "[2:4][0:2]", 16),
        (1, [2], "p2p", "[2:4][2:4]", 16),
        (1, [3], "p2p", "[2:4][4:6]", 16),
    ]
    assert repr(rows_to_columns.routes[0]) == "Route(0 -> 1: [0:2][0:2], 16 bytes)"
    (route,) = plan((4,), "i8", "1:R", "2@1-2:R").routes
    assert (route.kind, route.dsts, route.bytes) == ("multicast", [1, 2], 4)


def test_stats_count_bytes(rows_to_columns: tessera.Plan) -> None:
    assert rows_to_columns.stats == {
        "bytes_delivered": 96,
        "bytes_moved": 80,
        "bytes_lower_bound": 80,
        "bytes_between_hosts": 0,
        "max_egress": 48,
        "max_egress_lower_bound": 48,
        "reduction_bytes": 0,
        "routes": 6,
    }
    assert rows_to_columns.egress() == [(0, 48), (1, 32)]
    reduced = plan((4, 6), "f32", "2:Psum", "2@2-3:S0")
    assert reduced.stats["reduction_bytes"] == 96  # each element is read once from the other rank
    assert reduced.stats["bytes_moved"] == 96


def test_dump_and_explain_are_for_people(rows_to_columns: tessera.Plan) -> None:
    assert "route local 1 -> 1 [2:4][0:2] 16\n" in rows_to_columns.dump()
    words = rows_to_columns.explain()
    assert "from 2:S0" in words
    assert re.search(r"moved +80 B", words)


@pytest.mark.parametrize(
    ("shape", "src", "dst"),
    [((4, 6), "2:S0", "3@1-3:S1"), ((), "2:Psum", "1@2:R"), ((5,), "2,2:Pmax,S0", "3@2-4:S0"), ((0, 3), "2:S0", "1:R")],
)
def test_json_has_what_is_documented(shape: tuple[int, ...], src: str, dst: str) -> None:
    made = plan(shape, "f32", src, dst)
    read = json.loads(made.to_json())
    assert set(read) == {"shape", "dtype", "routes", "reductions", "stats"}
    assert read["shape"] == list(shape)
    assert read["dtype"] == "f32"
    assert read["stats"] == made.stats
    assert len(read["routes"]) == len(made.routes)
    for told, route in zip(read["routes"], made.routes, strict=True):
        assert (told["src"], told["dsts"], told["kind"], told["bytes"]) == (
            route.src,
            route.dsts,
            route.kind,
            route.bytes,
        )
        extents = [sum(stop - start for start, stop in dim) for dim in told["region"]]
        assert len(extents) == len(shape)
        assert 4 * math.prod(extents) == route.bytes
    for reduction in read["reductions"]:
        assert set(reduction) == {"op", "region", "owner", "peers"}
        assert reduction["owner"] in reduction["peers"]
        assert reduction["op"] == src.partition("P")[2].partition(",")[0]
    assert bool(read["reductions"]) == ("P" in src)


def test_the_picture_is_svg_and_what_a_notebook_shows(rows_to_columns: tessera.Plan) -> None:
    svg = rows_to_columns.to_svg()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "2:S0" in svg
    assert rows_to_columns._repr_html_() == svg  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shape", "dtype", "src", "dst", "said"),
    [
        ((4,), "f31", "2:S0", "1:R", "f31"),
        ((4,), "f32", "2:S0", "R", 'layout "R"'),
        ((4,), "f32", "2:S1", "1:R", "there is no dim 1"),
        ((-4,), "f32", "2:S0", "1:R", "sizes are 0 or more"),
        ((4,), "f32", "2:R,R", "1:R", "2:R,R"),
        ((4,), "f32", 5, "1:R", "layout 5"),
        ((4,), "f32", "2:R", "2:Psum", '"2:Psum" is Partial'),
        ((4,), "bool", "2:Psum", "1:R", "bool cannot be reduced"),
        ((4,), "f8_e4m3", "2:Pmax", "1:R", "f8_e4m3 cannot be reduced"),
        ((4,), "i32", "2:Pavg", "1:R", "i32 cannot be reduced by avg"),
        ((4,), "c64", "2:Pmin", "1:R", "c64 cannot be reduced by min"),
        ((4,), "f32", "2,2:Psum,Pmax", "1:R", "Pmax"),
        ((6,), "f4", "2:S0", "1:R", "cut inside a byte"),
        ((3,), "f4", "1:R", "1:R", "ends in the middle of a byte"),
        ((8,), "f32", "2:G0[0;3;9]", "1:R", "G0"),
    ],
)
def test_what_cannot_be_planned_is_refused(shape: tuple[int, ...], dtype: str, src: Any, dst: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        plan(shape, dtype, src, dst)
