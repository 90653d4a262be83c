"""What clients and shard servers say to each other: our own bytes, never a pickle.

Two kinds of message. *Frames* carry everything but training: a JSON header and named arrays.
*Requests* and *replies* carry pulls and pushes: a fixed header and the arrays of each slab, in one
buffer.
Every size is held against the length of the message before anything is allocated for it; what
does not add up is `ProtocolError`, and nothing has happened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep import errors
from emberkeep._types import F32, I64, U8, Json, Rates, RowIds
from emberkeep.errors import EmberkeepError, ProtocolError, ShardLostError
from emberkeep.tables import Normal, Table, Uniform, optimizer_from

PROTOCOL = 2
"""2: `freeze` returns the state of tables, `repository` says what a server finds under a URL,
`digest` sums up rows, `load_table_state` says how many dynamic tables hold."""
MAX_ROWS = 2**24
"""Rows that one pull or push may name."""
MAX_FRAME_NBYTES = 2**28
FRAME_NBYTES = 2**24
"""Rows that are moved in bulk travel in frames of about this size."""
MAX_IDS = (MAX_FRAME_NBYTES - 2**16) // 8
"""Ids that one frame holds, beside its header."""
MAX_MESSAGE_NBYTES = 2**31 - 2**20
"""Of a pull, a push or the reply to one. Flight carries no message of 2 GiB, its own part of it
included."""

# Kinds of requests and replies.
PULL, PREFETCH, PUSH, CHECK, APPLY, FETCH = 1, 2, 3, 4, 5, 6
ROWS, DONE, REFUSED = 129, 130, 131

_MAGIC = b"EKR1"
_HEADER = struct.Struct("<4sBBHHHxxxxQQQd")
_RATES = 1  # a flag: a learning rate for each slab follows the header
_FRAME = struct.Struct("<4sI")
_FRAME_MAGIC = b"EKF1"
_ALIGNMENT = 8
_KINDS = {"float32", "float64", "int32", "int64", "uint8", "uint32"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests must look like for the tables of a run: tables and dim of each slab."""

    tables_G: tuple[int, ...]
    dims_G: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A pull or a push. `number` counts the pushes of one incarnation of a worker, from 1."""

    kind: int
    epoch: int
    incarnation: int = 0
    number: int = 0
    rank: int = 0
    world: int = 1
    lr: Rates = 0.0
    """Of all slabs, or of each."""
    wanted: Sequence[RowIds] = ()
    grads: Sequence[F32] = ()


def pack_request(request: Request, positions_G: Sequence[I64] | None = None) -> U8:
    """One buffer; `unpack_request` is its inverse. With `positions_G` those rows of the gradients
    are sent, slab by slab."""
    wanted, grads = request.wanted, request.grads
    lr_G = () if isinstance(request.lr, float | int) else request.lr
    start = _HEADER.size + 8 * len(lr_G)
    size = start + 8 * sum(ids.offsets.size + ids.ids.size for ids in wanted)
    rows_G = [
        part.shape[0] if positions_G is None else positions_G[g].size
        for g, part in enumerate(grads)
    ]
    blob = np.empty(
        size + sum(4 * rows * part.shape[1] for rows, part in zip(rows_G, grads, strict=True)),
        np.uint8,
    )
    _HEADER.pack_into(
        blob.data, 0, _MAGIC, request.kind, _RATES if lr_G else 0, len(wanted), request.rank,
        request.world, request.epoch, request.incarnation, request.number,
        0.0 if lr_G else request.lr,
    )  # fmt: skip
    blob[_HEADER.size : start].view(np.float64)[:] = lr_G
    words = blob[start:size].view(np.int64)
    at = 0
    for ids in wanted:
        for part in (ids.offsets, ids.ids):
            words[at : at + part.size] = part
            at += part.size
    at = size
    for g, rows_UD in enumerate(grads):
        width = 4 * rows_UD.shape[1]
        target = blob[at : at + rows_G[g] * width].view(f"V{width}")
        source = _rows_of(np.ascontiguousarray(rows_UD))
        if positions_G is None:
            target[:] = source
        else:
            source.take(positions_G[g], out=target, mode="clip")
        at += target.nbytes
    return blob


def unpack_request(blob: U8, shape: Shape) -> Request:
    """The request, its arrays copied: what arrives is neither aligned nor writable."""
    if blob.size < _HEADER.size:
        raise ProtocolError(f"a request of {blob.size} bytes is shorter than its header")
    magic, kind, flags, groups, rank, world, epoch, incarnation, number, lr = _HEADER.unpack_from(
        blob.data
    )
    if magic != _MAGIC or kind not in (PULL, PREFETCH, PUSH, CHECK, APPLY, FETCH):
        raise ProtocolError(f"this is not a request of emberkeep's protocol {PROTOCOL}")
    reader = _Reader(blob, _HEADER.size)
    rates = [lr]
    if flags & _RATES:
        lr = rates = reader.take(len(shape.tables_G), np.float64).tolist()
    if not all(map(math.isfinite, rates)) or world < 1 or rank >= world:
        raise ProtocolError(f"a request of rank {rank} of {world} with lr {lr} cannot be")
    about = {"kind": kind, "epoch": epoch, "incarnation": incarnation, "number": number,
             "rank": rank, "world": world, "lr": lr}  # fmt: skip
    if kind == APPLY:
        if groups:
            raise ProtocolError("a request to apply brings nothing with it")
        reader.end()
        return Request(**about)
    if groups != len(shape.tables_G):
        raise ProtocolError(f"{groups} slabs were named, there are {len(shape.tables_G)}")
    wanted = [_row_ids(reader, tables) for tables in shape.tables_G]
    grads = []
    if kind in (PUSH, CHECK):
        for ids, dim in zip(wanted, shape.dims_G, strict=True):
            grads.append(reader.take(ids.ids.size * dim, np.float32).reshape(-1, dim))
    reader.end()
    return Request(**about, wanted=wanted, grads=grads)


def _row_ids(reader: _Reader, tables: int) -> RowIds:
    offsets = reader.take(tables + 1, np.int64)
    ends = offsets.tolist()  # few, most often one: faster than an array's own methods
    rows = ends[-1]
    if ends[0] != 0 or rows > MAX_ROWS or any(a > b for a, b in pairwise(ends)):
        raise ProtocolError(f"offsets must rise from 0 to at most {MAX_ROWS}, and do not")
    return RowIds(reader.take(rows, np.int64), offsets)


class _Reader:
    """Takes arrays off a message, never past its end."""

    def __init__(self, blob: U8, at: int) -> None:
        self._blob = blob
        self._at = at

    def take(self, count: int, kind: Any) -> npt.NDArray[Any]:
        nbytes = count * np.dtype(kind).itemsize
        if count < 0 or nbytes > self._blob.size - self._at:
            raise ProtocolError(f"a message of {self._blob.size} bytes cannot hold what it names")
        out = np.empty(count, kind)
        out.view(np.uint8)[:] = self._blob[self._at : self._at + nbytes]
        self._at += nbytes
        return out

    def end(self) -> None:
        if self._at != self._blob.size:
            raise ProtocolError(f"{self._blob.size - self._at} bytes are left over in a message")


# -- replies -------------------------------------------------------------------------------------


def rows_reply(epoch: int, rows_G: Sequence[int], dims_G: Sequence[int]) -> tuple[U8, list[F32]]:
    """An empty reply to a pull, and the parts of it that the rows are to be written into."""
    sizes = [rows * dim * 4 for rows, dim in zip(rows_G, dims_G, strict=True)]
    if (nbytes := _HEADER.size + sum(sizes)) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(
            f"{sum(rows_G)} rows would take {nbytes} bytes, and a message holds at most "
            f"{MAX_MESSAGE_NBYTES}; nothing was read: pull fewer rows at a time"
        )
    blob = np.empty(_HEADER.size + sum(sizes), np.uint8)
    _HEADER.pack_into(blob.data, 0, _MAGIC, ROWS, 0, len(sizes), 0, 1, epoch, 0, 0, 0.0)
    out, at = [], _HEADER.size
    for size, dim in zip(sizes, dims_G, strict=True):
        out.append(blob[at : at + size].view(np.float32).reshape(-1, dim))
        at += size
    return blob, out


def take_rows(
    blob: U8, positions_G: Sequence[I64], dims_G: Sequence[int], out_G: Sequence[F32]
) -> None:
    """Writes the rows of a reply to where they are wanted, slab by slab."""
    sizes = [4 * at.size * dim for at, dim in zip(positions_G, dims_G, strict=True)]
    _expect(blob, ROWS)
    if blob.size != _HEADER.size + sum(sizes):
        raise ProtocolError(
            f"a reply of {blob.size} bytes where {_HEADER.size + sum(sizes)} were expected"
        )
    first = _HEADER.size
    for positions, size, out_UD in zip(positions_G, sizes, out_G, strict=True):
        # As rows of bytes: numpy moves each at once, and what stands in a message is not aligned.
        _rows_of(out_UD)[positions] = blob[first : first + size].view(f"V{4 * out_UD.shape[1]}")
        first += size


def _rows_of(values_UD: F32) -> npt.NDArray[np.void]:
    return values_UD.view(f"V{4 * values_UD.shape[1]}").reshape(-1)


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of a prefetched pull that a push has changed: where they stand, and what they are."""

    positions: I64
    rows_UD: F32


def done_reply(
    epoch: int, number: int, changed: Sequence[Changed] = (), *, settled: int | None = None,
    waiting: bool = False,
) -> U8:  # fmt: skip
    """A push was applied; `changed` completes the prefetched pull, if there was one.

    With parity, `settled` is the last push of the worker that no loss can undo any more, and
    `waiting` says that this one is to be sent again, because a host of its parity does not answer.
    """
    size = _HEADER.size + sum(8 + 8 * c.positions.size + c.rows_UD.nbytes for c in changed)
    blob = np.empty(size, np.uint8)
    held = number if settled is None else settled
    _HEADER.pack_into(
        blob.data, 0, _MAGIC, DONE, 0, len(changed), int(waiting), 1, epoch, held, number, 0.0
    )
    at = _HEADER.size
    for part in changed:
        count = np.array([part.positions.size])
        for values in (count, part.positions, part.rows_UD):
            blob[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
            at += values.nbytes
    return blob


def settled_of(blob: U8) -> tuple[int, bool]:
    """What the reply to a push says of parity: the last settled push, and whether to send again."""
    _expect(blob, DONE)
    _, _, _, _, waiting, _, _, settled, _, _ = _HEADER.unpack_from(blob.data)
    return int(settled), bool(waiting)


def is_frame(blob: U8) -> bool:
    """Whether a message of a stream is a frame: what shards tell each other."""
    return bytes(blob[: len(_FRAME_MAGIC)]) == _FRAME_MAGIC


def unpack_done(blob: U8, dims_G: Sequence[int]) -> list[Changed]:
    """What a push changed of the prefetched pull, slab by slab; nothing if there was none."""
    groups = _expect(blob, DONE)
    if groups not in (0, len(dims_G)):
        raise ProtocolError(f"a reply of {groups} slabs where there are {len(dims_G)}")
    reader, changed = _Reader(blob, _HEADER.size), []
    for dim in dims_G[:groups]:
        (count,) = reader.take(1, np.int64)
        positions = reader.take(int(count), np.int64)
        changed.append(
            Changed(positions, reader.take(int(count) * dim, np.float32).reshape(-1, dim))
        )
    reader.end()
    return changed


def refusal(error: BaseException, epoch: int) -> U8:
    """An error as a reply."""
    document = json.dumps(describe_error(error)).encode()
    blob = np.empty(_HEADER.size + len(document), np.uint8)
    _HEADER.pack_into(blob.data, 0, _MAGIC, REFUSED, 0, 0, 0, 1, epoch, 0, 0, 0.0)
    blob[_HEADER.size :] = np.frombuffer(document, np.uint8)
    return blob


def check_reply(blob: U8) -> None:
    """Raises what a refusal tells of."""
    if blob.size < _HEADER.size:
        raise ProtocolError(f"a reply of {blob.size} bytes is shorter than its header")
    if blob[4] == REFUSED:
        raise error_from(_json(blob[_HEADER.size :].tobytes()))


def _expect(blob: U8, kind: int) -> int:
    """The number of slabs of a reply of that kind; a refusal raises what it tells of."""
    check_reply(blob)
    magic, found, _, groups, *_ = _HEADER.unpack_from(blob.data)
    if magic != _MAGIC or found != kind:
        raise ProtocolError(f"a reply of kind {found} where {kind} was expected")
    return int(groups)


# -- frames --------------------------------------------------------------------------------------


def pack_frame(header: Json, arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> bytes:
    """A JSON header and named arrays as one message."""
    arrays = arrays or {}
    document = json.dumps(
        {
            "header": header,
            "arrays": [[name, a.dtype.name, list(a.shape)] for name, a in arrays.items()],
        }
    ).encode()
    parts: list[bytes] = [_FRAME.pack(_FRAME_MAGIC, len(document)), document]
    at = len(parts[0]) + len(document)
    for values in arrays.values():
        gap = -at % _ALIGNMENT
        content = np.ascontiguousarray(values).tobytes()
        parts += [b"\0" * gap, content]
        at += gap + len(content)
    return b"".join(parts)


def row_parts(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Rows that arrays hold together, as many at a time as a frame is for; one part at least."""
    rows = max(len(values) for values in arrays.values())
    row_nbytes = sum(values[:1].nbytes for values in arrays.values())
    step = max(1, FRAME_NBYTES // max(1, row_nbytes))
    for start in range(0, max(1, rows), step):
        yield {name: values[start : start + step] for name, values in arrays.items()}


def unpack_frame(content: Any) -> tuple[Json, dict[str, npt.NDArray[Any]]]:
    """The header and the arrays, copied."""
    blob: U8 = np.frombuffer(content, np.uint8)
    if not _FRAME.size <= blob.size <= MAX_FRAME_NBYTES:
        raise ProtocolError(f"a frame has 8 bytes to {MAX_FRAME_NBYTES}, not {blob.size}")
    magic, length = _FRAME.unpack_from(blob.data)
    if magic != _FRAME_MAGIC or length > blob.size - _FRAME.size:
        raise ProtocolError(f"this is not a frame of emberkeep's protocol {PROTOCOL}")
    document = _json(blob[_FRAME.size : _FRAME.size + length].tobytes())
    header, specs = document.get("header"), document.get("arrays")
    if not isinstance(header, dict) or not isinstance(specs, list):
        raise ProtocolError("a frame has a header and arrays")
    at = _FRAME.size + length
    arrays = {}
    for spec in specs:
        name, kind, shape = _array_spec(spec)
        at += -at % _ALIGNMENT
        if at > blob.size:
            raise ProtocolError(f"a frame of {blob.size} bytes cannot hold what it names")
        values = _Reader(blob, at).take(math.prod(shape), kind)
        arrays[name] = values.reshape(shape)
        at += values.nbytes
    if at != blob.size:
        raise ProtocolError(f"{blob.size - at} bytes are left over in a frame")
    return header, arrays


def _array_spec(spec: Any) -> tuple[str, str, tuple[int, ...]]:
    match spec:
        case [str(name), str(kind), [*shape]] if kind in _KINDS and len(shape) in (1, 2):
            if all(type(size) is int and 0 <= size <= MAX_FRAME_NBYTES for size in shape):
                return name, kind, tuple(shape)
    raise ProtocolError(f"an array is [name, kind, shape], not {spec!r}"[:200])


def _json(content: bytes) -> Json:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ProtocolError("the header of a message is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("the header of a message is not a JSON object")
    return value


def check_protocol(peer: str, header: Json) -> None:
    """Refuses a peer of another protocol; the first one did not always tell its number."""
    protocol = header.get("protocol", 1)
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"{peer} speaks protocol {protocol!r}, this process protocol {PROTOCOL}: use one "
            "release of emberkeep for servers and trainers"
        )


# -- errors and specs ----------------------------------------------------------------------------


def describe_error(error: BaseException) -> Json:
    """An error as plain data. Errors of emberkeep come back as what they were."""
    if isinstance(error, ShardLostError):  # replaced while it worked on this
        return {"error": "ServerError", "message": f"the server's shard is gone: {error}"}
    if isinstance(error, EmberkeepError):
        return {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, MemoryError):  # of what was not done: it may be done in a moment
        return {"error": "PeerError", "message": f"the server is short of memory: {error!r}"}
    return {"error": "EmberkeepError", "message": f"the server failed: {error!r}"}


def error_from(reply: Json) -> EmberkeepError:
    """The inverse of `describe_error`; a class that is unknown here becomes the root."""
    kind = getattr(errors, str(reply.get("error")), EmberkeepError)
    if not (isinstance(kind, type) and issubclass(kind, EmberkeepError)):
        kind = EmberkeepError
    return kind(str(reply.get("message")))


def describe_table(table: Table) -> Json:
    kind = "normal" if isinstance(table.init, Normal) else "uniform"
    document = {
        **asdict(table),
        "features": list(table.features),
        "init": {"kind": kind, **asdict(table.init)},
    }
    # A server has no bags, so it need not know of padding; and what is not used stays unsaid, so
    # that servers which do not know of it can serve everything else.
    del document["padding_idx"], document["optimizer"]
    if table.pooling == "max":
        document["pooling"] = "sum"
    if table.optimizer is not None:
        document["optimizer"] = table.optimizer.describe()
    return document


def table_from(document: Json) -> Table:
    """The inverse of `describe_table`."""
    try:
        settings = dict(document)
        init = dict(settings.pop("init"))
        kind: type[Normal] | type[Uniform] = Normal if init.pop("kind") == "normal" else Uniform
        if "optimizer" in settings:
            settings["optimizer"] = optimizer_from(settings["optimizer"])
        return Table(settings.pop("name"), init=kind(**init), **settings)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"this does not describe a table: {error}") from None
