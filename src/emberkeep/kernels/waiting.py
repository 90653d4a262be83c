"""Waiting for another thread without the GIL and without going to sleep."""

from __future__ import annotations

from emberkeep.kernels._jit import kernel
from emberkeep.kernels._memory import atomic_load
from emberkeep.kernels.hashing import I64


@kernel
def spin(counter: I64, value: int, looks: int) -> bool:
    """Looks at a counter until it has reached `value`; gives up after so many looks."""
    for _ in range(looks):  # noqa: SIM110 - compiled
        if atomic_load(counter) >= value:
            return True
    return False
