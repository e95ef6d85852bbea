"""A pytest plugin that puts this library in the place of Liger-Kernel's losses in Liger's own tests.

Loaded by run.py with `-p liger_plugin`, in a checkout of Liger-Kernel. Before any test module is imported it rebinds
the Functions where Liger looks them up. Liger's Triton Function stays where the CuTe suite takes its oracle from. After
each test, the calls that it made are held to float64.

What a test needs beside a loss and what is not installed (transformers, tokenizers, the packages of the other backends)
is stood in for by an empty module: the files run here import them, and use nothing of them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from liger_adapter import (
    CrossEntropyFunction,
    FusedLinearCrossEntropyFunction,
    FusedLinearCrossEntropySM90Function,
    Recorder,
)

LIBRARIES = ("transformers", "tokenizers", "datasets")
# Only once Liger is imported, which looks for them to find its other backends.
BACKENDS = ("cutlass", "cuda")

# Tests that ask for something else than the loss, and why they are not counted as portable. By the end of their names.
NOT_PORTABLE = {
    "test_flce_pre_torch_2_8_out_dtype_compatibility_matches_triton": "patches the inside of Liger's implementation",
    "test_flce_native_support_requires_exact_sm100": "asks which GPUs Liger's implementation runs on",
    "test_flce_native_function_rejects_fp32_inputs": "asks what Liger's implementation cannot do",
    "test_flce_native_function_rejects_non_sm100": "asks which GPUs Liger's implementation runs on",
    "test_flce_native_gemm_guards_noncurrent_device": "patches the inside of Liger's implementation",
    "test_liger_kernel_impl_cutedsl_selects_cutedsl_flce": "asks which implementation Liger selects",
    "test_flce_metrics_stay_on_native_path": "for another GPU",
    "test_flce_all_native_features_use_one_path": "for another GPU",
    "test_flce_odd_vocab_all_native_features_match_triton": "for another GPU",
    "test_flce_odd_vocab_padding_cannot_become_softmax_max": "for another GPU",
    "test_flce_first_backward_does_not_recompute": "for another GPU",
    "test_flce_repeated_backward_recomputes_full_feature_gradients": "for another GPU",
    "test_float32_internal": "launches Liger's kernel itself",
}
# Where this library does something else on purpose: what Liger's test wants, and what happens here instead.
DEVIATIONS = {
    "test_flce_target_out_of_bounds_raises": "wants the host to wait and raise; here the loss is NaN on CUDA",
    "test_flce_target_negative_non_ignore_raises": "wants the host to wait and raise; here the loss is NaN on CUDA",
    "test_correctness_with_out_of_bounds_target_once": "wants the host to wait and raise; here the loss is NaN on CUDA",
    "test_flce_reduction_none_is_rejected": "wants no reduction 'none'; here there is one",
    "test_flce_native_z_loss_preserves_input_dtype": "wants the z loss rounded to 16 bits; here it is float32",
    "test_flce_invalid_inputs_raise[<lambda>-TypeError1]": "wants int32 targets refused; here they are taken",
    # The argmax of logits in float32; Liger's are rounded to 16 bits first, and then often equal.
    **{
        f"test_flce_predicted_tokens_matches_triton[{case}]": "wants the argmax of rounded logits"
        for case in ("ig-100-bf16", "ig-100-fp16", "ig2-bf16", "ig2-fp16")
    },
    "test_correctness[sum-shape0]": "compares with bfloat16 logits, whose rounding is larger than its tolerance",
    "test_correctness[sum-shape1]": "compares with bfloat16 logits, whose rounding is larger than its tolerance",
    "test_retained_backward_preserves_saved_gradient": "wants a second backward to the bit; here it is computed anew",
    "test_rejects_unsupported_features": "wants a bias refused; here it is taken",
    "test_sm90_fused_linear_cross_entropy_rejects_unsupported_shapes_and_dtypes": "wants float32 refused; it is taken",
}


class _Anything:
    """What a stand-in has under any name."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass


def _no(*_args: Any, **_options: Any) -> bool:
    return False


class _Empty(ModuleType):
    __version__ = "0"
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Questions such as is_torch_npu_available are answered.
        return _no if name.startswith("is_") else type(name, (_Anything,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, last of all finders, those of some packages that are not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Give a spec for a stand-in."""
        if fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Give an empty module, in which every name is an empty class."""
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def substitute() -> None:
    """Put the Functions of this library where Liger's tests find Liger's."""
    sys.meta_path.append(StandIns(LIBRARIES))
    ops = importlib.import_module("liger_kernel.ops")
    ops.LigerFusedLinearCrossEntropyFunction = FusedLinearCrossEntropyFunction
    ops.LigerCrossEntropyFunction = CrossEntropyFunction
    # These have bound what stands there, unless something imported them before the two lines above.
    for name in ("functional", "fused_linear_cross_entropy", "cross_entropy"):
        module = importlib.import_module(f"liger_kernel.transformers.{name}")
        for bound in ("LigerFusedLinearCrossEntropyFunction", "LigerCrossEntropyFunction"):
            if hasattr(module, bound):
                setattr(module, bound, getattr(ops, bound))
    # The other backends, which may not even import here.
    sys.meta_path.append(StandIns(BACKENDS))
    for package, function in (
        ("cutedsl.ops", FusedLinearCrossEntropyFunction),
        ("cutedsl.ops.fused_linear_cross_entropy", FusedLinearCrossEntropyFunction),
        ("cutedsl.ops.fused_linear_cross_entropy_sm90", FusedLinearCrossEntropySM90Function),
        ("cutile.ops.fused_linear_cross_entropy", FusedLinearCrossEntropyFunction),
    ):
        parts = package.split(".")
        for i in range(1, len(parts) + 1):
            full = "liger_kernel.ops." + ".".join(parts[:i])
            if not isinstance(sys.modules.get(full), _Empty):
                sys.modules[full] = _Empty(full)
        module = sys.modules[f"liger_kernel.ops.{package}"]
        module.LigerFusedLinearCrossEntropyFunction = function  # type: ignore[attr-defined]
        module.LigerFusedLinearCrossEntropySM90Function = function  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Substitute before a conftest or a test imports anything."""
    substitute()


def _entry(table: dict[str, str], name: str) -> str | None:
    base = name.split("[")[0]
    return table.get(name, table.get(base))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what asks for something else than the loss."""
    portable = [item for item in items if _entry(NOT_PORTABLE, item.name) is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in portable])
    items[:] = portable


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the test; then hold its calls to float64, whatever it said."""
    Recorder.current = Recorder()
    error: Exception | None = None
    try:
        result = yield
    except Exception as raised:
        error, result = raised, None
    try:
        checked = f"{Recorder.current.check()} calls"
    except AssertionError as wrong:
        checked = f"WRONG: {wrong}"
    pyfuncitem.user_properties.append(("float64", checked))
    if error is not None:
        raise error
    return result


_results: list[dict[str, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep what came of each test."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _results.append(
            {
                "file": item.nodeid.split("::")[0],
                "name": item.name,
                "outcome": report.outcome,
                "deviation": _entry(DEVIATIONS, item.name) or "",
                "float64": dict(item.user_properties).get("float64", ""),
                "why": str(report.longrepr).splitlines()[-1][:300] if report.longrepr and not report.passed else "",
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write all results for run.py."""
    path = os.environ.get("SYNCFREE_PEER_RESULTS")
    if path:
        Path(path).write_text(json.dumps(_results, indent=1))
