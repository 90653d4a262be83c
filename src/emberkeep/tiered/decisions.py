"""Whether a batch that files of a tier have prepared took place: one durable document says so.

Every file of a tier prepares a batch before any commits it. In between the batch is decided, by a
document in the tier's `state/` that is created only if there is none: *committed* by the process
that saw every file prepared, or *aborted* by one that gives the batch up, be it a later process
that opens the tier. Whichever was first decides, and each file notes it in its head before it
prepares another batch. The document goes when all of them have. A nonce distinguishes batches whose
numbers are the same, after a rewind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from emberkeep.blobs.local_store import Disk, LocalStore
from emberkeep.errors import DamageError, EmberkeepError, TierError
from emberkeep.tiered.superblock import Point, Superblock
from emberkeep.tiered.tiered_slab import TieredSlab

_FORMAT = 1
_COMMITTED, _ABORTED = "committed", "aborted"


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of the tier in one directory."""

    top: str
    disk: Disk

    @property
    def _store(self) -> LocalStore:
        return LocalStore(os.path.join(self.top, "state"), disk=self.disk)

    def commit(self, point: Point, lives: Mapping[str, int]) -> bool:
        """Decides that the batch took place, unless it was given up before; whether it did.

        `lives` names every file of the tier, and its life as far as it is known.
        """
        return self._decide(point, _COMMITTED, lives)

    def abort(self, point: Point, lives: Mapping[str, int]) -> bool:
        """Gives the batch up, unless it was committed before; whether it took place after all."""
        return self._decide(point, _ABORTED, lives)

    def _decide(self, point: Point, outcome: str, lives: Mapping[str, int]) -> bool:
        name = _name(point)
        body = {
            "kind": "tier decision", "format": _FORMAT, "name": name, "outcome": outcome,
            "batch": point.batch, "nonce": point.nonce, "files": dict(lives),
        }  # fmt: skip
        if not self._store.put_if_absent(name, _encode(body)):
            outcome = self._outcome(name)
        return outcome == _COMMITTED

    def _outcome(self, name: str) -> str:
        content = self._store.get(name)
        try:
            document = json.loads(content)
            body = document["body"]
            if content == _encode(body) and body["name"] == name:
                return str(body["outcome"])
        except (ValueError, KeyError, TypeError):
            pass
        path = os.path.join(self.top, "state", name)
        raise DamageError(
            f"{path} is damaged, so it is not known whether batch {name.split('-')[1]} took place; "
            "nothing was changed. Bring that file back, or restore a version of a repository into "
            "a new tier",
            name=path,
        )

    def forget(self, nonces: Iterable[str]) -> None:
        """Drops the decisions of batches whose outcome every file has recorded."""
        recorded = set(nonces)
        self._store.delete([name for name in self.all() if _nonce(name) in recorded])

    def forget_others(self, heads: Iterable[Superblock]) -> None:
        """Drops the decisions that none of these heads, those of all files, waits for."""
        waiting = {head.prepared.nonce for head in heads if head.prepared is not None}
        self._store.delete([name for name in self.all() if _nonce(name) not in waiting])

    def all(self) -> list[str]:
        try:
            found = os.listdir(os.path.join(self.top, "state"))
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.startswith("decision-"))


def _name(point: Point) -> str:
    return f"decision-{point.batch}-{point.nonce}.json"


def _nonce(name: str) -> str:
    return name.removesuffix(".json").rsplit("-", 1)[1]


def _encode(body: object) -> bytes:
    text = json.dumps(body, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{{"xxh3_128":"{digest}","body":{text}}}\n'.encode()


# -- the slabs of one tier -------------------------------------------------------------------------


def commit(slabs: Sequence[TieredSlab]) -> None:
    """Commits the batch that every file of a tier has prepared.

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
    decisions = _of(slabs[0])
    if not decisions.commit(point, _lives(slabs)):
        raise TierError(f"batch {point.batch} was given up meanwhile; nothing was committed")
    _record(slabs, point, committed=True)


def abandon(slabs: Sequence[TieredSlab]) -> None:
    """Gives up the checkpoint under way, if there is one, and what files have prepared.

    What turns out to have been committed is committed in every file.
    """
    for slab in slabs:
        slab.abandon()
    # A file that has recorded a batch proves that it took place.
    recorded = {p.nonce for slab in slabs if (p := slab.log.head.committed) is not None}
    lives = _lives(slabs) if slabs else {}
    slabs = [slab for slab in slabs if slab.log.failed is None]
    points = {p.nonce: p for p in map(_prepared, slabs) if p is not None}
    for nonce, point in points.items():
        decisions = _of(slabs[0])
        decide = decisions.commit if nonce in recorded else decisions.abort
        _record(slabs, point, committed=decide(point, lives))


def _record(slabs: Sequence[TieredSlab], point: Point, *, committed: bool) -> None:
    """Has every file record an outcome that was decided, and drops the decision once all have.

    A file that has failed, and one of a shard that is lost, does so when it is opened again.
    """
    errors: list[EmberkeepError] = []
    for slab in slabs:
        prepared = _prepared(slab)
        if prepared is None or prepared.nonce != point.nonce:
            continue
        try:
            if committed:
                slab.commit()
            else:
                slab.log.unprepare()
        except EmberkeepError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if len(slabs) == len(slabs[0].files):
        _of(slabs[0]).forget([point.nonce])


def _prepared(slab: TieredSlab) -> Point | None:
    return slab.log.prepared


def _of(slab: TieredSlab) -> Decisions:
    return Decisions(os.path.dirname(slab.log.path), slab.log.disk)


def _lives(slabs: Sequence[TieredSlab]) -> dict[str, int]:
    known = {os.path.basename(slab.log.path): slab.log.head.life for slab in slabs}
    return {name: known.get(name, 0) for name in slabs[0].files}
