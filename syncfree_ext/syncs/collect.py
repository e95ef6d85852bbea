"""From the timer's entries to a report: which calls waited, the rows they form, and what each row costs."""

from __future__ import annotations

import bisect
import enum
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .gpu import Gpu
from .kinds import Counts, Kind, is_view
from .model import NOISE, Link, Queue, Step
from .report import Report, Row, Slow, Timeline
from .sites import Site, resolve, short_path
from .timer import Call, Entry, Like

# A wait ends soon after the GPU has drained.
_RETURN = 25e-6
# An op's work reaches the GPU so long before the op returns, or a third of its time if that is less.
_HANDED_OVER = 8e-6
# What an op takes the GPU if no more is known than that it did not take long.
_SHORT = 4e-6
# Events are in place within so many seconds of each other.
_JITTER = 5e-6
# A call that takes so many times what most take launches more than one kernel.
_LONG = 4
_MOST_BUSY_INTERVALS = 500
# A replay is as long as steps are if it is off by no more than this part of them.
_ALIKE = 0.01
# No dispatch of an op takes longer.
_MOST_OWN = 300e-6
# So many replays at most are tried to find out what it takes.
_TRIES = 16
# Of an op without a reason to wait: one call alone may be chance.
_LEAST_WAITS = 2


class Verdict(enum.Enum):
    """What a call was."""

    WAIT = "wait"
    SLOW = "slow"
    NOTHING = "nothing"


@dataclass
class Timed:
    """An entry whose events are resolved to the host's clock."""

    start: float
    end: float
    before: float
    after: float
    call: Call | None
    like: Like | None = None
    stream: int = 0
    engine: str | None = None
    link: tuple[int, bool] | None = None
    target: tuple[str, int] | None = None
    entered: float | None = None
    left: float | None = None
    copied: int = 0

    @property
    def upper(self) -> float:
        """The GPU's time for this, or more: the event after an op completes no earlier than it is recorded."""
        return max(0.0, self.after - max(self.before, self.start))


def resolve_events(entries: Sequence[Entry], gpu: Gpu) -> list[Timed]:
    """The entries in the order of the host, with times for events.

    An entry without an event before takes the last one of its stream, or what that waits for: an event of another
    stream, or its copy engine, which serves copies in the order in which they are over. A view takes the GPU nothing.
    """
    entries = sorted(entries, key=lambda entry: entry.start)
    events = [event for entry in entries for event in (entry.before, entry.after) if event is not None]
    times = iter(gpu.resolve(events))
    timed: list[Timed] = []
    first = entries[0].start if entries else 0.0
    done: dict[int, float] = {}
    engines: dict[str, list[float]] = {}
    recorded: dict[int, float] = {}
    for entry in entries:
        before = max(next(times) if entry.before is not None else first, done.get(entry.stream, first))
        link = target = None
        if entry.link is not None:
            event, waits = entry.link
            link = id(event), waits
            if waits:
                done[entry.stream] = before = max(before, recorded.get(link[0], first))
            else:
                recorded[link[0]] = max(before, entry.start)
            after = before
        elif entry.after is None:
            after = before
        else:
            after = next(times)
            if entry.engine is not None and not (entry.call is not None and entry.call.counts is Counts.ALWAYS):
                served = engines.setdefault(entry.engine, [])
                place = bisect.bisect_right(served, after)
                before = max([before, *served[place - 1 : place]])
                served.insert(place, after)
            done[entry.stream] = after
        if entry.target is not None:
            kind, what = entry.target
            target = kind, id(what) if kind == "event" else what or 0
            if kind == "event":
                before = recorded.get(id(what), first)
            elif kind == "all":
                before = max(before, *done.values())
            elif what != entry.stream:
                before = done.get(what, first)
        timed.append(
            Timed(
                entry.start,
                entry.end,
                before,
                after,
                entry.call,
                entry.like,
                entry.stream,
                entry.engine,
                link,
                target,
                entry.entered,
                entry.left,
                entry.copied,
            )
        )
    return timed


def work_of(timed: Sequence[Timed], recording: float = 0.0) -> list[float]:
    """The GPU's time for each entry.

    It is measured where the GPU still had other work when the call returned. Otherwise the call's work began somewhere
    in the call, and it is taken from calls alike that were measured. If there are none it is the median of what the
    calls alike let guess: most hand over their work shortly before they return, and one that always takes many times as
    long as most hands over a lot, all the time. If the GPU was done when the event was in place, it was not much.

    Args:
        timed: resolved entries.
        recording: seconds from a call's return until its event is in place.
    """
    calls: dict[Like, list[Timed]] = {}
    for entry in timed:
        if entry.like is not None:
            calls.setdefault(entry.like, []).append(entry)
    ops = [entry.end - entry.start for entry in timed if entry.like is not None and not is_view(entry.like[0])]
    most = statistics.median(ops or [0.0])
    handed_over = min(0.3 * most, _HANDED_OVER)

    def guess(entry: Timed, handing_over: float) -> float:
        rest = entry.after - entry.end
        if rest <= recording + _JITTER:
            return min(entry.upper / 2, _SHORT)
        return min(entry.upper, rest + handing_over)

    usual: dict[Like, float] = {}
    for like, alike in calls.items():
        times = [entry.upper for entry in alike if entry.before >= entry.end]
        if not times:
            handing_over = max(handed_over, min(entry.end - entry.start for entry in alike) - _LONG * most)
            times = [guess(entry, handing_over) for entry in alike]
        usual[like] = statistics.median(times)

    def work(entry: Timed) -> float:
        if entry.like is None or entry.before >= entry.end:
            return entry.upper
        rest = entry.after - entry.end
        return min(entry.upper, max(rest if rest > recording + NOISE else 0.0, usual[entry.like]))

    return [work(entry) for entry in timed]


def _looks_like_a_wait(entry: Timed, slow: float) -> bool:
    """Whether the GPU had work when the call began, and the call returned as soon as that was done."""
    duration = entry.end - entry.start
    rest = entry.end - entry.before
    return duration >= 2 * slow and -NOISE <= rest <= max(_RETURN, 0.1 * duration)


def ops_that_wait(timed: Sequence[Timed], slow: float) -> set[Like]:
    """The ops without a reason to wait that did nonetheless.

    A slow op can return just when the GPU runs dry, by chance, and in a steady loop even some times. One that waits
    does so whenever the GPU has work, so nine of ten calls that met a busy GPU must look like it, and two at least:
    where the host bounds the loop hardly any call meets a busy GPU, and the machine may have stalled that one.
    """
    met_busy: Counter[Like] = Counter()
    waited: Counter[Like] = Counter()
    for entry in timed:
        if entry.like is not None and entry.before > entry.start + NOISE:
            met_busy[entry.like] += 1
            waited[entry.like] += _looks_like_a_wait(entry, slow)
    return {like for like, count in waited.items() if count >= max(_LEAST_WAITS, 0.9 * met_busy[like])}


def judge(timed: Timed, slow: float, waiting: Collection[Like]) -> Verdict:
    """Whether a call waited for the GPU, was slow by itself, or neither."""
    call = timed.call
    if call is None:
        return Verdict.NOTHING
    if call.counts is Counts.ALWAYS:
        return Verdict.WAIT
    if timed.end - timed.start < slow:
        return Verdict.NOTHING
    if call.counts is Counts.IF_SLOW or call.allocated:
        return Verdict.WAIT
    if timed.like in waiting and _looks_like_a_wait(timed, slow):
        return Verdict.WAIT
    return Verdict.SLOW


def _name(site: Site | None) -> str | None:
    return str(site) if site is not None else None


def row_of(call: Call) -> Row:
    """An empty row for a call's site."""
    stack = call.stack
    caller = resolve(call.caller.user or call.caller.library) if call.caller is not None else None
    forward = resolve(call.forward)
    user = resolve(stack.user)
    library = resolve(stack.library)
    # A hook or a Function's backward has lines of its own; other nodes are placed where they were made.
    site = user or forward or library or caller or resolve(stack.torch)
    via = library if site is not library else None
    kind = Kind.ALLOCATOR if call.allocated else call.kind
    row = Row("<unknown>", 0, "", "", str(kind), call.op, call.detail, node=call.node)
    if site is not None:
        row.file, row.line, row.function = short_path(site.file), site.line, site.function
        row.source, row.excerpt = site.source, site.excerpt()
    row.via = _name(via)
    row.inner = _name(resolve(stack.torch))
    row.backward = _name(caller)
    return row


def _step(entry: Timed, work: float, lag: float = 0.0, **more: Any) -> Step:
    """An entry for the replays."""
    return Step(
        entry.start,
        entry.end,
        entry.before,
        work,
        lag=lag,
        stream=entry.stream,
        engine=entry.engine,
        entered=entry.entered,
        left=entry.left,
        **more,
    )


def build(
    timed: Sequence[Timed],
    boundaries: Sequence[float],
    slow: float,
    rank: int = 0,
    own: float = 0.0,
    recording: float = 0.0,
    pinned: Callable[[str, int], float | None] = lambda engine, size: None,
    alone: float | None = None,
) -> Report:
    """The report of measured steps.

    Args:
        timed: resolved entries, in order.
        boundaries: on the host's clock, the start of each step and the end of the last.
        slow: seconds from which an op without a reason to wait is of interest.
        rank: of this process.
        own: seconds that the timer took at each entry besides what the entry itself says, at least.
        recording: seconds from an op's return until its event is in place.
        pinned: seconds that an engine takes for a copy of so many bytes from or to pinned memory; None if that is not
            known.
        alone: seconds of a step without the timer, if that is known.

    Raises:
        ValueError: fewer than two boundaries.
    """
    if len(boundaries) < 2:
        raise ValueError(f"build: boundaries must hold at least one step, got {len(boundaries)} times")
    count = len(boundaries) - 1
    rows: dict[tuple[object, ...], int] = {}
    report = Report(steps=count, step_ms=(boundaries[-1] - boundaries[0]) * 1e3 / count)
    slow_ops: dict[tuple[str, str], Slow] = {}
    steps: list[Step | Link] = []
    waiting = ops_that_wait(timed, slow)
    for entry, work in zip(timed, work_of(timed, recording), strict=True):
        if entry.link is not None:
            steps.append(Link(entry.start, entry.stream, *entry.link))
            continue
        verdict = judge(entry, slow, waiting)
        if verdict is not Verdict.WAIT or entry.call is None:
            # If the GPU was idle, its work began when it is over if it takes so long.
            steps.append(_step(entry, work, min(max(0.0, entry.after - work - entry.start), entry.end - entry.start)))
            if verdict is Verdict.SLOW and entry.call is not None:
                _add_slow(slow_ops, entry.call, entry.end - entry.start, count)
            continue
        row = row_of(entry.call)
        index = rows.setdefault(row.key, len(rows))
        if index == len(report.rows):
            row.ranks = [rank]
            report.rows.append(row)
        row = report.rows[index]
        keeps = entry.call.kind in (Kind.COPY, Kind.SHAPE) and entry.call.detail != "number to device"
        step = _step(
            entry,
            min(entry.upper, max(0.0, entry.end - max(entry.before, entry.start))),
            row=index,
            drains=entry.call.detail == "empty_cache"
            or (entry.before <= entry.end + NOISE and row.kind != Kind.ALLOCATOR),
            keeps_work=keeps,
            copies=keeps and entry.call.kind is Kind.COPY and entry.engine is not None,
            instead=pinned(entry.engine, entry.copied) if entry.copied and entry.engine is not None else None,
            target=entry.target,
        )
        steps.append(step)
        row.calls += 1
        row.blocked_ms += step.duration * 1e3
        row.waited_ms += step.waited * 1e3
        row.max_ms = max(row.max_ms, step.duration * 1e3)
    for op in slow_ops.values():
        op.calls /= count
    for row in report.rows:
        row.calls /= count
        row.blocked_ms /= count
        row.waited_ms /= count
    report.slow = sorted(slow_ops.values(), key=lambda op: -op.ms)
    ops = [step for step in steps if isinstance(step, Step)]
    if alone is not None and not 0 < alone < statistics.median(b - a for a, b in pairwise(boundaries)):
        alone = None  # of a step unlike most
    queue = _without_measuring(steps, boundaries, own, alone)
    report.own_ms = queue.own * 1e3 / count
    report.alone_ms = 0.0 if alone is None else alone * 1e3
    _add_costs(report, queue, Queue(steps, boundaries[-1]), count)
    busy = _busy(ops)
    report.busy_ms = sum(end - start for start, end in busy) * 1e3 / count
    report.timelines = _timelines(ops, busy, boundaries)
    report.rank_rows()
    return report


def _add_slow(slow_ops: dict[tuple[str, str], Slow], call: Call, duration: float, count: int) -> None:
    stack = call.stack
    where = _name(resolve(stack.user) or resolve(call.forward) or resolve(stack.library)) or "<unknown>"
    entry = slow_ops.setdefault((where, call.op), Slow(where, call.op, 0.0, 0.0))
    entry.calls += 1
    entry.ms += duration * 1e3 / count


def _without_measuring(
    steps: Sequence[Step | Link], boundaries: Sequence[float], own: float, alone: float | None
) -> Queue:
    """The steps without what measuring took.

    What an entry does not say of that is at least `own`, and else the least with which most replayed steps take no
    longer than one does alone: where the GPU bounds those, the host may be faster still.
    """

    def without(taken: float) -> Queue:
        return Queue(steps, boundaries[-1], taken, boundaries[1:-1])

    queue, most = without(own), max(own, _MOST_OWN)
    if alone is None or queue.middle() <= alone * (1 + _ALIKE):
        return queue
    best = without(most)
    limit = max(alone, best.middle()) * (1 + _ALIKE)
    # So much it is if it can be left out everywhere, which it cannot where a call takes less.
    low, high, found = own, most, False
    more = (queue.middle() - limit) * (len(boundaries) - 1) / len(steps)
    for _ in range(_TRIES):
        middle = (low + high) / 2 if found else min(low + more, high)
        queue = without(middle)
        length = queue.middle()
        if length > limit:
            low, more = middle, 2 * more
        else:
            high, best, found = middle, queue, True
            if length >= limit * (1 - _ALIKE):
                break
    return best


def _add_costs(report: Report, queue: Queue, as_measured: Queue, count: int) -> None:
    scale = 1e3 / count
    measured = as_measured.measured
    report.model_error = as_measured.replay(removed=()) / measured - 1 if measured > 0 else 0.0
    everything = queue.replay(removed=())
    free = queue.replay(removed=None)
    report.replay_ms, report.free_ms = everything * scale, free * scale
    for index, row in enumerate(report.rows):
        row.idle_ms = max(0.0, queue.replay(only=(index,)) - free) * scale
        row.saves_ms = max(0.0, everything - queue.replay(removed=(index,))) * scale


def _busy(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """When the GPU worked, on the host's clock; gaps too short to see are closed."""
    intervals: list[tuple[float, float]] = []
    for start, end in sorted((step.begin, step.after) for step in steps):
        if end <= start:
            continue
        if intervals and start - intervals[-1][1] <= NOISE:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((start, end))
    return intervals


def _timelines(
    steps: Sequence[Step], busy: Sequence[tuple[float, float]], boundaries: Sequence[float]
) -> list[Timeline]:
    timelines = []
    for first, last in pairwise(boundaries):

        def place(time: float, first: float = first, last: float = last) -> float:
            return round((min(max(time, first), last) - first) * 1e3, 4)

        waits = [
            (place(step.start), place(step.end), step.row)
            for step in steps
            if step.row is not None and first <= step.start < last
        ]
        work = [(place(start), place(end)) for start, end in busy if end > first and start < last]
        timelines.append(Timeline(round((last - first) * 1e3, 4), waits, _thinned(work)))
    return timelines


def _thinned(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few hundred intervals: the shortest gaps are closed first."""
    surplus = len(intervals) - _MOST_BUSY_INTERVALS
    if surplus <= 0:
        return intervals
    gaps = sorted(b[0] - a[1] for a, b in pairwise(intervals))
    limit = gaps[surplus - 1]
    merged = [intervals[0]]
    for start, end in intervals[1:]:
        if start - merged[-1][1] <= limit:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
