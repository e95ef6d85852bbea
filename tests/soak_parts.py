"""The parts of tools/soak.py: what a process does to a library for days, in minutes.

Each part takes a device and how much of it to do, raises AssertionError for what must not be, and returns numbers.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import queue
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import syncfree_ext
from tolerances import assert_equal

Numbers = dict[str, Any]
MIB = 2**20


def stream_of(device: torch.device) -> Any:
    """A context in which work goes to a stream of its own; on the CPU there is one order of work for each thread."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------------------------------------- threads

# What the threads call at once: kernels of all paths, with and without chunks, of several shapes.
PROBLEMS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16, "rows": 300, "h": 64, "v": 1000, "chunk_rows": 128},
    {"dtype": torch.bfloat16, "rows": 257, "h": 72, "v": 515, "reduction": "none"},
    {"dtype": torch.float32, "rows": 100, "h": 33, "v": 4097, "softcap": 20.0, "label_smoothing": 0.1},
    {"dtype": torch.float16, "rows": 200, "h": 64, "v": 700, "z_loss_weight": 1e-3, "shift": 1},
)
# Of many allocations that are larger than the blocks that an allocator has at hand.
LARGE: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16, "rows": 4096, "h": 1024, "v": 16384, "chunk_rows": 1024},
    {"dtype": torch.bfloat16, "rows": 4096, "h": 1024, "v": 16384, "softcap": 30.0, "reduction": "none"},
    {"dtype": torch.float16, "rows": 4100, "h": 1000, "v": 16001, "chunk_rows": 1024, "label_smoothing": 0.1},
    {"dtype": torch.float32, "rows": 2048, "h": 512, "v": 16384, "chunk_rows": 512},
)


class Problem:
    """A call with fixed inputs, whose results are the same bits each time."""

    def __init__(
        self, device: torch.device, number: int, seed: int, table: tuple[dict[str, Any], ...] = PROBLEMS
    ) -> None:
        options = dict(table[number % len(table)])
        rows, h, v, dtype = (options.pop(name) for name in ("rows", "h", "v", "dtype"))
        rng = torch.Generator().manual_seed(1000 * seed + number)
        self.options = options
        self.x = torch.randn(rows, h, generator=rng).to(device, dtype)
        self.w = (torch.randn(v, h, generator=rng) / h**0.5).to(device, dtype)
        target = torch.randint(0, v, (rows,), generator=rng)
        target[torch.rand(rows, generator=rng) < 0.4] = -100
        self.target = target.to(device)
        self.mask = torch.rand(5, 400, generator=rng).to(device) < 0.5

    def run(self, backward: bool = True) -> list[Tensor]:
        x, w = (t.detach().requires_grad_(backward) for t in (self.x, self.w))
        out = syncfree_ext.linear_cross_entropy(x, w, self.target, return_logsumexp=True, **self.options)
        assert isinstance(out, syncfree_ext.LinearCrossEntropyOutput)
        assert out.logsumexp is not None
        logits = (self.x[:, :50].float() @ self.w[:40, :50].float().T).requires_grad_(backward)
        small = syncfree_ext.cross_entropy(logits, self.target.clamp(max=39))
        chosen = syncfree_ext.masked_indices(self.mask, 64, order="random", seed=5)
        results = [out.loss.detach(), out.logsumexp, small.detach(), *chosen]
        if backward:
            results += torch.autograd.grad(out.loss, [x, w], torch.full_like(out.loss.detach(), 0.5))
            results += torch.autograd.grad(small, logits)
        return results


def same(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_equal(a, b, f"{what}, output {i}")


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread of its own, all starting at once; the first error is raised."""
    start = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            start.wait()
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def threads(device: torch.device, seconds: float, count: int = 8, seed: int = 0) -> Numbers:
    """Threads with streams of their own, each with its problem, against what one thread gave; one ring for all."""
    problems = [Problem(device, i, seed) for i in range(count)]
    expected = [problem.run() for problem in problems]
    synchronize(device)
    ring = syncfree_ext.AsyncScalars(device, {"value": torch.float64, "thread": torch.int64}, depth=4)
    deadline = time.monotonic() + seconds
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def job(i: int) -> Callable[[], int]:
        def run() -> int:
            calls = 0
            with stream_of(device):
                while time.monotonic() < deadline or calls == 0:
                    got = problems[i].run()
                    ring.put((i, calls), {"value": got[0].mean(), "thread": i})
                    if device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()
                    same(got, expected[i], f"thread {i}, call {calls}")
                    for delivery in ring.poll():
                        arrived.put(delivery)
                    calls += 1
            return calls

        return run

    calls = in_threads([job(i) for i in range(count)])
    with ring:
        pass
    for delivery in ring.poll():
        arrived.put(delivery)
    means = [float(e[0].double().mean().float()) for e in expected]
    seen: dict[int, set[int]] = {i: set() for i in range(count)}
    while not arrived.empty():
        (i, call), values = arrived.get()
        assert values["thread"] == i
        assert abs(values["value"] - means[i]) <= 1e-5 * abs(means[i]), "a value of another thread"
        assert call not in seen[i], "a value came twice"
        seen[i].add(call)
    assert [len(seen[i]) for i in range(count)] == calls, "values were lost"
    return {"threads": count, "calls": sum(calls)}


class Model(nn.Module):
    """A few layers in front of the head."""

    def __init__(self, h: int, v: int, softcap: float | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(h, 2 * h), nn.Tanh(), nn.Linear(2 * h, h))
        self.head = syncfree_ext.LinearCrossEntropyHead(
            h, v, loss=syncfree_ext.FusedLinearCrossEntropyLoss(softcap=softcap)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(x), target)
        return loss


def _trained(device: torch.device, number: int, steps: int) -> list[Tensor]:
    """Weights and last loss of a model that is trained by itself."""
    rng = torch.Generator().manual_seed(number)
    h, v = (64, 1000) if number % 2 == 0 else (48, 515)
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        model = Model(h, v, None if number % 2 == 0 else 20.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(128, h, generator=rng), torch.randint(0, v, (128,), generator=rng)) for _ in range(4)]
    inputs = [(x.to(device), target.to(device)) for x, target in batches]
    loss = torch.zeros(())
    with stream_of(device):
        synchronize(device)
        for step in range(steps):
            x, target = inputs[step % len(inputs)]
            loss = model(x, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return [*(p.detach() for p in model.parameters()), loss.detach()]


_SEEDING = threading.Lock()  # torch's default generator is one for all threads


def two_models(device: torch.device, steps: int) -> Numbers:
    """Two models trained at once, each in its thread and on its stream: the same bits as one after the other."""
    expected = [_trained(device, number, steps) for number in (0, 1)]
    got = in_threads([lambda number=number: _trained(device, number, steps) for number in (0, 1)])  # type: ignore[misc]
    for number in (0, 1):
        same(got[number], expected[number], f"model {number}")
        assert all(bool(t.isfinite().all()) for t in got[number])
    return {"steps": 2 * steps}


# -------------------------------------------------------------------------------------------------------- out of memory


def out_of_memory(device: torch.device, budgets: int = 24) -> Numbers:
    """Memory that runs out at one allocation of a call after another; the call after it gives the same bits as ever."""
    if device.type != "cuda":
        return {"skipped": "there is no allocator on the CPU whose limit could be set"}
    total = torch.cuda.get_device_properties(device).total_memory
    failures = 0
    for number in range(len(LARGE)):
        problem = Problem(device, number, 7, LARGE)
        expected = problem.run()
        taken = _freed(device)
        torch.cuda.reset_peak_memory_stats(device)
        problem.run()
        synchronize(device)
        needed = torch.cuda.max_memory_reserved(device) - taken
        for budget in range(budgets):
            taken = _freed(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.set_per_process_memory_fraction((taken + needed * budget / budgets) / total, device)
            try:
                problem.run()
            except torch.OutOfMemoryError:
                failures += 1
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, device)
            kept = _kept(device, before)
            assert kept <= 0, f"{kept} bytes were kept by a call that ran out of memory; alive are {_alive(device)}"
            same(problem.run(), expected, f"problem {number} after running out of memory")
        del problem, expected
    assert failures >= len(LARGE) * budgets // 2, f"memory ran out {failures} times only"
    return {"ran_out": failures, "calls": budgets * len(LARGE)}


def _kept(device: torch.device, before: int) -> int:
    """What has not come back of the memory that was there before.

    An error of backward is handed to the caller before the thread of autograd that met it lets go of its node, which
    takes that thread the longer the busier the machine is.
    """
    deadline = time.monotonic() + 10
    while True:
        _freed(device)
        kept = torch.cuda.memory_allocated(device) - before
        if kept <= 0 or time.monotonic() > deadline:
            return kept
        time.sleep(0.05)


def _alive(device: torch.device) -> str:
    """The tensors that Python knows of, by shape and dtype."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and o.device.type == device.type]
    return ", ".join(sorted(f"{tuple(t.shape)} {t.dtype}" for t in tensors))


def _freed(device: torch.device) -> int:
    """Give back what nothing uses; the bytes that are still taken."""
    gc.collect()
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


# ------------------------------------------------------------------------------------------------------------ processes


def _child(device: str, forked: bool, results: Any) -> None:
    if forked:
        torch.set_num_threads(1)  # as DataLoader does: the threads of OpenMP do not survive a fork
    problem = Problem(torch.device(device), 0, 3)
    try:
        found = problem.run()
    except RuntimeError as error:
        if not forked or "Autograd-and-Fork" not in str(error):
            raise
        found = problem.run(backward=False)
    results.put([(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in found])


def _result_of(child: Any, results: Any, what: str) -> Any:
    """What a child puts; one that ends without is not waited for."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        alive = child.is_alive()  # asked first: it may put something and end meanwhile
        try:
            return results.get(timeout=1)
        except queue.Empty:
            assert alive, f"{what} ended with {child.exitcode} and gave nothing"
    child.kill()
    child.join()
    raise AssertionError(f"{what} gave nothing in five minutes")


def processes(device: torch.device, rounds: int) -> Numbers:
    """Children by fork (on the CPU: CUDA cannot be used after a fork) and by spawn give the bits of their parent.

    Once autograd has started threads of its own, as it does for a GPU, it refuses to run in a fork; there it is forward
    alone.
    """
    done = {"fork": 0, "spawn": 0}
    Problem(device, 0, 3).run()  # the parent has the library, its threads and its device in use
    for start, where in (("fork", torch.device("cpu")), ("spawn", device)):
        expected = {len(bits): bits for bits in (Problem(where, 0, 3).run(backward) for backward in (False, True))}
        context = multiprocessing.get_context(start)
        for _ in range(rounds if start == "fork" else max(1, rounds // 4)):
            results = context.Queue()
            child = context.Process(target=_child, args=(str(where), start == "fork", results))
            child.start()
            got = [torch.from_numpy(a) for a in _result_of(child, results, f"a child by {start}")]
            child.join(timeout=60)
            assert child.exitcode == 0, f"a child by {start} ended with {child.exitcode}"
            assert start == "fork" or len(got) == max(expected)
            for a, b in zip(got, expected[len(got)], strict=True):
                assert_equal(a, b.cpu().float() if b.dtype == torch.bfloat16 else b, f"a child by {start}")
            done[start] += 1
    return done


# ------------------------------------------------------------------------------------------------ exit with work queued

_PRELUDE = """
    import sys, threading
    import torch
    import syncfree_ext
    device = torch.device(sys.argv[1])
    cuda = device.type == "cuda"
    x = torch.randn(300, 64, device=device, requires_grad=True)
    w = torch.randn(1000, 64, device=device, requires_grad=True)
    target = torch.randint(0, 1000, (300,), device=device)
    ring = syncfree_ext.AsyncScalars(device, ["loss"], depth=64)

    def step():
        loss = syncfree_ext.linear_cross_entropy(x, w, target)
        torch.autograd.grad(loss, [x, w])
        return loss.detach()

    def busy():
        if cuda:
            torch.cuda._sleep(2_000_000_000)

    loss = step()
"""

# What is left undone when the interpreter ends. On the CPU there is less to leave.
EXITS: dict[str, str] = {
    "scalars pending": """
        busy()
        for i in range(40):
            ring.put(i, {"loss": step()})
    """,
    "graph of autograd alive": """
        kept = [syncfree_ext.linear_cross_entropy(x, w, target, reduction=r) for r in ("mean", "none")]
        busy()
    """,
    "streams busy": """
        if cuda:
            streams = [torch.cuda.Stream() for _ in range(4)]
            for stream in streams:
                with torch.cuda.stream(stream):
                    busy()
                    step()
    """,
    "captured graph with a put": """
        if cuda:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ring.put("replay", {"loss": step()})
            busy()
            for _ in range(5):
                graph.replay()
    """,
    # Not a daemon: CPython ends those in the middle of a call, at which torch by itself aborts.
    "a thread that outlives the main one": """
        def work():
            for i in range(200):
                ring.put(0, {"loss": step()})
                ring.poll()

        threading.Thread(target=work).start()
    """,
    "an exception inside of a ring": """
        class Expected(Exception):
            pass

        sys.excepthook = lambda kind, *rest: None if kind is Expected else sys.__excepthook__(kind, *rest)
        with ring:
            busy()
            ring.put(0, {"loss": step()})
            raise Expected
    """,
    "sys.exit from a with": """
        guard = syncfree_ext.NonFiniteGuard(ring)
        metrics = syncfree_ext.MetricBuffer(device, {"loss": "mean"})
        with ring:
            busy()
            metrics.add(loss=loss)
            guard.update(0, loss)
            metrics.compute_async(ring, "mean")
            sys.exit(0)
    """,
}


def exits(device: torch.device, rounds: int) -> Numbers:
    """Interpreters that end with work in flight: they end, soon, and with the status that they ought to have."""
    slowest = 0.0
    for name, body in EXITS.items():
        program = textwrap.dedent(_PRELUDE) + textwrap.dedent(body)
        for _ in range(rounds):
            start = time.monotonic()
            ended = subprocess.run(
                [sys.executable, "-c", program, str(device)], capture_output=True, text=True, timeout=300, check=False
            )
            slowest = max(slowest, time.monotonic() - start)
            expected = 1 if name == "an exception inside of a ring" else 0
            assert ended.returncode == expected, f"{name}: status {ended.returncode}\n{ended.stderr[-2000:]}"
            assert not ended.stderr.strip(), f"{name}:\n{ended.stderr[-2000:]}"
    return {"exits": rounds * len(EXITS), "slowest_seconds": round(slowest, 1)}


# ---------------------------------------------------------------------------------------------------------------- leaks


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _heap_bytes() -> int:
    """What malloc has handed out, of the main arena and of mapped blocks; 0 where the C library cannot tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resources(device: torch.device) -> dict[str, int]:
    """What a process holds."""
    gc.collect()
    synchronize(device)
    found = {
        "resident bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "heap bytes": _heap_bytes(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "Python objects": len(gc.get_objects()),
    }
    if device.type == "cuda":
        found["device bytes"] = torch.cuda.memory_allocated(device)
        found["reserved device bytes"] = torch.cuda.memory_reserved(device)
        if hasattr(torch.cuda, "host_memory_stats"):
            found["pinned bytes"] = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return found


# What may grow between two looks, however few calls lie between them: the C library keeps pages and freed blocks, each
# thread some of its own, and an allocator without a block of the right size takes another segment. A leak grows each
# time.
ALLOWED = {
    "resident bytes": 8 * MIB,
    "heap bytes": 4096,
    "Python objects": 50,
    "reserved device bytes": 32 * MIB,
}


def _everything(device: torch.device, r: random.Random) -> None:
    """A call of something, of any size; errors are made, too, and thrown away."""
    Problem(device, r.randrange(len(PROBLEMS)), r.randrange(50)).run()
    with syncfree_ext.AsyncScalars(device, ["a", "b"], depth=2) as ring:
        guard = syncfree_ext.NonFiniteGuard(ring)
        metrics = syncfree_ext.MetricBuffer(device, {"a": "mean", "b": "max"})
        for step in range(3):
            value = torch.ones((), device=device)
            ring.put(step, {"a": value, "b": step})
            guard.update(step, value)
            metrics.add(a=value, b=step)
        metrics.compute()
        ring.flush()
    x = torch.zeros(2, 3, device=device, requires_grad=True)
    try:
        syncfree_ext.linear_cross_entropy(x, torch.zeros(4, 5, device=device), torch.zeros(2, device=device).long())
    except ValueError:
        pass
    else:
        raise AssertionError("a wrong shape was taken")


def _torch_alone(device: torch.device, r: random.Random) -> None:
    """Calls like those of `_everything`, without this library."""
    rows, h, v = r.choice(((300, 64, 1000), (257, 72, 515), (100, 33, 4097)))
    x = torch.randn(rows, h).to(device).requires_grad_()
    w = torch.randn(v, h).to(device).requires_grad_()
    target = torch.randint(0, v, (rows,)).to(device)
    torch.autograd.grad(nn.functional.cross_entropy(x @ w.T, target), [x, w])[0].sum().item()


def _growth(
    device: torch.device, call: Callable[[torch.device, random.Random], None], calls: int, looks: int
) -> dict[str, list[int]]:
    """What grew from each look to the next, by name."""
    r = random.Random(0)
    seen: list[dict[str, int]] = []
    for _ in range(looks):
        for _ in range(calls // looks):
            call(device, r)
        seen.append(resources(device))
    # Until the first look the library, torch and the driver take what they keep.
    return {name: [b[name] - a[name] for a, b in itertools.pairwise(seen)] for name in seen[0]}


def leaks(device: torch.device, calls: int, looks: int = 6) -> Numbers:
    """Thousands of calls of everything: nothing grows from each look to the next, beyond what torch alone lets grow."""
    grown = _growth(device, _everything, calls, looks)
    alone = _growth(device, _torch_alone, calls, looks)
    for name, steps in grown.items():
        # Nothing but a leak changes these.
        least = sum(steps) if name in ("files", "device bytes") else min(steps)
        allowed = ALLOWED.get(name, 0) + max(0, min(alone[name]))
        assert least <= allowed, (
            f"{name} grew by {steps}, each over {calls // looks} calls (torch alone: {alone[name]})"
        )
    return {
        "calls": calls,
        **{name: sum(steps) for name, steps in grown.items()},
        "heap bytes of torch alone": sum(alone["heap bytes"]),
    }
