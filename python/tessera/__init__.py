"""Tessera moves sharded tensors: from one job's layout into another's, without a gather.

    bus = tessera.connect("weights", role="trainer", peer="inference")
    batch = bus.register(model)            # DTensors carry mesh and placements
    batch.send(version=step)               # the other side: batch.recv()

Values: Mesh, Shard, StridedShard, RaggedShard, Replicate, Partial, Layout, Plan. torch's own DeviceMesh, placements and
DTensors are taken as they are; torch itself is optional.

Quantised formats: quantize(w, "nvfp4"), amax().
"""

from . import maps
from ._bus.batch import Batch
from ._bus.bus import Bus, connect
from ._bus.handle import Handle
from ._bus.mapping import Part
from ._core import (
    AmaxHistory,
    BatchStats,
    Layout,
    ManifestEntry,
    Mesh,
    Partial,
    Plan,
    Progress,
    RaggedShard,
    Replicate,
    Route,
    Shard,
    StridedShard,
)
from ._core import version as __version__
from ._errors import (
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    Error,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from ._plans import plan, simulate
from ._quant.quantize import amax, quantize
from ._quant.quantized import QuantizedPlane, QuantizedTensor
from ._tensors.layouts import layout_of
from ._tensors.memory import empty, share_, zeros

__all__ = [
    "AlreadyExistsError",
    "AmaxHistory",
    "Batch",
    "BatchStats",
    "Bus",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "Error",
    "Handle",
    "InternalError",
    "InvalidArgumentError",
    "Layout",
    "ManifestEntry",
    "Mesh",
    "MismatchError",
    "NotFoundError",
    "Part",
    "Partial",
    "PeerLostError",
    "PermissionDeniedError",
    "Plan",
    "Progress",
    "QuantizedPlane",
    "QuantizedTensor",
    "RaggedShard",
    "Replicate",
    "ResourceExhaustedError",
    "Route",
    "Shard",
    "StridedShard",
    "UnavailableError",
    "UnimplementedError",
    "__version__",
    "amax",
    "connect",
    "empty",
    "layout_of",
    "maps",
    "plan",
    "quantize",
    "share_",
    "simulate",
    "zeros",
]
