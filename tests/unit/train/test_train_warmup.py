"""What `emberkeep warm` compiles ahead of time."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from numba.core.dispatcher import Dispatcher

from emberkeep import kernels
from emberkeep.train.train_warmup import warm_up

# Those that read text and Parquet are compiled with the first file.
MODULES = [
    module.name
    for module in pkgutil.iter_modules(kernels.__path__)
    if not module.name.startswith("_") and module.name != "sample_text"
]


@pytest.fixture(scope="module", params=[False, True])
def _warm(request: pytest.FixtureRequest) -> None:
    """Forwards and, as a second process does at the same time, in reverse."""
    warm_up(reverse=request.param)


def compiled(module: str) -> Iterator[Dispatcher]:
    for value in vars(importlib.import_module(f"emberkeep.kernels.{module}")).values():
        if isinstance(value, Dispatcher) and value.signatures:
            yield value


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_of_every_module_are_compiled(module: str) -> None:
    assert list(compiled(module))
