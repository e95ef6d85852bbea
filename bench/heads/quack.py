"""quack's chunked linear cross-entropy: the base pipeline, and the one that stores scaled exponentials (sm_90)."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .base import Call, Maker, UnavailableError

PACKAGE = "quack-kernels"
DEVICES = ("cuda",)
_ROWS = 4096


def _name_as_key(logger: logging.Logger) -> str:
    return logger.name


def _allow_loggers() -> None:
    """quack 0.6.5 makes a cache key of all that a kernel refers to and refuses types it does not know.

    Some releases of nvidia-cutlass-dsl refer to a logger. quack asks a type it does not know for this method, and a
    logger changes nothing in a kernel.
    """
    logging.Logger.__quack_semantic_key__ = _name_as_key  # type: ignore[attr-defined]


def _base(device: torch.device, rows: int | None) -> Call:
    _allow_loggers()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = chunked_linear_cross_entropy(
            x, w, t, chunk_size=min(rows or _ROWS, x.shape[0]), use_scaled_exp=False
        )
        return loss

    return call


def _scaled_exp(device: torch.device, rows: int | None) -> Call:
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise UnavailableError("quack-exp runs on sm_90 only")
    _allow_loggers()
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = scaled_exp_linear_cross_entropy(x, w, t, chunk_size=min(rows or _ROWS, x.shape[0]))
        return loss

    return call


HEADS: dict[str, Maker] = {"quack": _base, "quack-exp": _scaled_exp}
