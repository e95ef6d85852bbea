"""What a copy between host and GPU costs that the host waits for, through the whole finder, on a simulated card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu import PINNED, Card, FakeGpu
from syncfree_ext.syncs import find_syncs, step
from syncfree_ext.syncs.timer import _bytes_copied


def test_a_copy_from_ordinary_memory_is_replaced_by_one_from_pinned_memory() -> None:
    """Through the whole finder; the meta device stands for the GPU's."""

    class Loading(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name != "aten::_to_copy":
                return super().__torch_dispatch__(func, types, args, kwargs)
            self.gpu.drain()
            self.gpu.host(args[0].nbytes / 5e9)
            self.gpu.done = self.gpu.time
            return func(*args, **kwargs)

    gpu = FakeGpu()
    gpu.type = "meta"
    batch = torch.ones(10**6)
    x = torch.ones(3)
    with Loading(gpu, {"aten::exp": 200e-6}), find_syncs(warmup=1, steps=4, gpu=gpu) as report:
        for _ in range(6):
            for _ in range(50):
                x.exp()
            batch.to("meta")
            step()
    (row,) = report.rows
    assert row.kind == "pageable copy"
    assert row.saves_ms == pytest.approx(1e3 * batch.nbytes * (1 / 5e9 - 1 / PINNED), abs=0.02)


def test_a_number_that_is_put_needs_its_engine_and_leaves_no_copy() -> None:
    """The meta device stands for the GPU's."""

    class Putting(Card):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name != "aten::index_put_":
                return super().__torch_dispatch__(func, types, args, kwargs)
            self.gpu.drain()
            self.gpu.work(3e-3)  # behind other copies
            self.gpu.drain()
            return func(*args, **(kwargs or {}))

    gpu = FakeGpu()
    gpu.type = "meta"
    x, places = torch.zeros(8, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    with Putting(gpu), find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(3):
            for _ in range(50):
                x.exp()
            torch.ops.aten.index_put_(x, [places], torch.ones(()))
            step()
    (row,) = report.rows
    assert (row.kind, row.detail) == ("pageable copy", "number to device")
    assert row.saves_ms == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("source", "result", "copied"),
    [
        (torch.ones(6), torch.ones(6, device="meta"), 24),
        (torch.ones(6), torch.ones(6, device="meta", dtype=torch.double), 48),
        (torch.ones(6, dtype=torch.double), torch.ones(6, device="meta", dtype=torch.half), 48),
        (torch.ones(6).to_sparse(), torch.ones(6).to_sparse(), 0),
    ],
)
def test_how_much_is_copied(source: Tensor, result: Tensor, copied: int) -> None:
    aten = torch.ops.aten
    assert _bytes_copied(aten._to_copy.default, (source,), result) == copied
    assert _bytes_copied(aten.copy_.default, (result, source), result) == copied
