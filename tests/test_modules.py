"""The modules are linear_cross_entropy with its options set once."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncfree_ext as sf

HIDDEN, CLASSES = 12, 37


@pytest.fixture
def batch(device: torch.device, rng: torch.Generator) -> dict[str, Tensor]:
    target = torch.randint(CLASSES, (3, 8), generator=rng)
    target[0, 2:5] = -100
    tensors = {
        "input": torch.randn(3, 8, HIDDEN, generator=rng),
        "linear_weight": torch.randn(CLASSES, HIDDEN, generator=rng),
        "target": target,
        "linear_bias": torch.randn(CLASSES, generator=rng),
        "token_weight": torch.rand(3, 8, generator=rng),
        "weight": torch.rand(CLASSES, generator=rng),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


OPTIONS: dict[str, Any] = {
    "reduction": "sum",
    "ignore_index": 5,
    "label_smoothing": 0.1,
    "softcap": 9.0,
    "token_scaling": True,
    "logit_scale": 0.5,
    "z_loss_weight": 0.01,
    "shift": 2,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "return_logsumexp": True,
    "chunk_rows": 5,
    "workspace_bytes": 4096,
    "accum_dtype": torch.float32,
}


def test_every_option_of_the_function_is_an_option_of_the_module() -> None:
    function = inspect.signature(sf.linear_cross_entropy).parameters
    init = inspect.signature(sf.FusedLinearCrossEntropyLoss).parameters
    forward = inspect.signature(sf.FusedLinearCrossEntropyLoss.forward).parameters
    assert set(function) == (set(init) | set(forward)) - {"self"}
    assert all(function[name].default == parameter.default for name, parameter in init.items())
    assert set(OPTIONS) == set(init) - {"weight"}


@pytest.mark.parametrize("option", OPTIONS)
def test_module_is_the_function(option: str, batch: dict[str, Tensor]) -> None:
    """One option at a time, so that one which is not passed on shows."""
    batch["target"][batch["target"] == -100] = 5
    arguments = {"ignore_index": 5} | {option: OPTIONS[option]}
    weight, token_weight = batch.pop("weight"), batch.pop("token_weight")
    module = sf.FusedLinearCrossEntropyLoss(weight, **arguments)
    actual = module(**batch, token_weight=token_weight)
    expected = sf.linear_cross_entropy(**batch, weight=weight, token_weight=token_weight, **arguments)
    assert type(actual) is type(expected)
    for a, e in zip(*((v,) if isinstance(v, Tensor) else v for v in (actual, expected)), strict=True):
        assert (a is None) == (e is None)
        assert a is None or torch.equal(a, e)
    name = f"{option}={OPTIONS[option]!r}"
    assert name in repr(module)
    assert option == "reduction" or "reduction" not in repr(module)


def test_num_items_comes_with_each_call(batch: dict[str, Tensor]) -> None:
    module = sf.FusedLinearCrossEntropyLoss()
    arguments = batch["input"], batch["linear_weight"], batch["target"], batch["linear_bias"]
    total = sf.linear_cross_entropy(*arguments[:3], linear_bias=arguments[3], reduction="sum")
    for number in (4, 2.5):
        for num_items in (number, torch.tensor(number, device=total.device)):
            torch.testing.assert_close(module(*arguments, num_items=num_items), total / number)


def test_buffers(batch: dict[str, Tensor]) -> None:
    module = sf.FusedLinearCrossEntropyLoss(
        batch["weight"], logit_scale=torch.ones(()), z_loss_weight=torch.zeros((), dtype=torch.float64)
    )
    assert list(module.state_dict()) == ["weight"]
    assert {name for name, _ in module.named_buffers()} == {"weight", "logit_scale", "z_loss_weight"}
    assert not list(module.parameters())
    assert list(sf.FusedLinearCrossEntropyLoss().state_dict()) == []
    assert module.to("meta").logit_scale.device.type == "meta"


def test_schedule_is_followed(batch: dict[str, Tensor]) -> None:
    scale = torch.ones((), device=batch["input"].device)
    module = sf.FusedLinearCrossEntropyLoss(logit_scale=scale)
    arguments = batch["input"], batch["linear_weight"], batch["target"]
    for value in (1.0, 0.5):
        module.logit_scale.fill_(value)
        torch.testing.assert_close(module(*arguments), sf.linear_cross_entropy(*arguments, logit_scale=value))


@pytest.mark.parametrize("bias", [False, True])
def test_head(bias: bool, batch: dict[str, Tensor], device: torch.device) -> None:
    loss = sf.FusedLinearCrossEntropyLoss(softcap=5.0)
    head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES, bias=bias, loss=loss, device=device)
    assert isinstance(head, nn.Linear)
    assert list(head.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    logits = head(batch["input"])
    torch.testing.assert_close(logits, nn.functional.linear(batch["input"], head.weight, head.bias))
    actual = head(batch["input"], batch["target"], num_items=9)
    torch.testing.assert_close(actual, sf.cross_entropy(logits, batch["target"], softcap=5.0, num_items=9))
    actual.backward()
    assert head.weight.grad is not None
    assert not bias or head.bias.grad is not None
    with pytest.raises(ValueError, match="need a target"):
        head(batch["input"], num_items=3)


def test_head_takes_the_place_of_a_linear(batch: dict[str, Tensor], device: torch.device) -> None:
    linear = nn.Linear(HIDDEN, CLASSES, bias=False, device=device)
    head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES, device=device)
    head.load_state_dict(linear.state_dict())
    torch.testing.assert_close(head(batch["input"]), linear(batch["input"]))


def test_tied_embedding(batch: dict[str, Tensor], device: torch.device) -> None:
    embedding = nn.Embedding(CLASSES, HIDDEN, device=device)
    head = sf.LinearCrossEntropyHead(HIDDEN, CLASSES, device=device)
    head.weight = embedding.weight
    tokens = batch["target"].clamp(min=0)
    head(embedding(tokens), tokens).backward()
    weight = embedding.weight.detach().clone().requires_grad_()
    hidden = nn.functional.embedding(tokens, weight)
    nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), tokens.flatten()).backward()
    torch.testing.assert_close(embedding.weight.grad, weight.grad)


def test_copies_do_not_share(batch: dict[str, Tensor]) -> None:
    module = sf.FusedLinearCrossEntropyLoss(batch["weight"], softcap=3.0)
    twin = copy.deepcopy(module)
    twin.weight.zero_()
    assert module.weight.any()
    assert twin.softcap == 3.0


def test_options_keep_their_dtype_when_the_module_is_cast() -> None:
    loss = sf.FusedLinearCrossEntropyLoss(
        torch.tensor([0.1, 1.0]), logit_scale=torch.tensor(1.001), z_loss_weight=torch.tensor(1e-8)
    )
    head = sf.LinearCrossEntropyHead(4, 2, loss=loss).to(torch.bfloat16).half()
    assert head.weight.dtype == torch.float16
    for name, value in (("logit_scale", 1.001), ("z_loss_weight", 1e-8)):
        kept = getattr(head.loss, name)
        assert kept.dtype == torch.float32
        assert torch.equal(kept, torch.tensor(value))
    assert torch.equal(head.loss.weight, torch.tensor([0.1, 1.0]))
    assert head.to("meta").loss.z_loss_weight.device.type == "meta"
    one = torch.tensor(1e-8)
    loss = sf.FusedLinearCrossEntropyLoss(logit_scale=one, z_loss_weight=one).half()
    assert loss.logit_scale.dtype == loss.z_loss_weight.dtype == torch.float32  # type: ignore[union-attr]
