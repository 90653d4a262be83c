"""The codecs of rows.

A codec is a frozen spec that round-trips through a dict and works on blocks of rows: `encode`
gives named buffers, `decode` turns them back. `Raw` returns every bit. `Quantized`, `NonNegative8`
and `NonNegative` lose precision within a bound that their docstrings state; a row to which the
bound cannot be promised (NaN, infinity, a range that overflows) is stored raw beside the others and
comes back exactly. The bytes of a row depend on that row alone: not on the block that it is in,
not on the thread count, not on the machine. `docs/codecs.md` accounts for every byte.

Lossy codecs hold float32 planes. A plane so narrow that codes and parameters would not be smaller
than the row itself is stored raw, whatever the codec.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike

from emberkeep._types import Array
from emberkeep.errors import ConfigError, DamageError, FormatError, StateError
from emberkeep.runtime.pool import Pool, shared, spans

Buffers = Mapping[str, Array]

MOST_WIDTH = 2**24
"""The widest plane that is read."""
_NUMBER_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip
_PARAM_BYTES = 4
# Spans smaller than this cost more to hand out than to encode.
_LEAST_SPAN_BYTES = 1 << 16


class Codec(Protocol):
    """What the repository needs of a codec."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]: ...

    def nbytes_per_row(self, width: int, dtype: DTypeLike = np.float32) -> int: ...

    def columns(self, width: int, dtype: DTypeLike = np.float32) -> dict[str, int]:
        """Bytes of a row in each buffer that has one entry per row; raw rows aside."""
        ...

    def encode(self, values_RD: Array, pool: Pool | None = None) -> dict[str, Array]: ...

    def decode(
        self,
        buffers: Buffers,
        *,
        rows: int,
        width: int,
        dtype: DTypeLike = np.float32,
        out: Array | None = None,
        pool: Pool | None = None,
    ) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """The bytes of the rows as they are: any dtype, any width, every bit."""

    name: ClassVar[str] = "raw"

    def to_dict(self) -> dict[str, Any]:
        return {"codec": self.name, "version": 1}

    def nbytes_per_row(self, width: int, dtype: DTypeLike = np.float32) -> int:
        return width * np.dtype(dtype).itemsize

    def columns(self, width: int, dtype: DTypeLike = np.float32) -> dict[str, int]:
        return {"values": self.nbytes_per_row(width, dtype)}

    def encode(self, values_RD: Array, pool: Pool | None = None) -> dict[str, Array]:
        """One buffer, `values`; it may share memory with the rows given."""
        return {"values": _rows(values_RD)}

    def decode(
        self,
        buffers: Buffers,
        *,
        rows: int,
        width: int,
        dtype: DTypeLike = np.float32,
        out: Array | None = None,
        pool: Pool | None = None,
    ) -> Array:
        """The rows, in `out` if given; else they may share memory with the buffer."""
        _only(buffers, "values")
        values_RD = _buffer(buffers, "values", np.dtype(dtype), (rows, width))
        if out is None:
            return values_RD
        _target(out, rows, width, np.dtype(dtype))
        out[:] = values_RD
        return out


class _RowGrids:
    """Codecs that lay a grid over each row: codes of `_bits` a value, and 4 bytes for the grid."""

    __slots__ = ()
    name: ClassVar[str]

    @property
    def _bits(self) -> int:
        return 8

    def _encode_rows(
        self, values_RD: Array, codes_RB: Array, params_R: Array, raw_R: Array, a: int, b: int
    ) -> None:
        """Encodes rows a..b, and says in `raw_R` of each whether it is stored raw.

        A raw row has 0 for its param and codes. Any other has a param that is not 0, if it can:
        a damaged list of raw rows is noticed by that.
        """
        raise NotImplementedError

    def _decode_rows(self, codes_RB: Array, params_R: Array, out_RD: Array, a: int, b: int) -> int:
        """Decodes rows a..b; how many have parameters that are never written."""
        raise NotImplementedError

    def nbytes_per_row(self, width: int, dtype: DTypeLike = np.float32) -> int:
        """Bytes of a row that is not stored raw."""
        return sum(self.columns(width, dtype).values())

    def columns(self, width: int, dtype: DTypeLike = np.float32) -> dict[str, int]:
        _check_float32(dtype, self.name)
        if not _is_coded(width, self._bits):
            return Raw().columns(width, dtype)
        return {"codes": _code_bytes(width, self._bits), "params": _PARAM_BYTES}

    def encode(self, values_RD: Array, pool: Pool | None = None) -> dict[str, Array]:
        values_RD = _rows(values_RD)
        _check_float32(values_RD.dtype, self.name)
        rows, width = values_RD.shape
        if not _is_coded(width, self._bits):
            return Raw().encode(values_RD)
        codes_RB = np.empty((rows, _code_bytes(width, self._bits)), np.uint8)
        params_R = np.empty(rows, np.uint32)
        raw_R = np.empty(rows, np.uint8)
        _run(partial(self._encode_rows, values_RD, codes_RB, params_R, raw_R), rows, width, pool)
        raw_rows = np.flatnonzero(raw_R)
        return {
            "codes": codes_RB,
            "params": params_R,
            "raw_rows": raw_rows.astype(np.uint32),
            "raw_values": values_RD[raw_rows],
        }

    def decode(
        self,
        buffers: Buffers,
        *,
        rows: int,
        width: int,
        dtype: DTypeLike = np.float32,
        out: Array | None = None,
        pool: Pool | None = None,
    ) -> Array:
        _check_float32(dtype, self.name)
        if not _is_coded(width, self._bits):
            return Raw().decode(buffers, rows=rows, width=width, out=out)
        _only(buffers, "codes", "params", "raw_rows", "raw_values")
        # Kernels do not check bounds: every size is settled here.
        code_bytes = _code_bytes(width, self._bits)
        codes_RB = _buffer(buffers, "codes", np.dtype(np.uint8), (rows, code_bytes))
        params_R = _buffer(buffers, "params", np.dtype(np.uint32), (rows,))
        raw_rows, raw_values = _raw_part(buffers, rows, width)
        if len(raw_rows) and params_R[raw_rows].any():
            raise DamageError("buffer 'params' holds a grid for a raw row: the piece is damaged")
        if out is None:
            out = np.empty((rows, width), np.float32)
        _target(out, rows, width, np.dtype(np.float32))
        wrong = _run(partial(self._decode_rows, codes_RB, params_R, out), rows, width, pool)
        if any(wrong):
            raise _never_written(self.name, sum(wrong), rows)
        out[raw_rows] = raw_values
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized(_RowGrids):
    """Rows as `bits`-wide integers on a grid of their own: bits/8 bytes a value and 4 a row.

    Without a search (8 bits, by default) every value comes back to within half a step of its
    row's range: |x − x̂| ≤ 0.505 · (max − min) / (2^bits − 1).

    With it (4, 3 and 2 bits) the range is narrowed where that lowers the row's ℓ2 error, as
    Check-N-Run does: `bins` is the number of steps that the range is cut into, `ratio` the part
    of it that may be given up. Values outside the narrower range are clipped, so the promise is
    for the row: its ℓ2 error is never above that of the whole range,
    ‖x − x̂‖ ≤ √width · 0.505 · (max − min) / (2^bits − 1).

    Exact are: constant rows; rows with NaN or infinity; rows whose step would leave 2^±100; rows
    farther from zero than 16 times their range. All but constant rows cost their raw bytes for it.
    """

    bits: int
    bins: int | None = None
    ratio: float | None = None

    name: ClassVar[str] = "quantized"
    # The paper's bins, and its ratios for 2 and 3 bits. It names none for 4 bits, where the loss no
    # longer falls beyond 0.16.
    _defaults: ClassVar[dict[int, tuple[int, float]]] = {
        2: (25, 0.5),
        3: (25, 0.2),
        4: (45, 0.2),
        8: (1, 0.0),
    }

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in self._defaults:
            raise ConfigError(f"bits must be 2, 3, 4 or 8, not {self.bits!r}")
        bins, ratio = self._defaults[self.bits]
        if self.bins is None:
            object.__setattr__(self, "bins", bins)
        if self.ratio is None:
            object.__setattr__(self, "ratio", ratio)
        if type(self.bins) is not int or not 1 <= self.bins <= 1000:
            raise ConfigError(f"bins must be a whole number from 1 to 1000, not {self.bins!r}")
        if type(self.ratio) not in (int, float) or not 0 <= float(self.ratio or 0) <= 1:
            raise ConfigError(f"ratio must be a number from 0 to 1, not {self.ratio!r}")

    @property
    def iterations(self) -> int:
        """The steps of the search: while more than 1 − `ratio` of the range is left."""
        bins, ratio = self.bins or 1, self.ratio or 0.0
        return min(math.ceil(bins * ratio - 1e-9), bins - 1)

    @property
    def _fine(self) -> np.float32:
        """Positions of the offset per step: 2048 per range, so that 16 bits reach 16 ranges."""
        return np.float32(2048 >> self.bits)

    def to_dict(self) -> dict[str, Any]:
        return {
            "codec": self.name,
            "version": 1,
            "bits": self.bits,
            "bins": self.bins,
            "ratio": self.ratio,
        }

    @property
    def _bits(self) -> int:
        return self.bits

    def _encode_rows(
        self, values_RD: Array, codes_RB: Array, params_R: Array, raw_R: Array, a: int, b: int
    ) -> None:
        from emberkeep.kernels.quantize import encode_rows

        bins = np.float32(self.bins)
        encode_rows(
            values_RD, a, b, self.bits, self._fine, bins, self.iterations, codes_RB, params_R, raw_R
        )

    def _decode_rows(self, codes_RB: Array, params_R: Array, out_RD: Array, a: int, b: int) -> int:
        from emberkeep.kernels.quantize import decode_rows

        return int(decode_rows(codes_RB, params_R, a, b, self.bits, self._fine, out_RD))


@dataclass(frozen=True, slots=True, kw_only=True)
class NonNegative8(_RowGrids):
    """Accumulators and second moments in 8 bits a value and 4 bytes a row.

    Such a plane divides the step of its weight, so what matters is the *ratio* of what comes back
    to what was there: a linear grid would round the small values of a row to zero, and the next
    step would divide by almost nothing. Here the grid is laid over the values' bit patterns, which
    grow as their logarithm does. Zero stays zero, a positive value stays positive, and for a row
    whose greatest value is at most 2^B times its least positive one

        |x − x̂| ≤ x · (B / 500 + 1 / 4000)

    so 2% where values differ a thousandfold (a step of Adagrad or Adam is then off by 1%), and
    about half of x in the worst case.

    Exact are: constant rows, zeros, and rows with a value that is negative, -0.0, NaN, infinite or
    denormal. All but constant rows cost their raw bytes for it.
    """

    name: ClassVar[str] = "nonnegative8"

    def to_dict(self) -> dict[str, Any]:
        return {"codec": self.name, "version": 1}

    def _encode_rows(
        self, values_RD: Array, codes_RB: Array, params_R: Array, raw_R: Array, a: int, b: int
    ) -> None:
        from emberkeep.kernels.nonnegative import encode_nonnegative

        encode_nonnegative(values_RD, a, b, codes_RB, params_R, raw_R)

    def _decode_rows(self, codes_RB: Array, params_R: Array, out_RD: Array, a: int, b: int) -> int:
        from emberkeep.kernels.nonnegative import decode_nonnegative

        return int(decode_nonnegative(codes_RB, params_R, a, b, out_RD))


@dataclass(frozen=True, slots=True, kw_only=True)
class NonNegative(NonNegative8):
    """Accumulators and second moments in 8 bits a value, or in 16 where a row has only one value.

    Planes of two and more values a row are stored as `NonNegative8` stores them. The one value of a
    row-wise accumulator leaves nothing to share parameters with: it keeps the exponent and the
    first 8 bits of the fraction of its float32, rounded to even, in 2 bytes a row and
    |x − x̂| ≤ x / 512.

    Zero stays zero, a positive value stays positive. Exact at the cost of its raw bytes is a value
    that is negative, -0.0, NaN, infinite, denormal, or would round to infinity.
    """

    name: ClassVar[str] = "nonnegative"
    # Of the 31 bits of a float32 that is not negative, the lower 15 are rounded away.
    _dropped: ClassVar[int] = 15
    _least: ClassVar[int] = 0x0080_0000 >> 15
    _infinite: ClassVar[int] = 0x7F80_0000 >> 15

    def columns(self, width: int, dtype: DTypeLike = np.float32) -> dict[str, int]:
        _check_float32(dtype, self.name)
        return {"codes": 2} if width == 1 else NonNegative8.columns(self, width)

    def encode(self, values_RD: Array, pool: Pool | None = None) -> dict[str, Array]:
        _check_float32(values_RD.dtype, self.name)
        values_RD = _rows(values_RD)
        if values_RD.shape[1] > 1:
            return NonNegative8.encode(self, values_RD, pool)
        bits = values_RD.reshape(-1).view(np.uint32)
        even = (bits >> self._dropped) & np.uint32(1)
        # A negative number may wrap around here; it is stored raw.
        codes = (bits + (np.uint32(0x3FFF) + even)) >> self._dropped
        normal = (bits >= 0x0080_0000) & (bits < 0x7F80_0000) & (codes < self._infinite)
        raw_rows = np.flatnonzero(~(normal | (bits == 0)))
        codes[raw_rows] = 0
        return {
            "codes": codes.astype(np.uint16).view(np.uint8).reshape(-1, 2),
            "raw_rows": raw_rows.astype(np.uint32),
            "raw_values": values_RD[raw_rows],
        }

    def decode(
        self,
        buffers: Buffers,
        *,
        rows: int,
        width: int,
        dtype: DTypeLike = np.float32,
        out: Array | None = None,
        pool: Pool | None = None,
    ) -> Array:
        _check_float32(dtype, self.name)
        if width > 1:
            return NonNegative8.decode(self, buffers, rows=rows, width=width, out=out, pool=pool)
        _only(buffers, "codes", "raw_rows", "raw_values")
        codes = _buffer(buffers, "codes", np.dtype(np.uint8), (rows, 2)).view(np.uint16).reshape(-1)
        raw_rows, raw_values = _raw_part(buffers, rows, width)
        if len(raw_rows) and codes[raw_rows].any():
            raise DamageError("buffer 'codes' holds a value for a raw row: the piece is damaged")
        wrong = (codes >= self._infinite) | ((codes < self._least) & (codes != 0))
        if wrong.any():
            raise _never_written(self.name, int(wrong.sum()), rows)
        if out is None:
            out = np.empty((rows, 1), np.float32)
        _target(out, rows, width, np.dtype(np.float32))
        np.left_shift(codes, self._dropped, out=out.reshape(-1).view(np.uint32), dtype=np.uint32)
        out[raw_rows] = raw_values
        return out


def is_plane(width: object, dtype: object) -> bool:
    """Whether a plane can have that width and type: numbers alone, never references to objects."""
    return type(width) is int and 0 < width <= MOST_WIDTH and dtype in _NUMBER_TYPES


CODECS = (Raw, Quantized, NonNegative8, NonNegative)


def codec_from_dict(spec: Mapping[str, Any]) -> Codec:
    """The codec that wrote `spec` with `to_dict`; one that this release cannot read is refused."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("codec"), str):
        raise DamageError(f"{reprlib.repr(spec)} describes no codec: the object is damaged")
    fields = dict(spec)
    name, version = fields.pop("codec", None), fields.pop("version", None)
    known: dict[Any, Callable[..., Codec]] = {codec.name: codec for codec in CODECS}
    if name not in known:
        raise FormatError(
            f"codec {name!r} is not known to this release (it knows {', '.join(known)}): "
            "read it with the release that wrote it, or a later one"
        )
    if version != 1:
        raise FormatError(
            f"codec {name!r} was written as version {version!r} and this release reads version 1: "
            "read it with the release that wrote it, or a later one"
        )
    try:
        return known[name](**fields)
    except (TypeError, ConfigError) as error:
        raise DamageError(f"codec {name!r} has fields that do not fit: {error}") from error


# What the lossy codecs share.


def _code_bytes(width: int, bits: int) -> int:
    return (width * bits + 7) // 8


def _is_coded(width: int, bits: int) -> bool:
    """Whether codes and parameters are smaller than the row; otherwise it is stored raw."""
    return _code_bytes(width, bits) + _PARAM_BYTES < 4 * width


def _check_float32(dtype: DTypeLike, codec: str) -> None:
    if np.dtype(dtype) != np.float32:
        raise ConfigError(
            f"codec {codec!r} holds float32 planes, not {np.dtype(dtype)}: use Raw for it"
        )


def _raw_part(buffers: Buffers, rows: int, width: int) -> tuple[Array, Array]:
    """The numbers of the rows that are stored raw, and those rows."""
    raw_rows = _buffer(buffers, "raw_rows", np.dtype(np.uint32), None)
    raw_values = _buffer(buffers, "raw_values", np.dtype(np.float32), (len(raw_rows), width))
    ascend = bool((raw_rows[1:] > raw_rows[:-1]).all())
    if len(raw_rows) and not (ascend and raw_rows[-1] < rows):
        raise DamageError(
            f"buffer 'raw_rows' names rows out of order or beyond the {rows} of its piece: "
            "the piece is damaged, restore another version"
        )
    return raw_rows, raw_values


def _never_written(codec: str, wrong: int, rows: int) -> DamageError:
    return DamageError(
        f"{wrong} of {rows} rows have parameters that codec {codec!r} never writes: "
        "the piece is damaged, restore another version"
    )


def _run(
    work: Callable[[int, int], int | None], rows: int, width: int, pool: Pool | None
) -> list[int]:
    """Calls `work` on spans of rows, on all threads of the pool; returns what it returned."""
    pool = pool or shared()
    least = max(1, _LEAST_SPAN_BYTES // (4 * width))
    cut = spans(rows, 4 * pool.threads if pool.threads > 1 else 1, least)
    results = [0] * len(cut)

    def run(at: int, span: tuple[int, int]) -> None:
        results[at] = work(*span) or 0

    pool.run([partial(run, at, span) for at, span in enumerate(cut)])
    return results


def _rows(values_RD: Array) -> Array:
    if values_RD.ndim != 2 or values_RD.shape[1] == 0:
        raise ConfigError(f"a block of rows has shape (rows, width), not {values_RD.shape}")
    return np.ascontiguousarray(values_RD)


def _only(buffers: Buffers, *names: str) -> None:
    if set(buffers) != set(names):
        raise DamageError(
            f"buffers {', '.join(sorted(buffers))} are not those of the codec "
            f"({', '.join(names)}): the piece is damaged or was written by another codec"
        )


def _buffer(
    buffers: Buffers, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None
) -> Array:
    """A buffer of the size that it must have, as an aligned array; `None` is one dimension."""
    array = np.ascontiguousarray(buffers[name]).reshape(-1)
    if array.dtype != dtype:
        if array.dtype != np.uint8 or array.nbytes % dtype.itemsize:
            raise DamageError(f"buffer {name!r} holds {array.dtype}, not {dtype}: it is damaged")
        array = array.view(dtype)
    if shape is not None:
        if array.size != math.prod(shape):
            raise DamageError(
                f"buffer {name!r} holds {array.size} values, {math.prod(shape)} are needed for "
                f"shape {shape}: the piece is damaged, restore another version"
            )
        array = array.reshape(shape)
    return array if array.flags.aligned else array.copy()


def _target(out: Array, rows: int, width: int, dtype: np.dtype[Any]) -> None:
    if out.shape != (rows, width) or out.dtype != dtype or not out.flags.c_contiguous:
        raise StateError(
            f"rows of shape {(rows, width)} and {dtype} do not fit an array of shape {out.shape} "
            f"and {out.dtype}, which must be contiguous"
        )
