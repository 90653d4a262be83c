"""A keeper that may write so much a second: what follows from it, and that it is kept."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.keeper.interval import version_nbytes
from emberkeep.testing.virtual_clock import VirtualClock


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = ek.EmbeddingBags(
            [
                ek.Table("fixed", rows=1000, dim=8),
                ek.Table("dynamic", rows=None, capacity=500, dim=8),
            ],
            optimizer=ek.RowWiseAdagrad(lr=0.1), cluster=ek.local(shards=2),
        )  # fmt: skip


def kept(**more: Any) -> tuple[ek.Keeper, list[Any]]:
    events: list[Any] = []
    model = Model()
    strategy = more.pop("strategy", ek.incremental(every=1))
    keeper = ek.Keeper(
        more.pop("store", MemoryStore()), model, model.bags.optimizer, strategy=strategy,
        on_event=lambda *event: events.append(event), **more,
    )  # fmt: skip
    return keeper, events


def test_the_shortest_interval_is_said_when_the_keeper_is_made() -> None:
    keeper, events = kept(settings=SaveSettings(most_mb_per_second=0.001))
    nbytes = 1500 * (8 * 4 + 4)
    assert keeper.shortest_interval == timedelta(seconds=nbytes / 1000)
    ((name, details),) = events
    assert (name, details["version_nbytes"]) == ("bandwidth", nbytes)
    assert kept()[0].shortest_interval is None
    fewer = ek.incremental(every=1, bits=4, quantize_optimizer=True)
    assert version_nbytes(keeper._parts.subject, fewer.spec) == 1500 * (4 + 4 + 2)


def test_an_interval_that_is_too_short_is_warned_of() -> None:
    slow = SaveSettings(most_mb_per_second=0.001)
    with pytest.warns(
        UserWarning, match=r"takes 54 s at 0\.001 MB/s, and one is wanted every 30 s"
    ):
        kept(settings=slow, strategy=ek.incremental(every="30s"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept(settings=slow, strategy=ek.incremental(every="2min"))


@pytest.mark.parametrize("layout", ["full", "grid"])
def test_versions_are_written_no_faster(layout: Any) -> None:
    clock = VirtualClock(pace=2e3)
    model = Model()
    keeper = ek.Keeper(
        MemoryStore(clock), model, model.bags.optimizer, clock=clock,
        strategy=ek.incremental(every=1000, layout=layout),
        settings=SaveSettings(most_mb_per_second=0.01),
    )  # fmt: skip
    model.bags({"fixed": torch.arange(1000), "dynamic": torch.arange(1000) % 500}).sum().backward()
    model.bags.optimizer.step()
    start, nbytes = clock.monotonic(), 0
    for _ in range(2):  # the second waits for what the first has used up
        keeper.save()
        manifest: Any = keeper.wait()
        nbytes = nbytes or manifest.nbytes
    assert nbytes > 50_000
    assert clock.monotonic() - start >= nbytes / 0.01e6
