"""PyTorch's own samples of linear_cross_entropy, which torch >= 2.13 ships, with this library in its place.

`torch.testing._internal` holds what PyTorch's generic tests run: samples and wrong inputs of the function (three
variants) and of the module, with a reference. Each sample goes through `linear_cross_entropy`, is compared with
PyTorch's answer in float64, and once more as non-contiguous tensors; float64 samples pass gradcheck.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import syncfree_ext
from cases import Call
from exactness import check_gradients, check_values, exact
from tolerances import assert_close_rel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
VARIANTS = ("", "chunked", "chunked_none")

PROBABILITIES = "a target of class probabilities: refused (TypeError)"
MANY_DIMENSIONS = "linear_weight of more than two dimensions: refused (ValueError)"


@dataclass
class Tally:
    """What came of a set of samples: how many passed, and how many were refused for which reason."""

    passed: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, why: str) -> None:
        """Count a refusal."""
        self.refused[why] = self.refused.get(why, 0) + 1

    @property
    def total(self) -> int:
        """All samples."""
        return self.passed + sum(self.refused.values())


def available() -> bool:
    """Whether this torch has the function, and with it the samples, and what their module imports is there."""
    return hasattr(torch.nn.functional, "linear_cross_entropy") and find_spec("expecttest") is not None


def internals(name: str) -> Any:
    """A module of torch.testing._internal. Their import forbids to set torch.backends' flags, which other tests do."""
    module = importlib.import_module(f"torch.testing._internal.{name}")
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return module


def function_samples(variant: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """(input, linear_weight, target, options) of each sample of a variant of the function."""
    op_db = internals("common_methods_invocations").op_db
    random.seed(0)
    torch.manual_seed(0)
    name = "nn.functional.linear_cross_entropy"
    (op,) = [op for op in op_db if op.name == name and op.variant_test_name == variant]
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        for s in (sample, sample.noncontiguous()):
            options = {key: value for key, value in s.kwargs.items() if key != "options"}
            yield s.input, s.args[0], s.args[1], options


def module_samples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """The same of each sample of the module, with the parameters that PyTorch's module makes."""
    module_db = internals("common_modules").module_db
    random.seed(0)
    torch.manual_seed(0)
    (info,) = [info for info in module_db if info.module_cls is torch.nn.LinearCrossEntropyLoss]
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    for sample in inputs:
        arguments = sample.constructor_input
        module = torch.nn.LinearCrossEntropyLoss(*arguments.args, **arguments.kwargs)
        options = {name: getattr(module, name) for name in ("weight", "reduction", "ignore_index", "label_smoothing")}
        x, target = sample.forward_input.args
        parameters = list(module.parameters())
        hidden = x.shape[-1]
        w = parameters[0].detach().reshape(module.num_classes, *module.out_features, hidden).requires_grad_()
        if len(parameters) > 1:
            options["linear_bias"] = parameters[1].detach().reshape(w.shape[:-1]).requires_grad_()
        yield x, w, target, options


def wrong_inputs() -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """What PyTorch's function refuses, and so must this one."""
    error_inputs_linear_cross_entropy = internals("common_methods_invocations").error_inputs_linear_cross_entropy
    for wrong in error_inputs_linear_cross_entropy(None, "cpu"):
        s = wrong.sample_input
        yield s.input, s.args[0], s.args[1], s.kwargs


def check_sample(x: Tensor, w: Tensor, target: Tensor, options: dict[str, Any], tally: Tally) -> None:
    """Hold one sample to PyTorch's answer and to ours in float64; raises AssertionError."""
    options = {name: t.detach() if name == "weight" and t is not None else t for name, t in options.items()}
    if target.is_floating_point() or w.dim() != 2:
        expected = TypeError if target.is_floating_point() and w.dim() == 2 else ValueError
        try:
            syncfree_ext.linear_cross_entropy(x, w, target.detach(), **options)
        except expected:
            tally.refuse(PROBABILITIES if expected is TypeError else MANY_DIMENSIONS)
            return
        raise AssertionError(f"a sample outside the contract was taken: {w.shape}, {target.dtype}")
    bias = options.pop("linear_bias", None)
    leaves = [None if t is None else t.detach().clone(memory_format=torch.preserve_format) for t in (x, w, bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    loss = syncfree_ext.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
    torch.manual_seed(1)
    upstream = torch.randn(loss.shape, dtype=loss.dtype)
    loss.backward(upstream)

    # PyTorch's own answer, in float64.
    wide = [None if t is None else t.detach().double() for t in (x, w, bias)]
    weight = options.get("weight")
    theirs = torch.nn.functional.linear_cross_entropy(
        wide[0], wide[1], target, linear_bias=wide[2],
        **options | {"weight": None if weight is None else weight.double()},
    )  # fmt: skip
    scored = Call(x.detach(), w.detach(), target, None if bias is None else bias.detach(), {
        "weight": None, "token_weight": None, "reduction": "mean", "label_smoothing": 0.0, "softcap": None,
        "token_scaling": False, "logit_scale": 1.0, "z_loss_weight": 0.0, "shift": 0, **options,
    }, upstream)  # fmt: skip
    e = exact(scored)
    assert_close_rel(e.gradients.output.loss, theirs, 1e-12, 1e-12, "PyTorch's loss against the reference")
    check_values(scored, e, loss)
    check_gradients(scored, e, tuple(None if leaf is None else leaf.grad for leaf in leaves), "xwb")  # type: ignore[arg-type]
    if x.dtype == torch.float64:
        function = partial(_loss_of, target=target, options=options)
        present = [leaf.detach().requires_grad_() for leaf in leaves if leaf is not None]
        assert torch.autograd.gradcheck(function, present, fast_mode=True)
    tally.passed += 1


def _loss_of(x: Tensor, w: Tensor, bias: Tensor | None = None, *, target: Tensor, options: dict[str, Any]) -> Tensor:
    loss: Tensor = syncfree_ext.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
    return loss


def run() -> dict[str, Tally]:
    """Every sample of every dtype; raises AssertionError at the first that is wrong."""
    tallies: dict[str, Tally] = {}
    for dtype in DTYPES:
        for variant in VARIANTS:
            tally = tallies.setdefault(f"function {variant}".strip(), Tally())
            for sample in function_samples(variant, dtype):
                check_sample(*sample, tally)
        tally = tallies.setdefault("module", Tally())
        for sample in module_samples(dtype):
            check_sample(*sample, tally)
    tally = tallies.setdefault("wrong inputs", Tally())
    for x, w, target, options in wrong_inputs():
        try:
            syncfree_ext.linear_cross_entropy(x, w, target, **options)
        except (TypeError, ValueError):
            tally.passed += 1
        else:
            raise AssertionError(f"a wrong input was taken: {x.shape}, {w.shape}, {target.shape}, {options}")
    return tallies
