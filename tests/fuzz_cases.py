"""The cases of tools/fuzz.py: random calls of every op, right ones and wrong ones, and what must hold of each.

A case is a seed and a number; everything that it draws follows from these two. Right calls are held to the float64
reference, by the checks of the property tests. Wrong ones (fuzz_garbage.py) may be refused, in words that name the
function, or give a result; they never write where they should not, and what is bad stays visible. In both, every
tensor lies between guard bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import torch
from hypothesis.errors import HypothesisDeprecationWarning, UnsatisfiedAssumption
from torch import Tensor

os.environ.setdefault("SYNCFREE_SEED", "0")  # the property tests, whose checks are used here, draw theirs from it

import loop_reference
import syncfree_ext
from cases import DTYPES, Call
from exactness import check_gradients, check_values, exact
from fuzz_guards import Guards
from fuzz_threads import ThreadRanks
from strategies import linear_call, linear_cases, logits_cases, plain_cases
from syncfree_ext import functional, reference
from syncfree_ext.integrations import _vocab_parallel
from test_properties import assume_representable, check_linear, check_logits, dtype_of, is_repeated
from tolerances import assert_equal

OPS = torch.ops.syncfree
INTEGERS = (0, -1, 1, 2, 7, 128, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "pitched")


@dataclass
class Case:
    """One case: its sources of randomness, its guarded memory, and notes for the report of a failure."""

    seed: int
    number: int
    device: torch.device
    notes: list[str] = field(default_factory=list)
    aloud: bool = False  # notes go to standard error at once, where a crash finds them

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{self.seed}:{self.number}".encode()).digest()
        self.random = random.Random(digest)
        self.rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self.guards = Guards(self.device)

    def draw(self, strategy: hypothesis.strategies.SearchStrategy[Any]) -> Any:
        """A value of the strategy. The first example that hypothesis makes is the plainest one, so take the second."""
        found: list[Any] = []

        @hypothesis.seed(self.random.getrandbits(60))
        @hypothesis.settings(
            max_examples=2,
            phases=(hypothesis.Phase.generate,),
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def keep(value: Any) -> None:
            found.append(value)

        keep()
        return found[-1]

    def note(self, text: object) -> None:
        self.notes.append(str(text))
        if self.aloud:
            print(text, file=sys.stderr, flush=True)

    def place(self, _device: torch.device, call: Call) -> Call:
        return self.guards.call(call)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(dtype)


# --------------------------------------------------------------------------------------------------------------- losses


def grown(case: Case, what: dict[str, Any], hidden: bool = True) -> dict[str, Any]:
    """Now and then one size beyond the blocks and the thresholds of the kernels."""
    if case.random.random() < 0.03:
        key = case.random.choice(("v", "shape", "h") if hidden else ("v", "shape"))
        size = {
            "v": lambda: case.random.choice((4095, 4096, 4097, 8193, 20011)),
            "shape": lambda: (case.random.choice((513, 600, 1025, 1300)),),
            "h": lambda: 8 * case.random.randint(60, 70) + case.random.choice((0, 0, 1, 4)),
        }[key]()
        what = what | {key: size}
    case.note(what)
    return what


def linear(case: Case) -> str:
    """linear_cross_entropy under any option."""
    check_linear(grown(case, case.draw(linear_cases())), case.device, case.place)
    return "exact"


def plain(case: Case) -> str:
    """linear_cross_entropy as the kernels of some GPUs take it."""
    what = case.draw(plain_cases())
    if case.random.random() < 0.03:
        what |= {"h": 8 * case.random.randint(60, 130)}
    check_linear(grown(case, what, hidden=False), case.device, case.place)
    return "exact"


def logits(case: Case) -> str:
    """cross_entropy under any option."""
    check_logits(grown(case, case.draw(logits_cases()), hidden=False), case.device, case.place)
    return "exact"


def shards(case: Case) -> str:
    """The shard ops in their driver, on slices of any size, against the reference of the whole vocabulary."""
    what = grown(case, case.draw(linear_cases()) | {"autocast": "no", "upstream": 1.0})
    dtype = dtype_of(what, case.device)
    call = linear_call(what, dtype)
    call.upstream = torch.ones_like(call.upstream)
    e = exact(call)
    assume_representable(call, e)
    call = case.guards.call(call)
    size = case.random.randint(1, 4)
    v = call.linear_weight.shape[0]
    cuts = [0, *sorted(case.random.randint(0, v) for _ in range(size - 1)), v]
    case.note(f"slices at {cuts}")
    o = dict(call.options)
    ignore = o.pop("ignore_index", None)
    options = functional._loss_options(
        "shards", call.input, v, call.target, o["weight"], o["token_weight"], o.get("num_items"), o["reduction"],
        ignore, o["label_smoothing"], o["softcap"], o["token_scaling"], o["logit_scale"], o["z_loss_weight"],
        o["shift"],
    )  # fmt: skip
    x, target = functional._as_matrix(call.input), functional._as_sequences(call.target)
    per_row = o["reduction"] == "none"
    ranks = ThreadRanks(size)

    def job(rank: int) -> tuple[Any, Any]:
        first, last = cuts[rank], cuts[rank + 1]
        part = _vocab_parallel.VocabSlice(
            group=None,  # type: ignore[arg-type]
            first_class=first,
            num_classes=v,
            compute_dtype=dtype,
            lean=False,
            chunk_rows=what["chunk_rows"],
            workspace_bytes=what["workspace_bytes"],
        )
        bias = None if call.linear_bias is None else call.linear_bias[first:last]
        with torch.no_grad():
            run = _vocab_parallel.Run(part, x, call.linear_weight[first:last], bias, target, options)
            return run.forward([not per_row, not per_row, not per_row and bias is not None], True, True, True)

    results = ranks.run(job)
    for outputs, gradients in results[1:]:
        for a, b in zip((*outputs, gradients.dx), (*results[0][0], results[0][1].dx), strict=True):
            assert_equal(a, b, "what the ranks return")
    out, grads = results[0][0], [gradients for _, gradients in results]
    named = functional._named_outputs(tuple(out), call.target, o["reduction"], True, True, True, True)
    check_values(call, e, named)
    if not per_row:
        dx, dw = _unscaled(grads[0].dx, grads[0].dx_scale), torch.cat([_unscaled(g.dw, g.dw_scale) for g in grads])
        db = None if call.linear_bias is None else torch.cat([g.db for g in grads]).to(call.linear_bias.dtype)
        check_gradients(call, e, (dx.view(call.input.shape), dw, db), "xwb", repeated=is_repeated(what))
    return "exact"


def _unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    return (gradient.float() * scale[:, None]).half() if scale.numel() else gradient


# ------------------------------------------------------------------------------------------------------------ small ops


def count(case: Case) -> str:
    """count_targets: the order of the rows exactly, the sums to float32."""
    r = case.random
    v = r.choice((1, 2, 7, 1000, 5003))
    shape = r.choice(((r.randint(0, 40),), (r.randint(0, 5), r.randint(0, 30)), (r.choice((2047, 2049, 40000)),)))
    target = torch.randint(0, v, shape, generator=case.rng)
    ignore = r.choice((-100, -100, 0, v - 1, 2**40, -(2**63)))
    target[torch.rand(shape, generator=case.rng) < r.choice((0.0, 0.3, 0.97, 1.0))] = ignore
    options: dict[str, Any] = {"reduction": r.choice(("mean", "sum", "none")), "ignore_index": ignore}
    options["shift"] = r.choice((0, 0, 1, 3, 2**62))
    if -(2**31) <= ignore < 2**31 and r.random() < 0.3:
        target = target.int()
    kind = r.choice((torch.float32, torch.bfloat16, torch.float16))
    if r.random() < 0.4:
        options["weight"] = torch.rand(v, generator=case.rng).add(0.25).to(kind)
    if r.random() < 0.4:
        options["token_weight"] = case.normal(*shape, dtype=kind)
    if options["reduction"] == "mean" and r.random() < 0.3:
        options["num_items"] = torch.tensor(r.choice((0.0, -3.0, 0.25, 17.0)), dtype=torch.float64)
    case.note(f"count {shape} {v} {options}")
    held = {k: case.guards.hold(o, k) if isinstance(o, Tensor) else o for k, o in options.items()}
    counts, rows = OPS.count_targets(case.guards.hold(target, "target"), v, **held)
    # A shift of 2^62 is one past the end, and the sum of it and a position must not wrap around.
    expected, expected_rows = reference.count_targets(target, v, **options)
    assert_equal(rows, expected_rows, "rows")
    torch.testing.assert_close(counts.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)
    return "exact"


def scale(case: Case) -> str:
    """scale_unless_one_: one rounding, to the bit; a factor of 1 leaves even the payload of a NaN alone."""
    r = case.random
    # A factor that float32 holds, in which the reference multiplies all but float64.
    factor = torch.tensor(r.choice((1.0, 1.0, 0.0, -0.5, 3.0, 65536.0, math.nan, math.inf, r.uniform(-2, 2))))
    factor = factor.float().to(r.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    grads, row_scales = [], []
    with_rows = r.random() < 0.5
    for i in range(r.randint(0, 12)):
        shape = r.choice(((), (r.randint(0, 9),), (r.randint(0, 70), r.randint(0, 70)), (3, 2, r.randint(1, 300))))
        dtypes = [*DTYPES.values()]
        dtype = r.choice(dtypes[:3] if case.device.type == "cuda" else dtypes)
        grad = case.normal(*shape, dtype=dtype)
        rows = r.random() < 0.5 and with_rows
        row_scales.append(
            torch.exp2(torch.randint(-3, 4, shape[:1] or (1,), generator=case.rng).float()) if rows else torch.empty(0)
        )
        grads.append(case.guards.hold(grad, f"grads[{i}]", writable=True))
    case.note(f"scale {factor} {[(tuple(g.shape), g.dtype) for g in grads]} rows {with_rows}")
    expected = [g.clone() for g in grads]
    held = [case.guards.hold(s, "row_scales") for s in row_scales] if with_rows else None
    reference.scale_unless_one_(expected, factor.to(case.device), [s.to(case.device) for s in row_scales])
    OPS.scale_unless_one_(grads, case.guards.hold(factor, "scale"), held)
    for got, want in zip(grads, expected, strict=True):
        assert_equal(got.isnan(), want.isnan())
        assert_equal(got.nan_to_num(0), want.nan_to_num(0), "scaled")
    return "exact"


def publish(case: Case) -> str:
    """publish_ and read_slot, with a ticket or with counters."""
    r = case.random
    rows, columns = r.randint(1, 4), r.randint(0, 120)
    first_integer = r.randint(0, columns)
    slots = case.guards.hold(torch.zeros(rows, 4 + columns, dtype=torch.int64), "slots", writable=True)
    counters = case.guards.hold(torch.zeros(4, dtype=torch.int64), "counters", writable=True)
    counted = r.random() < 0.5
    start = 0 if counted else r.choice((0, 1, 5, 2**40, 2**63 - 10))
    case.note(f"publish rows {rows} columns {columns} integers from {first_integer} counted {counted} from {start}")
    for turn in range(1, 6):
        chosen = r.sample(range(columns), r.randint(0, columns))
        values, at, constants, constants_at, want = [], [], [], [], {}
        for column in chosen:
            if column >= first_integer:
                number = r.choice((0, -1, 2**63 - 1, -(2**63), r.randint(-(2**40), 2**40)))
                values.append(torch.tensor(number).view(r.choice(((), (1,), (1, 1)))))
            elif r.random() < 0.3:
                number = r.choice((0.5, -0.0, math.inf, 1e300))
                constants.append(number)
                constants_at.append(column)
                want[column] = number
                continue
            else:
                dtype = r.choice((*DTYPES.values(), torch.int64, torch.int8, torch.uint8, torch.bool, torch.int16))
                value = torch.tensor(r.randint(0, 1) if dtype in (torch.bool, torch.uint8) else r.randint(-9, 9))
                values.append(value.to(dtype))
                number = float(value)
            at.append(column)
            want[column] = number
        held = [case.guards.hold(v, "values") for v in values]
        origin = r.randint(0, 2)
        how = {"counters": counters} if counted else {"ticket": start + turn}
        OPS.publish_(
            slots, held, [*at, *constants_at], constants, first_integer_column=first_integer, origin=origin, **how
        )
        row = OPS.read_slot(slots.cpu(), start + turn)
        assert row[:3].tolist() == [start + turn, start + turn, origin]
        floats = row[4:].view(torch.float64)
        for column, number in want.items():
            got = row[4 + column].item() if column >= first_integer else floats[column].item()
            assert got == number, f"column {column} holds {got}, expected {number}"
    return "exact"


def select(case: Case) -> str:
    """masked_indices against a row at a time."""
    r = case.random
    length = r.choice((0, 1, 3, r.randint(1, 60), r.randint(1, 60), 127, 1000, 4097))
    shape = r.choice(((length,), (r.randint(0, 5), length), (2, r.randint(0, 3), length)))
    mask = torch.rand(shape, generator=case.rng) < r.choice((0.0, 0.1, 0.5, 1.0))
    if mask.dim() > 1 and r.random() < 0.5:
        mask = mask.movedim(-1, 0).contiguous().movedim(0, -1)
    size = r.choice((0, 1, r.randint(0, 70), length, length + 5))
    options: dict[str, Any] = {"fill_value": r.choice((0, -1, 2**63 - 1, -(2**63)))}
    limit = r.choice((None, None, "number", "tensor"))
    if limit == "tensor":
        limits = [r.choice((-(2**63), -1, 0, 1, size, 2**63 - 1)) for _ in range(math.prod(shape[:-1]))]
        options["limit"] = torch.tensor(limits, dtype=torch.int64).view(shape[:-1])
    elif limit == "number":
        options["limit"] = r.choice((0, 1, size, 2**62))
    keys = None
    if r.random() < 0.6:
        options["order"] = "random"
        if r.random() < 0.5:
            keys = case.normal(*shape).to(r.choice(tuple(DTYPES.values())))
            keys[torch.rand(shape, generator=case.rng) < 0.1] = r.choice((math.nan, math.inf, -math.inf, 0.0, -0.0))
            options["scores"] = keys
        else:
            seed, rows = r.choice(INTEGERS), math.prod(shape[:-1])
            ids = [r.choice(INTEGERS) for _ in range(rows)]
            options["seed"] = seed
            options["row_ids"] = torch.tensor(ids, dtype=torch.int64).view(shape[:-1])
            keys = loop_reference.philox_keys(seed, ids, length).view(shape)
    case.note(f"select {shape} size {size} {options}")
    held = {k: case.guards.hold(o, k) if isinstance(o, Tensor) else o for k, o in options.items()}
    got = syncfree_ext.masked_indices(case.guards.hold(mask, "mask"), size, **held)
    wanted = loop_reference.masked_indices(mask, size, keys, options.get("limit"), options["fill_value"])
    for name, a, b in zip(got._fields, got, wanted, strict=True):
        assert_equal(a, b, name)
    return "exact"


# ----------------------------------------------------------------------------------------------------------------- runs


def kinds() -> dict[str, tuple[int, Callable[[Case], str]]]:
    """Name to share and check."""
    import fuzz_garbage

    return {
        "linear": (24, linear),
        "plain": (10, plain),
        "logits": (12, logits),
        "shards": (8, shards),
        "count": (4, count),
        "scale": (4, scale),
        "publish": (4, publish),
        "select": (8, select),
        "garbage linear": (14, fuzz_garbage.garbage_linear),
        "garbage logits": (8, fuzz_garbage.garbage_logits),
        "garbage ops": (12, fuzz_garbage.garbage_ops),
    }


def kind_of(case: Case, only: tuple[str, ...] = ()) -> str:
    """The kind of a case, which it draws first."""
    table = kinds()
    names = [name for name in table if not only or name in only]
    return case.random.choices(names, [table[name][0] for name in names])[0]


def run_case(case: Case, kind: str) -> str:
    """Run a case: "exact", "refused", "survived", or "discarded" where the drawn call has no answer to compare with.

    Raises:
        AssertionError: what must hold does not.
    """
    with warnings.catch_warnings():
        # `assume` of the property tests, which ends a case here.
        warnings.simplefilter("ignore", HypothesisDeprecationWarning)
        try:
            outcome = kinds()[kind][1](case)
        except UnsatisfiedAssumption:
            outcome = "discarded"
    case.guards.check()
    return outcome
