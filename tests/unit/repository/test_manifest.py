"""Documents, digests, names, manifests: what is written is read back, and nothing else."""

from __future__ import annotations

import gc
import json
from datetime import datetime, timedelta, timezone

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.blobs import MemoryStore
from emberkeep.errors import (
    ConfigError,
    DamageError,
    FormatError,
    NoVersionError,
    StateError,
)
from emberkeep.repository import FileRef, Manifest, Pin, Repository, VersionId, Writer, documents
from emberkeep.repository.digests import Digester, digest
from emberkeep.repository.history import Lineage
from emberkeep.repository.names import data_name, parse_data, parse_version, tag_name
from emberkeep.runtime.fields import Fields
from emberkeep.testing import RecordingStore
from emberkeep.testing.contracts import save
from emberkeep.testing.virtual_clock import VirtualClock
from tests.nightly import examples

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)  # fmt: skip
json_objects = st.dictionaries(st.text(), json_values, max_size=4)
NONCE = "0123456789abcdef"


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    version = VersionId(draw(st.integers(3, 10**10 - 1)), draw(st.integers(1, 10**6 - 1)))
    earlier = st.builds(VersionId, st.integers(1, version.number - 1), st.integers(1, 9))
    files = []
    for index in range(draw(st.integers(0, 3))):
        content = draw(st.binary(max_size=50))
        digester = Digester(16)
        digester.update(memoryview(content))
        files.append(
            FileRef(
                name=data_name(version, NONCE, index, "arrow"),
                size=len(content),
                digest=digester.whole,
                kind=draw(st.sampled_from(["rows", "dense"])),
                metadata=draw(json_objects),
                block_nbytes=16,
                blocks=digester.blocks,
            )
        )
    return Manifest(
        repository="id",
        version=version,
        nonce=NONCE,
        step=draw(st.integers(0, 2**60)),
        created=draw(st.datetimes(timezones=st.just(timezone.utc))),
        parent=draw(st.none() | earlier),
        baseline=draw(st.none() | earlier),
        needs=tuple(draw(st.lists(earlier, max_size=3))),
        layout=draw(json_objects),
        reader=draw(json_objects),
        user=draw(json_objects),
        counters=draw(json_objects),
        files=tuple(files),
    )


@settings(max_examples=examples(60))
@given(manifests())
@pytest.mark.long
def test_a_manifest_is_read_back_exactly(manifest: Manifest) -> None:
    content = manifest.encode()
    assert Manifest.decode(manifest.version, "id", content) == manifest
    assert json.loads(content)["body"]["step"] == manifest.step, "it is plain JSON"
    assert manifest.nbytes == sum(file.size for file in manifest.files)
    assert set(manifest.of_kind("dense")) <= set(manifest.files)


@settings(max_examples=examples(60))
@given(manifests(), st.data())
@pytest.mark.long
def test_any_change_to_a_manifest_is_damage(manifest: Manifest, data: st.DataObject) -> None:
    content = bytearray(manifest.encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamageError) as caught:
        Manifest.decode(manifest.version, "id", bytes(content))
    assert caught.value.name == manifest.name


@pytest.mark.parametrize("collecting", [True, False])
def test_a_long_document_leaves_the_collector_as_it_was(collecting: bool) -> None:
    content = documents.encode("a.json", "pin", "id", {"x": [[n] for n in range(20_000)]})
    assert gc.isenabled()
    try:
        if not collecting:
            gc.disable()
        assert documents.decode("a.json", content, "pin", "id").list_of("x", list)[-1] == [19_999]
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_a_document_elsewhere_is_damage() -> None:
    content = documents.encode("a.json", "pin", "id", {"x": 1})
    assert documents.decode("a.json", content, "pin", "id").number("x") == 1
    for name, kind, repository in (
        ("b.json", "pin", "id"),
        ("a.json", "tag", "id"),
        ("a.json", "pin", "other"),
    ):
        with pytest.raises(DamageError, match="swapped"):
            documents.decode(name, content, kind, repository)


def test_a_newer_format_names_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with monkeypatch.context() as patch:
        patch.setattr(documents, "FORMAT", 3)
        content = documents.encode("repository.json", "repository", "id", {"release": "3.1.0"})
    store.put("repository.json", content)
    with pytest.raises(FormatError, match=r"format 3.*upgrade to emberkeep 3\.1\.0"):
        Repository.open(store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nonce": "short"}, "nonce"),
        ({"created": datetime(2026, 1, 1)}, "UTC"),
        ({"created": datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1)))}, "UTC"),
        ({"needs": (VersionId(5, 1),)}, "only on earlier versions"),
        ({"parent": VersionId(6, 1)}, "only on earlier versions"),
        ({"user": {1: "x"}}, "string keys"),
        ({"user": {"x": float("nan")}}, "user cannot be stored"),
        ({"reader": {"x": object()}}, "reader cannot be stored"),
        ({"layout": [1]}, "layout must be a JSON object"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(changes: dict, message: str) -> None:
    fields = {
        "repository": "id",
        "version": VersionId(5, 1),
        "nonce": NONCE,
        "step": 1,
        "created": datetime(2026, 1, 1, tzinfo=timezone.utc),
    }
    with pytest.raises(ConfigError, match=message):
        Manifest(**{**fields, **changes})


def test_a_file_of_another_version_is_refused() -> None:
    file = FileRef(
        name=data_name(VersionId(4, 1), NONCE, 0, "bin"),
        size=0,
        digest=digest(b""),
        kind="rows",
        block_nbytes=10,
    )
    with pytest.raises(ConfigError, match="does not belong"):
        Manifest(
            repository="id",
            version=VersionId(5, 1),
            nonce=NONCE,
            step=1,
            created=datetime(2026, 1, 1, tzinfo=timezone.utc),
            files=(file,),
        )
    with pytest.raises(ConfigError, match="block digests"):
        FileRef(name="x", size=25, digest="", kind="rows", block_nbytes=10, blocks=("a", "b"))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 17))
def test_digests_do_not_depend_on_how_the_stream_is_cut(parts: list[bytes], block: int) -> None:
    content = b"".join(parts)
    digester = Digester(block)
    assert b"".join(digester.passing(parts)) == content
    assert digester.size == len(content)
    expected = [digest(content[i : i + block]) for i in range(0, len(content), block)]
    assert list(digester.blocks) == (expected if len(content) > block else [])
    whole = content if len(content) <= block else "".join(expected).encode()
    assert digester.whole == xxhash.xxh3_128_hexdigest(whole)


def test_names_say_what_they_hold() -> None:
    version = VersionId(42, 7)
    assert version.manifest_name == "versions/0000000042-000007.json"
    assert parse_version(version.manifest_name) == (version, "json")
    assert parse_version(version.void_name) == (version, "void")
    assert parse_version(version.removed_name) == (version, "removed")
    assert parse_version("versions/readme.txt") is None
    assert parse_data(data_name(version, NONCE, 3, "arrow")) == (version, NONCE)
    assert parse_data("data/foreign.bin") is None
    assert VersionId.parse(str(version)) == version
    assert sorted([VersionId(2, 1), VersionId(1, 2)]) == [VersionId(1, 2), VersionId(2, 1)]
    for bad in (lambda: VersionId(0, 1), lambda: VersionId.parse("x"), lambda: tag_name("../x")):
        with pytest.raises(ConfigError):
            bad()
    with pytest.raises(ConfigError, match="suffix"):
        data_name(version, NONCE, 0, "../x")


def test_lineage_counts_each_epoch_up_to_its_end() -> None:
    lineage = Lineage().extended(VersionId(3, 1)).extended(VersionId(3, 1))
    lineage = lineage.extended(VersionId(9, 4))
    assert lineage.newest == VersionId(9, 4)
    assert lineage.next_epoch == 5
    counted = [v for n in range(1, 12) for e in range(1, 6) if (v := VersionId(n, e)) in lineage]
    assert counted == [VersionId(n, 1) for n in (1, 2, 3)] + [VersionId(n, 4) for n in range(4, 10)]
    assert Lineage.of(Fields("a.json", {"lineage": lineage.to_json()})) == lineage
    # A start whose version was discarded stays the start: its number is spent.
    assert lineage.extended(VersionId(2, 1)) == lineage


def test_listing_ten_thousand_versions_reads_no_manifests() -> None:
    store = RecordingStore(MemoryStore())
    repository = Repository.create(store, schema={})
    writer = Writer.open(repository)
    save(writer, 1)
    for number in range(2, 10_001):
        store.inner.put(VersionId(number, 1).manifest_name, b"never read")
    store.operations.clear()
    assert len(Repository.open(store).versions()) == 10_000
    assert [operation for operation, _ in store.operations].count("list") == 3
    assert sum(operation == "get" for operation, _ in store.operations) == 3


def test_a_save_puts_data_first_the_manifest_last_and_asks_whether_it_counts() -> None:
    store = RecordingStore(MemoryStore())
    writer = Writer.open(Repository.create(store, schema={}))
    store.operations.clear()
    manifest = save(writer, 1)
    assert store.operations == [
        *(("put", file.name) for file in manifest.files),
        ("put_if_absent", manifest.name),
        ("get", "writers/000002.json"),
    ]


def test_drafts_are_used_once_and_one_at_a_time() -> None:
    store = MemoryStore()
    repository = Repository.create(store, schema={})
    writer = Writer.open(repository)
    draft = writer.begin()
    with pytest.raises(StateError, match="still being written"):
        writer.begin()
    draft.add(b"x", kind="rows", suffix="bin")
    with pytest.raises(ConfigError):
        draft.commit(step=1, user={"x": float("inf")})
    draft.abandon()
    assert list(store.list("data")) == []
    for use in (lambda: draft.add(b"x", kind="k", suffix="s"), lambda: draft.commit(step=1)):
        with pytest.raises(StateError, match="begin another"):
            use()
    with pytest.raises(NoVersionError):
        writer.begin(needs=[VersionId(7, 1)])
    assert save(writer, 2).version == VersionId(1, 1)
    with writer.begin() as unfinished:
        unfinished.add(b"x", kind="rows", suffix="bin")
    assert repository.versions() == (VersionId(1, 1),)
    assert len(list(store.list("data"))) == 2


def test_an_expired_pin_cannot_be_renewed() -> None:
    clock = VirtualClock()
    repository = Repository.create(MemoryStore(), schema={}, clock=clock)
    with pytest.raises(NoVersionError, match="no version yet"):
        Pin(repository)
    save(Writer.open(repository), 1)
    pin = Pin(repository, lifetime=timedelta(hours=1))
    clock.advance(timedelta(minutes=59))
    pin.renew()
    clock.advance(timedelta(minutes=59))
    pin.renew()
    clock.advance(timedelta(minutes=61))
    with pytest.raises(NoVersionError, match="expired"):
        pin.renew()
