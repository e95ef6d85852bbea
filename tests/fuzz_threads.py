"""The ranks of a vocabulary that is spread over devices, as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncfree_ext.integrations import _vocab_parallel

Result = TypeVar("Result")


class _Done:
    def wait(self) -> None:
        """The work is done."""


class ThreadRanks:
    """Stands in for torch.distributed in the driver of the shard ops: `size` threads, each a rank."""

    ReduceOp = dist.ReduceOp

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._mine = threading.local()

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def all_reduce(self, tensor: Tensor, operation: Any, group: Any = None, async_op: bool = False) -> _Done | None:
        self._given[self._mine.rank] = tensor
        self._barrier.wait()
        combined = torch.stack(self._given)
        reduce = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}[operation]
        result = reduce(combined, 0)
        self._barrier.wait()  # no rank writes before all have read
        tensor.copy_(result)
        return _Done() if async_op else None

    @contextmanager
    def _installed(self) -> Iterator[None]:
        kept = _vocab_parallel.dist
        _vocab_parallel.dist = self  # type: ignore[assignment]
        try:
            yield
        finally:
            _vocab_parallel.dist = kept

    def run(self, job: Callable[[int], Result]) -> list[Result]:
        """job(rank) of each rank; the first error of any of them is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self._mine.rank = rank
            try:
                results[rank] = job(rank)
            except threading.BrokenBarrierError:
                return
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        with self._installed():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results
