"""The chunk plan, the compaction and the small formulas, through the test-only native module.

`make test` builds it where pybind11 is there; it lies in the build folder and is never shipped.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def native() -> ModuleType:
    found = sorted((ROOT / "build" / "cmake").glob("syncfree_native*.so"))
    if not found:
        pytest.skip("tests/native is not built (SYNCFREE_NATIVE=1 python setup.py build_ext --inplace)")
    spec = importlib.util.spec_from_file_location("syncfree_native", found[-1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["syncfree_native"] = module
    spec.loader.exec_module(module)
    return module


def test_chunks_cover_the_rows_evenly(native: ModuleType) -> None:
    draw = random.Random(torch.initial_seed())
    for _ in range(2000):
        rows, row_bytes = draw.randrange(1, 200_000), draw.choice([64, 4096, 128_256 * 2, 256_000 * 4])
        multiple, min_rows = draw.choice([1, 128]), draw.choice([1, 256, 1024])
        size, count = native.plan_chunks(rows, row_bytes, multiple=multiple, min_rows=min_rows)
        assert 1 <= size <= rows
        assert (count - 1) * size < rows <= count * size
        assert size % multiple == 0 or size == rows
        # No fewer rows than asked for, unless spreading them evenly over the chunks takes some away.
        assert size >= min(rows, min_rows) // 2
        # The budget holds, but for the rows that are kept together whatever they cost.
        assert size * row_bytes <= max(1 << 30, (max(min_rows, multiple) + multiple) * row_bytes)


def test_live_rows_are_dealt_to_few_chunks(native: ModuleType) -> None:
    """Each live row to one chunk, in order, as few chunks as there can be, none but the last with spare rows."""
    draw = random.Random(torch.initial_seed())
    group, spare = 256, 64
    for _ in range(500):
        rows = draw.choice([draw.randrange(1, 300), draw.randrange(1, 70_000), 8192, 16384])
        plan = native.plan_chunks(rows, 64, workspace_bytes=64 * draw.randrange(1, 9000), multiple=group)
        for size, count, spare_rows in ((*plan, 0), native.with_spare(rows, *plan, spare)):
            assert size <= rows
            assert (count - 1) * (size - spare_rows) + spare_rows < rows <= count * size
            edges = [n * (size - spare_rows) + extra for n in (1, 2, 3) for extra in (-1, 0, 1, 63, 64, 65)]
            for live in {0, 1, rows, draw.randrange(rows + 1), *(n for n in edges if 0 < n <= rows)}:
                chunks = [native.live_rows(live, size, spare_rows, group, i) for i in range(count)]
                end = 0
                for first, held in chunks:
                    assert first == end
                    assert 0 <= held <= size
                    end += held
                assert end == live
                used = [held for _, held in chunks if held]
                assert all(
                    held <= size - spare_rows and held % min(group, size - spare_rows) == 0 for held in used[:-1]
                )
                assert [held for _, held in chunks][: len(used)] == used
                fewest = -(-max(live - spare_rows, 1) // (size - spare_rows)) if live else 0
                assert len(used) <= fewest


def test_a_few_rows_more_take_no_chunk_more(native: ModuleType) -> None:
    assert native.with_spare(8192, 2048, 4, 64) == (2112, 4, 64)
    for live, held in ((4096, [2048, 2048]), (4160, [2048, 2112]), (4161, [1536, 1536, 1089]), (2112, [2112])):
        assert [native.live_rows(live, 2112, 64, 256, i)[1] for i in range(4)] == [*held, 0, 0, 0][:4]
    # One chunk has all the room there is, and no chunk is larger than the batch.
    assert native.with_spare(300, 300, 1, 64) == (300, 1, 0)
    assert native.with_spare(300, 256, 2, 64) == (256, 2, 0)


def test_arrays_of_a_workspace_do_not_overlap(native: ModuleType) -> None:
    draw = random.Random(torch.initial_seed())
    for _ in range(200):
        floats = [draw.choice([0, 1, 63, 64, 65, draw.randrange(5000)]) for _ in range(draw.randrange(12))]
        measured, used, offsets = native.carve(floats)
        assert measured == used
        end = 0
        for n, at in zip(floats, offsets, strict=True):
            assert (at == -1) == (n == 0)
            if n:
                assert at % 256 == 0
                assert at >= end
                end = at + 4 * n
        assert end <= used


def test_chunk_rows_are_taken_as_they_are(native: ModuleType) -> None:
    assert native.plan_chunks(1000, 64, chunk_rows=1, multiple=1) == (1, 1000)
    assert native.plan_chunks(1000, 64, chunk_rows=1) == (128, 8)
    assert native.plan_chunks(1000, 64, chunk_rows=5000) == (1000, 1)
    assert native.plan_chunks(0, 64) == (0, 0)


def test_a_workspace_may_go_below_the_least_rows(native: ModuleType) -> None:
    assert native.plan_chunks(8192, 1 << 20, workspace_bytes=256 << 20) == (256, 32)
    assert native.plan_chunks(8192, 1 << 20, workspace_bytes=1, multiple=1) == (1, 8192)


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_rows_of_logits_start_on_16_bytes(native: ModuleType, element_bytes: int) -> None:
    for classes in range(1, 100):
        pitch = native.logits_pitch(classes, element_bytes)
        assert pitch >= classes
        assert pitch * element_bytes % 16 == 0
        assert (pitch - classes) * element_bytes < 16


def test_compaction_is_stable(native: ModuleType) -> None:
    draw = random.Random(torch.initial_seed())
    for rows in (1, 2, 17, 1000):
        for shift in (0, 1, 3):
            target = [draw.choice([-100, 0, 1, 2]) for _ in range(rows)]
            scored = [i for i in range(rows) if i + shift < rows and target[i + shift] != -100]
            rest = [i for i in range(rows) if i not in set(scored)]
            assert native.compact(target, sequence=rows, shift=shift, num_classes=3) == scored + rest


def test_the_power_of_two_of_half_gradients_leaves_room(native: ModuleType) -> None:
    for weight in (1.0, 1e-3, 50.0):
        for multiplier in (1.0, 1e-6, 65536.0):
            for scale in (1.0, -0.1, 8.0):
                for z_weight in (0.0, 1e-4, 1e-2):
                    exponent = native.half_exponent(weight, multiplier, scale, z_weight)
                    largest = multiplier * max(weight, 1.0) * abs(scale) * (2 + 256 * z_weight)
                    assert 2**9 <= largest * 2.0**exponent <= 2**10
    assert native.half_exponent(float("inf")) == 0
    assert native.half_exponent(max_multiplier=0.0) == 0


def test_softcap_slope_is_the_derivative_of_the_cap(native: ModuleType) -> None:
    for cap in (1.0, 30.0):
        for s in (0.0, 1e-6, 0.3, -2.0, 100.0, -1e4):
            x = torch.tensor(s, dtype=torch.float64, requires_grad=True)
            (cap * torch.tanh(x / cap)).backward()
            assert x.grad is not None
            assert math.isclose(native.softcap_slope(s, cap), x.grad.item(), rel_tol=1e-9, abs_tol=1e-15)
