"""Small buffers that stay on the training device while the rest of their module goes to the host and back.

An offloaded module whose few running statistics are read in each step uploads them in each step, and an upload from
ordinary memory makes the host wait. `pin_buffers` leaves them where they are read; `ResidentCache` keeps what is
derived from them, or from constants.
"""

from __future__ import annotations

import difflib
import numbers
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from . import _checks
from ._slots import resolve_device

Predicate: TypeAlias = "Callable[[str, Tensor], bool]"

_NAME = "syncfree_ext.pin_buffers"
_ATTRIBUTE = "_apply"  # what .to(), .cpu(), .cuda(), .half(), ... of nn.Module call, for the children as well


class PinHandle:
    """What `pin_buffers` returns: `remove()` ends the pin, as does leaving a `with` block. Idempotent."""

    def __init__(self, pins: list[tuple[_Pins, str | None]]) -> None:
        self._pins = pins

    def remove(self) -> None:
        """End the pin. The buffers stay where they are until the module is moved the next time."""
        for pins, name in self._pins:
            pins.release(name)
        self._pins = []

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def pin_buffers(
    module: nn.Module, names: str | Iterable[str] | Predicate, device: torch.device | str | int
) -> PinHandle:
    """Keep buffers of a module on a device, wherever `.to()`, `.cpu()`, `.cuda()` or `.half()` send the module.

        handle = pin_buffers(vae, ["bn.running_mean", "bn.running_var"], "cuda")
        vae.cpu()  # the two buffers stay, and nothing is transferred for them
        latents = (latents - vae.bn.running_mean) / (vae.bn.running_var + eps).sqrt()

    The buffers move to the device now, and stay there: a change of dtype is followed, on the device; a change of device
    is not, and copies nothing. Their memory stays the same unless the dtype changes; `share_memory` does not reach it.
    Buffers that are assigned later are moved at the next change of the module. `state_dict` holds them as they are, on
    that device; `load_state_dict` copies into them, and with assign=True moves what was assigned. A deep copy, and an
    unpickled module, have no pin.

    Pins may overlap: a buffer is free when the last handle that names it is removed. While the module is elsewhere it
    has tensors on two devices, so that its own forward, and code that takes the device of "the first buffer", fail:
    pin what you read yourself.

    It works by wrapping `_apply` of the submodules that own the buffers, through which nn.Module makes all its
    conversions; that method is not documented, so use `ResidentCache` where you would rather not depend on it.

    Args:
        module: the module, or one that holds it.
        names: names of buffers as in `named_buffers()`, one or several, or a function of name and tensor that says
            which. A name that holds None is fine.
        device: where they stay: a CUDA device, or the CPU.

    Returns:
        A handle; `handle.remove()` ends the pin, as does leaving a with block.

    Raises:
        TypeError: module is no nn.Module, or a name no string.
        ValueError: a name is no buffer's, a buffer is pinned to another device, or device is neither.
        RuntimeError: from `.to("meta")` of the module, which would lose the values: remove the handle first.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_NAME}: module must be a torch.nn.Module, got {type(module).__name__}")
    device = resolve_device(_NAME, device)
    owners = _owners(module, names)
    for owner, name in owners:
        pins = _Pins.of(owner)
        if pins is not None and pins.device_of(name) not in (None, device):
            raise ValueError(f"{_NAME}: {name} must not be pinned to another device, got {pins.device_of(name)}")
    for owner, name in owners:
        buffer = owner._buffers[name]
        if buffer is not None and buffer.device.type == "meta":
            raise ValueError(f"{_NAME}: {name} must hold values, got a meta tensor; load it first")
    held: list[tuple[_Pins, str | None]] = [(_Pins.attach(owner).hold(name, device), name) for owner, name in owners]
    # The module itself looks for pins below it before it converts anything: nothing is half done when it refuses.
    return PinHandle([*held, (_Pins.attach(module).watch(), None)])


def _owners(module: nn.Module, names: str | Iterable[str] | Predicate) -> list[tuple[nn.Module, str]]:
    """The submodules that own the buffers, and the names there; each once."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in owner._buffers:
            found[f"{prefix}.{name}" if prefix else name] = (owner, name)
    if callable(names):
        values = {path: owner._buffers[name] for path, (owner, name) in found.items()}
        chosen = [path for path, value in values.items() if value is not None and names(path, value)]
    else:
        chosen = [names] if isinstance(names, str) else list(names)
    for path in chosen:
        if not isinstance(path, str):
            raise TypeError(f"{_NAME}: names must be strings, got {path!r}")
        if path not in found:
            near = difflib.get_close_matches(path, found, n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise ValueError(f"{_NAME}: names must be buffers of the module, got {path!r}{hint}")
    return list({(id(found[path][0]), found[path][1]): found[path] for path in chosen}.values())


class _Pins:
    """The pins of one module, and how many look for pins below it; called in place of its `_apply`."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._wrapped: Callable[..., nn.Module] | None = owner.__dict__.get(_ATTRIBUTE)  # somebody else's
        self._held: dict[str, tuple[torch.device, int]] = {}
        self._watchers = 0
        self._loading = owner.register_load_state_dict_post_hook(_AfterLoading(self))

    @staticmethod
    def of(owner: nn.Module) -> _Pins | None:
        pins = owner.__dict__.get(_ATTRIBUTE)
        return pins if isinstance(pins, _Pins) else None

    @staticmethod
    def attach(owner: nn.Module) -> _Pins:
        pins = _Pins.of(owner)
        if pins is None:
            pins = _Pins(owner)
            owner.__dict__[_ATTRIBUTE] = pins
        return pins

    def device_of(self, name: str) -> torch.device | None:
        return self._held[name][0] if name in self._held else None

    def hold(self, name: str, device: torch.device) -> _Pins:
        self._held[name] = (device, self._held[name][1] + 1 if name in self._held else 1)
        self.bring_back()
        return self

    def watch(self) -> _Pins:
        self._watchers += 1
        return self

    def release(self, name: str | None) -> None:
        if name is None:
            self._watchers -= 1
        else:
            device, holders = self._held.pop(name)
            if holders > 1:
                self._held[name] = (device, holders - 1)
        owner = self._owner()
        if not self._held and not self._watchers and owner is not None and owner.__dict__.get(_ATTRIBUTE) is self:
            self._loading.remove()
            del owner.__dict__[_ATTRIBUTE]
            if self._wrapped is not None:
                owner.__dict__[_ATTRIBUTE] = self._wrapped

    @torch.no_grad()
    def bring_back(self) -> None:
        """Move to their devices those that are elsewhere: pinned just now, assigned or loaded."""
        owner = self._owner()
        assert owner is not None
        for name, (device, _) in self._held.items():
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.device != device:
                owner._buffers[name] = buffer.to(device)

    @torch.no_grad()
    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        owner = self._owner()
        assert owner is not None
        recurse = kwargs.get("recurse", args[0] if args else True)
        for module in owner.modules() if recurse else [owner]:
            below = _Pins.of(module)
            if below is not None:
                below.refuse_meta(fn)
        self.bring_back()
        kept = {name: owner._buffers[name] for name in self._held if owner._buffers.get(name) is not None}
        converted: dict[str, Tensor] = {}
        for name, buffer in kept.items():
            assert buffer is not None
            # What fn does to no elements at all tells the dtype, and transfers nothing.
            probe = fn(buffer.new_empty(0))
            converted[name] = buffer if probe.dtype == buffer.dtype else buffer.to(probe.dtype)
        try:
            for name in kept:
                owner._buffers[name] = None  # so that the module's own loop leaves them out
            convert = self._wrapped or type(owner)._apply.__get__(owner)
            result: nn.Module = convert(fn, *args, **kwargs)
            kept.update(converted)
        finally:
            owner._buffers.update(kept)
        return result

    def refuse_meta(self, fn: Callable[[Tensor], Tensor]) -> None:
        owner = self._owner()
        assert owner is not None
        for name, (device, _) in self._held.items():
            buffer = owner._buffers.get(name)
            if buffer is not None and fn(buffer.new_empty(0)).device.type == "meta":
                raise RuntimeError(
                    f"{_NAME}: {name} is pinned to {device} and would lose its values on the meta device; call "
                    "remove() of the handle that pin_buffers returned, then move the module"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., nn.Module]:
        """A copy of the module has its plain method: deepcopy has put the copy into memo before its attributes."""
        owner = self._owner()
        copied = memo[id(owner)]
        return type(copied)._apply.__get__(copied)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), _ATTRIBUTE)


class _AfterLoading:
    """load_state_dict(assign=True) puts other tensors in place."""

    def __init__(self, pins: _Pins | None) -> None:
        self._pins = pins

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        if self._pins is not None:
            self._pins.bring_back()

    def __deepcopy__(self, memo: dict[int, Any]) -> _AfterLoading:
        return _AfterLoading(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AfterLoading, (None,)


Source: TypeAlias = "Tensor | complex | tuple[Source, ...] | list[Source]"


class ResidentCache:
    """The result of a function of small tensors or numbers, kept on the device until these change.

        inverse_std = ResidentCache(lambda var, eps: (var + eps).rsqrt(), "cuda")
        latents = latents * inverse_std(vae.bn.running_var, vae.bn.eps, dtype=latents.dtype)

    The function runs where its arguments are; only its result is moved and cast. A call with the same arguments returns
    the same tensor and does nothing else. A tensor on the CPU is the same if it is the same object and holds the same
    values; they are compared in each call, so keep it small. A tensor on another device cannot be read without waiting:
    it is the same if it is the same object and its version counter says that nobody has written to it. Not all writers
    count there. Those that do not: BatchNorm, which in training updates its running statistics; optimizers with
    fused=True; collectives of torch.distributed; `.data`; other libraries. Pass what they do count as one more argument
    that the function ignores, or call `clear`:

        cache = ResidentCache(lambda var, eps, batches: (var + eps).rsqrt(), "cuda")
        cache(bn.running_var, bn.eps, bn.num_batches_tracked)

    Numbers, and lists of them, are the same if type and value are. A tensor made in inference mode has no version, and
    its result is computed in each call. Two threads may use one object.

    No module is changed, so it works where `pin_buffers` is not wanted; but a module that is moved gets new tensors, so
    that the next call computes, and transfers, once more.

    Args:
        fn: of the arguments of a call to a tensor. Gradients are not tracked, and the result can be used in training,
            also where the call that computed it was in inference mode.
        device: where the result is kept.
        size: how many results are kept, for different arguments or dtypes; the one that was not used for longest goes.

    Raises:
        ValueError: device is neither a CPU nor a CUDA device, or size is below 1.
    """

    def __init__(self, fn: Callable[..., Tensor], device: torch.device | str | int, *, size: int = 8) -> None:
        self.device = resolve_device("syncfree_ext.ResidentCache", device)
        _checks.check_at_least("syncfree_ext.ResidentCache", "size", size, 1)
        self._fn, self._size = fn, size
        self._results: OrderedDict[Any, tuple[tuple[_Seen, ...], Tensor]] = OrderedDict()
        self._lock = threading.Lock()  # of the results: not held while fn runs

    def __call__(self, *sources: Source, dtype: torch.dtype | None = None) -> Tensor:
        """The function of sources, on the device.

        Args:
            sources: tensors on any device, numbers, and tuples or lists of these.
            dtype: of the result. None: that of the function.
        """
        tensors = list(_tensors_of(sources))
        if any(tensor.is_inference() for tensor in tensors):
            return self._compute(sources, dtype)
        key = (dtype, _identity(sources))
        with self._lock:
            found = self._results.get(key)
            if found is not None and all(map(_Seen.is_still, found[0], tensors)):
                self._results.move_to_end(key)
                return found[1]
        with torch.inference_mode(False):
            seen = tuple(map(_Seen, tensors))  # before fn reads them
            result = self._compute(sources, dtype)
        with self._lock:
            self._results[key] = (seen, result)
            self._results.move_to_end(key)
            while len(self._results) > self._size:
                self._results.popitem(last=False)
        return result

    @torch.no_grad()
    def _compute(self, sources: tuple[Source, ...], dtype: torch.dtype | None) -> Tensor:
        result = self._fn(*sources)
        if not isinstance(result, Tensor):
            raise TypeError(f"syncfree_ext.ResidentCache: fn must return a tensor, got {type(result).__name__}")
        return result.to(self.device, result.dtype if dtype is None else dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, of a module that holds it say, has its own results: none yet."""
        return _new_cache, (self._fn, self.device, self._size)

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._results.clear()


def _new_cache(fn: Callable[..., Tensor], device: torch.device, size: int) -> ResidentCache:
    return ResidentCache(fn, device, size=size)


class _Seen:
    """A tensor as it was when a result was computed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)  # tells a new tensor from an old one whose id it has
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested and not tensor.is_quantized
        is_readable = is_plain and tensor.is_cpu and tensor.layout is torch.strided
        self._values = _bytes_of(tensor).clone() if is_readable else None

    def is_still(self, tensor: Tensor) -> bool:
        return self._tensor() is tensor and (self._values is None or torch.equal(self._values, _bytes_of(tensor)))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Of the values, so that NaN is what it was, and 0.0 is not -0.0."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _tensors_of(sources: Iterable[Source]) -> Iterator[Tensor]:
    for source in sources:
        if isinstance(source, Tensor):
            yield source
        elif isinstance(source, (list, tuple)):
            yield from _tensors_of(source)


def _identity(source: Any) -> Any:
    """What differs for sources that are told apart without a look at values on a device."""
    if isinstance(source, Tensor):
        return id(source), source._version, source.dtype
    if isinstance(source, (list, tuple)):
        return type(source), tuple(map(_identity, source))
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return type(source), repr(source) if isinstance(source, numbers.Number) else source
