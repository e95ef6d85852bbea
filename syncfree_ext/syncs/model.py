"""What each wait costs: the host and the GPU's streams as queues, replayed with and without a wait.

The host issues ops in order; each takes host time and hands a stream some work. A stream does its work in order and
idles when it runs out. So with h the host's time and g the time when a stream has done all it was given,

    op:           g = max(g, h + lag) + work;   h = h + duration   (lag: until the work was handed over)
    kept wait:    h = max(h, g) + rest    (rest: what the call takes beyond the stream's backlog)
    removed wait: h = h + a few microseconds;  g = max(g, h) + what takes its place: a copy, from pinned memory

Streams wait for each other by events: recorded, e = max(g, h) of one; waited for, g = max(g, e) of the other. A copy
between host and GPU needs its engine as well, one for each direction, which does one copy after another, whichever is
ready first: a number that is read while another stream copies gigabytes to the host comes after those. In a replay
copies keep the order in which they were measured.

All durations are measured, so a replay with every wait must end when the measured steps ended, and the report says how
far it is off. Then what the timer itself took is left out: a host that it slows down is less often ahead of the GPU,
and no wait costs what it would without a timer. Each entry says how long the timer's own code ran. What the dispatch of
an op to Python takes besides is taken to be the same for all ops, and such that the replay is as long as steps are
without the timer, some of which follow the measured ones. From these replays follow, for the waits of one row of the
report:

- **idle**: how long the GPU idles a step when these are the only waits left. Two waits in a row drain the GPU once:
  either alone costs as much as both, and both get the whole amount.
- **saves**: how much shorter a step becomes when these alone go. It is small while another wait drains the GPU anyway.

Ops of one stream between two waits act on (h, g) as one step, h += H, g = max(g + G, h + P), so a replay costs a few
operations a wait.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What is left of a wait that is replaced by asynchronous work: about one launch.
LAUNCH = 10e-6
# An event that completes this soon after it was recorded tells only that the GPU was idle.
NOISE = 20e-6
# So many copies before a wait are asked whether they were still under way.
_IN_LINE = 64


@dataclass(frozen=True)
class Step:
    """One op, or one wait, with times in seconds on the host's clock.

    `row` is None for an op. `drains` says whether the host waits for the GPU's backlog (an allocation takes time
    without doing so). `keeps_work` says whether the GPU's own work in a wait stays when the wait goes: that of a copy
    and of a nonzero does, a scalar read has none. `instead` is what it takes then, if that is less: a copy from pinned
    memory is several times as fast as one from ordinary memory. `copies`: it is a copy, and needs the engine.
    """

    start: float
    end: float
    before: float  # the GPU had done everything queued before this
    work: float  # the GPU's time for this
    row: int | None = None
    drains: bool = True
    keeps_work: bool = False
    stream: int = 0
    engine: str | None = None  # of copies: the one that it needs
    target: tuple[str, int] | None = None  # of waits, if not the stream: ("stream", n), ("event", n) or ("all", 0)
    entered: float | None = None  # measuring began before the start, and went on
    left: float | None = None  # until after the end
    instead: float | None = None
    copies: bool = False
    lag: float = 0.0  # of ops: from the start until the work was handed over

    @property
    def came_early(self) -> float:
        """Host time that measuring took before the start."""
        return 0.0 if self.entered is None else max(0.0, self.start - self.entered)

    @property
    def went_late(self) -> float:
        """Host time that measuring took after the end."""
        return 0.0 if self.left is None else max(0.0, self.left - self.end)

    @property
    def stays(self) -> float:
        """The GPU's time for what takes the place of a wait."""
        if not self.keeps_work:
            return 0.0
        return self.work if self.instead is None else min(self.work, self.instead)

    @property
    def duration(self) -> float:
        """Host time."""
        return max(0.0, self.end - self.start)

    @property
    def waited(self) -> float:
        """Host time spent on the GPU's backlog."""
        return min(max(0.0, self.before - self.start), self.duration)

    @property
    def begin(self) -> float:
        """The GPU began with this."""
        return max(self.before, self.start + self.lag)

    @property
    def after(self) -> float:
        """The GPU had done this, too."""
        return self.begin + self.work


@dataclass(frozen=True)
class Link:
    """A stream recorded an event, or waits for it."""

    start: float
    stream: int
    event: int
    waits: bool


@dataclass
class _Run:
    """Ops of one stream, as one step of (h, g)."""

    stream: int
    host: float = 0.0
    work: float = 0.0
    path: float = float("-inf")

    def launch(self, work: float, lag: float = 0.0) -> None:
        """Hands the stream work, so long after the host's present place."""
        self.path = max(self.path, self.host + lag) + work
        self.work += work


class _Engine:
    """What an engine has served: when each copy was over as measured, in order, and when it is now."""

    def __init__(self) -> None:
        self._measured: list[float] = []
        self._now: list[float] = []

    def free(self, measured: float) -> float:
        """When the copies are over that had been over by then, as measured."""
        place = bisect.bisect_right(self._measured, measured)
        return self._now[place - 1] if place else 0.0

    def add(self, measured: float, now: float) -> None:
        place = bisect.bisect_right(self._measured, measured)
        self._measured.insert(place, measured)
        self._now.insert(place, now)


class _Mark:
    """A step ends and the next one begins."""


@dataclass
class _Copy:
    """A copy that the host does not wait for, which needs its engine, with what its call takes the host."""

    gap: float
    step: Step
    host: float
    lag: float


@dataclass
class _Wait:
    """A wait, `gap` seconds of Python after what came before."""

    gap: float
    step: Step
    rest: float  # beyond what it waited for


class Queue:
    """The measured steps, ready to be replayed.

    Args:
        steps: ops, waits and links in the order of the host.
        end: when the last measured step ended on the host's clock.
        own: leaves out what measuring took: at each op and wait what this one says of itself, and so many seconds
            besides, before the call or, where there is not so much time, of an op's call. With None everything stays.
        boundaries: when one training step ended and the next one began, on the host's clock.
    """

    def __init__(
        self, steps: Sequence[Step | Link], end: float, own: float | None = None, boundaries: Sequence[float] = ()
    ) -> None:
        fixed, out = (0.0, 0.0) if own is None else (own, 1.0)
        ops = [step for step in steps if isinstance(step, Step)]
        self._items: list[_Run | _Copy | _Wait | Link | _Mark] = []
        self.own = 0.0  # what was left out
        self._start = ops[0].start if ops else 0.0
        self._backlog = {ops[0].stream: max(0.0, ops[0].before - self._start)} if ops else {}
        # The stream with most of the ops: what others still do at the end belongs to the next step. Views do not count:
        # most of them are only taken to be in the stream of the op before.
        working = [step for step in ops if step.work > 0 or step.row is not None] or ops
        self._main = Counter(step.stream for step in working).most_common(1)[0][0] if working else 0
        self._shared = _engines_that_make_reads_wait(ops)
        now = self._start
        done: dict[int, float] = {}
        engines: defaultdict[str | None, _Engine] = defaultdict(_Engine)
        events: dict[int, float] = {}
        run: _Run | None = None
        marks = iter(boundaries)
        mark = next(marks, math.inf)
        for step in steps:
            while step.start >= mark:
                self._items.append(_Mark())
                mark, run = next(marks, math.inf), None
            if isinstance(step, Link):
                self._items.append(step)
                run = None
                there = done.get(step.stream, self._start)
                if step.waits:
                    done[step.stream] = max(there, events.get(step.event, self._start))
                else:
                    events[step.event] = max(there, step.start)
                continue
            between = max(0.0, step.start - out * step.came_early - now)
            gap = max(0.0, between - fixed)
            taken = min(max(0.0, fixed - between), step.duration) if step.row is None else 0.0
            self.own += out * (step.came_early + step.went_late) + between - gap + taken
            if step.row is None and step.engine is None:
                if run is None or run.stream != step.stream:
                    run = _Run(step.stream)
                    self._items.append(run)
                run.host += gap
                run.launch(step.work, max(0.0, step.lag - taken))
                run.host += step.duration - taken
            elif step.row is None and step.engine is not None:
                self._items.append(_Copy(gap, step, step.duration - taken, max(0.0, step.lag - taken)))
                engines[step.engine].add(step.after, step.after)
                run = None
            else:
                if step.before > step.start + NOISE and step.target is None:
                    # What no op launched (a graph replay) shows between the last event and the one before the wait.
                    unseen = max(0.0, step.before - max(done.get(step.stream, self._start), now))
                    if unseen > 0 and not (run is not None and run.stream == step.stream):
                        run = _Run(step.stream)
                        self._items.append(run)
                    if unseen > 0 and run is not None:
                        run.launch(unseen)
                until = step.before
                if step.engine in self._shared:
                    until = max(until, engines[step.engine].free(step.end + NOISE))
                waited = min(max(0.0, until - step.start), step.duration) if step.drains else 0.0
                self._items.append(_Wait(gap, step, step.duration - waited))
                run = None
            now = max(now, step.end + out * step.went_late)
            done[step.stream] = max(done.get(step.stream, self._start), step.after)
        self._tail = max(0.0, end - now - fixed)
        self.measured = max(end, done.get(self._main, end)) - self._start

    def replay(self, removed: Collection[int] | None = (), only: Collection[int] | None = None) -> float:
        """Seconds until the host and its main stream are done, without the waits of some rows.

        Args:
            removed: rows whose waits go; None for all.
            only: rows whose waits stay, if given; all others go.
        """
        return max(self._play(removed, only)[-1])

    def middle(self) -> float:
        """Seconds by which a training step moves the host or its main stream on, whichever is more: the median.

        Of the first step the host alone counts: the finder may have waited for the GPU just before.
        """
        ends = self._play((), None)
        return statistics.median(max(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends))

    def _play(self, removed: Collection[int] | None, only: Collection[int] | None) -> list[tuple[float, float]]:
        """When the host and its main stream are done, after each training step; at first the stream never is."""
        host = 0.0
        gpu: dict[int, float] = dict(self._backlog)
        engines: defaultdict[str | None, _Engine] = defaultdict(_Engine)
        events: dict[int, float] = {}
        ends = [(0.0, math.inf)]
        for item in self._items:
            if isinstance(item, _Mark):
                ends.append((host, gpu.get(self._main, 0.0)))
            elif isinstance(item, _Run):
                gpu[item.stream] = max(gpu.get(item.stream, 0.0) + item.work, host + item.path)
                host += item.host
            elif isinstance(item, Link):
                there = gpu.get(item.stream, 0.0)
                if item.waits:
                    gpu[item.stream] = max(there, events.get(item.event, 0.0))
                else:
                    events[item.event] = max(there, host)
            elif isinstance(item, _Copy):
                host += item.gap
                stream, engine = item.step.stream, engines[item.step.engine]
                start = max(gpu.get(stream, 0.0), host + item.lag, engine.free(item.step.after))
                gpu[stream] = start + item.step.work
                engine.add(item.step.after, gpu[stream])
                host += item.host
            else:
                host = self._pass(item, host + item.gap, gpu, engines, events, removed, only)
        return [*ends, (host + self._tail, gpu.get(self._main, 0.0))]

    def _pass(
        self,
        item: _Wait,
        host: float,
        gpu: dict[int, float],
        engines: Mapping[str | None, _Engine],
        events: Mapping[int, float],
        removed: Collection[int] | None,
        only: Collection[int] | None,
    ) -> float:
        """The host's time after a wait, which stays or goes."""
        wait, rest = item.step, item.rest
        own = gpu.get(wait.stream, 0.0)
        gone = wait.row not in only if only is not None else removed is None or wait.row in removed
        if gone:
            stays = min(rest, wait.stays)
            start = max(own, host)
            if wait.copies:
                start = max(start, engines[wait.engine].free(wait.after))
                engines[wait.engine].add(wait.after, start + stays)
            gpu[wait.stream] = start + stays
            return host + min(rest, LAUNCH)
        if not wait.drains:
            return host + rest
        kind, what = wait.target or ("stream", wait.stream)
        if kind == "event":
            there = events.get(what, 0.0)
        else:
            there = max(gpu.values(), default=0.0) if kind == "all" else gpu.get(what, 0.0)
        if wait.engine in self._shared:
            there = max(there, engines[wait.engine].free(wait.end + NOISE))
        host = max(host, there) + rest
        if wait.target is None:
            gpu[wait.stream] = max(own, host - (0.0 if wait.keeps_work else rest))
        return host


def _engines_that_make_reads_wait(ops: Sequence[Step]) -> set[str | None]:
    """The engines behind whose copies a copy that the host waits for stands in line.

    All do, unless a measured wait was over while a copy that had begun before went on: some GPUs have several engines
    a direction.
    """
    copies: dict[str | None, list[Step]] = {}
    waits: set[str | None] = set()
    several: set[str | None] = set()
    for step in ops:
        if step.engine is None:
            continue
        before = copies.setdefault(step.engine, [])
        if step.row is None:
            before.append(step)
        else:
            waits.add(step.engine)
            if any(copy.begin < step.end - NOISE and copy.after > step.end + NOISE for copy in before[-_IN_LINE:]):
                several.add(step.engine)
    return waits - several
