#!/usr/bin/env python3
"""Writes the table of PyTorch's own shard layouts that src/layout/torch_table_test.cc reads.

    python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 numpy
    .venv/bin/python scripts/torch_layout_table.py > src/layout/testdata/torch_layouts.tsv

Every entry comes from DTensor itself: one process plays every rank of a mesh in turn over the fake process group and
distributes an arange tensor with `distribute_tensor(..., src_data_rank=None)`; the values in its local tensor say which
elements it owns. What a rank owns along one dim is asked for a 1-d tensor of that dim's size, so that the table has it
for empty local tensors too. Two more voices must agree or the script stops: the local shape and the offset of
`compute_local_shape_and_global_offset`, and the local values of the whole tensor against the product of the dims.

A few cases come from FSDP2 (`fully_shard`) over a tensor-parallel parameter, with the placements that it gives. Where
what FSDP2 put on a rank is not what those placements mean to DTensor (it happens for uneven sizes), DTensor's
meaning is in the table and a comment line shows both.

A line of the table: shape, layout, then one field for each rank in the mesh's row-major order, tab-separated. A field is
the local shape followed by the owned intervals of each dim: "3x4[0:2,5:6][0:4]"; "scalar" for 0-d.
The output is the same in every run.
"""

import itertools
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 13, 16, 17)
AXIS_NAMES = ("pp", "dp", "tp")


def placement_text(placement):
    if isinstance(placement, _StridedShard):
        return f"S{placement.dim}*{placement.split_factor}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return f"P{placement.reduce_op}"
    return "R"


def shape_text(shape):
    return "x".join(map(str, shape)) if len(shape) else "scalar"


def layout_text(mesh_shape, ranks, placements):
    names = AXIS_NAMES[-len(mesh_shape):]
    axes = ",".join(f"{name}={size}" for name, size in zip(names, mesh_shape))
    at = "" if ranks == tuple(range(len(ranks))) else "@" + ",".join(map(str, ranks))
    return f"{axes}{at}:{','.join(map(placement_text, placements))}"


def interval_text(indices):
    """[0, 1, 5] as "[0:2,5:6]"."""
    assert indices == sorted(set(indices)), f"torch's local order is not ascending: {indices}"
    runs = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return "[" + ",".join(f"{begin}:{end}" for begin, end in runs) + "]"


def local_values(shape, mesh, placements):
    """The local part of an arange tensor of that shape. Which elements lie where does not depend on Partial."""
    count = 1
    for size in shape:
        count *= size
    whole = torch.arange(count).reshape(shape)
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    return distribute_tensor(whole, mesh, plain, src_data_rank=None).to_local()


def along(placements, dim):
    """The placements that concern one dim, as those of a 1-d tensor."""
    def flat(p):
        if isinstance(p, _StridedShard) and p.dim == dim:
            return _StridedShard(0, split_factor=p.split_factor)
        return Shard(0) if isinstance(p, Shard) and p.dim == dim else Replicate()
    return [flat(p) for p in placements]


def rank_field(shape, mesh, placements):
    values = local_values(shape, mesh, placements)
    local_shape, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    assert tuple(values.shape) == tuple(local_shape), (shape, placements, values.shape, local_shape)
    owned = [local_values((size,), mesh, along(placements, d)).tolist() for d, size in enumerate(shape)]
    assert [len(indices) for indices in owned] == list(local_shape), (shape, placements, owned, local_shape)
    assert all(indices[0] == first for indices, first in zip(owned, offset) if indices), (shape, placements, offset)
    product = [0]
    for indices, size in zip(owned, shape):
        product = [base * size + index for base in product for index in indices]
    assert values.flatten().tolist() == product, (shape, placements)
    return shape_text(local_shape) + "".join(map(interval_text, owned))


def fsdp_case(shape, mesh):
    """FSDP2 on the first axis over a parameter that is Shard(0) on the second: its placements and its rows."""
    module = torch.nn.Module()
    rows = torch.arange(shape[0], dtype=torch.float32)[:, None].expand(shape).contiguous()
    tensor = distribute_tensor(rows, mesh["tp"], [Shard(0)], src_data_rank=None)
    module.weight = torch.nn.Parameter(tensor)
    fully_shard(module, mesh=mesh["dp"])
    weight = module.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    owned = [local[:, 0].long().tolist() if local.numel() else []] + [list(range(size)) for size in shape[1:]]
    return list(weight.placements), shape_text(local.shape) + "".join(map(interval_text, owned))


def one_axis_cases():
    for size, k in itertools.product(SIZES, (1, 2, 3, 4, 5, 7, 8)):
        yield (size,), (k,), [Shard(0)]
    for size, k, factor in itertools.product((0, 1, 5, 8, 13, 24, 31), (2, 3, 4), (1, 2, 3, 5)):
        yield (size,), (k,), [_StridedShard(0, split_factor=factor)]
    for shape in ((), (1,), (4, 0), (0, 3)):
        yield shape, (3,), [Replicate()]
        yield shape, (3,), [Partial("sum")]


def nested_cases():
    for mesh_shape, size in itertools.product(((2, 2), (2, 3), (3, 2), (4, 2)), (0, 1, 3, 7, 8, 11, 24)):
        outer, inner = mesh_shape
        yield (size,), mesh_shape, [Shard(0), Shard(0)]
        yield (size,), mesh_shape, [_StridedShard(0, split_factor=inner), Shard(0)]
        yield (size,), mesh_shape, [Shard(0), _StridedShard(0, split_factor=outer)]
        yield (size,), mesh_shape, [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    for mesh_shape, size in itertools.product(((2, 2, 2), (3, 2, 2), (2, 1, 3)), (0, 2, 7, 12, 13, 25)):
        a, b, c = mesh_shape
        yield (size,), mesh_shape, [Shard(0), Shard(0), Shard(0)]
        yield (size,), mesh_shape, [_StridedShard(0, split_factor=b * c), _StridedShard(0, split_factor=c), Shard(0)]
        yield (size,), mesh_shape, [_StridedShard(0, split_factor=c), Replicate(), Shard(0)]
        yield (size,), mesh_shape, [Shard(0), _StridedShard(0, split_factor=c), Shard(0)]


def random_cases(count):
    rng = random.Random(20260)
    meshes = ((4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (3, 1, 2))
    for _ in range(count):
        shape = tuple(rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 9)) for _ in range(rng.randint(0, 4)))
        mesh_shape = rng.choice(meshes)
        kinds = ("shard", "shard", "strided", "replicate", "partial") if shape else ("replicate", "partial")
        placements = []
        for _ in mesh_shape:
            kind = rng.choice(kinds)
            dim = rng.randrange(len(shape)) if shape else 0
            placements.append({"shard": Shard(dim), "strided": _StridedShard(dim, split_factor=rng.randint(1, 4)),
                               "replicate": Replicate(), "partial": Partial("sum")}[kind])
        yield shape, mesh_shape, placements


def all_cases():
    """(shape, mesh shape, ranks, placements), each once."""
    seen = set()
    for shape, mesh_shape, placements in itertools.chain(one_axis_cases(), nested_cases(), random_cases(400)):
        world = torch.Size(mesh_shape).numel()
        ranks = tuple(range(world))
        if len(seen) % 10 == 9:  # some meshes in another order
            ranks = tuple((i * (world - 1) + 1) % world for i in range(world))
        key = (shape, layout_text(mesh_shape, ranks, placements))
        if key not in seen:
            seen.add(key)
            yield shape, mesh_shape, ranks, placements


def as_rank(rank, world):
    """Makes this process the given rank of a world of that size."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world)


def fsdp_line(shape, mesh_shape):
    """A line of the table, and remarks on ranks where FSDP2 and the placements that it names disagree."""
    world = mesh_shape[0] * mesh_shape[1]
    fields, remarks = [], []
    for rank in range(world):
        as_rank(rank, world)
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape), mesh_dim_names=("dp", "tp"))
        placements, made = fsdp_case(shape, mesh)
        layout = layout_text(mesh_shape, tuple(range(world)), placements)
        fields.append(rank_field(shape, mesh, placements))
        if made != fields[-1]:
            remarks.append(f"FSDP2 gives rank {rank} of {shape_text(shape)} {layout} {made}, DTensor {fields[-1]}")
    return [shape_text(shape), layout] + fields, remarks


def main():
    cases = list(all_cases())
    fields = {}  # case number -> {rank: field}
    for world in sorted({len(ranks) for _, _, ranks, _ in cases}):
        for rank in range(world):
            as_rank(rank, world)
            meshes = {}
            for number, (shape, mesh_shape, ranks, placements) in enumerate(cases):
                if len(ranks) != world:
                    continue
                key = (mesh_shape, ranks)
                if key not in meshes:
                    meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(mesh_shape))
                fields.setdefault(number, {})[rank] = rank_field(shape, meshes[key], placements)

    lines = []
    for number, (shape, mesh_shape, ranks, placements) in enumerate(cases):
        by_rank = fields[number]
        lines.append([shape_text(shape), layout_text(mesh_shape, ranks, placements)] + [by_rank[r] for r in ranks])

    remarks = []
    for mesh_shape, shape in itertools.product(((2, 2), (2, 4), (4, 2), (3, 2)), ((16, 3), (13, 2), (7, 1), (3, 2))):
        line, remark = fsdp_line(shape, mesh_shape)
        lines += [line] if line not in lines else []
        remarks += remark

    out = sys.stdout
    version = torch.__version__.split("+")[0]
    out.write(f"# Made by scripts/torch_layout_table.py from torch {version}: {len(lines)} layouts.\n")
    out.write("# shape, layout, then what each rank of the mesh has: local shape and owned intervals of each dim.\n")
    for remark in remarks:
        out.write(f"# {remark}\n")
    for line in lines:
        out.write("\t".join(line) + "\n")


if __name__ == "__main__":
    main()
