"""One batch's way through the tables of one slab: ids → unique rows → bags, and back.

A `Layout` is fixed when the model is built; a `Lookup` lives from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from emberkeep._types import F32, I32, I64, Bools, RowIds
from emberkeep.errors import ConfigError
from emberkeep.kernels import batch_rows
from emberkeep.rows.push import Writer
from emberkeep.runtime.pool import Job, Pool, spans
from emberkeep.tables import Table

_NO_SCALES: F32 = np.empty(0, np.float32)
_NO_ENDS: I64 = np.empty((0, 0), np.int64)
_NO_MAXIMA: I64 = np.empty(0, np.int64)
_NONE_CHOSEN: I32 = np.empty((0, 0, 0), np.int32)
# Ranges of fewer samples or rows than this are not worth a thread.
_LEAST = 128


@dataclass(frozen=True, slots=True)
class Feature:
    """A named input: the table that its ids belong to and the output column that it fills."""

    name: str
    table: int
    column: int
    pooling: str
    padding: int | None = None

    @property
    def mean(self) -> bool:
        return self.pooling == "mean"


class Layout:
    """The tables of one slab and the features that look rows up in them."""

    def __init__(self, tables: Sequence[Table], columns: dict[str, int], width: int) -> None:
        self.tables = tuple(tables)
        self.width = width
        self.features = tuple(
            Feature(name, t, columns[name], table.pooling, table.padding_idx)
            for t, table in enumerate(self.tables)
            for name in table.features
        )
        self.features_T: I64 = np.cumsum([0, *(len(t.features) for t in self.tables)])
        self.columns_F: I64 = np.array([f.column for f in self.features], np.int64)
        self.tables_F: I64 = np.array([f.table for f in self.features], np.int64)
        self._one_hot: tuple[int, I64, I64, I64, I64] | None = None

    def one_hot(self, batch: int) -> tuple[int, I64, I64, I64, I64]:
        """Where lookups lie when every bag has one id; kept for the next batch of that size."""
        if self._one_hot is None or self._one_hot[0] != batch:
            firsts = np.arange(len(self.features) + 1, dtype=np.int64) * batch
            ones = np.ones(len(self.features), np.int64)
            self._one_hot = batch, firsts[:-1], firsts[self.features_T], ones, ones * batch
        return self._one_hot


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of `count` bags of one feature: `length` each, or (length -1) ending at `ends`.

    `kept` says which of the ids that were given these are, where padding was left out.
    """

    ids: I64
    count: int
    length: int
    ends: I64 | None = None
    scales: F32 | None = None
    shape: tuple[int, ...] = ()
    kept: Bools | None = None

    def without(self, padding: int | None) -> Bags:
        """The same bags without an id that stands for nothing."""
        if padding is None or not (kept := self.ids != padding).size or kept.all():
            return self
        before = np.zeros(kept.size + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        ends = self.ends
        if ends is None:
            ends = np.arange(1, self.count + 1, dtype=np.int64) * self.length
        scales = None if self.scales is None else self.scales[kept]
        return replace(
            self, ids=self.ids[kept], length=-1, ends=before[ends], scales=scales, kept=kept
        )


class Lookup:
    """The lookups of one batch, its unique rows, and what each bag is made of.

    With `batch=None` nothing is pooled: every lookup is a bag of its own, and the output is one
    row per lookup.
    Sums run in lookup order everywhere: results do not depend on the number of threads.
    `trained` says that gradients are expected: unique ids are then found beside other work.
    """

    def __init__(self, layout: Layout, bags: Sequence[Bags], batch: int | None, pool: Pool) -> None:
        self.layout = layout
        self.bags: Sequence[Bags] = bags
        self.batch = batch or 0
        self.pool = pool
        self.ids_N = np.concatenate([bag.ids for bag in bags])
        counts = np.array([bag.ids.size for bag in bags], np.int64)
        firsts = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts, out=firsts[1:])
        self.firsts_F = firsts[:-1]
        self.offsets_T = firsts[layout.features_T]
        self.lengths_F: I64 = np.array([bag.length for bag in bags], np.int64)
        self.counts_F: I64 = np.array([bag.count for bag in bags], np.int64)
        # A bag is row b * width + column of the output.
        self.columns_F, self.width = (
            (self.firsts_F, 1) if batch is None else (layout.columns_F, layout.width)
        )
        self.ends_FB = _NO_ENDS
        if (self.lengths_F < 0).any():
            self.ends_FB = np.zeros((len(bags), self.batch), np.int64)
            for f, bag in enumerate(bags):
                if bag.ends is not None:
                    self.ends_FB[f] = bag.ends
        self.scales_N = self._scales(bags)
        self.trained = False
        self._unique: tuple[RowIds, I32] | None = None
        # A bag of one id has the row itself, however it is pooled.
        self.maxima = np.array(
            [
                f
                for f, (feature, bag) in enumerate(zip(layout.features, bags, strict=True))
                if feature.pooling == "max" and bag.length != 1 and batch is not None
            ],
            np.int64,
        )
        self._chosen_MBD = _NONE_CHOSEN

    @classmethod
    def one_hot(cls, layout: Layout, ids: Sequence[I64], batch: int, pool: Pool) -> Lookup:
        """The usual case, made quick: every bag has one id and no weight."""
        self = cls.__new__(cls)
        self.layout, self.bags, self.batch, self.pool = layout, (), batch, pool
        self.ids_N = np.concatenate(ids)
        _, self.firsts_F, self.offsets_T, self.lengths_F, self.counts_F = layout.one_hot(batch)
        self.columns_F, self.width = layout.columns_F, layout.width
        self.ends_FB, self.scales_N = _NO_ENDS, _NO_SCALES
        self.trained, self._unique = False, None
        self.maxima, self._chosen_MBD = _NO_MAXIMA, _NONE_CHOSEN
        return self

    def _scales(self, bags: Sequence[Bags]) -> F32:
        """A factor for each lookup: its per-sample weight, or one over its bag's length."""
        if not any(
            bag.scales is not None or (feature.mean and bag.length != 1)
            for feature, bag in zip(self.layout.features, bags, strict=True)
        ):
            return _NO_SCALES
        scales_N = np.ones(self.ids_N.size, np.float32)
        for f, (feature, bag) in enumerate(zip(self.layout.features, bags, strict=True)):
            first = int(self.firsts_F[f])
            part = slice(first, first + bag.ids.size)
            if bag.scales is not None:
                if feature.pooling != "sum":
                    raise ConfigError(
                        f"feature {feature.name!r}: per-sample weights need pooling='sum'; a "
                        f"{feature.pooling} of weighted rows is not defined"
                    )
                scales_N[part] = bag.scales
            elif feature.mean and bag.length > 1:
                scales_N[part] = np.float32(1.0) / np.float32(bag.length)
            elif feature.mean and bag.length < 0:
                batch_rows.mean_scales(self.ends_FB, f, first, self.batch, scales_N)
        return scales_N

    @property
    def wanted(self) -> RowIds:
        """The unique ids, found when they are first asked for."""
        return self._deduped()[0]

    @property
    def nothing(self) -> RowIds:
        """A request for no row of any table."""
        return RowIds(np.empty(0, np.int64), np.zeros(len(self.layout.tables) + 1, np.int64))

    @property
    def inverse_N(self) -> I32:
        """For each lookup the number of its row among the unique rows of its table."""
        return self._deduped()[1]

    @property
    def bases_F(self) -> I64:
        """For each feature the number of its table's first unique row."""
        bases: I64 = self.wanted.offsets[self.layout.tables_F]
        return bases

    def _deduped(self) -> tuple[RowIds, I32]:
        if self._unique is None:
            self._unique = unique_ids(self.ids_N, self.offsets_T, self.pool)
        return self._unique

    def pooled(self, rows_UD: F32, out_BFD: F32) -> None:
        """Fills this slab's columns of the output with the sum of each bag's rows."""
        self._over(
            self.batch, batch_rows.write_pool, rows_UD, self.inverse_N, self.bases_F, self.firsts_F,
            self.lengths_F, self.ends_FB, self.scales_N, self.columns_F, out_BFD,
        )  # fmt: skip
        if self.maxima.size:
            shape = self.maxima.size, self.batch, rows_UD.shape[1]
            self._chosen_MBD = np.empty(shape, np.int32)
            self._over(
                self.batch, batch_rows.write_pool_max, rows_UD, self.inverse_N, self.bases_F,
                self.firsts_F, self.lengths_F, self.ends_FB, self.columns_F, self.maxima, out_BFD,
                self._chosen_MBD,
            )  # fmt: skip

    def gathered(self, rows_UD: F32, feature: int, out_ND: F32) -> None:
        """Without pooling: the row of each lookup of one feature."""
        base, first = int(self.bases_F[feature]), int(self.firsts_F[feature])
        self._over(
            out_ND.shape[0], batch_rows.write_gather, rows_UD, self.inverse_N, base, first, out_ND
        )

    def gradients(self, grads_GD: F32) -> tuple[F32, float]:
        """Each unique row's gradient, summed over its bags, and the square norm of them all."""
        wanted, inverse_N = self._deduped()
        out_UD = np.empty((wanted.ids.size, grads_GD.shape[1]), np.float32)
        squares_T = np.empty(len(self.layout.tables), np.float64)
        counts_F = self.counts_F
        if self.maxima.size:  # their bags give nothing to all rows alike
            counts_F = counts_F.copy()
            counts_F[self.maxima] = 0
        args = (
            grads_GD, inverse_N, wanted.offsets, self.layout.features_T, self.firsts_F,
            self.lengths_F, self.ends_FB, self.columns_F, self.width, counts_F,
            self.scales_N, out_UD, squares_T,
        )  # fmt: skip
        parts = table_spans(self.offsets_T, self.pool.threads)
        self.pool.together(Job(batch_rows.write_aggregate, parts, args))
        if not self.maxima.size:
            return out_UD, float(squares_T.sum())
        batch_rows.add_chosen(
            grads_GD, self.columns_F, self.width, self.maxima, self._chosen_MBD, out_UD
        )
        return out_UD, square_norm(out_UD)

    def scale_gradients(self, grads_GD: F32, rows_UD: F32) -> F32:
        """The gradient of each lookup's per-sample weight."""
        out_N = np.empty(self.ids_N.size, np.float32)
        self._over(
            self.batch, batch_rows.write_scale_gradients, grads_GD, rows_UD, self.inverse_N,
            self.bases_F, self.firsts_F, self.lengths_F, self.ends_FB, self.columns_F, self.width,
            out_N,
        )  # fmt: skip
        return out_N

    def over_samples(self, write: Writer, *args: Any) -> list[int]:
        """Runs a kernel over ranges of samples; its results."""
        job = Job(write, spans(self.batch, self.pool.threads, _LEAST), args)
        if not self.trained or self._unique is not None:
            return self.pool.together(job)[0]
        search = _Search(self.ids_N, self.offsets_T, self.pool)
        results, _ = self.pool.together(job, search.job)
        self._unique = search.found()
        return results

    def _over(self, count: int, write: Writer, *args: Any) -> None:
        self.pool.together(Job(write, spans(count, self.pool.threads, _LEAST), args))


def square_norm(rows_UD: F32) -> float:
    return float(np.square(rows_UD, dtype=np.float64).sum())


class _Search:
    """The search for the unique ids of each table: a job that may run beside another."""

    def __init__(self, ids_N: I64, offsets_T: I64, pool: Pool) -> None:
        self._offsets_T = offsets_T
        self._staged: I64 = np.empty(ids_N.size, np.int64)
        self._inverse_N: I32 = np.empty(ids_N.size, np.int32)
        self._counts_T: I64 = np.empty(offsets_T.size - 1, np.int64)
        self.job = Job(
            batch_rows.write_dedupe,
            table_spans(offsets_T, pool.threads),
            (ids_N, offsets_T, self._staged, self._inverse_N, self._counts_T),
        )

    def found(self) -> tuple[RowIds, I32]:
        starts_T = np.zeros(self._offsets_T.size, np.int64)
        np.cumsum(self._counts_T, out=starts_T[1:])
        unique = np.empty(int(starts_T[-1]), np.int64)
        batch_rows.compact(self._staged, self._offsets_T, starts_T, unique)
        return RowIds(unique, starts_T), self._inverse_N


def unique_ids(ids_N: I64, offsets_T: I64, pool: Pool) -> tuple[RowIds, I32]:
    """The unique ids of each table, and for each lookup the number of its id among them."""
    search = _Search(ids_N, offsets_T, pool)
    pool.together(search.job)
    return search.found()


def table_spans(offsets_T: I64, parts: int) -> list[tuple[int, int]]:
    """Cuts the tables into at most `parts` ranges with about equally many lookups each."""
    total = int(offsets_T[-1])
    parts = max(1, min(parts, total // _LEAST))
    marks = [total * i // parts for i in range(1, parts)]
    cuts = np.searchsorted(offsets_T, marks).tolist()
    bounds = sorted({0, *cuts, offsets_T.size - 1})
    return list(pairwise(bounds))


def merge(
    first: RowIds, first_UD: F32, second: RowIds, second_UD: F32, pool: Pool
) -> tuple[RowIds, F32]:
    """The sum of two sets of row gradients of one slab."""
    tables = first.offsets.size - 1
    parts = []
    sources = []
    for t in range(tables):
        for ids, base in ((first, 0), (second, first.ids.size)):
            low, high = ids.offsets[t], ids.offsets[t + 1]
            parts.append(ids.ids[low:high])
            sources.append(np.arange(base + low, base + high))
    ids_N = np.concatenate(parts)
    offsets_T = first.offsets + second.offsets
    unique, inverse_N = unique_ids(ids_N, offsets_T, pool)
    index_N = np.repeat(unique.offsets[:-1], np.diff(offsets_T)) + inverse_N.astype(np.int64)
    out_UD = np.zeros((unique.ids.size, first_UD.shape[1]), np.float32)
    both = np.concatenate([first_UD, second_UD])
    batch_rows.scatter_add(both, np.concatenate(sources), index_N, out_UD)
    return unique, out_UD
