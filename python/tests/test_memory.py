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
    with pytest.raises(tessera.InvalidArgumentError, match="3 elements of f4 are no whole number of bytes"):
        tessera.zeros(3, "f4")


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
