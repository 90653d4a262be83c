"""Versions on storage: committed atomically, checked when read, removed by policy."""

from emberkeep.repository.digests import BLOCK_NBYTES
from emberkeep.repository.history import History
from emberkeep.repository.maintenance.collector import Collected, Collector
from emberkeep.repository.maintenance.fork import fork
from emberkeep.repository.maintenance.verify import Damage, Report, newest_undamaged, verify
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.pins import Pin
from emberkeep.repository.repository import Repository
from emberkeep.repository.retention import (
    DEFAULT_RETENTION,
    KeepAll,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepNamed,
    KeepUnion,
    RetentionPolicy,
    VersionFacts,
)
from emberkeep.repository.writer import Draft, Writer

__all__ = [
    "BLOCK_NBYTES",
    "DEFAULT_RETENTION",
    "Collected",
    "Collector",
    "Damage",
    "Draft",
    "FileRef",
    "History",
    "KeepAll",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepNamed",
    "KeepUnion",
    "Manifest",
    "Pin",
    "Report",
    "Repository",
    "RetentionPolicy",
    "VersionFacts",
    "VersionId",
    "Writer",
    "fork",
    "newest_undamaged",
    "verify",
]
