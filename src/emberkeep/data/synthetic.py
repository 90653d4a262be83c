"""Synthetic click logs with Criteo's shape and a planted model.

Labels are drawn from a hidden logistic model over the ids and the dense values, so AUC means
something: its ceiling is known (`Synthetic.bayes_auc`), and most of it is out of reach without
embeddings. Nothing is stored: effects and hidden vectors of ids are hashes of (seed, field, id).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from emberkeep._types import F32, F64, U64
from emberkeep.data.accuracy import auc
from emberkeep.data.sources import Batch, Ids, Mark, whole_number
from emberkeep.errors import ConfigError
from emberkeep.kernels.sample_draws import draw_ids, draw_samples

Skew = Literal["criteo", "retail", "uniform"] | float
"""A preset, or the exponent of a Zipf distribution (0 is uniform)."""

KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical fields in Criteo's Kaggle data."""

DENSE = 13
CLICK_RATE = 0.25

# Standard deviations of the three parts of the planted logit: effects of single ids,
# interactions between ids, dense values. The dense part alone is a weak model on purpose.
_PART_DEVIATIONS = (1.2, 0.9, 0.6)
_CALIBRATION_SAMPLES = 32_768
_MOST_ROWS = 1 << 40


def field_rows(rows_total: int) -> tuple[int, ...]:
    """Rows of 26 fields in Kaggle's proportions, about `rows_total` together.

    Small fields keep at least four rows, or all where Kaggle has fewer: a field with a single
    value would say nothing.
    """
    if rows_total < 26 * 4:
        raise ConfigError(f"rows_total must be {26 * 4} or more, not {rows_total}")
    scale = rows_total / sum(KAGGLE_ROWS)
    return tuple(max(min(rows, 4), round(rows * scale)) for rows in KAGGLE_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Samples drawn from (seed, sample number) alone: every reader sees the same ones.

    Features are named `C1` to `C26` as in Criteo's data, their ids are 0..rows-1; dense values are
    non-negative, as logarithms of counts are. About a quarter of the labels are 1.
    """

    samples: int | None = None
    """How many there are; None: no end."""
    rows_total: int = sum(KAGGLE_ROWS)
    """Rows of all fields together; the fields share them in Kaggle's proportions."""
    skew: Skew = "criteo"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "rows_total", "seed"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, whole_number(name, given))
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"samples must be 1 or more, or None, not {self.samples}")
        for rows in field_rows(self.rows_total):
            _curve(rows, self.skew)

    @property
    def rows(self) -> dict[str, int]:
        """Feature → number of rows its table needs."""
        return {f"C{f + 1}": rows for f, rows in enumerate(field_rows(self.rows_total))}

    def fingerprint(self) -> str:
        skew = self.skew if isinstance(self.skew, str) else float(self.skew)
        text = json.dumps([self.rows_total, skew, self.seed])
        return f"synthetic:{xxhash.xxh3_64_hexdigest(text.encode())}"

    def count(self) -> int | None:
        return self.samples

    def open(self, position: int, mark: Mark | None = None) -> _SyntheticCursor:
        return _SyntheticCursor(self, position)

    def batch(self, start: int, count: int) -> Batch:
        """Samples start to start + count."""
        drawn = _draw(self, start, count)
        labels = drawn.chance_B < self._probability(drawn)
        return Batch(
            dense=drawn.dense_BN,
            ids={f"C{f + 1}": ids for f, ids in enumerate(drawn.ids_FB)},
            labels=labels.astype(np.float32),
        )

    def probabilities(self, start: int, count: int) -> F64:
        """The true click probabilities of samples start to start + count."""
        return self._probability(_draw(self, start, count))

    def bayes_auc(self, samples: int = 200_000, *, start: int = 0) -> float:
        """AUC of the true probabilities over so many samples: no model can expect more."""
        drawn = _draw(self, start, samples)
        probability = self._probability(drawn)
        return auc((drawn.chance_B < probability).astype(np.float64), probability)

    def _probability(self, drawn: _Drawn) -> F64:
        scales, bias = _calibration(self.rows_total, self.skew, self.seed)
        return _logistic(_logits(drawn.parts_BP, scales) + bias)


class _SyntheticCursor:
    def __init__(self, source: Synthetic, position: int) -> None:
        self._source = source
        self._position = position

    def _available(self, count: int) -> int:
        if self._source.samples is None:
            return count
        return max(min(count, self._source.samples - self._position), 0)

    def read(self, count: int) -> Batch:
        batch = self._source.batch(self._position, self._available(count))
        self._position += len(batch)
        return batch

    def skip(self, count: int) -> int:
        skipped = self._available(count)
        self._position += skipped
        return skipped

    def mark(self) -> Mark:
        return {}

    def close(self) -> None:
        pass


def skewed_ids(rows: int, count: int, skew: Skew = "criteo", seed: int = 0, start: int = 0) -> Ids:
    """Ids 0..rows-1 of accesses start to start + count of an endless skewed stream.

    Access a depends on (rows, skew, seed, a) alone. Hot ids lie anywhere in the range: a bijection
    that depends on the seed scatters them.
    """
    ids = np.empty(count, np.int64)
    draw_ids(_key(seed), start, _curve(rows, skew), _shuffle(rows, seed, 0), ids)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    ids_FB: Ids
    dense_BN: F32
    parts_BP: F64
    chance_B: F64


def _draw(source: Synthetic, start: int, count: int) -> _Drawn:
    return _draw_from(source.rows_total, source.skew, source.seed, start, count)


def _draw_from(rows_total: int, skew: Skew, seed: int, start: int, count: int) -> _Drawn:
    curves_FC, shuffles_FW, weights_N = _parameters(rows_total, skew, seed)
    fields = len(KAGGLE_ROWS)
    drawn = _Drawn(
        ids_FB=np.empty((fields, count), np.int64),
        dense_BN=np.empty((count, DENSE), np.float32),
        parts_BP=np.empty((count, len(_PART_DEVIATIONS)), np.float64),
        chance_B=np.empty(count, np.float64),
    )
    draw_samples(
        _key(seed), start, curves_FC, shuffles_FW, weights_N,
        drawn.ids_FB, drawn.dense_BN, drawn.parts_BP, drawn.chance_B,
    )  # fmt: skip
    return drawn


@functools.lru_cache(maxsize=16)
def _parameters(rows_total: int, skew: Skew, seed: int) -> tuple[F64, U64, F64]:
    rows = field_rows(rows_total)
    curves = np.stack([_curve(r, skew) for r in rows])
    shuffles = np.stack([_shuffle(r, seed, f) for f, r in enumerate(rows)])
    words = _words(seed, "dense", DENSE)
    weights = words.astype(np.float64) / 2.0**63 - 1.0
    return curves, shuffles, weights


@functools.lru_cache(maxsize=16)
def _calibration(rows_total: int, skew: Skew, seed: int) -> tuple[F64, float]:
    """Scales that give the parts their deviations, and the bias that gives the click rate.

    Hashed effects of a few hot ids decide how large a part comes out; without this step one seed
    would plant a strong model and the next a weak one. It is a function of the same parameters
    as the samples, so it costs no reproducibility.
    """
    parts = _draw_from(rows_total, skew, seed, 0, _CALIBRATION_SAMPLES).parts_BP
    scales = np.asarray(_PART_DEVIATIONS) / np.maximum(parts.std(axis=0), 1e-9)
    logits = _logits(parts, scales)
    low, high = -logits.max() - 10.0, -logits.min() + 10.0
    for _ in range(60):
        bias = (low + high) / 2.0
        if _logistic(logits + bias).mean() < CLICK_RATE:
            low = bias
        else:
            high = bias
    return scales, float(bias)


def _logits(parts_BP: F64, scales: F64) -> F64:
    # Term by term: a matrix product may round differently for another number of samples.
    effects, pairs, dense = parts_BP.T
    logits: F64 = effects * scales[0] + pairs * scales[1] + dense * scales[2]
    return logits


def _logistic(logits: F64) -> F64:
    probability: F64 = 1.0 / (1.0 + np.exp(-logits))
    return probability


def access_shares(rows: int, ranks: F64, skew: Skew = "criteo") -> F64:
    """The share of all accesses that go to so many of the most used rows, for each of `ranks`."""
    low, span, power, shift = _curve(rows, skew)
    places = np.maximum(np.asarray(ranks, np.float64) + shift, 1e-9)  # a curve may start above 0
    shares: F64 = np.clip((places ** (1.0 / power) - low) / span, 0.0, 1.0)
    return shares


def _curve(rows: int, skew: Skew) -> F64:
    """(low, span, power, shift): the rank of u in [0, 1) is (low + u·span)^power − shift.

    That is the inverse of a density proportional to (rank + shift)^−exponent.

    - A Zipf exponent s: density (rank + 1)^−s.
    - `criteo`: exponent 1.33, flattened over the first 38 ranks. Of the ids *seen* in 2 million
      samples of a field with millions of rows, the top 1% take 73% of the accesses, the top 10%
      take 89%, and 70% of the seen ids are seen once, which is what real Kaggle rows show.
    - `retail`: by *share of the table*, so the same at every size from some thousand rows up. The
      top 1% of the rows take 95.7% of the accesses, the top 0.1% take 89.5% (both as published),
      the top 0.05% take 86.5% (published: 85.7%).
    """
    if not 1 <= rows <= _MOST_ROWS:
        raise ConfigError(f"rows must lie between 1 and {_MOST_ROWS}, not {rows}")
    if skew == "retail":
        exponent, first, last, shift = 1.327, 1.37e-6 * rows, float(rows), 0.0
    else:
        exponent, flat = _zipf(skew)
        first, last, shift = flat + 1.0, flat + 1.0 + rows, flat + 1.0
    if abs(exponent - 1.0) < 1e-6:
        exponent = 1.0 + 1e-6  # the closed form has a gap at 1; beside it the curve is the same
    low, high = first ** (1.0 - exponent), last ** (1.0 - exponent)
    return np.array([low, high - low, 1.0 / (1.0 - exponent), shift])


def _zipf(skew: Skew) -> tuple[float, float]:
    """The exponent, and over how many of the first ranks the curve is flattened."""
    if skew == "criteo":
        return 1.33, 38.0
    if skew == "uniform":
        return 0.0, 0.0
    if isinstance(skew, int | float) and 0.0 <= skew <= 10.0:
        return float(skew), 0.0
    raise ConfigError(
        f"skew must be 'criteo', 'retail', 'uniform' or a Zipf exponent from 0 to 10, not {skew!r}"
    )


def _shuffle(rows: int, seed: int, field: int) -> U64:
    """(rows, mask, fold, odd, add, odd, add, salt): a bijection of 0..rows-1; a salt."""
    bits = max((rows - 1).bit_length(), 1)
    words = _words(seed, f"field {field}", 5)
    words[0] |= np.uint64(1)
    words[2] |= np.uint64(1)
    head = np.array([rows, (1 << bits) - 1, (bits + 1) // 2], np.uint64)
    return np.concatenate([head, words])


def _key(seed: int) -> np.uint64:
    return np.uint64(_words(seed, "samples", 1)[0])


def _words(seed: int, name: str, count: int) -> U64:
    words = [xxhash.xxh3_64_intdigest(f"{seed}/{name}/{i}".encode()) for i in range(count)]
    return np.array(words, np.uint64)
