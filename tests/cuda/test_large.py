"""Arrays with more than 2^31 elements: sampled rows against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import loss_and_gradients
from syncfree_ext import reference
from tolerances import Bound, assert_close_rel

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


def require_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def logsumexp_of(x: Tensor, w: Tensor) -> Tensor:
    parts = [(part.double() @ w.double().T).logsumexp(1) for part in x.split(512)]
    return torch.cat(parts)


def sampled_dw(x: Tensor, w: Tensor, target: Tensor, lse: Tensor, classes: Tensor) -> Tensor:
    """Rows `classes` of the gradient of the summed loss."""
    p = (x.double() @ w[classes].double().T - lse[:, None]).exp()
    p -= (target[:, None] == classes[None, :]).double()
    return p.T @ x.double()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_more_than_2_31_logits_in_a_chunk(bias: bool, rng: torch.Generator, device: torch.device) -> None:
    rows, v, hidden = 16512, 131136, 64
    assert rows * v > 2**31
    require_memory(60)
    x = torch.randn(rows, hidden, generator=rng).to(device, torch.bfloat16)
    w = (torch.randn(v, hidden, generator=rng) / 8).to(device, torch.bfloat16)
    b = torch.zeros(v, device=device) if bias else None
    target = torch.randint(0, v, (rows,), generator=rng).to(device)
    target[-64:] = torch.arange(v - 64, v, device=device)
    loss, grads = loss_and_gradients(x, w, target, b, 1.0, reduction="sum", chunk_rows=rows)
    assert grads[0] is not None
    assert grads[1] is not None
    lse = logsumexp_of(x, w)
    assert_close_rel(loss, (lse - (x.double() * w[target].double()).sum(1)).sum(), 1e-6, what="loss")
    for part in (slice(0, 64), slice(rows - 64, rows)):
        ref = reference.linear_cross_entropy_gradients(x[part], w, target[part], reduction="sum")
        bound = Bound(torch.bfloat16, ref.logit_max)
        assert ref.dx is not None
        assert_close_rel(grads[0][part], ref.dx, bound.of(torch.bfloat16, ref.dx_noise, float(ref.dx.norm())))
    classes = torch.cat([torch.arange(64), torch.arange(v - 64, v)]).to(device)
    expected = sampled_dw(x, w, target, lse, classes)
    assert_close_rel(grads[1][classes], expected, Bound(torch.bfloat16, 8.0).of(torch.bfloat16, 1.0, 1.0), what="dw")


def test_weight_with_more_than_2_31_elements(rng: torch.Generator, device: torch.device) -> None:
    rows, v, hidden = 192, 524288, 4224
    assert v * hidden > 2**31
    require_memory(60)
    x = torch.randn(rows, hidden, generator=rng).to(device, torch.bfloat16)
    w = torch.empty(v, hidden, device=device, dtype=torch.bfloat16).normal_(std=hidden**-0.5)
    target = torch.randint(0, v, (rows,), generator=rng).to(device)
    target[-64:] = torch.arange(v - 64, v, device=device)
    loss, grads = loss_and_gradients(x, w, target, None, 1.0, reduction="sum", chunk_rows=128)
    assert grads[0] is not None
    assert grads[1] is not None
    logits = torch.cat([x.double() @ part.double().T for part in w.split(65536)], 1)
    lse = logits.logsumexp(1)
    assert_close_rel(loss, (lse - logits.gather(1, target[:, None])[:, 0]).sum(), 1e-6, what="loss")
    p = (logits - lse[:, None]).exp_()
    p[torch.arange(rows, device=device), target] -= 1
    dx = sum(a @ part.double() for a, part in zip(p.split(65536, 1), w.split(65536), strict=True))
    assert isinstance(dx, Tensor)
    bound = Bound(torch.bfloat16, 8.0).of(torch.bfloat16, 1.0, 1.0)
    assert_close_rel(grads[0], dx, bound, what="dx")
    classes = torch.cat([torch.arange(64), torch.arange(v - 64, v)]).to(device)
    assert_close_rel(grads[1][classes], p[:, classes].T @ x.double(), bound, what="dw")
