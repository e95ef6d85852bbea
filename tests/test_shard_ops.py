"""The ops over a slice of the vocabulary, one by one: values against the reference of all classes, fakes, opcheck."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from helpers import poisoned_memory
from syncfree_ext import reference
from test_fakes import assert_fake_agrees, described
from tolerances import ROUNDOFF, assert_close_rel, assert_equal

ops = torch.ops.syncfree

BT, H, V = 11, 12, 40
FIRST, LAST = 8, 28  # a slice whose rows of logits need no padding, which is never written
CHUNK = (4, 6)  # first row, rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Sample:
    """Arguments of the four ops for one chunk of one slice. "odd": options of every kind and transposed matrices."""

    def __init__(
        self, device: torch.device, rng: torch.Generator, dtype: torch.dtype = torch.float32, odd: bool = False
    ) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        self.input = normal(H, BT).T if odd else normal(BT, H)
        self.all_weights = normal(H, V).T if odd else normal(V, H)
        self.all_biases = normal(V)
        self.weight, self.bias = self.all_weights[FIRST:LAST], self.all_biases[FIRST:LAST]
        self.target = torch.randint(V, (BT,), generator=rng).to(device)
        self.options: dict[str, Any] = {"reduction": "sum"}
        if odd:
            self.options |= {
                "weight": torch.rand(V, generator=rng).to(device) + 0.1,
                "token_weight": torch.rand(BT, generator=rng).to(device) + 0.1,
                "label_smoothing": 0.1,
                "softcap": 5.0,
                "logit_scale": 0.7,
                "z_loss_weight": 1e-2,
            }
        tensors = {name: self.options.get(name) for name in ("weight", "token_weight")}
        self.counts, self.order = ops.count_targets(self.target, V, **tensors, reduction="sum")
        self.place = {"first_class": FIRST, "num_classes": V, "first_row": CHUNK[0]}
        self.acc = torch.float64 if dtype == torch.float64 else torch.float32
        self.logits64 = self.input.double() @ self.all_weights.double().T + self.all_biases.double()

    @property
    def here(self) -> slice:
        return slice(CHUNK[0], CHUNK[0] + CHUNK[1])

    def logits_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        predicted = torch.full((BT,), -7, device=self.input.device)
        return (self.input, self.weight, self.target, self.counts, self.order, self.bias), {
            **self.place, "chunk_rows": CHUNK[1], "predicted_tokens": predicted, **self.options,
        }  # fmt: skip

    def final_logits(self) -> Tensor:
        s = self.logits64 * self.options.get("logit_scale", 1.0)
        cap = self.options.get("softcap")
        return cap * torch.tanh(s / cap) if cap else s

    def whole_stats(self) -> Tensor:
        """The statistics of all classes, as the ranks combine them."""
        rows = self.order[self.here].long()
        logits, t = self.final_logits()[rows], self.target[rows, None].clamp(min=0)
        own = logits.gather(1, t)
        others = logits.scatter(1, t, -math.inf)
        top = others.max(1, keepdim=True).values
        weight = self.options.get("weight", torch.ones(V, device=logits.device)).double()
        smooth = (weight * (logits - own)).sum(1, keepdim=True)
        return torch.cat((top, (others - top).exp().sum(1, keepdim=True), own, smooth), 1).to(self.acc)

    def gradient_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, options = self.logits_arguments()
        logits = ops.flce_shard_logits(*args, **options)[1]
        ce, z, logsumexp = torch.zeros((3, BT), dtype=self.acc, device=logits.device).unbind()
        return (
            logits, self.whole_stats(), self.weight, self.target, self.counts, self.order, ce, z, logsumexp, self.bias,
        ), {**self.place, **self.options}  # fmt: skip

    def expected(self) -> reference.Gradients:
        """Of the logits of all classes, undivided; those of the chunk in the given rows."""
        return reference.cross_entropy_gradients(self.logits64, self.target, **self.options)


@pytest.fixture
def sample(device: torch.device, rng: torch.Generator, odd: bool) -> Sample:
    return Sample(device, rng, odd=odd)


ODD = pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])


@ODD
@DTYPES
def test_logits(dtype: torch.dtype, odd: bool, device: torch.device, rng: torch.Generator) -> None:
    sample = Sample(device, rng, dtype, odd)
    args, options = sample.logits_arguments()
    with poisoned_memory(device):
        gathered, logits, stats = ops.flce_shard_logits(*args, **options)
    assert_equal(gathered, sample.input[sample.here].contiguous())
    plain = sample.logits64[sample.here, FIRST:LAST] - sample.bias.double()
    assert logits.dtype == torch.float32
    assert_close_rel(logits, plain, 1e-6)
    final = sample.final_logits()[sample.here, FIRST:LAST]
    t = sample.target[sample.here] - FIRST
    known = (t >= 0) & (t < LAST - FIRST)
    anchor = torch.where(known, t, 0)[:, None]
    own = final.gather(1, anchor)
    others = torch.where(known[:, None], final.scatter(1, anchor, -math.inf), final)
    top = others.max(1, keepdim=True).values
    assert_close_rel(stats[:, :3], torch.cat((top, (others - top).exp().sum(1, keepdim=True), own), 1), 1e-5)
    if odd:
        weight = sample.options["weight"][FIRST:LAST].double()
        assert_close_rel(stats[:, 3], (weight * (final - own)).sum(1), 1e-5)
    predicted = torch.full_like(options["predicted_tokens"], -7)
    predicted[sample.here] = final.argmax(1) + FIRST
    assert_equal(options["predicted_tokens"], predicted)


@ODD
@DTYPES
def test_gradient(dtype: torch.dtype, odd: bool, device: torch.device, rng: torch.Generator) -> None:
    """The slice's columns of the gradient of all logits, dX's share from them, and the whole losses."""
    sample = Sample(device, rng, dtype, odd)
    args, options = sample.gradient_arguments()
    with poisoned_memory(device):
        dx, alpha = ops.flce_shard_gradient(*args, **options)
    ref = sample.expected()
    g_expected = ref.dx[sample.here, FIRST:LAST]
    g = args[0].view(dtype)[:, : LAST - FIRST].double() * alpha[0].double()
    assert_close_rel(g, g_expected, ROUNDOFF[dtype] + 1e-5, what="g")
    # A target of this slice takes what rounding took from its row, else the slice's first class.
    own = torch.nn.functional.one_hot(sample.target[sample.here], V)[:, FIRST:LAST].double()
    own[:, 0] += 1 - own.sum(1)
    g_used = g + own * (g_expected - g).sum(1, keepdim=True)
    assert_close_rel(dx.double() * alpha[0].double(), g_used @ sample.weight.double(), 1e-5, what="dx")
    parts = reference.cross_entropy(
        sample.logits64, sample.target, **(sample.options | {"reduction": "none"}), return_z_loss=True,
        return_logsumexp=True,
    )  # fmt: skip
    ce, z, logsumexp = args[6:9]
    assert_close_rel((ce + z)[sample.here], parts.loss[sample.here], 1e-5)
    assert_close_rel(z[sample.here], parts.z_loss[sample.here], 1e-5)
    assert_close_rel(logsumexp[sample.here], parts.logsumexp[sample.here], 1e-5)
    outside = torch.ones(BT, dtype=torch.bool)
    outside[sample.here] = False
    assert not torch.stack((ce, z, logsumexp))[:, outside].any(), "rows of other chunks"


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_and_dx(
    dtype: torch.dtype, accumulate: bool, device: torch.device, rng: torch.Generator
) -> None:
    sample = Sample(device, rng, dtype)
    args, options = sample.gradient_arguments()
    gathered = sample.input[sample.here].contiguous()
    dx_sum, alpha = ops.flce_shard_gradient(*args, **options)
    g = args[0].view(dtype)[:, : LAST - FIRST].double()
    before = torch.randn(LAST - FIRST, H + 1, generator=rng).to(device)
    dw, db = before[:, :H].contiguous(), before[:, H].contiguous()
    arguments = args[0], gathered, sample.counts, sample.order, alpha, dw, db
    ops.flce_shard_weight_gradient(*arguments, first_row=CHUNK[0], accumulate=accumulate)
    dw_expected = alpha[0].double() * g.T @ gathered.double() + accumulate * before[:, :H]
    assert_close_rel(dw, dw_expected, 1e-5, what="dw")
    assert_close_rel(db, g.sum(0) + accumulate * before[:, H], 1e-5, what="db")

    dx = torch.full((BT, H), 3.0, dtype=dtype, device=device)
    scale = torch.full((BT,), 3.0, device=device) if dtype == torch.float16 else None
    ops.flce_shard_store_dx(dx_sum, sample.counts, sample.order, alpha, dx, scale, first_row=CHUNK[0])
    stored = dx[sample.here].double() * (1 if scale is None else scale[sample.here, None].double())
    assert_close_rel(stored, dx_sum.double() * alpha[0].double(), ROUNDOFF[dtype] + 1e-6, what="dx")
    assert (dx[: CHUNK[0]] == 3).all(), "rows of other chunks"
    assert (dx[sum(CHUNK) :] == 3).all(), "rows of other chunks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_slice(dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    sample = Sample(device, rng, dtype)
    sample.weight, sample.bias = sample.weight[:0], sample.bias[:0]
    sample.place["first_class"] = V
    args, options = sample.logits_arguments()
    gathered, logits, stats = ops.flce_shard_logits(*args, **options)
    assert logits.shape == (CHUNK[1], 0)
    assert (stats[:, 0] == -math.inf).all()
    assert not stats[:, 1].any()
    args, options = sample.gradient_arguments()
    with poisoned_memory(device):
        dx, alpha = ops.flce_shard_gradient(*args, **options)
    assert not dx.any()
    dw, db = torch.empty(0, H, device=device), torch.empty(0, device=device)
    ops.flce_shard_weight_gradient(
        logits, gathered, sample.counts, sample.order, alpha, dw, db, first_row=CHUNK[0], accumulate=False
    )


@ODD
def test_ignored_rows(sample: Sample) -> None:
    """They come last, cost no product on the CPU, and everything of theirs is 0."""
    sample.target[::2] = -100
    sample.counts, sample.order = ops.count_targets(sample.target, V, reduction="sum")
    live = 5 - CHUNK[0]  # of the chunk
    args, options = sample.logits_arguments()
    gathered, _, stats = ops.flce_shard_logits(*args, **options)
    assert not gathered[live:].any()
    assert not stats[live:].any()
    args, options = sample.gradient_arguments()
    args[6].fill_(3), args[7].fill_(3), args[8].fill_(3)
    dx, _ = ops.flce_shard_gradient(*args, **options)
    assert dx[:live].any()
    assert not dx[live:].any()
    assert not args[0][live:].any()
    ignored = sample.order[sample.here][live:].long()
    for values in args[6:9]:
        assert not values[ignored].any()


# ------------------------------------------------------------------------------------------------- registrations


def all_calls(sample: Sample) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    logits_args, logits_options = sample.logits_arguments()
    args, options = sample.gradient_arguments()
    gathered = sample.input[sample.here].contiguous()
    dx_sum, alpha = ops.flce_shard_gradient(*sample.gradient_arguments()[0], **options)
    dw, db = sample.weight.new_zeros(sample.weight.shape), sample.bias.new_zeros(sample.bias.shape).float()
    dx, scale = torch.zeros_like(sample.input).contiguous(), torch.zeros(BT, device=dx_sum.device)
    first = {"first_row": CHUNK[0]}
    weight_gradient = args[0].clone(), gathered, sample.counts, sample.order, alpha, dw, db
    store = dx_sum, sample.counts, sample.order, alpha, dx
    return [
        (ops.flce_shard_logits, logits_args, logits_options),
        (ops.flce_shard_gradient, args, options),
        (ops.flce_shard_gradient, args[:8], options | {"need_dx": False}),
        (ops.flce_shard_gradient, args[:8], options | {"need_gradient": False}),
        (ops.flce_shard_weight_gradient, weight_gradient, {**first, "accumulate": True}),
        (ops.flce_shard_weight_gradient, (*weight_gradient[:5], dw), {**first, "accumulate": False}),
        (ops.flce_shard_store_dx, store, first),
        (ops.flce_shard_store_dx, (*store[:4], dx.half(), scale), first),
    ]


@ODD
@pytest.mark.parametrize("call", range(8))
def test_opcheck(call: int, sample: Sample) -> None:
    op, args, options = all_calls(sample)[call]
    opcheck(op.default, args, options)


@ODD
@DTYPES
def test_fakes(dtype: torch.dtype, odd: bool, device: torch.device, rng: torch.Generator) -> None:
    for op, args, options in all_calls(Sample(device, rng, dtype, odd)):
        if op in (ops.flce_shard_logits, ops.flce_shard_gradient):
            assert_fake_agrees(op, *args, **options)
        else:
            assert op(*args, **options) is None
    sample = Sample(device, rng, dtype, odd)
    sample.weight, sample.bias = sample.weight[:7], sample.bias[:7]  # padded
    args, options = sample.logits_arguments()
    assert_fake_agrees(ops.flce_shard_logits, *args, **options)
    assert described(ops.flce_shard_logits(*args, **options))[1][0] == (CHUNK[1], 8)


@ODD
def test_autograd_is_refused(sample: Sample) -> None:
    for op, args, options in all_calls(sample):
        with_grad = tuple(
            a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        with pytest.raises(RuntimeError, match=f"syncfree::{op.__name__}: autograd is not supported"):
            op(*with_grad, **options)
        with torch.no_grad():
            op(*with_grad, **options)


@ODD
def test_writes_are_counted(sample: Sample) -> None:
    """A tensor that autograd has saved must not change unseen."""
    (_, args, options), *_ = [call for call in all_calls(sample) if call[0] is ops.flce_shard_gradient]
    versions = [a._version for a in args[:9]]
    ops.flce_shard_gradient(*args, **options)
    changed = [a._version > before for a, before in zip(args[:9], versions, strict=True)]
    assert changed == [True, False, False, False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_class": 30}, r"the slice must lie within the 40 classes, got 20 from 30"),
        ({"first_class": -1}, "the slice must lie within"),
        ({"first_row": 6}, r"a chunk must lie within the 11 rows, got 6 from 6"),
        ({"chunk_rows": 0}, "a chunk must lie within"),
        ({"predicted_tokens": torch.zeros(3, dtype=torch.int64)}, "predicted_tokens must have shape"),
        ({"predicted_tokens": torch.zeros(BT)}, "predicted_tokens must be contiguous int64"),
        ({"counts": torch.zeros(7, dtype=torch.float64)}, "counts must be what count_targets gave"),
        ({"rows": torch.zeros(BT, dtype=torch.int64)}, "rows must be what count_targets gave"),
        ({"linear_weight": torch.zeros(20, H - 1)}, "linear_weight must have shape"),
        ({"linear_bias": torch.zeros(19)}, "linear_bias must have shape"),
        ({"weight": torch.zeros(20)}, "weight must have shape"),
    ],
)
def test_arguments_of_the_logits(change: dict[str, Any], message: str, rng: torch.Generator) -> None:
    args, options = Sample(torch.device("cpu"), rng).logits_arguments()
    names = ("input", "linear_weight", "target", "counts", "rows", "linear_bias")
    arguments = dict(zip(names, args, strict=True)) | options | change
    with pytest.raises(ValueError, match=message):
        ops.flce_shard_logits(**arguments)


@pytest.mark.parametrize("argument", ["logits", "row_stats", "ce", "z", "logsumexp"])
def test_arguments_of_the_gradient(argument: str, rng: torch.Generator) -> None:
    args, options = Sample(torch.device("cpu"), rng).gradient_arguments()
    names = ("logits", "row_stats", "linear_weight", "target", "counts", "rows", "ce", "z", "logsumexp", "linear_bias")
    arguments = dict(zip(names, args, strict=True)) | options
    arguments[argument] = arguments[argument][..., 1:].contiguous()
    with pytest.raises(ValueError, match=f"syncfree::flce_shard_gradient: {argument} must have shape"):
        ops.flce_shard_gradient(**arguments)


@pytest.mark.parametrize("bad", [V, -1, 2**40, -(2**63), 2**63 - 1])
def test_a_target_that_was_not_counted(bad: int, device: torch.device, rng: torch.Generator) -> None:
    """Another target than that of counts and rows may hold anything: nothing is read outside of the class weights."""
    sample = Sample(device, rng, odd=True)
    args, options = sample.gradient_arguments()
    at = int(sample.order[CHUNK[0]])
    sample.target[at] = bad
    dx, _ = ops.flce_shard_gradient(*args, **options)
    assert args[6][at].isnan()
    assert dx[0].isnan().all()
    assert dx[1:].isfinite().all()


def test_rows_of_another_number(rng: torch.Generator) -> None:
    args, options = Sample(torch.device("cpu"), rng).logits_arguments()
    rows = torch.cat((args[4], args[4]))
    with pytest.raises(ValueError, match=r"syncfree::flce_shard_logits: rows must have one entry for each of 11 rows"):
        ops.flce_shard_logits(*args[:4], rows, *args[5:], **options)
