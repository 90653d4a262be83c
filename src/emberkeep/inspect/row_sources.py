"""Rows in files of other systems: what a file brings, and its rows, some at a time.

A *part* is rows of one table with the same planes, in an order that does not change. It can be read
from any row on, so that an import that was ended half-way goes on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep._types import I64, Array, Planes
from emberkeep.errors import DataError
from emberkeep.inspect.plane_names import IDS, WEIGHT, plane_of, split_name

CHUNK_NBYTES = 4 * 2**20

Rows = tuple[I64, Planes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one table in one file.

    `path` ends with the name that the table has there: its last part, or `name`. `planes` are the
    widths of what the rows have, under the words of that system. `dense` says that ids were not
    given: they are the numbers of rows. `chunks` reads from a row on; ids come as they are, in any
    order.
    """

    file: str
    path: str
    rows: int
    planes: Mapping[str, int]
    dense: bool
    chunks: Callable[[int], Iterator[Rows]]
    exact: bool = True
    """Whether `rows` is their number, and not only at most that."""
    name: str | None = None
    """The name of the table, where it is known to be more than the last part of the path."""
    steps: int = 0
    """How often the table was trained, where that is known."""

    @property
    def row_nbytes(self) -> int:
        return 8 + sum(4 * width for width in self.planes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file or directory of another system: its parts, and what in it are no rows."""

    file: str
    kind: str
    parts: Sequence[Part]
    passed_over: Sequence[str] = ()
    fingerprint: Sequence[object] = ()
    """Changes when the content does."""
    order: Sequence[object] = ()
    """Changes when the same rows come in another order."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file, read row by row: `read(start, stop)` gives numbers of any type."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Array]


def parts_of_tensors(
    file: str, tensors: Mapping[str, Tensor], *, stem: str | None = None
) -> tuple[list[Part], list[str]]:
    """Tensors grouped to rows by their names, and the names of those that are no rows.

    `stem` is the path of tensors that are called by the word for a plane alone.
    """
    named: dict[str, dict[str, Tensor]] = {}
    names = {stem: stem}
    others = []
    for name, tensor in tensors.items():
        found = split_name(name)
        if found is None and stem is not None and plane_of(name, ()) is not None:
            found = stem, name
        if found is None or len(tensor.shape) not in (1, 2):
            others.append(name)
            continue
        path, word = found
        if word in named.get(path, ()):
            raise _twice(file, word, path)
        if name.count("/") == 1:  # `<table>/<plane>`, and the table's name may have dots
            names[path] = name.partition("/")[0]
        named.setdefault(path, {})[word] = tensor
    groups = {path: dict(words) for path, words in named.items() if _has_weight(words)}
    whole = list(groups)
    for path, words in named.items():
        if path in whole:
            continue
        own = groups.setdefault(_weights_of(path, whole) or path, {})
        for word, tensor in words.items():
            if word in own:
                raise _twice(file, word, path)
            own[word] = tensor
    parts = []
    for path, words in groups.items():
        part = _part(file, path, words, names.get(path))
        if part is None:
            others.extend(f"{path}.{word}" for word in words)
        else:
            parts.append(part)
    return parts, others


def _twice(file: str, word: str, path: str) -> DataError:
    return DataError(
        f"{file}: two tensors are the {word} of {path}: bring them in files of their own, or leave "
        "one out"
    )


def _has_weight(words: Mapping[str, Tensor]) -> bool:
    return any(plane_of(word, ()) == WEIGHT for word in words)


def _weights_of(path: str, weights: Sequence[str]) -> str | None:
    """The path of the weight that a state belongs to: that of an optimizer is longer, or shorter,
    by where it was saved. Of several the one that has most of the path; None if that is not
    clear, since rows would train on with what was remembered of others."""

    def shared(known: str) -> int:
        pairs = zip(reversed(known.split(".")), reversed(path.split(".")), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    parts = path.count(".") + 1
    scores = {
        known: shared(known) for known in weights
        if _is_state(known, path) or shared(known) in (parts, known.count(".") + 1)
    }  # fmt: skip
    most = max(scores.values(), default=0)
    found = [known for known, score in scores.items() if score == most and most]
    return found[0] if len(found) == 1 else None


def _is_state(a: str, b: str) -> bool:
    return any(path.startswith(("state.", "optimizer.", "optim.")) for path in (a, b))


def _part(file: str, path: str, words: Mapping[str, Tensor], name: str | None) -> Part | None:
    named_ids = [word for word in words if plane_of(word, ()) == IDS]
    if len(named_ids) > 1:
        raise DataError(f"{file}: {' and '.join(named_ids)} are both ids of {path}: leave one out")
    ids = words[named_ids[0]] if named_ids else None
    planes = {word: t for word, t in words.items() if plane_of(word, ()) != IDS}
    weights = [t for word, t in planes.items() if plane_of(word, ()) == WEIGHT]
    if not planes or (ids is None and not any(len(t.shape) == 2 for t in planes.values())):
        return None
    rows = ids.shape[0] if ids is not None else (weights or list(planes.values()))[0].shape[0]
    if ids is not None and len(ids.shape) != 1:
        raise DataError(f"{file}: the ids of {path} have shape {ids.shape}, not one dimension")
    for word, tensor in planes.items():
        if len(tensor.shape) == 2 and not tensor.shape[1]:
            raise DataError(f"{file}: {path}.{word} has no columns: correct the file")
        if tensor.shape[0] != rows:
            raise DataError(
                f"{file}: {path}.{word} has {tensor.shape[0]} rows, the others have {rows}"
            )
    widths = {w: t.shape[1] if len(t.shape) == 2 else 1 for w, t in planes.items()}
    step = chunk_rows(widths)

    def chunks(start: int) -> Iterator[Rows]:
        for first in range(start, rows, step):
            last = min(rows, first + step)
            own_ids = (
                np.arange(first, last, dtype=np.int64)
                if ids is None
                else as_ids(file, path, ids.read(first, last))
            )
            yield (
                own_ids,
                {w: t.read(first, last).reshape(-1, widths[w]) for w, t in planes.items()},
            )

    return Part(
        file=file, path=path, rows=rows, planes=widths, dense=ids is None, chunks=chunks, name=name
    )  # fmt: skip


def chunk_rows(widths: Mapping[str, int]) -> int:
    """How many rows to read at a time."""
    return max(1, CHUNK_NBYTES // (8 + 4 * sum(widths.values())))


def as_ids(file: str, path: str, values: Array) -> I64:
    if values.dtype.kind not in "iu":
        raise DataError(f"{file}: the ids of {path} are {values.dtype}, not integers")
    if values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{file}: id {values.max()} of {path} does not fit 63 bits")
    ids: I64 = np.ascontiguousarray(values, np.int64)
    return ids


def as_plane(file: str, name: str, values: Array, kind: np.dtype[Any]) -> Array:
    """Numbers as a plane stores them; those that it cannot hold are refused."""
    if values.dtype.kind not in "fiu":
        raise DataError(f"{file}: {name} holds {values.dtype}, not numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.ascontiguousarray(values, kind)
    wrong = ~np.isfinite(found) if kind.kind == "f" else found != values
    if wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(
            f"{file}: {name} holds {values[tuple(at)]}, which is no finite {kind}: correct the file"
        )
    return found


def fingerprint_of(files: Sequence[Path]) -> list[object]:
    """What changes when one of the files does."""
    return [[str(file), (s := file.stat()).st_size, s.st_mtime_ns] for file in files]


@contextmanager
def reading(file: object) -> Iterator[None]:
    """Errors of the system and of parsers come out as what they mean to the user."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{error.filename or file} does not exist: check --from") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
