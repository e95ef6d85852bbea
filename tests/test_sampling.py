"""masked_indices against a row-by-row version with a stable sort: each sentence of its contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import loop_reference
from helpers import REFUSED, poisoned_memory
from syncfree_ext import MaskedIndices, host_count_bound, masked_indices
from tolerances import assert_equal

OP = torch.ops.syncfree.masked_indices
LENGTHS = [0, 1, 3, 4, 5, 31, 33, 127, 1000, 4095, 4096, 4097, 9001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def random_mask(shape: tuple[int, ...], density: float, rng: torch.Generator, device: torch.device) -> Tensor:
    return (torch.rand(shape, generator=rng) < density).to(device)


def check(got: MaskedIndices, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    for name, a, b in zip(MaskedIndices._fields, got, expected, strict=True):
        assert a.is_contiguous()
        assert_equal(a, b, name)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
def test_first(length: int, density: float, rng: torch.Generator, device: torch.device) -> None:
    mask = random_mask((3, length), density, rng, device)
    for size in (0, 1, 7, length, length + 5):
        with poisoned_memory(device):
            got = masked_indices(mask, size, fill_value=-7)
        check(got, loop_reference.masked_indices(mask, size, fill_value=-7))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
def test_scores_replace_the_keys(length: int, density: float, rng: torch.Generator, device: torch.device) -> None:
    mask = random_mask((3, length), density, rng, device)
    for dtype in DTYPES:
        scores = torch.randn(3, length, generator=rng).to(device, dtype)
        for size in (0, 1, 7, 300, length + 5):
            with poisoned_memory(device):
                got = masked_indices(mask, size, order="random", scores=scores)
            check(got, loop_reference.masked_indices(mask, size, scores))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_position(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    """Few different keys, all equal keys, both zeros, infinities and NaN, as a stable argsort has them."""
    for values in ([1.0], [0.0, -0.0], [0.25, 0.5, 1.0], [-math.inf, -1.0, 0.0, -0.0, 2.0, math.inf, math.nan]):
        for length in (1, 40, 5000):
            mask = random_mask((4, length), 0.7, rng, device)
            scores = torch.tensor(values)[torch.randint(len(values), (4, length), generator=rng)].to(device, dtype)
            for size in (1, 9, length // 2, length):
                got = masked_indices(mask, size, order="random", scores=scores)
                check(got, loop_reference.masked_indices(mask, size, scores))
                assert_equal(got.valid.sum(-1), mask.sum(-1).clamp(max=size), "exactly min(count, size) are kept")


def test_close_keys_need_every_bit(rng: torch.Generator, device: torch.device) -> None:
    for dtype, integer in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        one = torch.ones((), dtype=dtype).view(integer)
        bits = torch.stack([one + torch.randperm(3000, generator=rng).to(integer) for _ in range(2)])
        mask = random_mask((2, 3000), 0.9, rng, device)
        scores = bits.view(dtype).to(device)
        for keys in (scores, -scores):
            got = masked_indices(mask, 700, order="random", scores=keys)
            check(got, loop_reference.masked_indices(mask, 700, keys))


@pytest.mark.parametrize("shape", [(50,), (2, 50), (2, 3, 50), (2, 1, 3, 2, 50), (0, 50), (3, 0), (0, 0)], ids=str)
def test_any_leading_dimensions(shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> None:
    mask = random_mask(shape, 0.5, rng, device)
    scores = torch.randn(shape, generator=rng).to(device)
    check(masked_indices(mask, 9), loop_reference.masked_indices(mask, 9))
    check(masked_indices(mask, 9, order="random", scores=scores), loop_reference.masked_indices(mask, 9, scores))
    got = masked_indices(mask, 9, order="random", seed=5)
    assert (got.indices.shape, got.valid.shape, got.count.shape) == ((*shape[:-1], 9), (*shape[:-1], 9), shape[:-1])


def test_strides(rng: torch.Generator, device: torch.device) -> None:
    mask, scores = random_mask((60, 8), 0.5, rng, device), torch.randn(60, 8, generator=rng).to(device)
    for m, s in (
        (mask.T, scores.T),
        (mask[:, 1:], scores[:, 1:]),
        (mask[::3, ::2], scores[::3, ::2]),
        (mask[:1].expand(5, 8), scores[:5]),
        (mask[3], scores[3]),
    ):
        check(masked_indices(m, 5), loop_reference.masked_indices(m, 5))
        check(masked_indices(m, 5, order="random", scores=s), loop_reference.masked_indices(m, 5, s))


def test_limit(rng: torch.Generator, device: torch.device) -> None:
    mask, scores = random_mask((6, 90), 0.4, rng, device), torch.randn(6, 90, generator=rng).to(device)
    per_row = torch.tensor([-3, 0, 1, 5, 40, 2**40])
    for limit in (0, 1, 12, 100, per_row, per_row[3], per_row[1:2]):
        on_device = limit.to(device) if isinstance(limit, Tensor) else limit
        check(masked_indices(mask, 20, limit=on_device), loop_reference.masked_indices(mask, 20, limit=limit))
        got = masked_indices(mask, 20, order="random", scores=scores, limit=on_device)
        check(got, loop_reference.masked_indices(mask, 20, scores, limit))


def anchors_of_the_source(mask: Tensor, size: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rule "one less than the fullest row has": a width read by the host, then two sorts."""
    width = max(1, min(size, int(mask.sum(-1).max()) - 1))
    order = keys.masked_fill(~mask, 2.0).argsort(dim=-1, stable=True)[:, :width]
    keep = torch.arange(width, device=mask.device) < mask.sum(-1, keepdim=True).clamp(max=width)
    anchors = order.masked_fill(~keep, mask.shape[1] + 1).sort(-1).values
    return anchors.masked_fill(~keep, 0), keep


@pytest.mark.parametrize("size", [1, 5, 40, 200])
def test_limit_repeats_the_rule_of_the_fullest_row(size: int, rng: torch.Generator, device: torch.device) -> None:
    mask, keys = random_mask((5, 90), 0.5, rng, device), torch.rand(5, 90, generator=rng).to(device)
    mask[2] = False
    anchors, keep = anchors_of_the_source(mask, size, keys)
    limit = (mask.sum(-1).max() - 1).clamp(1, size)
    indices, valid, _ = masked_indices(mask, size, order="random", scores=keys, limit=limit)
    width = anchors.shape[1]
    assert_equal(indices[:, :width], anchors)
    assert_equal(valid[:, :width], keep)
    assert not valid[:, width:].any()
    assert not indices[:, width:].any()


def test_a_generator_is_drawn_from_once(rng: torch.Generator, device: torch.device) -> None:
    """In the shape of mask, whatever it holds: the same keys as a draw of one's own."""
    for density in (0.0, 0.3, 1.0):
        mask = random_mask((4, 333), density, rng, device)
        ours = torch.Generator(device).manual_seed(17)
        theirs = torch.Generator(device).manual_seed(17)
        got = masked_indices(mask, 50, order="random", generator=ours)
        keys = torch.rand(mask.shape, generator=theirs, device=device)
        check(got, loop_reference.masked_indices(mask, 50, keys))
        assert_equal(torch.rand(3, generator=ours, device=device), torch.rand(3, generator=theirs, device=device))


def test_the_default_generator(device: torch.device) -> None:
    mask = torch.ones(2, 500, dtype=torch.bool, device=device)
    torch.manual_seed(3)
    first = masked_indices(mask, 20, order="random")
    torch.manual_seed(3)
    check(masked_indices(mask, 20, order="random"), tuple(first))
    assert not torch.equal(masked_indices(mask, 20, order="random").indices, first.indices)


def test_sampling_is_uniform(rng: torch.Generator, device: torch.device) -> None:
    """Each of 10 positions is kept in 3 of 10 draws: 5 standard deviations of 20 000 draws."""
    mask = torch.zeros(20_000, 16, dtype=torch.bool, device=device)
    mask[:, 3:13] = True
    seed = int(torch.randint(2**62, (), generator=rng))
    for options in ({"generator": torch.Generator(device).manual_seed(seed)}, {"seed": seed}):
        indices = masked_indices(mask, 3, order="random", **options).indices
        share = torch.bincount(indices.flatten().cpu(), minlength=16)[3:13] / 20_000
        assert (share - 0.3).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 20_000)


# ----------------------------------------------------------------------------------------------------- seed and row ids


def test_philox_is_that_of_the_paper() -> None:
    """The known answers of the authors' own library, for counters and keys of zeros and of ones."""
    assert loop_reference.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**32 - 1
    assert loop_reference.philox(2**64 - 1, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC])
def test_keys_of_a_seed(seed: int, rng: torch.Generator, device: torch.device) -> None:
    ids = [0, 1, -5, 2**40 + 3]
    mask = random_mask((4, 77), 0.6, rng, device)
    keys = loop_reference.philox_keys(seed, ids, 77)
    row_ids = torch.tensor(ids, device=device)
    for size in (1, 10, 77):
        got = masked_indices(mask, size, order="random", seed=seed, row_ids=row_ids)
        check(got, loop_reference.masked_indices(mask, size, keys))
        own = masked_indices(mask, size, order="random", seed=seed)
        check(own, loop_reference.masked_indices(mask, size, loop_reference.philox_keys(seed, [0, 1, 2, 3], 77)))


def test_a_row_is_drawn_alike_in_any_batch_and_padding(rng: torch.Generator, device: torch.device) -> None:
    mask = random_mask((5, 600), 0.5, rng, device)
    ids = torch.tensor([7, 3, 900, 0, 41], device=device)
    whole = masked_indices(mask, 40, order="random", seed=11, row_ids=ids)
    order = torch.tensor([4, 1, 0], device=device)
    padded = torch.cat((mask[order], torch.zeros(3, 129, dtype=torch.bool, device=device)), -1)
    part = masked_indices(padded, 40, order="random", seed=11, row_ids=ids[order])
    check(part, tuple(t[order] for t in whole))
    other = masked_indices(mask, 40, order="random", seed=12, row_ids=ids)
    assert not torch.equal(other.indices, whole.indices)


@pytest.mark.cuda
def test_cpu_and_cuda_draw_alike(rng: torch.Generator) -> None:
    for length in (1, 100, 32768):
        mask = torch.rand(6, length, generator=rng) < 0.4
        ids = torch.randint(2**50, (6,), generator=rng)
        there = masked_indices(mask.cuda(), 512, order="random", seed=99, row_ids=ids.cuda())
        here = masked_indices(mask, 512, order="random", seed=99, row_ids=ids)
        check(there, tuple(t.cuda() for t in here))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_arguments(data: Any) -> None:
    rows, length = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 40))
    size, fill = data.draw(st.integers(0, 50)), data.draw(st.integers(-(2**63), 2**63 - 1))
    bits = data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    mask = torch.tensor(bits, dtype=torch.bool).view(rows, length)
    levels = data.draw(st.sampled_from([1, 2, 5, 1000]))
    draw = st.lists(st.integers(0, levels), min_size=rows * length, max_size=rows * length)
    scores = torch.tensor(data.draw(draw), dtype=torch.float32).view(rows, length)
    limit = data.draw(st.one_of(st.none(), st.integers(0, 60)))
    got = masked_indices(mask, size, order="random", scores=scores, limit=limit, fill_value=fill)
    check(got, loop_reference.masked_indices(mask, size, scores, limit, fill))
    check(masked_indices(mask, size, limit=limit), loop_reference.masked_indices(mask, size, None, limit))


# ------------------------------------------------------------------------------------------------- registration, errors


@pytest.mark.parametrize("kind", ["first", "keys", "seed"])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40)], ids=str)
def test_opcheck(kind: str, shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> None:
    mask = random_mask(shape, 0.5, rng, device)
    options: dict[str, Any] = {"limit": torch.full(shape[:-1], 4, device=device)}
    if kind == "keys":
        options["keys"] = torch.rand(shape, generator=rng).to(device)
    if kind == "seed":
        options |= {"seed": 3, "row_ids": torch.ones(shape[:-1], dtype=torch.int64, device=device), "max_kept": 5}
    opcheck(OP.default, (mask, 7), options)


def test_fake_cuda() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        mask = torch.empty(1 << 20, 1 << 20, dtype=torch.bool)
        for options in ({}, {"order": "random", "seed": 1}, {"order": "random", "scores": mask.float()}):
            out = masked_indices(mask, 512, **options)
            assert out.indices.shape == out.valid.shape == (1 << 20, 512)
            assert (out.indices.dtype, out.valid.dtype, out.count.dtype) == (torch.int64, torch.bool, torch.int64)
            assert out.indices.device.type == "cuda"


@pytest.mark.parametrize("kind", ["first", "generator", "seed", "scores"])
def test_compiles_whole(kind: str, rng: torch.Generator) -> None:
    mask, scores = random_mask((3, 50), 0.5, rng, torch.device("cpu")), torch.rand(3, 50, generator=rng)
    options: dict[str, Any] = {
        "first": {},
        "generator": {"order": "random"},
        "seed": {"order": "random", "seed": 4},
        "scores": {"order": "random", "scores": scores.requires_grad_()},
    }[kind]

    def run(m: Tensor) -> Tensor:
        indices, valid, count = masked_indices(m, 8, limit=m.sum(-1).max() - 1, **options)
        return (indices * valid).sum(-1) + count

    torch.manual_seed(0)
    expected = run(mask)
    torch.manual_seed(0)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(mask)
    assert got.shape == expected.shape
    if kind != "generator":
        assert_equal(got, expected)


def test_scores_get_no_gradient(device: torch.device) -> None:
    scores = torch.rand(2, 9, device=device, requires_grad=True)
    out = masked_indices(torch.ones(2, 9, dtype=torch.bool, device=device), 3, order="random", scores=scores)
    assert not any(t.requires_grad for t in out)


M = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([True], 1), {}, TypeError, "mask must be a torch.Tensor, got list"),
        ((M.float(), 1), {}, TypeError, r"mask must be bool, got torch.float32 \(compare it"),
        ((M[0, 0], 1), {}, ValueError, "mask must have at least one dimension"),
        ((M, -1), {}, ValueError, "size must be at least 0, got -1"),
        ((M, 1.5), {}, TypeError, "size must be an integer, got float"),
        ((M, 1), {"order": "last"}, ValueError, "order must be 'first' or 'random', got 'last'"),
        ((M, 1), {"seed": 1}, ValueError, "seed needs order='random'"),
        ((M, 1), {"row_ids": torch.zeros(2)}, ValueError, "row_ids needs order='random'"),
        ((M, 1), {"order": "random", "row_ids": torch.zeros(2)}, ValueError, "row_ids needs a seed"),
        ((M, 1), {"order": "random", "seed": 1, "scores": M.float()}, ValueError, "one of generator, seed and scores"),
        ((M, 1), {"order": "random", "seed": True}, TypeError, "seed must be an integer, got bool"),
        ((M, 1), {"order": "random", "scores": M.long()}, TypeError, "scores must be float32"),
        ((M, 1), {"order": "random", "scores": M.float()[:1]}, ValueError, r"scores must have shape \(2, 6\)"),
        ((M, 1), {"order": "random", "seed": 1, "row_ids": torch.zeros(2)}, TypeError, "row_ids must hold integers"),
        ((M, 1), {"order": "random", "seed": 1, "row_ids": torch.ones(3).int()}, ValueError, "row_ids must have shape"),
        ((M, 1), {"limit": -1}, ValueError, "limit must be at least 0, got -1"),
        ((M, 1), {"limit": torch.zeros(3).long()}, ValueError, r"limit must broadcast to \(2,\)"),
        ((M, 1), {"limit": torch.zeros(2)}, TypeError, "limit must hold integers, got torch.float32"),
        ((M, 1), {"fill_value": 0.5}, TypeError, "fill_value must be an integer, got float"),
    ],
)  # fmt: skip
def test_errors(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"syncfree_ext.masked_indices: {message}|{message}"):
        masked_indices(*arguments, **options)


def test_errors_of_the_op(device: torch.device) -> None:
    mask = M.to(device)
    for options, message in (
        ({"keys": mask.float(), "seed": 1}, "keys and seed must not both be given"),
        ({"row_ids": torch.zeros(2, dtype=torch.int64, device=device)}, "row_ids must come with a seed"),
        ({"keys": mask.float().T}, "keys must have the shape of mask"),
        ({"limit": torch.zeros(3, dtype=torch.int64, device=device)}, "limit must be contiguous int64 with one entry"),
        ({"max_kept": -1}, "max_kept must not be negative"),
    ):
        with pytest.raises(REFUSED, match=message):
            OP(mask, 1, **options)


# ----------------------------------------------------------------------------------------------------------- host bound


def test_host_count_bound(rng: torch.Generator) -> None:
    for density in (0.0, 0.3, 1.0):
        mask = random_mask((7, 53), density, rng, torch.device("cpu"))
        largest = max(int(row.sum()) for row in mask)
        for multiple in (1, 8, 64):
            bound = host_count_bound(mask, 40, multiple)
            assert bound == min(40, math.ceil(largest / multiple) * multiple)
            out = masked_indices(mask, bound)
            full = masked_indices(mask, 40)
            assert_equal(out.indices, full.indices[:, :bound])
            assert not full.valid[:, bound:].any()
    assert host_count_bound(torch.zeros(0, 5, dtype=torch.bool), 9) == 0
    assert host_count_bound(torch.zeros(5, 0, dtype=torch.bool), 9) == 0


def test_host_count_bound_errors() -> None:
    with pytest.raises(TypeError, match="mask must be bool"):
        host_count_bound(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="multiple must be at least 1"):
        host_count_bound(M, 1, 0)
    with pytest.raises(ValueError, match="at least one dimension"):
        host_count_bound(M[0, 0], 1)
    with pytest.raises(ValueError, match="must be on the CPU, got meta"):
        host_count_bound(M.to("meta"), 1)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("size", [2**60, 2**61 + 1, 2**62, 2**63 - 1])
def test_a_size_that_no_memory_holds(rows: int, size: int, device: torch.device) -> None:
    """rows * size * 8 bytes must not wrap around to something that can be had."""
    mask = torch.ones(rows, 5, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=f"syncfree::masked_indices: size must leave an address .* got {size}"):
        masked_indices(mask, size)
