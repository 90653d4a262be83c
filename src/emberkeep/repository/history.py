"""Which versions make up the history, decided from names alone.

Writers follow one another; each is an *epoch*. A new writer first seals its predecessor: it
creates an object under the very name that the predecessor's next manifest would take. From then
on the predecessor cannot commit, whether it is dead, asleep or in the middle of a save, and the
new writer knows exactly which version it starts from. Then it claims the next epoch by creating
`writers/<epoch>.json`, which repeats the *lineage*: up to which number each epoch counts. A version
above that number belongs to nobody and is not part of the history.

Sealing before claiming closes a gap that a claim alone leaves open: between looking up the newest
version and claiming, the predecessor could have committed another one and heard that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from emberkeep._types import Json
from emberkeep.blobs import BlobInfo, BlobStore, Call, ListsNames, caller_of
from emberkeep.errors import DamageError, StorageError
from emberkeep.repository import documents
from emberkeep.repository.marks import Mark
from emberkeep.repository.names import (
    CONDEMNED,
    VERSIONS,
    WRITERS,
    VersionId,
    is_note,
    parse_mark,
    parse_version,
    parse_writer,
    writer_name,
)
from emberkeep.runtime.fields import Fields

_ATTEMPTS = 3
_MOST = 10**10  # no number is as high


@dataclass(frozen=True, slots=True)
class Lineage:
    """The last number of every epoch that contributed versions, oldest first."""

    ends: tuple[tuple[int, int], ...] = ()

    @property
    def newest(self) -> VersionId | None:
        """The version that the next epoch starts from."""
        return VersionId(self.ends[-1][1], self.ends[-1][0]) if self.ends else None

    @property
    def next_epoch(self) -> int:
        """An epoch above every epoch of the lineage."""
        return self.ends[-1][0] + 1 if self.ends else 1

    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last number of every epoch."""
        befores = (0, *(last for _, last in self.ends[:-1]))
        ends = zip(befores, self.ends, strict=False)
        return {epoch: (before + 1, last) for before, (epoch, last) in ends}

    def __contains__(self, version: VersionId) -> bool:
        first, last = self.spans().get(version.epoch, (1, 0))
        return first <= version.number <= last

    def extended(self, newest: VersionId | None) -> Lineage:
        """This lineage after an epoch whose newest version is `newest`."""
        if newest is None or (self.newest and newest.number <= self.newest.number):
            return self
        return Lineage((*self.ends, (newest.epoch, newest.number)))

    def to_json(self) -> list[list[int]]:
        return [list(end) for end in self.ends]

    @classmethod
    def of(cls, body: Fields) -> Lineage:
        """The lineage that a document holds."""
        ends: list[tuple[int, int]] = [(0, 0)]
        for end in body.list_of("lineage", list):
            if [type(number) for number in end] != [int, int] or not (
                ends[-1][0] < end[0] < 10**6 and ends[-1][1] < end[1] < 10**10
            ):
                raise body.wrong("lineage", "pairs of an epoch and its last number that ascend")
            ends.append((end[0], end[1]))
        return cls(tuple(ends[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What `writers/` and `versions/` held when they were listed, writers first.

    `epoch` is the newest claimed one, 0 before any; `removed` says up to which number gc has freed
    names of an epoch. Manifests of a still newer epoch, committed
    between the two listings, are left out: the listing is the state at its beginning.
    """

    epoch: int
    manifests: dict[VersionId, BlobInfo | None]
    void: frozenset[VersionId]
    removed: dict[int, int]

    @classmethod
    def of(cls, store: BlobStore, origin: Lineage, *, dated: bool = False) -> Listing:
        """Lists; `DamageError` if the claim of an epoch that has versions is gone.

        Unless it shall be `dated`, nothing but names may be looked at: manifests are None then. Not
        where gc has freed names, since one of those may have been taken by something else."""
        epoch = newest_epoch(store)
        return cls.made(store, origin, epoch, _listed(store, dated=dated))

    @classmethod
    def made(
        cls, store: BlobStore, origin: Lineage, epoch: int,
        found: Mapping[str, BlobInfo | None],
    ) -> Listing:  # fmt: skip
        """From what was listed."""
        manifests: dict[VersionId, BlobInfo | None] = {}
        void = set()
        removed: dict[int, int] = {}
        for name, info in found.items():
            parsed = parse_version(name)
            if parsed is None:
                continue
            version, what = parsed
            if what == "void":
                void.add(version)
            elif what == "removed":
                removed[version.epoch] = max(version.number, removed.get(version.epoch, 0))
            else:
                manifests[version] = info
        unclaimed = max({epoch for _, epoch in manifests}, default=0)
        if unclaimed > max(epoch, origin.next_epoch - 1) and unclaimed > newest_epoch(store):
            name = writer_name(unclaimed)
            raise DamageError(
                f"{name} is missing, but versions of that epoch are there: copy it back from a "
                "backup before anything else is done with this repository",
                name=name,
            )
        return cls(epoch=epoch, manifests=manifests, void=frozenset(void), removed=removed)

    def seal_of(self, epoch: int) -> VersionId | None:
        """The seal of an epoch that a later one follows: always its highest number."""
        numbers = [version for version in self.manifests if version.epoch == epoch]
        return max(numbers, default=None)

    def modified(self, version: VersionId) -> datetime:
        """When a manifest was written; of a dated listing."""
        info = self.manifests[version]
        assert info is not None, "the listing is not dated"
        return info.modified

    def history(self, lineage: Lineage) -> list[VersionId]:
        """The versions that count, in order; the last may still turn out to be a seal."""
        # First and last number by epoch: of thousands of versions each is looked up.
        spans = lineage.spans()
        start = lineage.newest.number if lineage.newest else 0
        spans.setdefault(self.epoch, (start + 1, _MOST))
        nothing = (_MOST, 0)
        standing = self.manifests.keys() - self.void if self.void else self.manifests
        of_epochs = {epoch: spans.get(epoch, nothing) for _, epoch in standing}
        return sorted(
            version
            for version in standing
            if (span := of_epochs[version[1]])[0] <= version[0] <= span[1]
        )


def _listed(store: BlobStore, *, dated: bool) -> dict[str, BlobInfo | None]:
    # A dictionary: thousands of pairs would have Python look for garbage, again and again.
    if isinstance(store, ListsNames) and not dated:
        found: dict[str, BlobInfo | None] = dict.fromkeys(store.names(VERSIONS))
        if not any(map(is_note, found)):
            return found
    return {info.name: info for info in store.list(VERSIONS)}


class Look:
    """Marks, writers and versions, listed at once: each as it was at some moment of the look.

    Listed one after the other, marks first, a version that gc removes meanwhile is either marked or
    not there. At once, its mark may be gone although it was listed: that is a version which was
    there when the look began, as in any look that is not of this moment. A look that finds marks is
    void: their versions may be all that was listed, while newer ones are there by now.
    """

    def __init__(self, store: BlobStore) -> None:
        self._versions = Call(store, partial(_listed, store, dated=False))
        self._epoch = Call(store, partial(newest_epoch, store))
        self._marks = Call(store, lambda: any(parse_mark(i.name) for i in store.list(CONDEMNED)))

    def listing(self, store: BlobStore, origin: Lineage) -> Listing | None:
        """What was listed; None if that has to be done in order."""
        versions, epoch = self._versions.result(), self._epoch.result()
        return None if self._marks.result() else Listing.made(store, origin, epoch, versions)


def look_at(store: BlobStore) -> Look | None:
    """Begins to look at the history of whatever is there, where that is done at once."""
    return None if caller_of(store) is None else Look(store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a writer's claim of its epoch says: the lineage that it starts with, and which marks of
    ended epochs it honours; None where it does not say."""

    lineage: Lineage
    honoured: frozenset[str] | None = None

    @classmethod
    def of(cls, body: Fields) -> Claim:
        honoured = frozenset(body.list_of("honours", str)) if "honours" in body else None
        return cls(lineage=Lineage.of(body), honoured=honoured)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One view of a repository: the versions that count, oldest first, and what is behind them.

    `condemned` are versions that gc has marked and not removed yet; they count no more.
    """

    listing: Listing
    claim: Claim
    marks: tuple[Mark, ...]
    versions: tuple[VersionId, ...]
    condemned: tuple[VersionId, ...]

    @property
    def lineage(self) -> Lineage:
        return self.claim.lineage

    @property
    def newest(self) -> VersionId | None:
        return self.versions[-1] if self.versions else None


def newest_epoch(store: BlobStore) -> int:
    """The newest claimed epoch, 0 before any."""
    if isinstance(store, ListsNames):
        claims = store.names(WRITERS)
    else:
        claims = (info.name for info in store.list(WRITERS))
    epochs = map(parse_writer, claims)
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def writer_document(
    *,
    repository: str,
    epoch: int,
    nonce: str,
    lineage: Lineage,
    honoured: frozenset[str],
    details: Json,
) -> bytes:
    return documents.encode(
        writer_name(epoch),
        "writer",
        repository,
        {
            "nonce": nonce,
            "starts_from": str(lineage.newest) if lineage.newest else None,
            "lineage": lineage.to_json(),
            "honours": sorted(honoured),
            **details,
        },
    )


def seal_document(*, repository: str, version: VersionId, nonce: str, lineage: Lineage) -> bytes:
    """What takes the place of a sealed epoch's next manifest; holds the next epoch's lineage."""
    body = {"nonce": nonce, "lineage": lineage.to_json()}
    return documents.encode(version.manifest_name, "seal", repository, body)


def read_seal(name: str, data: bytes) -> Lineage | None:
    """The lineage in a seal, or None if the object is something else, whole or not."""
    try:
        return Lineage.of(documents.decode(name, data, "seal"))
    except DamageError:
        return None


def read_claim(store: BlobStore, repository: str, epoch: int) -> Claim:
    """The claim of an epoch; `DamageError` if it is not what was written."""
    name = writer_name(epoch)
    return Claim.of(documents.decode(name, store.get(name), "writer", repository))


def newest_claim(store: BlobStore, repository: str, listing: Listing, origin: Lineage) -> Claim:
    """What the newest epoch started with; `origin` before the first epoch.

    The claim is one small object that everything hangs on, so the copy of its lineage in the
    predecessor's seal is used when it is damaged.
    """
    if listing.epoch == 0:
        return Claim(lineage=origin)
    try:
        return read_claim(store, repository, listing.epoch)
    except DamageError:
        seal = listing.seal_of(listing.epoch - 1)
        lineage = seal and read_seal(seal.manifest_name, store.get(seal.manifest_name))
        if lineage:
            return Claim(lineage=lineage)
        if listing.epoch == origin.next_epoch:
            return Claim(lineage=origin)
        raise


def create_or_read(
    store: BlobStore, name: str, content: bytes, may_repeat: Callable[[], object] = lambda: None
) -> bytes:
    """Creates an object, or returns what holds its name already.

    The outcome is always read from the store: an answer that was lost is asked for again, and "it
    exists" is resolved by looking at what exists. Raises `StorageError` when the store does not
    answer; the object may then exist or come to exist. `may_repeat` is called before each attempt
    but the first, and raises where the object may have been created and removed since.
    """
    failure: StorageError | None = None
    for attempt in range(_ATTEMPTS):
        try:
            if attempt:
                may_repeat()
            return content if store.put_if_absent(name, content) else store.get(name)
        except StorageError as error:
            failure = error
    assert failure is not None
    raise failure


def is_torn(found: bytes, content: bytes) -> bool:
    """Whether `found` is the beginning of `content`: a write of ours that did not finish.

    No store of ours leaves such a thing, but the repository survives one that does. The beginning
    must reach beyond the digest, or it could as well be another's.
    """
    return documents.IDENTIFYING <= len(found) < len(content) and content.startswith(found)
