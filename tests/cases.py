"""Inputs of the tests: data sets, memory layouts, and a covering array over everything that a call can vary in."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Each case of the covering array takes one value of each.
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DTYPES),
    "bt": (1, 7, 129, 1000, 1536),
    "h": (1, 8, 65, 257),
    "v": (2, 17, 513, 32003),
    "rank": (2, 3),
    "data": ("unit", "confident", "trained", "outliers"),
    "reduction": ("mean", "mean/number", "mean/tensor", "sum", "none"),
    "ignored": ("no", "some", "class"),
    "bias": ("no", "float32", "same"),
    "weight": ("no", "float32", "same", "zeros"),
    "token_weight": ("no", "float32", "same"),
    "label_smoothing": (0.0, 0.1, 1.0),
    "softcap": (None, 30.0, 2.0),
    "token_scaling": (False, True),
    "logit_scale": (1.0, 0.5, "tensor"),
    "z_loss_weight": (0.0, 1e-3, "tensor"),
    "shift": (0, 1, 3),
    "x_layout": ("contiguous", "transposed", "strided", "offset", "pitched"),
    "w_layout": ("contiguous", "transposed", "strided", "offset", "pitched"),
    "target": ("int64", "int32", "strided"),
    "chunk_rows": (None, 64, 200),
    "trainable": ("xwb", "x", "w", "b", "xw", "wb", ""),
    "upstream": (1.0, 0.75, 256.0),
}

# What a path of its own may serve on some devices: bfloat16 products, no bias, no option that looks at other classes.
# Rows whose loss is above 115 nats are in "far".
PLAIN_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    **{name: values[:1] for name, values in DIMENSIONS.items()},
    "dtype": ("bfloat16",),
    "bt": (1, 7, 129, 1000, 1536),
    "h": (8, 64, 136, 520),
    "v": (2, 17, 191, 513, 4100),
    "rank": (2, 3),
    "data": ("unit", "confident", "trained", "outliers", "far"),
    "reduction": DIMENSIONS["reduction"],
    "ignored": DIMENSIONS["ignored"],
    "token_weight": ("no", "float32"),
    "token_scaling": (False, True),
    "logit_scale": DIMENSIONS["logit_scale"],
    "z_loss_weight": DIMENSIONS["z_loss_weight"],
    "shift": (0, 1),
    "x_layout": ("contiguous", "transposed", "pitched"),
    "w_layout": ("contiguous", "transposed", "pitched"),
    "target": ("int64", "int32"),
    "chunk_rows": (None, 128, 200),
    "trainable": ("xw", "x", "w", ""),
    "upstream": (1.0, 0.75),
}

# The same with the options that look at other classes.
EVEN_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    **PLAIN_DIMENSIONS,
    "bias": ("no", "float32", "same"),
    "weight": ("no", "float32", "zeros"),
    "label_smoothing": (0.0, 0.1, 0.5, 1.0),
    "softcap": (None, 30.0, 2.0),
    "trainable": ("xwb", "x", "w", "b", ""),
}

_SHAPES = {1: (1, 1), 7: (1, 7), 129: (3, 43), 1000: (8, 125), 1536: (6, 256)}


def covering_array(dimensions: dict[str, tuple[Any, ...]], strength_seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two dimensions occurs at least once.

    Greedy: each row starts from a pair that is still missing, then fills its other dimensions, in random order, with
    the value that adds most missing pairs. The seed is fixed, so that names of tests do not change between sessions.
    """
    rng = random.Random(strength_seed)
    names = list(dimensions)
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(len(dimensions[names[i]]))
        for b in range(len(dimensions[names[j]]))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        best: dict[int, int] = {}
        most = -1
        for start in rng.sample(sorted(missing), min(12, len(missing))):
            row = dict(start)
            gained = 1
            for i in rng.sample(range(len(names)), len(names)):
                if i in row:
                    continue
                gains = [
                    sum(tuple(sorted([(i, a), (j, b)])) in missing for j, b in row.items())
                    for a in range(len(dimensions[names[i]]))
                ]
                top = max(gains)
                row[i] = rng.choice([a for a, gain in enumerate(gains) if gain == top])
                gained += top
            if gained > most:
                best, most = row, gained
        missing -= set(itertools.combinations(sorted(best.items()), 2))
        rows.append({name: dimensions[name][best[i]] for i, name in enumerate(names)})
    return rows


def layout(t: Tensor, kind: str) -> Tensor:
    """The values of t in other memory. What lies between them is NaN, or for integers an invalid class."""
    filler = math.nan if t.is_floating_point() else 2**30
    if kind == "transposed" and t.dim() >= 2:
        return t.movedim(-1, 0).contiguous().movedim(0, -1)
    if kind == "strided" and t.dim() >= 1:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), filler, dtype=t.dtype, device=t.device)
        wide[..., 1::2] = t
        return wide[..., 1::2]
    if kind == "pitched" and t.dim() >= 1:
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), filler, dtype=t.dtype, device=t.device)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]
    if kind == "offset":
        flat = torch.full((t.numel() + 1,), filler, dtype=t.dtype, device=t.device)
        flat[1:] = t.reshape(-1)
        return flat[1:].view(t.shape)
    return t.contiguous()


def data(kind: str, bt: int, h: int, v: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(x [bt, h], w [v, h], target [bt]) in float32.

    unit: logits of rms 1. confident: the target stands out and everything rides on a common offset, logits of rms 10.
    trained: a spread of confidences over a mean row that all rows of w share. outliers: unit with one entry in a
    hundred of x and w twenty times as large. far: the target of every third row has a vanishing probability.
    """
    w = torch.randn(v, h, generator=rng) / h**0.5
    x = torch.randn(bt, h, generator=rng)
    target = torch.randint(0, v, (bt,), generator=rng)
    if kind == "confident":
        x += 16 * w[target]
        w[:, 0] += 2
        x[:, 0] = 5
    elif kind == "trained":
        x += 11 * torch.rand(bt, 1, generator=rng) * w[target]
        w += 2 * torch.randn(h, generator=rng) / h**0.5
    elif kind == "far":
        x[::3] = -150 * w[target[::3]]
    elif kind == "outliers":
        for t in (x, w):
            t *= 1 + 19 * (torch.rand(t.shape, generator=rng) < 0.01)
    return x, w, target


@dataclass
class Call:
    """A call: arguments (leaves detached), options, and the upstream gradient."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    options: dict[str, Any]
    upstream: Tensor

    def leaves(self, trainable: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias as fresh leaves, those named in trainable with requires_grad."""
        x, w, b = (None if t is None else t.detach() for t in (self.input, self.linear_weight, self.linear_bias))
        assert x is not None
        assert w is not None
        x.requires_grad_("x" in trainable)
        w.requires_grad_("w" in trainable)
        if b is not None:
            b.requires_grad_("b" in trainable)
        return x, w, b


def build(case: dict[str, Any], rng: torch.Generator, device: torch.device | str = "cpu") -> Call:
    """The call of a case. Its class and token weights are exact in float32, in which the library reads them."""
    dtype = DTYPES[case["dtype"]]
    bt, h, v = case["bt"], case["h"], case["v"]
    shape = _SHAPES.get(bt, (1, bt)) if case["rank"] == 3 else (bt,)
    x, w, target = data(case["data"], bt, h, v, rng)
    options: dict[str, Any] = {"reduction": case["reduction"].split("/")[0]}
    for name in ("label_smoothing", "softcap", "token_scaling", "shift"):
        options[name] = case[name]
    target = target.view(shape)
    if case["shift"] and case["shift"] < shape[-1]:
        # What a row is scored against lies further on: keep the pairing of the data set.
        target = torch.cat([target[..., :1].expand(*shape[:-1], case["shift"]), target], -1)[..., : shape[-1]].clone()
    if case["ignored"] == "class":
        options["ignore_index"] = 1
    elif case["ignored"] == "some":
        target[torch.rand(shape, generator=rng) < 0.3] = -100
    if case["weight"] != "no":
        weight = torch.rand(v, generator=rng) + 0.25
        if case["weight"] == "zeros":
            weight[torch.rand(v, generator=rng) < 0.3] = 0
        options["weight"] = weight.to(dtype if case["weight"] == "same" else torch.float32)
    if case["token_weight"] != "no":
        token_weight = torch.rand(shape, generator=rng) + 0.125
        options["token_weight"] = token_weight.to(dtype if case["token_weight"] == "same" else torch.float32)
    if case["reduction"] == "mean/number":
        options["num_items"] = 0.6 * bt + 0.7
    elif case["reduction"] == "mean/tensor":
        options["num_items"] = torch.tensor([0.6 * bt + 0.7]) if bt % 2 else torch.tensor(bt // 2 + 1)
    for name, value in (("logit_scale", 0.7), ("z_loss_weight", 2e-3)):
        options[name] = torch.tensor(value) if case[name] == "tensor" else case[name]
    bias = None
    if case["bias"] != "no":
        bias = torch.randn(v, generator=rng).to(dtype if case["bias"] == "same" else torch.float32)
    upstream = torch.tensor(case["upstream"])
    if dtype == torch.float16 and case["upstream"] > 1 and (options["reduction"] != "mean" or bt < 100):
        upstream = torch.tensor(2.0)  # larger gradients would not fit into float16
    if options["reduction"] == "none":
        upstream = layout(torch.randn(shape, generator=rng) * upstream, "strided")
    upstream = upstream.to(torch.float64 if dtype == torch.float64 else torch.float32)
    target = target.int() if case["target"] == "int32" else target
    moved = {k: value.to(device) if isinstance(value, Tensor) else value for k, value in options.items()}
    return Call(
        layout(x.to(device, dtype).view(*shape, h), case["x_layout"]),
        layout(w.to(device, dtype), case["w_layout"]),
        layout(target.to(device), "strided" if case["target"] == "strided" else "contiguous"),
        None if bias is None else bias.to(device),
        moved,
        layout(upstream.to(device), "strided") if upstream.dim() else upstream.to(device),
    )


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(case[name]) for name in ("dtype", "bt", "h", "v", "data", "reduction", "trainable"))
