#!/usr/bin/env python3
"""Trains a small language model twice, with the fused loss head and with the plain one, and compares the two runs.

The text is the source of the Python standard library, which every machine has; a BPE vocabulary is learnt from it. The
model is a decoder-only transformer with tied embeddings. Both runs start from the same seed and see the same batches,
so their loss curves differ by rounding alone. In the fused run the host never waits for the GPU: batches are drawn on
the device; loss and accuracy come through AsyncScalars, their means over ten steps through a MetricBuffer; and a
NonFiniteGuard looks for NaN and infinity.

    python examples/train_lm.py --help
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from comparison import Run, draw, table
from stdlib_text import Batches, load_text
from sync_count import counted_syncs
from torch import Tensor, nn

import syncfree_ext

IGNORE = -100
# Steps left out of the timing: allocator growth, library handles, compilation.
WARM_UP = 5
# Steps whose mean the progress bar shows.
LOG_INTERVAL = 10
# How many steps the host may be ahead of the GPU.
RUN_AHEAD = 4
# Standard deviation of the embedding's first weights.
INIT = 0.05


@dataclass(frozen=True)
class Size:
    """Sizes of a model, its batch and its training; `text` is the most megabytes of source that are read."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    text: float
    steps: int
    rate: float


SIZES = {
    "tiny": Size(2, 128, 4, 128, 8, 16384, 4.0, 120, 4e-3),
    "small": Size(6, 512, 8, 512, 32, 32768, 32.0, 400, 1.5e-3),
    "base": Size(12, 1024, 16, 1024, 16, 49152, 32.0, 600, 6e-4),
}
MEMORY_SOURCE = {
    "cpu": "by the CPU allocator's records in torch.profiler",
    "cuda": "by torch.cuda.max_memory_allocated",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """What both runs have in common."""

    size: Size
    device: torch.device
    dtype: torch.dtype
    compile: bool
    ignored: float
    seed: int

    def autocast(self) -> torch.autocast:
        """The precision of forward; float32 leaves it alone."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def batches(self, tokens: Tensor) -> Batches:
        """The same batches at each call."""
        size = self.size
        return Batches(
            tokens, rows=size.batch, context=size.context, ignored=self.ignored, ignore_index=IGNORE, seed=self.seed
        )


# --------------------------------------------------------------------------------------------------------------- model

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fused_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy from this package: the logits are never written as a whole."""
    out = syncfree_ext.linear_cross_entropy(hidden, weight, targets, return_token_accuracy=True)
    assert isinstance(out, syncfree_ext.LinearCrossEntropyOutput)
    assert out.token_accuracy is not None
    return out.loss, out.token_accuracy


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy through the full logits."""
    logits = F.linear(hidden, weight)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    valid = targets != IGNORE
    accuracy = ((logits.detach().argmax(-1) == targets) & valid).sum() / valid.sum().clamp(min=1)
    return loss, accuracy


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.RMSNorm(size.width)
        self.norm_2 = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, width] to hidden states."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + fed


class LanguageModel(nn.Module):
    """A decoder-only transformer whose embedding is also the weight of the loss head."""

    def __init__(self, size: Size, head: Head) -> None:
        super().__init__()
        self.head = head
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.width)
        nn.init.normal_(self.embedding.weight, std=INIT)
        nn.init.normal_(self.position, std=0.1 * INIT)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] to hidden states [B, T, width]."""
        # The tied weight is small so that the first logits are; the residual stream wants unit size.
        x = (self.embedding(tokens) + self.position[: tokens.shape[1]]) / INIT
        hidden: Tensor = self.norm(self.blocks(x))
        return hidden

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy, both 0-D on the device."""
        return self.head(self.hidden(tokens), self.embedding.weight, targets)


@torch.no_grad()
def sample(model: LanguageModel, tokenizer: Any, prompt: str, setup: Setup, count: int = 60) -> str:
    """Continues a prompt; the host reads the tokens once, at the end."""
    size, weight = setup.size, model.embedding.weight
    start = torch.tensor(tokenizer.encode(prompt).ids)[-size.context // 2 :]
    count = min(count, size.context - start.numel())
    tokens = torch.zeros(1, start.numel() + count, dtype=torch.int64)
    tokens[0, : start.numel()] = start
    tokens = tokens.to(weight.device)
    generator = torch.Generator(weight.device).manual_seed(setup.seed)
    for end in range(start.numel(), tokens.shape[1]):
        logits = F.linear(model.hidden(tokens[:, :end])[:, -1], weight).float()
        # Adding Gumbel noise and taking the largest draws from the softmax; torch.multinomial would wait for the GPU.
        noise = torch.rand(logits.shape, device=logits.device, generator=generator).clamp_(1e-9, 1 - 1e-7)
        tokens[:, end] = (logits / 0.7 - torch.log(-torch.log(noise))).argmax(-1)
    text: str = tokenizer.decode(tokens[0].tolist())
    return text


# ------------------------------------------------------------------------------------------------------------ training


def as_text(loss: float, accuracy: float) -> str:
    """For the progress bar."""
    return f"loss {loss:.3f}  accuracy {accuracy:.1%}"


class Stopwatch:
    """Seconds of each step: between events on the GPU's stream, or on the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """The boundary between two steps."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """All steps; to be called once the GPU is done."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]


def progress(steps: int, name: str) -> Any:
    """A tqdm bar, or where tqdm is missing a stand-in that prints ten lines."""
    try:
        from tqdm import tqdm
    except ImportError:
        return Lines(steps, name)
    return tqdm(total=steps, desc=name, unit="step", mininterval=0.5)


class Lines:
    """The part of a tqdm bar that is used here, as plain lines."""

    def __init__(self, steps: int, name: str) -> None:
        self.steps, self.name, self.done, self.postfix = steps, name, 0, ""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """The text at the end of the next line."""
        self.postfix = text

    def update(self) -> None:
        """One step more; every tenth of the whole is printed."""
        self.done += 1
        if self.done * 10 // self.steps != (self.done - 1) * 10 // self.steps:
            print(f"{self.name}: step {self.done} of {self.steps}  {self.postfix}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left to do."""


def train(name: str, head: Head, tokens: Tensor, setup: Setup, waits: bool) -> tuple[Run, LanguageModel]:
    """Trains a model from the seed.

    Args:
        name: for the progress bar and the table.
        head: hidden states, weight and targets to loss and accuracy.
        tokens: the text, on the device of the training.
        setup: what both runs have in common.
        waits: read loss and accuracy with `.item()` in each step, as most training loops do.
    """
    size, device = setup.size, setup.device
    torch.manual_seed(setup.seed)
    model = LanguageModel(size, head).to(device)
    step_function = torch.compile(model, fullgraph=True) if setup.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=size.rate, total_steps=size.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    scaler = torch.amp.GradScaler(device.type, enabled=setup.dtype == torch.float16)
    batches = setup.batches(tokens)
    ring = syncfree_ext.AsyncScalars(device, ["loss", "accuracy"], depth=RUN_AHEAD)
    guard = syncfree_ext.NonFiniteGuard(ring)
    metrics = syncfree_ext.MetricBuffer(device, {"loss": "mean", "accuracy": "mean"})
    watch, bar = Stopwatch(device), progress(size.steps, name)
    losses, accuracies = [0.0] * size.steps, [0.0] * size.steps
    warm_up = min(WARM_UP, size.steps - 1)

    def receive() -> None:
        for tag, values in ring.poll():
            if tag == "mean":
                bar.set_postfix_str(as_text(values["loss"], values["accuracy"]), refresh=False)
            else:
                losses[tag], accuracies[tag] = values["loss"], values["accuracy"]

    def one_step(step: int) -> None:
        inputs, targets = batches.draw()
        with setup.autocast():
            loss, accuracy = step_function(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A GradScaler looks for infinite gradients itself, by making some.
        guard.update(step, loss, *(() if scaler.is_enabled() else (norm,)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        ring.put(step, {"loss": loss, "accuracy": accuracy})
        metrics.add(loss=loss, accuracy=accuracy)
        if (step + 1) % LOG_INTERVAL == 0:
            metrics.compute_async(ring, "mean")
        receive()
        if waits:
            bar.set_postfix_str(as_text(loss.item(), accuracy.item()), refresh=False)
        bar.update()
        watch.mark()

    watch.mark()
    with ring:  # leaving it waits for the last values, and raises if the guard has found something
        for step in range(warm_up):
            one_step(step)
        with counted_syncs(device) as syncs:
            for step in range(warm_up, size.steps):
                one_step(step)
    receive()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    bar.close()
    return Run(
        name=name,
        losses=losses,
        accuracies=accuracies,
        step_seconds=statistics.median(watch.seconds()[warm_up:]),
        syncs_per_step=syncs[0] / (size.steps - warm_up) if device.type == "cuda" else None,
        head_bytes=head_memory(model, tokens, setup),
    ), model


# -------------------------------------------------------------------------------------------------------------- memory


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Sends what native code prints to stderr nowhere: torch's profiler announces itself there."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def cpu_peak(run: Callable[[], None]) -> int:
    """The most bytes that the CPU allocator had handed out at once during `run`, by its records in torch.profiler.

    They hold every tensor, but not the scratch space that a matrix library takes for itself.
    """
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with quiet_stderr():
        profile.start()
    run()
    with quiet_stderr():
        profile.stop()
    records: Any = profile.profiler
    taken = peak = 0
    events = [event for event in records.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    return peak


def head_memory(model: LanguageModel, tokens: Tensor, setup: Setup) -> int:
    """The most bytes that forward and backward of the loss head take above its inputs, gradients included."""
    inputs, targets = setup.batches(tokens).draw()
    with torch.no_grad(), setup.autocast():
        hidden = model.hidden(inputs)
    hidden = hidden.detach().requires_grad_()
    weight = model.embedding.weight.detach().requires_grad_()

    def run() -> None:
        with setup.autocast():
            loss, _ = model.head(hidden, weight, targets)
        loss.backward()

    # Once before: what libraries take at their first call and keep is not the head's.
    run()
    hidden.grad = weight.grad = None
    if setup.device.type == "cpu":
        return cpu_peak(run)
    torch.cuda.reset_peak_memory_stats(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    run()
    return torch.cuda.max_memory_allocated(setup.device) - before


# -------------------------------------------------------------------------------------------------------- command line


def share(text: str) -> float:
    """A number from 0 up to, but not including, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 up to 1, got {text}")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def default_device() -> str:
    """The GPU, if there is one and the library was built for it."""
    if not torch.cuda.is_available():
        return "cpu"
    if find_spec("syncfree_ext._C_cuda") is None:
        print("syncfree_ext was built without CUDA kernels (there was no nvcc): training on the CPU, not on the GPU")
        return "cpu"
    return "cuda"


def parse_options() -> argparse.Namespace:
    """The command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=positive, help="training steps of each run (default: by size)")
    parser.add_argument("--size", choices=SIZES, help="sizes of model and batch (default: small on a GPU, else tiny)")
    parser.add_argument("--dtype", choices=DTYPES, help="autocast dtype (default: bfloat16 on a GPU, else float32)")
    parser.add_argument("--compile", action="store_true", help="run both models through torch.compile(fullgraph=True)")
    parser.add_argument("--ignored", type=share, default=0.0, help="share of the targets that are ignored (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample (default: 0)")
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: a GPU if there is one and the library was built for it)"
    )
    parser.add_argument("--vocabulary", type=positive, help="tokens to learn from the text (default: by size)")
    parser.add_argument("--text", type=float, help="most megabytes of text to read (default: by size)")
    parser.add_argument("--prompt", default="def __init__(self", help="what the sample starts with")
    parser.add_argument(
        "--plain-reads",
        choices=("item", "late"),
        default="item",
        help="how the plain run reads its loss: .item() in each step, as most loops do, or late, as the fused run does",
    )
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="picture to save (default: demo.png)")
    parser.add_argument("--json", type=Path, help="file for the numbers (default: none)")
    options = parser.parse_args()
    options.device = torch.device(options.device or default_device())
    if options.device.type not in MEMORY_SOURCE:
        parser.error(f"--device: expected cpu or cuda, got {options.device}")
    on_gpu = options.device.type == "cuda"
    options.size = options.size or ("small" if on_gpu else "tiny")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    if options.dtype == "float16" and not on_gpu:
        parser.error("--dtype float16 needs a GPU; bfloat16 and float32 run on the CPU")
    return options


def main() -> None:
    """Trains twice, prints the table, saves the picture."""
    options = parse_options()
    device, size = options.device, SIZES[options.size]
    vocabulary = options.vocabulary or size.vocabulary
    tokenizer, tokens = load_text(options.text or size.text, vocabulary)
    # A short text can run out of merges; the model is built for the tokens that there are.
    size = replace(size, steps=max(options.steps or size.steps, 2), vocabulary=tokenizer.get_vocab_size())
    setup = Setup(size, device, DTYPES[options.dtype], options.compile, options.ignored, options.seed)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.size}: {size.layers} layers of width {size.width}, {size.vocabulary} tokens, batches of "
        f"{size.batch} x {size.context}, {tokens.numel() / 1e6:.1f} M tokens of text, {options.dtype}, {where}",
        flush=True,
    )
    tokens = tokens.to(device)

    fused, model = train("syncfree_ext", fused_head, tokens, setup, waits=False)
    text = sample(model, tokenizer, options.prompt, setup)
    del model
    waits = options.plain_reads == "item"
    plain, _ = train("F.linear + F.cross_entropy", plain_head, tokens, setup, waits=waits)

    print(f"\nThe fused model continues {options.prompt!r}:\n\n{text}\n\n{table(fused, plain)}")
    print("memory: forward and backward, gradients included, above the inputs; " + MEMORY_SOURCE[device.type])
    if waits and device.type == "cuda":
        print("syncs: the second run reads its loss with .item(), as most loops do; --plain-reads late takes that away")
    if draw(fused, plain, options.out):
        print(f"curves saved as {options.out}")
    else:
        print("no picture: matplotlib is not installed")
    if options.json:
        numbers = {"fused": asdict(fused), "plain": asdict(plain), "prompt": options.prompt, "text": text}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
