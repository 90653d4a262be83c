"""In which steps the deaths of rows are recorded, so that all versions together read least."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64
from emberkeep.kernels._jit import kernel


@kernel
def cheapest_steps(deaths_D: I64, nbytes_D: I64, birth: int, piece_nbytes: int, out_D: I64) -> int:
    """Under which death the rows of each death are recorded, that one or a later one; returns what
    versions read of them in vain, and for pieces, in bytes, summed over versions.

    Deaths ascend. The rows of a step become a piece, which every version from the birth to the last
    death of the step reads: it costs each of them `piece_nbytes`, and those that come after a row's
    own death the row.
    """
    count = deaths_D.size
    best = np.zeros(count + 1, np.int64)
    first = np.zeros(count + 1, np.int64)
    total = np.zeros(count + 1, np.int64)
    moment = np.zeros(count + 1, np.int64)
    for d in range(count):
        age = deaths_D[d] - birth
        total[d + 1] = total[d] + nbytes_D[d]
        moment[d + 1] = moment[d] + nbytes_D[d] * age
        least = np.int64(-1)
        for start in range(d + 1):
            vain = age * (total[d + 1] - total[start]) - (moment[d + 1] - moment[start])
            cost = best[start] + vain
            if least < 0 or cost < least:
                least = cost
                first[d + 1] = start
        best[d + 1] = least + piece_nbytes * age
    end = count
    while end > 0:
        start = first[end]
        for d in range(start, end):
            out_D[d] = deaths_D[end - 1]
        end = start
    return best[count]
