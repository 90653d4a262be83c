"""How many calls a resume from an object store makes one after another; see `critical_path`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import pytest

from emberkeep.blobs import BlobStore, Buffer, MemoryStore
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import FencedError
from emberkeep.keeper import repository_saver
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository import Repository, Writer
from emberkeep.repository.names import writer_name
from emberkeep.repository.policies import Grid
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.runtime.crew import Crew
from emberkeep.strategies import Every, Strategy
from tests.contracts.engine import state
from tests.contracts.layout import opened, started, train
from tests.critical_path import CountedCalls

VERSIONS = 6


def saver(store: BlobStore, cluster: LocalCluster) -> RepositorySaver:
    strategy = Strategy(spec=VersionSpec(), schedule=Every(steps=10**9))
    return RepositorySaver(
        store, cluster, strategy, about={}, settings=SaveSettings(), exclusive=False,
        must_exist=True, on_event=lambda *_: None, clock=SYSTEM_CLOCK, beside=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [None, VERSIONS, 3])
def test_few_calls_of_a_resume_wait_for_each_other(number: int | None) -> None:
    inner, cluster, random = MemoryStore(), opened(), np.random.default_rng(0)
    keeper = started(cluster, inner, spec=VersionSpec(layout="grid", grid=Grid(resets=False)))
    states = {}
    for step in range(1, VERSIONS + 1):
        train(cluster, random, steps=2)
        states[step] = state(cluster)
        keeper.save(step)
        keeper.wait()
    keeper.settle()
    keeper.close()
    store, fresh = CountedCalls(inner), opened()
    with store.counting():
        resumed = saver(store, fresh)
        # repository.json and listings; claim.
        assert store.time == 2
        resumed.restore(number)
        first_row = min(time for time, _, name in store.calls if name.endswith(".grid"))
        # The manifest, then rows; beside both the seal, listings, and a claim of its own.
        assert first_row == 4
        # Nothing changes before the claim and the pin stand; beside rows the restore is counted.
        assert store.time <= 6
    resumed.close()
    assert state(fresh) == states[number or VERSIONS]


class Meanwhile(WrapperStore):
    """A store behind a network, in which something else happens just before the first object below
    a directory is created."""

    def __init__(self, inner: BlobStore, directory: str, event: Callable[[], object]) -> None:
        super().__init__(inner)
        self._directory, self._event = directory, event
        self._crew = Crew(8, "emberkeep-requests")

    @property
    def calls_at_once(self) -> Executor:
        return self._crew

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        if name.startswith(self._directory):
            event, self._event = self._event, lambda: None
            event()
        return super().put_if_absent(name, data)


def saved(keeper: Checkpointer, step: int) -> None:
    keeper.save(step)
    keeper.wait()


def with_a_version() -> tuple[MemoryStore, LocalCluster, np.random.Generator, Checkpointer]:
    inner, cluster, random = MemoryStore(), opened(), np.random.default_rng(0)
    keeper = started(cluster, inner, spec=VersionSpec(layout="grid"))
    train(cluster, random, steps=2)
    saved(keeper, 1)
    return inner, cluster, random, keeper


def test_a_resume_reads_what_was_committed_until_the_seal() -> None:
    inner, cluster, random, keeper = with_a_version()

    def save_another() -> None:
        train(cluster, random, steps=2)
        saved(keeper, 2)

    fresh = opened()
    resumed = saver(Meanwhile(inner, "versions/", save_another), fresh)
    restored = resumed.restore()
    assert restored is not None
    assert restored.manifest.step == 2
    assert state(fresh) == state(cluster)
    assert resumed.restores == 1  # what was read in vain is not counted
    resumed.close()
    with pytest.raises(FencedError):
        saved(keeper, 3)


def test_no_row_changes_where_another_process_takes_over_first() -> None:
    inner, _, _, keeper = with_a_version()
    keeper.close()
    fresh = opened()
    train(fresh, np.random.default_rng(1), steps=1)
    before = state(fresh)
    resumed = saver(
        Meanwhile(inner, "writers/", lambda: Writer.open(Repository.open(inner))), fresh
    )
    with pytest.raises(FencedError):
        resumed.restore()
    assert state(fresh) == before
    with pytest.raises(FencedError):
        resumed.close()


def test_beside_rows_that_may_be_adopted_nothing_comes_before_the_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers hear whose they are, and they stay or go by what the newest version is."""
    inner, _, _, keeper = with_a_version()
    keeper.close()
    said: list[dict[str, str]] = []
    monkeypatch.setattr(LocalCluster, "tell", lambda _, **about: said.append(about))
    monkeypatch.setattr(repository_saver, "has_adopted", lambda _: True)
    another = Meanwhile(inner, "writers/", lambda: Writer.open(Repository.open(inner)))
    with pytest.raises(FencedError):
        saver(another, opened())
    assert not said


def test_a_keeper_that_is_closed_at_once_has_taken_over() -> None:
    inner, _, _, keeper = with_a_version()
    saver(Meanwhile(inner, "none", lambda: None), opened()).close()
    assert inner.size(writer_name(2))
    with pytest.raises(FencedError):
        saved(keeper, 3)
