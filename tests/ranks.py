"""Processes of one torch.distributed group that wait for jobs: one start serves all tests of a session.

A job is a function of a module that the processes can import; it runs on each rank, and what it returns comes back as a
list. Tensors travel by value.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LIMIT = 120.0  # seconds that a job may take; ranks that wait for one that has failed give up after half of it


class RankError(AssertionError):
    """A job failed on a rank, or a rank did not answer."""


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _serve(pipe: Connection, rank: int, size: int, backend: str, store: str) -> NoReturn:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=_LIMIT / 2)
    )
    pipe.send_bytes(_packed((True, None)))
    while True:
        job, args, options = pipe.recv()
        try:
            answer = (True, job(*args, **options))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_packed(answer))


class Ranks:
    """`size` processes; call it with a job."""

    def __init__(self, size: int, backend: str, store: Path) -> None:
        # A server that has imported torch forks the ranks: it has no threads and no device yet.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "pytest"])
        self.size, self.alive = size, True
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, backend, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def __call__(self, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((job, args, options))
        return self._answers()

    def _answers(self) -> list[Any]:
        values, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(_LIMIT):
                    raise TimeoutError(f"no answer within {_LIMIT} s")
                ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except (EOFError, OSError, TimeoutError) as error:
                ok, value = False, repr(error)
            values.append(value)
            if not ok:
                errors.append(f"rank {rank} of {self.size}: {value}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return values

    def close(self) -> None:
        """End the processes at once: after a failed job their collectives would still wait for each other."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
