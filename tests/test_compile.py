"""The losses inside torch.compile, make_fx and torch.export.

Most cases use the backend "aot_eager", which traces all that inductor would see; inductor itself runs in one
module-scoped case, because its first compilation takes half a minute on a slow machine.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import syncfree_ext as sf

HIDDEN, CLASSES = 12, 37

FLAGS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_logsumexp")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Batch:
    def __init__(
        self, device: torch.device, rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
    ) -> None:
        def leaf(*size: int) -> Tensor:
            return torch.randn(size, generator=rng).to(device, dtype).requires_grad_()

        self.input = leaf(*shape, HIDDEN)
        self.weight = leaf(CLASSES, HIDDEN)
        self.bias = leaf(CLASSES)
        self.target = torch.randint(CLASSES, shape, generator=rng).to(device)
        self.target[torch.rand(shape, generator=rng).to(device) < 0.3] = -100

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input, self.weight, self.bias


def loss_of(batch: Batch, **options: Any) -> Any:
    return sf.linear_cross_entropy(batch.input, batch.weight, batch.target, linear_bias=batch.bias, **options)


def gradients_of(loss: Tensor, batch: Batch, upstream: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad((loss * upstream).sum(), batch.leaves))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        a, e = a.detach().double(), e.detach().double()
        assert float((a - e).norm()) <= tolerance * float(e.norm()), (a, e)


def options_on(device: torch.device, rng: torch.Generator, shape: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "number": {"num_items": 7},
        "float": {"num_items": 7.5},
        "tensor": {"num_items": torch.tensor(9, device=device)},
        "weights": {
            "weight": torch.rand(CLASSES, generator=rng).to(device),
            "token_weight": torch.rand(shape, generator=rng).to(device),
        },
        "floats": {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.7, "z_loss_weight": 1e-3},
        "schedules": {
            "logit_scale": torch.tensor(0.7, device=device),
            "z_loss_weight": torch.tensor(1e-3, device=device),
        },
        "shift": {"shift": 1, "token_scaling": True},
        "chunks": {"chunk_rows": 5, "workspace_bytes": 4096, "accum_dtype": torch.float32},
        "ignore": {"ignore_index": 3},
        "extras": dict.fromkeys(FLAGS, True),
        "extras of rows": dict.fromkeys(FLAGS, True) | {"reduction": "none"},
    }


@pytest.mark.parametrize("case", list(options_on(torch.device("cpu"), torch.Generator(), (1,))))
def test_one_graph_with_the_values_of_eager(case: str, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 3, 8)
    options = options_on(device, rng, (3, 8))[case]
    if case == "ignore":
        batch.target[batch.target < 0] = 3

    def step(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
        return sf.linear_cross_entropy(input, weight, target, linear_bias=bias, **options)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected, actual = step(*batch.leaves, batch.target), compiled(*batch.leaves, batch.target)
    if "extras" in case:
        assert_close(actual, expected)
        assert not any(extra.requires_grad for extra in actual[1:])
        assert type(actual) is sf.LinearCrossEntropyOutput
        expected, actual = expected.loss, actual.loss
    assert_close([actual], [expected])
    for upstream in (1.0, 3.0):
        expected, actual = step(*batch.leaves, batch.target), compiled(*batch.leaves, batch.target)
        expected, actual = (v[0] if "extras" in case else v for v in (expected, actual))
        assert_close(gradients_of(actual, batch, upstream), gradients_of(expected, batch, upstream))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_loss(reduction: str, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 3, 8)

    def step(logits: Tensor, target: Tensor) -> Any:
        return sf.cross_entropy(logits, target, reduction=reduction, softcap=3.0, return_logsumexp=True)

    expected = step(F.linear(*batch.leaves), batch.target)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(F.linear(*batch.leaves), batch.target)
    assert_close([actual.loss, actual.logsumexp], [expected.loss, expected.logsumexp])
    assert_close(gradients_of(actual.loss, batch, 3.0), gradients_of(expected.loss, batch, 3.0))


def test_no_graph_break(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 3, 8)
    explanation = torch._dynamo.explain(lambda: loss_of(batch, num_items=3, **dict.fromkeys(FLAGS, True)))()
    assert explanation.graph_break_count == 0, explanation.break_reasons


# --------------------------------------------------------------------------------------------------- recompilation
# With dynamic=True the first call may trace twice: floats are symbols first, and constants once an op has taken them.


def count_compilations(dynamic: bool | None = None) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")

    def step(batch: Batch, **options: Any) -> Any:
        return loss_of(batch, **options)

    return torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic), counter


def test_counts_and_targets_do_not_recompile(device: torch.device, rng: torch.Generator) -> None:
    step, counter = count_compilations()
    batch = Batch(device, rng, 3, 8)
    for ignored in (0, 1, 7, 24, 3):
        batch.target = torch.randint(CLASSES, (3, 8), generator=rng).to(device)
        batch.target.view(-1)[:ignored] = -100
        loss = step(batch)
        assert_close(gradients_of(loss, batch), gradients_of(loss_of(batch), batch))
    assert counter.frame_count == 1


@pytest.mark.parametrize("option", ["num_items", "logit_scale", "z_loss_weight"])
def test_scalar_tensors_do_not_recompile(option: str, device: torch.device, rng: torch.Generator) -> None:
    step, counter = count_compilations()
    batch = Batch(device, rng, 3, 8)
    values = [step(batch, **{option: torch.tensor(value, device=device)}).item() for value in (0.25, 1.0, 3.0)]
    assert counter.frame_count == 1
    assert len(set(values)) == 3


def test_integer_num_items_does_not_recompile(device: torch.device, rng: torch.Generator) -> None:
    step, counter = count_compilations(dynamic=True)
    batch = Batch(device, rng, 3, 8)
    step(batch, num_items=3)
    compilations = counter.frame_count
    for number in (5, 17, 1000):
        assert_close([step(batch, num_items=number)], [loss_of(batch, num_items=number)])
    assert counter.frame_count == compilations


@pytest.mark.parametrize("numbers", [(5, 17, 1000, 12345), (5.5, 17.25, 0.125, 12345.0)], ids=["int", "float"])
def test_automatic_dynamic_num_items_recompiles_once(
    numbers: tuple[float, ...], device: torch.device, rng: torch.Generator
) -> None:
    step, counter = count_compilations()
    batch = Batch(device, rng, 3, 8)
    for number in numbers:
        assert_close([step(batch, num_items=number)], [loss_of(batch, num_items=number)])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dynamic_shapes_compile_once(reduction: str, device: torch.device, rng: torch.Generator) -> None:
    step, counter = count_compilations(dynamic=True)
    step(Batch(device, rng, 4, 6), reduction=reduction)
    compilations = counter.frame_count
    for shape in ((3, 8), (2, 5), (7, 16)):
        batch = Batch(device, rng, *shape)
        loss = step(batch, reduction=reduction)
        assert loss.shape == (shape if reduction == "none" else ())
        assert_close(gradients_of(loss, batch, 3.0), gradients_of(loss_of(batch, reduction=reduction), batch, 3.0))
    assert counter.frame_count == compilations


def test_dynamic_vocabulary(device: torch.device, rng: torch.Generator) -> None:
    def step(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return sf.linear_cross_entropy(input, weight, target)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    compilations = 0
    for rows, hidden, classes in ((5, 8, 11), (9, 16, 70), (33, 4, 130)):
        hidden_states = torch.randn(rows, hidden, generator=rng).to(device).requires_grad_()
        weight = torch.randn(classes, hidden, generator=rng).to(device).requires_grad_()
        target = torch.randint(classes, (rows,), generator=rng).to(device)
        expected = torch.autograd.grad(step(hidden_states, weight, target), (hidden_states, weight))
        assert_close(torch.autograd.grad(compiled(hidden_states, weight, target), (hidden_states, weight)), expected)
        compilations = compilations or counter.frame_count
    assert counter.frame_count == compilations


# ------------------------------------------------------------------------------------------------------- the graphs


def traced_graphs(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str], list[str]]:
    """The result of the compiled function, and the nodes of its forward and backward graphs."""
    graphs: dict[str, list[str]] = {"forward": [], "backward": []}

    def record(kind: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            # With its arguments: a functionalised op is an argument of a wrapper.
            graphs[kind] += [f"{n.target} {n.args} {n.kwargs}" for n in graph.graph.nodes if n.op == "call_function"]
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=record("forward"), bw_compiler=record("backward"))
    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return result, graphs["forward"], graphs["backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_graph_scales_out_of_place(dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24, dtype=dtype)
    loss, forward, backward = traced_graphs(lambda *leaves: loss_of(batch) * 3, *batch.leaves)
    actual = torch.autograd.grad(loss, batch.leaves)
    assert len([node for node in forward if node.startswith("syncfree.flce_forward.default")]) == 1
    assert not [node for node in forward + backward if "scale_unless_one_" in node or "flce_backward" in node]
    assert all(a.dtype == dtype for a in actual)
    # Half: in eager too the stored gradient is multiplied by 3 and rounded once more.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert_close(actual, torch.autograd.grad(loss_of(batch) * 3, batch.leaves), tolerance)


def test_upstream_is_not_rounded_to_the_gradient_dtype(device: torch.device, rng: torch.Generator) -> None:
    """1 + 2^-8 is 1 in bfloat16: applied there it would leave the gradients as they are."""
    batch = Batch(device, rng, 24, dtype=torch.bfloat16)
    loss, _, _ = traced_graphs(lambda *leaves: loss_of(batch), *batch.leaves)
    upstream = torch.tensor(1 + 2.0**-8, device=device)
    scaled = torch.autograd.grad(loss, batch.leaves, upstream)
    plain = torch.autograd.grad(loss_of(batch), batch.leaves)
    for a, e in zip(scaled[:2], plain[:2], strict=True):
        assert torch.equal(a, (e.float() * upstream).bfloat16())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_graph_computes_no_gradient(mode: Any, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with mode():
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
        loss = torch.compile(lambda: loss_of(batch), backend=backend, fullgraph=True)()
    assert not loss.requires_grad
    (node,) = [node for graph in graphs for node in graph.graph.nodes if "flce_forward" in str(node.target)]
    assert not any(node.kwargs.get(name) for name in ("need_dx", "need_dw", "need_db"))


def test_frozen_weight_stays_frozen(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    weight = batch.weight.detach()

    def step(input: Tensor) -> Tensor:
        return sf.linear_cross_entropy(input, weight, batch.target)

    loss, _, _ = traced_graphs(step, batch.input)
    (actual,) = torch.autograd.grad(loss, [batch.input])
    assert_close([actual], torch.autograd.grad(step(batch.input), [batch.input]))
    weight.requires_grad_()
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(batch.input)
    assert_close(torch.autograd.grad(loss, [weight]), torch.autograd.grad(step(batch.input), [weight]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_backward_without_donated_buffers(reduction: str, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    with torch._functorch.config.patch(donated_buffer=False):
        compiled = torch.compile(
            lambda *leaves: loss_of(batch, reduction=reduction), backend="aot_eager", fullgraph=True
        )
        loss = compiled(*batch.leaves).sum()
        for upstream in (2.0, 3.0, 1.0, 1.0):
            actual = torch.autograd.grad(loss * upstream, batch.leaves, retain_graph=True)
            expected = torch.autograd.grad(loss_of(batch, reduction=reduction).sum() * upstream, batch.leaves)
            assert_close(actual, expected)


def test_whole_step_in_one_graph(device: torch.device, rng: torch.Generator) -> None:
    """make_fx over forward and backward: the joint graph runs again with the same result."""
    batch = Batch(device, rng, 24)

    def step(input: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        loss = sf.linear_cross_entropy(input, weight, target)
        return (loss, *torch.autograd.grad(3 * loss, (input, weight)))

    expected = step(batch.input, batch.weight, batch.target)
    for tracing_mode in ("real", "fake", "symbolic"):
        graph = make_fx(step, tracing_mode=tracing_mode)(batch.input, batch.weight, batch.target)
        assert not [node for node in graph.graph.nodes if "scale_unless_one_" in str(node.target)]
        for _ in range(2):
            assert_close(graph(batch.input, batch.weight, batch.target), expected)


def test_autocast(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)

    def step(*leaves: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(batch)

    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(*batch.leaves)
    actual, expected = gradients_of(loss, batch, 3.0), gradients_of(step(), batch, 3.0)
    assert all(gradient.dtype == torch.float32 for gradient in actual)
    assert_close([loss, *actual], [step(), *expected])


def test_checkpoint(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)

    def head(input: Tensor, weight: Tensor) -> Tensor:
        return sf.linear_cross_entropy(torch.tanh(input), weight, batch.target)

    def step(input: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(head, input, weight, use_reentrant=False)

    leaves = batch.input, batch.weight
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
    assert_close(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * head(*leaves), leaves))


def test_compiled_autograd_over_an_eager_forward(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    expected = gradients_of(loss_of(batch), batch, 3.0)
    for _ in range(2):
        for leaf in batch.leaves:
            leaf.grad = None
        loss = loss_of(batch) * 3
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        assert_close([leaf.grad for leaf in batch.leaves], expected)


# -------------------------------------------------------------------------------------------------------- inductor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.head = sf.LinearCrossEntropyHead(
            HIDDEN, CLASSES, loss=sf.FusedLinearCrossEntropyLoss(softcap=9.0, shift=1)
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, num_items: Tensor | None = None) -> Any:
        return self.head(torch.tanh(self.embedding(tokens)), tokens, num_items=num_items)


@pytest.fixture(scope="module")
def inductor() -> tuple[Callable[..., Any], list[int]]:
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        compilations.append(1)
        return compile_fx(graph, inputs)

    return backend, compilations


@pytest.mark.slow
def test_inductor_trains_the_same_model(inductor: Any, device: torch.device, rng: torch.Generator) -> None:
    backend, compilations = inductor
    torch.manual_seed(0)
    eager, model = Model().to(device), Model().to(device)
    model.load_state_dict(eager.state_dict())
    assert model.head.weight is model.embedding.weight
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    first = 0
    for step, shape in enumerate(((3, 8), (2, 6), (4, 9), (3, 8))):
        tokens = torch.randint(CLASSES, shape, generator=rng).to(device)
        num_items = torch.tensor(5 + step, device=device)
        for run, owner in ((eager, eager), (compiled, model)):
            owner.zero_grad()
            (3 * run(tokens, num_items)).backward()
        assert_close([model.embedding.weight.grad], [eager.embedding.weight.grad])
        first = len(compilations) if step == 0 else first
    assert len(compilations) == first


@pytest.mark.slow
def test_inductor_repeats_backward(inductor: Any, device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    with torch._functorch.config.patch(donated_buffer=False):
        compiled = torch.compile(lambda *leaves: loss_of(batch), backend=inductor[0], fullgraph=True)
        loss = compiled(*batch.leaves)
        returned = []
        for upstream in (2.0, 3.0, 1.0, 1.0):
            actual = torch.autograd.grad(loss * upstream, batch.leaves, retain_graph=True)
            assert_close(actual, torch.autograd.grad(loss_of(batch) * upstream, batch.leaves))
            returned.append((upstream, actual))
        for upstream, actual in returned:
            assert_close(actual, torch.autograd.grad(loss_of(batch) * upstream, batch.leaves))


# ---------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_export(strict: bool, extras: bool, device: torch.device, rng: torch.Generator) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flags = dict.fromkeys(FLAGS, True) if extras else {}
            loss = sf.FusedLinearCrossEntropyLoss(softcap=9.0, **flags)
            self.head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES, bias=True, loss=loss)

        def forward(self, hidden: Tensor, target: Tensor) -> Any:
            return self.head(hidden, target)

    module = Loss().to(device)
    batch, other = Batch(device, rng, 3, 8), Batch(device, rng, 5, 2)
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(
        module, (batch.input.detach(), batch.target), dynamic_shapes=(shape, shape), strict=strict
    )
    names = [str(node.target) for node in exported.graph.nodes if "syncfree" in str(node.target)]
    assert len(names) == 1
    for program in (exported, exported.run_decompositions()):
        for example in (batch, other):
            expected = module(example.input.detach(), example.target)
            actual = program.module()(example.input.detach(), example.target)
            pairs = zip(actual, expected, strict=True) if extras else [(actual, expected)]
            for a, e in pairs:
                assert_close([a], [e])
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()(batch.input.detach(), batch.target)
    assert type(loaded) is (sf.LinearCrossEntropyOutput if extras else Tensor)
    right = module(batch.input.detach(), batch.target)
    assert_close(loaded if extras else [loaded], right if extras else [right])


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_divisor_of_the_shape(strict: bool, device: torch.device, rng: torch.Generator) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, w: Tensor, target: Tensor) -> Any:
            return sf.linear_cross_entropy(x, w, target, num_items=x.shape[0])

    small, large = Batch(device, rng, 6), Batch(device, rng, 9)
    rows = torch.export.Dim("rows", min=2)
    arguments = [(b.input.detach(), b.weight.detach(), b.target) for b in (small, large)]
    shapes = ({0: rows}, {}, {0: rows})
    program = torch.export.export(Loss(), arguments[0], dynamic_shapes=shapes, strict=strict)
    traced = make_fx(Loss(), tracing_mode="symbolic")(*arguments[0])
    for given in arguments:
        assert_close([program.module()(*given), traced(*given)], [Loss()(*given)] * 2)


def test_exported_selection(device: torch.device) -> None:
    class Select(nn.Module):
        def forward(self, mask: Tensor) -> Any:
            return sf.masked_indices(mask, 3)

    mask = torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool, device=device)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Select(), (mask,)), file)
    file.seek(0)
    found = torch.export.load(file).module()(mask)
    assert type(found) is sf.MaskedIndices
    assert found.indices.tolist() == [1, 2, 4]


def test_exported_module_trains(device: torch.device, rng: torch.Generator) -> None:
    head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES).to(device)
    batch = Batch(device, rng, 24)
    program = torch.export.export(head, (batch.input.detach(), batch.target))
    trained = program.module()
    (3 * trained(batch.input, batch.target)).backward()
    expected = torch.autograd.grad(3 * head(batch.input, batch.target), (batch.input, head.weight))
    (weight,) = trained.parameters()
    assert_close([batch.input.grad, weight.grad], expected)


def test_extras_that_were_not_asked_for_are_none(device: torch.device, rng: torch.Generator) -> None:
    batch = Batch(device, rng, 24)
    for flags in itertools.combinations(FLAGS, 2):
        compiled = torch.compile(
            lambda f=flags: loss_of(batch, **dict.fromkeys(f, True)), backend="aot_eager", fullgraph=True
        )
        output = compiled()
        asked = {flag.removeprefix("return_") for flag in flags}
        assert {name for name, value in output._asdict().items() if value is not None} == asked | {"loss"}
