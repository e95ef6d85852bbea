"""Calls for the property tests: strategies of hypothesis over the whole option space, and what they are built into.

A case is a dict of plain values, which hypothesis shrinks and prints; its tensors follow from its seed. How many cases
a test draws is set by SYNCFREE_EXAMPLES, which ones by SYNCFREE_SEED, which the header of a session shows. With
SYNCFREE_SHRINK=0 the first failure is shown as it is, without the search for a smaller one, which can take minutes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch import Tensor

from cases import DTYPES, Call, data, layout

Test = TypeVar("Test", bound=Callable[..., Any])

_LAYOUTS = ("contiguous", "transposed", "strided", "offset", "pitched")
_DATA = ("unit", "confident", "trained", "outliers", "far", "large", "equal", "zero")
_SHRINK = os.environ.get("SYNCFREE_SHRINK", "1") not in ("", "0")
_SEEDS = st.integers(0, 2**32 - 1)


def property_test(case: st.SearchStrategy[Any], examples: int) -> Callable[[Test], Test]:
    """Run the test on cases that SYNCFREE_SEED chooses: as many as given, or as SYNCFREE_EXAMPLES says."""

    def decorate(test: Test) -> Test:
        digest = hashlib.sha256(f"{os.environ['SYNCFREE_SEED']} {test.__name__}".encode()).digest()
        settings = hypothesis.settings(
            max_examples=int(os.environ.get("SYNCFREE_EXAMPLES", examples)),
            deadline=None,
            phases=tuple(hypothesis.Phase) if _SHRINK else (hypothesis.Phase.generate,),
            database=None,
            print_blob=False,
            # The fixtures hold nothing but the device; a machine with a GPU is slow on its first call.
            suppress_health_check=list(HealthCheck),
        )
        return hypothesis.seed(int.from_bytes(digest[:8], "little"))(settings(hypothesis.given(case=case)(test)))

    return decorate


def _shapes(most_rows: int) -> st.SearchStrategy[tuple[int, ...]]:
    rows = st.one_of(st.integers(1, 9), st.integers(0, most_rows))
    return st.one_of(
        st.tuples(rows),
        st.tuples(rows),
        st.just(()),
        st.tuples(st.integers(0, 4), st.integers(0, max(1, most_rows // 4))),
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, max(1, most_rows // 9))),
    )


def _upstream(reduction: st.SearchStrategy[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "reduction": reduction,
        # Of "none": each row's own, with zeros among them, or one for all rows without memory of its own.
        "upstream_rows": st.sampled_from(("strided", "contiguous", "zeros", "expanded")),
        "upstream": st.one_of(
            st.sampled_from((1.0, 1.0, 0.5, 0.0, -1.0, 256.0)), st.floats(-4, 4).filter(lambda u: abs(u) > 1e-3)
        ),
    }


def _scoring(plain: bool) -> dict[str, st.SearchStrategy[Any]]:
    """What both losses take. A plain call is one whose gradient looks at no class but through its probability."""
    no = st.just("no")
    # The arithmetic is float32: a scale below its range is 0, which makes NaN of a bias of -inf.
    floats = st.floats(-2, 2).filter(lambda scale: scale == 0 or abs(scale) >= torch.finfo(torch.float32).tiny)
    scale = st.one_of(st.just(1.0), st.just(1.0), floats, st.just(0.0))
    return {
        "ignored": st.sampled_from(("no", "some", "some", "most", "all", "class", "none", "far", "unmatched")),
        "target_dtype": st.sampled_from(("int64", "int64", "int32")),
        "target_layout": st.sampled_from(("contiguous", "strided", "transposed", "expanded")),
        "num_items": st.one_of(
            no, no, st.sampled_from((1, 0, -3, 0.25, 17.5)), st.sampled_from(("int64", "float32", "one element"))
        ),
        "weight": no
        if plain
        else st.sampled_from(("no", "no", "float32", "same", "float64", "zeros", "negative", "mixed")),
        "token_weight": st.sampled_from(("no", "no", "float32", "same", "zeros", "negative")),
        "label_smoothing": st.just(0.0) if plain else st.one_of(st.just(0.0), st.just(0.0), st.floats(0, 1)),
        "softcap": st.none() if plain else st.one_of(st.none(), st.none(), st.floats(0.25, 60)),
        "token_scaling": st.sampled_from((False, False, True)),
        "logit_scale": scale,
        "logit_scale_tensor": st.sampled_from(("no", "float32", "float64")),
        "z_loss_weight": st.one_of(st.just(0.0), st.just(0.0), st.floats(0, 0.01)),
        "z_loss_weight_tensor": st.sampled_from(("no", "float32", "float64")),
        "shift": st.sampled_from((0, 0, 0, 1, 2, 5, 1000)),
        "extras": st.sets(st.sampled_from(("z_loss", "token_accuracy", "predicted_tokens", "logsumexp"))).map(sorted),
        "seed": _SEEDS,
        **_upstream(st.sampled_from(("mean", "mean", "sum", "none"))),
    }


def linear_cases() -> st.SearchStrategy[dict[str, Any]]:
    """Calls of linear_cross_entropy, of any dtype and option."""
    return st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(tuple(DTYPES)),
            "shape": _shapes(150),
            "h": st.one_of(st.integers(1, 20), st.sampled_from((32, 65, 72))),
            "v": st.one_of(st.integers(1, 40), st.sampled_from((64, 129, 200, 515))),
            "data": st.sampled_from(_DATA),
            "bias": st.sampled_from(("no", "no", "float32", "same", "float64", "minus infinity")),
            "x_layout": st.sampled_from((*_LAYOUTS, "expanded")),
            "w_layout": st.sampled_from(_LAYOUTS),
            "autocast": st.sampled_from(("no", "no", "no", "bfloat16", "float16")),
            "chunk_rows": st.one_of(st.none(), st.integers(1, 200)),
            "workspace_bytes": st.one_of(st.none(), st.none(), st.integers(1, 20000)),
            "accum_dtype": st.sampled_from(("no", "no", "float32")),
            "trainable": st.sampled_from(("xwb", "xwb", "xw", "x", "w", "b", "wb", "xb", "")),
            **_scoring(plain=False),
        }
    )


def plain_cases() -> st.SearchStrategy[dict[str, Any]]:
    """bfloat16 calls that kernels of their own may serve: several chunks, ragged tiles, hopeless rows."""
    return st.fixed_dictionaries(
        {
            "dtype": st.just("bfloat16"),
            "shape": st.one_of(_shapes(150), st.tuples(st.sampled_from((127, 128, 129, 256, 300, 520)))),
            "h": st.one_of(st.integers(1, 20).map(lambda n: 8 * n), st.sampled_from((256, 264, 384))),
            "v": st.one_of(st.integers(1, 70), st.sampled_from((64, 127, 128, 191, 192, 193, 256, 384, 500, 1021))),
            "data": st.sampled_from(_DATA),
            "bias": st.just("no"),
            "x_layout": st.sampled_from(("contiguous", "contiguous", "pitched", "transposed", "offset", "expanded")),
            "w_layout": st.sampled_from(("contiguous", "contiguous", "pitched", "transposed", "offset")),
            "autocast": st.just("no"),
            "chunk_rows": st.sampled_from((None, 1, 128, 128, 256)),
            "workspace_bytes": st.none(),
            "accum_dtype": st.just("no"),
            "trainable": st.sampled_from(("xw", "xw", "x", "w", "")),
            **_scoring(plain=True),
        }
    )


def logits_cases() -> st.SearchStrategy[dict[str, Any]]:
    """Calls of cross_entropy."""
    return st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(tuple(DTYPES)),
            "shape": _shapes(60),
            "v": st.one_of(st.integers(1, 40), st.sampled_from((64, 129, 1000, 1025))),
            "data": st.sampled_from(("normal", "large", "equal", "confident", "minus infinity")),
            "x_layout": st.sampled_from((*_LAYOUTS, "expanded")),
            "trainable": st.sampled_from(("x", "x", "x", "")),
            **_scoring(plain=False),
        }
    )


# ---------------------------------------------------------------------------------------------------------- the tensors


def _rows(kind: str, count: int, h: int, v: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    if kind in ("large", "equal", "zero"):
        x, w, target = data("unit", count, h, v, rng)
        return (30 * x, w, target) if kind == "large" else (x, 0 * w + (kind == "equal"), target)
    return data(kind, count, h, v, rng)


def _values(kind: str, count: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor | None:
    """Class weights or token weights."""
    if kind == "no":
        return None
    values = torch.rand(count, generator=rng) + 0.25
    if kind == "zeros":
        values[torch.rand(count, generator=rng) < 0.4] = 0
    elif kind == "negative":
        values.neg_()
    elif kind == "mixed":
        values *= torch.where(torch.rand(count, generator=rng) < 0.3, -1.0, 1.0)
    # A float64 value is read as float32, and so is a reference that is to see the same.
    return values.to(dtype if kind == "same" else torch.float64 if kind == "float64" else torch.float32)


def _scalar(value: float, kind: str) -> float | Tensor:
    return value if kind == "no" else torch.tensor(value, dtype=DTYPES[kind])


def _ignoring(case: dict[str, Any], target: Tensor, v: int, rng: torch.Generator, options: dict[str, Any]) -> Tensor:
    """Sets ignore_index and the ignored targets."""
    kind = case["ignored"]
    index = {"none": None, "far": -(2**31), "unmatched": 2**62 + 1}.get(kind, -100)
    if kind == "class":
        index = int(torch.randint(0, v, (), generator=rng))
    share = {"no": 0.0, "unmatched": 0.0, "most": 0.9, "all": 1.1}.get(kind, 0.3)
    if kind != "no":
        options["ignore_index"] = index
    mask = torch.rand(target.shape, generator=rng) < share
    return target.masked_fill(mask, -100 if index is None else index) if share else target


def _scored(case: dict[str, Any], target: Tensor, v: int, dtype: torch.dtype, rng: torch.Generator) -> Any:
    """Target, options and upstream gradient of a case."""
    shape = target.shape
    options: dict[str, Any] = {"reduction": case["reduction"]}
    for name in ("label_smoothing", "softcap", "token_scaling"):
        options[name] = case[name]
    options["shift"] = case["shift"] if shape else 0
    target = _ignoring(case, target, v, rng, options)
    target = target.to(torch.int32 if case["target_dtype"] == "int32" else torch.int64)
    target = target[..., :1].expand(shape) if case["target_layout"] == "expanded" and shape else target
    if case["target_layout"] != "expanded":
        target = layout(target, case["target_layout"])
    options["weight"] = _values(case["weight"], (v,), dtype, rng)
    options["token_weight"] = _values(case["token_weight"], tuple(shape), dtype, rng)
    for name in ("logit_scale", "z_loss_weight"):
        options[name] = _scalar(case[name], case[f"{name}_tensor"])
    items = case["num_items"]
    if case["reduction"] == "mean" and items != "no":
        count = 0.6 * target.numel() + 0.7
        tensors = {"int64": torch.tensor(int(count) + 1), "float32": torch.tensor(count)}
        options["num_items"] = items if isinstance(items, (int, float)) else tensors.get(items, torch.tensor([count]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = torch.tensor(case["upstream"], dtype=wide)
    if case["reduction"] == "none":
        kind = case["upstream_rows"]
        if kind == "expanded":
            upstream = upstream.expand(shape)
        else:
            rows = torch.randn(shape, generator=rng).to(wide) * upstream
            rows = rows * (torch.rand(shape, generator=rng) < 0.5) if kind == "zeros" else rows
            upstream = layout(rows, "strided" if kind == "strided" else "contiguous")
    return target, options, upstream


def linear_call(case: dict[str, Any], dtype: torch.dtype) -> Call:
    """The call of a linear_cases() or plain_cases() case, on the CPU."""
    rng = torch.Generator().manual_seed(case["seed"])
    shape, h, v = case["shape"], case["h"], case["v"]
    x, w, target = _rows(case["data"], math.prod(shape), h, v, rng)
    target, options, upstream = _scored(case, target.view(shape), v, dtype, rng)
    x, w = x.to(dtype).view(*shape, h), layout(w.to(dtype), case["w_layout"])
    # One hidden state for all rows, whose rows have no memory of their own.
    if case["x_layout"] == "expanded":
        x = x[(slice(0, 1),) * len(shape)].expand(*shape, h) if x.numel() else x
    else:
        x = layout(x, case["x_layout"])
    bias = None
    if case["bias"] != "no":
        bias = torch.randn(v, generator=rng).to(dtype if case["bias"] == "same" else torch.float32)
        bias = bias.double() if case["bias"] == "float64" else bias
        if case["bias"] == "minus infinity" and case["label_smoothing"] == 0 and case["logit_scale"] > 0:
            # Where the exact loss is finite: never the class of a target.
            dead = torch.rand(v, generator=rng) < 0.3
            dead[target[(target >= 0) & (target < v)].long()] = False
            bias[dead & (torch.arange(v) != options.get("ignore_index"))] = -math.inf
    return Call(x, w, target, bias, options, upstream)


def logits_call(case: dict[str, Any], dtype: torch.dtype) -> Call:
    """The call of a logits_cases() case, on the CPU: its input is the logits, its linear_weight has no elements."""
    rng = torch.Generator().manual_seed(case["seed"])
    shape, v = case["shape"], case["v"]
    target = torch.randint(0, v, shape, generator=rng)
    z = torch.randn(*shape, v, generator=rng)
    if case["data"] == "large":
        z *= 100
    elif case["data"] == "equal":
        z.fill_(3)
    elif case["data"] == "confident":
        z.scatter_(-1, target.unsqueeze(-1), 12)
    elif case["data"] == "minus infinity" and case["label_smoothing"] == 0 and case["logit_scale"] > 0:
        dead = torch.rand(z.shape, generator=rng) < 0.3
        z[dead.scatter(-1, target.unsqueeze(-1), False)] = -math.inf
    # What is aligned with a row must stay aligned with it: only rows that are scored by their own target are as above.
    if case["data"] == "minus infinity" and case["shift"]:
        z = z.clamp_min(-5)
    target, options, upstream = _scored(case, target, v, dtype, rng)
    if case["data"] == "minus infinity" and case["target_layout"] == "expanded":
        z = z.clamp_min(-5)
    z = z.to(dtype)
    if case["x_layout"] == "expanded" and z.numel() and case["data"] != "minus infinity":
        z = z[(slice(0, 1),) * len(shape)].expand(*shape, v)
    elif case["x_layout"] != "expanded":
        z = layout(z, case["x_layout"])
    return Call(z, z.new_empty(0), target, None, options, upstream)
