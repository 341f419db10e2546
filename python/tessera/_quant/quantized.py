"""The results of quantize(): codes and scales of a tensor, in a row plane, a column plane or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .. import _core
from .._arguments import sizes as sizes_of
from .._arguments import text, whole
from .._errors import InvalidArgumentError
from .._launch import launch
from .._tensors.blocks import Block
from .._tensors.foreign import numpy_dtype
from .._tensors.layouts import LayoutLike, as_layout
from .._tensors.location import Location, Source, refusal
from .._tensors.stacks import address_of, new_array
from .._tensors.torch import is_torch_tensor, torch_dtype

PLANES = ("row", "column")
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedPlane:
    """Codes and scales of one plane: NumPy arrays or torch tensors, like the quantised tensor.

    docs/formats/quantized.md has the shapes.
    """

    codes: Any
    """8-bit floats. Those of nvfp4 are uint8, two codes a byte, the even one in the low nibble."""
    scales: Any
    """Without padding. Those of fp8 are fp32; those of mxfp8 are uint8 that hold E8M0, those of nvfp4 hold E4M3."""
    amax: Any
    """The amax from which the scales of each matrix follow, in fp32. None if they follow only from their blocks."""
    _spec: _core.QuantSpec = field(repr=False)
    _name: str = field(repr=False)
    _shape: tuple[int, ...] = field(repr=False)  # of the tensor

    def gemm_scales(self) -> Any:
        """The scales as GEMMs on tensor cores read them: those of mxfp8 and nvfp4 padded with zeros and in tiles of
        128 x 4, those of fp8 by blocks with rows padded to a multiple of 4. One scale is itself."""
        rows, columns = self._shape[-2:]
        dtype, *shape = self._spec.plane_arrays(self._name, rows, columns)[2]
        made = new_array(is_torch_tensor(self.codes), (*self._shape[:-2], *shape), dtype)
        _core.gemm_scales(self._spec, self._name, *_matrices(self._shape), self._addresses(), address_of(made))
        return made

    def _addresses(self) -> _core.PlaneAddresses:
        amaxes = [] if self.amax is None else self.amax.reshape(-1).tolist()
        return _core.PlaneAddresses(address_of(self.codes), address_of(self.scales), amaxes)


class QuantizedTensor:
    """A matrix, or a stack of them, as 8- or 4-bit floats with scales: what quantize() gives."""

    def __init__(
        self,
        spec: _core.QuantSpec,
        shape: tuple[int, ...],
        planes: dict[str, QuantizedPlane],
        block: Block | None = None,
        *,
        layout: _core.Layout | None = None,
        global_shape: tuple[int, ...] | None = None,
    ) -> None:
        """Of this rank's part. `block` is the memory of the planes, if it is a single block."""
        self._spec = spec
        self._shape = shape
        self._planes = planes
        self._block = block
        self._layout = layout
        self._global_shape = global_shape

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        format: str,
        *,
        layout: LayoutLike | None = None,
        planes: str | Iterable[str] = ("row",),
        scaling: str | None = None,
        rank: int | None = None,
    ) -> QuantizedTensor:
        """A tensor of zeros in Tessera's shared memory: room for codes and scales from elsewhere.

        A receiver registers it instead of a tensor. The sender's tensor of that name then travels in this format, and
        codes, scales and amaxes arrive bit for bit as those of the whole tensor. A sender registers it once it is
        filled: it travels as it is, and is not quantised again.

        Its arrays are torch's if torch is imported, else NumPy's.

        Args:
            shape: Shape of the tensor that it stands for: (..., M, K). With a layout, the global shape.
            format: As for quantize(), like `planes` and `scaling`.
            layout: Which part this rank holds; None: all. Edges of shards must lie between blocks of the planes.
            rank: Rank of this process in its job. None: from the launcher, as in connect().

        Raises:
            InvalidArgumentError: An argument does not fit the format. (An edge of a shard inside a block is an error of
                register(), which names the nearest edges that cut none.)
        """
        spec = spec_of(format, scaling=scaling)
        sizes = sizes_of("shape", shape, or_one=True)
        if len(sizes) < 2:
            raise InvalidArgumentError(f"shape {sizes}: give that of a matrix, or of a stack of them")
        names = plane_names(planes)
        if layout is None:
            return cls(spec, sizes, *_in_one_block(spec, sizes, names))
        bound = as_layout(layout).bind(sizes)
        held = bound.local_shape(sizes, launch(rank, None)[0] if rank is None else whole("rank", rank, 0))
        return cls(spec, held, *_in_one_block(spec, held, names), layout=bound, global_shape=sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that was quantised; with a layout, of what this rank holds of it."""
        return self._shape

    @property
    def layout(self) -> _core.Layout | None:
        """As empty() was given it: what of the tensor this rank holds. None: all of it."""
        return self._layout

    @property
    def format(self) -> str:
        """Its name, as quantize() takes it."""
        return self._spec.format

    @property
    def dtype(self) -> Any:
        """NumPy's or torch's float32, which dequantize() gives if nothing else is asked for."""
        return torch_dtype("f32") if self._of_torch else numpy_dtype("f32")

    @property
    def planes(self) -> tuple[str, ...]:
        """Those that it has of "row" and "column"."""
        return tuple(self._planes)

    @property
    def row(self) -> QuantizedPlane:
        """With blocks along K. Raises InvalidArgumentError if it was not asked for."""
        return self._plane("row")

    @property
    def column(self) -> QuantizedPlane:
        """With blocks along M; but for mxfp8 it holds the transposed matrix. Raises InvalidArgumentError if it was not
        asked for."""
        return self._plane("column")

    def dequantize(self, plane: str = "row", dtype: Any = None) -> Any:
        """The tensor again, as far as its codes and scales tell, computed in f32 and rounded once.

        Args:
            dtype: float32 (the default), float16 or bfloat16: NumPy's, torch's or Tessera's name.

        Raises:
            InvalidArgumentError: There is no such plane, or it holds a Hadamard transform.
        """
        source = self._plane(plane)
        name = "f32" if dtype is None else _core.dtype(dtype)
        if name not in _FLOATS:
            raise InvalidArgumentError(f"dtype {dtype}: dequantize() gives float32, float16 or bfloat16")
        made = new_array(self._of_torch, self._shape, name)
        _core.dequantize(self._spec, plane, *_matrices(self._shape), source._addresses(), address_of(made), name)
        return made

    @property
    def _of_torch(self) -> bool:
        return is_torch_tensor(next(iter(self._planes.values())).codes)

    def _plane(self, name: str) -> QuantizedPlane:
        if name not in PLANES:
            raise InvalidArgumentError(f"plane {name!r}: 'row' and 'column' are possible")
        plane = self._planes.get(name)
        if plane is None:
            there = " and ".join(self._planes)
            raise InvalidArgumentError(f"plane {name!r}: this tensor was quantised to {there}: give it in planes=")
        return plane

    def __tessera_source__(self, name: str) -> Source:
        """Called by a batch that registers it."""
        return InBatch(name, self)

    def __repr__(self) -> str:
        scaling = f", scaling={self._spec.scaling!r}" if self.format == "nvfp4" else ""
        return f"QuantizedTensor(shape={self._shape}, format={self.format!r}, planes={self.planes}{scaling})"


def spec_of(format: str, *, scaling: str | None = None, **options: Any) -> _core.QuantSpec:
    """Raises InvalidArgumentError unless the options fit each other."""
    scales = "16x16" if scaling is None else text("scaling", str(scaling))
    spec = _core.QuantSpec(text("format", str(format)), scales, **options)
    if scaling is not None and spec.format != "nvfp4":
        refuse_for(spec, "scaling", "nvfp4")
    return spec


def refuse_for(spec: _core.QuantSpec, what: str, whose: str) -> NoReturn:
    raise InvalidArgumentError(f"{what} is only for {whose}: leave it out for {spec.format}")


def plane_names(planes: Any) -> tuple[str, ...]:
    """In the order of PLANES."""
    given = [planes] if isinstance(planes, str) or not isinstance(planes, Iterable) else list(planes)
    if not given or any(name not in PLANES for name in given):
        raise InvalidArgumentError(f"planes {planes!r}: give 'row', 'column' or both")
    return tuple(name for name in PLANES if name in given)


def new_plane(spec: _core.QuantSpec, name: str, shape: tuple[int, ...], new: Any, amax: Any = None) -> QuantizedPlane:
    """A plane of a tensor of that shape. new(shape, dtype) allocates an array, also for the amax if none is given."""
    (code_dtype, *codes), (scale_dtype, *scales), _ = spec.plane_arrays(name, *shape[-2:])
    stack = shape[:-2]
    if amax is None and spec.needs_amax:
        amax = new(stack, "f32")
    return QuantizedPlane(
        new((*stack, *codes), code_dtype), new((*stack, *scales), scale_dtype), amax, spec, name, shape
    )


def _in_one_block(
    spec: _core.QuantSpec, shape: tuple[int, ...], names: Sequence[str]
) -> tuple[dict[str, QuantizedPlane], Block]:
    """Planes of zeros in one block, for a batch."""
    size, places = spec.places(names, *_matrices(shape))
    block = Block(size)

    def plane(name: str) -> QuantizedPlane:
        codes, scales, amaxes = places[name]
        free = iter((codes, scales))
        amax = block.array(amaxes, shape[:-2], "f32") if spec.needs_amax else None
        return new_plane(spec, name, shape, lambda sizes, dtype: block.array(next(free), sizes, dtype), amax)

    return {name: plane(name) for name in names}, block


class InBatch:
    """A QuantizedTensor that a batch receives into, or sends as it is."""

    current = None

    def __init__(self, name: str, tensor: QuantizedTensor) -> None:
        self._name = name
        self._tensor = tensor

    def locate(self) -> Location:
        tensor = self._tensor
        block = tensor._block
        if block is None:
            raise refusal(
                self._name,
                "quantize() made its planes as separate arrays: copy codes, scales and amaxes to a "
                "QuantizedTensor.empty(), and register that",
            )
        if tensor._spec.scaling != "16x16":
            raise refusal(self._name, f"its blocks are {tensor._spec.scaling}: on the bus nvfp4 has blocks of 16x16")
        return Location(
            block.address,
            "f32",  # what it stands for
            tensor.shape,
            (),
            tensor._layout,
            tensor._global_shape,
            quantised=(tensor.format, tensor.planes),
            memory=block,
        )

    def require_writeable(self) -> None:
        pass

    def begin_write(self) -> None:
        pass

    def written(self) -> None:
        pass


def _matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(number of matrices, rows, columns)"""
    return math.prod(shape[:-2]), shape[-2], shape[-1]
