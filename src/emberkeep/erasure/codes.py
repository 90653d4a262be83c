"""What is coded with what: the field, the coefficients, and where parity lives. All pure.

A *stripe* is `k` rows on `k` different shards and the `r` parity rows over them on `r` more.
Parity row p is the sum over the stripe's slots s of `coefficient[p, s]` times the bytes of the
row there, in GF(2^8). Any r of the k + r rows can be lost and computed from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from emberkeep._types import U8
from emberkeep.errors import ConfigError

Unprotected = Literal["go_on", "stop"]
"""What training does while rows are not protected."""

# x^8 + x^4 + x^3 + x^2 + 1, in which x generates all 255 non-zero elements.
POLYNOMIAL = 0x11D
# Row numbers of the coefficient matrix and slots name different elements of the field.
_MOST = 256


def _powers() -> tuple[list[int], list[int]]:
    powers, logarithms, value = [0] * 255, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = value
        logarithms[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return powers, logarithms


_POWERS, _LOGARITHMS = _powers()


def multiply(a: int, b: int) -> int:
    """The product of two elements."""
    return _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % 255] if a and b else 0


def inverse(a: int) -> int:
    """The element that times `a` is 1."""
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    return _POWERS[-_LOGARITHMS[a] % 255]


@cache
def products(coefficient: int) -> U8:
    """`coefficient` times each of the 256 elements; for few bytes, indexed by them."""
    return np.array([multiply(coefficient, value) for value in range(256)], np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How rows are protected: `r` parity rows for every `k` rows, on other shards.

    - Up to `r` shards may be lost at the same time, and nothing with them. Parity takes r/k of the
      memory of the trained rows, and needs k + r shards or more.
    - `background=False` settles every push before it returns: after any loss the rows are what
      they were, bit for bit. With `background=True` a thread of its own brings parity up to date,
      at most `window_nbytes` behind.
    - A lost shard is rebuilt `chunk_rows` rows at a time, for about `rebuild_share` of the time:
      in one process at the end of pushes and on all threads, or by a thread while nobody pushes;
      on a server by a thread beside. Rows that training asks for come first.
    - `unprotected` says what becomes of training while parity is not kept, because a server cannot
      reach a host of it for its deadline, or a thread has failed: it goes on, and parity is
      kept again as soon as that is possible; or it stops, with no push acknowledged that parity
      does not hold.
    """

    k: int = 4
    r: int = 1
    background: bool = False
    window_nbytes: int = 64 * 2**20
    chunk_rows: int = 32768
    rebuild_share: float = 0.2
    unprotected: Unprotected = "go_on"

    def __post_init__(self) -> None:
        if self.k < 1 or self.r < 1:
            raise ConfigError(f"parity needs k >= 1 and r >= 1, not k={self.k}, r={self.r}")
        if self.k + self.r > _MOST:
            raise ConfigError(f"k + r is at most {_MOST}, not {self.k + self.r}")
        for name in ("window_nbytes", "chunk_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 < self.rebuild_share <= 1:
            raise ConfigError(f"rebuild_share lies in (0, 1], not {self.rebuild_share}")
        if self.unprotected not in ("go_on", "stop"):
            raise ConfigError(f"unprotected is 'go_on' or 'stop', not {self.unprotected!r}")

    def check_same(self, asked: Parity) -> None:
        """A cluster that has this parity takes no other."""
        if asked != self:
            raise ConfigError(
                f"the cluster has parity already, {self}, and is asked for {asked}: give it once"
            )

    def check_shards(self, shards: int) -> None:
        """Refuses a cluster that is too small for the code."""
        if shards < self.k + self.r:
            raise ConfigError(
                f"parity with k={self.k} and r={self.r} needs {self.k + self.r} shards or more, "
                f"the cluster has {shards}: give it more shards, or lower k"
            )


@dataclass(frozen=True)
class Code:
    """The coefficients of `r` parity rows over `k` slots.

    A Cauchy matrix whose columns are scaled until its first row is all ones: every square part
    of it is invertible, which is what lets any r losses be solved, and the first parity is plain
    XOR.
    """

    k: int
    r: int

    @cached_property
    def coefficients(self) -> tuple[tuple[int, ...], ...]:
        """`coefficients[p][s]`."""
        rows, slots = range(self.r), range(self.r, self.r + self.k)
        return tuple(
            tuple(multiply(0 ^ slot, inverse(row ^ slot)) for slot in slots) for row in rows
        )

    def solution(self, unknown: Sequence[int], parities: Sequence[int]) -> list[list[int]]:
        """How the rows of `unknown` slots follow from as many syndromes.

        A syndrome is a parity row from which all known rows were taken out; the result has a row
        for each unknown slot, of what to multiply the syndromes of `parities` by.
        """
        matrix = [[self.coefficients[p][s] for s in unknown] for p in parities]
        return inverted(matrix)


def inverted(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """The inverse of a square matrix, by elimination; a singular one is an `ArithmeticError`."""
    size = len(matrix)
    work = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if work[i][column]), None)
        if pivot is None:
            raise ArithmeticError("a part of the coefficient matrix has no inverse")
        work[column], work[pivot] = work[pivot], work[column]
        scale = inverse(work[column][column])
        work[column] = [multiply(scale, value) for value in work[column]]
        for i in range(size):
            factor = work[i][column]
            if i != column and factor:
                work[i] = [
                    a ^ multiply(factor, b) for a, b in zip(work[i], work[column], strict=True)
                ]
    return [row[size:] for row in work]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows of `n` shards make a stripe, and who holds its parity; no tables are needed.

    Row l of shard i has stripe t = l div k and slot s = l mod k in group j = (i - 1 - s) mod n;
    its parity p is on shard (j - p) mod n at (p, t). So group j has its rows on the k shards after
    j and its parity on j and the r - 1 before it, and every shard holds r parity rows for each
    stripe number.
    """

    n: int
    k: int
    r: int

    def group(self, shard: int, slot: int) -> int:
        """The group in which rows of that slot of a shard are."""
        return (shard - 1 - slot) % self.n

    def slot(self, shard: int, group: int) -> int:
        """The slot of a shard's rows in a group; k or more where it is no member."""
        return (shard - 1 - group) % self.n

    def host(self, group: int, p: int) -> int:
        """The shard that holds parity p of a group."""
        return (group - p) % self.n

    def group_on(self, host: int, p: int) -> int:
        """The group whose parity p a shard holds: one for each p."""
        return (host + p) % self.n

    def members(self, group: int) -> list[int]:
        """The shards whose rows a group codes; the one at place s with its rows of slot s."""
        return [(group + 1 + slot) % self.n for slot in range(self.k)]

    def slots_on(self, shard: int, host: int) -> list[tuple[int, int]]:
        """(p, slot) for each slot of a shard whose parity p is on that host."""
        found = []
        for p in range(self.r):
            slot = (shard - 1 - host - p) % self.n
            if slot < self.k:
                found.append((p, slot))
        return found

    def hosts(self, shard: int) -> list[int]:
        """The shards that hold parity of a shard's rows, ascending: k + r - 1 of them."""
        return sorted((shard - 1 - distance) % self.n for distance in range(self.k + self.r - 1))

    def sources(self, host: int) -> list[int]:
        """The shards whose rows a host holds parity of, ascending."""
        return sorted((host + 1 + distance) % self.n for distance in range(self.k + self.r - 1))

    def groups(self, shard: int) -> list[tuple[int, int]]:
        """(group, slot) for each slot of a shard."""
        return [(self.group(shard, slot), slot) for slot in range(self.k)]

    def stripes(self, rows: int) -> int:
        """How many stripe numbers there are over shards with up to so many rows."""
        return -(-rows // self.k)
