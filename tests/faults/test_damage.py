"""Damage is noticed, whatever it is and wherever: the table of `docs/reliability.md`."""

from __future__ import annotations

import pytest

from emberkeep.checkpoint.contents import dense_bytes
from emberkeep.repository import Repository, verify
from tests.faults import damage
from tests.unit.repositories import TABLES


@pytest.mark.parametrize("label", damage.LAYOUTS)
def test_a_healthy_repository_is_healthy(label: str) -> None:
    """`verify` has nothing to say, and every version comes back as it was saved."""
    kept = damage.healthy(label)
    repository = Repository.open(kept.store())
    for deep in (True, False):
        report = verify(repository, deep=deep)
        assert report.damages == ()
        assert report.versions == repository.versions() == report.undamaged
    assert len(kept.truth) == 4
    for number, digest in kept.truth.items():
        assert damage.read_version(repository, number) == digest
        cluster = damage.restore_version(repository, number)
        assert sum(cluster.touched_ids(table.name).size for table in TABLES) > 0
        assert dense_bytes(repository, repository.manifest(number)) is not None


@pytest.mark.parametrize("label", damage.LAYOUTS)
def test_damage_of_a_repository_is_noticed(label: str) -> None:
    found = damage.repository_cases(label, every=False)
    total = damage.totals(found)
    assert total.failures == []
    assert total.cases >= 10
    kinds = {kind for kind, _ in found}
    assert {"manifest", "newest manifest"} < kinds
    assert ({"bundle", "catalog", "segment"} if "grid" in label else {"piece"}) < kinds


def test_damage_of_a_tier_is_noticed() -> None:
    found = damage.tier_cases()
    total = damage.totals(found)
    assert total.failures == []
    kinds = {"tier head", "older tier head", "tier segment", "tier state", "tier decision"}
    assert kinds < {kind for kind, _ in found}


@pytest.mark.soak
def test_damage_of_every_object_is_noticed() -> None:
    counted = damage.damage_cases(every=True)
    print(damage.table(counted))
    assert damage.totals(counted).failures == []
