"""Synthetic samples: skewed ids, dense values, and the parts of the planted model.

Counter-based throughout: everything about sample `s` follows from (key, s), so any range of
samples is drawn on its own, in any order, and is the same however it is cut.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, F64, I64, U64
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.hash_index import GOLDEN, mix64

LATENTS = 4
"""Width of the hidden vector of an id: four 16-bit pieces of one hash."""

_S11 = np.uint64(11)
_S16 = np.uint64(16)
_S32 = np.uint64(32)
_S48 = np.uint64(48)
_LOW16 = np.uint64(0xFFFF)
_UNIT = 2.0**-53
_PIECE = 2.0**-15
_CENTRE = 1.0 - 2.0**-16
_DENSE_SALT = np.uint64(0xD1B54A32D192ED03)
_LABEL_SALT = np.uint64(0x8CB92BA72F3D8DD7)


@inline
def _sample_key(key: np.uint64, sample: int) -> np.uint64:
    return mix64(key + np.uint64(sample) * GOLDEN)


@inline
def _piece(word: np.uint64, shift: np.uint64) -> float:
    """Sixteen bits of a word as a value in (-1, 1), symmetric about zero."""
    return np.float64((word >> shift) & _LOW16) * _PIECE - _CENTRE


@inline
def _bell(word: np.uint64) -> float:
    """The sum of four uniforms scaled to variance 1: nearly normal, and no logarithm is needed."""
    total = (
        _piece(word, np.uint64(0)) + _piece(word, _S16) + _piece(word, _S32) + _piece(word, _S48)
    )
    return total * 0.8660254037844386


@inline
def _draw_id(word: np.uint64, curve: F64, shuffle: U64) -> np.int64:
    """A rank by the inverse of the skew's distribution, then a bijection of 0..rows-1."""
    u = np.float64(word >> _S11) * _UNIT
    rows = shuffle[0]
    rank = np.int64((curve[0] + u * curve[1]) ** curve[2] - curve[3])
    rank = min(max(rank, np.int64(0)), np.int64(rows) - np.int64(1))
    mask = shuffle[1]
    fold = shuffle[2]
    x = np.uint64(rank)
    # Each line is invertible on `mask`+1 values; walking on until the value lies below `rows`
    # makes it a bijection of exactly these.
    while True:
        x = (x * shuffle[3] + shuffle[4]) & mask
        x ^= x >> fold
        x = (x * shuffle[5] + shuffle[6]) & mask
        x ^= x >> fold
        if x < rows:
            return np.int64(x)


@kernel
def draw_ids(key: np.uint64, start: int, curve: F64, shuffle: U64, ids: I64) -> None:
    """Ids of samples start, start+1, … of a single field."""
    for i in range(ids.size):
        ids[i] = _draw_id(mix64(_sample_key(key, start + i) + shuffle[7]), curve, shuffle)


@kernel
def draw_samples(
    key: np.uint64,
    start: int,
    curves_FC: F64,
    shuffles_FW: U64,
    weights_N: F64,
    ids_FB: I64,
    dense_BN: F32,
    parts_BP: F64,
    chance_B: F64,
) -> None:
    """Draws samples start, start+1, …: ids, dense values, and what decides the label.

    `parts_BP` receives the three terms of the planted logit, not yet scaled: the effects of the
    ids, the interactions of their hidden vectors over all pairs of fields, and the dense values.
    The label is 1 where `chance_B` lies below the click probability.
    """
    fields, samples = ids_FB.shape
    keys_B = np.empty(samples, np.uint64)
    sums_BK = np.zeros((samples, LATENTS), np.float64)
    squares_B = np.zeros(samples, np.float64)
    for i in range(samples):
        keys_B[i] = _sample_key(key, start + i)
        parts_BP[i, 0] = 0.0
    for f in range(fields):
        curve = curves_FC[f]
        shuffle = shuffles_FW[f]
        salt = shuffle[7]
        for i in range(samples):
            identity = _draw_id(mix64(keys_B[i] + salt), curve, shuffle)
            ids_FB[f, i] = identity
            hidden = mix64(np.uint64(identity) * GOLDEN + salt)
            a = _piece(hidden, np.uint64(0))
            b = _piece(hidden, _S16)
            c = _piece(hidden, _S32)
            d = _piece(hidden, _S48)
            sums_BK[i, 0] += a
            sums_BK[i, 1] += b
            sums_BK[i, 2] += c
            sums_BK[i, 3] += d
            squares_B[i] += a * a + b * b + c * c + d * d
            parts_BP[i, 0] += _bell(mix64(hidden))
    for i in range(samples):
        pairs = -squares_B[i]
        for k in range(LATENTS):
            pairs += sums_BK[i, k] * sums_BK[i, k]
        parts_BP[i, 1] = 0.5 * pairs
        dense_key = mix64(keys_B[i] ^ _DENSE_SALT)
        total = 0.0
        for j in range(weights_N.size):
            # Shaped like the logarithm of a count: never negative, zero for about a fifth.
            value = max(1.0 + 1.2 * _bell(mix64(dense_key + np.uint64(j) * GOLDEN)), 0.0)
            dense_BN[i, j] = value
            total += weights_N[j] * value
        parts_BP[i, 2] = total
        chance_B[i] = np.float64(mix64(keys_B[i] ^ _LABEL_SALT) >> _S11) * _UNIT
