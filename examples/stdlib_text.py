"""The demo's text: the Python standard library's source, its BPE vocabulary, and batches of windows drawn from it."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END_OF_FILE = "<|end of file|>"


def source_files() -> list[Path]:
    """The standard library's source files, in an order that depends on nothing but their names."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    random.Random(0).shuffle(files)
    return files


def read_text(megabytes: float) -> list[str]:
    """Whole source files until the limit is reached."""
    texts: list[str] = []
    left = int(megabytes * 1e6)
    for path in source_files():
        if left <= 0:
            break
        texts.append(path.read_text(encoding="utf-8", errors="ignore") + "\n")
        left -= len(texts[-1])
    if not texts:
        sys.exit(f"no source files in {sysconfig.get_path('stdlib')}: this Python comes without its library's text")
    return texts


def cache_folder() -> Path:
    """The user's cache folder for this program."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "syncfree_ext"


def load_text(megabytes: float, vocabulary: int) -> tuple[Any, Tensor]:
    """The tokenizer, and the text as int32 token numbers; both come from the cache where they have been made before.

    Args:
        megabytes: most text to read.
        vocabulary: number of tokens to learn.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    key = (
        f"{platform.python_version()} {tokenizers.__version__} {megabytes} {vocabulary} {sysconfig.get_path('stdlib')}"
    )
    stem = cache_folder() / f"text-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    vocabulary_file, tokens_file = stem.with_suffix(".json"), stem.with_suffix(".pt")
    if vocabulary_file.exists() and tokens_file.exists():
        return tokenizers.Tokenizer.from_file(str(vocabulary_file)), torch.load(tokens_file, weights_only=True)

    print(f"learning a vocabulary of {vocabulary} tokens from the Python standard library ...", flush=True)
    texts = read_text(megabytes)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
        ),
    )
    end = tokenizer.token_to_id(END_OF_FILE)
    tokens = torch.tensor(
        [token for encoding in tokenizer.encode_batch(texts) for token in [*encoding.ids, end]], dtype=torch.int32
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first: a run that is interrupted leaves no half of a file behind.
    half = stem.with_suffix(f".{os.getpid()}")
    torch.save(tokens, half)
    half.replace(tokens_file)
    tokenizer.save(str(half))
    half.replace(vocabulary_file)
    return tokenizer, tokens


class Batches:
    """Random windows of the text, drawn on the device: the same ones for the same seed.

    Args:
        tokens: the text, int32 [length], on the device of the training.
        rows: windows of a batch.
        context: positions of a window.
        ignored: share of the targets that is ignored, from 0 up to 1.
        ignore_index: what such a target reads.
        seed: of all that is drawn.
    """

    def __init__(
        self, tokens: Tensor, *, rows: int, context: int, ignored: float, ignore_index: int, seed: int
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self.ignored = ignored
        self.ignore_index = ignore_index
        self.generator = torch.Generator(tokens.device).manual_seed(seed)
        self.window = torch.arange(context + 1, device=tokens.device)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [rows, context]. The host does not wait for the device."""
        device, generator = self.tokens.device, self.generator
        last = self.tokens.numel() - self.window.numel()
        start = torch.randint(last, (self.rows, 1), device=device, generator=generator)
        windows = self.tokens[start + self.window].long()
        targets = windows[:, 1:]
        if self.ignored > 0:
            drawn = torch.rand(targets.shape, device=device, generator=generator)
            targets = targets.masked_fill(drawn < self.ignored, self.ignore_index)
        return windows[:, :-1], targets
