"""pin_buffers and ResidentCache. The meta device stands for "elsewhere" only where that is refused; dtype changes and
identity show on the CPU what tests/cuda repeats with a device to leave."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from syncfree_ext import PinHandle, ResidentCache, buffers, pin_buffers


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 1)
        self.bn = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("nothing", None)


NAMES = ["bn.running_mean", "bn.num_batches_tracked", "inner.1.running_var", "scale"]


def pinned(module: Vae) -> list[Tensor]:
    return [module.bn.running_mean, module.bn.num_batches_tracked, module.inner[1].running_var, module.scale]


class Moves:
    """Counts what a conversion does to tensors that hold something."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn, self.shapes = fn, []

    def __call__(self, t: Tensor) -> Tensor:
        if t.numel():
            self.shapes.append(tuple(t.shape))
        return self.fn(t)


def test_a_conversion_does_not_touch_pinned_buffers() -> None:
    vae = Vae()
    with pin_buffers(vae, NAMES, "cpu"):
        before, moves = pinned(vae), Moves(lambda t: t.clone())
        vae._apply(moves)
        assert all(a is b for a, b in zip(pinned(vae), before, strict=True))
        everything = len(list(vae.parameters())) + len(list(vae.buffers()))
        assert len(moves.shapes) == everything - len(NAMES), "all others are converted, once"


def test_a_change_of_dtype_is_followed() -> None:
    vae = Vae()
    vae.bn.running_mean.copy_(torch.tensor([1.0, 2.0, 1 / 3]))
    with pin_buffers(vae, NAMES, "cpu"):
        before = pinned(vae)
        vae.half()
        assert vae.bn.running_mean.dtype == torch.float16
        assert vae.bn.running_var.dtype == torch.float16
        assert vae.bn.num_batches_tracked is before[1], "integers keep their dtype and their memory"
        assert vae.bn.running_mean.tolist() == torch.tensor([1.0, 2.0, 1 / 3]).half().tolist()
        half = pinned(vae)
        vae.half().to("cpu").cpu().float().half()
        assert vae.bn.running_mean.dtype == torch.float16
        vae.to(torch.float16)
        assert all(t.data_ptr() == t2.data_ptr() for t, t2 in zip(pinned(vae)[1:2], half[1:2], strict=True))


def test_names_predicate_and_one_name() -> None:
    vae = Vae()
    for names in ("scale", ["scale"], ("scale", "scale"), lambda name, tensor: name == "scale" and tensor.dim() == 1):
        with pin_buffers(vae, names, "cpu"):
            moves = Moves(lambda t: t)
            vae._apply(moves)
            assert len(moves.shapes) == len(list(vae.parameters())) + len(list(vae.buffers())) - 1
    with pin_buffers(vae, lambda _name, _tensor: True, "cpu"):
        moves = Moves(lambda t: t)
        vae._apply(moves)
        assert len(moves.shapes) == len(list(vae.parameters()))


def test_remove_is_idempotent_and_leaves_no_trace() -> None:
    vae = Vae()
    before = {name: dict(module.__dict__) for name, module in vae.named_modules()}
    handle = pin_buffers(vae, NAMES, "cpu")
    assert isinstance(handle, PinHandle)
    handle.remove()
    handle.remove()
    for name, module in vae.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._load_state_dict_post_hooks
    old = vae.scale
    vae._apply(lambda t: t.clone())
    assert vae.scale is not old


def test_pins_nest() -> None:
    vae = Vae()
    outer = pin_buffers(vae, ["scale", "bn.running_mean"], "cpu")
    with pin_buffers(vae, "scale", "cpu"), pin_buffers(vae.bn, "running_mean", "cpu"):
        pass
    scale, mean = vae.scale, vae.bn.running_mean
    vae._apply(lambda t: t.clone())
    assert vae.scale is scale
    assert vae.bn.running_mean is mean
    outer.remove()
    vae._apply(lambda t: t.clone())
    assert vae.scale is not scale


def test_a_shared_module_is_pinned_once() -> None:
    shared = nn.BatchNorm1d(2)
    both = nn.ModuleDict({"a": shared, "b": shared})
    handle = pin_buffers(both, ["a.running_mean", "b.running_mean"], "cpu")
    mean = shared.running_mean
    both._apply(lambda t: t.clone())
    assert shared.running_mean is mean
    handle.remove()
    assert "_apply" not in shared.__dict__


def test_none_and_later_assignment() -> None:
    vae = Vae()
    with pin_buffers(vae, ["nothing", "scale"], "cpu"):
        vae.half()
        assert vae.nothing is None
        vae.nothing, vae.scale = torch.ones(2), torch.zeros(5)
        moves = Moves(lambda t: t.clone())
        kept = vae.nothing, vae.scale
        vae._apply(moves)
        assert (vae.nothing, vae.scale) == kept or (vae.nothing is kept[0] and vae.scale is kept[1])


def test_deepcopy_drops_the_pin() -> None:
    vae = Vae()
    with pin_buffers(vae, NAMES, "cpu"):
        for other in (copy.deepcopy(vae), copy.deepcopy(copy.deepcopy(vae))):
            before = pinned(other)
            other._apply(lambda t: t.clone())
            assert not any(a is b for a, b in zip(pinned(other), before, strict=True))
            other.double()
            assert all(t.dtype in (torch.float64, torch.int64) for t in pinned(other))
            other.load_state_dict(vae.state_dict())
            assert vae.scale.dtype == torch.float32
        mean = vae.bn.running_mean
        vae._apply(lambda t: t.clone())
        assert vae.bn.running_mean is mean


def test_pickle_drops_the_pin() -> None:
    vae = Vae()
    with pin_buffers(vae, NAMES, "cpu"):
        buffer = io.BytesIO()
        torch.save(vae, buffer)
        buffer.seek(0)
        for other in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(vae))):
            before = pinned(other)
            other._apply(lambda t: t.clone())
            assert not any(a is b for a, b in zip(pinned(other), before, strict=True))
            other.load_state_dict(vae.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(assign: bool) -> None:
    vae, other = Vae(), Vae()
    other.bn.running_mean.fill_(5)
    with pin_buffers(vae, NAMES, "cpu"):
        mean = vae.bn.running_mean
        assert list(vae.state_dict()) == list(other.state_dict())
        vae.load_state_dict(other.state_dict(), assign=assign)
        assert (vae.bn.running_mean is mean) == (not assign)
        assert vae.bn.running_mean.tolist() == [5.0] * 3
        kept = vae.bn.running_mean
        vae._apply(lambda t: t.clone())
        assert vae.bn.running_mean is kept


def test_meta_is_refused_and_nothing_is_lost() -> None:
    vae = Vae()
    handle = pin_buffers(vae.bn, "running_mean", "cpu")
    for move in (lambda: vae.bn.to("meta"), lambda: vae.bn.to_empty(device="meta")):
        with pytest.raises(RuntimeError, match=r"running_mean is pinned to cpu and would lose its values.*remove\(\)"):
            move()
        assert vae.bn.running_mean.device.type == vae.bn.running_var.device.type == "cpu"
    handle.remove()
    assert vae.bn.to("meta").running_mean.device.type == "meta"


def test_meta_is_refused_before_anything_is_lost() -> None:
    vae = Vae()
    with pin_buffers(vae, "inner.1.running_var", "cpu"):
        with pytest.raises(RuntimeError, match="running_var is pinned to cpu"):
            vae.to("meta")
        with pytest.raises(RuntimeError, match="running_var is pinned to cpu"):
            vae.inner[1].to("meta")
        assert {t.device.type for t in (*vae.parameters(), *vae.buffers())} == {"cpu"}
    vae.to("meta")
    assert {t.device.type for t in (*vae.parameters(), *vae.buffers())} == {"meta"}


def test_a_conversion_that_fails_loses_nothing() -> None:
    def fails(t: Tensor) -> Tensor:
        if t.numel():
            raise ZeroDivisionError
        return t

    vae = Vae()
    with pin_buffers(vae, NAMES, "cpu"):
        before = pinned(vae)
        for module in (vae, vae.bn, vae.inner[1]):
            with pytest.raises(ZeroDivisionError):
                module._apply(fails)
        assert all(a is b for a, b in zip(pinned(vae), before, strict=True))


def test_another_wrapper_is_kept() -> None:
    calls = []
    bn = nn.BatchNorm1d(2)
    original = bn._apply

    def wrapper(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        calls.append(fn)
        return original(fn, recurse)

    bn._apply = wrapper  # type: ignore[method-assign]
    handle = pin_buffers(bn, "running_mean", "cpu")
    bn.half()
    handle.remove()
    bn.float()
    assert len(calls) == 2
    assert bn.running_mean.dtype == torch.float32


def test_a_pinned_module_is_freed() -> None:
    vae = Vae()
    handle = pin_buffers(vae, NAMES, "cpu")
    pins = buffers._Pins.of(vae.bn)
    assert pins is not None
    owner = pins._owner
    del vae
    gc.collect()
    assert owner() is None
    handle.remove()


@pytest.mark.parametrize(
    ("module", "names", "device", "error", "message"),
    [
        (1, "x", "cpu", TypeError, "module must be a torch.nn.Module, got int"),
        (Vae(), "bn.runing_mean", "cpu", ValueError, "got 'bn.runing_mean'; near: bn.running_mean"),
        (Vae(), ["bn.weight"], "cpu", ValueError, "names must be buffers of the module, got 'bn.weight'"),
        (Vae(), [3], "cpu", TypeError, "names must be strings, got 3"),
        (Vae(), "scale", "meta", ValueError, "device must be a CPU or CUDA device, got meta"),
        (Vae().to("meta"), "scale", "cpu", ValueError, "scale must hold values, got a meta tensor"),
    ],
)
def test_errors(module: object, names: object, device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"syncfree_ext.pin_buffers: .*{message}|{message}"):
        pin_buffers(module, names, device)  # type: ignore[arg-type]


def test_a_pin_to_another_device_is_refused() -> None:
    vae = Vae()
    pins = buffers._Pins.attach(vae)
    pins._held["scale"] = (torch.device("cuda", 0), 1)
    with pytest.raises(ValueError, match="scale must not be pinned to another device, got cuda:0"):
        pin_buffers(vae, "scale", "cpu")


# -------------------------------------------------------------------------------------------------------- ResidentCache


def counted(fn: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[int]]:
    calls = [0]

    def run(*sources: object) -> Tensor:
        calls[0] += 1
        return fn(*sources)

    return run, calls


def test_computed_once(device: torch.device) -> None:
    fn, calls = counted(lambda var, eps: (var + eps).rsqrt())
    cache = ResidentCache(fn, device)
    var = torch.tensor([1.0, 4.0])
    first = cache(var, 0.0)
    assert first.device == device
    assert first.tolist() == [1.0, 0.5]
    assert cache(var, 0.0) is first
    assert cache(var, 1.0) is not first
    assert calls == [2]
    half = cache(var, 0.0, dtype=torch.float16)
    assert half.dtype == torch.float16
    assert cache(var, 0.0) is first


def test_a_write_computes_again(device: torch.device) -> None:
    fn, calls = counted(lambda x: x * 2)
    cache, x = ResidentCache(fn, device), torch.ones(2)
    cache(x)
    x.add_(1)
    assert cache(x).tolist() == [4.0, 4.0]
    x[0] = 7
    assert cache(x).tolist() == [14.0, 4.0]
    assert calls == [3]
    x.data.fill_(0)  # not counted by PyTorch, but on the CPU the values tell
    assert cache(x).tolist() == [0.0, 0.0]
    cache.clear()
    assert cache(x).tolist() == [0.0, 0.0]
    assert calls == [5]


def test_another_tensor_in_the_same_place(device: torch.device) -> None:
    """Even where a new tensor gets the id of one that is gone."""
    cache = ResidentCache(lambda x: x + 0, device)
    for i in range(200):
        assert cache(torch.full((2,), float(i))).tolist() == [float(i)] * 2


def test_numbers_and_lists(device: torch.device) -> None:
    fn, calls = counted(lambda values: torch.tensor(values))
    cache = ResidentCache(fn, device)
    first = cache([0.5, 1.5])
    assert cache([0.5, 1.5]) is first
    assert cache([0.5, 1.25]).tolist() == [0.5, 1.25]
    assert calls == [2]


@torch.no_grad()
def write_by_batch_norm(norm: nn.BatchNorm1d) -> None:
    norm(torch.randn(8, 2, device=norm.running_var.device) * 3 + 1)  # type: ignore[union-attr]


def write_by_a_fused_optimizer(norm: nn.BatchNorm1d) -> None:
    variance = norm.running_var
    assert variance is not None
    variance.grad = torch.ones_like(variance)
    torch.optim.SGD([variance.requires_grad_()], lr=0.1, fused=True).step()
    variance.requires_grad_(False)


def write_by_data(norm: nn.BatchNorm1d) -> None:
    norm.running_var.data.mul_(2.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("write", [write_by_batch_norm, write_by_a_fused_optimizer, write_by_data])
def test_writers_that_are_not_counted(write: Callable[[nn.BatchNorm1d], None]) -> None:
    """On the CPU the values themselves are compared."""
    norm = nn.BatchNorm1d(2)
    cache = ResidentCache(lambda var, eps: (var + eps).sqrt(), "cpu")
    for _ in range(3):
        write(norm)
        assert norm.running_var is not None
        assert torch.equal(cache(norm.running_var, norm.eps), (norm.running_var + norm.eps).sqrt())
    again = cache(norm.running_var, norm.eps)
    assert cache(norm.running_var, norm.eps) is again


def test_batch_norm_is_seen_by_what_it_counts(device: torch.device) -> None:
    """On a device, where values are not read, its number of batches tells."""
    norm = nn.BatchNorm1d(2, device=device)
    assert norm.running_var is not None
    cache = ResidentCache(lambda var, eps, _: (var + eps).sqrt(), device)
    for _ in range(3):
        write_by_batch_norm(norm)
        found = cache(norm.running_var, norm.eps, norm.num_batches_tracked)
        assert torch.equal(found, (norm.running_var + norm.eps).sqrt())
    assert cache(norm.running_var, norm.eps, norm.num_batches_tracked) is found


def test_equal_sources_of_different_types(device: torch.device) -> None:
    cache = ResidentCache(lambda values: torch.tensor(values), device)
    for values in ([1, 0], (1, 0), [True, False], [1.0, 0.0], [1.0, -0.0], [[1, 0]], 0, 0.0, -0.0, False):
        found, right = cache(values), torch.tensor(values)  # type: ignore[arg-type]
        assert found.dtype == right.dtype
        assert str(found.tolist()) == str(right.tolist())
        assert cache(values) is found  # type: ignore[arg-type]


def test_lists_of_tensors(device: torch.device) -> None:
    cache = ResidentCache(lambda pair: pair[0] + pair[1][0], device)
    a, b = torch.ones(2), torch.ones(2)
    first = cache([a, [b]])
    assert cache([a, [b]]) is first
    b.add_(1)
    assert cache([a, [b]]).tolist() == [3.0, 3.0]


def test_filled_in_inference_mode_and_used_in_training(device: torch.device) -> None:
    cache = ResidentCache(lambda v: (v + 3).rsqrt(), device)
    var, linear = torch.ones(3), nn.Linear(3, 3, device=device)
    x = torch.ones(2, 3, device=device)
    with torch.inference_mode():
        first = cache(var)
    (linear(x) * cache(var)).sum().backward()
    assert cache(var) is first
    assert linear.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_any_values_stay_the_same(dtype: torch.dtype) -> None:
    """NaN too, and no more than what was written makes a difference."""
    values = torch.tensor([math.nan, 0.0, 1.0]).to(dtype)
    cache = ResidentCache(lambda x: x.clone(), "cpu")
    for x in (values, values[2], values[:0], values.expand(2, 3), values.real):
        first = cache(x)
        assert cache(x) is first
    values.data[1] = -0.0 if dtype.is_floating_point else 1
    assert str(cache(values)[1].item()) == str(values[1].item())


def test_copies_have_results_of_their_own(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = ResidentCache(torch.sqrt, device, size=3)
            self.register_buffer("var", torch.full((2,), 4.0))

    model = Model()
    first = model.cache(model.var)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.cache)), copy.copy(model.cache)):
        cache = copied if isinstance(copied, ResidentCache) else copied.cache
        assert cache is not model.cache
        assert cache.device == device
        assert cache(model.var) is not first
        assert cache(model.var).tolist() == [2.0, 2.0]


def test_threads_share_a_cache() -> None:
    cache = ResidentCache(lambda x: torch.tensor(x), "cpu", size=1)

    def work(x: float) -> bool:
        return all(cache(x).item() == x for _ in range(3000))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, [0.0, 1.0, 2.0, 3.0]))
    finally:
        sys.setswitchinterval(interval)


def test_the_least_used_goes(device: torch.device) -> None:
    fn, calls = counted(lambda x: torch.tensor(x))
    cache = ResidentCache(fn, device, size=2)
    for x in (1.0, 2.0, 1.0, 3.0, 1.0):
        cache(x)
    assert calls == [3]
    cache(2.0)
    assert calls == [4]


def test_inference_tensors_are_computed_each_time(device: torch.device) -> None:
    fn, calls = counted(lambda x: x * 1)
    cache = ResidentCache(fn, device)
    with torch.inference_mode():
        x = torch.ones(2)
        cache(x)
        x.fill_(2)
        assert cache(x).tolist() == [2.0, 2.0]
    assert calls == [2]


def test_no_gradient_and_errors(device: torch.device) -> None:
    x = torch.ones(2, requires_grad=True)
    assert not ResidentCache(lambda t: t * 2, device)(x).requires_grad
    with pytest.raises(TypeError, match="fn must return a tensor, got float"):
        ResidentCache(lambda: 1.0, device)()  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="size must be at least 1"):
        ResidentCache(lambda t: t, device, size=0)
