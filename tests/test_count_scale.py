"""count_targets and scale_unless_one_: exact results, stable order, sizes around the boundaries of warps and blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import REFUSED, poisoned_memory
from syncfree_ext import reference
from tolerances import assert_equal

OPS = torch.ops.syncfree
SIZES = [0, 1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 100003]
V = 1000


def targets(size: int, ignored: float, rng: torch.Generator, device: torch.device, v: int = V) -> Tensor:
    t = torch.randint(0, v, (size,), generator=rng)
    t[torch.rand(size, generator=rng) < ignored] = -100
    return t.to(device)


def check_counts(target: Tensor, v: int = V, **options: Any) -> None:
    with poisoned_memory(target.device):
        counts, rows = OPS.count_targets(target, v, **options)
    expected, expected_rows = reference.count_targets(target, v, **options)
    assert_equal(rows, expected_rows, "rows")
    assert counts.dtype == torch.float64
    assert counts.shape == (8,)
    assert counts[0] == expected[0]
    torch.testing.assert_close(counts, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.97, 1.0])
def test_counts_and_order_of_rows(size: int, ignored: float, rng: torch.Generator, device: torch.device) -> None:
    check_counts(targets(size, ignored, rng, device))


@pytest.mark.parametrize("size", [1, 33, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_counts_with_weights(
    size: int, dtype: torch.dtype, reduction: str, rng: torch.Generator, device: torch.device
) -> None:
    target = targets(size, 0.3, rng, device)
    target[0] = 1
    weight = torch.randn(V, generator=rng).to(device, dtype)
    token_weight = torch.randn(size, generator=rng).to(device, dtype)
    check_counts(target, weight=weight.abs(), reduction=reduction)
    check_counts(target, token_weight=token_weight, reduction=reduction)
    check_counts(target, weight=weight.abs(), token_weight=token_weight, reduction=reduction)
    # Signed weights cancel in D: compare the sum itself with a tolerance for that.
    counts, _ = OPS.count_targets(target, V, weight=weight, reduction=reduction)
    own = weight.double()[target.clamp(min=0)][target != -100]
    assert abs(float(counts[1] - own.sum())) <= 1e-6 * float(own.abs().sum())
    assert counts[5] == weight.double().abs().max()


@pytest.mark.parametrize("v", [1, 2, 31, 33, 2047, 2049, 40001])
def test_class_weights_of_any_number(v: int, rng: torch.Generator, device: torch.device) -> None:
    check_counts(targets(500, 0.1, rng, device, v), v, weight=torch.rand(v, generator=rng).to(device) + 0.5)


def test_d_is_a_wide_sum(device: torch.device) -> None:
    """A million equal weights: a sum in float32, one after the other, would be wrong in the fifth digit."""
    target = torch.zeros(10**6, dtype=torch.int64, device=device)
    counts, _ = OPS.count_targets(target, 1, weight=torch.full((1,), 0.1, device=device))
    assert counts[1].item() == pytest.approx(10**6 * float(torch.tensor(0.1)), rel=1e-7)


@pytest.mark.parametrize("items", [0, -2, 0.25, 7, 2**53])
def test_reciprocal_of_num_items(items: float, rng: torch.Generator, device: torch.device) -> None:
    target = targets(100, 0.3, rng, device)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16):
        if (not dtype.is_floating_point and items != int(items)) or (dtype == torch.int32 and items > 2**31):
            continue
        value = torch.tensor(items, dtype=dtype, device=device)
        counts, _ = OPS.count_targets(target, V, num_items=value)
        expected = 1.0 if items <= 0 else 1.0 / items
        assert counts[3] == counts[4] == expected
        counts, _ = OPS.count_targets(torch.full_like(target, -100), V, num_items=value)
        assert counts[3] == counts[4] == 0


def test_zero_weight_sum_is_nan(device: torch.device) -> None:
    target = torch.tensor([0, 0, -100], device=device)
    weight = torch.tensor([0.0, 3.0], device=device)
    counts, _ = OPS.count_targets(target, 2, weight=weight)
    assert counts[3].isnan()
    assert counts[4] == 0.5
    counts, _ = OPS.count_targets(torch.full_like(target, -100), 2, weight=weight)
    assert counts[3] == counts[4] == 0


@pytest.mark.parametrize("shift", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 129), (700,), (2, 4096)], ids=str)
def test_shift(shift: int, shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> None:
    target = targets(math.prod(shape), 0.3, rng, device).view(shape)
    token_weight = torch.rand(shape, generator=rng).to(device)
    check_counts(target, shift=shift)
    check_counts(target, shift=shift, token_weight=token_weight, weight=torch.rand(V, generator=rng).to(device) + 0.5)


@pytest.mark.parametrize("ignore_index", [0, 5, V - 1, -1, 2**40, -(2**63)])
def test_ignore_index(ignore_index: int, rng: torch.Generator, device: torch.device) -> None:
    target = targets(3000, 0.0, rng, device)
    target[torch.rand(3000, generator=rng).to(device) < 0.4] = ignore_index
    check_counts(target, ignore_index=ignore_index)


def test_int32_and_strided_targets(rng: torch.Generator, device: torch.device) -> None:
    target = targets(2050, 0.3, rng, device)
    check_counts(target.int())
    check_counts(target[::2])
    check_counts(target[::2].int())
    check_counts(target.view(2, 1025).T)
    check_counts(target[:1].expand(500))
    check_counts(target.view(2, 1025)[:, 1:].int(), shift=1)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [V, -1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_garbage_counts_as_scored_on_cuda(bad: int, rng: torch.Generator, device: torch.device) -> None:
    """No error can be raised without a sync; nothing may be read outside the weights."""
    target = targets(3000, 0.3, rng, device)
    target[::7] = bad
    counts, rows = OPS.count_targets(target, V)
    expected, expected_rows = reference.count_targets(target, V)
    assert counts[0] == expected[0]
    assert_equal(rows, expected_rows)
    counts, rows = OPS.count_targets(target, V, weight=torch.rand(V, generator=rng).to(device))
    assert counts[0] == expected[0]
    assert counts[1].isnan()
    assert_equal(rows, expected_rows)


def test_counts_are_bitwise_repeatable(rng: torch.Generator, device: torch.device) -> None:
    target = targets(100003, 0.4, rng, device)
    weight, token_weight = torch.rand(V, generator=rng).to(device), torch.rand(100003, generator=rng).to(device)
    first = OPS.count_targets(target, V, weight=weight, token_weight=token_weight)
    for _ in range(5):
        for a, b in zip(OPS.count_targets(target, V, weight=weight, token_weight=token_weight), first, strict=True):
            assert_equal(a, b)


# scale_unless_one_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dtypes_on(device: torch.device) -> list[torch.dtype]:
    return [*DTYPES, torch.float64] if device.type == "cpu" else DTYPES


def check_scale(grads: list[Tensor], scale: Tensor, row_scales: list[Tensor] | None = None) -> None:
    """One rounding: equal to the reference in each bit."""
    expected = [g.clone() for g in grads]
    reference.scale_unless_one_(expected, scale, row_scales or [])
    OPS.scale_unless_one_(grads, scale, row_scales or [])
    for got, want in zip(grads, expected, strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.5, 0.75, -3.1, 0.0])
def test_scale_is_exact(size: int, scale: float, rng: torch.Generator, device: torch.device) -> None:
    for dtype in dtypes_on(device):
        check_scale([torch.randn(size, generator=rng).to(device, dtype)], torch.tensor(scale, device=device))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 1e-38, 3e38])
def test_scale_of_any_value(scale: float, rng: torch.Generator, device: torch.device) -> None:
    for dtype in dtypes_on(device):
        grad = torch.randn(100, generator=rng).to(device, dtype)
        expected = (grad.double() * scale).to(dtype) if dtype == torch.float64 else (grad.float() * scale).to(dtype)
        OPS.scale_unless_one_(
            [grad], torch.tensor(scale, device=device, dtype=torch.float64 if dtype == torch.float64 else None)
        )
        torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_shapes_of_the_scale(scale_dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.75, dtype=scale_dtype, device=device)
        check_scale([torch.randn(33, 5, generator=rng).to(device)], scale)


@pytest.mark.parametrize("count", [1, 3, 8, 9, 20])
def test_several_tensors_in_one_call(count: int, rng: torch.Generator, device: torch.device) -> None:
    dtypes = dtypes_on(device)
    shapes = [(3, 5), (1000,), (0, 4), (), (7, 1, 3), (1, 4099)]
    grads = [
        torch.randn(shapes[i % len(shapes)], generator=rng).to(device, dtypes[i % len(dtypes)]) for i in range(count)
    ]
    check_scale(grads, torch.tensor(0.3, device=device))


def test_no_tensors(device: torch.device) -> None:
    OPS.scale_unless_one_([], torch.tensor(0.5, device=device), [])


@pytest.mark.parametrize("offset", range(8))
def test_nothing_beside_the_gradient_is_touched(offset: int, rng: torch.Generator, device: torch.device) -> None:
    """Every alignment of both ends; what lies before and after stays as it is."""
    for dtype in dtypes_on(device):
        for size in (1, 7, 8, 9, 300):
            memory = torch.randn(size + 40, generator=rng).to(device, dtype)
            expected = memory.clone()
            expected[offset : offset + size] *= 0.5
            OPS.scale_unless_one_([memory[offset : offset + size]], torch.tensor(0.5, device=device), [])
            assert_equal(memory, expected)


NAN_BITS = {
    torch.float32: (torch.int32, [0x7FA00001, 0x7FC12345, -0x3FFFFF]),
    torch.bfloat16: (torch.int16, [0x7F81, 0x7FC5, -0x3F]),
    torch.float16: (torch.int16, [0x7C01, 0x7E05, -0x1FF]),
    torch.float64: (torch.int64, [0x7FF0000000000001, 0x7FF8000000000005, -0x7FFFFFFFFFFFF]),
}


def nan_payloads(dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """Signalling and quiet NaN, which any arithmetic would change or quieten."""
    integer, bits = NAN_BITS[dtype]
    out = torch.tensor(bits * (size // 3 + 1), dtype=integer)[:size].to(device).view(dtype)
    assert out.isnan().all()
    return out


def test_a_scale_of_one_leaves_the_memory_untouched(device: torch.device) -> None:
    for dtype in dtypes_on(device):
        grad = nan_payloads(dtype, 1000, device)
        before = grad.clone()
        for scale_dtype in (torch.float32, torch.bfloat16, torch.float64):
            if scale_dtype == torch.float64 and device.type == "cuda":
                continue
            OPS.scale_unless_one_([grad], torch.ones((), dtype=scale_dtype, device=device), [])
            assert_equal(grad, before)


def test_row_scales(rng: torch.Generator, device: torch.device) -> None:
    """Powers of two, one for each row, in one factor with the scale; rows whose factor is 1 stay untouched."""
    for dtype in dtypes_on(device):
        for shape in ((1, 1), (5, 3), (37, 64), (129, 1000), (64, 1), (40,)):
            grad = torch.randn(shape, generator=rng).to(device, dtype)
            rows = torch.exp2(torch.randint(-6, 7, (shape[0],), generator=rng).float()).to(device)
            for scale in (1.0, 0.75, 8.0):
                check_scale([grad.clone()], torch.tensor(scale, device=device), [rows])
    grad = nan_payloads(torch.float16, 96, device).view(4, 24)
    before = grad.clone()
    rows = torch.tensor([4.0, 2.0, 4.0, 0.5], device=device)
    grad[1], grad[3] = 3.0, 5.0
    OPS.scale_unless_one_([grad], torch.tensor(0.25, device=device), [rows])
    assert_equal(grad[[0, 2]], before[[0, 2]])
    assert (grad[1] == 1.5).all()
    assert (grad[3] == 0.625).all()


def test_row_scales_that_are_empty(rng: torch.Generator, device: torch.device) -> None:
    """An entry without elements stands for 1."""
    none = torch.empty(0, device=device)
    rows = torch.tensor([2.0, 4.0], device=device)
    grads = [torch.randn(2, 9, generator=rng).to(device, torch.float16), torch.randn(5, generator=rng).to(device)]
    check_scale(grads, torch.tensor(0.5, device=device), [rows, none])
    check_scale(grads, torch.tensor(1.0, device=device), [none, none])


def test_scale_refuses_what_it_cannot_do(device: torch.device) -> None:
    grad, scale = torch.ones(4, 3, device=device), torch.tensor(0.5, device=device)
    for grads, factor, rows, argument in (
        ([grad.T], scale, [], "grads"),
        ([grad.long()], scale, [], "grads"),
        ([grad], torch.ones(2, device=device), [], "scale"),
        ([grad], scale, [scale, scale], "row_scales"),
        ([grad], scale, [torch.ones(3, device=device)], "row_scales"),
    ):
        with pytest.raises(REFUSED, match=rf"^syncfree::scale_unless_one_: {argument}"):
            OPS.scale_unless_one_(grads, factor, rows)
    assert (grad == 1).all()


def test_a_single_element_with_a_row_scale(device: torch.device) -> None:
    grads = [torch.tensor(3.0, device=device), torch.tensor([3.0], device=device)]
    expected = [grad.clone() for grad in grads]
    rows = [torch.tensor([0.5], device=device)] * 2
    OPS.scale_unless_one_(grads, torch.tensor(2.0, device=device), rows)
    reference.scale_unless_one_(expected, torch.tensor(2.0, device=device), rows)
    for got, want in zip(grads, expected, strict=True):
        assert_equal(got, want)
    OPS.scale_unless_one_(grads, torch.tensor(3.0, device=device), rows)
    assert [float(g) for g in grads] == [4.5, 4.5]
