"""What the tests of the keeper share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Raises SIGINT as Ctrl-C does, also where this process was started to ignore it.

    In the main thread, which handles it before its own call returns: a signal to the process may
    be taken by another thread and noticed any time later, in the next test at worst.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    yield lambda: signal.pthread_kill(main_thread, signal.SIGINT)
    signal.signal(signal.SIGINT, before)
