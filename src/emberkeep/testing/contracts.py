"""What every store, and every repository on one, must do: suites to inherit from.

Subclasses provide a pytest fixture `store` that gives an empty store for each test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial

from emberkeep.blobs import BlobStore, Buffer, MemoryStore, read_into
from emberkeep.errors import (
    ConfigError,
    DamageError,
    EmberkeepError,
    FencedError,
    MissingObjectError,
    NoRepositoryError,
    NoVersionError,
)
from emberkeep.repository import (
    Collector,
    Draft,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    VersionId,
    Writer,
    fork,
    newest_undamaged,
    verify,
)

_MIB = 1024 * 1024


class StoreContract:
    """The guarantees of `BlobStore`, as tests."""

    def test_what_is_put_is_read_back(self, store: BlobStore) -> None:
        cases: list[tuple[str, Buffer | Iterable[Buffer], bytes]] = [
            ("a", b"bytes", b"bytes"),
            ("deep/er/b.json", bytearray(b"array"), b"array"),
            ("c", memoryview(b"xviewx")[1:5], b"view"),
            ("d", iter(list[Buffer]([b"a ", memoryview(b"stream"), b""])), b"a stream"),
            ("empty", b"", b""),
            ("empty-stream", iter(()), b""),
        ]
        for name, data, expected in cases:
            assert store.put(name, data) == len(expected)
            assert store.get(name) == expected
            assert store.size(name) == len(expected)

    def test_put_replaces(self, store: BlobStore) -> None:
        store.put("a", b"long old content")
        store.put("a", b"new")
        assert store.get("a") == b"new"

    def test_long_streams_arrive_whole(self, store: BlobStore) -> None:
        parts = [bytes([index]) * _MIB for index in range(18)]
        assert store.put("long", iter(parts)) == 18 * _MIB
        assert store.get("long") == b"".join(parts)
        assert store.get_range("long", 17 * _MIB - 1, 2) == bytes([16, 17])

    def test_a_stream_that_fails_leaves_nothing(self, store: BlobStore) -> None:
        def failing(parts: int, kind: type[Exception]) -> Iterator[bytes]:
            for _ in range(parts):
                yield bytes(_MIB)
            raise kind("the source failed")

        store.put("kept", b"before")
        for name, parts in (("short", 1), ("long", 18), ("kept", 1)):
            # The last two are what stores themselves fail with: whose error it is must not blur.
            for kind in (ZeroDivisionError, FileNotFoundError, MissingObjectError):
                with _raises(kind):
                    store.put(name, failing(parts, kind))
        assert [info.name for info in store.list()] == ["kept"]
        assert store.get("kept") == b"before"

    def test_the_second_creation_is_refused(self, store: BlobStore) -> None:
        assert store.put_if_absent("deep/a", b"first") is True
        assert store.put_if_absent("deep/a", b"second") is False
        assert store.get("deep/a") == b"first"
        store.delete(["deep/a"])
        assert store.put_if_absent("deep/a", b"third") is True

    def test_of_many_creators_one_wins(self, store: BlobStore) -> None:
        won: list[bytes] = []
        start = threading.Barrier(6)

        def create(content: bytes) -> None:
            start.wait()
            if store.put_if_absent("contested", content):
                won.append(content)

        _together([partial(create, str(creator).encode()) for creator in range(6)])
        assert len(won) == 1
        assert store.get("contested") == won[0]

    def test_ranges_are_cut_off_at_the_end(self, store: BlobStore) -> None:
        store.put("a", b"0123456789")
        for start, length, expected in (
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (8, 5, b"89"),
            (10, 1, b""),
            (50, 1, b""),
            (2, 0, b""),
        ):
            assert store.get_range("a", start, length) == expected
            into = bytearray(b"*" * length)
            assert read_into(store, "a", start, memoryview(into)) == len(expected)
            assert into == expected + b"*" * (length - len(expected))
        store.put("empty", b"")
        assert store.get_range("empty", 0, 5) == b""
        with _raises(ConfigError):
            store.get_range("a", -1, 2)
        with _raises(ConfigError):
            read_into(store, "a", -1, memoryview(bytearray(2)))

    def test_absent_objects_are_missing(self, store: BlobStore) -> None:
        store.put("here/a", b"x")
        for call in (
            lambda: store.get("nowhere"),
            lambda: store.get("here/b"),
            lambda: store.size("nowhere/at/all"),
            lambda: store.get_range("nowhere", 0, 1),
            lambda: store.get_range("nowhere", 0, 0),
            lambda: read_into(store, "nowhere", 0, memoryview(bytearray(1))),
        ):
            with _raises(MissingObjectError):
                call()

    def test_listings_are_complete_and_below_the_prefix(self, store: BlobStore) -> None:
        for name in ("a/1", "a/2", "a/b/3", "ab/4", "a-5", "c"):
            store.put(name, name.encode())
        assert {info.name for info in store.list()} == {"a/1", "a/2", "a/b/3", "ab/4", "a-5", "c"}
        assert {info.name for info in store.list("a")} == {"a/1", "a/2", "a/b/3"}
        assert {info.name for info in store.list("a/b")} == {"a/b/3"}
        assert list(store.list("none")) == []
        (info,) = store.list("a/b")
        assert info.size == 5
        assert abs(datetime.now(timezone.utc) - info.modified) < timedelta(minutes=5)

    def test_deletion_is_idempotent(self, store: BlobStore) -> None:
        store.put("a/1", b"x")
        store.put("a/2", b"x")
        store.delete(iter(["a/1", "never/was"]))
        store.delete(["a/1"])
        store.delete([])
        assert [info.name for info in store.list()] == ["a/2"]

    def test_names_cannot_leave_the_root(self, store: BlobStore) -> None:
        bad = (
            "",
            "/etc/x",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            ".hidden",
            "a b",
            "a\n",
            "é",
            "a/.",
            "x" * 401,
        )
        for name in bad:
            for call in (
                lambda n=name: store.put(n, b""),
                lambda n=name: store.put_if_absent(n, b""),
                lambda n=name: store.get(n),
                lambda n=name: store.delete([n]),
            ):
                with _raises(ConfigError):
                    call()
        assert list(store.list()) == []

    def test_sweeping_leaves_objects_alone(self, store: BlobStore) -> None:
        store.put("a", b"x")
        assert store.sweep(older_than=timedelta(0)) >= 0
        assert store.get("a") == b"x"


class RepositoryContract:
    """The guarantees of a repository, as tests over any store that meets `StoreContract`."""

    def test_versions_come_back_exactly(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={"tables": ["user"]})
        assert repository.latest() is None
        writer = Writer.open(repository)
        committed = [save(writer, step) for step in (10, 20, 30)]
        again = Repository.open(store)
        assert again.schema == {"tables": ["user"]}
        assert [v.number for v in again.versions()] == [1, 2, 3]
        for manifest in committed:
            assert again.manifest(manifest.version.number) == manifest
            check_content(again, manifest)
        assert verify(again).ok
        assert verify(again, deep=False).ok

    def test_long_files_are_checked_by_block(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        content = bytes(range(256)) * 40
        with Writer.open(repository).begin(block_nbytes=1000) as draft:
            file = draft.add([content[:3000], content[3000:]], kind="rows", suffix="bin")
            draft.commit(step=1)
        assert len(file.blocks) == 11
        assert b"".join(repository.stream(file)) == content
        assert repository.read(file) == content
        for start, length in ((0, 1), (999, 2), (500, 4000), (10239, 1), (0, 10240), (7, 0)):
            assert repository.read_range(file, start, length) == content[start : start + length]
        damaged = bytearray(content)
        damaged[5500] ^= 1
        store.put(file.name, damaged)
        assert repository.read_range(file, 0, 5000) == content[:5000]
        with _raises(DamageError):
            repository.read_range(file, 5999, 1)

    def test_a_repository_is_created_once(self, store: BlobStore) -> None:
        with _raises(NoRepositoryError):
            Repository.open(store)
        Repository.create(store, schema={})
        with _raises(ConfigError):
            Repository.create(store, schema={})
        assert list(store.list("probes")) == []

    def test_a_newer_writer_fences_the_older(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        old = Writer.open(repository)
        save(old, 1)
        asleep = old.begin()
        asleep.add(b"rows", kind="rows", suffix="bin")
        new = Writer.open(Repository.open(store))
        kept = save(new, 2)
        with _raises(FencedError):
            asleep.commit(step=3)
        with _raises(FencedError):
            old.check()
        with _raises(FencedError):
            Collector(old, grace=timedelta(0)).collect()
        with _raises(FencedError):
            save(old, 4)
        assert repository.versions() == (VersionId(1, 1), VersionId(2, 2))
        check_content(repository, kept)
        save(new, 5)

    def test_of_many_openers_one_wins(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        save(Writer.open(repository), 1)
        writers: list[Writer] = []
        start = threading.Barrier(4)

        def open_writer() -> None:
            own = Repository.open(store)
            start.wait()
            try:
                writers.append(Writer.open(own))
            except FencedError:
                return

        _together([open_writer] * 4)
        assert len({writer.epoch for writer in writers}) == len(writers) >= 1
        newest = max(writers, key=lambda writer: writer.epoch)
        save(newest, 2)
        for writer in writers:
            if writer is not newest:
                with _raises(FencedError):
                    save(writer, 3)
        assert [v.number for v in repository.versions()] == [1, 2]

    def test_gc_removes_what_nobody_needs(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        writer = Writer.open(repository)
        baseline = save(writer, 1)
        for step in (2, 3, 4):
            save(writer, step)
        top = save(writer, 5, needs=[baseline.version])
        abandoned = writer.begin()
        abandoned.add(b"x", kind="rows", suffix="bin")
        collected = Collector(writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
        assert [v.number for v in collected.kept] == [1, 5]
        assert [v.number for v in collected.removed] == [2, 3, 4]
        assert [v.number for v in repository.versions()] == [1, 5]
        for manifest in repository.chain(top.version):
            check_content(repository, manifest)
        assert len(list(store.list("data"))) == 2 * 2 + 1
        abandoned.commit(step=6)
        check_content(repository, top)
        assert verify(repository).ok

    def test_pins_and_tags_hold_versions(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        writer = Writer.open(repository)
        for step in range(1, 6):
            save(writer, step)
        repository.tag("best", 2)
        repository.tag("best", 2)
        with _raises(ConfigError):
            repository.tag("best", 3)
        pin = Pin(repository, 3)
        collector = Collector(writer, policy=KeepLast(n=1) | KeepNamed(), grace=timedelta(0))
        collector.collect()
        assert [v.number for v in repository.versions()] == [2, 3, 5]
        check_content(repository, pin.manifest)
        pin.release()
        repository.untag("best")
        collector.collect()
        assert [v.number for v in repository.versions()] == [5]
        with _raises(NoVersionError):
            Pin(repository, pin.version)
        assert list(store.list("pins")) == []

    def test_a_fork_stands_alone(self, store: BlobStore) -> None:
        source = Repository.create(MemoryStore(), schema={"tables": []})
        writer = Writer.open(source)
        baseline = save(writer, 1)
        save(writer, 2)
        writer = Writer.open(source)
        save(writer, 3, needs=[baseline.version])
        copy = fork(source, 3, store)
        assert copy.id != source.id
        assert copy.schema == source.schema
        assert [v.number for v in copy.versions()] == [1, 3]
        for manifest in copy.chain(3):
            check_content(copy, manifest)
        successor = Writer.open(copy)
        save(successor, 4)
        assert [v.number for v in Repository.open(store).versions()] == [1, 3, 4]
        assert verify(copy).ok
        assert [v.number for v in source.versions()] == [1, 2, 3]

    def test_damage_is_named_and_never_returned(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        writer = Writer.open(repository)
        good = save(writer, 1)
        bad = save(writer, 2)
        file = bad.files[0]
        content = store.get(file.name)
        for damaged in (b"", content[:-1], content + b"x", content[:-1] + b"\xff"):
            store.put(file.name, damaged)
            report = verify(repository)
            assert [damage.name for damage in report.damages] == [file.name]
            assert report.undamaged == (good.version,)
            with _raises(DamageError):
                repository.read(file)
            with _raises(DamageError):
                list(repository.stream(file))
            found, lost = newest_undamaged(repository)
            assert found == good.version
            assert lost.damages[0].versions == (bad.version,)
        store.delete([file.name])
        assert [damage.problem for damage in verify(repository, deep=False).damages] == ["missing"]
        with _raises(DamageError):
            repository.read(file)

    def test_restores_are_counted(self, store: BlobStore) -> None:
        repository = Repository.create(store, schema={})
        manifest = save(Writer.open(repository), 1)
        assert repository.restores() == 0
        repository.record_restore(manifest.version)
        repository.record_restore(manifest.version)
        assert Repository.open(store).restores() == 2


def save(writer: Writer, step: int, *, needs: list[VersionId] | None = None) -> Manifest:
    """A version of two files whose content follows from the step."""
    with writer.begin(needs=needs or ()) as draft:
        add_files(draft, step)
        return draft.commit(step=step, user={"step": step})


def add_files(draft: Draft, step: int) -> None:
    """The files that `save` commits."""
    for shard in range(2):
        draft.add(_content(step, shard), kind="rows", suffix="bin", metadata={"shard": shard})


def check_content(repository: Repository, manifest: Manifest) -> None:
    """The version is there, its manifest and files are exactly what `save` wrote."""
    assert repository.manifest(manifest.version).files == manifest.files
    for shard, file in enumerate(manifest.files):
        assert repository.read(file) == b"".join(_content(manifest.step, shard))


def _content(step: int, shard: int) -> list[bytes]:
    return [f"rows of shard {shard} ".encode() * 10, f"at step {step}".encode() * (step + 1)]


@contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    """Like pytest.raises, which a shipped module does not want to import."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _together(calls: list[Callable[[], None]]) -> None:
    """Runs calls in threads of their own; the first failure is raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except (EmberkeepError, AssertionError) as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
