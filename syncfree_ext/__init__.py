"""A fused linear cross-entropy for PyTorch that never makes the host wait for the GPU.

Public names: `linear_cross_entropy`, `cross_entropy`, `LinearCrossEntropyOutput`, `FusedLinearCrossEntropyLoss`,
`LinearCrossEntropyHead`, and the ops under `torch.ops.syncfree`.
"""

from importlib.metadata import PackageNotFoundError, version

from . import _load

_load.load()

from . import ops  # noqa: E402  (registers on the schemas that load() brought in)
from .functional import LinearCrossEntropyOutput, cross_entropy, linear_cross_entropy  # noqa: E402
from .modules import FusedLinearCrossEntropyLoss, LinearCrossEntropyHead  # noqa: E402

try:
    __version__ = version("syncfree_ext")
except PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "FusedLinearCrossEntropyLoss",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyOutput",
    "__version__",
    "cross_entropy",
    "linear_cross_entropy",
    "ops",
]
