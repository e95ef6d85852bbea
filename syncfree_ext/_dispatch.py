"""What stands between a call and a kernel: keys of the dispatcher, transforms, traces, and errors on the way back.

Some of this is semi-public in torch; tests/test_dispatch.py holds it to what it is used for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

# What the dispatcher of a thread looks at besides the tensors' own keys, where nothing watches or changes operations:
# modes, traces and transforms add keys of their own.
_PLAIN_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def reaches_autograd(*tensors: Any) -> bool:
    """Whether an op that is called with these tensors would reach its kernel of the Autograd key first of all.

    The first one is not None.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() != _PLAIN_KEYS
        or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        or torch._C._len_torch_function_stack() > 0
        or tensors[0].is_inference()  # such tensors have no key of autograd, and one of them is enough
    ):
        return False
    for tensor in tensors:  # noqa: SIM110  (all() takes twice as long)
        if tensor is not None and type(tensor) not in _PLAIN_TYPES:
            return False
    return True


def below_autograd(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Go on from a kernel of the Autograd key, which was called with keyset; or call op as if from there, with None."""
    with torch._C._AutoDispatchBelowAutograd():
        try:
            if keyset is None:
                return op(*args, **kwargs)
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        except RuntimeError as error:
            raise_refused(error)
            raise_out_of_memory(error, (*args, *kwargs.values()))
            raise


def make_serializable(kind: type[Any]) -> None:
    """Let torch.export.save write down a NamedTuple that a model returns."""
    torch.utils._pytree._register_namedtuple(kind, serialized_type_name=f"syncfree_ext.{kind.__name__}")


def raise_refused(error: RuntimeError) -> None:
    """Raise ValueError if a kernel has refused an argument.

    Up to torch 2.14 its std::invalid_argument is one when it reaches Python; from 2.15 on it is a RuntimeError, as any
    exception of C++. The text of such a one begins with the op's name, that of a failure with the library's.
    """
    if re.match(r"syncfree::\w+: ", str(error)):
        raise ValueError(str(error)) from None


def raise_out_of_memory(error: RuntimeError, args: Sequence[Any]) -> None:
    """Raise torch.OutOfMemoryError for an allocation on CUDA that failed in the compiled library.

    All that reaches Python of such a failure is its text (csrc/common/tensor.h). The same allocation again raises what
    torch has to say; if it succeeds now that the call has given its memory back, then there was too little.
    """
    failed = re.search(r"syncfree: an allocation of (\d+) bytes failed", str(error))
    device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    if failed is None or device.type != "cuda":
        return
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).query()  # of a device that has failed raises what happened there
    torch.empty(int(failed[1]), dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(str(error)) from error


def is_differentiated(op: str, *leaves: Tensor | None) -> bool:
    # Inside a forward-AD level the Function is entered too: it raises for a dual number, whose tangent would be lost.
    needed = forward_ad._current_level >= 0
    if not needed and torch.is_grad_enabled():
        for leaf in leaves:  # any() takes twice as long
            if leaf is not None and leaf.requires_grad:
                needed = True
                break
    if needed and torch._C._are_functorch_transforms_active():
        refuse_transform(op)
    return needed


def refuse_transform(op: str) -> NoReturn:
    raise RuntimeError(
        f"syncfree::{op}: transforms of torch.func (grad, vjp, jvp, vmap, ...) are not supported; use "
        "torch.autograd.grad or backward(), and write a batch as leading dimensions"
    )


def is_traced() -> bool:
    """Whether the operations that run now are being written down to be run later.

    A gradient that an earlier traced operation produced must not be written to then: the graph could run its backward
    again. Fake tensors without a tracer (a memory estimate, say) are as good as eager.
    """
    if torch.compiler.is_compiling():
        return True
    if torch._C._dispatch_tls_local_include_set().raw_repr() == _PLAIN_KEYS:
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch.utils._python_dispatch._detect_infra_mode(key) for key in (keys.PROXY, keys.FUNCTIONAL))
