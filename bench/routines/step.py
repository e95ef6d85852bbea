"""A whole training step that the GPU bounds, with activations offloaded to pinned memory on a second stream.

The model is a stack of residual blocks of two linear layers. The inputs of the blocks travel to the host while forward
computes and come back, a block ahead, while backward does. A loss head that reads a number back waits behind those
copies, and the host with it, so that the backward of the blocks is queued late and the GPU stands still.

Reported for each head: the time of a step, the host's time in the head's forward and backward, and how long the GPU ran
no kernel between the first and the last of a step (from the profiler, on CUDA).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from bench import heads
from bench.context import Context, identity, sizes
from bench.data import Batch, make
from bench.device import release_memory, synchronize
from bench.reference import Reference, reference
from bench.results import Record
from bench.shapes import Shape
from bench.timing import spread

from .common import guarded, refuse_if_wrong

HELP = "A training step with offloaded activations: step time, host-blocked time, GPU idle time."
_BLOCKS = 12
_STEPS = 8
_WARM_UP = 3
_AHEAD = 2


class _Block(nn.Module):
    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(2 * width, width, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + y


@dataclass
class _Slot:
    """An offloaded tensor: its pinned copy, and its return once that is under way."""

    host: Tensor
    shape: torch.Size
    written: Any
    back: Tensor | None = None
    arrived: Any = None


class Offload:
    """Hooks for tensors that autograd saves: those shaped like a block's input go to the host and come back."""

    def __init__(self, shape: Shape, device: torch.device, parameters: Iterable[Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._device, self._wanted = device, torch.Size([shape.BT, shape.H])
        self._cuda = device.type == "cuda"
        self._slots: list[_Slot] = []
        self._pool: list[Tensor] = []
        self._used = 0
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None

    def start(self) -> None:
        """A new step: the host buffers are free again, because the device has been waited for."""
        self._slots.clear()
        self._used = 0

    def _buffer(self, like: Tensor) -> Tensor:
        if self._used == len(self._pool):
            self._pool.append(torch.empty(like.shape, dtype=like.dtype, pin_memory=self._cuda))
        self._used += 1
        return self._pool[self._used - 1]

    def pack(self, tensor: Tensor) -> Any:
        is_parameter = tensor.untyped_storage().data_ptr() in self._parameters
        if tensor.shape != self._wanted or not tensor.is_contiguous() or is_parameter:
            return tensor
        host = self._buffer(tensor)
        written = None
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
                written = torch.cuda.Event()
                written.record()
            tensor.record_stream(self._stream)
        else:
            host.copy_(tensor)
        self._slots.append(_Slot(host, tensor.shape, written))
        return len(self._slots) - 1

    def _fetch(self, index: int) -> None:
        slot = self._slots[index]
        if slot.back is not None:
            return
        if not self._cuda:
            slot.back = slot.host.clone()
            return
        slot.back = torch.empty(slot.shape, dtype=slot.host.dtype, device=self._device)
        # The memory may still be in use by what the current stream has queued before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            slot.back.copy_(slot.host, non_blocking=True)
            slot.arrived = torch.cuda.Event()
            slot.arrived.record()
        slot.back.record_stream(self._stream)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for index in range(packed, max(packed - _AHEAD, 0) - 1, -1):
            self._fetch(index)
        slot = self._slots[packed]
        if self._cuda:
            torch.cuda.current_stream().wait_event(slot.arrived)
        assert slot.back is not None
        back, slot.back = slot.back, None
        return back


class Trainer:
    """The model, its optimiser, and one step with the host's time in the head."""

    def __init__(self, batch: Batch, blocks: int = _BLOCKS) -> None:
        shape, device, dtype = batch.shape, batch.x.device, batch.x.dtype
        torch.manual_seed(11)
        self.batch = batch
        self.model = nn.Sequential(*(_Block(shape.H, device, dtype) for _ in range(blocks)))
        self.weight = nn.Parameter(batch.w.detach().clone())
        self.optimiser = torch.optim.SGD([*self.model.parameters(), self.weight], lr=1e-3, foreach=True)
        self.offload = Offload(shape, device, self.model.parameters())

    def step(self, call: heads.Call) -> dict[str, float]:
        """One step, waited for at its end. Milliseconds of the step, and of the host in each half of the head."""
        device = self.batch.x.device
        self.optimiser.zero_grad(set_to_none=True)
        self.offload.start()
        synchronize(device)
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(self.offload.pack, self.offload.unpack):
            hidden = self.model(self.batch.x.detach().requires_grad_())
        # Cut here, so that the backward of the head can be timed apart from that of the blocks.
        cut = hidden.detach().requires_grad_()
        t0 = time.perf_counter()
        loss = call(cut, self.weight, self.batch.t)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        hidden.backward(cut.grad)
        self.optimiser.step()
        synchronize(device)
        end = time.perf_counter()
        return {"step_ms": 1e3 * (end - start), "host_forward_ms": 1e3 * (t1 - t0), "host_backward_ms": 1e3 * (t2 - t1)}


def gpu_idle_ms(trainer: Trainer, call: heads.Call) -> float | None:
    """How long no kernel ran between the first and the last one of a step, whatever copies did. None on the CPU."""
    if trainer.batch.x.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.step(call)
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if _is_kernel(event)
    ]
    return idle(spans) / 1e6 if spans else None


def _is_kernel(event: Any) -> bool:
    # Named ranges (those of an optimiser, say) show up on the device too and span the gaps between their kernels.
    return (
        event.device_type() == DeviceType.CUDA
        and not event.is_user_annotation()
        and not event.name().startswith(("Memcpy", "Memset"))
        and event.duration_ns() > 0
    )


def idle(spans: list[tuple[int, int]]) -> int:
    """The length of the gaps in a union of intervals."""
    gaps, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start <= reached:
            reached = end if reached is None else max(reached, end)
        else:
            gaps += start - reached
            reached = end
    return gaps


def _measure(head: heads.Head, batch: Batch, ref: Reference, trainer: Trainer) -> Record:
    refused = refuse_if_wrong(head, batch, ref)
    if refused:
        return refused
    steps = [trainer.step(head.call) for _ in range(_WARM_UP + _STEPS)][_WARM_UP:]
    fields: Record = {name: spread([step[name] for step in steps]) for name in steps[0]}
    return {**fields, "gpu_idle_ms": gpu_idle_ms(trainer, head.call), "blocks": len(trainer.model)}


def run(ctx: Context) -> None:
    blocks = _BLOCKS if ctx.device.type == "cuda" else 2
    for dtype in ctx.with_dtypes(torch.bfloat16):
        for shape in ctx.with_shapes("llama8b"):
            who = identity("step", shape, dtype, "unit", 0.0)
            todo = ctx.todo(ctx.heads or heads.parse("few"), **who)
            if not todo or ctx.is_over():
                continue
            ctx.echo(f"step {shape.name}, {blocks} blocks: {', '.join(todo)}")
            batch = make(shape, "unit", dtype, ctx.device).require_grad()
            ref = reference(batch)
            trainer = Trainer(batch, blocks)
            for name in todo:
                if ctx.is_over():
                    break
                work = functools.partial(_measure, batch=batch, ref=ref, trainer=trainer)
                record = guarded(ctx, name, {**who, **sizes(shape)}, work)
                if record["status"] == "ok":
                    idle_ms = record["gpu_idle_ms"]
                    ctx.echo(
                        f"  {name}: step {record['step_ms']['median']:.1f} ms, host in the head "
                        f"{record['host_forward_ms']['median']:.2f} + {record['host_backward_ms']['median']:.2f} ms"
                        + (f", GPU idle {idle_ms:.1f} ms" if idle_ms is not None else "")
                    )
                release_memory(ctx.device)
