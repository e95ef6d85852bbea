"""Work goes to the current stream and to the device of the arguments, from many streams and threads at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import ALL_EXTRAS, loss_and_gradients
from tolerances import assert_close_rel, assert_equal

pytestmark = pytest.mark.cuda

BT, H, V = 700, 128, 4096  # on Hopper: dX in two parts, dW in 24 bits between chunks
CYCLES = 200_000_000  # about 0.1 s


class Problem:
    def __init__(self, rng: torch.Generator, dtype: torch.dtype, device: str = "cuda") -> None:
        self.x = torch.randn(BT, H, generator=rng).to(device, dtype)
        self.w = (torch.randn(V, H, generator=rng) / H**0.5).to(device, dtype)
        target = torch.randint(0, V, (BT,), generator=rng)
        target[torch.rand(BT, generator=rng) < 0.3] = -100
        self.target = target.to(device)

    def run(self, **options: Any) -> list[Tensor]:
        out, grads = loss_and_gradients(self.x, self.w, self.target, None, 0.5, chunk_rows=256, **options)
        results = [out] if isinstance(out, Tensor) else list(out)
        return [*(t.detach() for t in results), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, ALL_EXTRAS], ids=["mean", "none", "extras"])
def test_work_follows_the_current_stream(options: dict[str, Any], dtype: torch.dtype, rng: torch.Generator) -> None:
    """Inputs appear late on a side stream: an op on another stream would read what was there before."""
    late, static = Problem(rng, dtype), Problem(rng, dtype)
    expected = late.run(**options)
    static.run(**options)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        static.run(**options)
        torch.cuda._sleep(CYCLES)
        for name in ("x", "w", "target"):
            getattr(static, name).copy_(getattr(late, name), non_blocking=True)
        got = static.run(**options)
    side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert_equal(a, b)


def test_cross_entropy_follows_the_current_stream(rng: torch.Generator) -> None:
    new, target = torch.randn(300, V, generator=rng).cuda(), torch.randint(0, V, (300,), generator=rng).cuda()
    expected = syncfree_ext.cross_entropy(new, target, reduction="none")
    logits, side = torch.zeros_like(new), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        logits.copy_(new)
        leaf = logits.requires_grad_()
        loss = syncfree_ext.cross_entropy(leaf, target, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
    side.synchronize()
    assert_equal(loss.detach(), expected)
    assert grad.isfinite().all()


def test_two_streams_at_once(rng: torch.Generator) -> None:
    problems = [Problem(rng, torch.bfloat16) for _ in range(2)]
    expected = [p.run() for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[list[Tensor]]] = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(problems[i].run())
    torch.cuda.synchronize()
    for i in range(2):
        for got in results[i]:
            for a, b in zip(got, expected[i], strict=True):
                assert_equal(a, b)


def test_backward_on_the_stream_of_forward(rng: torch.Generator) -> None:
    """Backward called under another stream: autograd runs it on that of forward and orders the two."""
    p = Problem(rng, torch.bfloat16)
    expected = p.run()
    x, w = p.x.detach().requires_grad_(), p.w.detach().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = syncfree_ext.linear_cross_entropy(x, w, p.target, chunk_rows=256)
    torch.cuda.current_stream().wait_stream(side)
    loss.backward(torch.tensor(0.5, device="cuda"))
    torch.cuda.synchronize()
    for a, b in zip((loss.detach(), x.grad, w.grad), expected, strict=True):
        assert a is not None
        assert_equal(a, b)


def test_threads(rng: torch.Generator) -> None:
    """One stream for each thread; handles and caches that threads share must not mix up their work."""
    problems = [Problem(rng, torch.bfloat16) for _ in range(4)]
    expected = [p.run() for p in problems]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(10):
                    got = problems[i].run()
                    stream.synchronize()
                    for a, b in zip(got, expected[i], strict=True):
                        assert_equal(a, b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bitwise_repeatable_a_hundred_times(dtype: torch.dtype, rng: torch.Generator) -> None:
    p = Problem(rng, dtype)
    first = p.run(z_loss_weight=0.01)
    for _ in range(100):
        for a, b in zip(p.run(z_loss_weight=0.01), first, strict=True):
            assert_equal(a, b)


def test_the_device_of_the_arguments(rng: torch.Generator) -> None:
    """Arguments on the second GPU while the first is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = Problem(rng, torch.bfloat16)
    there = Problem(rng, torch.bfloat16, "cuda:1")
    for name in ("x", "w", "target"):
        getattr(there, name).copy_(getattr(here, name))
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    for options in ({}, {"reduction": "none"}, ALL_EXTRAS):
        for a, b in zip(there.run(**options), here.run(**options), strict=True):
            assert a.device.index == 1
            assert_close_rel(a, b, 1e-6)
    assert torch.cuda.current_device() == 0
