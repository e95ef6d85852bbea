"""Tiny random models of the families of transformers, one batch for them, and the comparison with their own loss.

Tolerances. A loss or gradient of the head is within 1e-6 or 1e-5 of the exact one in float32 (docs/semantics.md), and
so is the stock one; the way back through two layers of float32 at most doubles what is left. Hence 4e-6 and 4e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tolerances import assert_close_rel

transformers = pytest.importorskip("transformers", reason="transformers is missing: requirements/integrations.txt")

LOSS, GRADIENT = 4e-6, 4e-5
VOCABULARY, SEQUENCE = 53, 11

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_ROUTED = {**_MOE, "output_router_logits": True, "router_aux_loss_coef": 0.1}

# What is special about a family's head: a scale, a softcap, a bias, an auxiliary loss. None: nothing.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "phi": {},  # a head with a bias
    "phi3": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 5.0},
    "granitemoe": {**_ROUTED, "logits_scaling": 0.7},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 2.5},
    "recurrent_gemma": {"logits_soft_cap": 2.0, "lru_width": 16, "num_hidden_layers": 3},
    "glm4": {},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "starcoder2": {},
    "stablelm": {},
    "mixtral": _ROUTED,
    "qwen3_moe": _ROUTED,
    "olmoe": _ROUTED,
    "gpt_oss": _ROUTED,
}


def config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of a family; skips where this transformers has no such family."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES.get(family, {}), **changes})


def model(family: str, rng: torch.Generator, **changes: Any) -> Any:
    """A tiny model in training mode without dropout, with weights that give logits of the order of 1."""
    from transformers import AutoModelForCausalLM

    result = AutoModelForCausalLM.from_config(config(family, **changes)).float().train()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
    for module in result.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return result


def batch(rng: torch.Generator, rows: int = 2) -> dict[str, Tensor]:
    """Tokens, an attention mask with padding at the end, and labels of which some are ignored."""
    tokens = torch.randint(3, VOCABULARY, (rows, SEQUENCE), generator=rng)
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=rng) < 0.3, -100).masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def step(model: Any, inputs: dict[str, Any], **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """The outputs of a call and the gradients of its loss."""
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs, **arguments)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(
    ours: tuple[Any, dict[str, Tensor]],
    stock: tuple[Any, dict[str, Tensor]],
    loss: float = LOSS,
    gradient: float = GRADIENT,
) -> None:
    """Loss and gradients of two calls are equal within the tolerances; each gradient relative to the largest norm."""
    assert stock[0].loss.isfinite()
    assert_close_rel(ours[0].loss, stock[0].loss, loss, 1e-7, "loss")
    assert set(ours[1]) == set(stock[1])
    largest = max(float(g.double().norm()) for g in stock[1].values())
    for name, expected in stock[1].items():
        assert_close_rel(ours[1][name], expected, gradient, gradient * largest * 1e-2, name)
