"""Hooks of pytest: the seed of a nightly run is drawn once, printed, and can be given.

`--hypothesis-profile=nightly` draws examples that nobody has seen before, and more of them.
"""

from __future__ import annotations

import os
import secrets

import pytest

_nightly = False


def examples(count: int) -> int:
    """So many examples by night; by day a third, which are the same every day."""
    return count if _nightly else -(-count // 3)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of a nightly run; its processes share it, by the environment."""
    global _nightly
    _nightly = config.getoption("--hypothesis-profile") == "nightly"
    if _nightly and config.getoption("--hypothesis-seed") is None:
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
