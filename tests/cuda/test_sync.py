"""No function makes the host wait for the GPU: torch's sync checker, and returns while earlier work still runs.

The checker sees what goes through torch (copies to the host, allocations that synchronise). What the library
itself might wait for, it cannot see: that is what the backlog shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import ALL_EXTRAS

pytestmark = pytest.mark.cuda

BT, H, V = 600, 64, 1000
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def no_sync() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def tensor(*values: float) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values if len(values) > 1 else values[0], device="cuda")


# Functions stand for what is made on the device before the checker is on.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignored": 0.4},
    "all ignored": {"ignored": 1.0},
    "ignored, none": {"ignored": 0.4, "reduction": "none"},
    "ignore_index a class": {"ignore_index": 3},
    "ignore_index None": {"ignore_index": None},
    "int32 target": {"int32": True},
    "bias": {"bias": True},
    "class weights": {"weight": lambda: torch.rand(V, device="cuda")},
    "bfloat16 class weights": {"weight": lambda: torch.rand(V, device="cuda").bfloat16()},
    "token weights": {"token_weight": lambda: torch.rand(BT, device="cuda")},
    "num_items int": {"num_items": 500},
    "num_items float": {"num_items": 0.5},
    "num_items int64 tensor": {"num_items": tensor(500)},
    "num_items float tensor": {"num_items": tensor(12.5)},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and weights": {"label_smoothing": 0.1, "weight": lambda: torch.rand(V, device="cuda")},
    "softcap": {"softcap": 20.0},
    "token scaling": {"token_scaling": True},
    "logit_scale": {"logit_scale": 0.5},
    "logit_scale tensor": {"logit_scale": tensor(0.5)},
    "z loss": {"z_loss_weight": 1e-3},
    "z loss tensor": {"z_loss_weight": tensor(1e-3)},
    "shift": {"shift": 1},
    "extras": ALL_EXTRAS,
    "extras, none": {**ALL_EXTRAS, "reduction": "none"},
    "accuracy": {"return_token_accuracy": True},
    "strided": {"strided": True},
    "out of range": {"out_of_range": True},
}
LINEAR_OPTIONS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "chunks": {"chunk_rows": 128},
    "workspace": {"workspace_bytes": 2**18},
    "lean": {"accum_dtype": "weight", "chunk_rows": 128},
    "float32 accumulation": {"accum_dtype": torch.float32, "chunk_rows": 128},
    "only input": {"trainable": "x"},
    "only weight": {"trainable": "w"},
    "only bias": {"trainable": "b", "bias": True},
    "nothing": {"trainable": ""},
    "chunks, only input": {"trainable": "x", "chunk_rows": 128},
    "everything": {
        **ALL_EXTRAS,
        "bias": True,
        "ignored": 0.3,
        "weight": lambda: torch.rand(V, device="cuda"),
        "token_weight": lambda: torch.rand(BT, device="cuda"),
        "num_items": tensor(300.0),
        "label_smoothing": 0.1,
        "softcap": 15.0,
        "token_scaling": True,
        "logit_scale": 0.9,
        "z_loss_weight": 1e-3,
        "shift": 1,
        "chunk_rows": 128,
    },
}
_SETUP = ("ignored", "int32", "bias", "strided", "out_of_range", "trainable")


class Step:
    """A forward and a backward whose inputs all exist already."""

    def __init__(
        self, options: dict[str, Any], dtype: torch.dtype, rows: int = BT, hidden: int = H, classes: int = V
    ) -> None:
        setup = {name: options[name] for name in _SETUP if name in options}
        self.options = {k: v() if callable(v) else v for k, v in options.items() if k not in _SETUP}
        if self.options.get("accum_dtype") == "weight":
            self.options["accum_dtype"] = dtype
        trainable = setup.get("trainable", "xwb")
        self.x = torch.randn(rows, hidden, device="cuda", dtype=dtype)
        self.w = torch.randn(classes, hidden, device="cuda", dtype=dtype) / hidden**0.5
        if setup.get("strided"):
            self.x, self.w = torch.randn(hidden, rows, device="cuda", dtype=dtype).T, self.w.repeat(1, 2)[:, ::2]
        self.bias = torch.randn(classes, device="cuda") if setup.get("bias") else None
        target = torch.randint(0, classes, (rows,), device="cuda")
        if "ignored" in setup:
            target[torch.rand(rows, device="cuda") < setup["ignored"]] = -100
        if setup.get("out_of_range"):
            target[3], target[4] = classes, -7
        self.target = target.int() if setup.get("int32") else target
        self.logits = torch.randn(rows, classes, device="cuda", dtype=dtype).requires_grad_()
        self.x.requires_grad_("x" in trainable)
        self.w.requires_grad_("w" in trainable)
        if self.bias is not None:
            self.bias.requires_grad_("b" in trainable)
        self.leaves = [t for t in (self.x, self.w, self.bias) if t is not None and t.requires_grad]
        per_row = self.options.get("reduction") == "none"
        self.upstreams = [torch.ones(rows if per_row else (), device="cuda") * g for g in (1.0, 0.5)]

    def linear(self) -> list[Tensor]:
        out = syncfree_ext.linear_cross_entropy(self.x, self.w, self.target, linear_bias=self.bias, **self.options)
        return self._backward(out, self.leaves)

    def from_logits(self) -> list[Tensor]:
        return self._backward(syncfree_ext.cross_entropy(self.logits, self.target, **self.options), [self.logits])

    def _backward(self, out: Any, leaves: list[Tensor]) -> list[Tensor]:
        loss = out if isinstance(out, Tensor) else out.loss
        results = [t for t in ([out] if isinstance(out, Tensor) else out) if t is not None]
        if loss.requires_grad:
            # The second backward takes the way through a retained graph.
            results += torch.autograd.grad(loss, leaves, self.upstreams[0], retain_graph=True)
            results += torch.autograd.grad(loss, leaves, self.upstreams[1])
        return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LINEAR_OPTIONS)
def test_linear_cross_entropy_under_the_checker(name: str, dtype: torch.dtype) -> None:
    step = Step(LINEAR_OPTIONS[name], dtype)
    step.linear()
    with no_sync():
        step.linear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_under_the_checker(name: str, dtype: torch.dtype) -> None:
    step = Step(OPTIONS[name], dtype)
    step.from_logits()
    with no_sync():
        step.from_logits()


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_under_the_checker(autocast: torch.dtype) -> None:
    step = Step({"bias": True, "chunk_rows": 128}, torch.float32)
    with torch.autocast("cuda", dtype=autocast):
        step.linear()
        with no_sync():
            step.linear()


def test_no_grad_and_modules_under_the_checker() -> None:
    step = Step({}, torch.bfloat16)
    head = syncfree_ext.LinearCrossEntropyHead(H, V, device="cuda", dtype=torch.bfloat16)
    module = syncfree_ext.FusedLinearCrossEntropyLoss(label_smoothing=0.1)

    def run() -> None:
        with torch.no_grad():
            step.linear()
            step.from_logits()
        with torch.inference_mode():
            step.linear()
        head(step.x, step.target).backward()
        module(step.x, step.w, step.target).backward()

    run()
    with no_sync():
        run()


def test_small_ops_under_the_checker() -> None:
    target = torch.randint(-1, V, (2, 3000), device="cuda")
    weight, token_weight = torch.rand(V, device="cuda"), torch.rand(2, 3000, device="cuda")
    items, scale = torch.tensor(7, device="cuda"), torch.tensor(0.5, device="cuda")
    grads = [torch.randn(300, 7, device="cuda", dtype=dtype) for dtype in DTYPES]
    rows = [torch.rand(300, device="cuda"), torch.empty(0, device="cuda"), torch.rand(300, device="cuda")]

    def run() -> None:
        for shift in (0, 1):
            torch.ops.syncfree.count_targets(target, V, weight=weight, ignore_index=-1, shift=shift)
            torch.ops.syncfree.count_targets(
                target, V, token_weight=token_weight, num_items=items, ignore_index=-1, shift=shift
            )
        torch.ops.syncfree.scale_unless_one_(grads, scale, [])
        torch.ops.syncfree.scale_unless_one_(grads, scale, rows)

    run()
    with no_sync():
        run()


# A backlog of about a second, long against any host time of ours.
CYCLES = 2_000_000_000
BACKLOG_OPTIONS = ["plain", "ignored", "num_items int64 tensor", "none", "class weights", "chunks", "everything"]


def returns_before(stream: torch.cuda.Stream, fill: Callable[[], None], call: Callable[[], Any]) -> None:
    """The call comes back while what was queued on the stream before it still runs."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        fill()
        done.record()
    assert not done.query(), "the backlog was over before the call began"
    results = call()
    still_running = not done.query()
    torch.cuda.synchronize()
    assert still_running, "the host waited for the backlog"
    del results


def sleep() -> None:
    torch.cuda._sleep(CYCLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKLOG_OPTIONS)
@pytest.mark.parametrize("where", ["same stream", "side stream"])
def test_linear_cross_entropy_returns_before_a_backlog(where: str, name: str, dtype: torch.dtype) -> None:
    step = Step(LINEAR_OPTIONS[name], dtype)
    stream = torch.cuda.current_stream() if where == "same stream" else torch.cuda.Stream()
    returns_before(stream, sleep, step.linear)


@pytest.mark.parametrize("name", ["plain", "none", "class weights"])
@pytest.mark.parametrize("where", ["same stream", "side stream"])
def test_cross_entropy_returns_before_a_backlog(where: str, name: str) -> None:
    step = Step(OPTIONS[name], torch.bfloat16)
    stream = torch.cuda.current_stream() if where == "same stream" else torch.cuda.Stream()
    returns_before(stream, sleep, step.from_logits)


def test_returns_while_a_copy_to_the_host_runs() -> None:
    """A copy of 2 GiB into pinned memory occupies a copy engine for some 40 ms."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(2**31, dtype=torch.uint8, pin_memory=True)
    step = Step({"ignored": 0.3}, torch.bfloat16)

    def copy() -> None:
        pinned.copy_(source, non_blocking=True)

    returns_before(torch.cuda.Stream(), copy, step.linear)


def test_the_checker_and_the_backlog_see_a_sync() -> None:
    """Both tests must fail for a function that waits."""
    x = torch.randn(10, device="cuda")
    with no_sync(), pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with pytest.raises(AssertionError, match="the host waited"):
            returns_before(stream, sleep, torch.cuda.synchronize)
