"""The drop-ins add no wait of their own: the part of a model that they replace, under torch's sync checker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from syncfree_ext.integrations import liger

pytestmark = pytest.mark.cuda


@contextmanager
def no_sync() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("num_items", [None, 7, "on the device", "on the host"])
@pytest.mark.parametrize("family", ["LlamaConfig", "Gemma2Config", "CohereConfig"])
def test_head_and_loss_of_a_model(family: str, num_items: Any, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing: requirements/integrations.txt")
    from transformers.modeling_outputs import BaseModelOutputWithPast

    from syncfree_ext.integrations.transformers import apply_to

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 1000, "head_dim": 32}
    config = getattr(transformers, family)(**sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
    net = transformers.AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16).train()
    apply_to(net)
    hidden = torch.randn(2, 40, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(1000, (2, 40), device=device)
    labels = tokens.masked_fill(torch.rand(2, 40, device=device) < 0.3, -100)
    # The base model is not what is looked at.
    net.model.forward = lambda *_args, **_kwargs: BaseModelOutputWithPast(last_hidden_state=hidden)
    where = {"on the device": device, "on the host": "cpu"}
    divisor = torch.tensor(7, device=where[num_items]) if num_items in where else num_items

    def step() -> Any:
        outputs = net(input_ids=tokens, labels=labels, num_items_in_batch=divisor, return_token_accuracy=True)
        outputs.loss.backward()
        return outputs

    step()
    with no_sync():
        outputs = step()
    assert outputs.logits is None
    assert torch.isfinite(outputs.loss)
    assert 0 <= float(outputs.token_accuracy) <= 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_liger_forms(reduction: str, device: torch.device) -> None:
    x = torch.randn(300, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1000, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(1000, (300,), device=device).masked_fill(torch.rand(300, device=device) < 0.3, -100)
    module = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, return_token_accuracy=True)

    def step() -> Any:
        out = module(w, x, target)
        out.loss.sum().backward()
        return out

    step()
    with no_sync():
        out = step()
    assert torch.isfinite(out.loss).all()
