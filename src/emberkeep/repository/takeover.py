"""What a new writer does to the one before it: seals its epoch, and keeps what its gc decided."""

from __future__ import annotations

from emberkeep.errors import DamageError, FencedError, NoVersionError, StorageError
from emberkeep.repository.history import (
    History,
    create_or_read,
    is_torn,
    look_at,
    read_seal,
    seal_document,
)
from emberkeep.repository.marks import put_mark
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import read_pins
from emberkeep.repository.repository import Repository, is_void, void

# A successor that looks for the end of an epoch gives up after so many names.
_MOST_NAMES = 10_000


def seal(repository: Repository, history: History, nonce: str) -> History:
    """Takes the name of the newest epoch's next manifest; returns what then stands before it.

    That epoch may commit while this runs: then the name is taken by a version, and the one after
    that is tried. Its writer uses no number before all lower ones are decided, so one seal stops
    it for good: unless the name was free because gc had freed it, which gc has noted before, or
    was spent, which is never taken back. Both are looked for after the seal.
    """
    epoch, store = history.listing.epoch, repository.store
    newest, number = history.newest, _highest(history)
    for _ in range(_MOST_NAMES):
        number += 1
        target = VersionId(number, epoch)
        if target in history.listing.void:
            continue
        content = seal_document(
            repository=repository.id, version=target, nonce=nonce,
            lineage=history.lineage.extended(newest),
        )  # fmt: skip
        found = create_or_read(store, target.manifest_name, content)
        if found == content or read_seal(target.manifest_name, found) is not None:
            repository.own_seals.add(target.manifest_name)
            sealed = repository.history(look=look_at(store))
            if sealed.listing.epoch != epoch:
                raise lost_the_race(repository)
            spent = target in sealed.listing.void
            if not spent and sealed.listing.removed.get(epoch, 0) < number:
                return sealed
            # The epoch has long passed that name, and the seal stops nobody.
            history = sealed
            newest, number = history.newest, max(_highest(history), number if spent else 0)
        elif is_void(store, target):
            continue
        elif is_torn(found, content):
            void(repository, target)
        else:
            newest = target
    raise StorageError(
        f"{store.url} could not be opened for writing: {_MOST_NAMES} names of versions up to "
        f"{number} of epoch {epoch} are taken; stop the process that commits them, then try again"
    )


def _highest(history: History) -> int:
    """The highest number that the newest epoch is known to have passed."""
    known = (history.newest, history.lineage.newest)
    removed = history.listing.removed.get(history.listing.epoch, 0)
    return max([removed, *(version.number for version in known if version)])


def lost_the_race(repository: Repository) -> FencedError:
    return FencedError(
        f"another process opened {repository.store.url} for writing at the same moment: "
        "let that one run, or open again to take over from it"
    )


def honoured_marks(repository: Repository, history: History) -> frozenset[str]:
    """The marks that stay valid: those that their gc had decided when the history was looked at,
    after the seal. A gc that decides later comes upon the seal.

    Marks of format 1 have no decision. What a tag or a pin holds was spared by their collector, if
    it still stands with all that it needs: that is decided here.
    """
    store, epoch = repository.store, history.listing.epoch
    honoured = set()
    for mark in history.marks:
        if not mark.valid(epoch, history.claim.honoured):
            continue
        if mark.decided:
            honoured.add(mark.key)
        elif mark.format == 1:
            spared = frozenset(
                v for v in _held(repository) & mark.versions if _stands(repository, v)
            )
            put_mark(store, repository.id, mark.key, mark.versions - spared, decision=True)
            honoured.add(mark.key)
    return frozenset(honoured)


def _held(repository: Repository) -> frozenset[VersionId]:
    pinned = (version for version, _ in read_pins(repository).values())
    return frozenset((*repository.tags().values(), *pinned))


def _stands(repository: Repository, version: VersionId) -> bool:
    try:
        repository.chain(version)
    except (NoVersionError, DamageError):
        return False
    return True
