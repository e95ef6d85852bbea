"""What `torch.utils.flop_counter.FlopCounterMode` counts for `linear_cross_entropy`.

The multiplications and additions of its matrix products, of all rows, whether ignored or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

_OPS = [torch.ops.syncfree.flce_forward, torch.ops.syncfree.flce_backward, torch.ops.syncfree.flce]
for _op in _OPS:
    flop_registry.pop(_op, None)  # the module may be imported anew


@register_flop_formula(_OPS)
def _count(*shapes: Any, need_dx: bool = False, need_dw: bool = False, **_: Any) -> int:
    # An upstream gradient comes first in flce_backward.
    (rows, hidden), (classes, _hidden) = [shape for shape in shapes if shape is not None and len(shape) == 2][:2]
    return 2 * rows * hidden * classes * (1 + need_dx + need_dw)  # type: ignore[no-any-return]  # may be symbolic
