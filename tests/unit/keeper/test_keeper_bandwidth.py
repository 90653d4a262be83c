"""A keeper that may write so much a second: what follows from it, and that it is kept."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.keeper.interval import nbytes_by_table
from emberkeep.repository import Repository
from emberkeep.runtime import bandwidth
from emberkeep.testing.virtual_clock import VirtualClock
from tests.waiting import until


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
    nbytes = 1500 * (8 * 4 + 4) + 500 * 8  # with the ids of the dynamic table
    assert keeper.shortest_interval == timedelta(seconds=nbytes / 1000)
    ((name, details),) = events
    assert (name, details["version_nbytes"]) == ("bandwidth", nbytes)
    assert kept()[0].shortest_interval is None
    fewer = ek.incremental(every=1, bits=4, quantize_optimizer=True)
    assert (
        sum(nbytes_by_table(keeper._parts.subject, fewer.spec).values())
        == 1500 * (4 + 4 + 2) + 500 * 8
    )


def test_an_interval_that_is_too_short_is_warned_of() -> None:
    slow = SaveSettings(most_mb_per_second=0.001)
    with pytest.warns(
        UserWarning,
        match=r"takes 58 s at 0\.001 MB/s, and one is wanted every 30 s: training stands still",
    ):
        kept(settings=slow, strategy=ek.incremental(every="30s"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept(settings=slow, strategy=ek.incremental(every="2min"))


def test_an_interval_in_steps_that_is_too_short_is_warned_of_once() -> None:
    clock = VirtualClock(pace=2e3)
    keeper, _ = kept(
        settings=SaveSettings(most_mb_per_second=0.01), store=MemoryStore(clock), clock=clock,
        strategy=ek.incremental(every=2),
    )  # fmt: skip
    for _ in range(3):
        keeper.step()
    clock.advance(timedelta(seconds=1))
    with pytest.warns(UserWarning, match=r"training stands still in step\(\)") as warned:
        keeper.step()
    (warning,) = warned
    assert "takes 5.8 s at 0.01 MB/s, and one was due 1 s after another" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            keeper.step()
    keeper.close()


def test_an_interval_in_steps_that_is_long_enough_is_not_warned_of() -> None:
    clock = VirtualClock(pace=2e3)
    keeper, _ = kept(
        settings=SaveSettings(most_mb_per_second=0.01), store=MemoryStore(clock), clock=clock,
        strategy=ek.incremental(every=1),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            keeper.step()
            clock.advance(timedelta(seconds=10))
    keeper.close()


class Whole(nn.Module):
    """A table of torch's own whose optimizer changes every row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8)
        self.optimizer = torch.optim.Adam(self.parameters())


@pytest.mark.filterwarnings("ignore:these tables are saved whole")
def test_what_is_saved_beside_rows_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_MOST_NBYTES", 1000)
    clock, model = VirtualClock(pace=2e3), Whole()
    keeper = ek.Keeper(
        MemoryStore(clock), model, model.optimizer, clock=clock,
        strategy=ek.incremental(every=1000), settings=SaveSettings(most_mb_per_second=0.01),
    )  # fmt: skip
    before = keeper.shortest_interval
    assert before == timedelta(seconds=500 * 8 * 4 * 3 / 0.01e6)  # with two moments
    model.table(torch.arange(500)).sum().backward()
    model.optimizer.step()
    keeper.step()
    start = clock.monotonic()
    keeper.save()
    manifest: Any = keeper.wait()
    assert manifest.nbytes >= 48_000
    assert clock.monotonic() - start >= (manifest.nbytes - 1000) / 0.01e6
    after = keeper.shortest_interval
    assert after is not None
    assert before <= after < timedelta(seconds=manifest.nbytes / 0.01e6)


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


def trained(clock: VirtualClock, **settings: Any) -> tuple[ek.Keeper, Model, MemoryStore]:
    """A run with a version under way that does not end before its limits are lifted."""
    model, store = Model(), MemoryStore(clock)
    keeper = ek.Keeper(
        store, model, model.bags.optimizer, clock=clock, grace=timedelta(hours=10),
        strategy=ek.incremental(every=1, layout="full"), settings=SaveSettings(**settings),
    )  # fmt: skip
    model.bags({"fixed": torch.arange(1000), "dynamic": torch.arange(1000) % 500}).sum().backward()
    model.bags.optimizer.step()
    keeper.step()
    return keeper, model, store


def stop_when_awaited(keeper: ek.Keeper) -> threading.Thread:
    """Asks the run to stop once somebody waits for its save."""
    saver: Any = keeper._saver

    def stop() -> None:
        until(lambda: saver._budget._awaited > 0, "somebody to wait for the save")
        keeper.stop_after_step()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


@pytest.mark.parametrize("call", ["step", "save", "wait", "close"])
@pytest.mark.filterwarnings("ignore:a version of all rows")
def test_a_signal_lifts_the_limit_of_a_save_that_is_waited_for(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "_MOST_NBYTES", 1000)
    clock = VirtualClock(pace=100)
    keeper, _, store = trained(clock, most_mb_per_second=1e-6)
    stopping = stop_when_awaited(keeper)
    if call in ("step", "close"):
        with pytest.raises(SystemExit, match="75"):
            getattr(keeper, call)()
    else:
        getattr(keeper, call)()
        keeper.wait()
        keeper.close(save=False)
    stopping.join()
    newest = Repository.open(store).newest_whole()
    assert newest is not None
    assert Repository.open(store).manifest(newest).step == (2 if call == "step" else 1)


@pytest.mark.parametrize("call", ["step", "save", "wait", "close"])
def test_a_save_that_training_waits_for_does_not_rest(call: str) -> None:
    clock = VirtualClock()  # on which nobody has ever rested long enough
    keeper, _, store = trained(clock, background_share=1e-9)
    getattr(keeper, call)()
    keeper.wait()
    keeper.close(save=False)
    newest = Repository.open(store).newest_whole()
    assert newest is not None
    assert Repository.open(store).manifest(newest).step == (2 if call == "step" else 1)


def test_a_version_that_a_store_does_not_take_is_given_up_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lifting the limits does not help everywhere: half of the grace is left for the last one."""
    clock = VirtualClock(pace=1e5)
    keeper, _, store = trained(clock)
    keeper.wait()
    put, first, cancelled = store.put, threading.Event(), threading.Event()

    def slow(name: str, *args: Any, **kwargs: Any) -> Any:
        if not first.is_set():
            first.set()
            saver: Any = keeper._saver
            until(saver._saving.cancelled.is_set, "the save to be given up")
            cancelled.set()
        return put(name, *args, **kwargs)

    monkeypatch.setattr(store, "put", slow)
    keeper.step()
    until(first.is_set, "the save to begin")
    keeper.stop_after_step()
    with pytest.raises(SystemExit, match="75"):
        keeper.close()
    assert cancelled.is_set()
    newest = Repository.open(store).newest_whole()
    assert newest is not None
    assert Repository.open(store).manifest(newest).step == 2
