"""What the ranks of a data-parallel job must agree on, over a process group of the keeper's own.

Its own, and gloo: tensors stay in host memory whatever the job computes on, and nothing here can
come between the collectives of the training step. Every rank makes the same calls in the same
order; alone, every call is answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from emberkeep.errors import StateError

_LEAST = timedelta(minutes=30)


def collective_timeout(patience: timedelta) -> timedelta:
    """How long ranks wait for each other: longer than one of them may take to bring a lost server
    back, so that it is `patience` that ends a run, whatever it is set to."""
    return max(_LEAST, 2 * patience)


class Ranks:
    """All ranks of the default process group, or one process alone. They `meet` before anything
    is agreed on."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if joined else 1
        self.rank = dist.get_rank() if joined else 0
        self._group: dist.ProcessGroup | None = None

    def meet(self, patience: timedelta) -> None:
        """Makes the group; every rank does, with the same patience."""
        if self.world > 1:
            timeout = collective_timeout(patience)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Each number as the largest that any rank has brought."""
        if self._group is None:
            return list(numbers)
        most = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in most]

    def gathered(self, content: bytes) -> list[bytes]:
        """What every rank has brought, by rank; only the leading one gets it."""
        if self._group is None:
            return [content]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
        length = torch.tensor([len(content)], device="cpu")
        dist.all_gather(sizes, length, group=self._group)
        most = max(int(size) for size in sizes)
        own = torch.zeros(most, dtype=torch.uint8, device="cpu")
        own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.world)] if self.leads else None
        dist.gather(own, parts, dst=0, group=self._group)
        if parts is None:
            return []
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    @contextmanager
    def agreeing(self, otherwise: str) -> Iterator[None]:
        """All ranks succeed or all raise: none is left waiting for one that is gone."""
        try:
            yield
        except BaseException:
            self.largest([1])
            raise
        (failed,) = self.largest([0])
        if failed:
            raise StateError(f"{otherwise}: see its error")

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)
