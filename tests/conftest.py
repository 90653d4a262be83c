"""Settings that every test shares."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Tests run in several processes at once, and none of them depends on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.faults.lives import Nursery
from tests.loaded import run_directory
from tests.nightly import pytest_configure, pytest_sessionstart
from tests.servers import Farm

__all__ = ["pytest_configure", "pytest_sessionstart"]

# Ignored where tests were started in the background of a shell, and inherited by what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runners of commands put them together once, as `emberkeep.cli.main` does, not for every call.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# The first example may compile kernels, so time is not judged. Examples are the same in every run:
# a failure repeats, and a change is not blamed for an example that nobody has seen before.
settings.register_profile(
    "emberkeep",
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `--hypothesis-profile=nightly`: examples that nobody has seen before. The seed is printed, and
# `--hypothesis-seed=` repeats it.
settings.register_profile(
    "nightly",
    settings.get_profile("emberkeep"),
    max_examples=100,
    derandomize=False,
    print_blob=True,
    database=None,
)
# `make check`: half of the examples.
settings.register_profile("check", settings.get_profile("emberkeep"), max_examples=10)
settings.load_profile("emberkeep")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long starts first: at the end, short files leave no worker without work."""
    items.sort(key=lambda item: item.path.parent.name not in ("faults", "integration"))


_COMPILED = "emberkeep/compiled-kernels"


def _kernel_sources() -> str:
    """A digest of what compiled kernels are made of, as far as this checkout decides it."""
    found = sorted((Path(__file__).parents[1] / "src/emberkeep/kernels").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads what all tests need, where several processes run them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and session.config.cache is not None:
        # In a fresh clone nothing is compiled yet: each process compiles other kernels first.
        cache, sources = session.config.cache, _kernel_sources()
        if cache.get(_COMPILED, None) != sources:
            importlib.import_module("emberkeep.train.train_warmup").warm_up(
                reverse=worker[-1] in "13579"
            )
            cache.set(_COMPILED, sources)
    # It stays: tests that collect garbage need not look at half a million objects.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    """Starts servers; what they need is loaded once for all tests."""
    started = Farm()
    yield started
    started.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts training processes; what they need is loaded once for all tests."""
    with Nursery() as started:
        yield started


# The first process of a run of the tests, which may have several, tidies up behind it.
_run, _made = run_directory()
if _made:
    atexit.register(shutil.rmtree, _run, ignore_errors=True)

# Logs of servers, and what is noted of a Ray, are a test's own.
_state = tempfile.mkdtemp(prefix="emberkeep-tests-")
atexit.register(shutil.rmtree, _state, ignore_errors=True)
os.environ["XDG_STATE_HOME"] = _state
