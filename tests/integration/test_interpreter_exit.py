"""What the interpreter waits for when it ends."""

from __future__ import annotations

import subprocess
import sys


def test_the_interpreter_waits_for_a_task_under_way() -> None:
    code = (
        "import threading\n"
        "from emberkeep.runtime.background import Worker\n"
        "go = threading.Event()\n"
        "worker = Worker('test')\n"
        "worker.do(go.wait, lambda _: print('ended', flush=True))\n"
        "import atexit\n"
        "atexit.register(go.set)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ended\n"), ran.stderr
