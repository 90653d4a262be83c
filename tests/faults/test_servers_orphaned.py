"""Servers of `ek.servers` whose trainer is killed end as well, whatever it has forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.servers import ROOT
from tests.waiting import until

# A trainer that starts a server and forks, as a loader of data does. The child ends with the test.
TRAINER = """
import os
from emberkeep.cluster.remote.processes import ProcessLauncher

launcher = ProcessLauncher(1, spares=0, threads=1)
if os.fork():
    print(launcher.pid(0), flush=True)
os.read(0, 1)
os._exit(0)
"""


def test_a_server_ends_with_its_trainer_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    server = int(trainer.stdout.readline())
    try:
        trainer.kill()
        trainer.wait()
        (log,) = tmp_path.glob("emberkeep/logs/*/server-1.log")
        until(lambda: '"stopped"' in log.read_text(), "the end of the server", seconds=20)
    except BaseException:
        os.kill(server, signal.SIGKILL)
        raise
    finally:
        trainer.stdin.close()  # ends the child
        trainer.stdout.close()
