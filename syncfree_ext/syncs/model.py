"""What each wait costs: the host and the GPU as a queue, replayed with and without a wait.

The host issues ops in order; each takes host time and hands the GPU some work. The GPU does the work in order and
idles when it runs out. So with h the host's time and g the time when the GPU has done all it was given,

    op:           g = max(g, h) + work;   h = h + duration
    kept wait:    h = max(h, g) + rest    (rest: what the call takes beyond the GPU's backlog)
    removed wait: h = h + a few microseconds

All durations are measured, so a replay with every wait must end when the measured steps ended, and the report says how
far it is off. Then what the timer itself took between the ops is left out: a host that it slows down is less often
ahead of the GPU, and every wait would seem cheaper than it is. From these replays follow, for the waits of one row of
the report:

- **idle**: how long the GPU idles a step when these are the only waits left. Two waits in a row drain the GPU once:
  either alone costs as much as both, and both get the whole amount.
- **saves**: how much shorter a step becomes when these alone go. It is small while another wait drains the GPU anyway.

Ops between two waits act on (h, g) as one step, h += H, g = max(g + G, h + P), so a replay costs a few operations a
wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# What is left of a wait that is replaced by asynchronous work: about one launch.
LAUNCH = 10e-6
# An event that completes this soon after it was recorded tells only that the GPU was idle.
NOISE = 20e-6


@dataclass(frozen=True)
class Step:
    """One op, or one wait, with times in seconds on the host's clock.

    `row` is None for an op. `drains` says whether the host waits for the GPU's backlog (an allocation takes time
    without doing so). `keeps_work` says whether the GPU's own work in a wait stays when the wait goes: that of a copy
    and of a nonzero does, a scalar read has none.
    """

    start: float
    end: float
    before: float  # the GPU had done everything queued before this
    work: float  # the GPU's time for this
    row: int | None = None
    drains: bool = True
    keeps_work: bool = False

    @property
    def duration(self) -> float:
        """Host time."""
        return max(0.0, self.end - self.start)

    @property
    def waited(self) -> float:
        """Host time spent on the GPU's backlog."""
        return min(max(0.0, self.before - self.start), self.duration)

    @property
    def after(self) -> float:
        """The GPU had done this, too."""
        return max(self.before, self.start) + self.work


@dataclass
class _Segment:
    """The ops before a wait, as one step of (h, g), and the wait; the last segment has none."""

    host: float = 0.0
    work: float = 0.0
    path: float = float("-inf")
    wait: Step | None = None

    def add(self, gap: float, step: Step) -> None:
        """Appends an op after `gap` seconds of Python."""
        self.host += gap
        self.launch(step.work)
        self.host += step.duration

    def launch(self, work: float) -> None:
        """Hands the GPU work at the host's present place."""
        self.path = max(self.path, self.host) + work
        self.work += work


class Queue:
    """The measured steps, ready to be replayed.

    Args:
        steps: ops and waits in the order of the host.
        end: when the last measured step ended on the host's clock.
        own: seconds that measuring took at each op and wait, which a replay leaves out.
    """

    def __init__(self, steps: Sequence[Step], end: float, own: float = 0.0) -> None:
        self._segments: list[_Segment] = []
        self._start = steps[0].start if steps else 0.0
        self._backlog = max(0.0, steps[0].before - self._start) if steps else 0.0
        segment = _Segment()
        now = self._start
        done = self._start
        for step in steps:
            gap = max(0.0, step.start - now - own)
            if step.row is None:
                segment.add(gap, step)
            else:
                if step.before > step.start + NOISE:
                    # What no op launched (a graph replay) shows between the last event and the one before the wait.
                    segment.launch(max(0.0, step.before - max(done, now)))
                segment.host += gap
                segment.wait = step
                self._segments.append(segment)
                segment = _Segment()
            now = max(now, step.end)
            done = max(done, step.after)
        segment.host += max(0.0, end - now - own)
        self._segments.append(segment)
        self.measured = max(end, done) - self._start

    def replay(self, removed: Collection[int] | None = (), only: Collection[int] | None = None) -> float:
        """Seconds until host and GPU are done, without the waits of some rows.

        Args:
            removed: rows whose waits go; None for all.
            only: rows whose waits stay, if given; all others go.
        """
        host, gpu = 0.0, self._backlog
        for segment in self._segments:
            gpu = max(gpu + segment.work, host + segment.path)
            host += segment.host
            wait = segment.wait
            if wait is None:
                continue
            rest = wait.duration - wait.waited if wait.drains else wait.duration
            gone = wait.row not in only if only is not None else removed is None or wait.row in removed
            if not gone:
                if wait.drains:
                    host = max(host, gpu) + rest
                    gpu = max(gpu, host - (0.0 if wait.keeps_work else rest))
                else:
                    host += rest
            else:
                gpu = max(gpu, host) + (min(rest, wait.work) if wait.keeps_work else 0.0)
                host += min(rest, LAUNCH)
        return max(host, gpu)
