"""What is refused, with which exception, and what its text names: function or op, argument, expected, got."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import syncfree_ext

BT, H, V = 12, 8, 19
LONG = 2**62


def arguments(device: torch.device) -> dict[str, Any]:
    return {
        "input": torch.randn(BT, H, device=device),
        "linear_weight": torch.randn(V, H, device=device),
        "target": torch.arange(BT, device=device),
    }


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Arguments replaced by values, or by functions of the device."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        device = given["input"].device
        return given | {k: v(device) if callable(v) else v for k, v in changes.items()}

    return change


def full(
    *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.ones(shape, dtype=dtype, device=device).requires_grad_(requires_grad)


def elsewhere(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    """On another device than the rest, which exists on every machine."""
    return lambda device: torch.ones(shape, dtype=dtype, device="cpu" if device.type == "cuda" else "meta")


def rows(device: torch.device | str) -> Tensor:
    return torch.eye(BT, H, device=device)


def target(device: torch.device) -> Tensor:
    return torch.arange(BT, device=device)


def jagged(device: torch.device) -> Tensor:
    return torch.nested.nested_tensor([rows(device)[:5], rows(device)[5:]], layout=torch.jagged)


# name: (change, exception, argument, what came)
LINEAR = {
    "no classes": (changed(linear_weight=full(0, H)), ValueError, "linear_weight", "(0, 8)"),
    "H mismatch": (changed(linear_weight=full(V, H + 1)), ValueError, "linear_weight", "(19, 9)"),
    "weight of rank 1": (changed(linear_weight=full(H)), ValueError, "linear_weight", "(8,)"),
    "weight of rank 3": (changed(linear_weight=full(1, V, H)), ValueError, "linear_weight", "(1, 19, 8)"),
    "input of rank 0": (changed(input=full(), target=full(dtype=torch.int64)), ValueError, "input", "()"),
    "bias too long": (changed(linear_bias=full(V + 1)), ValueError, "linear_bias", "(20,)"),
    "bias of rank 2": (changed(linear_bias=full(1, V)), ValueError, "linear_bias", "(1, 19)"),
    "weight elsewhere": (changed(linear_weight=elsewhere(V, H)), ValueError, "linear_weight", "meta|cpu"),
    "bias elsewhere": (changed(linear_bias=elsewhere(V)), ValueError, "linear_bias", "meta|cpu"),
    "mixed dtypes": (changed(linear_weight=full(V, H, dtype=torch.bfloat16)), TypeError, "linear_weight", "bfloat16"),
    "input of int64": (changed(input=full(BT, H, dtype=torch.int64)), TypeError, "input", "int64"),
    "weight of int64": (changed(linear_weight=full(V, H, dtype=torch.int64)), TypeError, "linear_weight", "int64"),
    "complex input": (changed(input=full(BT, H, dtype=torch.complex64)), TypeError, "input", "complex64"),
    "bias of int64": (changed(linear_bias=full(V, dtype=torch.int64)), TypeError, "linear_bias", "int64"),
    "sparse input": (changed(input=lambda d: rows(d).to_sparse()), TypeError, "input", "torch.sparse_coo"),
    "input of MKLDNN": (changed(input=lambda _: rows("cpu").to_mkldnn()), TypeError, "input", "torch._mkldnn"),
    "jagged input": (changed(input=jagged), TypeError, "input", "torch.jagged"),
    "sparse weight": (
        changed(linear_weight=lambda d: rows(d).to_sparse_csr()),
        TypeError,
        "linear_weight",
        "sparse_csr",
    ),
    "input no tensor": (changed(input=[[1.0] * H] * BT), TypeError, "input", "list"),
    "weight None": (changed(linear_weight=None), TypeError, "linear_weight", "NoneType"),
    "chunk_rows 0": (changed(chunk_rows=0), ValueError, "chunk_rows", "0"),
    "chunk_rows -5": (changed(chunk_rows=-5), ValueError, "chunk_rows", "-5"),
    "chunk_rows of 71 bits": (changed(chunk_rows=2**70), ValueError, "chunk_rows", "1180591620717411303424"),
    "chunk_rows 1.5": (changed(chunk_rows=1.5), TypeError, "chunk_rows", "float"),
    "workspace_bytes 0": (changed(workspace_bytes=0), ValueError, "workspace_bytes", "0"),
    "accum_dtype": (changed(accum_dtype=torch.bfloat16), ValueError, "accum_dtype", "bfloat16"),
}

BOTH = {
    "target too short": (changed(target=full(BT - 1, dtype=torch.int64)), ValueError, "target", "(11,)"),
    "target of rank 2": (changed(target=full(BT, 1, dtype=torch.int64)), ValueError, "target", "(12, 1)"),
    "sparse target": (changed(target=lambda d: target(d).to_sparse()), TypeError, "target", "torch.sparse_coo"),
    "target elsewhere": (changed(target=elsewhere(BT, dtype=torch.int64)), ValueError, "target", "meta|cpu"),
    "float target": (changed(target=full(BT)), TypeError, "target", "float32"),
    "class probabilities": (changed(target=full(BT, V)), TypeError, "target", "float32"),
    "bool target": (changed(target=full(BT, dtype=torch.bool)), TypeError, "target", "bool"),
    "int16 target": (changed(target=full(BT, dtype=torch.int16)), TypeError, "target", "int16"),
    "uint8 target": (changed(target=full(BT, dtype=torch.uint8)), TypeError, "target", "uint8"),
    "target None": (changed(target=None), TypeError, "target", "NoneType"),
    "reduction": (changed(reduction="avg"), ValueError, "reduction", "avg"),
    "reduction None": (changed(reduction=None), ValueError, "reduction", "None"),
    "num_items with sum": (changed(reduction="sum", num_items=3), ValueError, "num_items", "sum"),
    "num_items with none": (changed(reduction="none", num_items=3), ValueError, "num_items", "none"),
    "num_items tensor with sum": (changed(reduction="sum", num_items=full()), ValueError, "num_items", "sum"),
    "num_items of two": (changed(num_items=full(2)), ValueError, "num_items", "(2,)"),
    "num_items elsewhere": (changed(num_items=elsewhere()), ValueError, "num_items", "meta|cpu"),
    "num_items a string": (changed(num_items="7"), TypeError, "num_items", "str"),
    "num_items of 401 digits": (changed(num_items=10**400), ValueError, "num_items", "an integer of 1329 bits"),
    "logit_scale of 401 digits": (
        changed(logit_scale=-(10**400)),
        ValueError,
        "logit_scale",
        "an integer of 1329 bits",
    ),
    "num_items with grad": (changed(num_items=full(requires_grad=True)), ValueError, "num_items", "requires_grad=True"),
    "smoothing -0.1": (changed(label_smoothing=-0.1), ValueError, "label_smoothing", "-0.1"),
    "smoothing 1.01": (changed(label_smoothing=1.01), ValueError, "label_smoothing", "1.01"),
    "smoothing NaN": (changed(label_smoothing=float("nan")), ValueError, "label_smoothing", "nan"),
    "softcap 0": (changed(softcap=0.0), ValueError, "softcap", "0.0"),
    "softcap -3": (changed(softcap=-3.0), ValueError, "softcap", "-3.0"),
    "softcap NaN": (changed(softcap=float("nan")), ValueError, "softcap", "nan"),
    "shift -1": (changed(shift=-1), ValueError, "shift", "-1"),
    "shift of 71 bits": (changed(shift=2**70), ValueError, "shift", "1180591620717411303424"),
    "ignore_index of 64 bits": (changed(ignore_index=2**63), ValueError, "ignore_index", "9223372036854775808"),
    "ignore_index a float": (changed(ignore_index=-100.0), TypeError, "ignore_index", "float"),
    "shift 0.5": (changed(shift=0.5), TypeError, "shift", "float"),
    "class weights too short": (changed(weight=full(V - 1)), ValueError, "weight", "(18,)"),
    "class weights of rank 2": (changed(weight=full(V, 1)), ValueError, "weight", "(19, 1)"),
    "class weights of int64": (changed(weight=full(V, dtype=torch.int64)), TypeError, "weight", "int64"),
    "class weights elsewhere": (changed(weight=elsewhere(V)), ValueError, "weight", "meta|cpu"),
    "class weights with grad": (
        changed(weight=full(V, requires_grad=True)),
        ValueError,
        "weight",
        "requires_grad=True",
    ),
    "token weights too short": (changed(token_weight=full(BT - 1)), ValueError, "token_weight", "(11,)"),
    "token weights of rank 2": (changed(token_weight=full(BT, 1)), ValueError, "token_weight", "(12, 1)"),
    "token weights of int64": (changed(token_weight=full(BT, dtype=torch.int64)), TypeError, "token_weight", "int64"),
    "token weights elsewhere": (changed(token_weight=elsewhere(BT)), ValueError, "token_weight", "meta|cpu"),
    "token weights with grad": (
        changed(token_weight=full(BT, requires_grad=True)),
        ValueError,
        "token_weight",
        "requires_grad=True",
    ),
    "logit_scale of two": (changed(logit_scale=full(2)), ValueError, "logit_scale", "(2,)"),
    "logit_scale None": (changed(logit_scale=None), TypeError, "logit_scale", "NoneType"),
    "logit_scale elsewhere": (changed(logit_scale=elsewhere()), ValueError, "logit_scale", "meta|cpu"),
    "logit_scale with grad": (changed(logit_scale=full(requires_grad=True)), ValueError, "logit_scale", "grad"),
    "z_loss_weight of two": (changed(z_loss_weight=full(2)), ValueError, "z_loss_weight", "(2,)"),
    "z_loss_weight with grad": (changed(z_loss_weight=full(requires_grad=True)), ValueError, "z_loss_weight", "grad"),
}


def check_message(text: str, function: str, argument: str, got: str) -> None:
    """Function (or the op beneath it) first, then the argument, what was expected, and last what came."""
    names = {function, "syncfree::flce"} if function.endswith("linear_cross_entropy") else {function}
    functions = "|".join(map(re.escape, names))
    came = "|".join(map(re.escape, got.split("|")))
    pattern = rf"^({functions}): (.*\b)?{argument}\b.*(must|expected|is the divisor).*got .*({came})"
    assert re.search(pattern, text, re.DOTALL), f"{text!r} does not match {pattern!r}"


@pytest.mark.parametrize("name", [*LINEAR, *BOTH])
def test_linear_cross_entropy_refuses(name: str, device: torch.device) -> None:
    change, error, argument, got = {**LINEAR, **BOTH}[name]
    with pytest.raises(error) as caught:
        syncfree_ext.linear_cross_entropy(**change(arguments(device)))
    assert type(caught.value) is error
    check_message(str(caught.value), "syncfree_ext.linear_cross_entropy", argument, got)


@pytest.mark.parametrize("name", BOTH)
def test_cross_entropy_refuses(name: str, device: torch.device) -> None:
    change, error, argument, got = BOTH[name]
    given = change(arguments(device))
    del given["input"], given["linear_weight"]
    with pytest.raises(error) as caught:
        syncfree_ext.cross_entropy(torch.randn(BT, V, device=device), **given)
    assert type(caught.value) is error
    check_message(str(caught.value), "syncfree_ext.cross_entropy", argument, got)


def test_large_integers_are_numbers(device: torch.device) -> None:
    given = arguments(device)
    exact = syncfree_ext.linear_cross_entropy(**given, num_items=1e30)
    assert torch.equal(syncfree_ext.linear_cross_entropy(**given, num_items=10**30), exact)


def test_cross_entropy_without_classes(device: torch.device) -> None:
    with pytest.raises(ValueError) as caught:
        syncfree_ext.cross_entropy(torch.randn(3, 0, device=device), torch.zeros(3, dtype=torch.int64, device=device))
    check_message(str(caught.value), "syncfree_ext.cross_entropy", "logits", "(3, 0)")


def test_mixed_dtypes_are_cast_under_autocast(device: torch.device) -> None:
    given = arguments(device) | {"linear_weight": torch.randn(V, H, device=device, dtype=torch.bfloat16)}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert syncfree_ext.linear_cross_entropy(**given).isfinite()


def test_dtensor_is_refused() -> None:
    """Without a process group: what marks a DTensor is its mesh."""

    class Sharded(torch.Tensor):
        device_mesh = None

    given = arguments(torch.device("cpu"))
    for name in ("input", "linear_weight", "target"):
        with pytest.raises(TypeError) as caught:
            syncfree_ext.linear_cross_entropy(**given | {name: given[name].as_subclass(Sharded)})
        check_message(str(caught.value), "syncfree_ext.linear_cross_entropy", name, "DTensor")


@pytest.mark.cuda
def test_float64_on_cuda_is_refused(device: torch.device) -> None:
    given = {k: v.double() if v.is_floating_point() else v for k, v in arguments(device).items()}
    with pytest.raises(TypeError) as caught:
        syncfree_ext.linear_cross_entropy(**given)
    check_message(str(caught.value), "syncfree_ext.linear_cross_entropy", "input", "float64")


# The ops themselves, whose checks are in C++.
OPS = torch.ops.syncfree
RAW = {
    "input of rank 3": (changed(input=full(2, 6, H)), "input", "(2, 6, 8)"),
    "H mismatch": (changed(linear_weight=full(V, H + 1)), "linear_weight", "(19, 9)"),
    "no classes": (changed(linear_weight=full(0, H)), "linear_weight", "(0, 8)"),
    "bias too long": (changed(linear_bias=full(V + 1)), "linear_bias", "(20,)"),
    "mixed dtypes": (changed(linear_weight=full(V, H, dtype=torch.bfloat16)), "linear_weight", "bfloat16"),
    "target too short": (changed(target=full(BT - 1, dtype=torch.int64)), "target", "(11,)"),
    "float target": (changed(target=full(BT)), "target", "float32"),
    "class weights too short": (changed(weight=full(V - 1)), "weight", "(18,)"),
    "token weights too short": (changed(token_weight=full(BT - 1)), "token_weight", "(11,)"),
    "reduction": (changed(reduction="avg"), "reduction", "avg"),
    "num_items with sum": (changed(reduction="sum", num_items=full()), "num_items", "sum"),
    "num_items of two": (changed(num_items=full(2)), "num_items", "(2,)"),
    "smoothing": (changed(label_smoothing=1.5), "label_smoothing", "1.5"),
    "softcap": (changed(softcap=0.0), "softcap", "0"),
    "shift": (changed(shift=-1), "shift", "-1"),
    "chunk_rows": (changed(chunk_rows=0), "chunk_rows", "0"),
    "workspace_bytes": (changed(workspace_bytes=0), "workspace_bytes", "0"),
}


@pytest.mark.parametrize("name", RAW)
def test_flce_forward_refuses(name: str, device: torch.device) -> None:
    change, argument, got = RAW[name]
    with pytest.raises(ValueError) as caught:
        OPS.flce_forward(**change(arguments(device)))
    check_message(str(caught.value), "syncfree::flce_forward", argument, got)


def test_flce_forward_has_no_gradients_for_none(device: torch.device) -> None:
    with pytest.raises(ValueError) as caught:
        OPS.flce_forward(**arguments(device), reduction="none", need_dx=True)
    assert str(caught.value).startswith("syncfree::flce_forward: ")
    assert "need_dx" in str(caught.value)


def test_flce_backward_refuses_a_gradient_of_another_shape(device: torch.device) -> None:
    for reduction, shape in (("none", (BT - 1,)), ("none", ()), ("mean", (2,))):
        with pytest.raises(ValueError) as caught:
            OPS.flce_backward(torch.ones(shape, device=device), **arguments(device), reduction=reduction, need_dx=True)
        check_message(str(caught.value), "syncfree::flce_backward", "grad_output", str(tuple(shape)))


@pytest.mark.parametrize("bad", [V, -1, -LONG, LONG])
def test_an_index_error_names_the_target_on_the_cpu(bad: int) -> None:
    given = arguments(torch.device("cpu"))
    given["target"][7] = bad
    logits = torch.randn(BT, V)
    for call in (
        lambda: syncfree_ext.linear_cross_entropy(**given),
        lambda: OPS.flce_forward(**given, need_dx=True, need_dw=True),
        lambda: OPS.flce_backward(torch.ones(()), **given, need_dx=True),
        lambda: syncfree_ext.cross_entropy(logits, given["target"]),
        lambda: OPS.count_targets(given["target"], V),
    ):
        with pytest.raises(IndexError, match=rf"^syncfree.*target.*\[0, 19\).*ignore_index -100, got {bad}\b"):
            call()


@pytest.mark.parametrize("name", ["token_scaling", "return_z_loss", "return_logsumexp"])
@pytest.mark.parametrize("value", ["", "yes", 1.0, None, [], torch.ones(2)], ids=str)
def test_flags(name: str, value: Any) -> None:
    x, w, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    kind = type(value).__name__
    with pytest.raises(TypeError, match=f"syncfree_ext.linear_cross_entropy: {name} must be True or False, got {kind}"):
        syncfree_ext.linear_cross_entropy(x, w, target, **{name: value})
    with pytest.raises(TypeError, match=f"syncfree_ext.cross_entropy: {name} must be True or False, got {kind}"):
        syncfree_ext.cross_entropy(w, torch.zeros(4, dtype=torch.int64), **{name: value})
