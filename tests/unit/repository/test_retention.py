"""Policies as tables; what gc keeps beside them."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository import (
    DEFAULT_RETENTION,
    Collector,
    KeepAll,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepNamed,
    Pin,
    Repository,
    RetentionPolicy,
    VersionFacts,
    VersionId,
    Writer,
)
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.virtual_clock import VirtualClock
from tests.unit.repositories import Run


def history(numbers: list[int], named: dict[int, str] | None = None) -> list[VersionFacts]:
    named = named or {}
    return [
        VersionFacts(version=VersionId(n, 1), tags=(named[n],) if n in named else ())
        for n in numbers
    ]


@pytest.mark.parametrize(
    ("policy", "numbers", "kept"),
    [
        (KeepLast(), [], []),
        (KeepLast(), [1, 2], [1, 2]),
        (KeepLast(), [1, 2, 3, 4, 5], [3, 4, 5]),
        (KeepLast(n=1), [1, 2, 9], [9]),
        (KeepEvery(m=3), [1, 2, 3, 4, 6, 7], [3, 6]),
        (KeepEvery(m=1), [1, 2], [1, 2]),
        (KeepNamed(), [1, 2, 3, 4], [2]),
        (KeepAll(), [1, 2, 7], [1, 2, 7]),
        (KeepLast(n=1) | KeepNamed(), [1, 2, 3, 4], [2, 4]),
        (KeepLast(n=1) | KeepEvery(m=3) | KeepNamed(), [1, 2, 3, 4, 5], [2, 3, 5]),
        (DEFAULT_RETENTION, [1, 2, 3, 4, 5, 6], [2, 4, 5, 6]),
    ],
)
def test_policies(policy: RetentionPolicy, numbers: list[int], kept: list[int]) -> None:
    decision = policy.keep(history(numbers, named={2: "best"}))
    assert sorted(version.number for version in decision) == kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepFor(age=timedelta(days=14)), [3, 4, 5]),
        (KeepFor(age=timedelta(days=15)), [2, 3, 4, 5]),
        (KeepLast(n=2) & KeepFor(age=timedelta(days=14)), [4, 5]),
        (KeepLast(n=4) & KeepFor(age=timedelta(days=14)), [3, 4, 5]),
        (KeepLast(n=4) | KeepFor(age=timedelta(days=1)), [2, 3, 4, 5]),
        (KeepLast(n=1) & KeepFor(age=timedelta(days=14)) | KeepNamed(), [2, 5]),
    ],
)
def test_policies_by_age(policy: RetentionPolicy, kept: list[int]) -> None:
    """Versions 1 to 5 are 21, 14, 7, 1 and 0 days old; 2 has a name."""
    facts = [
        replace(fact, age=timedelta(days=days))
        for fact, days in zip(
            history([1, 2, 3, 4, 5], named={2: "best"}), (21, 14, 7, 1, 0), strict=True
        )
    ]
    assert sorted(version.number for version in policy.keep(facts)) == kept


def test_gc_knows_how_old_versions_are_and_keeps_the_newest_whatever_its_age() -> None:
    clock = VirtualClock()
    repository = Repository.create(MemoryStore(clock), schema={}, clock=clock)
    writer = Writer.open(repository)
    policy = KeepLast(n=3) & KeepFor(age=timedelta(days=14))
    collector = Collector(writer, policy=policy, grace=timedelta(0))
    kept = []
    for step in range(4):
        save(writer, step)
        clock.advance(timedelta(days=6))
        kept.append([version.number for version in collector.collect().kept])
    clock.advance(timedelta(days=30))
    kept.append([version.number for version in collector.collect().kept])
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [4]]


def test_policies_validate_themselves() -> None:
    with pytest.raises(ConfigError):
        KeepFor(age=timedelta(0))
    with pytest.raises(ConfigError):
        KeepLast(n=0)
    with pytest.raises(ConfigError):
        KeepEvery(m=0)
    with pytest.raises(ConfigError):
        Collector(Writer.open(Repository.create(MemoryStore(), schema={})), grace=timedelta(-1))
    assert KeepLast(n=2) == KeepLast(n=2)


class KeepNothing:
    def keep(self, history: object) -> frozenset[VersionId]:
        return frozenset()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def repository(clock: VirtualClock) -> Repository:
    return Repository.create(MemoryStore(clock), schema={}, clock=clock)


def numbers(repository: Repository) -> list[int]:
    return [version.number for version in repository.versions()]


def test_the_newest_version_stays_whatever_the_policy_says(repository: Repository) -> None:
    writer = Writer.open(repository)
    collector = Collector(writer, policy=KeepNothing(), grace=timedelta(0))
    assert collector.collect().removed == ()
    baseline = save(writer, 1)
    save(writer, 2, needs=[baseline.version])
    save(writer, 3, needs=[VersionId(2, 1)])
    nbytes = sum(manifest.nbytes for manifest in repository.chain(3))
    collector.collect()
    assert numbers(repository) == [1, 2, 3], "a kept version keeps its whole chain"
    save(writer, 4)
    collected = collector.collect()
    assert collected.removed == tuple(VersionId(n, 1) for n in (1, 2, 3))
    assert collected.files == 6
    assert collected.nbytes == nbytes


def test_the_young_are_spared(repository: Repository, clock: VirtualClock) -> None:
    writer = Writer.open(repository)
    collector = Collector(writer, policy=KeepLast(n=1), grace=timedelta(hours=2))
    manifests = [save(writer, step) for step in (1, 2, 3)]
    draft = writer.begin()
    draft.add(b"garbage soon", kind="rows", suffix="bin")
    draft._writer._release()  # as if its thread had died
    save(writer, 4)
    assert collector.collect().removed == ()
    assert len(list(repository.store.list("data"))) == 9
    clock.advance(timedelta(hours=2))
    collector.collect()
    assert numbers(repository) == [4]
    assert len(list(repository.store.list("data"))) == 2
    assert manifests[0].version not in repository.versions()


def test_pins_hold_until_they_expire(repository: Repository, clock: VirtualClock) -> None:
    writer = Writer.open(repository)
    collector = Collector(writer, policy=KeepLast(n=1), grace=timedelta(0))
    baseline = save(writer, 1)
    top = save(writer, 2, needs=[baseline.version])
    Pin(repository, top.version, lifetime=timedelta(minutes=30))
    save(writer, 3)
    clock.advance(timedelta(minutes=29))
    collector.collect()
    assert numbers(repository) == [1, 2, 3]
    clock.advance(timedelta(minutes=1))
    collector.collect()
    assert numbers(repository) == [3]
    assert list(repository.store.list("pins")) == []


def test_gc_deletes_nothing_while_a_kept_version_is_damaged(repository: Repository) -> None:
    writer = Writer.open(repository)
    for step in (1, 2, 3):
        save(writer, step)
    repository.store.put(VersionId(2, 1).manifest_name, b"damaged")
    before = {info.name for info in repository.store.list()}
    with pytest.raises(DamageError, match="0000000002"):
        Collector(writer, policy=KeepLast(n=2), grace=timedelta(0)).collect()
    assert {info.name for info in repository.store.list()} == before
    # Retention lets it go: then it goes like any other.
    Collector(writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
    assert numbers(repository) == [3]


def test_foreign_files_are_left_alone(repository: Repository) -> None:
    writer = Writer.open(repository)
    repository.store.put("data/notes.txt", b"notes")
    repository.store.put("data/000009-0000000001-0123456789abcdef-0.bin", b"of a later epoch")
    save(writer, 1)
    Collector(writer, grace=timedelta(0)).collect()
    assert repository.store.get("data/notes.txt") == b"notes"
    assert len(list(repository.store.list("data"))) == 4


def test_files_of_earlier_epochs_go_with_their_versions(repository: Repository) -> None:
    old = Writer.open(repository)
    save(old, 1)
    old.begin().add(b"never committed", kind="rows", suffix="bin")
    new = Writer.open(repository)
    manifest = save(new, 2)
    Collector(new, policy=KeepLast(n=1), grace=timedelta(0)).collect()
    assert numbers(repository) == [2]
    check_content(repository, manifest)
    assert len(list(repository.store.list("data"))) == 2
    # The seal stays: without it the old writer could wake and believe that it committed.
    assert [info.name for info in repository.store.list("versions")] == [
        VersionId(2, 1).manifest_name,
        manifest.name,
        VersionId(1, 1).removed_name,
    ]


def test_gc_says_why_it_keeps_what_it_keeps() -> None:
    run = Run(layout="consecutive")
    for _ in range(6):
        run.save(1)
    repository, now = run.repository, datetime.now(timezone.utc)
    repository.tag("best", 2)
    numbered = {v.number: v for v in repository.versions()}
    kinds = {n: repository.manifest(v).layout["kind"] for n, v in numbered.items()}
    chain = {f"needed by {n + 1}" for n in (1, 2) if kinds[n + 1] != "full"}
    writer = Writer.open(repository)
    writer.resume(numbered[3])
    grace = timedelta(minutes=10)
    with Pin(repository, numbered[4]):
        collected = Collector(writer, policy=KeepLast(n=1) | KeepNamed(), grace=grace).collect()
        young = collected.reasons[numbered[1]][0]
        assert re.fullmatch(r"grace until \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", young)
        assert now.strftime("%Y-%m-%d") <= young.split()[2]
        collector = Collector(writer, policy=KeepLast(n=1) | KeepNamed(), grace=timedelta(0))
        found = {v.number: set(why) for v, why in collector.collect().reasons.items()}
    assert "tag best" in found[2]
    assert "resumed from" in found[3]
    assert any(why.startswith("pinned until ") for why in found[4])
    assert found[6] >= {"retention", "newest"}
    assert chain <= set().union(*found.values())
