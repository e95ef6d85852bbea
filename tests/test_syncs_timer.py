"""What is a wait, what is merely slow, and where each is said to be, on a simulated card."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu import Behaves, Card, FakeGpu, TwoStreams, fake_card
from syncfree_ext.syncs import Report, explicit, find_syncs, internals, step
from syncfree_ext.syncs.collect import Timed, ops_that_wait, resolve_events
from syncfree_ext.syncs.kinds import Counts, Hint, Kind
from syncfree_ext.syncs.model import LAUNCH
from syncfree_ext.syncs.sites import Frames
from syncfree_ext.syncs.timer import Call, Entry, Timer, own_time

HERE = Path(__file__).name


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def with_neg(neg: Any, ops_before: int = 30, **options: Any) -> Report:
    """A report of steps in which the GPU has work when `neg` runs."""
    gpu = FakeGpu()
    x = torch.ones(3)
    with Behaves(gpu, neg), find_syncs(warmup=1, steps=4, gpu=gpu, **options) as report:
        for _ in range(6):
            for _ in range(ops_before):
                x.exp()
            x.neg()
            x.exp()
            step()
    return report


def test_an_op_that_waits_inside_is_found_without_being_known() -> None:
    def waits(gpu: FakeGpu) -> None:
        gpu.drain()
        gpu.host(10e-6)

    (row,) = with_neg(waits).rows
    assert (row.kind, row.op, row.calls, Path(row.file).name) == ("inside an op", "aten::neg", 1.0, HERE)
    assert row.source == "x.neg()"
    assert row.blocked_ms == pytest.approx(0.61, abs=0.1)  # 30 ops of 30 us, issued in 10 us each


def test_a_slow_op_is_no_wait() -> None:
    """The GPU still has work when it returns: nobody waited for it."""
    report = with_neg(lambda gpu: gpu.host(200e-6))
    assert report.rows == []
    (slow,) = report.slow
    assert (slow.op, slow.calls) == ("aten::neg", 1.0)
    assert slow.ms == pytest.approx(0.2)


def test_a_slow_op_during_which_the_gpu_runs_dry_by_chance_is_no_wait() -> None:
    report = with_neg(lambda gpu: gpu.host(5e-3))
    assert report.rows == []
    assert report.slow[0].ms == pytest.approx(5.0)


def test_a_slow_op_on_an_idle_gpu_is_no_wait() -> None:
    report = with_neg(lambda gpu: gpu.host(500e-6), ops_before=0)
    assert report.rows == []
    assert report.slow[0].op == "aten::neg"


def test_a_slow_op_that_ends_with_the_gpu_now_and_then_is_no_wait() -> None:
    """One call in four returns just when the GPU is done, the others before."""
    drains = iter([False, False, True, False, False, False])

    def neg(gpu: FakeGpu) -> None:
        if next(drains):
            gpu.drain()
        gpu.host(200e-6 if gpu.done > gpu.time else 10e-6)

    report = with_neg(neg)
    assert report.rows == []
    assert (report.slow[0].op, report.slow[0].calls) == ("aten::neg", 1.0)


@pytest.mark.parametrize("stalls", [1, 2, 3])
def test_one_call_that_met_a_busy_gpu_is_no_evidence(stalls: int) -> None:
    """In a loop that the host bounds the GPU is idle when an op begins, but for a stall of the machine."""
    gpu = FakeGpu()
    x = torch.ones(3)
    card = Behaves(gpu, FakeGpu.drain)
    with card, find_syncs(warmup=1, steps=4, gpu=gpu) as report:
        for index in range(6):
            card.default = 1e-3 if 1 <= index <= stalls else 1e-6
            x.exp()
            x.neg()
            step()
    assert [(row.op, row.calls) for row in report.rows] == ([("aten::neg", stalls / 4)] if stalls > 1 else [])
    assert [op.op for op in report.slow] == ([] if stalls > 1 else ["aten::neg"])


def test_a_wait_of_a_few_microseconds_is_no_row() -> None:
    def waits(gpu: FakeGpu) -> None:
        gpu.drain()

    assert with_neg(waits, ops_before=0).rows == []


def test_an_allocation_is_told_from_a_slow_op() -> None:
    def allocates(gpu: FakeGpu) -> None:
        gpu.host(300e-6)
        gpu.allocated += 1

    (row,) = with_neg(allocates).rows
    assert (row.kind, row.calls) == ("allocator", 1.0)


def test_a_read_counts_even_on_an_idle_gpu() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        x = torch.ones(3)
        for _ in range(4):
            total = x.sum()
            total.item()
            gpu.host(1.0)
            total.item()
            step()
    assert [(row.kind, row.calls) for row in report.rows] == [("scalar read", 1.0)] * 2
    assert min(row.blocked_ms for row in report.rows) == pytest.approx(0.015)


def test_costs_are_those_of_leaving_a_wait_out() -> None:
    """Idle and savings against the simulated clock: a step with both waits, with either, and with none."""
    work = {"aten::exp": 200e-6}

    def loop(steps: int, waits: str) -> None:
        x, total = torch.ones(3), torch.ones(())
        for _ in range(steps):
            for _ in range(20):
                x.exp()
            x.neg()  # behind the long ones, where its own time can be measured
            if "a" in waits:
                total.item()
            for _ in range(60):
                x.neg()
            if "b" in waits:
                total.item()
            for _ in range(10):
                x.neg()
            step()

    def clock(waits: str) -> float:
        with fake_card(work, default=4e-6) as gpu:
            loop(50, waits)
            return (max(gpu.time, gpu.done) - 100.0) * 1e3 / 50

    with fake_card(work, default=4e-6) as gpu, find_syncs(warmup=2, steps=20, gpu=gpu) as report:
        loop(30, "ab")
    a, b = sorted(report.rows, key=lambda row: row.line)
    both, none = clock("ab"), clock("")
    assert both - none > 0.3  # so that there is something to tell
    assert report.step_ms == pytest.approx(both, rel=1e-3)
    for row, alone, other in ((a, "a", "b"), (b, "b", "a")):
        assert row.saves_ms == pytest.approx(both - clock(other), abs=0.1 * (both - none))
        assert row.idle_ms == pytest.approx(clock(alone) - none, abs=0.1 * (both - none))


def fixed(seconds: float) -> Any:
    """A call that takes the host so long, whatever the GPU does."""
    return lambda gpu: gpu.host(seconds)


def after_work(seconds: float, rest: float = 0.0) -> Any:
    """A call that waits until the GPU has done its backlog and so much for the call itself."""

    def call(gpu: FakeGpu) -> None:
        gpu.work(seconds)
        gpu.drain()
        gpu.host(rest)

    return call


@pytest.mark.parametrize(
    ("hint", "call", "stays"),
    [
        (Hint(Kind.SCALAR), after_work(0.0, 300e-6), 0.0),
        (Hint(Kind.COPY), after_work(300e-6), 300e-6),
        (Hint(Kind.SHAPE), after_work(300e-6), 300e-6),
        (Hint(Kind.EXPLICIT, "", Counts.IF_SLOW), fixed(300e-6), 0.0),  # an event behind which the GPU has work
        (Hint(Kind.ALLOCATOR), fixed(2e-3), 0.0),
        (Hint(Kind.ALLOCATOR, "empty_cache"), after_work(0.0, 300e-6), 0.0),
    ],
    ids=["read", "copy", "shape", "event", "allocation", "empty_cache"],
)
def test_costs_of_each_kind(hint: Hint, call: Any, stays: float) -> None:
    """As above, next to a read: what of a call stays when it does not wait, and whether it waits for the backlog."""

    def without(gpu: FakeGpu) -> None:
        gpu.work(stays)
        gpu.host(LAUNCH)

    kept = explicit._wrapped(call, "call", hint)

    def loop(gpu: FakeGpu, steps: int, waits: str) -> None:
        x, total = torch.ones(3), torch.ones(())
        for _ in range(steps):
            for _ in range(20):
                x.exp()
            x.neg()
            if "a" in waits:
                total.item()
            for _ in range(5):
                x.exp()
            (kept if "b" in waits else without)(gpu)
            for _ in range(60):
                x.neg()
            step()

    work = {"aten::exp": 200e-6}

    def clock(waits: str) -> float:
        with fake_card(work, default=4e-6) as gpu:
            loop(gpu, 25, waits)
            return (max(gpu.time, gpu.done) - 100.0) * 1e3 / 25

    with fake_card(work, default=4e-6) as gpu, find_syncs(warmup=2, steps=10, gpu=gpu) as report:
        loop(gpu, 13, "ab")
    a, b = sorted(report.rows, key=lambda row: row.line)
    assert (a.op, b.op, b.calls) == ("aten::_local_scalar_dense", "call", 1.0)
    assert report.model_error == pytest.approx(0.0, abs=0.01)
    for row, alone, other in ((a, "a", "b"), (b, "b", "a")):
        assert row.saves_ms == pytest.approx(clock("ab") - clock(other), abs=0.06)
        assert row.idle_ms == pytest.approx(clock(alone) - clock(""), abs=0.06)


@pytest.mark.parametrize(("waits", "is_one"), [(20, True), (18, True), (17, False), (10, False), (0, False)])
def test_nine_of_ten_calls_that_met_a_busy_gpu_must_wait(waits: int, is_one: bool) -> None:
    """What met an idle GPU says nothing, and calls that are not alike speak for themselves."""
    like, other = ("op", 4, True), ("op", 5, True)
    waited = Timed(0.0, 1e-3, 0.99e-3, 1e-3, None, like)
    returned = Timed(0.0, 1e-5, 1e-3, 1e-3, None, like)
    idle = Timed(0.0, 1e-3, 0.0, 1e-3, None, like)
    of_another = Timed(0.0, 1e-5, 1e-3, 1e-3, None, other)
    timed = [waited] * waits + [returned] * (20 - waits) + [idle, of_another] * 20
    assert ops_that_wait(timed, 50e-6) == ({like} if is_one else set())


def test_forward_and_backward_lines() -> None:
    """A node of backward is placed where it was made; a hook and a Function's backward at their own lines."""

    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            lines["function"] = line() + 1
            grad.sum().item()
            return grad * 2

    def hook(grad: Tensor) -> None:
        lines["hook"] = line() + 1
        grad.max().item()

    lines: dict[str, int] = {}
    x = torch.arange(6.0, requires_grad=True)
    mask = torch.arange(6) % 2 == 0

    class Masks(Card):
        """index_put_ with a mask waits as well, in the backward of the index."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "index_put" in str(func):
                self.gpu.drain()
                self.gpu.host(20e-6)
            return super().__torch_dispatch__(func, types, args, kwargs)

    gpu = FakeGpu()
    with Masks(gpu), find_syncs(warmup=1, steps=3, gpu=gpu) as report:
        for _ in range(5):
            y = x * 1
            y.register_hook(hook)
            lines["index"] = line() + 1
            z = y[mask]
            z = Peeks.apply(z)
            lines["call"] = line() + 1
            z.sum().backward()
            step()
    by_line = {(row.line, row.node) for row in report.rows}
    assert by_line == {
        (lines["index"], None),
        (lines["index"], "IndexBackward0"),
        (lines["hook"], "MulBackward0"),
        (lines["function"], "PeeksBackward"),
    }
    backward = next(row for row in report.rows if row.node == "IndexBackward0")
    assert backward.backward == f"{backward.file}:{lines['call']}"


def test_names_of_ops_and_of_their_nodes_agree() -> None:
    from syncfree_ext.syncs import timer

    assert timer._bare("aten::_to_copy") == timer._bare("ToCopyBackward0")
    assert timer._bare("aten::mul_") == timer._bare("MulBackward0")
    assert timer._bare("aten::copy_") == timer._bare("CopyBackwards")
    assert timer._bare("aten::native_layer_norm") == timer._bare("NativeLayerNormBackward0")
    assert timer._bare("aten::mm") != timer._bare("AddmmBackward0")


def test_explicit_calls_and_what_runs_inside_them() -> None:
    """An op inside an explicit wait belongs to it; a wait that returns at once is no row."""

    class Fence:
        def wait(self, seconds: float) -> None:
            gpu.host(seconds)
            if seconds > 1e-6:
                torch.ones(2).sum().item()

    hint = Hint(Kind.EXPLICIT, "", Counts.IF_SLOW)
    wait = explicit._wrapped(Fence.wait, "Fence.wait", hint)
    with fake_card() as gpu, find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            wait(Fence(), 300e-6)
            wait(Fence(), 1e-6)
            step()
    (row,) = report.rows
    assert (row.kind, row.op, row.calls, row.source) == ("explicit", "Fence.wait", 1.0, "wait(Fence(), 300e-6)")


def test_explicit_calls_of_another_thread_are_not_seen() -> None:
    hint = Hint(Kind.EXPLICIT)
    wait = explicit._wrapped(lambda: None, "wait", hint)
    with fake_card() as gpu, find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
            gpu.host(1e-3)
            step()
    assert report.rows == []


def test_explicit_calls_are_wrapped_while_someone_listens() -> None:
    names = [(owner, name) for owner, name, _, _ in explicit._targets()]
    names += [(torch.cuda.Event, "record"), (torch.cuda.Event, "wait")]
    names += [(graph, "replay") for graph in explicit._graphs()]
    assert torch.cuda.CUDAGraph in explicit._graphs()
    originals = [(owner, name, vars(owner).get(name)) for owner, name in names]
    with fake_card() as gpu, find_syncs(warmup=0, steps=1, gpu=gpu):
        assert all(vars(owner).get(name) is not own for owner, name, own in originals)
        torch.ones(1)
    assert all(vars(owner).get(name) is own for owner, name, own in originals)


def test_streams_and_their_links_are_told_apart() -> None:
    """An op comes after its own stream, after an event that this waits for, and a copy after those on its engine."""
    gpu, event = FakeGpu(), object()
    entries = [
        Entry(0.0, 1.0, None, 10.0, None),
        Entry(1.0, 1.0, None, None, None, link=(event, False)),
        Entry(1.0, 2.0, None, 5.0, None, stream=1, engine="to host"),
        Entry(2.0, 3.0, None, 30.0, None, stream=2, engine="to host"),
        Entry(3.0, 3.0, None, None, None, stream=1, link=(event, True)),
        Entry(3.0, 4.0, None, 12.0, None, stream=1),
        Entry(4.0, 5.0, None, 11.0, None),
        Entry(5.0, 5.0, None, None, None, stream=3, link=(object(), True)),  # an event of before
        Entry(5.0, 6.0, None, 6.5, None, stream=3),
    ]
    timed = resolve_events(entries, gpu)
    assert [t.before for t in timed] == [0.0, 10.0, 0.0, 5.0, 10.0, 10.0, 10.0, 0.0, 0.0]
    assert [t.upper for t in timed if t.link is None] == [10.0, 4.0, 25.0, 2.0, 1.0, 1.5]


def test_links_are_noted_while_the_timer_runs() -> None:
    gpu = FakeGpu()
    timer = Timer(gpu, Frames())
    event, stream = object(), SimpleNamespace(stream_id=5)
    recorded: list[tuple[Any, Any]] = []

    def original(event: Any, stream: Any = None) -> None:
        recorded.append((event, stream))

    with explicit.listening(timer.explicit, timer.link), explicit.listening(lambda *_: nullcontext()):
        explicit._linked(original, False)(event)
        timer.start()
        explicit._linked(original, False)(event)
        explicit._linked(original, True)(event, stream)
        with timer.untimed():
            explicit._linked(original, True)(event, stream)
        gpu.captures = True
        explicit._linked(original, True)(event)
    assert len(recorded) == 5
    assert [(entry.stream, entry.link) for entry in timer.entries] == [(0, (event, False)), (5, (event, True))]


def test_a_line_of_another_op_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of nodes count from zero in each thread: a line is taken only if its op fits the node."""
    timer = Timer(FakeGpu(), Frames())
    thread, mark = timer._thread(), Frames().innermost(sys._getframe())
    thread.lines = {5: (torch.ops.aten.cos.default, mark), 6: (torch.ops.aten.sin.default, mark)}
    found = []
    for number in (5, 6, 7):
        monkeypatch.setattr(internals, "current_node", lambda: SimpleNamespace(name=lambda: "SinBackward0"))
        monkeypatch.setattr(internals, "node_sequence", lambda _, number=number: number)
        call = Call("aten::mul", Kind.INSIDE, "", Counts.IF_WAITED, Frames().capture(sys._getframe()))
        timer._place_in_backward(call, thread)
        found.append(call.forward)
    assert found == [None, mark, None]


def test_an_op_that_is_gone_is_no_other() -> None:
    """Ops are known by their identity, which a later one could have if they were not kept."""
    timer = Timer(FakeGpu(), Frames())
    with timer:
        for index in range(50):
            library = torch.library.Library(f"syncfree_gone{index}", "DEF")
            library.define("f(Tensor x) -> Tensor")
            library.impl("f", lambda x, index=index: x + index, "CPU")
            op = getattr(torch.ops, f"syncfree_gone{index}").f.default
            assert int(op(torch.zeros(()))) == index
            library._destroy()
            del op, library
            gc.collect()
    kept = [known.func for known in timer._known.values()]
    assert len({id(op) for op in kept}) == len(kept) >= 50
    assert all(known == id(op) for known, op in zip(timer._known, kept, strict=True))


def test_ops_are_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, called = Timer(FakeGpu(), Frames()), []
    monkeypatch.setattr(internals, "call_of", lambda op: called.append(op) or op)
    with timer:
        torch.ones(2).exp().exp()
    assert called.count(torch.ops.aten.exp.default) == 1


def test_a_loop_that_copies_beside_its_work() -> None:
    """Through the whole finder: the copy of another stream is no work of the first, and hides no wait."""
    gpu, x = TwoStreams(), torch.ones(4)
    with Card(gpu, {"aten::mul": 20e-3}), find_syncs(warmup=1, steps=4, gpu=gpu) as report:
        for _ in range(6):
            for _ in range(100):
                x + 1
            gpu.current = 1
            x * 2
            gpu.current = 0
            (x + 1).sum().item()
            step()
    (row,) = report.rows
    assert report.step_ms < 5
    assert report.replay_ms == pytest.approx(report.step_ms, rel=0.02)
    assert abs(report.model_error) < 0.02
    assert row.saves_ms < report.step_ms


def test_captured_streams_are_left_alone() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            gpu.captures = True
            torch.ones(2).sum().item()
            gpu.captures = False
            step()
    assert report.rows == []


def test_library_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's line is named behind the user's; with user= it is the user's."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    package = tmp_path / "site-packages" / "somelib"
    package.mkdir(parents=True)
    (package / "lib.py").write_text("def read(x):\n    return x.sum().item()\n", encoding="utf-8")
    code = compile((package / "lib.py").read_text(encoding="utf-8"), str(package / "lib.py"), "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)

    def report(**options: Any) -> Report:
        with fake_card() as gpu, find_syncs(warmup=1, steps=1, gpu=gpu, **options) as found:
            for _ in range(3):
                namespace["read"](torch.ones(2))
                step()
        return found

    (row,) = report().rows
    assert Path(row.file).name == HERE
    assert (row.source, row.via) == ('namespace["read"](torch.ones(2))', f"somelib{'/'}lib.py:2")
    (row,) = report(user=[str(package)]).rows
    assert (row.where, row.via) == ("somelib/lib.py:2", None)


def test_other_threads_are_not_seen() -> None:
    with fake_card() as gpu, find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            thread = threading.Thread(target=lambda: torch.ones(2).sum().item())
            thread.start()
            thread.join()
            gpu.host(1e-3)
            step()
    assert report.rows == []


def test_compiled_code_stays_compiled() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    gpu = FakeGpu()
    with find_syncs(warmup=1, steps=1, gpu=gpu):
        for _ in range(3):
            function(torch.ones(2))
            step()
    assert len(graphs) == 1


class Costly(FakeGpu):
    """A GPU whose events, and whose count of allocations, take their time of the host."""

    def record(self) -> float:
        event = super().record()
        self.host(35e-6)
        return event

    def allocations(self) -> int:
        self.host(400e-6)
        return super().allocations()


class Early(Card):
    """A card on which an op hands over its work first, so that an idle GPU does not hide when."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in ("aten::exp", "aten::neg"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.gpu.work(150e-6 if name == "aten::neg" else 90e-6)
        self.gpu.host(60e-6 if name == "aten::neg" else 10e-6)  # one is looked at, one is of no interest
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ops", [3, 40])
def test_what_the_timer_takes_is_left_out_of_the_costs(ops: int) -> None:
    """At each op as much as it was: some are looked at more closely than others."""

    def costs(gpu: FakeGpu) -> Report:
        x = torch.ones(3)
        with Early(gpu), find_syncs(warmup=1, steps=4, gpu=gpu) as report:
            for _ in range(6):
                for _ in range(ops):
                    x.exp()
                    x.neg()
                y = x.sum()
                for _ in range(ops):
                    y.item()
                for _ in range(ops):
                    x.exp()
                step()
        return report

    free, costly = costs(FakeGpu()), costs(Costly())
    assert free.own_ms == 0.0
    events = 3 * ops + 1 + 2 * ops  # two at a read
    assert costly.own_ms == pytest.approx(events * 35e-3 + ops * 0.4, rel=0.01)
    assert costly.step_ms > 1.5 * free.step_ms  # the GPU hides a part
    assert costly.replay_ms == pytest.approx(free.replay_ms, rel=0.02)
    (plain,), (timed,) = free.rows, costly.rows
    assert timed.saves_ms == pytest.approx(plain.saves_ms, rel=0.05, abs=0.01)
    assert timed.idle_ms == pytest.approx(plain.idle_ms, rel=0.05, abs=0.01)


def test_explicit_waits_say_what_the_timer_took() -> None:
    gpu = Costly()
    wait = explicit._wrapped(lambda: gpu.host(300e-6), "wait", Hint(Kind.EXPLICIT))
    with find_syncs(warmup=1, steps=2, gpu=gpu) as report:
        for _ in range(4):
            wait()
            step()
    assert [(row.op, row.calls, row.blocked_ms) for row in report.rows] == [("wait", 1.0, pytest.approx(0.3))]
    assert report.own_ms == pytest.approx(0.07)  # an event before, and one after
    assert report.replay_ms == pytest.approx(0.3)


def test_the_timer_knows_what_it_takes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host, at an op, beside what the entry says; and it leaves nothing behind."""

    class Clocked(FakeGpu):
        def capturing(self) -> bool:
            self.host(7e-6)  # before the entry begins
            return False

        def record(self) -> float:
            self.host(50e-6)
            return 0.0

    gpu = Clocked()
    with monkeypatch.context() as patch:
        patch.setattr("syncfree_ext.syncs.timer.time", SimpleNamespace(perf_counter=gpu.now))
        assert own_time(gpu, Frames()) == pytest.approx(7e-6)
    assert 0 <= own_time(FakeGpu(), Frames()) < 5e-3
    assert internals.top_mode() is None
