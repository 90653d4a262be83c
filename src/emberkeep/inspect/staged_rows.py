"""Rows on their way into a repository, on disk: sorted into buckets that fit memory.

Files of other systems bring rows in any order, weights in one file and what an optimizer remembers
in another. Rows of one id always fall into one bucket of their table, so that a bucket at a time
can be joined, sorted and searched for ids that come twice, whatever the size of the table.

A journal says up to where files were read. What was appended after it is cut off when the directory
is opened again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from emberkeep._types import I64, Array, Json
from emberkeep.errors import ConfigError, StorageError
from emberkeep.runtime.system_calls import sync, sync_path

_BUCKET_NBYTES = 8 * 2**20
_MOST_BUCKETS = 4096
_MIX = np.uint64(0x9E3779B97F4A7C15)
_JOURNAL, _LOCK = "journal.json", "lock"
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space, or name another place by --scratch",
    errno.EDQUOT: "the quota is used up: free space, or name another place by --scratch",
    errno.EACCES: "name a place that may be written to by --scratch",
    errno.EROFS: "name a place that may be written to by --scratch",
    errno.ENOENT: "name a directory whose parent exists by --scratch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rows of one table that have the same planes: each a width and a type of numbers.

    `limit` is the number of rows of a fixed table. Rows that a repository has already are `held`.
    """

    table: str
    planes: Mapping[str, tuple[int, str]]
    limit: int | None
    buckets: int
    held: bool = False

    @property
    def record(self) -> np.dtype[Any]:
        fields = [(name, kind, (width,)) for name, (width, kind) in self.planes.items()]
        return np.dtype([("id", np.int64), *fields])

    def bucket_of(self, ids: I64) -> I64:
        """Buckets of a fixed table are ranges of its ids; those of others follow no order."""
        if self.limit is not None:
            found: I64 = ids // max(1, -(-self.limit // self.buckets))
            return found
        mixed = (ids.view(np.uint64) * _MIX) >> np.uint64(32)
        return (mixed % np.uint64(self.buckets)).astype(np.int64)


def bucket_count(nbytes: int) -> int:
    """How many buckets so many bytes of a table are spread over."""
    return min(_MOST_BUCKETS, max(1, -(-nbytes // _BUCKET_NBYTES)))


class Stage:
    """A directory of buckets. One process has it at a time; see `Stage.open`."""

    def __init__(self, directory: Path, lock: IO[bytes]) -> None:
        self.directory = directory
        self._lock = lock
        self.plan: Json = {}
        self.families: list[Family] = []
        self.cursor: tuple[int, int] = (0, 0)
        """Which part is being read, and its next row."""
        self._lengths: dict[str, int] = {}
        self._changed: set[str] = set()

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[Stage]:
        """The directory, made where there is none; an import that is using it is refused."""
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / _LOCK, "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"another import into this repository is running: {directory} is its; wait "
                        "for it, or name another place by --scratch"
                    ) from None
                except OSError:  # a file system without locks: the commit lets only one win
                    pass
                yield cls(directory, lock)

    @classmethod
    def discard(cls, directory: Path, plan: Json) -> None:
        """Removes what an import with this in its plan has left behind after its commit. What
        another has left to go on from stays, and so does what is in use."""
        if not directory.exists():
            return
        with suppress(ConfigError, StorageError), cls.open(directory) as stage:
            if stage._left_by(plan):
                stage.remove()

    def _left_by(self, plan: Json) -> bool:
        if {file.name for file in self.directory.iterdir()} <= {_LOCK}:
            return True
        try:
            known = json.loads((self.directory / _JOURNAL).read_text(encoding="utf-8"))["plan"]
            return all(known.get(key) == value for key, value in plan.items())
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def begin(self, plan: Json, families: Sequence[Family]) -> bool:
        """Starts what `plan` says; whether an earlier start of the same goes on instead."""
        self.plan, self.families = plan, list(families)
        with disk_errors(self.directory):
            if self._resume():
                return True
            self._remove(keep=(_LOCK,))
            self._lengths, self.cursor = {}, (0, 0)
            self._write_journal()
            return False

    def _resume(self) -> bool:
        try:
            journal = json.loads((self.directory / _JOURNAL).read_text(encoding="utf-8"))
            if journal["plan"] != self.plan:
                return False
            lengths = {str(name): int(size) for name, size in journal["lengths"].items()}
            part, row = (int(number) for number in journal["cursor"])
            for name, size in lengths.items():
                if (self.directory / name).stat().st_size < size:
                    return False
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
        for file in self.directory.iterdir():
            if file.name in lengths:
                os.truncate(file, lengths[file.name])
            elif file.name not in (_LOCK, _JOURNAL):
                file.unlink()
        self._lengths, self.cursor = lengths, (part, row)
        return self.cursor != (0, 0)

    def append(self, family: int, ids: I64, planes: Mapping[str, Array]) -> int:
        """Sorts rows into their buckets; returns their bytes."""
        spec = self.families[family]
        records = np.empty(ids.size, spec.record)
        records["id"] = ids
        for name in spec.planes:
            records[name] = planes[name]
        with disk_errors(self.directory):
            if spec.buckets == 1:
                self._append(f"{family}.0", records)
            else:
                buckets = spec.bucket_of(ids)
                order = np.argsort(buckets, kind="stable")
                records, buckets = records.take(order), buckets[order]
                starts = np.flatnonzero(np.diff(buckets, prepend=-1))
                for start, stop in zip(starts, [*starts[1:], ids.size], strict=True):
                    self._append(f"{family}.{buckets[start]}", records[start:stop])
        return records.nbytes

    def _append(self, name: str, records: Array) -> None:
        # Opened each time: there may be more buckets than a process may have open files.
        with open(self.directory / name, "ab") as file:
            file.write(np.ascontiguousarray(records).view(np.uint8).data)
        self._lengths[name] = self._lengths.get(name, 0) + records.nbytes
        self._changed.add(name)

    def note(self, part: int, row: int) -> None:
        """Whatever was appended is there to stay: an import that goes on starts from here."""
        with disk_errors(self.directory):
            for name in self._changed:
                sync_path(self.directory / name)
            self._changed.clear()
            self.cursor = (part, row)
            self._write_journal()

    def _write_journal(self) -> None:
        held = {f"{at}." for at, family in enumerate(self.families) if family.held}
        lengths = {
            name: size
            for name, size in self._lengths.items()
            if not any(name.startswith(prefix) for prefix in held)
        }
        text = json.dumps({"plan": self.plan, "cursor": self.cursor, "lengths": lengths})
        fresh = self.directory / f"{_JOURNAL}.new"
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync(file.fileno())
        os.replace(fresh, self.directory / _JOURNAL)
        sync_path(self.directory)

    def add_family(self, family: Family) -> int:
        """Another one, whose rows are not part of what an import goes on from."""
        self.families.append(family)
        return len(self.families) - 1

    def read(self, family: int, bucket: int) -> Array:
        """The rows of a bucket, in the order in which they came."""
        with disk_errors(self.directory):
            file = self.directory / f"{family}.{bucket}"
            if not file.exists():
                return np.empty(0, self.families[family].record)
            return np.fromfile(file, self.families[family].record)

    @property
    def nbytes(self) -> int:
        return sum(self._lengths.values())

    def remove(self) -> None:
        """Nothing is left to go on from."""
        with suppress(OSError):
            self._remove()
        with suppress(OSError):
            self.directory.rmdir()

    def _remove(self, keep: Sequence[str] = ()) -> None:
        # The lock last: nobody must find a directory without one that is in use. The journal just
        # before it: as long as anything is left, it says whose that is.
        last = (_JOURNAL, _LOCK)
        for file in sorted(
            self.directory.iterdir(),
            key=lambda file: last.index(file.name) if file.name in last else -1,
        ):
            if file.name not in keep:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """What the disk refuses comes out with its remedy."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the disk, or name another by --scratch")
        raise StorageError(
            f"rows could not be kept in {directory} on their way: {reason}; {remedy}; nothing was "
            "imported"
        ) from error
