"""Hooks of pytest: how many examples tests go through, and the seed of a nightly run, which is
drawn once, printed, and can be given.

`--hypothesis-profile=nightly` draws examples that nobody has seen before, and more of them;
`--hypothesis-profile=check` draws few, for the inner loop.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

_Thing = TypeVar("_Thing")

_SHARES = {"nightly": 1, "check": 12}
_BY_DAY = 6
_share = _BY_DAY


def examples(count: int) -> int:
    """So many examples by night; by day a sixth, which are the same every day; a twelfth in
    `make check`."""
    return -(-count // _share)


def some(things: Sequence[_Thing], turn: int = 0, *, of: int = 3) -> Sequence[_Thing]:
    """All of them by night; by day one `of` so many, from the `turn`-th on: tests whose turns
    differ go through all of them between them."""
    return things if _share == 1 else things[turn % of :: of]


def checkered(*sides: Sequence[Any]) -> list[Any]:
    """Parameters: every combination by night; by day those of one colour of a chessboard, so every
    value of a side, with half of those of another."""
    return [
        pytest.param(*(value for _, value in chosen), marks=marks)
        for chosen in itertools.product(*(list(enumerate(side)) for side in sides))
        for marks in [() if sum(at for at, _ in chosen) % 2 == 0 else pytest.mark.soak]
    ]


def by_night(things: Iterable[Any]) -> list[Any]:
    """Parameters that the night alone has."""
    return [pytest.param(thing, marks=pytest.mark.soak) for thing in things]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of a nightly run; its processes share it, by the environment."""
    global _share
    profile = config.getoption("--hypothesis-profile")
    _share = _SHARES.get(profile, _BY_DAY)
    if profile == "nightly" and config.getoption("--hypothesis-seed") is None:
        drawn = os.environ.setdefault("EMBERKEEP_NIGHTLY_SEED", str(secrets.randbits(64)))
        config.option.hypothesis_seed = drawn


def pytest_sessionstart(session: pytest.Session) -> None:
    seed = session.config.getoption("--hypothesis-seed")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if seed is not None and reporter is not None:
        reporter.write_line(
            f"hypothesis seed: {seed}; to repeat: --hypothesis-profile=nightly "
            f"--hypothesis-seed={seed}"
        )
