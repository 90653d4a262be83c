"""A repository as its readers see it: a history of versions, and their files, checked.

Everything here is safe beside a running writer and needs no coordination with it, except that a
reader who takes long should hold a pin. Writing is `Writer`'s alone.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from emberkeep._types import Json
from emberkeep.blobs import BlobInfo, BlobStore, Buffer, Call, Reading, together
from emberkeep.blobs.wrapper import ExclusiveStore
from emberkeep.codecs import is_plane
from emberkeep.errors import (
    ConfigError,
    DamageError,
    MissingObjectError,
    NoRepositoryError,
    NoVersionError,
    UnsupportedStoreError,
)
from emberkeep.repository import documents, names
from emberkeep.repository.digests import digest
from emberkeep.repository.history import (
    Claim,
    History,
    Lineage,
    Listing,
    Look,
    create_or_read,
    is_torn,
    newest_claim,
    newest_epoch,
    read_claim,
    read_seal,
)
from emberkeep.repository.manifest import FileRef, Manifest, needed_by, utc
from emberkeep.repository.marks import Mark, read_marks
from emberkeep.repository.names import VersionId
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.fields import Fields, plain
from emberkeep.runtime.readahead import in_order


class Repository:
    """The versions of one run below one root. Use `create` or `open`.

    No method returns a byte that differs from what was committed: what does not match its digest
    is `DamageError`, naming the object. All that is done with it reads time from its `clock`.
    """

    def __init__(
        self, store: BlobStore, description: Fields, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.exclusive: bool = description.flag("exclusive")
        self.store: BlobStore = ExclusiveStore(store) if self.exclusive else store
        self.id: str = description.text("repository")
        self.schema: Json = description.plain("schema")
        self.created: datetime = description.parsed("created", utc)
        self.forked_from: Json | None = (
            description.plain("forked_from") if "forked_from" in description else None
        )
        self.origin = Lineage.of(description)
        self.clock = clock
        self.reading = Reading.of(store)
        """How much is read at once; the caller that opened the repository may choose another."""
        # Names known to hold manifests or seals, as they were listed: asked for once.
        self._seals: dict[BlobInfo, bool] = {}
        # Seals that this process has made itself, and claims of epochs: neither changes any more.
        self.own_seals: set[str] = set()
        self.claims: dict[int, Claim] = {}
        # Manifests of versions that this process has pinned and of those that they need: gc spares
        # all of them, so that each is read once. One entry for each pin.
        self._pinned: list[dict[VersionId, Manifest]] = []
        self._pinning = threading.Lock()
        # The newest catalog of each grid as it was last read, and the segments of their parts:
        # immutable, and long.
        self.catalogs: dict[VersionId, Any] = {}
        self.segments: dict[str, Any] = {}
        self._whole: dict[VersionId, bool] = {}

    @cached_property
    def tables(self) -> dict[str, Json]:
        """The tables of the schema, each with `rows` (None for any) and `planes`: a width and the
        name of a type of numbers for each; `DamageError` if that is not what they are."""
        described = Fields(names.REPOSITORY, self.schema, "schema.").object("tables")
        for name in described:
            table = described.object(name)
            if "rows" in table:
                table.number("rows", most=2**48)
            planes = table.object("planes")
            planes.list_of("weight", object)
            for plane in planes:
                shape = planes.list_of(plane, object)
                if len(shape) != 2 or not is_plane(*shape):
                    raise planes.wrong(plane, "a width and a type of numbers")
        tables: dict[str, Json] = self.schema["tables"]
        return tables

    @classmethod
    def create(
        cls,
        store: BlobStore,
        *,
        schema: Json,
        exclusive: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Repository:
        """Starts an empty repository; refuses a root that holds one, or what is left of one.

        The store must be able to create an object only if its name is free; this is tried out.
        `exclusive=True` admits stores that cannot, on the user's word that one process alone
        will ever write: fencing does not work there.
        """
        if cls.exists(store):
            raise ConfigError(f"{store.url} already holds a repository: open it, or choose another")
        return cls.found(store, schema=schema, exclusive=exclusive, clock=clock)

    @classmethod
    def found(
        cls,
        store: BlobStore,
        *,
        schema: Json,
        exclusive: bool,
        clock: Clock,
        lineage: Lineage | None = None,
        forked_from: Json | None = None,
        identity: str | None = None,
        last: bool = False,
    ) -> Repository:
        """Puts `repository.json`, with which the root becomes a repository.

        It is the first object of a repository: beside those of another, it would make all of them
        foreign. A fork, which has put the others before, says that it is the `last`.
        """
        if not last:
            _check_no_remains(store)
        capable = can_create_conditionally(store)
        if not capable and not exclusive:
            raise UnsupportedStoreError(
                f"{store.url} overwrites where it should create only if absent, so two writers "
                "could destroy each other's versions: use a store with conditional puts, or "
                "exclusive=True if one process alone will ever write there"
            )
        content = documents.encode(
            names.REPOSITORY,
            "repository",
            identity or secrets.token_hex(16),
            {
                "release": "0.1.0",
                "created": clock.now().isoformat(),
                "schema": plain("schema", schema),
                "exclusive": not capable,
                "lineage": (lineage or Lineage()).to_json(),
                "forked_from": forked_from,
            },
        )
        # Of two creators at once one wins, and both go on with the winner's repository.
        found = create_or_read(
            store if capable else ExclusiveStore(store), names.REPOSITORY, content
        )
        if is_torn(found, content):
            store.put(names.REPOSITORY, content)
        return cls.open(store, clock=clock)

    @classmethod
    def open(cls, store: BlobStore, *, clock: Clock = SYSTEM_CLOCK) -> Repository:
        """Opens what is there; a newer format is refused, naming the release that reads it."""
        try:
            content = store.get(names.REPOSITORY)
        except MissingObjectError:
            _check_no_remains(store)
            raise NoRepositoryError(
                f"{store.url} holds no repository: check the path, or create one"
            ) from None
        return cls(store, documents.decode(names.REPOSITORY, content, "repository"), clock=clock)

    @staticmethod
    def exists(store: BlobStore) -> bool:
        try:
            store.size(names.REPOSITORY)
        except MissingObjectError:
            return False
        return True

    # -- the history --------------------------------------------------------------------------

    def versions(self) -> tuple[VersionId, ...]:
        """The history, oldest first. Costs a few listings; reads at most two small objects."""
        return self.history().versions

    def latest(self) -> VersionId | None:
        """The newest version, or None in an empty repository."""
        return self.history().newest

    def newest_whole(self) -> VersionId | None:
        """The newest version that holds one instant; prioritised ones are passed over, and those
        that stand aside."""
        for version in reversed(self.versions()):
            if version not in self._whole:
                manifest = self.manifest(version)
                self._whole[version] = manifest.whole and not manifest.aside
            if self._whole[version]:
                return version
        return None

    def history(self, *, dated: bool = False, look: Look | None = None) -> History:
        """The versions with the listing and the lineage that they were decided from. A `look` that
        was started before is used, unless it is void."""
        listing = None if look is None else look.listing(self.store, self.origin)
        marks: tuple[Mark, ...] = ()
        if listing is None:
            marks = read_marks(self.store, self.id)
            listing = Listing.of(self.store, self.origin, dated=dated)
        own = (v for v in listing.manifests if v.epoch == listing.epoch and v not in listing.void)
        newest = max(own, default=None)
        # Where that takes a round trip it is asked for beside the claim.
        is_sealed = newest and Call(self.store, partial(self._is_seal, newest, listing))
        claim = self._newest_claim(listing)
        standing = listing.history(claim.lineage)
        # A successor that has sealed the newest epoch but not claimed its own yet, or died in
        # between, leaves a seal where the newest version would be.
        if standing and standing[-1] == newest and is_sealed and is_sealed.result():
            standing.pop()
        # One that looked at the history long ago leaves a seal under a name that gc had freed.
        freed = [v for v in standing if v.number <= listing.removed.get(v.epoch, 0)]
        seals = together(self.store, [partial(self._is_seal, v, listing) for v in freed])
        sealed = {version for version, is_seal in zip(freed, seals, strict=True) if is_seal}
        standing = [version for version in standing if version not in sealed]
        valid = (mark for mark in marks if mark.valid(listing.epoch, claim.honoured))
        condemned = frozenset[VersionId]().union(*(mark.versions for mark in valid))
        return History(
            listing=listing,
            claim=claim,
            marks=marks,
            versions=tuple(version for version in standing if version not in condemned),
            condemned=tuple(version for version in standing if version in condemned),
        )

    def _newest_claim(self, listing: Listing) -> Claim:
        claim = self.claims.get(listing.epoch)
        if claim is None:
            claim = newest_claim(self.store, self.id, listing, self.origin)
            if claim.honoured is not None:  # else it may have been read from elsewhere
                self.claims[listing.epoch] = claim
        return claim

    def version(self, number: int, among: Sequence[VersionId] | None = None) -> VersionId:
        """The version with that number in the history, which may be known."""
        versions = self.versions() if among is None else among
        for version in versions:
            if version.number == number:
                return version
        have = (
            f"it has {versions[0].number} to {versions[-1].number}" if versions else "it is empty"
        )
        raise NoVersionError(
            f"{self.store.url} has no version {number}: {have}; retention may have removed it"
        )

    def manifest(self, version: VersionId | int) -> Manifest:
        """The manifest of one version, checked."""
        if isinstance(version, int):
            version = self.version(version)
        for known in self._pinned:
            if version in known:
                return known[version]
        return self._read_manifest(version)

    def _read_manifest(self, version: VersionId) -> Manifest:
        try:
            content = self.store.get(version.manifest_name)
        except MissingObjectError:
            raise NoVersionError(
                f"{self.store.url} has no version {version} any more: retention removed it; "
                "pin a version to read it at leisure"
            ) from None
        return Manifest.decode(version, self.id, content)

    def needed_manifest(self, version: VersionId, by: VersionId) -> Manifest:
        """The manifest of a version that another one needs: gc removes that one first, so if it
        stands and what it needs does not, somebody else has deleted that."""
        try:
            found = self.manifest(version)
            for known in self._pinned:
                if by in known:
                    known[version] = found
            return found
        except NoVersionError as error:
            self.manifest(by)
            raise DamageError(
                f"{version.manifest_name} is missing, and version {by} needs it: copy it back "
                "from a backup, or restore another version",
                name=version.manifest_name,
            ) from error

    def chain(self, version: VersionId | int) -> list[Manifest]:
        """The manifests of a version and of all that it needs, oldest first."""
        top = self.manifest(version)
        found = {top.version: top}

        def needs(needed: VersionId) -> tuple[VersionId, ...]:
            if needed not in found:
                found[needed] = self.needed_manifest(needed, top.version)
            return found[needed].needs

        return [found[needed] for needed in sorted(needed_by([top.version], needs))]

    @contextmanager
    def pinned(self, manifest: Manifest, *others: Manifest) -> Iterator[None]:
        """While a version is pinned: its manifest and those that it needs are read once. Some of
        `others`, which were read before, may be among these."""
        known = {each.version: each for each in (manifest, *others)}
        with self._pinning:
            self._pinned = [*self._pinned, known]
        try:
            yield
        finally:
            with self._pinning:
                self._pinned = [other for other in self._pinned if other is not known]

    def _is_seal(self, version: VersionId, listing: Listing) -> bool:
        name, listed = version.manifest_name, listing.manifests[version]
        if name in self.own_seals:
            return True
        if listed in self._seals:
            return self._seals[listed]
        try:
            found = read_seal(name, self.store.get(name)) is not None
        except MissingObjectError:
            return False
        if listed is not None:  # else it may be another object next time
            self._seals[listed] = found
        return found

    def discard(self, version: VersionId) -> None:
        """Leaves a version whose manifest is damaged out of the history, for good.

        Only on a user's explicit word: a manifest that reads well is never discarded.
        """
        name = version.manifest_name
        try:
            Manifest.decode(version, self.id, self.store.get(name))
        except DamageError:
            void(self, version)
            return
        raise ConfigError(f"{name} is not damaged: it stays, unless retention removes it")

    # -- files --------------------------------------------------------------------------------

    def read(self, file: FileRef) -> bytes:
        """The whole file, checked."""
        try:
            content = self.store.get(file.name)
        except MissingObjectError:
            raise _missing(file) from None
        if not file.blocks:
            self._check(file, content, file.size, file.digest)
            return content
        view = memoryview(content)
        for index, expected in enumerate(file.blocks):
            start = index * file.block_nbytes
            length = min(file.block_nbytes, file.size - start)
            # The last takes what follows it: a file that grew is as damaged as one that shrank.
            end = start + length if index < len(file.blocks) - 1 else None
            self._check(file, view[start:end], length, expected)
        return content

    def read_range(self, file: FileRef, start: int, length: int) -> bytes:
        """Part of a file, checked: reads the blocks that it touches."""
        if start < 0 or length < 0 or start + length > file.size:
            raise ConfigError(f"{file.name} has {file.size} bytes: no range {start}+{length} in it")
        if not length:
            return b""
        first = start // file.block_nbytes
        last = (start + length - 1) // file.block_nbytes
        blocks = b"".join(self._block(file, index) for index in range(first, last + 1))
        offset = start - first * file.block_nbytes
        return blocks[offset : offset + length]

    def stream(self, file: FileRef) -> Iterator[Buffer]:
        """The file block by block, each checked before it is handed out; the next ones are on their
        way meanwhile."""
        return self.blocks([file])

    def blocks(self, files: Iterable[FileRef]) -> Generator[Buffer, None, None]:
        """`stream` of files one after the other, of which each has `block_count` blocks: those of
        later files are read while earlier ones are looked at."""
        calls = (
            (min(file.block_nbytes, file.size), partial(self._block, file, index))
            for file in files
            for index in range(block_count(file))
        )
        depth, nbytes = self.reading.depth, self.reading.nbytes
        name = "emberkeep-blocks"
        return in_order(calls, depth=depth, nbytes=nbytes, name=name, clock=self.clock)

    def _block(self, file: FileRef, index: int) -> Buffer:
        if not file.blocks:
            return self.read(file)
        start = index * file.block_nbytes
        length = min(file.block_nbytes, file.size - start)
        # One byte more at the end: a file that grew is as damaged as one that shrank.
        extra = 1 if index == len(file.blocks) - 1 else 0
        try:
            content = self.store.get_range(file.name, start, length + extra)
        except MissingObjectError:
            raise _missing(file) from None
        self._check(file, content, length, file.blocks[index])
        return content

    def _check(self, file: FileRef, content: Buffer, size: int, expected: str) -> None:
        if len(content) != size or digest(content) != expected:
            raise DamageError(
                f"{file.name} is damaged: its content does not match the digest in the manifest; "
                "restore another version, or copy the file back from a backup",
                name=file.name,
            )

    # -- what readers leave behind --------------------------------------------------------------

    def tags(self) -> dict[str, VersionId]:
        """The named versions."""
        found = {}
        for info in self.store.list(names.TAGS):
            body = self.document(info.name, "tag")
            if body is not None:
                tag, version = tag_in(body)
                found[tag] = version
        return found

    def named(self, wanted: int | str) -> VersionId:
        """The version of a number or a tag; `NoVersionError` if there is none."""
        if isinstance(wanted, int) or wanted.isdigit():
            return self.version(int(wanted))
        tags = self.tags()
        if wanted not in tags:
            have = f"there are {', '.join(sorted(tags))}" if tags else "there are no tags"
            raise NoVersionError(f"{self.store.url} has no tag {wanted!r}: {have}")
        if tags[wanted] not in self.versions():  # another version may have its number by now
            raise NoVersionError(
                f"{self.store.url} has no version {tags[wanted]} any more, which {wanted!r} names: "
                "it was discarded or lost; choose another version"
            )
        return tags[wanted]

    def tag(self, name: str, version: VersionId | int, *, move: bool = False) -> None:
        """Names a version, so that `KeepNamed` keeps it. A name is given once until `untag`, unless
        it may `move`."""
        if name.isdigit():
            raise ConfigError(f"{name} would be taken for a version's number: begin with a letter")
        if isinstance(version, int):
            version = self.version(version)
        path = names.tag_name(name)
        content = self.encode(path, "tag", {"tag": name, "version": str(version)})
        if move:
            self.ensure_kept(version)
        found = create_or_read(self.store, path, content)
        if is_torn(found, content) or (move and found != content):
            self.store.put(path, content)
        elif found != content:
            number = getattr(self.tags().get(name), "number", "another")
            raise ConfigError(f"{name} names version {number}: move it (--move), or untag it first")
        try:
            self.ensure_kept(version)
        except NoVersionError:
            if found == content or is_torn(found, content):
                self.store.delete([path])
            else:
                self.store.put(path, found)  # it stays where it was
            raise

    def untag(self, name: str) -> None:
        self.store.delete([names.tag_name(name)])

    def record_restore(self, version: VersionId, *, exact: bool = False) -> str:
        """Counts a restore, for the choice of the bit-width; one of an `exact` version costs no
        accuracy, and is recorded under another kind of name. Returns the name."""
        body = {"version": str(version), "at": self.clock.now().isoformat()}
        name = f"{names.RESTORES}/{names.EXACT if exact else ''}{secrets.token_hex(8)}.json"
        self.store.put(name, self.encode(name, "restore", body))
        return name

    def restores(self, *, exact: bool | None = None) -> int:
        """How often versions of this repository were restored; those that were exact, or were not,
        alone."""
        counts = self.restore_counts()
        return sum(counts.values()) if exact is None else counts[exact]

    def restore_counts(self) -> dict[bool, int]:
        """How often versions were restored that were exact, and that were not, by one look."""
        start = f"{names.RESTORES}/{names.EXACT}"
        found = [info.name.startswith(start) for info in self.store.list(names.RESTORES)]
        return {exact: found.count(exact) for exact in (True, False)}

    def ensure_kept(self, version: VersionId) -> Manifest:
        """Called after a pin or tag was put: raises `NoVersionError` if gc may not have seen it.

        gc marks what it condemns, then looks for pins and tags, then deletes. So a pin that was
        put before this looked for marks and found none is a pin that gc sees.
        """
        marks = [mark for mark in read_marks(self.store, self.id) if version in mark.versions]
        if marks:
            epoch = newest_epoch(self.store)
            try:
                honoured = read_claim(self.store, self.id, epoch).honoured
            except DamageError:
                honoured = None
            if any(mark.valid(epoch, honoured) for mark in marks):
                raise NoVersionError(f"version {version} is being removed: use a newer one")
        # Whatever is known of it: gc may have removed it, and its mark, before this looked.
        return self._read_manifest(version)

    def document(self, name: str, kind: str) -> Fields | None:
        """A listed document, or None if it was deleted since it was listed."""
        try:
            content = self.store.get(name)
        except MissingObjectError:
            return None
        return documents.decode(name, content, kind, self.id)

    def encode(self, name: str, kind: str, body: Json) -> bytes:
        """The bytes of a document of this repository."""
        return documents.encode(name, kind, self.id, body)


def block_count(file: FileRef) -> int:
    """Into how many blocks a file is cut when it is streamed."""
    return max(1, len(file.blocks))


def tag_in(body: Fields) -> tuple[str, VersionId]:
    """What a tag says: itself, and the version that it names."""
    if body.parsed("tag", names.tag_name) != body.name:
        raise body.wrong("tag", "the one that the object is named by")
    return body.text("tag"), body.parsed("version", VersionId.parse)


def restore_in(body: Fields) -> tuple[VersionId, datetime]:
    """What the record of a restore says: of which version, and when."""
    return body.parsed("version", VersionId.parse), body.parsed("at", utc)


def void(repository: Repository, version: VersionId) -> None:
    """Marks a version's name as spent on something that is not a version."""
    content = repository.encode(version.void_name, "void", {})
    repository.store.put(version.void_name, content)


def is_void(store: BlobStore, version: VersionId) -> bool:
    """Whether a version's name was marked as spent."""
    try:
        store.size(version.void_name)
    except MissingObjectError:
        return False
    return True


def _check_no_remains(store: BlobStore) -> None:
    """`DamageError` if there are objects of a repository, but not what it is."""
    for directory in (names.VERSIONS, names.WRITERS, names.DATA, names.GRID, names.MOVED):
        found = next((i.name for i in store.list(directory) if names.is_part(i.name)), None)
        # Asked again: it may have been created since it was looked for, and the others after it.
        if found is not None and not Repository.exists(store):
            raise DamageError(
                f"{store.url} holds {found} but not {names.REPOSITORY}, without which nothing can "
                f"be read there; nothing was created. Copy {names.REPOSITORY} back from a backup, "
                "or choose another root; if a fork to this root was interrupted, repeat it",
                name=names.REPOSITORY,
            )


def can_create_conditionally(store: BlobStore) -> bool:
    """Tries out whether a second creation of the same name is refused and changes nothing."""
    name = f"{names.PROBES}/{secrets.token_hex(8)}"
    try:
        store.put_if_absent(name, b"first")
        refused = not store.put_if_absent(name, b"second")
        return refused and store.get(name) == b"first"
    except UnsupportedStoreError:
        return False
    finally:
        store.delete([name])


def _missing(file: FileRef) -> DamageError:
    return DamageError(
        f"{file.name} is missing: it was deleted, or removed by gc while its version was not "
        "pinned; restore another version",
        name=file.name,
    )
