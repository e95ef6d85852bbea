"""Which rows belong to a class, at the numbers of rows and classes where the search for them changes."""

from __future__ import annotations

import pytest
import torch

from helpers import loss_and_gradients
from tolerances import assert_close_rel

pytestmark = pytest.mark.cuda

# Around tiles of rows, and where 32 bits no longer hold a class and a row of its tile.
SIZES = [
    *((rows, 1000) for rows in (1, 63, 64, 65, 255, 257, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 16384, 33000)),
    *((4100, classes) for classes in (2, 2**21 - 1, 2**21)),
]


@pytest.mark.parametrize("crowd", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize(("rows", "classes"), SIZES)
def test_each_target_reaches_its_class(rows: int, classes: int, crowd: bool, rng: torch.Generator) -> None:
    """With a weight of zeros every class has the same probability, so dW is known without a matrix product."""
    x = torch.randn(rows, 8, generator=rng).to("cuda", torch.bfloat16)
    target = torch.randint(0, classes, (rows,), generator=rng)
    target[0] = classes - 1
    if crowd:
        target = target[torch.randint(0, min(rows, 3), (rows,), generator=rng)]
        target[torch.rand(rows, generator=rng) < 0.2] = -100
        target[0] = classes - 1
    target = target.cuda()
    w = torch.zeros(classes, 8, device="cuda", dtype=torch.bfloat16)
    out, grads = loss_and_gradients(x, w, target, reduction="sum")
    kept = target >= 0
    rows_kept = x[kept].double()
    expected = (rows_kept.sum(0) / classes).expand(classes, 8).clone()
    expected.index_add_(0, target[kept], rows_kept, alpha=-1)
    assert_close_rel(out, kept.sum() * torch.tensor(float(classes), dtype=torch.float64).log(), 1e-5)
    # One rounding to bfloat16 takes 2^-8 of an element at most. Of thousands of elements it takes 1.7e-3, but with two
    # classes there are sixteen, and three classes outweigh all others.
    assert_close_rel(grads[1], expected, 1.01 * 2.0**-8)
    # Each class by itself: a row that went to the wrong one is lost among many otherwise. Rounding costs a class 2^-8,
    # and as much again times what its rows cancel; one row of the thirty that a spread class has at most is a sixth.
    error = (grads[1].double() - expected).norm(dim=1)
    assert (error <= 2e-2 * expected.norm(dim=1)).all()
