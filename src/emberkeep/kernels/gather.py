"""Where the wanted rows of pieces stand in bytes that were read, and copies of them.

Pieces hold groups of rows of one table, groups of all pieces stand one after the other, and so do
rows.
"""

from __future__ import annotations

from emberkeep._types import I32, I64, U8, Bools
from emberkeep.kernels._jit import kernel


@kernel
def count_kept(
    pieces_B: I64, groups_P: I64, firsts_P: I64, tables_G: I32, kept_G: I64, counts_T: I64
) -> None:
    """Adds up the kept rows of some pieces, by table."""
    for b in range(pieces_B.size):
        first = firsts_P[pieces_B[b]]
        for g in range(first, first + groups_P[pieces_B[b]]):
            counts_T[tables_G[g]] += kept_G[g]


@kernel
def locate(
    pieces_B: I64, bodies_B: I64, rows_P: I64, starts_P: I64, groups_P: I64, firsts_P: I64,
    tables_G: I32, counts_G: I64, kept_G: I64, ids: I64, kept: Bools, before_C: I64,
    widths_C: I64, places_T: I64, ids_U: I64, starts_CU: I64,
) -> None:  # fmt: skip
    """The ids of the kept rows of some pieces, table by table, and where their columns begin.

    The body of a piece begins at `bodies_B`; a column of it stands behind `before_C` bytes a row
    and has `widths_C` of its own. Those of table t go to `places_T[t]`, which moves on.
    """
    for b in range(pieces_B.size):
        p = pieces_B[b]
        first_row = starts_P[p]
        row = first_row
        for g in range(firsts_P[p], firsts_P[p] + groups_P[p]):
            if kept_G[g] > 0:
                at = places_T[tables_G[g]]
                for i in range(row, row + counts_G[g]):
                    if kept[i]:
                        ids_U[at] = ids[i]
                        for c in range(before_C.size):
                            starts_CU[c, at] = (
                                bodies_B[b]
                                + before_C[c] * rows_P[p]
                                + widths_C[c] * (i - first_row)
                            )
                        at += 1
                places_T[tables_G[g]] = at
            row += counts_G[g]


@kernel
def copy_rows(start: int, stop: int, data: U8, starts_U: I64, out_UW: U8) -> None:
    """Copies rows start..stop, each from where it begins."""
    for i in range(start, stop):
        at = starts_U[i]
        for w in range(out_UW.shape[1]):
            out_UW[i, w] = data[at + w]
