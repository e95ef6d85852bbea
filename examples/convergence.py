#!/usr/bin/env python3
"""Trains a small GPT to some depth with the fused loss head and with PyTorch's eager loss, from several seeds.

The model, its text and its training are those of train_lm.py, at about 30 million parameters. For each seed, and for
each share of ignored targets, one run takes `linear_cross_entropy` and one takes `F.linear` and `F.cross_entropy` of
float32 copies of the logits; they see the same batches from the same weights. Rounding differs, so the two curves of a
seed drift apart, as two eager runs would. The question is whether they drift further apart than two seeds are.

    python examples/convergence.py run                                  all runs, two at a time, then the verdict
    python examples/convergence.py run --jobs 12                        all at once, on one large GPU
    python examples/convergence.py run --only ours:0:0.6 --parts DIR    one of them
    python examples/convergence.py merge --parts DIR                    the verdict of those that have been made

`merge` prints the verdict and writes NAME.json, NAME.png and NAME.svg (--name). Its status is 1 where the curves differ
by more than seeds do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from stdlib_text import Batches, load_text
from torch import Tensor
from train_lm import DTYPES, LanguageModel, Setup, Size, default_device, fused_head, plain_head, positive, share, train

SIZES = {
    "small": Size(6, 512, 8, 256, 32, 20480, 32.0, 1500, 1.5e-3),  # 29.5 million parameters
    "tiny": Size(2, 64, 2, 64, 8, 2048, 1.0, 60, 4e-3),
}
HEADS = {"ours": fused_head, "eager": plain_head}
# The text's last tokens, which no run is trained on, and how many windows of them are scored.
HELD_OUT, WINDOWS = 0.02, 256
# Steps whose mean is a point of a curve, and how many points a verdict leaves out: all curves fall alike at first.
POINT, LEFT_OUT = 25, 4

Record = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------------- runs


@torch.no_grad()
def held_out_loss(model: LanguageModel, tokens: Tensor, setup: Setup) -> float:
    """The mean loss of fixed windows of the text that was held out, by PyTorch's loss in float32."""
    size = setup.size
    batches = Batches(tokens, rows=16, context=size.context, ignored=0.0, ignore_index=-100, seed=0)
    losses = []
    for _ in range(WINDOWS // 16):
        inputs, targets = batches.draw()
        with setup.autocast():
            hidden = model.hidden(inputs)
        logits = F.linear(hidden.float(), model.embedding.weight.float())
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    return float(torch.stack(losses).mean())


def run_one(part: str, options: argparse.Namespace) -> Record:
    """Trains one model and writes its record. part: HEAD:SEED:IGNORED."""
    head, seed, ignored = part.split(":")
    device, size = torch.device(options.device), SIZES[options.size]
    tokenizer, tokens = load_text(size.text, size.vocabulary)
    size = replace(size, steps=options.steps or size.steps, vocabulary=tokenizer.get_vocab_size())
    setup = Setup(size, device, DTYPES[options.dtype], False, float(ignored), int(seed))
    held_out = int(HELD_OUT * tokens.numel())
    tokens = tokens.to(device)
    result, model = train(part, HEADS[head], tokens[:-held_out], setup, waits=False)
    record = {
        "head": head,
        "seed": int(seed),
        "ignored": float(ignored),
        "losses": result.losses,
        "held_out": held_out_loss(model, tokens[-held_out:], setup),
        "accuracy": statistics.fmean(result.accuracies[-100:]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": options.dtype,
        "size": asdict(size),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    options.parts.mkdir(parents=True, exist_ok=True)
    path = options.parts / f"{part.replace(':', '-')}.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return record


def all_parts(options: argparse.Namespace) -> list[str]:
    """The runs that make up the comparison; those of eager, which take longer, first."""
    return [
        f"{head}:{seed}:{ignored:g}"
        for head in reversed(HEADS)
        for seed, ignored in itertools.product(range(options.seeds), options.ignored)
    ]


def run_all(options: argparse.Namespace) -> None:
    """Each run in a process of its own, `jobs` of them at a time."""
    size = SIZES[options.size]
    load_text(size.text, size.vocabulary)  # once, before they all look for it
    waiting = all_parts(options)
    running: dict[str, subprocess.Popen[bytes]] = {}
    same = ["--size", options.size, "--device", options.device, "--dtype", options.dtype, "--parts", options.parts]
    same += ["--steps", str(options.steps)] if options.steps else []
    options.parts.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            part = waiting.pop(0)
            with (options.parts / f"{part.replace(':', '-')}.log").open("w") as log:
                command = [sys.executable, __file__, "run", "--only", part, *map(str, same)]
                running[part] = subprocess.Popen(command, stdout=log, stderr=log)
        time.sleep(0.2)
        for part in [part for part, process in running.items() if process.poll() is not None]:
            status = running.pop(part).returncode
            print(f"{part:<14} {time.monotonic() - start:6.1f} s  {'done' if not status else f'status {status}'}")
            if status:
                for process in running.values():
                    process.terminate()
                log_text = (options.parts / f"{part.replace(':', '-')}.log").read_text(encoding="utf-8")
                sys.exit(f"{part} ended with status {status}\n{log_text[-3000:]}")


# -------------------------------------------------------------------------------------------------------------- verdict


def points(losses: Sequence[float]) -> list[float]:
    """The means of POINT steps each."""
    return [statistics.fmean(losses[i : i + POINT]) for i in range(0, len(losses) - POINT + 1, POINT)]


def root_mean_square(values: Sequence[float]) -> float:
    """Of no values: 0."""
    return math.sqrt(statistics.fmean(v * v for v in values)) if values else 0.0


def error_of_mean(values: Sequence[float]) -> float:
    """The standard deviation of their mean; 0 of a single one. statistics.stdev takes no NaN."""
    mean = statistics.fmean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))


def verdict(curves: dict[str, dict[int, list[float]]], held_out: dict[str, dict[int, float]]) -> Record:
    """Whether ours and eager differ by less than seeds do.

    Args:
        curves: by head and seed, the points of a loss curve.
        held_out: by head and seed, the loss of held-out text.

    Returns:
        "between_heads": the root mean square, over seeds and points, of ours minus eager from the same seed;
        "between_seeds": the same of two seeds with the same head; "offset": the mean of ours minus eager with its sign,
        and "offset_error", the standard deviation of that mean, from the seeds. "held_out_difference" is the mean of
        ours minus eager on held-out text, "held_out_between_seeds" the root mean square between seeds there. "same" is
        True if heads differ by less than seeds on both, and if anything is a number at all.
    """
    seeds = sorted(set(curves["ours"]) & set(curves["eager"]))

    def gap(a: Sequence[float], b: Sequence[float]) -> list[float]:
        first = LEFT_OUT if len(a) > 2 * LEFT_OUT else 0
        return [x - y for x, y in zip(a[first:], b[first:], strict=True)]

    paired = {seed: gap(curves["ours"][seed], curves["eager"][seed]) for seed in seeds}
    pairs = list(itertools.combinations(seeds, 2))
    across = [d for c in curves.values() for a, b in pairs for d in gap(c[a], c[b])]
    offsets = [statistics.fmean(d) for d in paired.values()]
    differences = [held_out["ours"][seed] - held_out["eager"][seed] for seed in seeds]
    result: Record = {
        "between_heads": root_mean_square([d for each in paired.values() for d in each]),
        "between_seeds": root_mean_square(across),
        "offset": statistics.fmean(offsets),
        "offset_error": error_of_mean(offsets),
        "held_out_difference": statistics.fmean(differences),
        "held_out_between_seeds": root_mean_square([h[a] - h[b] for h in held_out.values() for a, b in pairs]),
    }
    result["same"] = (
        all(math.isfinite(value) for value in result.values())
        and result["between_heads"] <= result["between_seeds"]
        and abs(result["held_out_difference"]) <= result["held_out_between_seeds"]
    )
    return result


def collect(folder: Path) -> list[Record]:
    """The records of all runs that have been made."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*-*.json"))]
    if not records:
        sys.exit(f"{folder}: no runs; make some with `convergence.py run --parts {folder}`")
    # A head or a seed is what may differ.
    settings = {json.dumps({k: r[k] for k in ("size", "dtype", "device", "torch")}, sort_keys=True) for r in records}
    if len(settings) > 1:
        sys.exit(f"{folder}: runs of different sizes, steps, dtypes or devices: {' / '.join(sorted(settings))}")
    return records


def merge(options: argparse.Namespace) -> bool:
    """Prints the verdicts and writes what was found; whether all curves agree."""
    records = collect(options.parts)
    result: Record = {key: records[0][key] for key in ("device", "torch", "dtype", "size", "parameters")}
    result |= {"point": POINT, "left_out": LEFT_OUT, "shares": []}
    same = True
    print(f"{'ignored':>8} {'head':<6} {'final loss by seed':<32} {'held-out loss by seed':<32}")
    for ignored in sorted({r["ignored"] for r in records}):
        curves: dict[str, dict[int, list[float]]] = {head: {} for head in HEADS}
        held_out: dict[str, dict[int, float]] = {head: {} for head in HEADS}
        for r in records:
            if r["ignored"] == ignored:
                curves[r["head"]][r["seed"]] = points(r["losses"])
                held_out[r["head"]][r["seed"]] = r["held_out"]
        if curves["ours"].keys() != curves["eager"].keys():
            sys.exit(f"{options.parts}: not the same seeds of ours and eager at {ignored:g} ignored")
        for head in HEADS:
            final, text = (
                "  ".join(f"{value:.4f}" for value in values)
                for values in ([c[-1] for c in curves[head].values()], held_out[head].values())
            )
            print(f"{ignored:>8.0%} {head:<6} {final:<32} {text:<32}")
        found = verdict(curves, held_out)
        same = same and found["same"]
        print(
            f"{ignored:>8.0%} between heads {found['between_heads']:.4f}, between seeds {found['between_seeds']:.4f}; "
            f"ours minus eager {found['offset']:+.4f} ± {found['offset_error']:.4f}; held-out text "
            f"{found['held_out_difference']:+.4f}, between seeds {found['held_out_between_seeds']:.4f}: "
            + ("within the spread of seeds" if found["same"] else "DIFFERENT")
        )
        rounded = {h: {s: [round(p, 5) for p in c] for s, c in by_seed.items()} for h, by_seed in curves.items()}
        result["shares"].append({"ignored": ignored, "curves": rounded, "held_out": held_out, "verdict": found})
    options.name.with_suffix(".json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    written = [options.name.with_suffix(".json"), *draw(result, options.name)]
    print("written: " + ", ".join(str(path) for path in written))
    return same


def draw(result: Record, name: Path) -> list[Path]:
    """The curves, and below them how far the heads are apart beside how far seeds are; on a transparent ground."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is missing: no picture")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey, tones = "#858585", {"eager": "#4c8dd6", "ours": "#e8590c"}
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    # The same file from the same numbers.
    style = {**dict.fromkeys(colours, grey), "font.size": 10, "svg.hashsalt": "convergence"}
    shares = result["shares"]
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            2, len(shares), figsize=(5.6 * len(shares), 5.4), sharex=True, height_ratios=(3, 2), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for column, share_ in enumerate(shares):
            _draw_share(share_, axes[0, column], axes[1, column], result["point"], tones, grey)
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(color=grey, alpha=0.25)
            each.patch.set_alpha(0)
        paths = [name.with_suffix(suffix) for suffix in (".png", ".svg")]
        for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
            figure.savefig(path, dpi=140, transparent=True, metadata=metadata)
        pyplot.close(figure)
    return paths


def _draw_share(shown: Record, curves: Any, gaps: Any, point: int, tones: dict[str, str], grey: str) -> None:
    for head, width, alpha in (("eager", 3.6, 0.45), ("ours", 1.0, 1.0)):
        for i, curve in enumerate(shown["curves"][head].values()):
            steps = [point * (k + 1) for k in range(len(curve))]
            label = {"eager": "F.cross_entropy", "ours": "syncfree_ext"}[head] if i == 0 else None
            curves.plot(steps, curve, color=tones[head], linewidth=width, alpha=alpha, label=label)
    by_seed = shown["curves"]
    columns = list(zip(*by_seed["eager"].values(), strict=True))
    reach = [max(column) - min(column) for column in columns]
    gaps.fill_between(
        steps, [-r for r in reach], reach, color=tones["eager"], alpha=0.25, linewidth=0, label="between seeds"
    )
    for i, seed in enumerate(by_seed["ours"]):
        gap = [a - b for a, b in zip(by_seed["ours"][seed], by_seed["eager"][seed], strict=True)]
        gaps.plot(steps, gap, color=tones["ours"], linewidth=1.0, label="ours − eager, same seed" if i == 0 else None)
    spread = shown["verdict"]["between_seeds"]
    limit = 3 * max(spread, 1e-4) if math.isfinite(spread) else 1.0
    gaps.set_ylim(-limit, limit)
    curves.set_title(f"{shown['ignored']:.0%} of the targets ignored", color=grey, loc="left")
    curves.set_ylabel("training loss")
    gaps.set_ylabel("difference")
    gaps.set_xlabel("step")
    for each in (curves, gaps):
        each.legend(frameon=False, labelcolor=grey, fontsize=9)


# --------------------------------------------------------------------------------------------------------- command line


def parse_options() -> argparse.Namespace:
    """The command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=("text", "run", "merge"), help="text: learn the vocabulary, no more")
    parser.add_argument("--only", metavar="HEAD:SEED:IGNORED", help="one run, ours:0:0.6 for example")
    parser.add_argument("--jobs", type=positive, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--seeds", type=positive, default=3, help="how many, from 0 on (default: 3)")
    parser.add_argument("--ignored", type=share, nargs="+", default=[0.0, 0.6], help="shares (default: 0 0.6)")
    parser.add_argument("--steps", type=positive, help="training steps (default: by size)")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: small on a GPU, else tiny)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="autocast (default: bfloat16 on a GPU)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--parts", type=Path, default=Path("build/convergence"), help="folder of the runs' records")
    parser.add_argument("--name", type=Path, default=Path("convergence"), help="of what merge writes")
    options = parser.parse_args()
    options.device = options.device or default_device()
    on_gpu = torch.device(options.device).type == "cuda"
    options.size = options.size or ("small" if on_gpu else "tiny")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    if options.only is not None:
        head, _, rest = options.only.partition(":")
        if head not in HEADS or rest.count(":") != 1:
            parser.error(f"--only: expected HEAD:SEED:IGNORED with a head of {', '.join(HEADS)}, got {options.only}")
    return options


def main() -> None:
    """Runs, merges, or both."""
    options = parse_options()
    if options.command == "text":
        load_text(SIZES[options.size].text, SIZES[options.size].vocabulary)
        return
    if options.command == "run" and options.only is not None:
        record = run_one(options.only, options)
        print(f"{options.only}: last loss {record['losses'][-1]:.4f}, held-out loss {record['held_out']:.4f}")
        return
    if options.command == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores
        run_all(options)
    sys.exit(0 if merge(options) else 1)


if __name__ == "__main__":
    main()
