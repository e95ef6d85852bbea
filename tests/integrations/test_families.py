"""apply_to in each family of transformers: the loss and the gradients are those of the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LOSS, VOCABULARY, assert_same_step, batch, config, model, step
from torch import Tensor, nn

from syncfree_ext.integrations.transformers import apply_to, remove_from
from tolerances import assert_close_rel


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str, rng: torch.Generator) -> None:
    net, inputs = model(family, rng), batch(rng)
    calls = [inputs, {**inputs, "num_items_in_batch": torch.tensor(7)}]
    try:
        stock = [step(net, call) for call in calls]
    except AttributeError as error:  # in 5.17 it hands out no router logits, and its own loss of them fails
        if family != "granitemoe" or "'int' object" not in str(error):
            raise
        pytest.skip(f"granitemoe itself fails in transformers {version('transformers')}: {error}")
    apply_to(net)
    ours = [step(net, call) for call in calls]
    for expected, got in zip(stock, ours, strict=True):
        assert expected[0].logits is not None
        assert got[0].logits is None
        assert type(got[0]) is type(expected[0])
        if "router_aux_loss_coef" in FAMILIES[family]:
            assert expected[0].aux_loss.item() > 0
            torch.testing.assert_close(got[0].aux_loss, expected[0].aux_loss)
        assert_same_step(got, expected)
    with torch.no_grad():
        # Where logits are asked for, and without labels, the model's own layers compute them.
        with_logits = net(**inputs, skip_logits=False)
        assert_same_logits = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
        assert_same_logits(with_logits.logits, stock[0][0].logits.detach())
        assert_close_rel(with_logits.loss, stock[0][0].loss, LOSS, 1e-7, "loss")
        del inputs["labels"]
        without_labels = net(**inputs)
        assert_same_logits(without_labels.logits, stock[0][0].logits.detach())
        assert without_labels.loss is None


def _sliced(self: Any, hidden: Tensor) -> Any:
    return self.lm_head(hidden)[..., :5]


def _shifted(self: Any, hidden: Tensor) -> Any:
    return self.lm_head(hidden) - 1.0


def _by_tensor(self: Any, hidden: Tensor) -> Any:
    return self.lm_head(hidden) * torch.ones(())


def _twice_capped(self: Any, hidden: Tensor) -> Any:
    return torch.tanh(torch.tanh(self.lm_head(hidden)))


def _argmax(self: Any, hidden: Tensor) -> Any:
    return torch.argmax(self.lm_head(hidden), -1)


def _around_the_head(self: Any, hidden: Tensor) -> Any:
    return nn.functional.linear(hidden, self.lm_head.weight)


LOGITS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (_sliced, "indexing"),
    (_shifted, "a difference"),
    (_by_tensor, "a product with .*Tensor"),
    (_twice_capped, "a second tanh"),
    (_argmax, "argmax"),
    (_around_the_head, "not"),
]


def _llama_with(logits_of: Callable[[Any, Tensor], Any]) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class OtherForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = logits_of(self, self.model(input_ids=input_ids, **kwargs).last_hidden_state)
            return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, None), logits=logits)

    return OtherForCausalLM(config("llama"))


def _bart() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config("bart", d_model=16, decoder_layers=1, decoder_attention_heads=2))


def _quantised() -> Any:
    class Packed(nn.Linear):
        pass

    net = _llama()
    net.lm_head.__class__ = Packed
    return net


def _llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config("llama"))


def _other_loss() -> Any:
    from transformers.loss.loss_utils import ForMaskedLMLoss

    net = _llama()
    net.loss_function = ForMaskedLMLoss
    return net


def _other_forward() -> Any:
    net = _llama()
    net.forward = functools.partial(type(net).forward, net)
    return net


def _without_head() -> Any:
    return _llama().model


MODELS: list[tuple[Callable[[], Any], str]] = [
    *((functools.partial(_llama_with, logits), reason) for logits, reason in LOGITS),
    (_bart, "BartForCausalLM"),
    (_quantised, "plain nn.Linear, got .*Packed"),
    (_other_loss, "got ForMaskedLMLoss"),
    (_other_forward, "replaced on the instance"),
    (_without_head, "takes no labels|has no output embeddings"),
]


@pytest.mark.parametrize(("make", "reason"), MODELS, ids=[reason for _, reason in MODELS])
def test_other_models_are_refused_and_left_alone(make: Callable[[], Any], reason: str) -> None:
    net = make()
    kinds = [type(module) for module in net.modules()]
    attributes = {name: set(module.__dict__) for name, module in net.named_modules()}
    with pytest.raises(ValueError, match=reason):
        apply_to(net)
    assert [type(module) for module in net.modules()] == kinds
    assert {name: set(module.__dict__) for name, module in net.named_modules()} == attributes
    with pytest.raises(ValueError, match="nothing to remove"):
        remove_from(net)


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="must be a PreTrainedModel of transformers, got Linear"):
        apply_to(nn.Linear(3, 4))


def test_vision_language_model(rng: torch.Generator) -> None:
    """The language model is nested, the vocabulary is that of text_config."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = config("qwen2", rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}).to_dict()
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    special = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    text.pop("model_type")
    torch.manual_seed(0)
    net = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)).train()
    inputs = batch(rng)
    inputs["input_ids"] = inputs["input_ids"].clamp(min=7, max=VOCABULARY - 1)
    stock = step(net, inputs)
    apply_to(net)
    ours = step(net, inputs)
    assert ours[0].logits is None
    assert_same_step(ours, stock)
