"""find_syncs: warm-up, measured steps, some without the timer, some under the profiler if asked for, and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType

import torch

from . import explicit, internals
from .collect import build, resolve_events
from .detector import allow_sync
from .gpu import Gpu, current_gpu
from .report import Report
from .sites import Frames
from .steps import boundaries
from .timer import SLOW, Timer, own_time
from .truth import Profiler, summarise

# Steps without the timer after the measured ones: the first takes up the loop's pace, the others tell what it is.
_ALONE = 3


class find_syncs:  # noqa: N801 (used like a function)
    """Finds where the host waits for the GPU, ranks the lines by what they cost, and says what to do.

    ::

        with find_syncs(warmup=3, steps=5) as report:
            train()
        print(report.table())

    A step ends with optimizer.step, or where the script calls `syncfree_ext.syncs.step()`. Three steps after the
    measured ones run without the timer and tell what a step takes by itself; then the report is filled, or with what
    there is when the block ends. Measuring takes the host some ten microseconds an op. The finder itself waits for the
    GPU before the measured steps, during warm-up, and after the last, when it also tries how fast copies are if the
    host waited for one.
    Only this thread and the backward calls that it makes are seen. CUDA device: the current one.

    Args:
        warmup: steps that are not measured; 0 measures from the start of the block.
        steps: steps that are measured, at least 1.
        probe_ms: queue work for so many milliseconds before each step, so that every wait shows even if the GPU would
            be idle; costs are then those of the backlog, and only calls and kinds are to be trusted.
        profile: steps to run under torch.profiler after all others, as a check; 0 for none.
        user: folders or files whose lines count as yours although they lie in site-packages.
        slow_us: microseconds from which an op without a reason to wait is looked at. Where less than that, and than
            50, lies between an op and a view, the view tells nothing of the GPU.
        done: called once the report is filled; not if the block ends before.
        gpu: the device; None for the current CUDA device. Tests pass one of their own.

    Raises:
        ValueError: warmup or profile is negative, steps is less than 1.
    """

    def __init__(
        self,
        warmup: int = 3,
        steps: int = 5,
        *,
        probe_ms: float = 0.0,
        profile: int = 0,
        user: Sequence[str] = (),
        slow_us: float = SLOW * 1e6,
        done: Callable[[Report], None] | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        for name, value, least in (("warmup", warmup, 0), ("steps", steps, 1), ("profile", profile, 0)):
            if value < least:
                raise ValueError(f"find_syncs: {name} must be at least {least}, got {value}")
        if probe_ms < 0 or slow_us <= 0:
            raise ValueError(
                f"find_syncs: probe_ms must not be negative and slow_us must be positive, got {probe_ms} and {slow_us}"
            )
        self.report = Report()
        self._warmup, self._steps, self._profile = warmup, steps, profile
        self._probe = probe_ms * 1e-3
        self._slow = slow_us * 1e-6
        self._done = done
        self._gpu = gpu
        self._frames = Frames(user)
        self._profiler = Profiler()
        self._timer: Timer
        self._hooks = ExitStack()  # as long as steps are counted
        self._measuring = ExitStack()  # as long as the timer is needed
        self._listening = ExitStack()  # as long as it runs
        self._constructors = internals.VisibleConstructors()
        self._mode_is_on = False
        self._steps_seen = 0
        self._own = 0.0
        self._ends: list[float] = []
        # Ends of steps without the timer: which step, the host's time, and an event.
        self._alone: list[tuple[int, float, object]] = []
        self._wants_alone = True
        self._profiled_from = 0
        self._state = "new"

    def __enter__(self) -> Report:
        self._gpu = self._gpu if self._gpu is not None else current_gpu()
        self._timer = Timer(self._gpu, self._frames, self._slow)
        if self._gpu is not None and self._gpu.type == "cuda":
            self._own = own_time(self._gpu, self._frames)
        self.report.torch = torch.__version__
        self.report.probe_ms = self._probe * 1e3
        if self._gpu is None:
            self.report.notes.append("There is no CUDA device: the host has nothing to wait for.")
        self._state = "warmup"
        self._hooks.enter_context(boundaries(self._step_ended, self._restart))
        if self._gpu is not None:
            # In place from the start, passing ops on, so that warm-up pays for what is paid once.
            self._timer.__enter__()
            self._mode_is_on = True
            self._measuring.enter_context(self._constructors)
            if self._warmup == 0:
                self._calibrate()
        if self._warmup == 0:
            self._start()
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish()
        except Exception as problem:
            # Such as a GPU that failed: the error of the block itself says more.
            if error is None:
                raise
            self.report.notes.append(f"The report could not be finished after the script's error: {problem}")
        finally:
            self._hooks.close()
            self._end(call_done=False)
            self._leave_mode()
            self._constructors.leave()  # steps may have been counted, and so the measuring ended, in another thread

    def _finish(self) -> None:
        if self._state == "measuring":
            seen = len(self._ends) - 1
            if seen == 0 and self._steps_seen == 0:
                # A block without steps, measured from its start, is one step.
                self._ends.append(self._now())
                seen = 1
            if seen < self._steps:
                self.report.notes.append(f"The block ended after {seen} of {self._steps} measured steps.")
            if seen:
                self._stop_timer()
                self._build_report()
            else:
                self._timer.stop()
        elif self._state == "alone":
            self._build_report()
            if self._profile:
                self.report.notes.append("The block ended before its steps under the profiler.")
        elif self._state == "profiling":
            self._finish_profile()
        elif self._state == "warmup":
            self.report.notes.append(
                f"Nothing was measured: the block ended in step {self._steps_seen + 1} of {self._warmup} for warm-up. "
                "A step ends with optimizer.step or syncs.step(); warmup=0 measures from the start."
            )

    def _now(self) -> float:
        return self._gpu.now() if self._gpu is not None else time.perf_counter()

    def _calibrate(self) -> None:
        if self._gpu is not None:
            with self._timer.untimed(), allow_sync("find_syncs ties the GPU's clock to the host's"):
                self._gpu.calibrate()

    def _prepare(self) -> None:
        """Makes the events of the measured steps, and some more: a wait gets two.

        What ran before the first step is no measure.
        """
        if self._gpu is not None and self._steps_seen > 1:
            self._gpu.prepare(self._timer.passed * self._steps * 5 // 4)

    def _pinned(self, engine: str, size: int) -> float | None:
        """What a copy of that many bytes takes from or to pinned memory."""
        if self._gpu is None:
            return None
        with self._timer.untimed(), allow_sync("find_syncs tries how fast copies are"):
            seconds = self._gpu.pinned(engine, size)
        note = "How fast copies from pinned memory are is not known: those that wait may cost more than is said."
        if seconds is None and note not in self.report.notes:
            self.report.notes.append(note)
        return seconds

    def _leave_mode(self) -> None:
        # A mode that the script has entered since lies on top: then ours stays below it, passing ops on, until a step
        # or the block ends without it.
        if self._mode_is_on and internals.top_mode() is self._timer:
            self._mode_is_on = False
            self._timer.__exit__(None, None, None)

    def _start(self) -> None:
        self._state = "measuring"
        self._listening.enter_context(explicit.listening(self._timer.explicit, self._timer.link, self._timer.unseen))
        self._queue_backlog()
        self._ends = [self._now()]
        self._timer.start()

    def _restart(self) -> None:
        """The script marks its steps itself: what the optimizer's steps counted until now does not count.

        What has been measured by then stays, but steps of another length do not tell what it takes alone.
        """
        if self._state in ("alone", "profiling", "ended"):
            self._alone.clear()
            self._wants_alone = False
            return
        self._steps_seen = 0
        if self._state == "measuring" and self._warmup:
            self._timer.stop()
            self._timer.entries.clear()
            self._listening.close()
            self._state = "warmup"
        self._ends = self._ends[:1]

    def _queue_backlog(self) -> None:
        if self._probe and self._gpu is not None:
            with self._timer.untimed(), allow_sync("find_syncs measures its backlog"):
                self._gpu.backlog(self._probe)

    def _step_ended(self) -> None:
        self._steps_seen += 1
        if self._state in ("alone", "profiling", "ended"):
            self._leave_mode()
        if self._state == "warmup":
            if self._steps_seen == max(1, self._warmup - 1):
                self._prepare()
                self._calibrate()
                self._queue_backlog()  # the first one measures how much work that is
            self._timer.new_step()
            if self._steps_seen >= self._warmup:
                self._start()
        elif self._state == "measuring":
            self._ends.append(self._now())
            self._timer.new_step()
            if len(self._ends) > self._steps:
                self._stop_timer()
                self._state = "alone"
                # Not with a mode of the script on top of the timer's, which stays as long.
                self._wants_alone = self._gpu is not None and not self._probe and not self._mode_is_on
                self._go_on_unless_more()
            else:
                self._queue_backlog()
        elif self._state == "alone":
            if self._gpu is not None and self._wants_alone and not self._gpu.capturing():
                self._alone.append((self._steps_seen, self._now(), self._gpu.record()))
            self._go_on_unless_more()
        elif self._state == "profiling" and self._steps_seen >= self._profiled_from + self._profile:
            self._finish_profile()
            self._end()

    def _stop_timer(self) -> None:
        self._timer.stop()
        self._listening.close()
        self._measuring.close()
        self._leave_mode()

    def _go_on_unless_more(self) -> None:
        """Fills the report, unless steps alone are still wanted; then come steps under the profiler, or none."""
        capturing = self._gpu is not None and self._gpu.capturing()  # where nobody may wait for the GPU
        if capturing or (self._wants_alone and len(self._alone) < _ALONE):
            return
        self._build_report()
        if self._profile:
            self._state = "profiling"
            self._profiled_from = self._steps_seen
            self._profiler.start()
        else:
            self._end()

    def _seconds_alone(self) -> float | None:
        """The shortest step without the timer, by the host or the GPU, whichever takes longer. The GPU must be done."""
        if self._gpu is None:
            return None
        ends = self._gpu.resolve([event for _, _, event in self._alone])
        marks = [(step, host, gpu) for (step, host, _), gpu in zip(self._alone, ends, strict=True)]
        lengths = [max(b[1] - a[1], b[2] - a[2]) for a, b in pairwise(marks) if b[0] == a[0] + 1]
        return min(lengths, default=None)

    def _build_report(self) -> None:
        if self._gpu is None:
            count = len(self._ends) - 1
            found = Report(steps=count, step_ms=(self._ends[-1] - self._ends[0]) * 1e3 / count)
        else:
            self._calibrate()
            self.report.device = torch.cuda.get_device_name() if self._gpu.type == "cuda" else self._gpu.type
            # What came after the last whole step belongs to none.
            entries = [entry for entry in self._timer.entries if entry.start < self._ends[-1]]
            timed = resolve_events(entries, self._gpu)
            rank, recording = int(os.environ.get("RANK", "0")), self._gpu.recording()
            alone = self._seconds_alone()
            found = build(timed, self._ends, self._slow, rank, self._own, recording, self._pinned, alone)
        self._timer.entries = []
        for name in (
            "rows", "slow", "steps", "step_ms", "own_ms", "alone_ms", "replay_ms", "free_ms", "model_error", "busy_ms",
            "timelines",
        ):  # fmt: skip
            setattr(self.report, name, getattr(found, name))

    def _finish_profile(self) -> None:
        steps = max(1, self._steps_seen - self._profiled_from)
        self.report.truth = summarise(self._profiler.stop(), steps, self.report)

    def _end(self, call_done: bool = True) -> None:
        if self._state == "ended":
            return
        self._state = "ended"
        self._listening.close()
        self._measuring.close()
        self._leave_mode()
        if self._gpu is not None:
            self._gpu.prepare(0)
        # The hooks stay until the block ends: this may run in one, and torch is walking through them.
        if call_done and self._done is not None:
            self._done(self.report)
