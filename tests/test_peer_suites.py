"""The adapters that put this library in the place of others in their tests, and PyTorch's samples."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import small
from tolerances import assert_equal

SUITES = Path(__file__).parent / "peer_suites"
sys.path.insert(0, str(SUITES))

import liger_adapter  # noqa: E402
import torch_samples  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    liger_adapter.Recorder.current = liger_adapter.Recorder()


# ---------------------------------------------------------------------------------------------------- Liger's arguments


@pytest.mark.parametrize("more", [(), (None, "auto"), (None, "auto", 1)], ids=["15", "17", "18"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_arguments_by_position(
    reduction: str, more: tuple[Any, ...], rng: torch.Generator, device: torch.device
) -> None:
    x, w, target, b = (t.requires_grad_() if t.is_floating_point() else t for t in small(rng, device, 30))
    target[::3] = 5
    weight = torch.rand(len(w), generator=rng).to(device)
    loss, z, accuracy, predicted = liger_adapter.FusedLinearCrossEntropyFunction.apply(
        x, w, target, b, weight, 5, 1e-3, 0.1, reduction, 4.0, True, torch.float32, True, True, True, *more
    )
    expected = syncfree_ext.linear_cross_entropy(
        x, w, target, linear_bias=b, weight=weight, ignore_index=5, z_loss_weight=1e-3, label_smoothing=0.1,
        reduction=reduction, softcap=4.0, token_scaling=True, return_z_loss=True, return_token_accuracy=True,
        return_predicted_tokens=True, accum_dtype=torch.float32,
    )  # fmt: skip
    for got, want in zip((loss, z, accuracy, predicted), expected[:4], strict=True):
        assert got is not None
        assert_equal(got, want)
    upstream = torch.rand(loss.shape, generator=rng).to(device)
    expected_grads = torch.autograd.grad(expected.loss, (x, w, b), upstream)
    for got, want in zip(torch.autograd.grad(loss, (x, w, b), upstream), expected_grads, strict=True):
        assert_equal(got, want)
    assert liger_adapter.Recorder.current.check() == 1


def test_what_was_not_asked_for_is_none(rng: torch.Generator, device: torch.device) -> None:
    x, w, target, _ = small(rng, device)
    loss, *extras = liger_adapter.FusedLinearCrossEntropyFunction.apply(x, w, target)
    assert extras == [None, None, None]
    assert_equal(loss, syncfree_ext.linear_cross_entropy(x, w, target))
    assert_equal(liger_adapter.FusedLinearCrossEntropySM90Function.apply(x, w, target, -100, "mean"), loss)
    target[3] = -1
    summed = liger_adapter.FusedLinearCrossEntropySM90Function.apply(x, w, target, -1, "sum")
    assert_equal(summed, syncfree_ext.linear_cross_entropy(x, w, target, ignore_index=-1, reduction="sum"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_arguments_by_position(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    z = torch.randn(9, 13, generator=rng).to(device, dtype).requires_grad_()
    target = torch.randint(0, 13, (9,), generator=rng).to(device)
    weight = torch.rand(13, generator=rng).to(device)
    loss, z_loss, accuracy, predicted = liger_adapter.CrossEntropyFunction.apply(
        z, target, weight, 2, 1e-3, 0.1, "sum", 4.0, True, True, True
    )
    expected = syncfree_ext.cross_entropy(
        z, target, weight=weight, ignore_index=2, z_loss_weight=1e-3, label_smoothing=0.1, reduction="sum", softcap=4.0,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
    )  # fmt: skip
    assert expected.z_loss is not None
    assert_equal(loss, expected.loss.to(dtype))
    assert_equal(z_loss, expected.z_loss.to(dtype))
    assert_equal(accuracy, expected.token_accuracy)
    assert_equal(predicted, expected.predicted_tokens)
    loss.backward()
    assert liger_adapter.Recorder.current.check() == 1


@pytest.mark.parametrize("wrong", ["gradient", "loss", "missing gradient", "upstream"])
def test_a_wrong_call_is_found(wrong: str, rng: torch.Generator, device: torch.device) -> None:
    x, w, target, _ = small(rng, device, 30)
    leaf = x.requires_grad_()
    (2 * liger_adapter.FusedLinearCrossEntropyFunction.apply(leaf, w, target)[0]).backward()
    (record,) = liger_adapter.Recorder.current.calls
    if wrong == "gradient":
        record.gradients["x"][0] *= 1.001
    elif wrong == "loss":
        record.out = record.out._replace(loss=record.out.loss * 1.001)
    elif wrong == "missing gradient":
        del record.gradients["x"]
    else:
        record.upstreams[0] *= 2
    with pytest.raises(AssertionError):
        liger_adapter.Recorder.current.check()


def test_recording_changes_no_gradient(rng: torch.Generator, device: torch.device) -> None:
    """A hook that returned something would put it in the place of the gradient."""
    x, w, target, _ = small(rng, device)
    leaf = x.requires_grad_()
    liger_adapter.FusedLinearCrossEntropyFunction.apply(leaf, w, target)[0].backward()
    (record,) = liger_adapter.Recorder.current.calls
    kept = record.gradients["x"][0].clone()
    assert leaf.grad is not None
    assert_equal(leaf.grad, kept)
    leaf.grad.zero_()
    assert_equal(record.gradients["x"][0], kept)


# ----------------------------------------------------------------------------------------------------- a checkout of it

FUNCTION = "class LigerFusedLinearCrossEntropyFunction:\n    apply = None\n"
CHECKOUT = {
    "src/liger_kernel/__init__.py": "",
    "src/liger_kernel/ops/__init__.py": (
        "from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction\n"
        "class LigerCrossEntropyFunction:\n    apply = None\n"
    ),
    "src/liger_kernel/ops/fused_linear_cross_entropy.py": FUNCTION,
    "src/liger_kernel/transformers/__init__.py": "from liger_kernel.transformers import functional\n",
    "src/liger_kernel/transformers/functional.py": (
        "from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction\n"
        "def loss(*args):\n    return LigerFusedLinearCrossEntropyFunction.apply(*args)[0]\n"
    ),
    "src/liger_kernel/transformers/fused_linear_cross_entropy.py": (
        "from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction\n"
    ),
    "src/liger_kernel/transformers/cross_entropy.py": "from liger_kernel.ops import LigerCrossEntropyFunction\n",
    "test/__init__.py": "",
    "test/conftest.py": "import transformers\nfrom transformers import PretrainedConfig\n",
    "test/transformers/test_fused_linear_cross_entropy.py": """
import pytest, torch
from liger_kernel.transformers.functional import loss

def test_through_the_functional_form():
    x = torch.randn(4, 3, requires_grad=True)
    value = loss(x, torch.randn(5, 3), torch.tensor([0, 1, 2, -100]))
    value.backward()
    assert x.grad is not None

def test_oracle_stays():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    assert LigerFusedLinearCrossEntropyFunction.apply is None

def test_other_backends():
    pytest.importorskip("cutlass")
    pytest.importorskip("cuda.tile")
    from liger_kernel.ops.cutedsl.ops import LigerFusedLinearCrossEntropyFunction as one
    from liger_kernel.ops.cutile.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as two
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import LigerFusedLinearCrossEntropySM90Function
    assert one is two
    x, w, t = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 3])
    torch.testing.assert_close(LigerFusedLinearCrossEntropySM90Function.apply(x, w, t, -100, "sum"), 4 * loss(x, w, t))

def test_rejects_unsupported_features():
    pytest.fail("as the peer has it")

def test_float32_internal():
    pytest.fail("not portable")
""",
}
WRONG = """

def test_that_fails():
    assert False, "at odds"

def test_whose_call_is_wrong():
    from liger_adapter import Recorder
    x = torch.randn(4, 3, requires_grad=True)
    loss(x, torch.randn(5, 3), torch.tensor([0, 1, 2, -100])).backward()
    Recorder.current.calls[0].gradients["x"][0] *= 2
"""


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_runner_on_a_checkout(wrong: bool, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    for name, text in CHECKOUT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + (WRONG if wrong and name.endswith("test_fused_linear_cross_entropy.py") else ""))
    out = tmp_path / "results.json"
    command = [sys.executable, str(SUITES / "run.py"), "liger", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == int(wrong), done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(out.read_text())}
    passed = {name for name, result in results.items() if result["outcome"] == "passed"}
    right = {"test_through_the_functional_form", "test_oracle_stays", "test_other_backends"}
    assert passed == (right | {"test_whose_call_is_wrong"} if wrong else right)
    assert results["test_through_the_functional_form"]["float64"] == "1 calls"
    assert results["test_rejects_unsupported_features"]["deviation"]
    assert "test_float32_internal" not in results
    if wrong:
        assert results["test_that_fails"]["outcome"] == "failed"
        assert results["test_whose_call_is_wrong"]["float64"].startswith("WRONG: dx")
        assert "FAILED: test_that_fails" in done.stdout


# ---------------------------------------------------------------------------------------------------- PyTorch's samples

needs_samples = pytest.mark.skipif(
    not torch_samples.available(), reason="the samples come with torch 2.13, and need expecttest"
)


@needs_samples
@pytest.mark.parametrize("dtype", torch_samples.DTYPES, ids=str)
@pytest.mark.parametrize("variant", [*torch_samples.VARIANTS, "module"])
def test_samples_of_pytorch(variant: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """A part of them, another in each session; all of them: run.py torch."""
    samples = (
        torch_samples.module_samples(dtype) if variant == "module" else torch_samples.function_samples(variant, dtype)
    )
    step = 16 if variant == "module" else 6
    tally = torch_samples.Tally()
    for sample in itertools.islice(samples, int(torch.randint(0, step, (), generator=rng)), None, step):
        torch_samples.check_sample(*sample, tally)
    assert tally.passed > 5


@needs_samples
def test_wrong_inputs_of_pytorch() -> None:
    count = 0
    for x, w, target, options in torch_samples.wrong_inputs():
        with pytest.raises((TypeError, ValueError), match=r"^syncfree_ext\.linear_cross_entropy: "):
            syncfree_ext.linear_cross_entropy(x, w, target, **options)
        count += 1
    assert count >= 6


@needs_samples
def test_a_wrong_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = syncfree_ext.linear_cross_entropy

    def off(*args: Any, **options: Any) -> Tensor:
        loss: Tensor = original(*args, **options)
        return loss * 1.0001

    monkeypatch.setattr(syncfree_ext, "linear_cross_entropy", off)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    with pytest.raises(AssertionError):
        torch_samples.check_sample(x, w, torch.tensor([0, 1, 2, 3]), {}, torch_samples.Tally())
