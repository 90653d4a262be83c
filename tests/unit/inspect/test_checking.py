"""`emberkeep verify` and `show` beside a trainer, which saves, moves rows and lets versions go."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.inspect import summary
from emberkeep.repository import Collector, KeepLast, Repository, verify
from emberkeep.repository import names as places
from emberkeep.repository.maintenance import verify as verifying
from emberkeep.runtime.pool import Pool
from tests.unit.repositories import Run


def collect(run: Run) -> None:
    run.keeper.settle()
    policy = KeepLast(n=1)
    Collector(run.keeper.writer, policy=policy, grace=timedelta(0)).collect()


@pytest.mark.parametrize("layout", ["full", "grid"])
def test_what_goes_while_it_is_checked_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    run = Run(layout=layout)
    for _ in range(4):
        run.save()
    unusable, collected = summary._unusable, list[int]()

    def meanwhile(*given: Any) -> dict[str, str]:
        collect(run)
        collected.append(1)
        return unusable(*given)

    monkeypatch.setattr(summary, "_unusable", meanwhile)
    report = summary.check(Repository.open(run.store), pool=Pool(1))
    assert collected
    assert report.damages == ()
    assert [version.number for version in report.versions] == [4]


@pytest.mark.parametrize("deep", [False, True])
def test_what_comes_after_the_listing_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    """A round of a grid that is committed meanwhile names files that the listing has not."""
    run = Run(layout="grid")
    run.save()
    small_objects = verifying._Check.small_objects

    def meanwhile(self: Any) -> None:
        for _ in range(3):
            run.save()
        run.keeper.settle()
        small_objects(self)

    monkeypatch.setattr(verifying._Check, "small_objects", meanwhile)
    assert verify(Repository.open(run.store), deep=deep).damages == ()


def test_files_of_a_grid_are_shown_as_what_they_are_there_for() -> None:
    run = Run(layout="grid")
    for _ in range(6):
        run.save()
    collect(run)
    repository = Repository.open(run.store)
    storage = summary.describe(repository, repository.versions()[-1])["storage"]
    moved = [info.name for info in run.store.list(places.MOVED) if info.name.endswith(".grid")]
    assert moved
    read = {file.name for file in summary.files_of(repository, repository.versions())}
    assert read & {*moved}
    text = str(storage)
    assert "data of versions that it needs" in text
    assert "data of no version" not in text
