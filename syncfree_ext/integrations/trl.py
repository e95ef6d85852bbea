"""TRL's SFTTrainer with the fused loss: `from syncfree_ext.integrations.trl import SFTTrainer`, the rest stays.

TRL's own compute_loss asks the model for its logits, or puts a head of its own on the model, and reads its metrics back
in each step. Here the model's loss is that of `apply_to`, token accuracy comes from the same kernel, and metrics stay
on the device until they are logged, in one read.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
import trl
from torch import Tensor

from .transformers import _causal_lm, apply_to

_NAME = "syncfree_ext.integrations.trl.SFTTrainer"


class SFTTrainer(trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """trl.SFTTrainer; the same arguments.

    Metrics: loss, mean_token_accuracy, num_tokens and, for mixtures of experts, aux_loss. Accuracy is that of each
    micro-batch, averaged. Entropy needs the logits and is not logged. `loss_type` is "nll" or "dft". Evaluation
    computes logits only where Trainer asks for outputs beside the loss.

    Raises:
        ValueError: label smoothing, compute_loss_func or use_liger_kernel is asked for, which compute the loss
            elsewhere; or `apply_to` refuses the model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(f"{_NAME}: compute_loss_func must be None, because the model computes the loss here")
        self._total_train_tokens: Any = 0
        super().__init__(*args, **kwargs)
        if self.args.label_smoothing_factor > 0:
            raise ValueError(
                f"{_NAME}: label_smoothing_factor must be 0, because the smoother of Trainer needs the logits"
            )
        if self.args.use_liger_kernel:
            raise ValueError(
                f"{_NAME}: use_liger_kernel must be False, because Liger replaces the forward of the model; apply its "
                "other kernels to the model yourself"
            )
        self.compute_loss_func = None  # that of "dft", in releases where TRL sets one
        model = _causal_lm(self.model)
        forward = getattr(model.__dict__.get("forward"), "__func__", None)
        # By its globals: TRL gives its forward the name of the model's.
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
            del model.forward  # the head that releases from 1.0 put on the model, a moment ago
        if "_syncfree" not in model.__dict__:  # with options of its own, if the caller has done so
            apply_to(self.model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the model, 0-D on the device, and its outputs if return_outputs. Does not wait for the device."""
        loss_only = inputs.pop("_prediction_loss_only", None)  # said by TRL's prediction_step in some releases
        training = self.model.training
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        own = {
            "skip_logits": training or not return_outputs or bool(loss_only) or self.args.prediction_loss_only,
            "return_token_accuracy": True,
            "use_token_scaling": self.args.loss_type == "dft",
        }
        loss, outputs = transformers.Trainer.compute_loss(
            self, model, {**inputs, **own}, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        metrics = self._metrics["train" if training else "eval"]
        gather = self.accelerator.gather_for_metrics
        metrics["mean_token_accuracy"].append(gather(outputs["token_accuracy"]).mean())
        if self.aux_loss_enabled:
            metrics["aux_loss"].append(gather(outputs["aux_loss"].detach()).mean())
        if training:
            self._total_train_tokens = self._total_train_tokens + gather(self._count_tokens(inputs)).sum()
        metrics["num_tokens"] = [self._total_train_tokens]
        if not return_outputs:
            return loss
        # What is left beside the loss is what Trainer hands to compute_metrics.
        fields = {name: value for name, value in outputs.items() if name != "token_accuracy"}
        return loss, type(outputs)(**fields)

    @staticmethod
    def _count_tokens(inputs: dict[str, Any]) -> Tensor:
        if "attention_mask" in inputs:
            mask: Tensor = inputs["attention_mask"]
            return mask.sum()
        name = "position_ids" if "position_ids" in inputs else "input_ids"
        tokens: Tensor = inputs[name]
        return torch.full((), tokens.shape[-1] * tokens.shape[0], dtype=torch.int64, device=tokens.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Read the metrics of the steps since the last call, at once, and log them as TRL does."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        tensors = [value for values in metrics.values() for value in values if isinstance(value, Tensor)]
        if tensors:
            numbers = iter(torch.stack([tensor.double() for tensor in tensors]).tolist())
            for name, values in metrics.items():
                metrics[name] = [next(numbers) if isinstance(value, Tensor) else value for value in values]
        super().log(logs, start_time)
