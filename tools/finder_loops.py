"""The training loops that tools/check_finder.py runs: a step of a chosen length, an example without some of its waits,
and trainers of transformers and TRL. Times are milliseconds of a step. On the CPU, for tests, sizes are tiny.
"""  # noqa: D205

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import sync_free_loop
import torch
import waiting_loop
from torch import Tensor, nn

from syncfree_ext.syncs import Report, find_syncs


class Machine:
    """The GPU. Tests have one that is simulated."""

    device = torch.device("cuda")
    gpu: Any = None  # for find_syncs: the current CUDA device

    @property
    def name(self) -> str:
        """What the figures come from."""
        return torch.cuda.get_device_name()

    @property
    def large(self) -> bool:
        """Whether sizes are those for a GPU."""
        return self.device.type == "cuda"

    def find(self, warmup: int, steps: int) -> find_syncs:
        """The finder."""
        return find_syncs(warmup=warmup, steps=steps, gpu=self.gpu)

    def mark(self) -> Any:
        """A moment on the GPU's clock, after all that was queued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds between two marks. Waits for the GPU."""
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))


class Step:
    """A training step of residual blocks, 44 ops each, with a fused AdamW; it reads its loss."""

    def __init__(self, machine: Machine, layers: int, width: int, rows: int) -> None:
        torch.manual_seed(0)
        self.machine, dtype = machine, torch.bfloat16 if machine.large else torch.float32
        with machine.device:
            self.model = nn.Sequential(*(waiting_loop.Block(width) for _ in range(layers))).to(dtype)
            self.x = torch.randn(rows, width, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def __call__(self) -> None:
        """One step."""
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def mean_ms(self, steps: int, warm: int = 3) -> float:
        """The mean of some steps after others that are not timed."""
        for _ in range(warm):
            self()
        first = self.machine.mark()
        for _ in range(steps):
            self()
        return self.machine.between(first, self.machine.mark()) / steps


def make_step(machine: Machine, name: str, target_ms: float = 50.0) -> Step:
    """About 800 ops: "host_bound", which takes the host longer than the GPU, or "gpu_bound", of about so many ms."""
    if not machine.large:
        return Step(machine, 2, 32, 64)
    if name == "host_bound":
        return Step(machine, 18, 256, 64)
    step = Step(machine, 18, 2048, 8192)
    for _ in range(3):  # the time is no straight line in the rows
        rows = max(1, round(step.x.shape[0] * target_ms / step.mean_ms(5) / 256)) * 256
        step.x = step.x.new_empty(rows, step.x.shape[1]).normal_()
    return step


class Loop(NamedTuple):
    """A loop with waits that can be removed."""

    waits: Mapping[str, Sequence[str]]  # what the lines of each wait hold
    step_ms: Callable[[Collection[str]], float]  # the mean step without some of them, over 8 steps or more


class _Stage(sync_free_loop.Loop):
    """The loop of examples/sync_free_loop.py without any choice of its waits, whose names begin with their number."""

    def __init__(self, without: Collection[str], machine: Machine, offload: Any, size: sync_free_loop.Size) -> None:
        self.removed, self.machine, self.index = {int(name[0]) for name in without}, machine, 0
        super().__init__(0, size, machine.device, offload)

    def gone(self, sync: int) -> bool:
        """Whether this wait is removed."""
        return sync in self.removed

    def mark(self) -> Any:
        """The boundary between two steps."""
        return self.machine.mark()

    def mean_ms(self, steps: int) -> float:
        """The mean of the next steps."""
        self.index += steps
        times = self.run(steps, self.index - steps)
        self.losses.clear()
        return sum(times) / steps


def free(machine: Machine, name: str) -> Loop:
    """examples/sync_free_loop.py: a model for each choice of waits, made when it is first asked for."""
    waits = {
        "1 batches": ("return tensor.to(self.device, non_blocking",),
        "2 constant": ("torch.tensor(0.1, device=x.device)",),
        "3 mask": ("picked = x[mask & (",),
        "4 divisor": ("count = int(keep.sum().item())",),
        "5 statistics": ("return (x - mean.to(x.device))",),
        "6 NaN check": ("elif not torch.isfinite(loss)",),
        "7 reads": ("self.losses.append(loss.item())", "norm.item()"),
    }
    size = sync_free_loop.SIZES[name if machine.large else "tiny"]
    offload = sync_free_loop.Offload(size.offload, machine.device)  # its buffers are for all
    stages: dict[frozenset[str], _Stage] = {}

    def step_ms(without: Collection[str]) -> float:
        key = frozenset(without)
        if key not in stages:
            stages[key] = _Stage(key, machine, offload, size)
        stages[key].mean_ms(2)
        return stages[key].mean_ms(30 if name == "small" else 9)  # so many that the finder sees some without its timer

    return Loop(waits, step_ms)


LOOPS: dict[str, Callable[[Machine], Loop]] = {
    "small": lambda machine: free(machine, "small"),
    "large": lambda machine: free(machine, "large"),
}


def missing(sft: bool) -> str | None:
    """Why a trainer cannot be run here."""
    try:
        for name in ("transformers", "accelerate", *(("tokenizers", "datasets", "trl") if sft else ())):
            __import__(name)
    except Exception as error:  # releases that do not fit each other fail in many ways
        return f"{type(error).__name__}: {(str(error) or 'without a reason').splitlines()[0]}"
    return None


def _sft(net: Any, options: dict[str, Any], data: Any, ours: bool) -> Any:
    """TRL's SFTTrainer. It wants a tokenizer even for rows of tokens."""
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import tokenizers
    import transformers
    import trl

    from syncfree_ext.integrations.trl import SFTTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    args = trl.SFTConfig(**options, max_length=None, gradient_checkpointing=False)
    kind = SFTTrainer if ours else trl.SFTTrainer
    return kind(model=net, args=args, train_dataset=datasets.Dataset.from_list(data), processing_class=words)


def train_with(machine: Machine, name: str, ours: bool) -> tuple[Report, list[float], float | None]:
    """Trains a small Llama inside the finder. "trainer" logs in each step, other trainers after what is measured.

    Returns:
        The report, the loss of each step, and on a GPU the peak in MiB beyond what was there before.
    """
    import transformers
    from accelerate.state import AcceleratorState

    from syncfree_ext.integrations.transformers import apply_to

    AcceleratorState._reset_state(reset_partial_state=True)  # else the first trainer's settings stay for all
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(5)
    vocabulary, hidden, rows, length = (32000, 512, 8, 512) if machine.large else (512, 64, 2, 32)
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    net = transformers.LlamaForCausalLM(config).float()
    steps, losses = 12, list[Tensor]()
    tokens = torch.randint(3, vocabulary, (steps * rows, length))
    labels = tokens.masked_fill(torch.arange(length) < torch.arange(len(tokens))[:, None] % 9, -100)
    data = [{"input_ids": a, "labels": b} for a, b in zip(tokens.tolist(), labels.tolist(), strict=True)]
    # Trainers leave settings in the environment.
    with patch.dict(os.environ), tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": rows, "learning_rate": 1e-3,
            "logging_steps": 1 if name == "trainer" else steps, "save_strategy": "no", "report_to": [], "seed": 1,
            "bf16": machine.large, "use_cpu": not machine.large, "torch_compile": name.endswith("compiled"),
            "disable_tqdm": True,
        }  # fmt: skip
        if name.startswith("sft"):
            trainer = _sft(net, options, data, ours)
        else:
            if ours:
                apply_to(net)
            args = transformers.TrainingArguments(**options)
            trainer = transformers.Trainer(model=net, args=args, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        step = trainer.training_step

        def kept(*args: Any, **kwargs: Any) -> Any:
            losses.append(step(*args, **kwargs).detach().clone())  # read when all is over
            return losses[-1]

        trainer.training_step = kept
        gc.collect()  # what is left of the last trainer would go while this one runs
        if machine.large:
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with machine.find(6, 5) as report:
            trainer.train()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if machine.large else None
    return report, torch.stack(losses).double().tolist(), peak
