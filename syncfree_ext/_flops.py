"""What `torch.utils.flop_counter.FlopCounterMode` counts for the losses.

The multiplications and additions of their matrix products, of all rows, whether ignored or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.syncfree


@register_flop_formula([_ops.flce_forward, _ops.flce_backward, _ops.flce])
def _count(*shapes: Any, need_dx: bool = False, need_dw: bool = False, **_: Any) -> int:
    # An upstream gradient comes first in flce_backward.
    (rows, hidden), (classes, _hidden) = [shape for shape in shapes if shape is not None and len(shape) == 2][:2]
    return 2 * rows * hidden * classes * (1 + need_dx + need_dw)  # type: ignore[no-any-return]  # may be symbolic
