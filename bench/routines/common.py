"""The one measurement behind most routines: heads on one batch, first for correctness and memory, then for time.

A head that is wrong is refused: it gets a record that says so, and no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench import heads as _heads
from bench import limits
from bench.context import Context, identity, sizes
from bench.data import IGNORE, Batch, make, rotation
from bench.device import MIB, Marks, cache_bytes, peak_memory, release_memory, synchronize
from bench.reference import Reference, errors, reference, rounding_errors
from bench.results import Record
from bench.shapes import Shape
from bench.timing import Participant, Stat, describe, interleave

# What no rounding explains. Gradient filters, bfloat16 logits and sums of losses in bfloat16 stay below it, wherever
# they are meant to be used.
WRONG = 0.1

TRAIN = "train"
INFER = "infer"
_HOST_CALLS = 5


@dataclass
class Checked:
    """A head that is right, and what was learnt on the way."""

    head: _heads.Head
    fields: Record

    def parts(self, wanted: Sequence[str]) -> list[str]:
        """Without "forward only" where the head cannot run without gradients."""
        return [part for part in wanted if part != INFER or "infer_failure" not in self.fields]


def train_step(call: _heads.Call, batch: Batch) -> Tensor:
    """Forward and backward; leaves the gradients in x.grad and w.grad."""
    batch.drop_grad()
    loss = call(batch.x, batch.w, batch.t)
    loss.backward()
    return loss.detach()


def gradients(batch: Batch) -> tuple[Tensor, Tensor]:
    """Of x and w.

    Raises:
        RuntimeError: the head left one of them out.
    """
    if batch.x.grad is None or batch.w.grad is None:
        raise RuntimeError("the head gave no gradient of x or of w")
    return batch.x.grad, batch.w.grad


@torch.no_grad()
def infer_step(call: _heads.Call, batch: Batch) -> Tensor:
    """The loss alone, of inputs that require no gradient."""
    return call(batch.x.detach(), batch.w.detach(), batch.t)


def wrong(error: Record) -> str | None:
    """Why a head is refused, None if it is not. NaN is always wrong."""
    for name in ("loss", "dx", "dw"):
        if name in error and not error[name] <= WRONG:
            return f"relative error of {name} is {error[name]:.2g}, more than {WRONG:g}"
    return None


def host_times(call: _heads.Call, batch: Batch, device: torch.device) -> dict[str, float]:
    """Milliseconds until forward and backward return to the host, each queued behind nothing; medians."""
    forward, backward = [], []
    for _ in range(_HOST_CALLS):
        batch.drop_grad()
        synchronize(device)
        t0 = time.perf_counter()
        loss = call(batch.x, batch.w, batch.t)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        forward.append(1e3 * (t1 - t0))
        backward.append(1e3 * (t2 - t1))
        synchronize(device)
    return {"host_forward_ms": statistics.median(forward), "host_backward_ms": statistics.median(backward)}


def memory(call: _heads.Call, batch: Batch, device: torch.device, part: str) -> Record:
    """Peak MiB above the inputs, and, for training, how much of it is not the gradients."""
    if part == INFER:
        return {"infer_peak_mib": peak_memory(lambda: infer_step(call, batch), device) / MIB}
    batch.drop_grad()
    peak = peak_memory(lambda: train_step(call, batch), device)
    held = sum(a.numel() * a.element_size() for a in (batch.x, batch.w))
    batch.drop_grad()
    return {"peak_mib": peak / MIB, "gradients_mib": held / MIB, "workspace_mib": (peak - held) / MIB}


def check(head: _heads.Head, batch: Batch, ref: Reference, parts: Sequence[str]) -> Record:
    """Run a head for the first time, compare it with the reference, and weigh it.

    Returns:
        Fields of its record: status, reason, errors, memory, host times.
    """
    device = batch.x.device
    fields: Record = {"status": "ok", "reference": ref.method}
    start = time.monotonic()
    loss = train_step(head.call, batch)
    synchronize(device)
    fields["first_call_s"] = time.monotonic() - start
    fields["error"] = errors(ref, loss.item(), *gradients(batch))
    del loss
    reason = wrong(fields["error"])
    if reason is None and INFER in parts:
        try:
            loss = infer_step(head.call, batch)
        except Exception as error:
            fields["infer_failure"] = describe(error)
        else:
            reason = wrong({"loss": abs(loss.item() - ref.loss) / max(abs(ref.loss), 1e-12)})
            reason = None if reason is None else f"forward only: {reason}"
            del loss
    if reason is not None:
        batch.drop_grad()
        return {**fields, "status": "wrong", "reason": reason}
    fields |= memory(head.call, batch, device, TRAIN)
    if INFER in parts and "infer_failure" not in fields:
        fields |= memory(head.call, batch, device, INFER)
    fields |= host_times(head.call, batch, device)
    batch.drop_grad()
    return fields


def _participants(head: _heads.Head, batches: Sequence[Batch], parts: Sequence[str]) -> list[Participant]:
    def train(call: int, mark: Marks) -> None:
        batch = batches[call % len(batches)]
        batch.drop_grad()
        mark("start")
        loss = head.call(batch.x, batch.w, batch.t)
        mark("forward")
        loss.backward()
        mark("backward")
        batch.drop_grad()

    def infer(call: int, mark: Marks) -> None:
        batch = batches[call % len(batches)]
        mark("start")
        infer_step(head.call, batch)
        mark("forward")

    steps = {TRAIN: train, INFER: infer}
    return [Participant(f"{head.name}/{part}", steps[part]) for part in parts]


def measure(
    ctx: Context,
    routine: str,
    shape: Shape,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    data: str = "unit",
    ignored: float = 0.0,
    variant: str = "",
    parts: Sequence[str] = (TRAIN, INFER),
    timed: bool = True,
    real_limit: bool = True,
    extra: Record | None = None,
) -> None:
    """Measure those of the named heads that have no record yet, on one batch, and store their records."""
    who = identity(routine, shape, dtype, data, ignored, variant)
    todo = ctx.todo(names, **who)
    if not todo or ctx.is_over():
        return
    size = {**sizes(shape), **(extra or {})}
    title = f"{routine} {shape.name} {who['dtype']} {data}" + (f", {ignored:.0%} ignored" if ignored else "")
    ctx.echo(f"{title}: {', '.join(todo)}")
    batch = make(shape, data, dtype, ctx.device, ignored).require_grad()
    if ignored:
        size["live_rows"] = int((batch.t != IGNORE).sum())
    ref = reference(batch)
    rounding = rounding_errors(ref, dtype)
    checked: list[Checked] = []
    for name in todo:
        if ctx.is_over():
            break
        try:
            head = _heads.load(name, ctx.device)
            fields = check(head, batch, ref, parts)
        except _heads.UnavailableError as missing:
            ctx.add("skipped", str(missing), head=name, **who, **size)
            ctx.echo(f"  {name}: skipped, {missing}")
            continue
        except Exception as error:
            batch.drop_grad()
            ctx.add("failed", describe(error), head=name, **who, **size)
            ctx.echo(f"  {name}: failed, {describe(error)}")
            release_memory(ctx.device)
            continue
        fields["rounding"] = rounding
        e = fields["error"]
        ctx.echo(f"  {name}: {fields['status']}, errors {e['loss']:.1e} {e['dx']:.2e} {e['dw']:.2e}")
        if fields["status"] == "ok" and timed:
            checked.append(Checked(head, fields))
        else:
            ctx.add(fields.pop("status"), fields.pop("reason", None), head=name, **who, **size, **fields)
    del ref
    release_memory(ctx.device)
    if checked:
        _time(ctx, batch, checked, parts, real_limit, {**who, **size})


def _time(
    ctx: Context, batch: Batch, checked: Sequence[Checked], parts: Sequence[str], real_limit: bool, who: Record
) -> None:
    leaves = replace(batch, x=batch.x.detach(), w=batch.w.detach())
    batches = [b.require_grad() for b in rotation(leaves, cache_bytes(ctx.device))]
    bounds = [limits.three_products(batch, real=False)]
    if real_limit:
        bounds.append(limits.three_products(batch, real=True))
    timed = {c.head.name: _participants(c.head, batches, c.parts(parts)) for c in checked}
    everyone = [*bounds, *(p for ps in timed.values() for p in ps)]
    # The deadline is for starting something new; what is warm by now is measured, in one round at least.
    deadline = max(ctx.deadline, time.monotonic() + 20)
    interleave(everyone, ctx.device, rounds=ctx.rounds, block_ms=ctx.block_ms, deadline=deadline)
    bandwidth = limits.copy_bandwidth(ctx.device, min(ctx.block_ms, 100.0))
    bound: dict[str, dict[str, Stat]] = {p.name: p.stats() for p in bounds if not p.failure}
    rounds = {p.name: len(p.parts["total"]) for p in bounds if p.parts}
    for name, fields in _limit_records(bound, batch).items():
        ctx.add("ok", head=name, **who, **fields, rounds=rounds[name], copy_gbs=bandwidth)
    for c in checked:
        fields = {**c.fields, "copy_gbs": bandwidth}
        fields.pop("status")
        failure = next((p.failure for p in timed[c.head.name] if p.failure), None)
        for participant, part in zip(timed[c.head.name], c.parts(parts), strict=True):
            if participant.parts:
                fields |= _times(part, participant.stats(), bound, batch)
                fields["rounds"] = len(participant.parts["total"])
        ctx.add("failed" if failure else "ok", failure, head=c.head.name, **who, **fields)
        ctx.echo(f"  {c.head.name}: {failure or summary(fields)}")


def _limit_records(bound: dict[str, dict[str, Stat]], batch: Batch) -> dict[str, Record]:
    return {
        name: {
            "train_ms": stats["total"].to_json(),
            **{f"{part}_ms": stats[part].to_json() for part in ("logits", "dx", "dw")},
            "tflops": batch.shape.flops / stats["total"].median / 1e9,
        }
        for name, stats in bound.items()
    }


def _times(part: str, stats: dict[str, Stat], bound: dict[str, dict[str, Stat]], batch: Batch) -> Record:
    limit, real = bound.get(limits.RANDOM), bound.get(limits.REAL)
    total = stats["total"].median
    if part == INFER:
        fields: Record = {"infer_ms": stats["total"].to_json()}
        if limit:
            fields["infer_x_limit"] = total / limit["logits"].median
        return fields
    fields = {
        "train_ms": stats["total"].to_json(),
        "forward_ms": stats["forward"].to_json(),
        "backward_ms": stats["backward"].to_json(),
        "tflops": batch.shape.flops / total / 1e9,
    }
    if limit:
        fields |= {"limit_ms": limit["total"].median, "x_limit": total / limit["total"].median}
    if real:
        fields |= {"limit_real_ms": real["total"].median, "x_limit_real": total / real["total"].median}
    return fields


def summary(fields: Record) -> str:
    """The figures of a record in a line."""
    words: list[str] = []
    if "train_ms" in fields:
        words.append(f"{fields['train_ms']['median']:.4g} ms")
    if "x_limit" in fields:
        words.append(f"{fields['x_limit']:.3f} × limit")
    if "infer_ms" in fields:
        words.append(f"forward only {fields['infer_ms']['median']:.4g} ms")
    if "peak_mib" in fields:
        words.append(f"peak {fields['peak_mib']:.0f} MiB")
    return ", ".join(words)


def guarded(ctx: Context, name: str, who: Record, work: Callable[[_heads.Head], Record]) -> Record:
    """Load a head, run `work` on it, and store what it returns, or why there is nothing to store."""
    try:
        head = _heads.load(name, ctx.device)
        fields = work(head)
    except _heads.UnavailableError as missing:
        ctx.echo(f"  {name}: skipped, {missing}")
        return ctx.add("skipped", str(missing), head=name, **who)
    except Exception as error:
        ctx.echo(f"  {name}: failed, {describe(error)}")
        release_memory(ctx.device)
        return ctx.add("failed", describe(error), head=name, **who)
    status, reason = fields.pop("status", "ok"), fields.pop("reason", None)
    return ctx.add(status, reason, head=name, **who, **fields)


def refuse_if_wrong(head: _heads.Head, batch: Batch, ref: Reference) -> Record | None:
    """The fields of a refused head, None for one that is right. Also its warm-up."""
    loss = train_step(head.call, batch)
    error = errors(ref, loss.item(), *gradients(batch))
    batch.drop_grad()
    reason = wrong(error)
    return None if reason is None else {"status": "wrong", "reason": reason, "error": error}
