"""Rows in files of plain arrays: safetensors, and dumps of dynamicemb."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from emberkeep._types import Array
from emberkeep.checkpoint.contents import SAFETENSORS_TYPES
from emberkeep.errors import DataError
from emberkeep.inspect.row_sources import (
    Part,
    Rows,
    Source,
    Tensor,
    as_ids,
    chunk_rows,
    fingerprint_of,
    parts_of_tensors,
)

# A header of more bytes is none: safetensors itself refuses it.
_MOST_HEADER_NBYTES = 100_000_000
_DUMP = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<world>\d+)\Z")


# -- safetensors -----------------------------------------------------------------------------------


def open_safetensors(files: Sequence[Path]) -> Source:
    """One or several safetensors files; each tensor is read where it stands."""
    parts: list[Part] = []
    others: list[str] = []
    for file in files:
        own, rest = parts_of_tensors(str(file), safetensors_of(file), stem=_stem(file))
        parts += own
        others += rest
    return Source(
        file=str(files[0]), kind="safetensors", parts=parts, passed_over=others,
        fingerprint=fingerprint_of(files),
    )  # fmt: skip


def _stem(file: Path) -> str:
    """The name of the table that a file of one table has."""
    return unquote(file.name.removesuffix(".safetensors"))


def safetensors_of(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; sizes and offsets are held against the file first."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER_NBYTES):
            raise DataError(f"{file} is no safetensors file, or was cut short")
        try:
            header = json.loads(opened.read(length))
            tensors = {n: about for n, about in header.items() if n != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise DataError(f"{file} is no safetensors file: its header is no JSON") from error
    return {name: _tensor(file, name, about, 8 + length, size) for name, about in tensors.items()}


def _tensor(file: Path, name: str, about: Any, base: int, size: int) -> Tensor:
    try:
        kind, shape = str(about["dtype"]), tuple(int(n) for n in about["shape"])
        start, stop = (base + int(n) for n in about["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: the header of tensor {name!r} is not complete") from error
    stored = np.dtype(np.uint16) if kind == "BF16" else SAFETENSORS_TYPES.get(kind)
    if stored is None:
        # Met only where it is read: a file may hold other tensors than rows.
        def refuse(first: int, last: int) -> Array:
            raise DataError(f"{file}: tensor {name!r} holds {kind}, for which numpy has no type")

        return Tensor(shape, refuse)
    nbytes = math.prod(shape) * stored.itemsize
    if min(shape, default=0) < 0 or not base <= start <= stop <= size or stop - start != nbytes:
        raise DataError(f"{file}: tensor {name!r} does not fit the file, which was cut short")
    row = math.prod(shape[1:]) * stored.itemsize

    def read(first: int, last: int) -> Array:
        values = read_array(file, stored, start + first * row, (last - first) * row)
        if kind == "BF16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.reshape(last - first, *shape[1:])

    return Tensor(shape, read)


def read_array(file: Path, kind: np.dtype[Any], start: int, nbytes: int) -> Array:
    """Numbers of a file, read rather than mapped: a file that is cut short then is no crash."""
    with open(file, "rb") as opened:
        opened.seek(start)
        found = np.fromfile(opened, kind, nbytes // kind.itemsize)
    if found.nbytes != nbytes:
        raise DataError(f"{file} was cut short while it was read")
    return found


# -- dynamicemb ------------------------------------------------------------------------------------


def is_dump(directory: Path) -> bool:
    """Whether dynamicemb has dumped tables below a directory."""
    return any(_DUMP.match(file.name) for file in directory.rglob("*_emb_keys.rank_*"))


def open_dump(directory: Path) -> Source:
    """Tables as dynamicemb dumps them: for every rank of a world a file of keys (int64), one of
    values (float32), maybe scores (int64) and what the optimizer remembers (float32).

    All ranks must be there: a dump that lacks one would be rows that are lost without a word.
    Scores are not taken over.
    """
    ranks: dict[tuple[Path, str], dict[int, Path]] = {}
    worlds: dict[tuple[Path, str], set[int]] = {}
    for file in sorted(directory.rglob("*_emb_keys.rank_*")):
        match = _DUMP.match(file.name)
        if match is not None:
            at = file.parent, match["table"]
            ranks.setdefault(at, {})[int(match["rank"])] = file
            worlds.setdefault(at, set()).add(int(match["world"]))
    parts, files, scores = [], [], False
    for (parent, table), keys in ranks.items():
        world = worlds[parent, table]
        if len(world) != 1 or set(keys) != set(range(min(world))):
            raise DataError(
                f"{parent}: of table {table!r} there are ranks {sorted(keys)} of "
                f"{' and '.join(map(str, sorted(world)))}: bring the files of every rank together"
            )
        path = ".".join([*parent.relative_to(directory).parts, unquote(table)])
        for rank in sorted(keys):
            end = f"rank_{rank}.world_size_{min(world)}"
            values = parent / f"{table}_emb_values.{end}"
            states = [parent / f"{table}_{word}.{end}" for word in ("emb_opt_values", "opt_values")]
            state = next((file for file in states if file.exists()), None)
            scores |= (parent / f"{table}_emb_scores.{end}").exists()
            part = _dumped(
                path, unquote(table), keys[rank], values, state, _optimizer(parent, table)
            )
            files += [file for file in (keys[rank], values, state) if file is not None]
            if part.rows:
                parts.append(part)
    return Source(
        file=str(directory), kind="dynamicemb", parts=parts,
        passed_over=["scores"] if scores else [], fingerprint=fingerprint_of(files),
    )  # fmt: skip


def _optimizer(parent: Path, table: str) -> Mapping[str, Any]:
    try:
        args = json.loads((parent / f"{table}_opt_args.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{parent}/{table}_opt_args.json is no JSON: {error}") from error
    return args if isinstance(args, dict) else {}


def _dumped(
    path: str,
    table: str,
    keys: Path,
    values: Path,
    state: Path | None,
    optimizer: Mapping[str, Any],
) -> Part:
    rows, odd = divmod(keys.stat().st_size, 8)
    dim = _width(values, rows)
    if odd or (rows and not dim):
        raise DataError(f"{keys}: {rows} keys and the values beside them do not fit: cut short?")
    words = {"weight": dim}
    if state is not None and rows:
        words |= _states(state, _width(state, rows), dim, optimizer)
    widths = {word: width for word, width in words.items() if not word.startswith("-")}
    step = chunk_rows(widths)
    f32 = np.dtype(np.float32)

    def chunks(start: int) -> Iterator[Rows]:
        for first in range(start, rows, step):
            last = min(rows, first + step)
            ids = read_array(keys, np.dtype(np.int64), 8 * first, 8 * (last - first))
            found = {}
            row = 4 * dim
            weight = read_array(values, f32, first * row, (last - first) * row)
            found["weight"] = weight.reshape(-1, dim)
            if state is not None:
                width = sum(words.values()) - dim
                flat = read_array(state, f32, first * 4 * width, (last - first) * 4 * width)
                at, held = 0, flat.reshape(-1, width)
                for word, columns in list(words.items())[1:]:
                    if word in widths:
                        found[word] = held[:, at : at + columns]
                    at += columns
            yield as_ids(str(keys), path, ids), found

    return Part(
        file=str(keys), path=path, rows=rows, planes=widths, dense=False, chunks=chunks, name=table
    )  # fmt: skip


def _width(file: Path, rows: int) -> int:
    """How many numbers a row has in a file; an error unless all rows have as many."""
    if not file.exists():
        raise DataError(f"{file} is missing beside its keys: the dump is not complete")
    numbers, odd = divmod(file.stat().st_size, 4)
    if odd or (numbers % rows if rows else numbers):
        raise DataError(f"{file} does not hold as many numbers for each of {rows} rows: cut short?")
    return numbers // rows if rows else 0


def _states(file: Path, width: int, dim: int, optimizer: Mapping[str, Any]) -> dict[str, int]:
    """The columns of what an optimizer remembers, in their order; one that begins with "-" is
    passed over."""
    kind = str(optimizer.get("opt_type", "")).lower()
    if "ftrl" in kind:  # as wide as Adam's, and something else
        raise DataError(
            f"{file} is FTRL's, which is not known here: move it away to import weights"
        )
    row_wise = "row" in kind or (not kind and width in (1, 4) and width != dim)
    if row_wise and width in (1, 4):
        # One number for each row, in a room of 16 bytes.
        return {"accumulator": 1, **({"-unused": width - 1} if width > 1 else {})}
    if width == 2 * dim:
        return {"first_moment": dim, "second_moment": dim}
    if width == dim:
        return {"accumulator": dim}
    if width == 0:
        return {}
    raise DataError(
        f"{file} has {width} numbers for each row of dim {dim}: neither Adagrad nor Adam; move it "
        "away to import weights alone"
    )
