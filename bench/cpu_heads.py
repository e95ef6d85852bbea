"""Linear cross-entropy heads on the CPU, side by side: time, memory above the inputs, and exactness.

    python bench/cpu_heads.py --shapes 2048x512x32000 --dtype float32,bfloat16 --threads 2 --json cpu.json

Every head is first checked against float64 on the same rounded inputs; one that is wrong ends the run. Then the heads
take turns, a forward and a backward each, for `--rounds` rounds: a busy machine slows them all, so read the ratios. The
first turn of each is not counted. Memory is taken in a fresh process for each head: the highest resident set during the
second call, less the resident set before it (inputs, libraries and their pools are in both), gradients included.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Head = Callable[[Tensor, Tensor, Tensor], Tensor]

# Relative L2 error of a gradient, and of the loss, beyond which a head is wrong rather than coarse.
WRONG = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WRONG}


def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The plain head; its softmax in float32, as training code has it."""
    logits = F.linear(x, w)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)


def ours(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    from syncfree_ext import linear_cross_entropy

    return linear_cross_entropy(x, w, target)  # type: ignore[return-value]


def available() -> dict[str, Head]:
    heads: dict[str, Head] = {"eager": eager}
    if hasattr(F, "linear_cross_entropy"):
        heads["torch"] = F.linear_cross_entropy
    if find_spec("syncfree_ext") is not None:
        heads["syncfree"] = ours
    return heads


def make_inputs(rows: int, hidden: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random data of unit logits; the same in every process."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    w = (torch.randn(classes, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    return x.requires_grad_(), w.requires_grad_(), target


def step(head: Head, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """A forward and a backward; leaves the gradients in x and w."""
    x.grad = w.grad = None
    loss = head(x, w, target)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def exact(x: Tensor, w: Tensor, target: Tensor, block: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dX and dW of the mean in float64, a block of rows at a time."""
    x64, w64 = x.detach().double(), w.detach().double()
    loss, dx, dw = x64.new_zeros(()), torch.empty_like(x64), torch.zeros_like(w64)
    for first in range(0, len(x64), block):
        rows = slice(first, first + block)
        log_p = (x64[rows] @ w64.T).log_softmax(1)
        loss -= log_p.gather(1, target[rows, None]).sum() / len(x64)
        g = log_p.exp_()
        g[torch.arange(len(g)), target[rows]] -= 1
        g /= len(x64)
        dx[rows] = g @ w64
        dw.addmm_(g.T, x64[rows])
    return loss, dx, dw


def relative(value: Tensor | None, reference: Tensor) -> float:
    """Relative L2 error; inf where there is no value or it holds a NaN."""
    if value is None:
        return math.inf
    error = float((value.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else math.inf


def errors(head: Head, inputs: tuple[Tensor, Tensor, Tensor], truth: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    loss = step(head, *inputs)
    found = (loss, inputs[0].grad, inputs[1].grad)
    return {name: relative(value, ref) for name, value, ref in zip(("loss", "dx", "dw"), found, truth, strict=True)}


def resident(field: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes, where the system tells."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def memory_of(head: Head, rows: int, hidden: int, classes: int, dtype: torch.dtype) -> int:
    """Bytes at the peak of a call above what was resident before it, in this process."""
    inputs = make_inputs(rows, hidden, classes, dtype)
    small = make_inputs(min(rows, 64), hidden, min(classes, 512), dtype)
    step(head, *small)  # loads libraries and starts their threads
    del small
    gc.collect()
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    except OSError:
        before = None
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step(head, *inputs)
    peak = resident("VmHWM")
    if before is not None and peak is not None:
        return peak - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start


def measure_memory(name: str, shape: tuple[int, int, int], dtype: str, threads: int) -> int:
    """`memory_of` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--shapes", "x".join(map(str, shape)), "--dtype", dtype]
    command += ["--threads", str(threads), "--memory-of", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def measure_time(heads: dict[str, Head], inputs: tuple[Tensor, Tensor, Tensor], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each counted turn."""
    turns: dict[str, list[float]] = {name: [] for name in heads}
    for counted in [False] + [True] * rounds:
        for name, head in heads.items():
            start = time.perf_counter()
            step(head, *inputs)
            elapsed = (time.perf_counter() - start) * 1e3
            if counted:
                turns[name].append(elapsed)
    return turns


def compare(shape: tuple[int, int, int], dtype: str, heads: dict[str, Head], rounds: int, threads: int) -> list[Any]:
    """Checks, times and weighs every head; prints a table and returns its rows.

    Raises:
        SystemExit: a head's loss or gradient is wrong.
    """
    inputs = make_inputs(*shape, DTYPES[dtype])
    truth = exact(*inputs)
    error = {name: errors(head, inputs, truth) for name, head in heads.items()}
    for name, found in error.items():
        if max(found.values()) > WRONG[DTYPES[dtype]]:
            raise SystemExit(
                f"cpu_heads: {name} is wrong at {shape} in {dtype}, nothing was timed: relative L2 {found}"
            )
    del truth
    turns = measure_time(heads, inputs, rounds)
    memory = {name: measure_memory(name, shape, dtype, threads) for name in heads}
    base = statistics.median(turns["eager"])
    print(f"\n{'x'.join(map(str, shape))} {dtype}, {threads} threads, {rounds} rounds, torch {torch.__version__}")
    print(f"{'head':10} {'ms':>8} {'lowest':>8} {'highest':>8} {'ratio':>6} {'MiB':>7} {'dX':>9} {'dW':>9} {'loss':>9}")
    rows = []
    for name, times in turns.items():
        ms = statistics.median(times)
        found = error[name]
        print(
            f"{name:10} {ms:8.1f} {min(times):8.1f} {max(times):8.1f} {ms / base:6.2f} {memory[name] / 2**20:7.0f} "
            f"{found['dx']:9.2e} {found['dw']:9.2e} {found['loss']:9.2e}"
        )
        rows.append(
            {
                "shape": shape,
                "dtype": dtype,
                "threads": threads,
                "head": name,
                "ms": ms,
                "turns_ms": times,
                "ratio_to_eager": ms / base,
                "peak_bytes_above_inputs": memory[name],
                "relative_l2": found,
                "torch": torch.__version__,
            }
        )
    return rows


def parse_shape(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"a shape is ROWSxHIDDENxCLASSES, got {text!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def parse_dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    heads = available()
    parser.add_argument("--shapes", default="2048x512x32000", help="ROWSxHIDDENxCLASSES, with commas between")
    parser.add_argument("--dtype", default="float32,bfloat16", help=f"of {', '.join(DTYPES)}, with commas between")
    parser.add_argument("--heads", default=",".join(heads), help="which to compare; eager is always in")
    parser.add_argument("--rounds", type=int, default=7, help="counted turns of each head")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="the file to write the rows to")
    parser.add_argument("--memory-of", choices=list(heads), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be >= 1")
    try:
        shapes = [parse_shape(text) for text in args.shapes.split(",")]
        dtypes = [parse_dtype(text) for text in args.dtype.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(memory_of(heads[args.memory_of], *shapes[0], DTYPES[dtypes[0]]))
        return
    wanted = set(args.heads.split(",")) | {"eager"}
    if not wanted <= set(heads):
        parser.error(f"--heads: {', '.join(sorted(wanted - set(heads)))} not found; there is {', '.join(heads)}")
    chosen = {name: head for name, head in heads.items() if name in wanted}
    rows = [row for shape in shapes for d in dtypes for row in compare(shape, d, chosen, args.rounds, args.threads)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
