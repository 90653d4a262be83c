"""What data is made of: batches, sources that yield samples in one global order, views of them.

A *source* describes data and holds nothing open; it may be copied, pickled and sent to a worker.
`open` gives a *cursor*, which belongs to one thread. Samples are numbered from 0 in the one order
that the source defines, by any reader and in batches of whatever size.
"""

from __future__ import annotations

import glob
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import xxhash

from emberkeep._types import F32, I64
from emberkeep.errors import ConfigError, DataError

Ids = I64
MultiHot = tuple[Ids, Ids]
Mark = dict[str, int]
"""Where a cursor stands within its files, as plain integers: a shortcut for opening there again."""


def whole_number(name: str, given: int) -> int:
    """Plain, also of numpy's integers: what is counted with them is saved as JSON."""
    try:
        return operator.index(given)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, not {given!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples side by side. The arrays belong to the batch: no later batch reuses them."""

    dense: F32
    """`[B, n_dense]`"""
    ids: dict[str, Ids | MultiHot]
    """Feature → `[B]`, or for multi-hot features `(values, offsets)`, offsets being the `[B]`
    starts of the samples within `values`, as `torch.nn.EmbeddingBag` takes them."""
    labels: F32
    """`[B]`; NaN where the data has no labels."""

    def __len__(self) -> int:
        return len(self.labels)


class Cursor(Protocol):
    """A place in a source that moves forward."""

    def read(self, count: int) -> Batch:
        """The next `count` samples; fewer only at the end of the data."""

    def skip(self, count: int) -> int:
        """Passes over the next `count` samples; returns how many there were."""

    def mark(self) -> Mark:
        """Where the next sample starts. The same on every cursor that stands before it."""

    def close(self) -> None: ...


class Source(Protocol):
    """Samples in one global order."""

    def fingerprint(self) -> str:
        """Names the samples, their order and their transforms: equal means the same data."""

    def count(self) -> int | None:
        """How many samples there are, None if there is no end. May have to scan the files."""

    def open(self, position: int, mark: Mark | None = None) -> Cursor:
        """A cursor before sample `position`; `mark` is what a cursor there returned, if known."""


@runtime_checkable
class Resumable(Protocol):
    """All that is asked of a loader whose place is saved beside the model.

    `Reader` is one, torchdata's `StatefulDataLoader` another. `state_dict` must count the batches
    that were handed out and no others.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Samples `start` to `stop` of a source, numbered from 0.

    The end is no part of the fingerprint: moving it renumbers nothing, so a run that stopped at
    one end resumes towards a later one.
    """

    source: Source
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", whole_number("start", self.start))
        if self.stop is not None:
            object.__setattr__(self, "stop", whole_number("stop", self.stop))
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ConfigError(
                f"a window needs 0 <= start <= stop, not start={self.start}, stop={self.stop}"
            )

    def fingerprint(self) -> str:
        inner = self.source.fingerprint()
        return f"{inner}[{self.start}:]" if self.start else inner

    def count(self) -> int | None:
        inner = self.source.count()
        ends = [end for end in (inner, self.stop) if end is not None]
        return max(min(ends) - self.start, 0) if ends else None

    def open(self, position: int, mark: Mark | None = None) -> Cursor:
        cursor = self.source.open(self.start + position, mark)
        if self.stop is None:
            return cursor
        return _Bounded(cursor, max(self.stop - self.start - position, 0))


class _Bounded:
    """A cursor that ends after `left` more samples."""

    def __init__(self, cursor: Cursor, left: int) -> None:
        self._cursor = cursor
        self._left = left

    def read(self, count: int) -> Batch:
        batch = self._cursor.read(min(count, self._left))
        self._left -= len(batch)
        return batch

    def skip(self, count: int) -> int:
        skipped = self._cursor.skip(min(count, self._left))
        self._left -= skipped
        return skipped

    def mark(self) -> Mark:
        return self._cursor.mark()

    def close(self) -> None:
        self._cursor.close()


def split(source: Source, *, test: int | float) -> tuple[Window, Window]:
    """Training samples and the held-out last ones: `test` samples, or that fraction of all.

    The last samples in the source's order are the test set, as in the Criteo benchmarks, where
    the order is time: a model is judged by what came after all that it saw.
    """
    total = source.count()
    if total is None:
        raise ConfigError("a source without an end has no last samples: give it a sample count")
    given: Any = test  # also a number of numpy's
    if isinstance(given, bool) or not isinstance(given, Real) or not math.isfinite(given):
        raise ConfigError(f"test= takes a number of samples, or a fraction of all, not {test!r}")
    held_out = int(given) if isinstance(given, Integral) else round(total * float(given))
    if not 0 < held_out < total:
        raise ConfigError(
            f"test={test} would hold out {held_out} of {total} samples: leave some on both sides"
        )
    train = total - held_out
    return Window(source=source, stop=train), Window(source=source, start=train, stop=total)


def existing_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], suffixes: tuple[str, ...] = ()
) -> tuple[Path, ...]:
    """One path or several in order: files, directories and patterns such as `day-*/part*`.

    A directory stands for all files below it that end in one of `suffixes`, a pattern for the files
    and directories that match. Within one, every file comes once, in the order of names, numbers by
    their value; names that begin with a dot or an underscore are passed over unless a pattern
    spells that out.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ConfigError("a source needs at least one file")
    return tuple(file for path in given for file in _files_of(Path(path), suffixes))


def _files_of(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        below = [
            found for found in path.rglob("*")
            if found.is_file() and found.name.endswith(suffixes or ("",))
            and not any(part[0] in "._" for part in found.relative_to(path).parts)
        ]  # fmt: skip
        if not below:
            wanted = f"no file that ends in {' or '.join(suffixes)}" if suffixes else "no file"
            raise DataError(f"{path} is a directory with {wanted} below it")
        return sorted(below, key=_by_number)
    found = map(Path, glob.glob(str(path), recursive=True))
    matches = sorted((match for match in found if not _passed_over(match, path)), key=_by_number)
    if not matches:
        pattern = any(mark in str(path) for mark in "*?[")
        raise DataError(f"{path}: {'nothing matches' if pattern else 'no such file'}")
    # `**` matches a directory and what is in it.
    return list(dict.fromkeys(file for match in matches for file in _files_of(match, suffixes)))


def _passed_over(match: Path, pattern: Path) -> bool:
    spelled_out = [part for part in pattern.parts if part[0] in "._"]
    return any(
        part[0] in "._" and not any(fnmatchcase(part, name) for name in spelled_out)
        for part in match.parts
    )


def _by_number(path: Path) -> tuple[list[tuple[int, int, str]], str]:
    """Sorts part-2 before part-10, and part-01 before part-1 on every file system."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts], str(path)


def files_fingerprint(kind: str, files: Sequence[Path], options: Mapping[str, Any]) -> str:
    """Names files by their sizes, beginnings and ends, so that they may be moved; not all is read.

    Reading everything would cost as much as a pass over the data; two data sets that agree in
    sizes, the first and the last 64 KiB of every file but not between are taken for the same.
    """
    digest = xxhash.xxh3_64(json.dumps([kind, options], sort_keys=True, default=str).encode())
    for file in files:
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                head = stream.read(1 << 16)
                stream.seek(max(size - (1 << 16), 0))
                tail = stream.read()
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error}") from error
        digest.update(size.to_bytes(8, "little") + head + tail)
    return f"{kind}:{digest.hexdigest()}"
