"""A fused linear cross-entropy for PyTorch that never makes the host wait for the GPU.

Public names: `linear_cross_entropy`, `cross_entropy`, `LinearCrossEntropyOutput`, `FusedLinearCrossEntropyLoss`,
`LinearCrossEntropyHead`, and the ops under `torch.ops.syncfree`. For the rest of a training step: `AsyncScalars`,
`MetricBuffer`, `NonFiniteGuard` with `NonFiniteError`, `masked_indices` with `MaskedIndices` and `host_count_bound`,
`pin_buffers` with `PinHandle`, `ResidentCache` (docs/training_loops.md).
"""

from importlib.metadata import PackageNotFoundError, version

from . import _load

_load.load()

from . import _flops, ops  # noqa: E402, F401  (register on the schemas that load() brought in)
from .buffers import PinHandle, ResidentCache, pin_buffers  # noqa: E402
from .functional import LinearCrossEntropyOutput, cross_entropy, linear_cross_entropy  # noqa: E402
from .guards import NonFiniteError, NonFiniteGuard  # noqa: E402
from .metrics import MetricBuffer  # noqa: E402
from .modules import FusedLinearCrossEntropyLoss, LinearCrossEntropyHead  # noqa: E402
from .sampling import MaskedIndices, host_count_bound, masked_indices  # noqa: E402
from .scalars import AsyncScalars  # noqa: E402

try:
    __version__ = version("syncfree_ext")
except PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "AsyncScalars",
    "FusedLinearCrossEntropyLoss",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyOutput",
    "MaskedIndices",
    "MetricBuffer",
    "NonFiniteError",
    "NonFiniteGuard",
    "PinHandle",
    "ResidentCache",
    "__version__",
    "cross_entropy",
    "host_count_bound",
    "linear_cross_entropy",
    "masked_indices",
    "ops",
    "pin_buffers",
]
