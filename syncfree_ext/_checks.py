"""Argument checks of the public functions. They look at shapes, dtypes and devices, so they never wait for the device.

The form of every message: function, argument, what was expected, what came. A wrong type or dtype is a TypeError,
anything else a ValueError. All of it can be traced by torch.compile without a graph break.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REDUCTIONS = ("mean", "sum", "none")
_LARGEST = int(sys.float_info.max)


def check_tensor(function: str, name: str, tensor: object) -> None:
    """Raise TypeError for what is no tensor, is not strided, or is sharded over devices (a DTensor)."""
    if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
        raise TypeError(f"{function}: {name} must be a strided tensor, got one of layout {tensor.layout}")
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    # By its attribute: the class would cost an import of torch.distributed.
    if hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{function}: {name} must be a plain tensor, got a DTensor; pass its full_tensor(), or its to_local() "
            "where each rank scores its own rows"
        )


def check_floating(function: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the tensor is float32, bfloat16, float16 or float64."""
    if tensor.dtype not in _FLOATING:
        raise TypeError(f"{function}: {name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")


def check_device(function: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on that device."""
    if tensor.device != device:
        raise ValueError(
            f"{function}: {name} must be on the device of the first argument, {device}, got {tensor.device}"
        )


def check_shape(function: str, name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    """Raise ValueError unless the tensor has that shape."""
    if tensor.shape != shape and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{function}: {name} must have shape {tuple(shape)}, {meaning}, got {tuple(tensor.shape)}")


def check_no_grad(function: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that requires grad and would get none."""
    if tensor.requires_grad:
        raise ValueError(
            f"{function}: {name} must not require grad, because no gradient is computed for it; got a tensor with "
            "requires_grad=True (detach it)"
        )


def check_target(function: str, target: Tensor, first: str, input: Tensor) -> None:
    """Raise unless target holds class indices, one for each row of the first argument."""
    check_tensor(function, "target", target)
    if target.dtype not in (torch.int64, torch.int32):
        hint = " (class probabilities are not supported)" if target.is_floating_point() else ""
        raise TypeError(f"{function}: target must be int64 or int32 class indices, got {target.dtype}{hint}")
    check_device(function, "target", target, input.device)
    check_shape(function, "target", target, input.shape[:-1], f"that of {first} without its last dimension")


def check_optional_vector(
    function: str, name: str, tensor: Tensor | None, input: Tensor, shape: Sequence[int], meaning: str, gets_grad: bool
) -> None:
    """Raise unless the tensor is None or a floating tensor of that shape on the device of input."""
    if tensor is None:
        return
    check_tensor(function, name, tensor)
    check_floating(function, name, tensor)
    check_device(function, name, tensor, input.device)
    check_shape(function, name, tensor, shape, meaning)
    if not gets_grad:
        check_no_grad(function, name, tensor)


def check_scalar_tensor(function: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless the tensor has one real element on that device, without grad."""
    check_tensor(function, name, tensor)
    if tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{function}: {name} must be a real number or a tensor of one, got {tensor.dtype}")
    check_device(function, name, tensor, device)
    if tensor.numel() != 1:
        raise ValueError(f"{function}: {name} must have one element, got shape {tuple(tensor.shape)}")
    check_no_grad(function, name, tensor)


def check_number(function: str, name: str, value: object) -> None:
    """Raise TypeError unless the value is a real number, Python's or NumPy's, ValueError if float64 is too small."""
    # In a trace an int may be symbolic, and to compare it would put a bound on a shape.
    if type(value) is int and not torch.compiler.is_compiling() and abs(value) > _LARGEST:
        raise ValueError(f"{function}: {name} must fit into float64, got an integer of {value.bit_length()} bits")
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)):
        raise TypeError(f"{function}: {name} must be a number, got {type(value).__name__}")


def check_integer(function: str, name: str, value: object) -> None:
    """Raise TypeError unless the value is an integer, Python's or NumPy's, and ValueError if 64 bits do not hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{function}: {name} must be an integer, got {type(value).__name__}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{function}: {name} must fit into 64 bits, got {value}")


def check_flag(function: str, name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False, Python's or NumPy's, or 0 or 1."""
    if not isinstance(value, (bool, int, torch.SymBool)) and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{function}: {name} must be True or False, got {type(value).__name__}")


def plain_number(value: Any) -> Any:
    """A number of NumPy as the Python number that it stands for; everything else as it is."""
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_at_least(function: str, name: str, value: object, least: int) -> None:
    """Raise unless the value is an integer of at least that size."""
    check_integer(function, name, value)
    if value < least:  # type: ignore[operator]
        raise ValueError(f"{function}: {name} must be at least {least}, got {value}")


def check_loss_options(
    function: str,
    target: Tensor,
    num_items: object,
    reduction: object,
    label_smoothing: object,
    softcap: object,
    shift: object,
) -> None:
    """Raise for an option value outside its range (docs/semantics.md)."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{function}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(
            f"{function}: num_items is the divisor of reduction 'mean' and must be None, got reduction {reduction!r}"
        )
    check_number(function, "label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:  # type: ignore[operator]
        raise ValueError(f"{function}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None:
        check_number(function, "softcap", softcap)
        if not 0.0 < softcap < math.inf:  # type: ignore[operator]
            raise ValueError(f"{function}: softcap must be positive and finite, got {softcap}")
    check_at_least(function, "shift", shift, 0)
    if shift != 0 and target.dim() == 0:
        raise ValueError(f"{function}: shift needs a target with a sequence dimension, got shape () and shift={shift}")
