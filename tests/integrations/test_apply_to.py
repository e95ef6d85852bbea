"""apply_to as its callers see it: arguments, outputs, copies, adapters, compilation, and that it can be undone."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import (
    GRADIENT,
    LOSS,
    SEQUENCE,
    VOCABULARY,
    assert_same_step,
    batch,
    model,
    step,
    transformers,
)
from torch import Tensor, nn

import syncfree_ext
from syncfree_ext.integrations._lazy_logits import HeadLinear, LazyLogits, Term, running
from syncfree_ext.integrations.transformers import apply_to, remove_from
from tolerances import assert_close_rel

needs_peft = pytest.mark.usefixtures("peft")


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is missing: requirements/integrations.txt")


@pytest.fixture
def net(rng: torch.Generator) -> Any:
    return model("gemma2", rng)  # a softcap and a tied head


@pytest.fixture
def inputs(rng: torch.Generator) -> dict[str, Tensor]:
    return batch(rng)


# ----------------------------------------------------------------------------------------------------------- arguments


NUM_ITEMS = [3, 3.5, torch.tensor(3), torch.tensor([3]), torch.tensor(3.5), torch.tensor(3, dtype=torch.int32)]


@pytest.mark.parametrize("num_items", NUM_ITEMS, ids=repr)
def test_num_items_is_applied_in_forward(net: Any, inputs: dict[str, Any], num_items: Any) -> None:
    inputs["num_items_in_batch"] = num_items
    stock = step(net, inputs)
    apply_to(net)
    ours = step(net, inputs)
    assert ours[0].loss.shape == ()
    stock[0].loss = stock[0].loss.reshape(())
    assert_same_step(ours, stock)
    # The last node is the op itself, so the upstream gradient is the 1 that backward() starts with.
    assert type(ours[0].loss.grad_fn).__name__ == "_FlceForwardBackward"


def test_shift_labels(net: Any, inputs: dict[str, Any], rng: torch.Generator) -> None:
    inputs["shift_labels"] = torch.randint(VOCABULARY, inputs["labels"].shape, generator=rng)
    stock = step(net, inputs)
    apply_to(net)
    assert_same_step(step(net, inputs), stock)


def test_positional_labels(net: Any, inputs: dict[str, Any]) -> None:
    apply_to(net)
    names = list(inspect.signature(net.forward).parameters)
    values = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    positional = net(*values)
    assert positional.logits is None
    torch.testing.assert_close(positional.loss, net(**inputs).loss)


def test_logits_to_keep(net: Any, inputs: dict[str, Any]) -> None:
    """With shift_labels of the kept positions there is a loss; with labels of all positions there is an error."""
    inputs["labels"][1, -1] = inputs["input_ids"][1, -1]  # of no target at all the stock loss is NaN
    inputs["shift_labels"] = inputs["labels"][:, -4:].contiguous()
    stock = step(net, inputs, logits_to_keep=4)
    apply_to(net)
    assert_same_step(step(net, inputs, logits_to_keep=4), stock)
    del inputs["shift_labels"]
    with pytest.raises(ValueError, match="target must have shape"):
        net(**inputs, logits_to_keep=4)
    assert net(inputs["input_ids"], logits_to_keep=4).logits.shape == (2, 4, VOCABULARY)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("applied", [None, True, False])
@pytest.mark.parametrize("called", [None, True, False])
def test_who_decides_about_logits(
    training: bool, applied: bool | None, called: bool | None, net: Any, inputs: dict[str, Any]
) -> None:
    apply_to(net, skip_logits=applied)
    net.train(training)
    outputs = net(**inputs) if called is None else net(**inputs, skip_logits=called)
    skipped = called if called is not None else applied if applied is not None else training
    assert (outputs.logits is None) == skipped
    as_tuple = net(**inputs, skip_logits=called, return_dict=False)
    assert [value.shape for value in as_tuple if isinstance(value, Tensor)][1:] == (
        [] if skipped else [(2, SEQUENCE, VOCABULARY)]
    )


@pytest.mark.parametrize("skip_logits", [True, False])
def test_token_accuracy_and_scaling(skip_logits: bool, net: Any, inputs: dict[str, Any]) -> None:
    logits = net(**inputs).logits.detach()[:, :-1].flatten(0, 1).double()
    target = inputs["labels"][:, 1:].flatten()
    # Make some predictions right, so that the accuracy is neither 0 nor 1.
    target = torch.where((target != -100) & (torch.arange(len(target)) % 3 > 0), logits.argmax(-1), target)
    inputs["labels"][:, 1:] = target.view(2, -1)
    valid = target != -100
    apply_to(net)
    outputs = net(**inputs, skip_logits=skip_logits, return_token_accuracy=True, use_token_scaling=True)
    accuracy = (logits.argmax(-1) == target)[valid].double().mean()
    assert 0 < accuracy < 1
    assert outputs.token_accuracy.shape == ()
    assert outputs["token_accuracy"].dtype == torch.float32
    torch.testing.assert_close(outputs.token_accuracy.double(), accuracy)
    losses = F.cross_entropy(logits, target, reduction="none")
    expected = (losses * torch.exp(-losses))[valid].mean()
    assert_close_rel(outputs.loss, expected, 1e-5, what="token scaling")


def test_arguments_that_need_labels(net: Any, inputs: dict[str, Any]) -> None:
    apply_to(net)
    for name in ("return_token_accuracy", "use_token_scaling"):
        with pytest.raises(ValueError, match=f"{name}.* need labels"):
            net(inputs["input_ids"], **{name: True})


def test_options_reach_the_loss(net: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from syncfree_ext.integrations import transformers as module

    seen: dict[str, Any] = {}

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return syncfree_ext.linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(module, "linear_cross_entropy", spy)
    apply_to(net, accum_dtype=torch.float32, chunk_rows=3, workspace_bytes=4096)
    net(**inputs)
    assert (seen["accum_dtype"], seen["chunk_rows"], seen["workspace_bytes"]) == (torch.float32, 3, 4096)
    assert (seen["softcap"], seen["logit_scale"], seen["shift"]) == (pytest.approx(3.0), pytest.approx(1.0), 1)


def test_all_labels_ignored(net: Any, inputs: dict[str, Any]) -> None:
    """The stock loss is NaN there; ours is 0, connected to the graph, with gradients that are 0."""
    inputs["labels"].fill_(-100)
    apply_to(net)
    outputs, gradients = step(net, inputs)
    assert outputs.loss == 0
    assert gradients
    assert all(not gradient.any() for gradient in gradients.values())


def test_label_out_of_range(net: Any, inputs: dict[str, Any]) -> None:
    inputs["labels"][1, 3] = VOCABULARY
    apply_to(net)
    with pytest.raises(IndexError):
        net(**inputs)


# ------------------------------------------------------------------------------------------ precision and checkpointing


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_low_precision(kind: str, net: Any, inputs: dict[str, Any]) -> None:
    """Within what the stock head loses by rounding its logits to bfloat16, and its loss is float32."""
    if kind == "bfloat16":
        net = net.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        stock = step(net, inputs)
        apply_to(net)
        ours = step(net, inputs)
    assert ours[0].loss.dtype == torch.float32
    assert_same_step(ours, stock, loss=8e-3, gradient=5e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, net: Any, inputs: dict[str, Any]) -> None:
    apply_to(net)
    plain = step(net, inputs)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.enable_input_require_grads()
    checkpointed = step(net, inputs, use_cache=False)
    assert_same_step(checkpointed, plain)


# -------------------------------------------------------------------------------------------------- copies and removal


def _copied(net: Any) -> Any:
    return copy.deepcopy(net)


def _pickled(net: Any) -> Any:
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("duplicate", [_copied, _pickled])
def test_a_copy_is_fused_and_independent(duplicate: Any, net: Any, inputs: dict[str, Any]) -> None:
    apply_to(net)
    other = duplicate(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    remove_from(net)
    outputs = other(**inputs)
    assert outputs.logits is None
    assert net(**inputs).logits is not None
    remove_from(other)
    torch.testing.assert_close(other(**inputs).loss, outputs.loss)


def test_names_signature_and_checkpoint_stay(net: Any, tmp_path: Path) -> None:
    before = (type(net).__name__, type(net).__module__, str(type(net)), inspect.signature(net.forward))
    state = set(net.state_dict())
    stock = type(net)
    apply_to(net)
    assert (type(net).__name__, type(net).__module__, str(type(net)), inspect.signature(net.forward)) == before
    assert isinstance(net, stock)
    assert set(net.state_dict()) == state
    net.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is stock
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=0, atol=0)


def test_removal(net: Any, inputs: dict[str, Any]) -> None:
    kinds = [type(module) for module in net.modules()]
    attributes = {name: set(module.__dict__) for name, module in net.named_modules()}
    stock = net(**inputs)
    apply_to(net)
    handle = apply_to(net)  # a second time renews the first
    assert net(**inputs).logits is None
    handle.remove()
    handle.remove()
    with apply_to(net) as again:
        assert again.model is net
        assert net(**inputs).logits is None
    assert [type(module) for module in net.modules()] == kinds
    assert {name: set(module.__dict__) for name, module in net.named_modules()} == attributes
    torch.testing.assert_close(net(**inputs).logits, stock.logits, rtol=0, atol=0)


def test_an_error_leaves_no_trace(net: Any, inputs: dict[str, Any]) -> None:
    """The head is lazy during the call only, also where the call fails, and nothing of the call is kept."""
    apply_to(net)
    with pytest.raises(ValueError):
        net(**{**inputs, "shift_labels": inputs["labels"][:, :3]})
    assert net(inputs["input_ids"]).logits.shape == (2, SEQUENCE, VOCABULARY)
    assert running.call is None
    assert running.lazy_layers == []


def test_a_head_that_is_replaced_later(net: Any, inputs: dict[str, Any]) -> None:
    apply_to(net)
    net.set_output_embeddings(nn.Linear(16, VOCABULARY, bias=False))
    with pytest.raises(RuntimeError, match="replaced after apply_to"):
        net(**inputs)
    remove_from(net)


def test_a_loss_that_is_set_later(net: Any, inputs: dict[str, Any]) -> None:
    """It finds out that there are no logits; with logits it is the one that counts."""
    apply_to(net)
    net.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    with pytest.raises(AttributeError, match="'sum'; the fused loss knows"):
        net(**inputs)
    outputs = net(**inputs, skip_logits=False)
    torch.testing.assert_close(outputs.loss, outputs.logits.sum())


def test_generate(net: Any, inputs: dict[str, Any]) -> None:
    arguments = {"max_new_tokens": 4, "do_sample": False}
    expected = net.eval().generate(inputs["input_ids"], **arguments)
    apply_to(net)
    assert torch.equal(net.generate(inputs["input_ids"], **arguments), expected)


def test_memory_that_was_released(rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """What FSDP does to a head that is a unit of its own: its weight is gone when the loss needs it."""
    net = model("llama", rng)
    apply_to(net)

    def release(module: nn.Module, _args: Any, _output: Any) -> None:
        module.weight.untyped_storage().resize_(0)

    net.lm_head.register_forward_hook(release)
    with pytest.raises(ValueError, match="memory of the head's weight was released"):
        net(**inputs)


# -------------------------------------------------------------------------------- several threads, a call within a call


class _Meeting:
    """Holds the first forward of each thread between the base model and the head, until all threads are there."""

    def __init__(self, net: Any, threads: int) -> None:
        self.barrier = threading.Barrier(threads, timeout=60)
        self.seen: set[int] = set()
        self.failed = threading.Event()
        self.failing: int | None = None
        net.model.register_forward_hook(self._meet)

    def _meet(self, *_args: Any) -> None:
        thread = threading.get_ident()
        if thread in self.seen:
            return
        self.seen.add(thread)
        self.barrier.wait()
        if thread == self.failing:
            raise KeyError("this thread fails")
        if self.failing is not None:
            assert self.failed.wait(60)

    def fail(self, call: Callable[[], Any]) -> Any:
        """Make a call that fails there, before the others go on."""
        self.failing = threading.get_ident()
        try:
            with pytest.raises(KeyError, match="this thread fails"):
                return call()
        finally:
            self.failed.set()


def _in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, or its error, from a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def _assert_same_outputs(ours: Any, expected: Any) -> None:
    assert not isinstance(ours, Exception), repr(ours)
    assert set(ours) == set(expected)
    for name in {"loss", "logits", "token_accuracy"} & set(expected):
        torch.testing.assert_close(ours[name], expected[name])


THREADS: dict[str, dict[str, Any]] = {
    "loss": {},
    "token scaling": {"use_token_scaling": True},
    "token accuracy": {"return_token_accuracy": True},
    "logits too": {"skip_logits": False},
    "logits too, token scaling": {"skip_logits": False, "use_token_scaling": True},
    "score": {"labels": None},
}


@pytest.mark.parametrize("fails", [False, True], ids=["all succeed", "one fails"])
def test_threads_do_not_meet_in_the_model(fails: bool, net: Any, inputs: dict[str, Any]) -> None:
    """Each call gets what it asked for, though all are in the model at once, and one may fail there."""
    apply_to(net)
    calls: list[Callable[[], Any]] = [
        lambda options=options: net(**{**inputs, **options}, use_cache=False) for options in THREADS.values()
    ]
    expected = [call() for call in calls]
    meeting = _Meeting(net, len(calls) + fails)
    if fails:
        calls.append(lambda: meeting.fail(lambda: net(**inputs)))
        expected.append(None)
    for ours, alone in zip(_in_threads(*calls), expected, strict=True):
        if alone is None:
            assert ours is None, repr(ours)
        else:
            _assert_same_outputs(ours, alone)


def test_threads_patch_models_at_once(net: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a class that is new get one fused class, so that each can be undone."""

    class Fresh(type(net)):  # type: ignore[misc]
        pass

    net.__class__ = Fresh
    nets = [net, copy.deepcopy(net), copy.deepcopy(net)]
    together = threading.Barrier(len(nets), timeout=60)
    signature = inspect.signature

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return signature(*args, **kwargs)

    def patch(net: Any) -> None:
        together.wait()
        handle = apply_to(net)
        assert net(**inputs).logits is None
        together.wait()
        handle.remove()

    monkeypatch.setattr(inspect, "signature", slow)
    assert _in_threads(*(lambda net=net: patch(net) for net in nets)) == [None] * len(nets)
    assert {type(net) for net in nets} == {Fresh}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_another_thread(reentrant: bool, net: Any, inputs: dict[str, Any]) -> None:
    """A whole forward under checkpoint runs again in the thread of backward, beside one that only scores."""
    apply_to(net)
    embeddings = net.model.embed_tokens(inputs["input_ids"]).detach()

    def loss(embeddings: Tensor) -> Tensor:
        arguments = {"inputs_embeds": embeddings, "labels": inputs["labels"], "use_cache": False}
        loss: Tensor = net(**arguments, use_token_scaling=True).loss
        return loss

    plain = embeddings.clone().requires_grad_()
    loss(plain).backward()
    ours = embeddings.clone().requires_grad_()
    checkpointed = torch.utils.checkpoint.checkpoint(loss, ours, use_reentrant=reentrant)
    expected = net(inputs["input_ids"], use_cache=False)
    _Meeting(net, 2)
    error, scored = _in_threads(checkpointed.backward, lambda: net(inputs["input_ids"], use_cache=False))
    assert error is None, repr(error)
    torch.testing.assert_close(ours.grad, plain.grad)
    _assert_same_outputs(scored, expected)


INNER: dict[str, dict[str, Any]] = {
    "score": {"labels": None},
    "loss": {"use_token_scaling": True},
    "logits too": {"skip_logits": False},
    "error": {"shift_labels": torch.zeros(1, dtype=torch.int64)},
}


@pytest.mark.parametrize("same", [True, False], ids=["same model", "other model"])
@pytest.mark.parametrize("case", INNER)
def test_a_call_within_a_call(case: str, same: bool, net: Any, inputs: dict[str, Any]) -> None:
    """A hook that calls a patched model gets what it asks for, and the call around it is what it was."""
    apply_to(net)
    inner = net if same else copy.deepcopy(net)
    results: list[Any] = []
    arguments = {**inputs, **INNER[case], "use_cache": False}

    def call_inner() -> Any:
        try:
            return inner(**arguments)
        except ValueError as error:
            return error

    expected = call_inner(), net(**inputs, use_cache=False)

    def hook(*_args: Any) -> None:
        if not results:
            results.append(None)  # the call below comes here again
            results[0] = call_inner()

    net.model.register_forward_hook(hook)
    outer = net(**inputs, use_cache=False)
    _assert_same_outputs(outer, expected[1])
    if case == "error":
        assert isinstance(results[0], ValueError)
    else:
        _assert_same_outputs(results[0], expected[0])


def test_parts_of_another_model_within_a_call(net: Any, inputs: dict[str, Any]) -> None:
    """Its head gives logits, and its loss is that of nobody's call."""
    apply_to(net)
    other = copy.deepcopy(net)
    hidden = torch.randn(2, SEQUENCE, 16, generator=torch.Generator().manual_seed(1))

    def parts() -> tuple[Tensor, Tensor]:
        logits = other.lm_head(hidden)
        return logits, other.loss_function(logits, inputs["labels"], VOCABULARY)

    expected = parts()
    seen: list[tuple[Tensor, Tensor]] = []
    net.model.register_forward_hook(lambda *_args: seen.append(parts()))
    assert net(**inputs, use_token_scaling=True).logits is None
    torch.testing.assert_close(seen, [expected])


# ------------------------------------------------------------------------------------------------------------- adapters


def _lora(peft: Any, net: Any, targets: list[str], **options: Any) -> Any:
    wrapped = peft.get_peft_model(
        net, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide the adapter
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return wrapped.train()


LORA: dict[str, Any] = {
    "not on the head": {"targets": ["q_proj"]},
    "head": {"targets": ["q_proj", "lm_head"]},
    "head, dropout": {"targets": ["lm_head"], "lora_dropout": 0.4},
    "head, rslora": {"targets": ["lm_head"], "use_rslora": True},
    "head, bias": {"targets": ["lm_head"], "lora_bias": True},
    "trained head": {"targets": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("case", LORA)
def test_lora(case: str, family: str, peft: Any, rng: torch.Generator, inputs: dict[str, Any]) -> None:
    wrapped = _lora(peft, model(family, rng, tie_word_embeddings=False), **LORA[case])
    torch.manual_seed(3)
    stock = step(wrapped, inputs)
    apply_to(wrapped)
    torch.manual_seed(3)  # the same dropout
    ours = step(wrapped, inputs)
    assert ours[0].logits is None
    assert any("lora_B" in name for name in ours[1])
    assert_same_step(ours, stock)
    with wrapped.disable_adapter():
        bare = wrapped(**inputs).loss
    remove_from(wrapped)
    with wrapped.disable_adapter():
        torch.testing.assert_close(bare, wrapped(**inputs).loss)


def test_adapter_before_and_after(peft: Any, rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """apply_to before PEFT serves unless the adapter is on the head: an error until apply_to is called again."""
    net = model("llama", rng)
    apply_to(net)
    wrapped = _lora(peft, net, ["q_proj", "lm_head"])
    with pytest.raises(TypeError, match="call apply_to once more"):
        wrapped(**inputs)
    apply_to(wrapped)
    assert wrapped(**inputs).logits is None
    unwrapped = wrapped.merge_and_unload()
    assert type(unwrapped.lm_head) is HeadLinear
    assert unwrapped(**inputs).logits is None


@needs_peft
def test_dora_on_the_head_is_refused(peft: Any, rng: torch.Generator) -> None:
    wrapped = _lora(peft, model("llama", rng), ["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match="cannot be fused"):
        apply_to(wrapped)


@needs_peft
def test_prompt_tuning(peft: Any, rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """PEFT puts virtual tokens in front of inputs and labels, inside its own forward."""
    wrapped = peft.get_peft_model(
        model("llama", rng), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ).train()
    stock = step(wrapped, inputs)
    apply_to(wrapped)
    assert_same_step(step(wrapped, inputs), stock)


# ---------------------------------------------------------------------------------------------------------- compilation


def test_the_whole_model_compiles(rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """One graph, with the loss in it, that serves any number of ignored labels and any divisor."""
    net = model("gemma2", rng, num_hidden_layers=1)
    apply_to(net)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    arguments = {"use_cache": False, "return_token_accuracy": True}
    for number, labels in enumerate((inputs["labels"], torch.full_like(inputs["labels"], -100), inputs["input_ids"])):
        call = {**inputs, "labels": labels.clone(), "num_items_in_batch": torch.tensor(4 + number)}
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            outputs, gradients = step(compiled, call, **arguments)
        gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}
        expected = step(net, call, **arguments)
        assert outputs.logits is None
        assert_same_step((outputs, gradients), expected)
        torch.testing.assert_close(outputs.token_accuracy, expected[0].token_accuracy)


def test_a_compiled_model_serves_all_threads(rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """What one thread has compiled runs in another as it is, also within a call of another model."""
    from torch._dynamo.testing import CompileCounter

    net = model("gemma2", rng, num_hidden_layers=1)
    apply_to(net)
    calls: list[dict[str, Any]] = [
        {**inputs, "use_cache": False, **options}
        for options in ({}, {"use_token_scaling": True}, {"labels": None}, {"skip_logits": False})
    ]
    expected = [net(**call) for call in calls]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for call, alone in zip(calls, expected, strict=True):
        _assert_same_outputs(compiled(**call), alone)
    graphs = counter.frame_count
    assert graphs == len(calls)
    results = _in_threads(*(lambda call=call: [compiled(**call) for _ in range(5)] for call in calls))
    for ours, alone in zip(results, expected, strict=True):
        assert not isinstance(ours, Exception), repr(ours)
        for one in ours:
            _assert_same_outputs(one, alone)
    assert counter.frame_count == graphs

    around = model("llama", rng)
    apply_to(around)
    seen: list[Any] = []
    around.model.register_forward_hook(lambda *_args: seen.append(compiled(**calls[1])))
    assert around(**inputs).logits is None
    _assert_same_outputs(seen[0], expected[1])


@needs_peft
def test_lora_on_the_head_compiles(peft: Any, rng: torch.Generator, inputs: dict[str, Any]) -> None:
    wrapped = _lora(peft, model("llama", rng, num_hidden_layers=1), ["lm_head"])
    apply_to(wrapped)
    torch._dynamo.reset()
    compiled = torch.compile(wrapped.get_base_model(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs, use_cache=False).loss, wrapped(**inputs, use_cache=False).loss)


# ----------------------------------------------------------------------------------------------------------- stand-in


def test_stand_in_says_what_it_is(rng: torch.Generator) -> None:
    x, w = torch.randn(2, 3, 4, generator=rng), torch.randn(7, 4, generator=rng)
    logits = LazyLogits((Term(x, w, None),))
    assert logits.shape == (2, 3, 7)
    assert (logits.size(), logits.size(-1), logits.dim(), logits.ndim) == ((2, 3, 7), 7, 3, 3)
    assert (logits.dtype, logits.device) == (x.dtype, x.device)
    assert (
        logits.float() is logits.contiguous() is logits.to(torch.float32) is logits.to("cpu") is logits.to(x) is logits
    )
    for use in (
        lambda: logits.to(torch.int64),
        lambda: logits.to("meta"),
        lambda: logits.log_softmax(-1),
        lambda: torch.softmax(logits, -1),
        lambda: logits[0],
        lambda: list(logits),
        lambda: logits - 1,
        lambda: logits + 1,
        lambda: logits * x,
        lambda: logits / None,
        lambda: logits + logits.tanh(),
        lambda: logits.tanh().tanh(),
    ):
        with pytest.raises(TypeError, match="syncfree_ext: this model uses its logits in an unknown way"):
            use()
    assert not hasattr(logits, "grad_fn")


def test_stand_in_computes_what_was_done_to_it(rng: torch.Generator) -> None:
    x, w, b = (torch.randn(*shape, generator=rng) for shape in ((2, 3, 4), (7, 4), (7,)))
    u, v, c = (torch.randn(*shape, generator=rng) for shape in ((2, 3, 2), (7, 2), (7,)))

    def chain(first: Any, second: Any) -> Any:
        return 5 * torch.tanh((2.0 * first / 3 + second * 0.5) / 4) / 2

    lazy = chain(LazyLogits((Term(x, w, b),)), LazyLogits((Term(u, v, c),)))
    hidden, weight, bias, scale = lazy.linear()
    assert lazy.softcap == 2.5
    out = lazy.softcap * torch.tanh(scale * F.linear(hidden, weight, bias) / lazy.softcap)
    torch.testing.assert_close(out, chain(F.linear(x, w, b), F.linear(u, v, c)))


def test_tolerances_would_see_a_scale(rng: torch.Generator, inputs: dict[str, Any]) -> None:
    """A logit scale that is wrong by one percent is outside the tolerances of this file, of loss and of gradients."""
    net = model("granite", rng, logits_scaling=0.2)
    apply_to(net)
    right = step(net, inputs)
    net.config.logits_scaling *= 1.01
    wrong = step(net, inputs)
    with pytest.raises(AssertionError, match="loss"):
        assert_same_step(wrong, right, loss=LOSS, gradient=1.0)
    with pytest.raises(AssertionError, match="weight"):
        assert_same_step(wrong, right, loss=1.0, gradient=GRADIENT)
