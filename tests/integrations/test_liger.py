"""The drop-in for Liger: names, argument orders, outputs and refusals, and the patch of a Liger that is installed.

The patch is tried on a stand-in package with Liger's layout, made in tmp_path, and on Liger itself where it is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext
from helpers import small
from syncfree_ext.integrations import liger
from tolerances import assert_equal

Function = liger.LigerFusedLinearCrossEntropyFunction
OPTIONS: dict[str, Any] = {
    "ignore_index": 3,
    "lse_square_scale": 1e-2,
    "label_smoothing": 0.1,
    "softcap": 4.0,
    "use_token_scaling": True,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "accum_dtype": torch.float32,
}
# Liger's names for the arguments of linear_cross_entropy.
NAMES = {
    "lse_square_scale": "z_loss_weight",
    "use_token_scaling": "token_scaling",
    "bias": "linear_bias",
    "ce_weight": "weight",
}


def ours(options: dict[str, Any]) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in options.items()}


def assert_same_output(out: Any, expected: Any) -> None:
    for name in ("loss", "z_loss", "token_accuracy", "predicted_tokens"):
        a, b = getattr(out, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_equal(a.detach(), b.detach(), name)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_three_forms_in_their_orders(reduction: Any, device: torch.device, rng: torch.Generator) -> None:
    x, w, target, b = small(rng, device)
    classes = torch.rand(len(w), generator=rng).to(device)
    options = {**OPTIONS, "reduction": reduction}
    expected = syncfree_ext.linear_cross_entropy(x, w, target, **ours({**options, "bias": b, "ce_weight": classes}))
    # In the order of Liger's functional form, by position.
    order = list(inspect.signature(liger.liger_fused_linear_cross_entropy).parameters)
    values = [{"bias": b, "ce_weight": classes, **options}.get(name) for name in order[3:15]]
    assert_same_output(liger.liger_fused_linear_cross_entropy(x, w, target, *values), expected)
    for tail in ((), (None, None), (None, None, 1)):  # 15, 17 and 18 positional arguments
        applied = Function.apply(x, w, target, *values, *tail)
        assert isinstance(applied, tuple)
        assert_same_output(liger.CrossEntropyOutput(*applied), expected)
    # The module takes the weight first.
    module = liger.LigerFusedLinearCrossEntropyLoss(classes, **options).to(device)
    assert_same_output(module(w, x, target, b), expected)
    assert module.state_dict() == {}


# The signatures of liger-kernel 0.8.5, by their parameters.
SIGNATURES = {
    "apply": "_input weight target bias ce_weight ignore_index lse_square_scale label_smoothing reduction softcap "
    "return_z_loss accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens ce_impl ce_mode "
    "chunk_mem_const",
    "functional": "input weight target bias ce_weight ignore_index lse_square_scale label_smoothing reduction softcap "
    "return_z_loss accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens chunk_mem_const",
    "module": "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss accum_dtype "
    "use_token_scaling return_token_accuracy return_predicted_tokens",
    "forward": "lin_weight _input target bias",
    "output": "loss z_loss token_accuracy predicted_tokens",
}


def test_signatures() -> None:
    module = liger.LigerFusedLinearCrossEntropyLoss
    found = {
        "apply": Function.apply,
        "functional": liger.liger_fused_linear_cross_entropy,
        "module": module,
        "forward": module(None).forward,
        "output": liger.CrossEntropyOutput,
    }
    assert {name: " ".join(inspect.signature(form).parameters) for name, form in found.items()} == SIGNATURES


def test_bare_loss_and_gradients(rng: torch.Generator) -> None:
    x, w, target, _ = small(rng, torch.device("cpu"))
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    again = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    loss = liger.LigerFusedLinearCrossEntropyLoss()(leaves[1], leaves[0], target.unsqueeze(1))
    assert isinstance(loss, Tensor)
    loss.backward()
    syncfree_ext.linear_cross_entropy(*again, target).backward()
    for leaf, other in zip(leaves, again, strict=True):
        assert_equal(leaf.grad, other.grad)


def test_output_is_empty_where_nothing_was_asked_for(rng: torch.Generator) -> None:
    x, w, target, _ = small(rng, torch.device("cpu"))
    out = liger.liger_fused_linear_cross_entropy(x, w, target, return_predicted_tokens=True)
    assert out.z_loss is None
    assert out.token_accuracy is None
    assert out.predicted_tokens.dtype == torch.int64


@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5), torch.tensor([5.5])], ids=repr)
def test_divisor_of_patched_models(num_items: Any, rng: torch.Generator) -> None:
    x, w, target, _ = small(rng, torch.device("cpu"))
    out = liger.fixed_fused_linear_cross_entropy(x, w, target, num_items, 3, 2.0, return_token_accuracy=True)
    expected = syncfree_ext.linear_cross_entropy(
        x, w, target, num_items=num_items, ignore_index=3, softcap=2.0, return_token_accuracy=True
    )
    assert_same_output(out, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ce_impl": "cutile"}, ValueError, "ce_impl must be None"),
        ({"ce_mode": 1}, ValueError, "ce_mode must be None"),
        ({"chunk_mem_const": 0}, ValueError, "chunk_mem_const must be an integer of at least 1, got 0"),
        ({"chunk_mem_const": 1.5}, ValueError, "chunk_mem_const must be an integer of at least 1"),
        ({"_input": torch.zeros(1, 13, 7)}, ValueError, r"2 dimensions \(rows, hidden\), got shape \(1, 13, 7\)"),
        ({"target": torch.zeros(13)}, TypeError, "target must be int64 or int32"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, ValueError, "target must have shape"),
        ({"accum_dtype": torch.float16}, ValueError, "accum_dtype"),
        ({"reduction": "avg"}, ValueError, "reduction"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing"),
        ({"ce_weight": torch.rand(19).requires_grad_()}, ValueError, "weight must not require grad"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(
    change: dict[str, Any], error: type[Exception], message: str, rng: torch.Generator
) -> None:
    x, w, target, _ = small(rng, torch.device("cpu"))
    with pytest.raises(error, match=message):
        Function.apply(**{"_input": x, "weight": w, "target": target, **change})


@pytest.mark.parametrize("change", [{"label_smoothing": -0.1}, {"reduction": "avg"}, {"softcap": 0.0}], ids=str)
def test_constructor_refuses(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        liger.LigerFusedLinearCrossEntropyLoss(**change)


def test_chunk_mem_const_sets_the_rows_of_a_chunk(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, target, _ = small(rng, torch.device("cpu"), bt=40, h=8, v=64)
    rows = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["chunk_rows"])
        return syncfree_ext.linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(liger, "linear_cross_entropy", spy)
    for factor in (1, 2, 3, 100):
        liger.liger_fused_linear_cross_entropy(x, w, target, chunk_mem_const=factor)
    # Logits of rows * 64 elements take factor times the 40 * 8 of input.
    assert rows == [None, 10, 14, 40]


# ------------------------------------------------------------------------------------------------------------ the patch

STAND_IN = {
    "__init__": "",
    "ops/__init__": "from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction",
    "ops/fused_linear_cross_entropy": "class LigerFusedLinearCrossEntropyFunction: pass",
    "transformers/__init__": """
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
""",
    "transformers/functional": """
import dataclasses
from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction
@dataclasses.dataclass
class CrossEntropyOutput:
    loss: object = None
    z_loss: object = None
    token_accuracy: object = None
    predicted_tokens: object = None
def liger_fused_linear_cross_entropy(*args, **kwargs): raise AssertionError("Liger was called")
""",
    "transformers/fused_linear_cross_entropy": """
from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction
class LigerFusedLinearCrossEntropyLoss: pass
""",
    "transformers/model/__init__": "",
    "transformers/model/loss_utils": """
import liger_kernel.transformers.functional as F
def fixed_fused_linear_cross_entropy(*args, **kwargs): raise AssertionError("Liger was called")
def LigerForCausalLMLoss(hidden, weight, target, num_items_in_batch=None, **kwargs):
    return fixed_fused_linear_cross_entropy(hidden, weight, target, num_items_in_batch, **kwargs)
""",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A package with Liger's names in Liger's places, in front of one that is installed; and a user of it."""
    for name, text in STAND_IN.items():
        path = tmp_path / "liger_kernel" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "a_trainer.py").write_text(
        "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Loss\n"
        "from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy\n"
        "from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss\n",
        encoding="utf-8",
    )
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "liger_kernel"}
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    user = importlib.import_module("a_trainer")
    yield {"user": user, "before": dict(vars(user))}
    for name in [name for name in sys.modules if name.split(".")[0] in ("liger_kernel", "a_trainer")]:
        del sys.modules[name]
    sys.modules.update(kept)


def bindings() -> dict[tuple[str, str], Any]:
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("liger_kernel", "a_trainer")]
    return {(m.__name__, name): value for m in modules for name, value in vars(m).items() if not name.startswith("__")}


def test_patch_reaches_every_module_and_is_undone(stand_in: dict[str, Any], rng: torch.Generator) -> None:
    user = stand_in["user"]
    before = bindings()
    patch = liger.patch_liger()
    assert user.Loss is liger.LigerFusedLinearCrossEntropyLoss
    assert user.liger_fused_linear_cross_entropy is liger.liger_fused_linear_cross_entropy
    functional = sys.modules["liger_kernel.transformers.functional"]
    for place in ("ops", "ops.fused_linear_cross_entropy", "transformers.functional"):
        assert sys.modules[f"liger_kernel.{place}"].LigerFusedLinearCrossEntropyFunction is Function
    x, w, target, _ = small(rng, torch.device("cpu"))
    out = user.LigerForCausalLMLoss(x, w, target, 5, return_token_accuracy=True)
    assert type(out) is functional.CrossEntropyOutput
    assert_equal(out.loss, syncfree_ext.linear_cross_entropy(x, w, target, num_items=5))
    # A second patch finds nothing to do, and undoing it changes nothing.
    second = liger.patch_liger()
    assert second.bindings == []
    second.remove()
    assert user.Loss is liger.LigerFusedLinearCrossEntropyLoss
    patch.remove()
    patch.remove()
    assert bindings() == before
    assert type(liger.liger_fused_linear_cross_entropy(x, w, target, return_z_loss=True)) is liger.CrossEntropyOutput


def test_patch_as_context_manager(stand_in: dict[str, Any]) -> None:
    before = bindings()
    patch = liger.patch_liger()
    assert len(patch.bindings) == 10
    with pytest.raises(ZeroDivisionError), patch:
        raise ZeroDivisionError
    assert bindings() == before


def test_patch_without_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match="liger_kernel is not installed, or has none of"):
        liger.patch_liger()


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
class TestInstalledLiger:
    def test_signatures_are_those_of_liger(self) -> None:
        import liger_kernel.transformers.functional as functional
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Loss

        theirs = {
            "functional": functional.liger_fused_linear_cross_entropy,
            "module": Loss,
            "forward": Loss().forward,
            "output": functional.CrossEntropyOutput,
        }
        found = {name: " ".join(inspect.signature(form).parameters) for name, form in theirs.items()}
        assert found == {name: SIGNATURES[name] for name in found}

    def test_model_of_transformers(self, rng: torch.Generator) -> None:
        """What Trainer does with use_liger_kernel=True, on a CPU, where Liger's own loss cannot run."""
        tiny_models = pytest.importorskip("tiny_models")
        from transformers.integrations.liger import apply_liger_kernel

        net, inputs = tiny_models.model("llama", rng), tiny_models.batch(rng)
        inputs["num_items_in_batch"] = torch.tensor(7)
        stock = tiny_models.step(net, inputs)
        kernels = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
        with liger.patch_liger():
            apply_liger_kernel(net, {**kernels, "fused_linear_cross_entropy": True})
            got = tiny_models.step(net, inputs, return_token_accuracy=True)
        assert got[0].logits is None
        assert got[0].token_accuracy.shape == ()
        assert type(got[0].loss.grad_fn).__name__ == "_FlceForwardBackward"
        tiny_models.assert_same_step(got, stock)
