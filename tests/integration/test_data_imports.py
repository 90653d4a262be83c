"""What importing data brings."""

from __future__ import annotations

import subprocess
import sys


def test_the_reader_alone_imports_neither_numba_nor_pyarrow_nor_torch() -> None:
    script = (
        "import sys; from emberkeep.data import Reader, Window; "
        "print([m for m in ('numba', 'pyarrow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
