"""tessera.zeros, empty and share_."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tessera
from tessera import _core

torch = pytest.importorskip("torch")


def is_shared(tensor: Any) -> bool:
    return _core.in_shared_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4), 7])
def test_zeros_of_torch(dtype: Any, shape: Any) -> None:
    tensor = tessera.zeros(shape, dtype)
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == ((shape,) if isinstance(shape, int) else shape)
    assert tensor.is_contiguous()
    assert not tensor.view(torch.uint8).any() if tensor.numel() and tensor.ndim else True
    assert tensor.numel() == 0 or is_shared(tensor)


def test_zeros_of_numpy_and_by_name() -> None:
    array = tessera.empty((4, 2), np.float16)
    assert isinstance(array, np.ndarray) and array.dtype == np.float16 and array.shape == (4, 2)
    array[:] = 3
    assert _core.in_shared_memory(array.ctypes.data, array.nbytes)
    assert tessera.zeros(3, "bf16").dtype == torch.bfloat16  # torch is imported here
    assert tessera.zeros(3).dtype == torch.float32
    with pytest.raises(tessera.InvalidArgumentError, match=r"shape \(-1,\): sizes are 0 or more"):
        tessera.zeros(-1)
    for wrong in ("three", 2.5, (2, 1.0), None, torch.zeros(2)):
        with pytest.raises(tessera.InvalidArgumentError, match=r"shape .*: give whole numbers"):
            tessera.zeros(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [np.int64(3), (np.int32(3), 2), [np.uint8(3), True], np.array(3), torch.tensor(3)])
def test_zeros_takes_whatever_is_a_whole_number(shape: Any) -> None:
    assert tessera.zeros(shape).shape[:1] == (3,)


@pytest.mark.parametrize("shape", [(2,), (2, 4), (3, 2), (0, 6), (5, 0), 8])
def test_zeros_of_4_bit_elements(shape: Any) -> None:
    sizes = shape if isinstance(shape, tuple) else (shape,)
    for dtype in ("f4", torch.float4_e2m1fn_x2):
        tensor = tessera.zeros(shape, dtype)
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tuple(tensor.shape) == (*sizes[:-1], sizes[-1] // 2)


@pytest.mark.parametrize("shape", [3, (2, 1), (2, 3), (), (4, 1), (0, 3)])
def test_zeros_of_half_a_pair_are_refused(shape: Any) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"shape \(.*\): elements of f4 lie in pairs along the last"):
        tessera.zeros(shape, "f4")


def test_memory_goes_back_with_its_last_tensor() -> None:
    first = tessera.zeros(1 << 20)
    address = first.data_ptr()
    view = first[5:]
    del first
    assert is_shared(view)
    del view
    assert not _core.in_shared_memory(address, 4)


def test_share_moves_the_storage_under_views_ties_and_an_optimiser() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    view = model[0].weight.detach()[1:]
    state = model.state_dict()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)

    twin = copy.deepcopy(model)
    twin_optimiser = torch.optim.AdamW(twin.parameters(), lr=0.1)

    def steps(module: Any, optimiser: Any, share: bool) -> None:
        for _ in range(3):
            loss = module(x).square().sum()
            if share:
                assert tessera.share_(module) is module  # a backward is pending
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

    steps(model, optimiser, True)
    steps(twin, twin_optimiser, False)
    assert all(is_shared(parameter) for parameter in model.parameters())
    assert model[1].weight is model[0].weight
    assert view.data_ptr() == model[0].weight.data_ptr() + 16
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
        assert torch.equal(parameter, state[name])


def test_share_walks_a_dict_as_register_does() -> None:
    tensors = [torch.ones(3) for _ in range(6)]
    value = {
        "model": {"w": tensors[0], "deeper": {"w": tensors[1]}},
        "listed": [tensors[2], "text", (tensors[3], "1:R")],
        "laid out": (tensors[4], "1:S0", (3,)),
        "plain": tensors[5],
        "step": 3,
    }
    assert tessera.share_(value) is value
    assert all(is_shared(tensor) and tensor.tolist() == [1, 1, 1] for tensor in tensors)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"model": {"w": torch.from_numpy(np.zeros(3))}}, r"tensor model\.w: torch does not own its memory"),
        (
            {"listed": [torch.zeros(3), np.zeros(3)]},
            r"tensor listed\.1: share_\(\) moves storages of torch, not a numpy",
        ),
        ({"w": torch.zeros(3).to_sparse()}, r"tensor w: torch\.sparse_coo tensors cannot be moved"),
        (
            {"step": 3, "model": torch.nn.Linear(2, 2)},
            r"share_\(\): there is no tensor in what was given \(step, model",
        ),
        ([torch.zeros(3)], r"share_\(\) moves torch tensors, modules and dicts of tensors, not a builtins\.list"),
    ],
)
def test_share_refuses_by_name_and_moves_nothing(value: Any, why: str) -> None:
    owned = torch.zeros(3)
    if isinstance(value, dict) and "step" not in value:
        value = {"first": owned, **value}
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        tessera.share_(value)
    assert not is_shared(owned)


def test_share_refuses_memory_that_torch_does_not_own_and_moves_nothing() -> None:
    owned = torch.zeros(3)
    for foreign in (
        torch.from_numpy(np.zeros(3)),
        torch.frombuffer(bytearray(12), dtype=torch.float32),
        torch.zeros(3).share_memory_(),
    ):
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: torch does not own its memory"):
            tessera.share_({"owned": owned, "w": foreign})
    assert not is_shared(owned)
    with pytest.raises(tessera.InvalidArgumentError, match="not a builtins.int"):
        tessera.share_(3)
    with pytest.raises(tessera.InvalidArgumentError, match="meta device"):
        tessera.share_(torch.zeros(3, device="meta"))
    shared = tessera.share_(owned)
    address = shared.data_ptr()
    assert tessera.share_(owned).data_ptr() == address
    assert tessera.share_(torch.zeros(0)).numel() == 0
