"""A few steps of transformers' Trainer and TRL's SFTTrainer on the CPU: the curves are those of the stock loss."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model, transformers
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is missing: requirements/integrations.txt")

from syncfree_ext.integrations.transformers import apply_to

STEPS = 4
# Adam follows even the smallest gradient with a full step, so rounding differences grow from one step to the next.
CURVE = 1e-4


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer leaves its precision in the environment and in accelerate's shared state, where the next one finds it."""
    from accelerate.state import AcceleratorState

    for name in list(os.environ):
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    kept = set(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in set(os.environ) - kept:
        del os.environ[name]


def arguments(kind: Any, tmp_path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "disable_tqdm": True,
        "seed": 1,
    }
    return kind(**{**values, **changes})


def curves(trainer: Any) -> dict[str, list[float]]:
    """What was logged, by name, without times."""
    names = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy")
    logged = {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}
    return {name: values for name, values in logged.items() if values}


def assert_same_curves(ours: dict[str, list[float]], stock: dict[str, list[float]]) -> None:
    assert set(ours) == set(stock)
    assert len(stock["loss"]) == STEPS
    for name, values in stock.items():
        assert all(math.isfinite(value) for value in values)
        assert ours[name] == pytest.approx(values, rel=CURVE, abs=1e-6), name


def rows(rng: torch.Generator) -> list[dict[str, Tensor]]:
    """Sequences with different numbers of ignored labels, so that the divisor of a step matters."""
    data = []
    for number in range(24):
        tokens = torch.randint(3, VOCABULARY, (12,), generator=rng)
        data.append({"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(12) < number % 9, -100)})
    return data


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_trainer(changes: dict[str, Any], rng: torch.Generator, tmp_path: Path) -> None:
    data, state = rows(rng), rng.get_state()
    found = []
    for fused in (False, True):
        rng.set_state(state)
        net = model("llama", rng)
        if fused:
            apply_to(net)
        trainer = transformers.Trainer(
            model=net,
            args=arguments(transformers.TrainingArguments, tmp_path, **changes),
            train_dataset=data,
            eval_dataset=data[:4],
        )
        trainer.train()
        assert ("_syncfree" in trainer.model.__dict__) == fused
        found.append(curves(trainer))
    if "bf16" in changes:  # the stock head rounds its logits to bfloat16
        assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=2e-2)
    else:
        assert_same_curves(found[1], found[0])


def test_metrics_of_an_evaluation_get_logits(rng: torch.Generator, tmp_path: Path) -> None:
    net, data = model("llama", rng), rows(rng)[:4]
    apply_to(net)
    shapes = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {}

    trainer = transformers.Trainer(
        model=net,
        args=arguments(transformers.TrainingArguments, tmp_path),
        eval_dataset=data,
        compute_metrics=compute_metrics,
    )
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert shapes == [((4, 12, VOCABULARY), (4, 12))]


# ------------------------------------------------------------------------------------------------------------------ TRL


@pytest.fixture
def trl() -> Any:
    if "trl" not in sys.modules:
        pytest.importorskip("datasets", reason="datasets is missing: requirements/integrations.txt")
    return pytest.importorskip("trl", reason="trl is missing: requirements/integrations.txt")


@pytest.fixture
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    words_to_ids = {word: number for number, word in enumerate(words)}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words_to_ids, unk_token="<unk>"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, **special)


def texts(rng: torch.Generator) -> Any:
    from datasets import Dataset

    lengths = torch.randint(3, 14, (24,), generator=rng).tolist()
    words = [torch.randint(VOCABULARY - 3, (length,), generator=rng).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(f"w{word}" for word in row) for row in words]})


SFT: list[dict[str, Any]] = [{}, {"loss_type": "dft"}, {"peft": True}]


@pytest.mark.parametrize("changes", SFT, ids=str)
def test_sft_trainer(changes: dict[str, Any], trl: Any, tokenizer: Any, rng: torch.Generator, tmp_path: Path) -> None:
    from syncfree_ext.integrations.trl import SFTTrainer

    changes = dict(changes)
    peft_config = None
    if changes.pop("peft", False):
        peft = pytest.importorskip("peft", reason="peft is missing: requirements/integrations.txt")
        peft_config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    data, state = texts(rng), rng.get_state()
    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        rng.set_state(state)
        torch.manual_seed(4)  # of the adapter
        trainer = kind(
            model=model("llama", rng),
            args=arguments(trl.SFTConfig, tmp_path, **changes),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        trainer.train()
        found.append(curves(trainer))
        assert all(not values for values in trainer._metrics["train"].values())
    # TRL averages accuracy over tokens or over batches, depending on its release, and so only where they agree.
    per_batch = [curve.pop("mean_token_accuracy") for curve in found]
    assert len(per_batch[1]) == STEPS
    assert all(0 <= value <= 1 for value in per_batch[1])
    assert found[0].pop("eval_mean_token_accuracy") == pytest.approx(found[1].pop("eval_mean_token_accuracy"), abs=0.1)
    assert_same_curves(found[1], found[0])


def test_sft_trainer_keeps_metrics_on_the_device(
    trl: Any, tokenizer: Any, rng: torch.Generator, tmp_path: Path
) -> None:
    from syncfree_ext.integrations.trl import SFTTrainer

    data = texts(rng)
    trainer = SFTTrainer(
        model=model("llama", rng),
        args=arguments(trl.SFTConfig, tmp_path),
        train_dataset=data,
        processing_class=tokenizer,
        eval_dataset=data,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    assert type(loss.grad_fn).__name__ == "_FlceForwardBackward"
    (accuracy,) = trainer._metrics["train"]["mean_token_accuracy"]
    assert isinstance(accuracy, Tensor)
    (tokens,) = trainer._metrics["train"]["num_tokens"]
    assert int(tokens) == int(inputs["attention_mask"].sum())
    trainer.log({})
    assert isinstance(trainer.state.log_history[-1]["mean_token_accuracy"], float)
    # An evaluation gives logits to those who ask for them, and nothing of ours beside them.
    predicted = trainer.predict(trainer.eval_dataset.select(range(2)))
    assert predicted.predictions.shape[::2] == (2, VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "keywords", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor must be 0"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel must be False"),
        ({}, {"compute_loss_func": lambda *_: None}, "compute_loss_func must be None"),
    ],
    ids=["smoothing", "liger", "compute_loss_func"],
)
def test_sft_trainer_refuses(
    changes: dict[str, Any],
    keywords: dict[str, Any],
    message: str,
    trl: Any,
    tokenizer: Any,
    rng: torch.Generator,
    tmp_path: Path,
) -> None:
    from syncfree_ext.integrations.trl import SFTTrainer

    if changes.get("use_liger_kernel") and not transformers.utils.is_liger_kernel_available():
        pytest.skip("liger-kernel is not installed")
    with pytest.raises(ValueError, match=message):
        SFTTrainer(
            model=model("llama", rng),
            args=arguments(trl.SFTConfig, tmp_path, **changes),
            train_dataset=texts(rng),
            eval_dataset=texts(rng),
            processing_class=tokenizer,
            **keywords,
        )
