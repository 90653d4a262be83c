"""What gc writes down before it deletes: marks, their decisions, and how far it has removed.

A gc may sleep between any two of its steps, and wake when a successor has long taken over. So that
nobody builds on what it will delete then:

- It puts a *mark* with the versions that it wants to remove, reads pins and tags again, and puts
  the *decision*: those of the mark that nothing holds. Then it looks whether its epoch was sealed
  or followed by another one, and deletes only if it was not.
- A successor seals, then reads the marks, and its claim *honours* those that are decided. A mark of
  an ended epoch that the newest claim does not honour is void: its gc must come upon the seal,
  since it decided after the successor had looked.
- A version under a valid mark is not part of the history, and nobody builds on it, pins or tags it.
  What the decision exempts is part of the history again.

Before a name under `versions/` becomes free, gc notes the highest number that it removes. A
successor that looked at the history long ago may take such a name for the next manifest of the
epoch that it seals; the note tells it that the epoch has passed that number. Notes have names of
their own, and are never overwritten: a request that arrives late cannot lower them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from emberkeep.blobs import BlobStore, together
from emberkeep.errors import DamageError, MissingObjectError
from emberkeep.repository import documents
from emberkeep.repository.manifest import versions_in
from emberkeep.repository.names import CONDEMNED, VersionId, mark_name, parse_mark
from emberkeep.runtime.fields import Fields

_Body = tuple[tuple[VersionId, ...], int]  # versions, and the format that it was written in


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The versions that a gc of an epoch wants to remove, or has decided to.

    Marks of format 1 have no decision: those that wrote them deleted as soon as the mark stood.
    """

    key: str
    epoch: int
    versions: frozenset[VersionId]
    decided: bool
    format: int
    documents: tuple[str, ...]

    def valid(self, epoch: int, honoured: frozenset[str] | None) -> bool:
        """Whether it counts where `epoch` is the newest claimed one, and honours these marks.

        None stands for a claim that says nothing about marks: it is of format 1, or unreadable.
        """
        if self.epoch >= epoch:
            return True
        return self.decided or self.format == 1 if honoured is None else self.key in honoured


def read_marks(store: BlobStore, repository: str) -> tuple[Mark, ...]:
    """Every mark with its decision, valid or not. A damaged document counts as not written: gc
    deletes only after mark and decision were put whole."""
    found: dict[str, dict[bool, tuple[str, _Body | None]]] = {}
    listed = [(info.name, parse_mark(info.name)) for info in store.list(CONDEMNED)]
    known = [(name, *parsed) for name, parsed in listed if parsed is not None]
    bodies = together(
        store,
        [
            partial(_read, store, name, "decision" if decision else "condemned", repository)
            for name, _, decision in known
        ],
    )
    for (name, key, decision), body in zip(known, bodies, strict=True):
        found.setdefault(key, {})[decision] = name, body
    return tuple(_mark(key, parts) for key, parts in sorted(found.items()))


def _mark(key: str, parts: Mapping[bool, tuple[str, _Body | None]]) -> Mark:
    bodies = {decision: body for decision, (_, body) in parts.items() if body is not None}
    # A decision without its mark is what a gc left that died while it tidied up: it counts.
    versions, written = bodies.get(True) or bodies.get(False) or ((), documents.FORMAT)
    return Mark(
        key=key,
        epoch=int(key.partition("-")[0]),
        versions=frozenset(versions),
        decided=True in bodies,
        format=written,
        documents=tuple(name for name, _ in parts.values()),
    )


def _read(store: BlobStore, name: str, kind: str, repository: str) -> _Body | None:
    try:
        return condemned_in(documents.decode(name, store.get(name), kind, repository))
    except (MissingObjectError, DamageError):
        return None


def condemned_in(body: Fields) -> _Body:
    """What a mark or a decision says."""
    return versions_in(body, "versions"), body.number("format")


def put_mark(
    store: BlobStore, repository: str, key: str, versions: frozenset[VersionId], *, decision: bool
) -> None:
    """Writes a mark down, or what was decided about it."""
    name = mark_name(key, decision=decision)
    body = {"versions": [str(version) for version in sorted(versions)]}
    kind = "decision" if decision else "condemned"
    store.put(name, documents.encode(name, kind, repository, body))


def note_removed(
    store: BlobStore, removed: frozenset[VersionId], noted: Mapping[int, int]
) -> list[str]:
    """Notes how far epochs have been removed; returns the notes that this makes superfluous.

    A note is empty: its name says all, so none can be torn.
    """
    superfluous = []
    for epoch in {version.epoch for version in removed}:
        number = max(version.number for version in removed if version.epoch == epoch)
        if number > noted.get(epoch, 0):
            store.put(VersionId(number, epoch).removed_name, b"")
            if epoch in noted:
                superfluous.append(VersionId(noted[epoch], epoch).removed_name)
    return superfluous
