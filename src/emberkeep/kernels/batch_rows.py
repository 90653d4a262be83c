"""From the ids of a batch to its unique rows, to pooled outputs, and back to gradients.

Positions: `N` lookups lie table by table, within a table feature by feature, within a feature
sample by sample. `U` unique ids lie table by table, each table's in the order of first
occurrence. Every sum runs over lookups in lookup order, so no result depends on how the work was
cut into ranges.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, F64, I32, I64, U64, Bools
from emberkeep.kernels._intrinsics import prefetch_row
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import add_row, add_scaled_row, copy_row
from emberkeep.kernels.hash_index import GOLDEN

_ONE = np.uint64(1)
_EXPONENT = np.uint32(0x7F800000)


@kernel
def dedupe(
    first: int,
    last: int,
    ids_N: I64,
    offsets_T: I64,
    unique_N: I64,
    inverse_N: I32,
    counts_T: I64,
) -> None:
    """Finds the unique ids of tables first..last.

    The uniques of table t start at `offsets_T[t]` of `unique_N`; `inverse_N` counts from there.
    New ids and known ones take the same path, without a branch that depends on which it is: in
    skewed data that is a coin toss, and a wrong guess costs more than the rest of the loop.
    """
    longest = 0
    for t in range(first, last):
        longest = max(longest, offsets_T[t + 1] - offsets_T[t])
    size = 16
    while size < 4 * longest:
        size *= 2
    scratch = np.empty(size, np.int32)
    for t in range(first, last):
        start = offsets_T[t]
        stop = offsets_T[t + 1]
        size = 16
        shift = np.uint64(60)
        while size < 4 * (stop - start):
            size *= 2
            shift -= _ONE
        mask = np.uint64(size - 1)
        scratch[:size] = -1
        found = np.int32(0)
        for i in range(start, stop):
            identity = ids_N[i]
            at = (np.uint64(identity) * GOLDEN) >> shift
            u = scratch[at]
            unique_N[start + found] = identity  # the next free place: kept if the id is new
            number = found if u < 0 else u
            while unique_N[start + number] != identity:
                at = (at + _ONE) & mask
                u = scratch[at]
                number = found if u < 0 else u
            scratch[at] = number
            inverse_N[i] = number
            found = max(found, np.int32(number + 1))
        counts_T[t] = found


@kernel
def compact(unique_N: I64, offsets_T: I64, starts_T: I64, unique_U: I64) -> None:
    """Moves each table's uniques together: table t from `offsets_T[t]` to `starts_T[t]`."""
    for t in range(starts_T.size - 1):
        count = starts_T[t + 1] - starts_T[t]
        for i in range(count):
            unique_U[starts_T[t] + i] = unique_N[offsets_T[t] + i]


@kernel
def gather(
    start: int,
    stop: int,
    rows_UD: F32,
    inverse_N: I32,
    base: int,
    first: int,
    out_ND: F32,
) -> None:
    """Without pooling: the row of each lookup start..stop of a feature that begins at `first`."""
    for i in range(start, stop):
        copy_row(out_ND, i, rows_UD, base + inverse_N[first + i])


@kernel
def pool(
    start: int,
    stop: int,
    rows_UD: F32,
    inverse_N: I32,
    bases_F: I64,
    firsts_F: I64,
    lengths_F: I64,
    ends_FB: I64,
    scales_N: F32,
    columns_F: I64,
    out_BFD: F32,
) -> None:
    """Sums the rows of each bag of samples start..stop, times their scales where there are any.

    Feature f has bags of `lengths_F[f]` lookups each, or, where that is -1, bags that end at
    `ends_FB[f, b]`, counted from the feature's first lookup.
    """
    dim = rows_UD.shape[1]
    scaled = scales_N.size > 0
    width = out_BFD.shape[1]
    out_GD = out_BFD.reshape(-1, dim)
    for b in range(start, stop):
        for f in range(bases_F.size):
            base = bases_F[f]
            bag = b * width + columns_F[f]
            length = lengths_F[f]
            if length == 1 and not scaled:
                copy_row(out_GD, bag, rows_UD, base + inverse_N[firsts_F[f] + b])
                continue
            if length >= 0:
                low = firsts_F[f] + b * length
                high = low + length
            else:
                low = firsts_F[f] + (ends_FB[f, b - 1] if b > 0 else 0)
                high = firsts_F[f] + ends_FB[f, b]
            for d in range(dim):
                out_GD[bag, d] = np.float32(0.0)
            for i in range(low, high):
                scale = scales_N[i] if scaled else np.float32(1.0)
                add_scaled_row(out_GD, bag, rows_UD, base + inverse_N[i], scale)


@kernel
def pool_max(
    start: int,
    stop: int,
    rows_UD: F32,
    inverse_N: I32,
    bases_F: I64,
    firsts_F: I64,
    lengths_F: I64,
    ends_FB: I64,
    columns_F: I64,
    features: I64,
    out_BFD: F32,
    chosen_MBD: I32,
) -> None:
    """The largest value of each column over the rows of each bag of samples start..stop, 0 for an
    empty bag; of equal ones the first. `chosen_MBD` is its unique row, -1 for none, for each of
    `features`, the ones that are pooled so."""
    for m in range(features.size):
        f = features[m]
        for b in range(start, stop):
            if lengths_F[f] >= 0:
                low = firsts_F[f] + b * lengths_F[f]
                high = low + lengths_F[f]
            else:
                low = firsts_F[f] + (ends_FB[f, b - 1] if b > 0 else 0)
                high = firsts_F[f] + ends_FB[f, b]
            for d in range(rows_UD.shape[1]):
                best = np.float32(0.0)
                row = np.int64(-1)
                for i in range(low, high):
                    u = bases_F[f] + inverse_N[i]
                    if row < 0 or rows_UD[u, d] > best:
                        best = rows_UD[u, d]
                        row = u
                out_BFD[b, columns_F[f], d] = best
                chosen_MBD[m, b, d] = row


@kernel
def add_chosen(
    grads_GD: F32, columns_F: I64, width: int, features: I64, chosen_MBD: I32, out_UD: F32
) -> None:
    """Adds the gradient of each column of a bag to the row that gave it, in the order of bags."""
    for m in range(features.size):
        column = columns_F[features[m]]
        for b in range(chosen_MBD.shape[1]):
            for d in range(chosen_MBD.shape[2]):
                u = chosen_MBD[m, b, d]
                if u >= 0:
                    out_UD[u, d] += grads_GD[b * width + column, d]


@kernel
def mean_scales(ends_FB: I64, feature: int, first: int, batch: int, scales_N: F32) -> None:
    """Sets the scale of each lookup of a jagged feature to one over the length of its bag."""
    low = 0
    for b in range(batch):
        high = ends_FB[feature, b]
        for i in range(low, high):
            scales_N[first + i] = np.float32(1.0) / np.float32(high - low)
        low = high


@kernel
def aggregate(
    first: int,
    last: int,
    grads_GD: F32,
    inverse_N: I32,
    starts_T: I64,
    features_T: I64,
    firsts_F: I64,
    lengths_F: I64,
    ends_FB: I64,
    columns_F: I64,
    width: int,
    counts_F: I64,
    scales_N: F32,
    out_UD: F32,
    squares_T: F64,
) -> None:
    """Sums, for each unique row of tables first..last, the gradients of the bags it was in.

    Also the sum of the squares of each table's sums. A bag's gradient is row b * width + column
    of `grads_GD`. Lookups are visited in lookup order.
    """
    scaled = scales_N.size > 0
    for t in range(first, last):
        base = starts_T[t]
        out_UD[base : starts_T[t + 1]] = np.float32(0.0)
        for f in range(features_T[t], features_T[t + 1]):
            low = firsts_F[f]
            length = lengths_F[f]
            column = columns_F[f]
            if length == 1 and not scaled:
                for b in range(counts_F[f]):
                    if b + 8 < counts_F[f]:
                        prefetch_row(grads_GD, (b + 8) * width + column)
                    u = base + inverse_N[low + b]
                    add_row(out_UD, u, grads_GD, b * width + column)
                continue
            for b in range(counts_F[f]):
                high = low + length if length >= 0 else firsts_F[f] + ends_FB[f, b]
                bag = b * width + column
                for i in range(low, high):
                    u = base + inverse_N[i]
                    scale = scales_N[i] if scaled else np.float32(1.0)
                    add_scaled_row(out_UD, u, grads_GD, bag, scale)
                low = high
        squares_T[t] = sum_of_squares(out_UD[base : starts_T[t + 1]].reshape(-1))


@inline
def sum_of_squares(values: F32) -> float:
    """In float64, by eight sums side by side: one sum alone would wait for each addition."""
    a = b = c = d = e = f = g = h = 0.0
    whole = values.size & ~7
    for i in range(0, whole, 8):
        a += np.float64(values[i]) * np.float64(values[i])
        b += np.float64(values[i + 1]) * np.float64(values[i + 1])
        c += np.float64(values[i + 2]) * np.float64(values[i + 2])
        d += np.float64(values[i + 3]) * np.float64(values[i + 3])
        e += np.float64(values[i + 4]) * np.float64(values[i + 4])
        f += np.float64(values[i + 5]) * np.float64(values[i + 5])
        g += np.float64(values[i + 6]) * np.float64(values[i + 6])
        h += np.float64(values[i + 7]) * np.float64(values[i + 7])
    for i in range(whole, values.size):
        a += np.float64(values[i]) * np.float64(values[i])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@kernel
def scale_gradients(
    start: int,
    stop: int,
    grads_GD: F32,
    rows_UD: F32,
    inverse_N: I32,
    bases_F: I64,
    firsts_F: I64,
    lengths_F: I64,
    ends_FB: I64,
    columns_F: I64,
    width: int,
    out_N: F32,
) -> None:
    """The gradient of the scale of each lookup of samples start..stop: its row · its bag's."""
    for f in range(bases_F.size):
        for b in range(start, stop):
            if lengths_F[f] >= 0:
                low = firsts_F[f] + b * lengths_F[f]
                high = low + lengths_F[f]
            else:
                low = firsts_F[f] + (ends_FB[f, b - 1] if b > 0 else 0)
                high = firsts_F[f] + ends_FB[f, b]
            for i in range(low, high):
                u = bases_F[f] + inverse_N[i]
                total = np.float32(0.0)
                for d in range(rows_UD.shape[1]):
                    total += grads_GD[b * width + columns_F[f], d] * rows_UD[u, d]
                out_N[i] = total


@kernel
def first_nonfinite(
    start: int,
    stop: int,
    values_UD: F32,
) -> int:
    """The first row of start..stop that holds a NaN or an infinity, or -1."""
    words = values_UD[start:stop].reshape(-1).view(np.uint32)
    worst = np.uint32(0)
    for i in range(words.size):
        worst = max(worst, words[i] & _EXPONENT)
    if worst < _EXPONENT:
        return -1
    for i in range(words.size):
        if words[i] & _EXPONENT == _EXPONENT:
            return start + i // values_UD.shape[1]
    return -1


@kernel
def fixed_rows(
    ids: I64, offsets_T: I64, limits_T: I64, bases_T: I64, stride: int, rows: I64
) -> int:
    """Fills rows of fixed tables with base + id div stride; returns a position out of range or -1.

    Tables whose limit is negative are dynamic and passed over.
    """
    for t in range(limits_T.size):
        limit = limits_T[t]
        if limit < 0:
            continue
        for i in range(offsets_T[t], offsets_T[t + 1]):
            identity = ids[i]
            if identity < 0 or identity >= limit:
                return i
            rows[i] = bases_T[t] + (identity // stride if stride > 1 else identity)
    return -1


@kernel
def set_bits(bits: U64, rows: I64) -> None:
    for i in range(rows.size):
        bits[rows[i] >> 6] |= _ONE << np.uint64(rows[i] & 63)


@kernel
def clear_bits(bits: U64, rows: I64) -> None:
    for i in range(rows.size):
        bits[rows[i] >> 6] &= ~(_ONE << np.uint64(rows[i] & 63))


@kernel
def test_bits(bits: U64, rows: I64, out: Bools) -> None:
    for i in range(rows.size):
        out[i] = (bits[rows[i] >> 6] >> np.uint64(rows[i] & 63)) & _ONE


@inline
def count_ones(word: np.uint64) -> np.int64:
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + (
        (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    )
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def count_bits(bits: U64, first_word: int, last_word: int) -> int:
    total = np.int64(0)
    for w in range(first_word, last_word):
        total += count_ones(bits[w])
    return int(total)


@kernel
def list_bits(bits: U64, first_word: int, last_word: int, out: I64) -> int:
    """Writes the rows whose bits are set in words first..last, ascending; returns how many."""
    found = 0
    for w in range(first_word, last_word):
        word = bits[w]
        row = w << 6
        while word:
            low = word & (~word + _ONE)
            out[found] = row + count_ones(low - _ONE)
            found += 1
            word ^= low
    return found


@kernel
def scatter_add(values_ND: F32, sources: I64, targets: I64, out_UD: F32) -> None:
    """Adds value sources[i] to row targets[i], in the order of i."""
    for i in range(sources.size):
        add_row(out_UD, targets[i], values_ND, sources[i])


write_dedupe = writer(dedupe)
write_gather = writer(gather)
write_pool = writer(pool)
write_pool_max = writer(pool_max)
write_aggregate = writer(aggregate)
write_scale_gradients = writer(scale_gradients)
write_first_nonfinite = writer(first_nonfinite)
