"""Rows that a server has kept from the epoch before, and the versions that they were those of."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberkeep.cluster.shard import Shard
from emberkeep.repository import VersionId
from emberkeep.rows.tracker import SINCE_VERSION

_Version = tuple[str, VersionId]


@dataclass(slots=True)
class CursorVersions:
    """Which versions the rows of a shard have been those of since its trackers count changes.

    A row that has not changed for the cursor has the value that it had at the version which the
    cursor counts from, and so at every version that was cut from these rows since: whether one of
    those was committed, the repository knows. Versions of two repositories may have one number.
    """

    repository: str | None = None
    """The id of the one that versions are written to, as far as it is known."""
    _known: bool = False
    _versions: set[_Version] = field(default_factory=set)
    _cut: _Version | None = None

    def frozen(self) -> None:
        """Rows are frozen, for a version that nobody has named yet."""
        self._cut = None

    def writes(self, version: VersionId) -> None:
        """The rows that are frozen become part of a version, if it is committed."""
        self._cut = None
        if self.repository is not None:
            self._cut = self.repository, version
            self._versions.add(self._cut)

    def closed(self, advanced: list[str]) -> None:
        """The version is committed, or not: then the cursor has not moved."""
        if SINCE_VERSION in advanced:
            self._count_from(self._cut)
        self._cut = None

    def loaded(self, repository: str, version: VersionId) -> None:
        """Rows are those of a version."""
        self._count_from((repository, version))

    def forget(self) -> None:
        """What the cursor counts from has no name."""
        self._count_from(None)

    def _count_from(self, version: _Version | None) -> None:
        self._known = version is not None
        self._versions = set() if version is None else {version}

    def has(self, repository: str, version: VersionId) -> bool:
        return self._known and (repository, version) in self._versions


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The shard of the epoch before."""

    shard: Shard
    versions: CursorVersions
