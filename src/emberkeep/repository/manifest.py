"""What a version consists of.

A manifest lists the files that its version wrote itself, and names the earlier versions whose
files it builds on (`needs`). It does not repeat their lists: in a long chain of increments that
would make each manifest as long as the chain. What a version needs in all is the transitive
closure, and a version that is kept keeps its closure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone

from emberkeep._types import Json
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository import documents
from emberkeep.repository.names import VersionId, parse_data, parse_version
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.runtime.fields import Fields, plain

_NONCE = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A data file as a manifest names it.

    `kind` and `metadata` (shard, table, row count, ...) are the writer's own and mean nothing
    here. `blocks` holds one digest per `block_nbytes` bytes, unless one block holds the file:
    then `digest` is that of its bytes. That of a longer file is of its block digests, joined;
    format 1 had it over all bytes, so a file is checked by its blocks where it has some.
    """

    name: str
    size: int
    digest: str
    kind: str
    metadata: Json = field(default_factory=dict, hash=False)
    block_nbytes: int
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", plain("metadata", self.metadata))
        expected = -(-self.size // self.block_nbytes) if self.size > self.block_nbytes else 0
        if len(self.blocks) != expected:
            raise ConfigError(
                f"{self.name}: {len(self.blocks)} block digests for {self.size} bytes in blocks "
                f"of {self.block_nbytes}; there must be {expected}"
            )

    @property
    def content(self) -> tuple[object, ...]:
        """What two files have in common, in any format, if they hold the same bytes: cut into the
        same blocks."""
        return self.size, self.blocks or self.digest

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "size": self.size,
            "digest": self.digest,
            "kind": self.kind,
            "metadata": self.metadata,
            "block_nbytes": self.block_nbytes,
            "blocks": list(self.blocks),
        }

    @classmethod
    def of(cls, fields: Fields, *, without: str | None = None) -> FileRef:
        """A file as a document names it; `without` an entry of its metadata."""
        metadata = fields.dictionary("metadata")
        try:
            return cls(
                name=fields.text("name"),
                size=fields.number("size"),
                digest=fields.text("digest"),
                kind=fields.text("kind"),
                metadata={key: value for key, value in metadata.items() if key != without},
                block_nbytes=fields.number("block_nbytes", least=1),
                blocks=tuple(fields.list_of("blocks", str)),
            )
        except ConfigError as error:
            raise fields.wrong("blocks", f"what belongs to the file ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Manifest:
    """One version, complete and immutable; to put it under its name is the commit.

    - `parent` is the newest version when this one began, `baseline` the version that the layout
      counts from (itself, when None); both are information.
    - `needs` decides: the versions whose files a restore reads beside this one's, directly.
    - `layout`, `reader`, `user` and `counters` are JSON objects that the layers above understand:
      layout and codecs, the reader's position, the user's own state, counters such as PLS.
    """

    repository: str
    version: VersionId
    nonce: str
    step: int
    created: datetime
    parent: VersionId | None = None
    baseline: VersionId | None = None
    needs: tuple[VersionId, ...] = ()
    layout: Json = field(default_factory=dict, hash=False)
    reader: Json = field(default_factory=dict, hash=False)
    user: Json = field(default_factory=dict, hash=False)
    counters: Json = field(default_factory=dict, hash=False)
    files: tuple[FileRef, ...] = ()

    def __repr__(self) -> str:
        """One line: all of it may be many kilobytes, and is in the object named."""
        kind = self.layout.get("kind", "")
        return (
            f"<Manifest of version {self.version.number}, step {self.step}, "
            f"{self.created:%Y-%m-%d %H:%M:%S} UTC{f', {kind}' if kind else ''}, "
            f"{len(self.files)} files of {self.nbytes:,} bytes>"
        )

    def __post_init__(self) -> None:
        if not _NONCE.match(self.nonce):
            raise ConfigError(f"a nonce is 16 hexadecimal digits, not {self.nonce!r}")
        if self.created.tzinfo is not timezone.utc:
            raise ConfigError(f"created must be a UTC time, not {self.created!r}")
        earlier = {reference.number for reference in (self.parent, self.baseline) if reference}
        for number in earlier | {needed.number for needed in self.needs}:
            if number >= self.version.number:
                raise ConfigError(
                    f"version {self.version} cannot build on {number}: only on earlier versions"
                )
        for what in ("layout", "reader", "user", "counters"):
            object.__setattr__(self, what, plain(what, getattr(self, what)))
        # gc knows files by name alone: a file belongs to the version in its name.
        for file in self.files:
            if parse_data(file.name) != (self.version, self.nonce):
                raise ConfigError(f"{file.name} does not belong to version {self.version}")

    @property
    def name(self) -> str:
        return self.version.manifest_name

    @property
    def nbytes(self) -> int:
        """The size of the files that this version wrote."""
        return sum(file.size for file in self.files)

    @property
    def whole(self) -> bool:
        """Whether it holds one instant. Prioritised versions do not: they hold the rows that
        mattered most, each at a moment of its own, and serve to bring single shards back."""
        return self.layout.get("kind") != PRIORITISED

    @property
    def aside(self) -> bool:
        """Whether it was copied because somebody asked for it by its name.

        It is older than others that were there, and yet the last that was written: who looks for
        the newest version passes it over. What is saved after a run went on from it counts again.
        """
        described = self.described
        return "copied_from" in described and "aside" in described.object("copied_from")

    @property
    def described(self) -> Fields:
        """`layout`, whose fields are to be taken as what they must be."""
        return Fields(self.name, self.layout, "layout.")

    def of_kind(self, kind: str) -> tuple[FileRef, ...]:
        return tuple(file for file in self.files if file.kind == kind)

    def encode(self) -> bytes:
        return documents.encode(
            self.name,
            "manifest",
            self.repository,
            {
                "nonce": self.nonce,
                "step": self.step,
                "created": self.created.isoformat(),
                "parent": _optional(self.parent),
                "baseline": _optional(self.baseline),
                "needs": [str(needed) for needed in self.needs],
                "layout": self.layout,
                "reader": self.reader,
                "user": self.user,
                "counters": self.counters,
                "files": [file.to_json() for file in self.files],
            },
        )

    @classmethod
    def decode(cls, version: VersionId, repository: str, data: bytes) -> Manifest:
        """The manifest of that version of that repository; anything else is `DamageError`."""
        return cls.of(documents.decode(version.manifest_name, data, "manifest", repository))

    @classmethod
    def of(cls, body: Fields) -> Manifest:
        parsed = parse_version(body.name)
        if parsed is None:
            raise body.wrong("name", "the name of a version")
        try:
            return cls(
                repository=body.text("repository"),
                version=parsed[0],
                nonce=body.text("nonce"),
                step=body.number("step"),
                created=body.parsed("created", utc),
                parent=version_in(body, "parent"),
                baseline=version_in(body, "baseline"),
                needs=versions_in(body, "needs"),
                layout=body.dictionary("layout"),
                reader=body.dictionary("reader"),
                user=body.dictionary("user"),
                counters=body.dictionary("counters"),
                files=tuple(FileRef.of(file) for file in body.objects("files")),
            )
        except ConfigError as error:
            raise DamageError(
                f"{body.name} is not a valid manifest: {error}", name=body.name
            ) from error


def needed_by(
    roots: Iterable[VersionId], needs: Callable[[VersionId], Iterable[VersionId]]
) -> frozenset[VersionId]:
    """The roots and everything that they need, transitively; `needs` maps a version to its own."""
    found: set[VersionId] = set()
    waiting = list(roots)
    while waiting:
        version = waiting.pop()
        if version not in found:
            found.add(version)
            waiting.extend(needs(version))
    return frozenset(found)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(timezone.utc)


def _optional(version: VersionId | None) -> str | None:
    return None if version is None else str(version)


def version_in(body: Fields, field: str) -> VersionId | None:
    """A version that a document names, or None."""
    return body.parsed(field, VersionId.parse) if field in body else None


def versions_in(body: Fields, field: str) -> tuple[VersionId, ...]:
    """The versions that a document lists."""
    try:
        return tuple(VersionId.parse(text) for text in body.list_of(field, str))
    except ConfigError as error:
        raise body.wrong(field, f"a list of versions ({error})") from error
