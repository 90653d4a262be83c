"""Damage is seen: whatever is flipped, cut, grown, swapped or deleted is named, never returned."""

from __future__ import annotations

from datetime import timedelta

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import (
    ConfigError,
    DamageError,
    FencedError,
    NoRepositoryError,
    NoVersionError,
)
from emberkeep.repository import (
    Collector,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    Writer,
    fork,
    newest_undamaged,
    verify,
)
from emberkeep.repository.policies import Grid
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.testing import FaultStore
from emberkeep.testing.contracts import check_content, save
from tests.faults.grids import World
from tests.nightly import some

KINDS = ("repository.json", "writers", "versions", "data", "tags", "pins", "condemned", "restores")


def build() -> tuple[MemoryStore, list[Manifest]]:
    """A repository with at least two objects of every kind, seals included."""
    store = MemoryStore()
    repository = Repository.create(store, schema={"tables": ["user"]})
    manifests: list[Manifest] = []
    for _ in range(3):
        writer = Writer.open(repository)
        for _ in range(2):
            needs = [manifests[-1].version] if manifests else None
            manifests.append(save(writer, len(manifests) + 1, needs=needs))
    with writer.begin(block_nbytes=64) as draft:
        draft.add(bytes(range(200)), kind="dense", suffix="safetensors")
        manifests.append(draft.commit(step=7))
    for index in range(2):
        repository.tag(f"tag{index}", manifests[index].version)
        Pin(repository, manifests[index].version, lifetime=timedelta(days=1))
        repository.record_restore(manifests[index].version)
        name = f"condemned/00000{index}-0123456789abcdef.json"
        store.put(name, repository.encode(name, "condemned", {"versions": []}))
    return store, manifests


def names_of(store: MemoryStore) -> list[str]:
    return sorted(info.name for info in store.list())


def kind_of(name: str) -> str:
    return name.split("/")[0]


def check_seen(store: MemoryStore, manifests: list[Manifest], damaged: set[str]) -> None:
    """The damaged objects are named by verify, and no read gives anything but the truth."""
    try:
        repository = Repository.open(store)
        report = verify(repository)
    except DamageError as error:
        if error.name not in damaged:
            raise
        return
    named = {damage.name for damage in report.damages}
    assert named <= damaged
    # A file is known by its manifest: if that is damaged too, only the file's name is left.
    assert damaged - named <= set(report.unreferenced)
    for manifest in manifests:
        try:
            assert repository.manifest(manifest.version) == manifest
        except (DamageError, NoVersionError):
            assert manifest.name in damaged
            continue
        for file in manifest.files:
            for read in (repository.read, lambda f: b"".join(repository.stream(f))):
                if file.name in damaged:
                    with pytest.raises(DamageError, match=file.name):
                        read(file)
                else:
                    assert read(file) == STORE.get(file.name)
    # What verify calls undamaged can be restored with everything that it needs.
    for version in report.undamaged:
        for manifest in repository.chain(version):
            for file in manifest.files:
                repository.read(file)
    newest, _ = newest_undamaged(repository)
    assert newest == (report.undamaged[-1] if report.undamaged else None)


STORE, MANIFESTS = build()
NAMES = names_of(STORE)
# Of every kind the first and the last; the last version is the one with blocks, and of the
# objects under versions/ one more, which is a seal.
CHOSEN = {
    kind: sorted({same[0], same[-1], *(n for n in same if n.endswith("0003-000001.json"))})
    for kind in KINDS
    for same in [[name for name in NAMES if kind_of(name) == kind]]
}


def copy_with(changes: dict[str, bytes | None]) -> MemoryStore:
    store = MemoryStore()
    for name in NAMES:
        content = changes.get(name, STORE.get(name))
        if content is not None:
            store.put(name, content)
    return store


def test_the_undamaged_repository_passes() -> None:
    assert {kind_of(name) for name in NAMES} == set(KINDS)
    check_seen(copy_with({}), MANIFESTS, set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_seen_at_every_offset_class(kind: str) -> None:
    for name in CHOSEN[kind]:
        check_a_flipped_byte_is_seen_at_every_offset_class(name)


def check_a_flipped_byte_is_seen_at_every_offset_class(name: str) -> None:
    content = STORE.get(name)
    size = len(content)
    # Head, digest, between, every sixteenth part of the body, the tail.
    offsets = {0, 5, 14, 30, 45, 50, 55, size - 3, size - 2, size - 1}
    offsets |= {size * part // 16 for part in range(16)}
    inside = sorted(offset for offset in offsets if 0 <= offset < size)
    for turn, offset in enumerate(some(inside, NAMES.index(name), of=2)):
        for bit in some((0, 7), turn, of=2):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << bit
            check_seen(copy_with({name: bytes(flipped)}), MANIFESTS, {name})


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_or_grown_object_is_seen(kind: str) -> None:
    for name in CHOSEN[kind]:
        check_a_cut_or_grown_object_is_seen(name)


def check_a_cut_or_grown_object_is_seen(name: str) -> None:
    content = STORE.get(name)
    for changed in (b"", content[:1], content[:40], content[: len(content) // 2], content[:-1]):
        if changed != content:
            check_seen(copy_with({name: changed}), MANIFESTS, {name})
    for changed in (content + b"\n", content + content, b" " + content):
        check_seen(copy_with({name: changed}), MANIFESTS, {name})


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_objects_are_seen(kind: str) -> None:
    for name in CHOSEN[kind]:
        check_swapped_objects_are_seen(name)


def check_swapped_objects_are_seen(name: str) -> None:
    partners = {}
    for other in NAMES:
        if other != name:
            partners.setdefault(kind_of(other), other)
    same = [other for other in NAMES if kind_of(other) == kind_of(name) and other != name]
    for other in {*partners.values(), *same}:
        store = copy_with({name: STORE.get(other), other: STORE.get(name)})
        check_seen(store, MANIFESTS, {name, other})


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_objects_are_seen(kind: str) -> None:
    for name in NAMES:
        if kind_of(name) == kind:
            check_deleted_objects_are_seen(name)


def check_deleted_objects_are_seen(name: str) -> None:
    store = copy_with({name: None})
    if kind_of(name) in ("tags", "pins", "condemned", "restores"):
        check_seen(store, MANIFESTS, set())  # these may be deleted by their owners at any time
    elif kind_of(name) == "repository.json":
        before = {info.name for info in store.list()}
        for call in (
            lambda: Repository.open(store),
            lambda: Repository.create(store, schema={}),
            lambda: Repository.create(store, schema={}, exclusive=True),
        ):
            with pytest.raises(DamageError, match=r"not repository\.json.*from a backup") as caught:
                call()
            assert caught.value.name == name
        assert {info.name for info in store.list()} == before
        store.put(name, STORE.get(name))
        check_seen(store, MANIFESTS, set())
    elif kind_of(name) == "versions":
        repository = Repository.open(store)
        owner = [m for m in MANIFESTS if m.name == name]
        for manifest in owner:
            with pytest.raises(NoVersionError, match=f"{manifest.version.number}"):
                repository.manifest(manifest.version)
            report = verify(repository)
            needing = [m for m in MANIFESTS if manifest.version in m.needs]
            # Nobody else speaks of the newest version, unless something builds on it, or of one
            # that gc may have removed: its files remain as a trace.
            passed = manifest.version.number > 1 and manifest is not MANIFESTS[-1]
            assert [d.name for d in report.damages] == ([name] if needing or passed else [])
            assert report.unreferenced or needing
    else:
        check_seen(store, MANIFESTS, {name})


@pytest.mark.parametrize("kept", ["versions", "writers", "data", "grid", "moved"])
def test_whatever_is_left_of_a_repository_is_not_built_over(kept: str) -> None:
    """A new `repository.json` beside old objects would call all of them another's."""
    world = World(0, Grid())
    world.train()
    world.save()
    world.extract()
    store = MemoryStore()
    left = [info.name for info in world.store.list() if info.name.startswith(f"{kept}/")]
    store.put(min(left), world.store.get(min(left)))
    for call in (lambda: Repository.open(store), lambda: Repository.create(store, schema={})):
        with pytest.raises(DamageError, match=r"not repository\.json"):
            call()
    assert [info.name for info in store.list()] == [min(left)]


def test_a_root_beside_files_of_somebody_else_becomes_a_repository() -> None:
    store = MemoryStore()
    for name in ("data/day_0.gz", "versions/notes.txt", "writers/shakespeare.json"):
        store.put(name, b"not ours")
    with pytest.raises(NoRepositoryError):
        Repository.open(store)
    save(Writer.open(Repository.create(store, schema={})), 1)


def test_a_repository_created_meanwhile_is_not_damage() -> None:
    """Between the look for `repository.json` and that for other objects, another one creates."""
    memory = MemoryStore()

    def create_first(_: int, method: str, __: str) -> None:
        if method == "list" and not Repository.exists(memory):
            save(Writer.open(Repository.create(memory, schema={"by": "the other"})), 1)

    with pytest.raises(NoRepositoryError):
        Repository.open(FaultStore(memory, before=create_first))
    assert Repository.open(memory).latest() is not None
    memory = MemoryStore()
    both = Repository.create(FaultStore(memory, before=create_first), schema={"by": "this one"})
    assert both.schema == {"by": "the other"}
    assert both.latest() is not None


def test_a_fork_does_not_build_over_a_repository_that_lost_its_description() -> None:
    source = Repository.open(STORE)
    target = MemoryStore()
    copied = fork(source, source.versions()[-1], target)
    Writer.open(copied)
    target.delete(["repository.json"])
    with pytest.raises(ConfigError, match="holds writers/"):
        fork(source, source.versions()[-1], target)


def test_a_swapped_data_file_is_recognised_by_its_content() -> None:
    first, second = (file.name for file in MANIFESTS[0].files)
    store = copy_with({first: STORE.get(second), second: STORE.get(first)})
    problems = {d.name: d.problem for d in verify(Repository.open(store)).damages}
    assert problems[first] == f"swapped: holds the content of {second}"
    assert problems[second] == f"swapped: holds the content of {first}"


def test_objects_of_another_repository_are_foreign() -> None:
    other, _ = build()
    for name in ("versions/0000000001-000001.json", "writers/000003.json", "tags/tag0.json"):
        check_seen(copy_with({name: other.get(name)}), MANIFESTS, {name})


def test_a_damaged_claim_is_replaced_by_its_copy_in_the_seal() -> None:
    store = copy_with({"writers/000003.json": b"garbage"})
    repository = Repository.open(store)
    assert [v.number for v in repository.versions()] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_writer_opens_where_all_that_stands_is_older_than_what_gc_removed(deleted: bool) -> None:
    """The names between were used and freed: the epoch is sealed above all of them."""
    store = MemoryStore()
    repository = Repository.create(store, schema={})
    first = Writer.open(repository)
    kept = save(first, 1)
    save(first, 2)
    repository.tag("best", kept.version)
    second = Writer.open(repository)
    newest = [save(second, step) for step in (3, 4, 5)][-1]
    Collector(second, policy=KeepLast(n=1) | KeepNamed(), grace=timedelta(0)).collect()
    store.put(newest.name, b"garbage")
    if deleted:
        store.delete([newest.name])
    else:
        repository.discard(newest.version)
    repository = Repository.open(store)
    assert repository.versions() == (kept.version,)
    writer = Writer.open(repository)
    assert writer.newest == kept.version
    check_content(repository, save(writer, 6))
    check_content(repository, kept)
    with pytest.raises(FencedError):
        save(second, 7)
    writer = Writer.open(repository)
    assert writer.epoch == 4
    check_content(repository, save(writer, 8))
    # Both copies gone: nothing is guessed.
    seal = "versions/0000000005-000002.json"
    store = copy_with({"writers/000003.json": b"garbage", seal: b"garbage"})
    with pytest.raises(DamageError, match=r"writers/000003\.json"):
        Repository.open(store).versions()


def test_a_damaged_manifest_is_left_out_on_an_explicit_word_only() -> None:
    newest = MANIFESTS[-1]
    store = copy_with({newest.name: b"garbage"})
    repository = Repository.open(store)
    assert repository.latest() == newest.version
    with pytest.raises(DamageError, match=newest.name):
        repository.manifest(repository.latest())
    repository.discard(newest.version)
    assert repository.latest() == MANIFESTS[-2].version
    assert verify(repository).ok
    save(Writer.open(repository), 8)
    assert [v.number for v in repository.versions()] == [1, 2, 3, 4, 5, 6, 7]


def test_who_falls_back_gets_a_whole_version() -> None:
    """A prioritised one holds some rows alone; nothing is lost where nothing is damaged."""
    store = MemoryStore()
    writer = Writer.open(Repository.create(store, schema={}))
    kept = save(writer, 1)
    with writer.begin() as draft:
        draft.add([b"some rows"], kind="rows", suffix="bin")
        draft.commit(step=2, layout={"kind": PRIORITISED})
    found, report = newest_undamaged(Repository.open(store))
    assert found == kept.version
    assert report.damages == ()
    assert report.versions == (kept.version,)
