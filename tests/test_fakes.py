"""The registrations of every op: opcheck, and fakes against kernels, also for a device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import syncfree_ext as sf

ROWS, HIDDEN, CLASSES = 24, 12, 37

ops = torch.ops.syncfree

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


class Sample:
    """Arguments of the ops. Layout "odd": transposed matrices, a strided target (B, T), options of every kind."""

    def __init__(
        self, device: torch.device, rng: torch.Generator, dtype: torch.dtype = torch.float32, layout: str = "plain"
    ) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        odd = layout == "odd"
        self.input = normal(HIDDEN, ROWS).T if odd else normal(ROWS, HIDDEN)
        self.weight = normal(HIDDEN, CLASSES).T if odd else normal(CLASSES, HIDDEN)
        self.logits = normal(CLASSES, ROWS).T if odd else normal(ROWS, CLASSES)
        self.bias = normal(CLASSES)
        target = torch.randint(CLASSES, (4, ROWS // 4, 2), generator=rng).to(device)
        target[1] = -100
        self.target = target[..., 0] if odd else target[..., 0].flatten()
        self.options: dict[str, Any] = {}
        if odd:
            self.options = {
                "weight": torch.rand(CLASSES, generator=rng).to(device),
                "token_weight": torch.rand((4, ROWS // 4), generator=rng).to(device),
                "label_smoothing": 0.1,
                "softcap": 5.0,
                "token_scaling": True,
                "logit_scale_tensor": torch.tensor(0.7, device=device),
                "z_loss_weight": 1e-2,
                "shift": 1,
            }

    def with_grad(self) -> Sample:
        for name in ("input", "weight", "bias", "logits"):
            setattr(self, name, getattr(self, name).detach().requires_grad_())
        return self


LAYOUTS = pytest.mark.parametrize("layout", ["plain", "odd"])

FORWARD_FLAGS: dict[str, dict[str, bool]] = {
    "nothing": {},
    "gradients": {"need_dx": True, "need_dw": True, "need_db": True},
    "one gradient": {"need_dw": True},
    "extras": {"need_token_accuracy": True, "need_predicted_tokens": True, "need_logsumexp": True},
}


# ---------------------------------------------------------------------------------------------------------- opcheck


@pytest.fixture
def sample(device: torch.device, rng: torch.Generator, layout: str) -> Sample:
    return Sample(device, rng, layout=layout)


def flags_of(reduction: str) -> list[str]:
    """A loss per row has no gradient in forward."""
    return [name for name in FORWARD_FLAGS if reduction != "none" or "gradient" not in name]


@LAYOUTS
@pytest.mark.parametrize(
    ("reduction", "flags"), [(reduction, name) for reduction in ("mean", "sum", "none") for name in flags_of(reduction)]
)
def test_opcheck_flce_forward(sample: Sample, reduction: str, flags: str) -> None:
    options = sample.options | {"reduction": reduction} | FORWARD_FLAGS[flags]
    opcheck(ops.flce_forward.default, (sample.input, sample.weight, sample.target, sample.bias), options)


@LAYOUTS
@REDUCTIONS
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_flce(sample: Sample, reduction: str, requires_grad: bool) -> None:
    if requires_grad:
        sample.with_grad()
    options = sample.options | {"reduction": reduction, "chunk_rows": 7}
    opcheck(ops.flce.default, (sample.input, sample.weight, sample.target, sample.bias), options)
    opcheck(ops.flce.default, (sample.input, sample.weight, sample.target), sample.options)


@LAYOUTS
@REDUCTIONS
def test_opcheck_flce_backward(sample: Sample, reduction: str) -> None:
    upstream = torch.full((ROWS,) if reduction == "none" else (), 2.0, device=sample.input.device)
    options = sample.options | {"reduction": reduction} | FORWARD_FLAGS["gradients"]
    opcheck(ops.flce_backward.default, (upstream, sample.input, sample.weight, sample.target, sample.bias), options)


@LAYOUTS
@REDUCTIONS
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_cross_entropy(sample: Sample, reduction: str, requires_grad: bool) -> None:
    if requires_grad:
        sample.with_grad()
    options = sample.options | {"reduction": reduction}
    opcheck(ops.cross_entropy.default, (sample.logits, sample.target), options)
    opcheck(ops.cross_entropy_forward.default, (sample.logits, sample.target), options | FORWARD_FLAGS["extras"])


@LAYOUTS
@REDUCTIONS
def test_opcheck_cross_entropy_backward(sample: Sample, reduction: str) -> None:
    options = sample.options | {"reduction": reduction}
    row_stats = ops.cross_entropy_forward(sample.logits, sample.target, **options)[5]
    upstream = torch.full((ROWS,) if reduction == "none" else (), 2.0, device=sample.input.device)
    opcheck(ops.cross_entropy_backward.default, (upstream, sample.logits, sample.target, row_stats), options)


@LAYOUTS
def test_opcheck_count_targets(sample: Sample) -> None:
    options = {name: sample.options[name] for name in ("weight", "token_weight", "shift") if name in sample.options}
    opcheck(ops.count_targets.default, (sample.target, CLASSES), options)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_opcheck_scale_unless_one(factor: float, device: torch.device, rng: torch.Generator) -> None:
    sample = Sample(device, rng)
    scale, none = torch.tensor(factor, device=device), torch.empty(0, device=device)
    grads = [sample.input.clone(), sample.bias.half()]
    opcheck(ops.scale_unless_one_.default, (grads, scale))
    opcheck(ops.scale_unless_one_.default, (grads, scale, []))
    opcheck(ops.scale_unless_one_.default, (grads, scale, [torch.rand(ROWS, device=device), none]))


# ------------------------------------------------------------------------------------------------ fakes and kernels


def described(tensors: Any) -> list[tuple[Any, ...]]:
    tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
    return [(tuple(t.shape), t.dtype, t.stride(), t.device, t.requires_grad) for t in tensors]


def assert_fake_agrees(op: Any, *args: Any, **options: Any) -> None:
    real = op(*args, **options)
    with FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        fake_options = {name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in options.items()}
        assert described(op(*fake_args, **fake_options)) == described(real)


@LAYOUTS
@DTYPES
@REDUCTIONS
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fake_flce(
    layout: str,
    dtype: torch.dtype,
    reduction: str,
    compute_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    sample = Sample(device, rng, dtype, layout)
    bias = None if bias_dtype is None else sample.bias.to(bias_dtype)
    options = sample.options | {"reduction": reduction, "compute_dtype": compute_dtype}
    for name in flags_of(reduction):
        arguments = sample.input, sample.weight, sample.target, bias
        assert_fake_agrees(ops.flce_forward, *arguments, **options, **FORWARD_FLAGS[name])
    upstream = torch.ones((ROWS,) if reduction == "none" else (), device=device)
    for name in ("nothing", "gradients", "one gradient"):
        arguments = upstream, sample.input, sample.weight, sample.target, bias
        assert_fake_agrees(ops.flce_backward, *arguments, **options, **FORWARD_FLAGS[name])


@LAYOUTS
@DTYPES
@REDUCTIONS
def test_fake_cross_entropy(
    layout: str, dtype: torch.dtype, reduction: str, device: torch.device, rng: torch.Generator
) -> None:
    sample = Sample(device, rng, dtype, layout)
    options = sample.options | {"reduction": reduction}
    for name in ("nothing", "extras"):
        assert_fake_agrees(ops.cross_entropy_forward, sample.logits, sample.target, **options, **FORWARD_FLAGS[name])
    row_stats = ops.cross_entropy_forward(sample.logits, sample.target, **options)[5]
    upstream = torch.ones((ROWS,) if reduction == "none" else (), device=device)
    assert_fake_agrees(ops.cross_entropy_backward, upstream, sample.logits, sample.target, row_stats, **options)
    assert_fake_agrees(ops.count_targets, sample.target, CLASSES)


def test_fake_float64(rng: torch.Generator) -> None:
    sample = Sample(torch.device("cpu"), rng, torch.float64, "odd")
    for flags in FORWARD_FLAGS.values():
        arguments = sample.input, sample.weight, sample.target, sample.bias
        assert_fake_agrees(ops.flce_forward, *arguments, **sample.options, **flags)
    for name in ("nothing", "extras"):
        assert_fake_agrees(ops.cross_entropy_forward, sample.logits, sample.target, **FORWARD_FLAGS[name])


def test_fake_mixed_dtypes(device: torch.device, rng: torch.Generator) -> None:
    """As under autocast: leaves of different dtypes, each with a gradient of its own."""
    sample = Sample(device, rng)
    for input_dtype, weight_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        arguments = sample.input.to(input_dtype), sample.weight.to(weight_dtype), sample.target, sample.bias
        assert_fake_agrees(ops.flce_forward, *arguments, compute_dtype=torch.float16, **FORWARD_FLAGS["gradients"])


@REDUCTIONS
def test_fake_no_rows(reduction: str, device: torch.device, rng: torch.Generator) -> None:
    sample = Sample(device, rng, torch.float16)
    flags = {} if reduction == "none" else FORWARD_FLAGS["gradients"]
    options = {"reduction": reduction} | FORWARD_FLAGS["extras"] | flags
    assert_fake_agrees(ops.flce_forward, sample.input[:0], sample.weight, sample.target[:0], sample.bias, **options)
    assert_fake_agrees(ops.cross_entropy_forward, sample.logits[:0], sample.target[:0], **FORWARD_FLAGS["extras"])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fake_symbolic_sizes(reduction: str, rng: torch.Generator) -> None:
    sample = Sample(torch.device("cpu"), rng, torch.float16)
    flags = {} if reduction == "none" else FORWARD_FLAGS["gradients"]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        arguments = [mode.from_tensor(t, static_shapes=False) for t in (sample.input, sample.weight, sample.target)]
        outputs = ops.flce_forward(*arguments, reduction=reduction, need_logsumexp=True, **flags)
        rows, hidden = arguments[0].shape
        assert isinstance(rows, torch.SymInt)
        assert outputs[4].shape == (rows,)
        if flags:
            assert outputs[5].shape == (rows, hidden)
            assert outputs[6].shape == arguments[1].shape
            assert outputs[8].shape == (rows,)
            assert outputs[9].shape == arguments[1].shape[:1]
        assert [str(size) for size in outputs[4].shape] == [str(rows)], "the size must stay a symbol"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 3, 2), (5, 2), (12,)), "input must have 2 dimensions"),
        (((4, 3), (5, 2), (4,)), "linear_weight must have 3 columns"),
        (((4, 3), (5,), (4,)), "linear_weight must have 2 dimensions"),
        (((4, 3), (5, 3), (5,)), "target must have one entry for each of 4 rows"),
        (((4, 3), (5, 3), (4,), (6,)), "linear_bias must have 5 entries"),
        (((4, 3), (5, 3), (4,), (5, 1)), "linear_bias must have 1 dimension"),
    ],
)
def test_fake_refuses_shapes_that_do_not_fit(arguments: tuple[tuple[int, ...], ...], message: str) -> None:
    with FakeTensorMode():
        tensors = [torch.empty(shape) for shape in arguments]
        tensors[2] = tensors[2].long()
        with pytest.raises(ValueError, match=message):
            ops.flce_forward(*tensors)
    with pytest.raises(ValueError, match="syncfree::flce_forward"):
        ops.flce_forward(*(torch.zeros_like(t, device="cpu") for t in map(real, tensors)))


def real(fake: Tensor) -> Tensor:
    return torch.zeros(tuple(fake.shape), dtype=fake.dtype)


# --------------------------------------------------------------------------------------------------- absent devices


# Sizes that no memory would hold. A CPU build of torch aborts as soon as autograd records any op on a fake CUDA tensor,
# and a CUDA build refuses its backward where there is no GPU, so there CUDA is tested without autograd, and autograd on
# the meta device.
AUTOGRAD_DEVICES = ["meta", "cuda"] if torch.cuda.is_available() else ["meta"]


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fake_cuda(dtype: torch.dtype, reduction: str) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        hidden, weight = torch.empty(512, 2048, 8192, dtype=dtype), torch.empty(1 << 20, 8192, dtype=dtype)
        target = torch.empty(512, 2048, dtype=torch.int64)
        output = sf.linear_cross_entropy(
            hidden, weight, target, reduction=reduction, num_items=7 if reduction == "mean" else None, shift=1,
            return_predicted_tokens=True,
        )  # fmt: skip
        shape = target.shape if reduction == "none" else ()
        assert all(isinstance(t, FakeTensor) for t in (output.loss, output.predicted_tokens))
        assert (output.loss.device.type, output.loss.dtype, output.loss.shape) == ("cuda", torch.float32, shape)
        assert output.predicted_tokens.shape == target.shape

        rows = hidden.flatten(0, 1)
        if reduction == "mean":
            outputs = ops.flce_forward(rows, weight, target, **FORWARD_FLAGS["gradients"])
            assert described(outputs[5:7]) == described([rows, weight])
            scales = (rows.shape[:1], weight.shape[:1]) if dtype == torch.float16 else ((0,), (0,))
            assert tuple(scale.shape for scale in outputs[8:]) == scales
            gradients = list(outputs[5:7])
            ops.scale_unless_one_(gradients, torch.empty(()), list(outputs[8:]))
        upstream = torch.empty((rows.shape[0],) if reduction == "none" else ())
        arguments = upstream, rows, weight, target
        gradients = ops.flce_backward(*arguments, reduction=reduction, **FORWARD_FLAGS["gradients"])
        assert described(gradients[:2]) == described([rows, weight])
        counts, order = ops.count_targets(target, 1 << 20)
        assert (counts.device.type, order.shape) == ("cuda", (target.numel(),))


def test_fake_cuda_logits() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        logits = torch.empty(1 << 20, 1 << 18, dtype=torch.bfloat16)
        target = torch.empty(1 << 20, dtype=torch.int64)
        loss, row_stats = sf.cross_entropy(logits, target), ops.cross_entropy_forward(logits, target)[5]
        assert (loss.device.type, row_stats.shape) == ("cuda", (1 << 20, 4))
        gradient = ops.cross_entropy_backward(loss, logits, target, row_stats)
        assert described([gradient]) == described([logits])


@DTYPES
@pytest.mark.parametrize("name", AUTOGRAD_DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fake_backward(dtype: torch.dtype, name: str, reduction: str) -> None:
    with FakeTensorMode(), torch.device(name):
        hidden = torch.empty(512, 2048, 8192, dtype=dtype, requires_grad=True)
        weight = torch.empty(1 << 20, 8192, dtype=dtype, requires_grad=True)
        target = torch.empty(512, 2048, dtype=torch.int64)
        loss = sf.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        for _ in range(2):
            gradients = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
            assert described(gradients) == described([hidden.detach(), weight.detach()])
        logits = torch.empty(1 << 20, 1 << 18, dtype=dtype, requires_grad=True)
        loss = sf.cross_entropy(logits, target.flatten(), reduction=reduction).sum()
        assert described(torch.autograd.grad(loss * 3, logits)) == described([logits.detach()])


@pytest.mark.parametrize("name", ["target", "linear_weight", "linear_bias", "weight", "token_weight", "num_items"])
def test_mixed_devices_are_refused(name: str) -> None:
    with FakeTensorMode():
        arguments = {
            "linear_weight": torch.empty(CLASSES, HIDDEN, device="cuda"),
            "target": torch.empty(ROWS, dtype=torch.int64, device="cuda"),
            "linear_bias": torch.empty(CLASSES, device="cuda"),
            "weight": torch.empty(CLASSES, device="cuda"),
            "token_weight": torch.empty(ROWS, device="cuda"),
            "num_items": torch.empty((), device="cuda"),
        }
        hidden = torch.empty(ROWS, HIDDEN, device="cuda")
        sf.linear_cross_entropy(hidden, **arguments)
        arguments[name] = torch.empty_like(arguments[name], device="cpu")
        with pytest.raises(ValueError, match=f"{name} must be on the device of the first argument, cuda:0, got cpu"):
            sf.linear_cross_entropy(hidden, **arguments)


def test_meta_tensors() -> None:
    with torch.device("meta"):
        head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES)
        loss = head(torch.empty(3, 8, HIDDEN), torch.empty(3, 8, dtype=torch.int64))
    assert (loss.shape, loss.device.type, loss.requires_grad) == ((), "meta", True)
    loss.backward()
    assert head.weight.grad.shape == head.weight.shape
