"""The timer: how long each op and each explicit wait kept the host, and when the GPU reached each of them.

A dispatch mode sees every op of the thread and of the autograd workers that it starts. Around each it reads the host's
clock, and after each it records an event; ops that wait by their nature (kinds.py) get an event before as well. The
next event also covers work that no op launched (a graph replay, a Triton kernel). A view gets one only if there may be
such work: after a replay, or where the host has done something else since the op before. Nothing is asked of the GPU in
a step. Later, with each event's completion on the host's clock (gpu.py), an op that took long is told apart:

- the GPU had work when the op began, and the op returned as soon as it was done: the host **waited**;
- the GPU had none, or has some left, or was done long before: the op was **slow** by itself (a first call, an
  allocation, a full launch queue).

One such call can be chance, so an op without a reason to wait must do so whenever the GPU is busy (collect.py).

In backward the worker's Python stack is empty. The autograd node that runs is known, and with it the sequence number
that it got when it was made, in forward; the timer notes the line of each new number, which leads to the forward line.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import internals
from .gpu import Gpu
from .kinds import Counts, Hint, Kind, Rule, is_view, kind_of_unknown, rule_of
from .sites import Frames, Mark, Stack

SLOW = 50e-6  # seconds; a faster op that does not wait by its nature is of no interest

# The op, the size of its results and whether they are on the GPU: calls alike in this take the GPU, and wait, alike.
Like = tuple[Any, int, bool]
# Views of others may work: those of sparse tensors do, and subclasses may do anything.
_PLAIN = (Tensor, torch.nn.Parameter)
# Of a list of tensors, which may be a model's parameters, so many count.
_COUNTED = 8


@dataclass
class Call:
    """What is known of one op or explicit wait that may be a host wait."""

    op: str
    kind: Kind
    detail: str
    counts: Counts
    stack: Stack
    node: str | None = None  # the autograd node, in backward
    forward: Mark | None = None  # where that node was made
    caller: Stack | None = None  # where backward was called
    allocated: bool = False


@dataclass(slots=True)
class Entry:
    """One op or explicit wait on the host's clock; `before` and `after` are events of the GPU, in `stream`.

    `engine` is the copy engine that it needs: "to host", "to device", or None; `copied` is how many bytes of tensors
    then. `target` is what a wait is for, if that is not its stream: another one ("stream", number), an event, or all of
    the GPU ("all", None). With a `link` it is neither an op nor a wait of the host, and has no events of its own: the
    stream recorded an event (False) or waits for it (True). Most views have no events either. Events are kept until the
    end, or another one could take their identity. What lies between `entered` and `start`, and between `end` and
    `left`, is the timer's own time.
    """

    start: float
    end: float
    before: Any
    after: Any
    call: Call | None
    like: Like | None = None
    stream: int = 0
    engine: str | None = None
    link: tuple[Any, bool] | None = None
    target: tuple[str, Any] | None = None
    entered: float | None = None
    left: float | None = None
    copied: int = 0


class _Op(NamedTuple):
    """What the timer knows of an op overload."""

    func: Any  # kept, or another one could take its identity
    call: Callable[..., Any]
    rule: Rule | None
    like: Like | None  # of views
    copies: bool
    puts: bool  # x[index] = value


@dataclass(slots=True)
class _Thread:
    """What the timer remembers of one thread."""

    sequence: int = 0
    lines: dict[int, tuple[Any, Mark | None]] = field(default_factory=dict)  # the op, and where it was called
    depth: int = 0  # of explicit waits: the ops inside belong to them
    stream: int = 0  # of the last op
    left: float = -math.inf  # when the last entry was over, if nothing without one has run since
    unseen: int | None = None  # the stream of a replay, until an event shows it


def _bare(name: str) -> str:
    """An op's or node's name without decoration: "aten::_to_copy" and "ToCopyBackward0" are both "tocopy"."""
    return name.rpartition("::")[2].lower().partition("backward")[0].replace("_", "")


_aten: Any = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_PUTS = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


def engine_of(func: Any, args: Sequence[Any], out: Any, device: str) -> str | None:
    """The copy engine that a copy needs, by where its data come from and go to."""
    if func not in _COPIES:
        return None
    source = args[1] if func is _aten.copy_.default else args[0]
    comes, goes = (isinstance(t, Tensor) and t.device.type == device for t in (source, out))
    return None if comes == goes else "to host" if comes else "to device"


def _bytes_copied(func: Any, args: Sequence[Any], out: Any) -> int:
    """At most so many: which of the two dtypes is on its way, torch decides. 0 if one is not dense."""
    source = args[1] if func is _aten.copy_.default else args[0]
    if source.layout is not torch.strided or out.layout is not torch.strided:
        return 0
    return int(out.numel() * max(source.element_size(), out.element_size()))


def like_of(func: Any, args: Sequence[Any], out: Any) -> Like:
    """Of an op whose result is no tensor: by the tensors that it gives, or that it was given to change."""
    group = out if isinstance(out, (tuple, list)) and out else args[0] if args else ()
    group = group if isinstance(group, (tuple, list)) else (group,)
    tensors = [t for t in group[:_COUNTED] if isinstance(t, Tensor)]
    return func, sum(t.numel() for t in tensors) + len(group), any(t.is_cuda for t in tensors)


def _target_of(name: str, subject: Any) -> tuple[str, Any] | None:
    """What an explicit wait is for."""
    if isinstance(subject, torch.cuda.Event):
        return "event", subject
    if isinstance(subject, torch.cuda.Stream):
        return "stream", int(subject.stream_id)
    return ("all", None) if name in ("torch.cuda.synchronize", "torch.accelerator.synchronize") else None


def _is_dense(args: Sequence[Any]) -> bool:
    """Whether an op gets an ordinary tensor first."""
    return bool(args) and type(args[0]) in _PLAIN and args[0].layout is torch.strided


def _op_name(func: Any) -> str:
    """Such as "aten::mm"; higher-order ops have no schema."""
    schema = getattr(func, "_schema", None)
    return str(schema.name) if schema is not None else str(func)


class Timer(internals.DispatchMode):
    """Records entries while `active`; otherwise it only passes ops on.

    Args:
        gpu: the device; None records nothing.
        frames: the stack walker.
        slow: seconds from which an op is of interest whatever its name.
    """

    def __init__(self, gpu: Gpu | None, frames: Frames, slow: float = SLOW) -> None:
        super().__init__()
        self.gpu = gpu
        self.frames = frames
        self.slow = slow
        self._soon = min(slow, SLOW)
        self.active = False
        self.entries: list[Entry] = []
        self._owner = threading.get_ident()
        self._threads: dict[int, _Thread] = {}
        self._known: dict[int, _Op] = {}  # by identity: an op's own hash is a function of Python's
        self._allocations = 0
        self._passed = 0

    def start(self) -> None:
        """Begins to record."""
        if self.gpu is not None:
            self._allocations = self.gpu.allocations()
            self.active = True

    def stop(self) -> None:
        """Ends recording."""
        self.active = False

    def new_step(self) -> None:
        """Forgets forward lines: the graphs of the last step are gone."""
        self._passed = 0
        for thread in tuple(self._threads.values()):
            thread.lines.clear()

    @property
    def passed(self) -> int:
        """How many ops that would get an event were passed on in this step."""
        return self._passed

    def _thread(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread(internals.sequence_number())
        return thread

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        gpu = self.gpu
        op = self._known.get(id(func)) or self._learn(func)
        call, rule = op.call, op.rule
        if not self.active or gpu is None or gpu.capturing():
            self._passed += op.like is None or not _is_dense(args)
            return call(*args, **kwargs) if kwargs else call(*args)
        entered = gpu.now()
        thread = self._thread()
        if thread.depth:
            return call(*args, **kwargs) if kwargs else call(*args)
        hint = before = None
        if rule is not None:
            hint = rule(args, kwargs or {}, gpu.type)
            if hint is not None:
                before = gpu.record()
        start = gpu.now()
        out = call(*args, **kwargs) if kwargs else call(*args)
        end = gpu.now()
        view = op.like is not None and _is_dense(args)
        # So soon after the last entry hardly any work was launched by no op.
        plain = view and entered - thread.left < self._soon and end - start < self.slow and thread.unseen is None
        if not plain:
            after, thread.stream = gpu.mark()
            if thread.unseen == thread.stream:
                thread.unseen = None
        sequence = internals.sequence_number()
        if sequence != thread.sequence:
            self._note_forward(thread, sequence, func)
        if plain:
            entry = Entry(start, end, None, None, None, op.like, thread.stream, None, None, None, entered)
            self.entries.append(entry)
            entry.left = thread.left = gpu.now()
            return out
        described = None
        if hint is not None or end - start >= self.slow:
            described = self._describe(func, hint, thread)
        if view:
            like = op.like
        else:
            like = (func, out.numel(), out.is_cuda) if isinstance(out, Tensor) else like_of(func, args, out)
        reads = hint is not None and hint.kind in (Kind.SCALAR, Kind.SHAPE)
        engine = "to host" if reads else engine_of(func, args, out, gpu.type) if op.copies else None
        if hint is not None and hint.kind is Kind.COPY and op.puts:
            engine = "to device"  # of the number
        entry = Entry(start, end, before, after, described, like, thread.stream, engine, None, None, entered)
        if engine is not None and op.copies:
            entry.copied = _bytes_copied(func, args, out)
        self.entries.append(entry)
        entry.left = thread.left = gpu.now()
        return out

    def _learn(self, func: Any) -> _Op:
        like = (func, 0, False) if is_view(func) else None
        op = _Op(func, internals.call_of(func), rule_of(func), like, func in _COPIES, func in _PUTS)
        self._known[id(func)] = op
        return op

    def _note_forward(self, thread: _Thread, sequence: int, func: Any) -> None:
        line = (func, self.frames.innermost(sys._getframe(2)))
        for number in range(max(thread.sequence, sequence - 16), sequence):
            thread.lines[number] = line
        thread.sequence = sequence

    def _describe(self, func: Any, hint: Hint | None, thread: _Thread) -> Call:
        name = _op_name(func)
        stack = self.frames.capture(sys._getframe(2))
        if hint is None:
            hint = Hint(kind_of_unknown(name, stack.distributed), "", Counts.IF_WAITED)
        kind = Kind.COLLECTIVE if stack.distributed and hint.kind in (Kind.SCALAR, Kind.COPY) else hint.kind
        call = Call(name, kind, hint.detail, hint.counts, stack)
        self._place_in_backward(call, thread)
        if hint.kind is Kind.INSIDE and self.gpu is not None:
            now = self.gpu.allocations()
            call.allocated = now != self._allocations
            self._allocations = now
        return call

    def _place_in_backward(self, call: Call, thread: _Thread) -> None:
        node = internals.current_node()
        if node is None:
            return
        call.node = internals.node_name(node)
        number = internals.node_sequence(node)
        for lines in (thread.lines, self._owner_lines()):
            op, line = lines.get(-1 if number is None else number, (None, None))
            # Another thread's nodes can have the same number: only a line whose op fits the node is believed. The node
            # of a torch.autograd.Function fits no op, and has its own frames in backward.
            if line is not None and _bare(_op_name(op)) == _bare(call.node):
                call.forward = line
                break
        call.caller = self.frames.capture(sys._current_frames().get(self._owner), into_backward=True)

    def _owner_lines(self) -> Mapping[int, tuple[Any, Mark | None]]:
        owner = self._threads.get(self._owner)
        return owner.lines if owner is not None else {}

    @contextmanager
    def explicit(self, name: str, hint: Hint, subject: Any = None) -> Iterator[None]:
        """Around a call that waits without being an op (explicit.py), for the work of `subject` if that is known."""
        gpu = self.gpu
        if not self.active or gpu is None or gpu.capturing():
            yield
            return
        if threading.get_ident() != self._owner and internals.current_node() is None:
            yield  # another thread of the script, whose waits stop nobody here
            return
        entered = gpu.now()
        thread = self._thread()
        if thread.depth:
            yield
            return
        before = gpu.record()
        thread.depth += 1
        start = gpu.now()
        try:
            yield
        finally:
            end = gpu.now()
            thread.depth -= 1
            call = Call(name, hint.kind, hint.detail, hint.counts, self.frames.capture(sys._getframe(1)))
            self._place_in_backward(call, thread)
            if hint.kind is Kind.ALLOCATOR:
                self._allocations = gpu.allocations()
            target, (after, stream) = _target_of(name, subject), gpu.mark()
            entry = Entry(start, end, before, after, call, stream=stream, target=target, entered=entered)
            self.entries.append(entry)
            entry.left = thread.left = gpu.now()

    def unseen(self) -> None:
        """The current stream has been given work that is no op's."""
        thread = self._threads.get(threading.get_ident())
        # The first view of a thread has an event anyway.
        if self.active and self.gpu is not None and thread is not None:
            thread.unseen = self.gpu.stream()

    def link(self, event: Any, stream: Any, waits: bool) -> None:
        """A stream has recorded an event, or waits for it."""
        gpu = self.gpu
        if self.active and gpu is not None and not gpu.capturing() and not self._thread().depth:
            now, number = gpu.now(), gpu.stream() if stream is None else int(stream.stream_id)
            self.entries.append(Entry(now, now, None, None, None, stream=number, link=(event, waits)))

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Inside, this thread's ops are not recorded: they are the finder's own."""
        thread = self._thread()
        thread.depth += 1
        try:
            yield
        finally:
            thread.depth -= 1
            thread.left = -math.inf  # it may have been work for the GPU


def own_time(gpu: Gpu, frames: Frames, ops: int = 100, rounds: int = 5) -> float:
    """Seconds that a timer takes of the host at each op before its Python begins, and so before `entered`.

    By the fastest rounds of a small op with and without it.
    """
    x = torch.zeros(())

    def fastest() -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(ops):
                x.add_(0)
            times.append(time.perf_counter() - start)
        return min(times) / ops

    plain = fastest()
    timer = Timer(gpu, frames)
    with timer:
        timer.start()
        timed = fastest()
        timer.stop()
    inside = statistics.median(
        (entry.start - entry.entered) + (entry.left - entry.end)
        for entry in timer.entries
        if entry.entered is not None and entry.left is not None
    )
    return max(0.0, timed - plain - inside)
