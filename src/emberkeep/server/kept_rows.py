"""Rows that a server has kept from the epoch before, and the versions that they were those of."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberkeep.cluster.shard import Shard
from emberkeep.repository import VersionId
from emberkeep.rows.tracker import SINCE_VERSION


@dataclass(slots=True)
class CursorVersions:
    """Which versions the rows of a shard have been those of since its trackers count changes.

    A row that has not changed for the cursor has the value that it had at the version which the
    cursor counts from, and so at every version that was cut from these rows since: whether one of
    those was committed, the repository knows.
    """

    _known: bool = False
    _versions: set[VersionId] = field(default_factory=set)
    _cut: VersionId | None = None

    def frozen(self) -> None:
        """Rows are frozen, for a version that nobody has named yet."""
        self._cut = None

    def writes(self, version: VersionId) -> None:
        """The rows that are frozen become part of a version, if it is committed."""
        self._cut = version
        self._versions.add(version)

    def closed(self, advanced: list[str]) -> None:
        """The version is committed, or not: then the cursor has not moved."""
        if SINCE_VERSION in advanced:
            self.loaded(self._cut)
        self._cut = None

    def loaded(self, version: VersionId | None) -> None:
        """The cursor counts from here on; None for something that has no name."""
        self._known, self._versions = version is not None, set()
        if version is not None:
            self._versions.add(version)

    def forget(self) -> None:
        self.loaded(None)

    def has(self, version: VersionId) -> bool:
        return self._known and version in self._versions


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The shard of the epoch before."""

    shard: Shard
    versions: CursorVersions
