"""A partition in the kernel: servers and their trainer in a network namespace of their own, whose
only link, its loopback, goes down.

Needs `ip netns`, as root; skipped elsewhere. Nothing outside the namespace is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stalls import judge, steps_of, wait_for
from tests.servers import ROOT


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"emberkeep-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [0.5, 5, 30])
def test_a_link_that_was_down_leaves_no_trace(
    namespace: str, tmp_path: Path, seconds: float
) -> None:
    """Neither in the rows nor in the epochs. Leases last a second."""
    trainer = subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.faults.stalls",
         str(tmp_path)], cwd=ROOT,
    )  # fmt: skip
    try:
        wait_for(lambda: steps_of(tmp_path) >= 3, 120)
        ip("-n", namespace, "link", "set", "lo", "down")
        before = steps_of(tmp_path)
        time.sleep(seconds)  # this long is what is tested
        assert steps_of(tmp_path) <= before + 1
        ip("-n", namespace, "link", "set", "lo", "up")
        # TCP itself may wait twice as long as the link was down before it tries again.
        wait_for(lambda: steps_of(tmp_path) > before + 1, 60 + 2 * seconds)
        (tmp_path / "stop").touch()
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.wait()
    judge(tmp_path)
