"""A history of thousands of versions is decided from names; nothing is looked at one by one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from emberkeep.blobs import BlobInfo, LocalStore
from emberkeep.blobs.system_disk import Disk
from emberkeep.repository import KeepLast, Repository, Writer
from emberkeep.repository.maintenance.collector import Collector


def with_versions(path: Path, count: int) -> tuple[Repository, Writer]:
    repository = Repository.create(LocalStore(path), schema={"tables": {}, "shards": 1})
    writer = Writer.open(repository)
    for step in range(count):
        with writer.begin() as draft:
            draft.commit(step=step, layout={"kind": "full", "shards": 1, "tables": {}})
    return repository, writer


def test_names_say_what_a_full_listing_says(tmp_path: Path) -> None:
    with_versions(tmp_path / "r", 5)
    Writer.open(Repository.open(LocalStore(tmp_path / "r")))  # leaves a seal
    repository = Repository.open(LocalStore(tmp_path / "r"))
    names, dated = repository.history(), repository.history(dated=True)
    assert names.versions == dated.versions
    assert [version.number for version in names.versions] == [1, 2, 3, 4, 5]
    assert {*names.listing.manifests} == {*dated.listing.manifests}
    assert {*names.listing.manifests.values()} == {None}
    assert all(isinstance(info, BlobInfo) for info in dated.listing.manifests.values())


def test_no_version_and_no_claim_is_looked_at_for_its_size(tmp_path: Path) -> None:
    class Looked(Disk):
        def __init__(self) -> None:
            self.paths: list[str] = []

        def status(self, path: str) -> os.stat_result | None:
            self.paths.append(path)
            return super().status(path)

    with_versions(tmp_path / "r", 5)
    disk = Looked()
    repository = Repository.open(LocalStore(tmp_path / "r", disk=disk))
    assert len(repository.versions()) == 5
    assert disk.paths == []


def test_where_gc_has_freed_names_all_are_looked_at(tmp_path: Path) -> None:
    repository, writer = with_versions(tmp_path / "r", 5)
    Collector(writer, policy=KeepLast(n=2), grace=timedelta(0)).collect()
    again = Repository.open(repository.store)
    found = again.history()
    assert [version.number for version in found.versions] == [4, 5]
    assert all(isinstance(info, BlobInfo) for info in found.listing.manifests.values())


def test_names_are_of_what_stands_directly_below(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("a/1", "a/2", "a/b/3", "c"):
        store.put(name, b"")
    (tmp_path / "a" / "no name").touch()
    assert {*store.names("a")} == {"a/1", "a/2", "a/b"}
    assert list(store.names("none")) == []
