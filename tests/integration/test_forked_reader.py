"""Readers in other processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from emberkeep.data import Reader, Resumable
from tests.unit.data.test_reader import Numbers, numbers_of


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_forked_child_reads_on_by_itself(prefetch: int) -> None:
    with Reader(Numbers(100), batch_size=10, prefetch=prefetch) as reader:
        next(reader)
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that waits for the parent's thread must fail, not hang
            try:
                rest = numbers_of(list(reader))
                reader.close()
                os.write(sending, json.dumps(rest).encode())
            finally:
                os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as stream:
            assert json.loads(stream.read()) == list(range(10, 100))
        assert os.waitpid(child, 0)[1] == 0
        assert numbers_of(list(reader)) == list(range(10, 100))


class Sharded:
    """A dataset for torch's loaders: each loader worker reads its slice with its own reader."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.reader: Reader | None = None

    def opened(self) -> Reader:
        from torch.utils.data import get_worker_info

        if self.reader is None:  # not before the fork: only the worker knows its number
            worker = get_worker_info()
            assert worker is not None
            self.reader = Reader(
                Numbers(self.samples), batch_size=3, rank=worker.id, world=worker.num_workers
            )
        return self.reader

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.opened():
            yield batch.labels.tolist()

    def state_dict(self) -> dict[str, Any]:
        return self.opened().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.opened().load_state_dict(state_dict)


def stateful_loader() -> Resumable:
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Dataset(Sharded, IterableDataset):  # type: ignore[misc,type-arg]
        pass

    loader: Resumable = StatefulDataLoader(Dataset(60), batch_size=None, num_workers=2)
    return loader


def plain_reader() -> Resumable:
    return Reader(Numbers(60), batch_size=3)


@pytest.mark.parametrize("make", [plain_reader, stateful_loader])
def test_every_resumable_resumes_exactly(make: Callable[[], Resumable]) -> None:
    def drawn(batches: Iterator[Any], count: int) -> list[list[int]]:
        found = [next(batches) for _ in range(count)]
        return [list(getattr(batch, "labels", batch)) for batch in found]

    whole = make()
    assert isinstance(whole, Resumable)
    expected = drawn(iter(whole), 20)
    assert sorted(int(number) for batch in expected for number in batch) == list(range(60))

    interrupted = make()
    first = drawn(iter(interrupted), 7)
    state = interrupted.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert first + drawn(iter(resumed), 13) == expected
