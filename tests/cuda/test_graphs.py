"""Capture in CUDA graphs: a replay follows new inputs, targets, counts, divisors and upstream gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import ALL_EXTRAS
from syncfree_ext import reference
from tolerances import assert_close_rel, assert_equal

pytestmark = pytest.mark.cuda

BT, H, V = 500, 128, 4096  # on Hopper: dX in two parts, dW in 24 bits between chunks


def capture(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The graph of a function and its static outputs, after warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "chunks": {"chunk_rows": 128},
    "chunks, lean": {"chunk_rows": 128, "accum_dtype": "weight"},
    "num_items": {"num_items": True},
    "class weights": {"weight": True, "label_smoothing": 0.1},
    "token weights": {"token_weight": True, "token_scaling": True},
    "tensors": {"logit_scale": True, "z_loss_weight": True},
    "softcap, shift": {"softcap": 10.0, "shift": 1},
    "extras": ALL_EXTRAS,
    "extras, none, bias": {**ALL_EXTRAS, "reduction": "none", "bias": True},
    "only input": {"trainable": "x"},
    "only weight": {"trainable": "w"},
}


class Static:
    """Tensors at fixed addresses that replays read, and new values for them."""

    def __init__(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        options = dict(options)
        self.trainable = options.pop("trainable", "xwb")
        self.bias = torch.zeros(V, device="cuda") if options.pop("bias", False) else None
        self.x = torch.zeros(BT, H, device="cuda", dtype=dtype)
        self.w = torch.zeros(V, H, device="cuda", dtype=dtype)
        self.target = torch.zeros(BT, dtype=torch.int64, device="cuda")
        self.upstream = torch.ones(BT if options.get("reduction") == "none" else (), device="cuda")
        for name, shape in (
            ("weight", V),
            ("token_weight", BT),
            ("num_items", ()),
            ("logit_scale", ()),
            ("z_loss_weight", ()),
        ):
            if options.get(name) is True:
                options[name] = torch.ones(shape, device="cuda")
        if options.get("accum_dtype") == "weight":
            options["accum_dtype"] = dtype if dtype == torch.bfloat16 else None
        self.options = options
        self.refresh(torch.Generator().manual_seed(0), 0.0, 1.0)

    @torch.no_grad()
    def refresh(self, rng: torch.Generator, ignored: float, upstream: float) -> None:
        self.x.copy_(torch.randn(BT, H, generator=rng))
        self.w.copy_(torch.randn(V, H, generator=rng) / H**0.5)
        target = torch.randint(0, V, (BT,), generator=rng)
        target[torch.rand(BT, generator=rng) < ignored] = -100
        self.target.copy_(target)
        self.upstream.fill_(upstream)
        if self.upstream.dim():
            self.upstream.mul_(torch.rand(BT, generator=rng).cuda())
        if self.bias is not None:
            self.bias.copy_(torch.randn(V, generator=rng))
        for value in self.options.values():
            if isinstance(value, Tensor):
                value.copy_(torch.rand(value.shape, generator=rng) + 0.5)
        if isinstance(self.options.get("num_items"), Tensor):
            self.options["num_items"].mul_(BT)

    def run(self) -> list[Tensor]:
        leaves = [
            None if t is None else t.detach().requires_grad_(name in self.trainable)
            for name, t in (("x", self.x), ("w", self.w), ("b", self.bias))
        ]
        out = syncfree_ext.linear_cross_entropy(
            leaves[0], leaves[1], self.target, linear_bias=leaves[2], **self.options
        )
        loss = out if isinstance(out, Tensor) else out.loss
        grads = torch.autograd.grad(loss, [t for t in leaves if t is not None and t.requires_grad], self.upstream)
        return [*([out] if isinstance(out, Tensor) else out), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_replays_follow_their_inputs(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    static = Static(OPTIONS[name], dtype)
    graph, outputs = capture(static.run)
    # Different counts, none and all ignored among them; upstream gradients of 1 and others, in both orders.
    for ignored, upstream in ((0.0, 1.0), (0.5, 1.0), (0.97, 0.5), (1.0, 2.0), (0.2, 3.0), (0.0, 1.0)):
        static.refresh(rng, ignored, upstream)
        graph.replay()
        got = [t.detach().clone() for t in outputs]
        expected = static.run()
        for a, b in zip(got, expected, strict=True):
            # The same kernels on the same data; cuBLAS may choose another algorithm while capturing.
            tol = 1e-5 if a.dtype == torch.float32 else 4e-3
            if a.is_floating_point():
                assert_close_rel(a, b, tol, 1e-6)
            else:
                assert (a != b).sum() <= 2
        again = [t.detach().clone() for t in outputs]
        graph.replay()
        for a, b in zip(outputs, again, strict=True):
            assert_equal(a, b, "a replay on the same inputs")


def test_a_replay_follows_num_items_and_matches_the_reference(rng: torch.Generator) -> None:
    static = Static({"num_items": True}, torch.float32)
    graph, outputs = capture(static.run)
    for items in (1.0, 250.0, 0.25, -4.0, 0.0):
        static.refresh(rng, 0.3, 0.7)
        static.options["num_items"].fill_(items)
        graph.replay()
        ref = reference.linear_cross_entropy_gradients(
            static.x, static.w, static.target, num_items=items, grad_output=0.7
        )
        for got, want in zip(outputs, (ref.output.loss, ref.dx, ref.dw), strict=True):
            assert want is not None
            assert_close_rel(got, want, 1e-5)


def test_a_number_is_baked_in(rng: torch.Generator) -> None:
    static = Static({"num_items": 100}, torch.float32)
    graph, outputs = capture(static.run)
    static.refresh(rng, 0.5, 1.0)
    graph.replay()
    ref = reference.linear_cross_entropy_gradients(static.x, static.w, static.target, num_items=100)
    assert_close_rel(outputs[0], ref.output.loss, 1e-5)


def test_a_bad_target_spoils_only_its_own_replay(rng: torch.Generator) -> None:
    static = Static({}, torch.bfloat16)
    graph, outputs = capture(static.run)
    static.refresh(rng, 0.0, 1.0)
    static.target[7] = 10**9
    graph.replay()
    assert outputs[0].isnan()
    static.target[7] = 7
    graph.replay()
    assert all(t.isfinite().all() for t in outputs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_in_a_graph(dtype: torch.dtype, reduction: str, rng: torch.Generator) -> None:
    logits = torch.zeros(BT, V, device="cuda", dtype=dtype)
    target = torch.zeros(BT, dtype=torch.int64, device="cuda")
    upstream = torch.ones(BT if reduction == "none" else (), device="cuda")

    def run() -> list[Tensor]:
        leaf = logits.detach().requires_grad_()
        out = syncfree_ext.cross_entropy(leaf, target, reduction=reduction, z_loss_weight=0.01, **ALL_EXTRAS)
        return [*out, *torch.autograd.grad(out.loss, leaf, upstream)]

    graph, outputs = capture(run)
    for ignored in (0.0, 0.6, 1.0, 0.1):
        logits.copy_(torch.randn(BT, V, generator=rng))
        new = torch.randint(0, V, (BT,), generator=rng)
        new[torch.rand(BT, generator=rng) < ignored] = -100
        target.copy_(new)
        upstream.fill_(0.3 + ignored)
        graph.replay()
        got = [t.detach().clone() for t in outputs]
        for a, b in zip(got, run(), strict=True):
            assert_equal(a, b)


def test_small_ops_in_a_graph(rng: torch.Generator) -> None:
    target = torch.zeros(5000, dtype=torch.int64, device="cuda")
    scale, grad = torch.ones((), device="cuda"), torch.zeros(300, 70, device="cuda", dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        counts, rows = torch.ops.syncfree.count_targets(target, V)
        torch.ops.syncfree.scale_unless_one_([grad], scale, [])
        return [counts, rows]

    graph, (counts, rows) = capture(run)
    for ignored, factor in ((0.0, 1.0), (0.7, 0.5), (1.0, -3.0)):
        new = torch.randint(0, V, (5000,), generator=rng)
        new[torch.rand(5000, generator=rng) < ignored] = -100
        target.copy_(new)
        scale.fill_(factor)
        values = torch.randn(300, 70, generator=rng).to(torch.bfloat16)
        grad.copy_(values)
        graph.replay()
        expected, expected_rows = reference.count_targets(target, V)
        torch.testing.assert_close(counts, expected, rtol=1e-12, atol=0)
        assert_equal(rows, expected_rows)
        assert_equal(grad, (values.float() * factor).bfloat16())


def test_a_training_step_in_a_graph(rng: torch.Generator) -> None:
    """Forward, backward and update captured together train as the same steps in eager mode do."""
    x0, w0 = torch.randn(BT, H, generator=rng).cuda(), torch.randn(V, H, generator=rng).cuda() / 8
    targets = [torch.randint(0, V, (BT,), generator=rng).cuda() for _ in range(5)]
    target = targets[0].clone()

    def step(w: Tensor) -> list[Tensor]:
        leaf = w.detach().requires_grad_()
        loss = syncfree_ext.linear_cross_entropy(x0, leaf, target)
        (grad,) = torch.autograd.grad(loss, leaf)
        w.sub_(grad)
        return [loss]

    w = w0.clone()
    graph, (loss,) = capture(lambda: step(w))
    losses = []
    w.copy_(w0)
    for t in targets:
        target.copy_(t)
        graph.replay()
        losses.append(loss.detach().clone())
    w.copy_(w0)
    for t, got in zip(targets, losses, strict=True):
        target.copy_(t)
        assert_close_rel(got, step(w)[0], 1e-5)
