"""Wrong calls for tools/fuzz.py: garbage in targets, numbers, shapes, dtypes and types, through functions and ops.

A function may refuse a call with a ValueError, a TypeError or an IndexError that names it; an op also with what the
dispatcher raises. What is not refused gives results of the right shapes, the same bits twice, and is bad where a
target or a hidden state of a scored row is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import syncfree_ext
from cases import Call, layout
from exactness import _aligned
from fuzz_cases import INTEGERS, LAYOUTS, OPS, Case, dtype_of
from strategies import linear_call, linear_cases, logits_call, logits_cases
from test_shard_ops import Sample, all_calls
from tolerances import assert_equal

Arguments = dict[str, Any]

FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-30, 3e38, -3e38, 1e300, math.inf, -math.inf, math.nan)
VALUES = (math.nan, math.inf, -math.inf, 3e38, -3e38, 6e4, 1e-45, 0.0)
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool,
    torch.complex64,
)  # fmt: skip
JUNK: tuple[Any, ...] = (None, "mean", "", [], (), True, 3 + 4j, 2**70, -1.5, object(), torch.zeros(2), torch.zeros(()))
# Contents that only the library itself may make: any index in them is trusted.
TRUSTED = ("counts", "rows")
REFUSALS = (ValueError, TypeError, IndexError)


# --------------------------------------------------------------------------------------------------------------- spoils


def _tensors(args: Arguments, floating: bool = False) -> list[str]:
    return [k for k, a in args.items() if isinstance(a, Tensor) and (a.is_floating_point() or not floating)]


def _some(case: Case, t: Tensor, values: tuple[Any, ...]) -> Tensor:
    """The tensor, in its strides, with some elements replaced."""
    if not t.numel() or 0 in t.stride():
        return t
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
    for _ in range(case.random.choice((1, 1, 3, 10))):
        at = tuple(case.random.randrange(n) for n in t.shape)
        out[at] = case.random.choice(values)
    return out


def spoil_target(case: Case, args: Arguments) -> None:
    """Classes that do not exist."""
    t, v = args.get("target"), args.get("linear_weight", args.get("logits"))
    if (
        not isinstance(t, Tensor)
        or t.dtype not in (torch.int64, torch.int32)
        or not isinstance(v, Tensor)
        or not v.dim()
    ):
        return
    classes = v.shape[0] if "linear_weight" in args else v.shape[-1]
    info = torch.iinfo(t.dtype)
    wrong = (classes, classes + 1, -1, -2, -101, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
    args["target"] = _some(case, t, tuple(w for w in wrong if info.min <= w <= info.max))


def spoil_values(case: Case, args: Arguments) -> None:
    """NaN, infinities and the ends of the range in a tensor."""
    if names := _tensors(args, floating=True):
        name = case.random.choice(names)
        t = args[name]
        info = torch.finfo(t.dtype) if not t.is_complex() else torch.finfo(torch.float32)
        args[name] = _some(case, t, tuple(v for v in VALUES if not math.isfinite(v) or abs(v) <= info.max))


def spoil_number(case: Case, args: Arguments) -> None:
    """A number beyond what is sensible, or a tensor of it."""
    names = ("label_smoothing", "softcap", "logit_scale", "z_loss_weight", "num_items")
    value: Any = case.random.choice((*FLOATS, *INTEGERS))
    name = case.random.choice(names)
    if name in ("logit_scale", "z_loss_weight", "num_items") and case.random.random() < 0.4:
        value = torch.tensor(value, dtype=torch.float64)
    args[name] = value


def spoil_integer(case: Case, args: Arguments) -> None:
    """An integer from the ends of its range."""
    names = ["ignore_index", "shift", *(("chunk_rows", "workspace_bytes") if "linear_weight" in args else ())]
    args[case.random.choice(names)] = case.random.choice(INTEGERS)


def spoil_type(case: Case, args: Arguments) -> None:
    """Something else altogether."""
    args[case.random.choice(list(args))] = case.random.choice(JUNK)


def reshaped(case: Case, t: Tensor) -> Tensor:
    """The tensor in another shape."""
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[..., :-1] if t.dim() else t,
        lambda t: t[:0] if t.dim() else t,
        lambda t: t[1:] if t.dim() else t,
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(-1),
        lambda t: t.reshape(-1),
        lambda t: t.movedim(0, -1) if t.dim() > 1 else t,
        lambda t: t[0] if t.dim() and t.shape[0] else t,
        lambda t: t.expand(2, *t.shape),
        lambda t: torch.cat([t, t]) if t.dim() else t,
        lambda t: t.new_empty(()),
    ]
    out = case.random.choice(ways)(t)
    return out.new_zeros(()) if out.dim() == 0 and t.dim() else out


def spoil_shape(case: Case, args: Arguments) -> None:
    """A shape that fits nothing."""
    if names := _tensors(args):
        name = case.random.choice(names)
        args[name] = reshaped(case, args[name])


def spoil_dtype(case: Case, args: Arguments) -> None:
    """Another dtype."""
    if names := _tensors(args):
        name = case.random.choice(names)
        args[name] = args[name].to(case.random.choice(DTYPES))


def spoil_place(case: Case, args: Arguments) -> None:
    """No memory at all, or a gradient where there is none to have."""
    if names := _tensors(args):
        name = case.random.choice(names)
        if case.random.random() < 0.5:
            args[name] = args[name].to("meta")
        elif args[name].is_floating_point():
            args[name] = args[name].detach().clone().requires_grad_()


SPOILS = (
    spoil_target, spoil_target, spoil_values, spoil_values, spoil_number, spoil_number, spoil_integer, spoil_type,
    spoil_shape, spoil_dtype, spoil_place,
)  # fmt: skip


def require(condition: bool, text: str) -> None:
    """Raise AssertionError, where the condition is of an error that was caught."""
    if not condition:
        raise AssertionError(text)


def _held(case: Case, args: Arguments) -> Arguments:
    return {
        name: case.guards.hold(a, name).requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for name, a in args.items()
    }


# ------------------------------------------------------------------------------------------------------------ functions


def garbage_linear(case: Case) -> str:
    """linear_cross_entropy of what nobody should pass."""
    what = case.draw(linear_cases())
    call = linear_call(what, dtype_of(what, case.device))
    args = {"input": call.input, "linear_weight": call.linear_weight, "linear_bias": call.linear_bias}
    extra = {"chunk_rows": what["chunk_rows"], "workspace_bytes": what["workspace_bytes"]}
    return _garbage(case, what, syncfree_ext.linear_cross_entropy, ("input", "linear_weight"), args | extra, call)


def garbage_logits(case: Case) -> str:
    """cross_entropy of what nobody should pass."""
    what = case.draw(logits_cases())
    call = logits_call(what, dtype_of(what, case.device))
    return _garbage(case, what, syncfree_ext.cross_entropy, ("logits",), {"logits": call.input}, call)


def _garbage(
    case: Case, what: Arguments, function: Any, positional: tuple[str, ...], args: Arguments, call: Call
) -> str:
    args = {**args, "target": call.target, **call.options, "upstream": call.upstream}
    args |= {f"return_{name}": True for name in what["extras"]}
    case.note(what)
    for _ in range(case.random.choice((1, 1, 2, 3))):
        spoil = case.random.choice(SPOILS)
        case.note(spoil.__name__)
        spoil(case, args)
    case.note({k: tuple(a.shape) if isinstance(a, Tensor) else a for k, a in args.items()})
    args = _held(case, args)
    upstream = args.pop("upstream")
    first = _attempt(function, positional, args, upstream)
    second = _attempt(function, positional, args, upstream)
    if isinstance(first, Exception):
        assert type(first) is type(second)
        return "refused"
    assert not isinstance(second, Exception)
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_equal(a, b, "a second run")
    if first:
        _check_bad_is_seen(case, positional, args, upstream, first)
    return "survived"


def _attempt(function: Any, positional: tuple[str, ...], args: Arguments, upstream: Any) -> Any:
    """Loss, outputs and gradients, or the error. Leaves get gradients wherever they can have any."""
    given = dict(args)
    leaves = []
    for name in (*positional, "linear_bias"):
        t = given.get(name)
        if isinstance(t, Tensor) and t.is_floating_point():
            given[name] = t.detach().requires_grad_()
            leaves.append(given[name])
    in_order = [given.pop(name) for name in (*positional, "target")]
    try:
        out = function(*in_order, **given)
    except REFUSALS as error:
        require("syncfree" in str(error), f"an error that does not say whose it is: {type(error).__name__}: {error}")
        return error
    outputs = [out] if isinstance(out, Tensor) else list(out)
    loss = outputs[0]
    if loss.device.type == "meta":  # all that matters was: a trace, in which nothing is computed
        return []
    if not _fits(upstream, loss):
        upstream = torch.ones_like(loss)
    grads = torch.autograd.grad(loss, leaves, upstream.detach())
    for leaf, grad in zip(leaves, grads, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
    return [None if t is None else t.detach() for t in (*outputs, *grads)]


def _fits(upstream: Any, loss: Tensor) -> bool:
    if not isinstance(upstream, Tensor):
        return False
    return (upstream.shape, upstream.dtype, upstream.device) == (loss.shape, loss.dtype, loss.device)


def _check_bad_is_seen(
    case: Case, positional: tuple[str, ...], args: Arguments, upstream: Any, results: list[Any]
) -> None:
    hidden, target = args[positional[0]], args["target"]
    loss, dx = results[0], results[len(results) - len(positional) - isinstance(args.get("linear_bias"), Tensor)]
    v = args["linear_weight"].shape[0] if "linear_weight" in args else hidden.shape[-1]
    ignore = -100 if args.get("ignore_index") is None else args["ignore_index"]
    aligned = _aligned(target.long(), min(args["shift"], 2**40), ignore)
    scored = aligned != ignore
    wrong = scored & ((aligned < 0) | (aligned >= v))
    rows = hidden.reshape(scored.numel(), hidden.shape[-1])
    # A class weight of 0 makes nothing of its row, whatever it holds.
    lost = scored & rows.isnan().any(1) if args.get("weight") is None else torch.zeros_like(wrong)
    assert case.device.type != "cpu" or not bool(wrong.any()), "a target out of range was not refused"
    bad = wrong | lost
    per_row = args["reduction"] == "none"
    if bool(bad.any()):
        seen = loss.reshape(-1)[bad].isnan() if per_row else loss.isnan()
        assert bool(seen.all()), "a bad row is not seen in the loss"
    finite = not _fits(upstream, loss) or bool(upstream.isfinite().all())
    if finite and not bool(bad.any()):
        assert not dx.reshape(rows.shape)[~scored].any(), "gradients of ignored rows"


# ------------------------------------------------------------------------------------------------------------------ ops


def _legal_calls(case: Case) -> list[tuple[Any, Arguments]]:
    """A right call of each op, on the CPU, its arguments by name."""
    r = case.random
    rows, h, v = r.randint(1, 40), r.randint(1, 30), r.randint(1, 60)
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16))
    target = torch.randint(0, v, (rows,), generator=case.rng)
    target[torch.rand(rows, generator=case.rng) < 0.3] = -100
    x, w, b = case.normal(rows, h, dtype=dtype), case.normal(v, h, dtype=dtype), case.normal(v)
    loss_options: Arguments = {
        "weight": torch.rand(v, generator=case.rng),
        "token_weight": torch.rand(rows, generator=case.rng),
        "num_items": torch.tensor(3.0),
        "reduction": "mean",
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "softcap": 20.0,
        "token_scaling": False,
        "logit_scale": 0.5,
        "z_loss_weight": 0.01,
        "logit_scale_tensor": None,
        "z_loss_weight_tensor": None,
        "shift": 0,
    }
    linear = {"input": x, "linear_weight": w, "target": target, "linear_bias": b, **loss_options, "chunk_rows": 16}
    need = {"need_dx": True, "need_dw": True, "need_db": True}
    extras = {f"need_{name}": True for name in ("token_accuracy", "predicted_tokens", "logsumexp")}
    z = case.normal(rows, v, dtype=dtype)
    own = {"logits": z, "target": target, **loss_options}
    slots, counters = torch.zeros(3, 10, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    mask = torch.rand(4, 50, generator=case.rng) < 0.5
    choice: Arguments = r.choice(
        ({}, {"keys": case.normal(4, 50)}, {"seed": 3, "row_ids": torch.arange(4)}, {"limit": torch.arange(4)})
    )
    calls: list[tuple[Any, Arguments]] = [
        (OPS.flce_forward, {**linear, **need, **extras, "workspace_bytes": None, "lean": False}),
        (OPS.flce_backward, {"grad_output": torch.ones(()), **linear, **need}),
        (OPS.cross_entropy_forward, own | extras),
        (
            OPS.cross_entropy_backward,
            {"grad_output": torch.ones(()), "logits": z, "target": target, "row_stats": case.normal(rows, 4)}
            | loss_options,
        ),
        (OPS.count_targets, {"target": target, "num_classes": v, "weight": loss_options["weight"], "shift": 1}),
        (OPS.scale_unless_one_, {"grads": [x, w], "scale": torch.tensor(0.5), "row_scales": None}),
        (
            OPS.publish_,
            {"slots": slots, "values": [torch.tensor(1.5), torch.tensor(2)], "columns": [1, 4, 0], "constants": [0.5]}
            | {"first_integer_column": 4, "ticket": 2, "counters": counters, "origin": 1},
        ),
        (OPS.read_slot, {"slots": slots, "ticket": 2}),
        (OPS.masked_indices, {"mask": mask, "size": 9, "fill_value": 0, **choice}),
    ]
    shards = all_calls(Sample(torch.device("cpu"), case.rng, dtype, odd=r.random() < 0.5))
    for op, args, options in shards:
        names = [a.name for a in op.default._schema.arguments]
        calls.append((op, dict(zip(names, args, strict=False)) | options))
    return calls


def _mutated(case: Case, name: str, value: Any) -> Any:
    """Another value for an argument of an op."""
    r = case.random
    if isinstance(value, Tensor):
        way = r.choice(("shape", "dtype", "values", "layout", "meta", "none", "grad"))
        if way == "shape":
            return reshaped(case, value)
        if way == "dtype":
            return value.to(r.choice(DTYPES))
        if way == "values" and name not in TRUSTED and value.dtype != torch.bool:
            info = torch.iinfo(value.dtype) if not value.is_floating_point() else None
            wrong = VALUES[:3] if info is None else tuple(i for i in INTEGERS if info.min <= i <= info.max)
            return _some(case, value, wrong)
        if way == "layout":
            return layout(value, r.choice(LAYOUTS))
        if way == "grad" and value.is_floating_point():
            return value.clone().requires_grad_()
        return value.to("meta") if way == "meta" else None if way == "none" else value
    if isinstance(value, list):
        changed = list(value)
        way = r.choice(("drop", "twice", "element", "empty"))
        if way == "drop":
            return changed[:-1]
        if way == "twice":
            return changed + changed
        if way == "element" and changed:
            at = r.randrange(len(changed))
            changed[at] = _mutated(case, name, changed[at])
            return changed
        return []
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # Sizes that some machine could allocate are left out.
        return r.choice([i for i in INTEGERS if name != "size" or not 2**20 < i < 2**60])
    if isinstance(value, float):
        return r.choice(FLOATS)
    if isinstance(value, str):
        return r.choice(("none", "sum", "mean", "", "Mean"))
    return r.choice((None, torch.zeros(3), torch.zeros((), dtype=torch.float64), 1))


def _run(op: Any, args: Arguments) -> list[Tensor]:
    out = op(**args)
    outputs = [out] if isinstance(out, Tensor) else list(out or ())
    return [t.detach().clone() for t in outputs if t.device.type != "meta"]


def _held_for(case: Case, op: Any, args: Arguments) -> Arguments:
    """The arguments between guards, those that the op writes to as writable, and none of them those of another call."""
    written = {a.name for a in op.default._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def hold(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [hold(name, each) for each in value]
        if not isinstance(value, Tensor) or value.device.type == "meta":
            return value
        writable = name in written and value.is_contiguous()
        if name in written and not writable:
            return value.clone()  # refused, or else a write that the bytes in between would not tell from another
        return case.guards.hold(value, name, writable).requires_grad_(value.requires_grad)

    return {name: hold(name, value) for name, value in args.items()}


def garbage_ops(case: Case) -> str:
    """An op with an argument or two that do not fit; then a right call, which gives what it gave before."""
    op, args = case.random.choice(_legal_calls(case))
    if op is OPS.read_slot and case.device.type == "cuda":
        return "discarded"  # of host memory alone
    before = _run(op, _held_for(case, op, args))
    mutated = dict(args)
    for name in case.random.sample(list(args), case.random.choice((1, 1, 2))):
        mutated[name] = _mutated(case, name, mutated[name])
        what = mutated[name]
        case.note(f"{op.__name__}: {name} = {(tuple(what.shape), what.dtype) if isinstance(what, Tensor) else what}")
    outcome = "survived"
    try:
        _run(op, _held_for(case, op, mutated))
    except (*REFUSALS, RuntimeError) as error:
        require("CUDA error" not in str(error), f"an error of the device: {error}")
        require("INTERNAL ASSERT" not in str(error), f"an error that tells nobody anything: {error}")
        outcome = "refused"
    except AttributeError as error:  # the dispatcher takes None for a tensor, which shows where shapes are traced
        require("NoneType" in str(error), str(error))
        outcome = "refused"
    after = _run(op, _held_for(case, op, args))
    for a, b in zip(after, before, strict=True):
        assert_equal(a, b, "the same call before and after one that was wrong")
    return outcome
