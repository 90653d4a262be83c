"""Whether a batch that files of tiers have prepared took place: one durable document says so.

Every file prepares a batch before any commits it. In between the batch is decided, by a document in
the `state/` of the tier that is its *home*, created only if there is none: *committed* by the
process that saw every file prepared, or *aborted* by one that gives the batch up, be it a later
process that opens a tier. Whichever was first decides, and each file notes it in its head before it
prepares another batch. The document goes when all of them have. A nonce distinguishes batches whose
numbers are the same, after a rewind.

Where a run has several tiers, one of them is the home of all: the first by its path. Each prepared
file says where that is, so that a tier which is opened alone asks there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from emberkeep.blobs import BlobStore, open_store
from emberkeep.blobs.local_store import LocalStore
from emberkeep.blobs.system_disk import Disk
from emberkeep.errors import DamageError, EmberkeepError, MissingObjectError, TierError
from emberkeep.runtime.fields import Fields, parse
from emberkeep.tiers import directory
from emberkeep.tiers.superblock import Point, read_head
from emberkeep.tiers.tiered_slab import TieredSlab

_FORMAT = 1
TierFiles = Mapping[str, Sequence[str]]
"""The files of each tier of a run, by its directory; also those of shards that are lost."""
FIRST_FILE = "rows-0-0.tier"  # every tier has one
_FILE = re.compile(r"([^\0]*/)?rows-[0-9]+-[0-9]+\.tier\Z")
COMMITTED, ABORTED = "committed", "aborted"
RUN_DIRECTORY = "tiers/"
"""Where the repository of a run has the decisions about files on its servers."""
_REPOSITORY = "repository.json"


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions that stand in the directory of one tier."""

    top: str
    disk: Disk

    @property
    def _store(self) -> LocalStore:
        return LocalStore(os.path.join(self.top, "state"), disk=self.disk)

    def commit(self, point: Point, lives: Mapping[str, int]) -> bool:
        """Decides that the batch took place, unless it was given up before; whether it did.

        `lives` names every file, by its path from here, and its life as far as it is known.
        """
        return self._decide(point, COMMITTED, lives)

    def abort(self, point: Point, lives: Mapping[str, int]) -> bool:
        """Gives the batch up, unless it was committed before; whether it took place after all."""
        return self._decide(point, ABORTED, lives)

    def _decide(self, point: Point, outcome: str, lives: Mapping[str, int]) -> bool:
        return decide(self._store, "", point, outcome, lives)

    def _body(self, name: str) -> Fields:
        return _body_of(self._store, name)

    def forget(self, nonce: str) -> None:
        """Drops the decision of a batch whose outcome every file has recorded."""
        self._store.delete([name for name in self._all() if _nonce(name) == nonce])

    def forget_recorded(self, files: Sequence[str]) -> None:
        """Drops the decisions that no file waits for: neither of `files`, those of this tier, nor
        of those that a decision names. One whose files cannot all be seen stays."""
        names = self._all()
        if names:
            own = set().union(*map(self._waiting, files))
            settled = [name for name in names if _nonce(name) not in own]
            self._store.delete([name for name in settled if self._recorded(name, files)])

    def _recorded(self, name: str, own: Sequence[str]) -> bool:
        try:
            others = [file for file in self._body(name).object("files") if file not in own]
        except DamageError:
            return False  # another tier may wait for it
        return all(
            directory.is_there(os.path.join(self.top, file))
            and _nonce(name) not in self._waiting(file)
            for file in others
        )

    def _waiting(self, file: str) -> set[str]:
        path = os.path.join(self.top, file)
        prepared = read_head(path)[0].prepared if directory.is_there(path) else None
        return set() if prepared is None else {prepared.nonce}

    def _all(self) -> list[str]:
        # An error of the listing comes out as ours, also when it is made after a commit.
        found = (info.name for info in self._store.list())
        return sorted(name for name in found if name.startswith("decision-"))


def decide(
    store: BlobStore, within: str, point: Point, outcome: str, lives: Mapping[str, int]
) -> bool:
    """Creates the document that says what becomes of a batch, unless there is one; whether the
    batch is committed."""
    name = _name(point)
    body = {
        "kind": "tier decision", "format": _FORMAT, "name": name, "outcome": outcome,
        "batch": point.batch, "nonce": point.nonce, "files": dict(lives),
    }  # fmt: skip
    if point.run:
        body["run"] = point.run
    if not store.put_if_absent(within + name, _encode(body)):
        outcome = _body_of(store, within + name).text("outcome")
    return outcome == COMMITTED


def _body_of(store: BlobStore, at: str) -> Fields:
    content, name = store.get(at), at.rpartition("/")[2]
    path = f"{store.url}/{at}"
    with contextlib.suppress(DamageError):
        whole = Fields(path, parse(path, content))
        body = whole.object("body")
        named = body.text("name") == name and all(map(_FILE.match, body.object("files")))
        decided = body.text("outcome") in (COMMITTED, ABORTED)
        if content == _encode(whole.plain("body")) and named and decided:
            return body
    raise DamageError(
        f"{path} is damaged, so it is not known whether batch {name.split('-')[1]} took place; "
        "nothing was changed. Bring that file back, or restore a version of a repository into "
        "a new tier",
        name=path,
    )


def took_place(point: Point, top: str, lives: Mapping[str, int], disk: Disk) -> bool:
    """Whether a batch that a file below `top` has prepared was committed; if nobody has decided
    that yet, it is given up."""
    if point.run:
        return _took_place_in_run(point, top, lives)
    home = os.path.normpath(os.path.join(top, point.home))
    if home != top and not directory.is_there(os.path.join(home, FIRST_FILE)):
        raise TierError(
            f"{top} has prepared batch {point.batch}, and whether that took place is decided in "
            f"{home}, where there is no tier; nothing was changed. Mount its disk or bring it back"
        )
    return Decisions(home, disk).abort(point, _seen_from(home, top, lives))


def _took_place_in_run(point: Point, top: str, lives: Mapping[str, int]) -> bool:
    """Of a server's files, whose run decides beside its versions."""
    store = open_store(point.home)
    try:
        identity = json.loads(store.get(_REPOSITORY))["body"]["repository"]
    except (MissingObjectError, ValueError, LookupError, TypeError):
        identity = None
    if identity != point.run:  # an empty mount, say: nothing may be decided there
        raise TierError(
            f"{top} has prepared batch {point.batch}, and whether that took place is decided in "
            f"the repository {point.run} at {store.url}, which is not there; nothing was changed. "
            "Mount its disk or bring it back"
        )
    files = {f"{os.path.basename(top)}/{name}": life for name, life in lives.items()}
    return decide(store, RUN_DIRECTORY, point, ABORTED, files)


def _name(point: Point) -> str:
    return f"decision-{point.batch}-{point.nonce}.json"


def _nonce(name: str) -> str:
    return name.removesuffix(".json").rsplit("-", 1)[1]


def _encode(body: object) -> bytes:
    text = json.dumps(body, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{{"xxh3_128":"{digest}","body":{text}}}\n'.encode()


# -- the slabs of all tiers of a run ---------------------------------------------------------------


def home_of(files: TierFiles) -> str:
    """The directory of the tier that decides for all of these."""
    return min(files)


def way_to(home: str, slab: TieredSlab) -> str:
    """What the points of a slab's file say of their home."""
    return _way(os.path.dirname(slab.log.path), home)


def commit(slabs: Sequence[TieredSlab], files: TierFiles) -> None:
    """Commits the batch that every file has prepared.

    Once it is decided each file records it, those that can: an error of one is raised after the
    others have, and that one comes back at this batch when it is opened.
    """
    points = {None if p is None else (p.batch, p.nonce) for p in map(_prepared, slabs)}
    if len(points) != 1 or None in points:
        raise TierError("not every file of the tier has prepared the batch; nothing was committed")
    for slab in slabs:
        slab.log.check()
        slab.log.check_named()
    point = _prepared(slabs[0])
    assert point is not None
    if not _of(slabs, files).commit(point, _lives(slabs, files)):
        raise TierError(f"batch {point.batch} was given up meanwhile; nothing was committed")
    _record(slabs, files, point, committed=True)


def abandon(slabs: Sequence[TieredSlab], files: TierFiles) -> None:
    """Gives up the checkpoint under way, if there is one, and what files have prepared.

    What turns out to have been committed is committed in every file.
    """
    for slab in slabs:
        slab.abandon()
    # A file that has recorded a batch proves that it took place.
    recorded = {p.nonce for slab in slabs if (p := slab.log.head.committed) is not None}
    healthy = [slab for slab in slabs if slab.log.failed is None]
    points = {p.nonce: p for p in map(_prepared, healthy) if p is not None}
    for nonce, point in points.items():
        decisions = _of(slabs, files)
        decide = decisions.commit if nonce in recorded else decisions.abort
        took_place = decide(point, _lives(slabs, files))
        _record(healthy, files, point, committed=took_place)


def _record(
    slabs: Sequence[TieredSlab], files: TierFiles, point: Point, *, committed: bool
) -> None:
    """Has every file record an outcome that was decided, and drops the decision once all have.

    A file that has failed, and one of a shard that is lost, does so when it is opened again.
    """
    errors: list[EmberkeepError] = []
    for slab in slabs:
        try:
            if committed:
                slab.commit(point.nonce)
            else:
                slab.log.unprepare(point.nonce)
        except EmberkeepError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if len(slabs) == sum(map(len, files.values())):
        _of(slabs, files).forget(point.nonce)


def _prepared(slab: TieredSlab) -> Point | None:
    return slab.log.prepared


def _of(slabs: Sequence[TieredSlab], files: TierFiles) -> Decisions:
    return Decisions(home_of(files), slabs[0].log.disk)


def _lives(slabs: Sequence[TieredSlab], files: TierFiles) -> dict[str, int]:
    known = {slab.log.path: slab.log.head.life for slab in slabs}
    home = home_of(files)
    lives: dict[str, int] = {}
    for top, names in files.items():
        tier = {name: known.get(os.path.join(top, name), 0) for name in names}
        lives |= _seen_from(home, top, tier)
    return lives


def _seen_from(home: str, top: str, lives: Mapping[str, int]) -> dict[str, int]:
    return {os.path.join(_way(home, top), name): life for name, life in lives.items()}


def _way(start: str, end: str) -> str:
    return "" if start == end else os.path.relpath(end, start)
