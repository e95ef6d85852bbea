"""The tolerances of all value tests, each derived here once, and the comparisons that use them.

Errors are relative L2 errors against float64 on the same rounded inputs.

Two kinds of bounds:

* `PRECISION`: what docs/semantics.md promises for its data sets (a thousand rows and more, where errors average out).
* `Bound`: for any shape and option. Rounding a result to a dtype of unit roundoff u costs at most u, and u / 2.35 in
  the mean over mantissas (1.66e-3 for bfloat16). Rounding each element of the logit gradient g costs the same relative
  error in each, which a gradient amplifies by kappa = sqrt(sum_ij g_ij^2 ||w_j||^2) / ||dX|| (dW: ||x_i||, db: 1),
  because the errors are independent; `reference.Gradients` has the numerator as dx_noise. Four standard deviations are
  1.7 u kappa. So err <= u (1 + 1.7 kappa), and another u where the upstream gradient is no power of two and is applied
  to a rounded gradient. Errors of float32 arithmetic add to that: a logit of size |l| is wrong by a few 2^-24 |l|, and
  p, hence g, by as much relative to p; 1e-5 max(1, |l| / 32) (1 + kappa) holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# Mean relative error of rounding to the dtype.
ROUNDING = {torch.bfloat16: 1.66e-3, torch.float16: 2.08e-4}

# docs/semantics.md, "Precision": (dtype, data) -> relative L2 errors of loss, dX, dW.
# float16: times the error of the exact gradient rounded to float16.
PRECISION = {
    (torch.bfloat16, "unit"): {"loss": 1e-4, "dx": 2.5e-3, "dw": 2.5e-3},
    (torch.bfloat16, "confident"): {"loss": 1e-4, "dx": 2.5e-3, "dw": 3e-3},
    (torch.bfloat16, "trained"): {"loss": 1e-4, "dx": 2.5e-3, "dw": 3e-3},
    (torch.float16, "unit"): {"loss": 1e-4, "dx": 1.5, "dw": 1.5},
    (torch.float16, "confident"): {"loss": 1e-4, "dx": 1.5, "dw": 1.5},
    (torch.float32, "unit"): {"loss": 1e-6, "dx": 1e-5, "dw": 1e-5},
    (torch.float32, "confident"): {"loss": 1e-6, "dx": 1e-5, "dw": 1e-5},
}

# fp16 with an upstream gradient of 2^16: absolute, not relative to the rounded reference.
FP16_SCALED = 1e-3

# dW over many chunks, against one product of the full size that is rounded once.
MANY_CHUNKS = 1.2


def lean_bound(chunks: int) -> float:
    """dW that is added up in bfloat16: each of the later chunks rounds the sum once more."""
    return 1.9e-3 * math.sqrt((chunks + 1) / 2)


def smallest_error(dtype: torch.dtype, numel: int) -> float:
    """What rounding a gradient costs at least: half the spacing of float16's subnormal numbers in each element."""
    return 2.0**-25 * math.sqrt(numel) if dtype == torch.float16 else 1e-30


def loss_tolerance(dtype: torch.dtype, reference: Tensor, logit_max: float, rows: int) -> float:
    """Absolute tolerance of a reduced loss, or relative to the norm of a loss per row.

    1e-4 |L| for half types, 1e-6 |L| for float32, and the error of a logit itself, 2^-22 of its size, which a
    small loss does not shrink. float64: the same with 2^-48.
    """
    norm = float(reference.double().norm())
    if dtype == torch.float64:
        return 1e-12 * norm + 2.0**-48 * (1 + logit_max) * max(rows, 1)
    relative = 1e-4 if dtype in ROUNDING else 1e-6
    return relative * norm + (1e-7 + 2.0**-22 * logit_max) * math.sqrt(max(rows, 1))


@dataclass(frozen=True)
class Bound:
    """The bound of a gradient for any shape; see the head of this file."""

    compute: torch.dtype
    logit_max: float
    exact_upstream: bool = True

    def of(self, dtype: torch.dtype, noise: float, norm: float) -> float:
        """Relative L2 tolerance of a gradient of that dtype, given its noise and its norm in the reference."""
        kappa = noise / norm if norm > 0 else 1.0
        bound = ROUNDOFF[dtype] * (1.0 if self.exact_upstream else 2.0)
        if self.compute in ROUNDING:
            bound += 1.7 * ROUNDOFF[self.compute] * kappa
        arithmetic = 1e-12 if self.compute == torch.float64 else 1e-5
        return bound + arithmetic * max(1.0, self.logit_max / 32) * (1 + kappa)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; NaN if anything in out is NaN, inf where only out is infinite."""
    error = (out.detach().double() - reference.detach().double().to(out.device)).norm()
    return float(error / reference.detach().double().norm().to(out.device))


def assert_close_rel(out: Tensor, reference: Tensor, tol: float, floor: float = 0.0, what: str = "") -> None:
    """||out - reference|| <= tol ||reference|| + floor. NaN never passes.

    With tol > 0 and a reference of zeros, out must be exactly zero unless a floor is given.
    """
    assert out.shape == reference.shape, f"{what}: shape {tuple(out.shape)}, expected {tuple(reference.shape)}"
    out64, ref64 = out.detach().double().cpu(), reference.detach().double().cpu()
    error, norm = float((out64 - ref64).norm()), float(ref64.norm())
    limit = tol * norm + floor
    if not error <= limit:  # also true for NaN
        relative = error / norm if norm else math.inf
        raise AssertionError(
            f"{what}: relative L2 error {relative:.3e} > {tol:.3e} (error {error:.3e}, norm {norm:.3e}, "
            f"floor {floor:.1e}), {int(out64.isnan().sum())} NaN of {out64.numel()}"
        )


def assert_equal(out: Tensor, reference: Tensor, what: str = "") -> None:
    """Bitwise equality, NaN payloads and signs of zero included."""
    assert out.dtype == reference.dtype, f"{what}: {out.dtype}, expected {reference.dtype}"
    assert out.shape == reference.shape, f"{what}: shape {tuple(out.shape)}, expected {tuple(reference.shape)}"
    # A clone, because contiguous() leaves the stride of a single element as it is, and view() minds it.
    a, b = (t.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format) for t in (out, reference))
    if a.numel() and not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        different = int((a != b).sum())
        raise AssertionError(f"{what}: {different} of {a.numel()} elements differ")
