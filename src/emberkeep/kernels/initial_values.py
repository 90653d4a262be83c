"""Initial values of rows, as a pure function of (seed, table, id, column).

Only multiplications, additions, divisions and square roots of IEEE floats are used, never the C
library's transcendental functions, so the same row has the same bits on every machine: a row that
was never trained need not be stored anywhere.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, I64, U64
from emberkeep.kernels._intrinsics import prefetch_bit, prefetch_row, set_bit, test_bit
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import add_scaled_row, copy_row
from emberkeep.kernels.hash_index import GOLDEN, hash_id, mix64

UNIFORM = 0
NORMAL = 1
# How many rows ahead of use a row is fetched: measured flat from 16 on at dim 16, falling off
# beyond at dim 64.
AHEAD = 16
# How many samples are worked on, feature by feature, before the next ones.
BLOCK = 128

_S32 = np.uint64(32)
_S8 = np.uint64(8)
_LOW = np.uint64(0xFFFFFFFF)
_TO_UNIT = np.float32(2.0**-24)


@inline
def _log(x: float) -> float:
    """Natural logarithm of x in (0, 1] to about 1e-15, by basic arithmetic alone."""
    exponent = 0.0
    while x < 0.70710678118654752:
        x *= 2.0
        exponent -= 1.0
    # log(x) = 2 artanh(s) with |s| <= 0.172
    s = (x - 1.0) / (x + 1.0)
    s2 = s * s
    series = 0.0
    for k in range(17, 0, -2):
        series = series * s2 + 1.0 / k
    return exponent * 0.69314718055994531 + 2.0 * s * series


@inline
def _normal_quantile(p: float) -> float:
    """The standard normal's quantile for p in (0, 1): Wichura's algorithm AS 241 (PPND7)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return (
            q
            * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179)
            / (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0)
        )
    r = np.sqrt(-_log(p if q < 0.0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        z = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) / (
            (0.12021132975 * r + 0.73700164250) * r + 1.0
        )
    else:
        r -= 5.0
        z = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) / (
            (0.012258202635 * r + 0.24197894225) * r + 1.0
        )
    return -z if q < 0.0 else z


@inline
def initial_row(
    key: np.uint64, kind: int, a: np.float32, b: np.float32, identity: int, out_D: F32
) -> None:
    """Writes the initial weight of one row: uniform on [a, b), or normal with mean a, std b."""
    row_key = mix64(key ^ hash_id(identity))
    columns = out_D.size
    if kind == UNIFORM:
        span = b - a
        for pair in range(columns >> 1):
            h = mix64(row_key + np.uint64(pair + 1) * GOLDEN)
            out_D[2 * pair] = a + span * (np.float32((h & _LOW) >> _S8) * _TO_UNIT)
            out_D[2 * pair + 1] = a + span * (np.float32((h >> _S32) >> _S8) * _TO_UNIT)
        if columns & 1:
            h = mix64(row_key + np.uint64((columns >> 1) + 1) * GOLDEN)
            out_D[columns - 1] = a + span * (np.float32((h & _LOW) >> _S8) * _TO_UNIT)
    else:
        for column in range(columns):
            h = mix64(row_key + np.uint64((column >> 1) + 1) * GOLDEN)
            half = h >> _S32 if column & 1 else h & _LOW
            z = _normal_quantile((np.float64(half) + 0.5) * 2.0**-32)
            out_D[column] = np.float32(np.float64(a) + np.float64(b) * z)


@kernel
def initial_rows(
    key: np.uint64, kind: int, a: np.float32, b: np.float32, ids: I64, out_RD: F32
) -> None:
    """Writes the initial weights of the rows named by `ids`."""
    for i in range(ids.size):
        initial_row(key, kind, a, b, ids[i], out_RD[i])


@kernel
def prepare(
    start: int,
    stop: int,
    keys_T: U64,
    kinds_T: I64,
    shapes_T2: F32,
    offsets_T: I64,
    ids: I64,
    rows: I64,
    touched: U64,
    dirty: U64,
    weight_RD: F32,
    fresh: I64,
) -> int:
    """Marks the rows at positions start..stop as touched and dirty before they are updated.

    Those that were never touched get their initial weight and are listed in `fresh`, from `start`
    on; returns how many they are. Their other planes are for the caller to fill.
    """
    found = 0
    for t in range(keys_T.size):
        for i in range(max(start, offsets_T[t]), min(stop, offsets_T[t + 1])):
            row = rows[i]
            if i + AHEAD < stop:
                prefetch_bit(touched, rows[i + AHEAD])
                prefetch_bit(dirty, rows[i + AHEAD])
            if not test_bit(touched, row):
                initial_row(
                    keys_T[t], kinds_T[t], shapes_T2[t, 0], shapes_T2[t, 1], ids[i], weight_RD[row]
                )
                set_bit(touched, row)
                fresh[start + found] = row
                found += 1
            set_bit(dirty, row)
    return found


@kernel
def pull(
    start: int,
    stop: int,
    keys_T: U64,
    kinds_T: I64,
    shapes_T2: F32,
    offsets_T: I64,
    ids: I64,
    rows: I64,
    touched: U64,
    weight_RD: F32,
    out_UD: F32,
) -> None:
    """Copies the weights at positions start..stop; an untouched row reads as its initial value."""
    for t in range(keys_T.size):
        for i in range(max(start, offsets_T[t]), min(stop, offsets_T[t + 1])):
            row = rows[i]
            if i + AHEAD < stop and rows[i + AHEAD] >= 0:
                prefetch_row(weight_RD, rows[i + AHEAD])
                prefetch_bit(touched, rows[i + AHEAD])
            if row >= 0 and test_bit(touched, row):
                copy_row(out_UD, i, weight_RD, row)
            else:
                initial_row(
                    keys_T[t], kinds_T[t], shapes_T2[t, 0], shapes_T2[t, 1], ids[i], out_UD[i]
                )


@kernel
def pull_bags(
    start: int,
    stop: int,
    keys_T: U64,
    kinds_T: I64,
    shapes_T2: F32,
    limits_T: I64,
    bases_T: I64,
    touched: U64,
    weight_RD: F32,
    ids_N: I64,
    tables_F: I64,
    firsts_F: I64,
    lengths_F: I64,
    ends_FB: I64,
    scales_N: F32,
    columns_F: I64,
    out_BFD: F32,
) -> int:
    """Bags of samples start..stop straight from the rows of fixed tables, on one shard.

    The same sums in the same order as `pull` and then `batch_rows.pool`. Returns the position of an
    id that is out of range, or -1.
    """
    dim = weight_RD.shape[1]
    scaled = scales_N.size > 0
    fresh_1D = np.empty((1, dim), np.float32)
    width = out_BFD.shape[1]
    out_GD = out_BFD.reshape(-1, dim)
    # Feature by feature, because then all that a table needs stays in registers; in blocks of
    # samples, because then the block's part of the output stays in the cache.
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        for f in range(tables_F.size):
            t = tables_F[f]
            limit = limits_T[t]
            base = bases_T[t]
            first = firsts_F[f]
            length = lengths_F[f]
            if length == 1 and not scaled:
                # What comes after the block's last samples are the first ones of the next feature.
                after = f + 1 if f + 1 < tables_F.size else 0
                ahead_first = firsts_F[after] + (block if after else end) - end
                ahead_limit = limits_T[tables_F[after]]
                ahead_base = bases_T[tables_F[after]]
                for b in range(block, end):
                    identity = ids_N[first + b]
                    if identity < 0 or identity >= limit:
                        return first + b
                    if b + AHEAD < end:
                        soon = ids_N[first + b + AHEAD]
                        if 0 <= soon < limit:
                            prefetch_row(weight_RD, base + soon)
                            prefetch_bit(touched, base + soon)
                    elif ahead_first + b + AHEAD < ids_N.size:
                        soon = ids_N[ahead_first + b + AHEAD]
                        if 0 <= soon < ahead_limit:
                            prefetch_row(weight_RD, ahead_base + soon)
                            prefetch_bit(touched, ahead_base + soon)
                    row = base + identity
                    bag = b * width + columns_F[f]
                    if test_bit(touched, row):
                        copy_row(out_GD, bag, weight_RD, row)
                    else:
                        initial_row(
                            keys_T[t],
                            kinds_T[t],
                            shapes_T2[t, 0],
                            shapes_T2[t, 1],
                            identity,
                            out_GD[bag],
                        )
                continue
            for b in range(block, end):
                if length >= 0:
                    low = first + b * length
                    high = low + length
                else:
                    low = first + (ends_FB[f, b - 1] if b > 0 else 0)
                    high = first + ends_FB[f, b]
                bag = b * width + columns_F[f]
                for d in range(dim):
                    out_GD[bag, d] = np.float32(0.0)
                for i in range(low, high):
                    identity = ids_N[i]
                    if identity < 0 or identity >= limit:
                        return i
                    # Looks past the bag into the next: any id that fits is one of this feature,
                    # or costs no more than a line fetched in vain.
                    if i + AHEAD < ids_N.size and 0 <= ids_N[i + AHEAD] < limit:
                        prefetch_row(weight_RD, base + ids_N[i + AHEAD])
                        prefetch_bit(touched, base + ids_N[i + AHEAD])
                    row = base + identity
                    scale = scales_N[i] if scaled else np.float32(1.0)
                    if test_bit(touched, row):
                        add_scaled_row(out_GD, bag, weight_RD, row, scale)
                    else:
                        initial_row(
                            keys_T[t],
                            kinds_T[t],
                            shapes_T2[t, 0],
                            shapes_T2[t, 1],
                            identity,
                            fresh_1D[0],
                        )
                        add_scaled_row(out_GD, bag, fresh_1D, 0, scale)
    return -1


write_prepare = writer(prepare)
write_pull = writer(pull)
write_pull_bags = writer(pull_bags)
