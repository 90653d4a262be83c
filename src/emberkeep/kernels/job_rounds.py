"""A round: parts of jobs that several threads work off together, without Python and the GIL.

All that threads share are the words of one array. A *ticket* says how many parts the round has
and which is next; to take a part is to add one to it. Round number, parts and part stand in the
same word, so a thread that comes late cannot take a part of one round for that of another: it
either finds none left or takes one of the round that is open by then, and reads what the part is
only after it has taken it.
"""

from __future__ import annotations

from emberkeep._types import I64
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import fetch_add, load, make_call, relax, store

# Where things stand, in words. Those that several threads write have a cache line of their own.
GIVEN = 0  # how many tasks were given to the pool in Python
TICKET = 8
FINISHED = 16
PARTS = 24  # four words each: where its job's block begins, its range, its result
MOST_PARTS = 512
BLOCKS = PARTS + 4 * MOST_PARTS
BLOCK = 256  # words of a job's block
MOST_JOBS = 2
WORDS = BLOCKS + BLOCK * MOST_JOBS

_PART_BITS = 16
_PART = (1 << _PART_BITS) - 1


@inline
def _take(words: I64) -> bool:
    """Takes a part and works on it; whether there was one."""
    ticket = load(words, TICKET)
    if ticket & _PART >= (ticket >> _PART_BITS) & _PART:
        return False
    ticket = fetch_add(words, TICKET, 1)
    part = ticket & _PART
    if part >= (ticket >> _PART_BITS) & _PART:
        return False
    at = PARTS + 4 * part
    make_call(words, words[at], words[at + 1], words[at + 2], at + 3)
    fetch_add(words, FINISHED, 1)
    return True


@kernel
def lead(words: I64, number: int, parts: int) -> None:
    """Opens round `number` and works until no part is left; others may still work on theirs."""
    store(words, FINISHED, 0)
    store(words, TICKET, (number << (2 * _PART_BITS)) | (parts << _PART_BITS))
    while _take(words):
        pass


@kernel
def finished(words: I64, parts: int, looks: int) -> bool:
    """Looks until all parts of a round are done; gives up after so many looks."""
    for _ in range(looks):
        if load(words, FINISHED) >= parts:
            return True
        relax()
    return False


@kernel
def follow(words: I64, given: int, looks: int) -> bool:
    """Works on the parts of rounds until `given` tasks are there for Python, which is True.

    False when there was nothing to do for so many looks.
    """
    idle = 0
    while idle < looks:
        if load(words, GIVEN) >= given:
            return True
        if _take(words):
            idle = 0
        else:
            idle += 1
            relax()
    return False
