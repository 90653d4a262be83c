"""`emberkeep serve` as an operator runs it, on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.cli import app
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import ConfigError, SecurityError
from emberkeep.tables import SGD, Table
from emberkeep.wire.security import TOKEN


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ek-", dir="/tmp") as where:
        monkeypatch.setenv("XDG_STATE_HOME", where)
        monkeypatch.delenv(TOKEN, raising=False)
        yield where


def test_its_user_needs_no_configuration_and_a_signal_waits_for_the_run(state: str) -> None:
    command = [sys.executable, "-m", "emberkeep.cli", "serve", "--port", "7070", "--threads", "1"]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stderr is not None
        greeting = json.loads(server.stdout.readline())
        assert greeting["address"].startswith(f"grpc+unix://{state}/")
        assert stat.S_IMODE(os.stat(greeting["token_file"]).st_mode) == 0o600
        spec = ek.connect(["127.0.0.1:7070"], timing=Timing(patience=timedelta(seconds=30)))
        cluster = spec.open([Table("t", rows=8, dim=2)], SGD(lr=1.0), seed=0)
        ids = [RowIds(np.arange(8), np.array([0, 8]))]
        os.kill(server.pid, signal.SIGINT)
        for line in server.stderr:  # until it has heard
            if json.loads(line)["event"] == "ending":
                break
        assert cluster.pull(ids)[0].shape == (8, 2)
        cluster.close()
        assert server.wait(20) == 0
        assert json.loads(server.stderr.read().splitlines()[-1])["event"] == "stopped"
        assert os.listdir(Path(greeting["token_file"]).parent) == ["token"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (["--metrics", "10.0.0.1:9100"], SecurityError, "10.0.0.1 .* --tls-certificate"),
        (["--host", "10.0.0.1"], SecurityError, "--authority"),
        (["--host", "10.0.0.1", "--socket", "/tmp/s/s"], SecurityError, "--tls-certificate"),
        (["--grace", "soon"], ConfigError, "--grace"),
    ],
)
def test_what_is_not_safe_is_refused(
    state: str, given: list[str], error: type[SecurityError | ConfigError], words: str
) -> None:
    refused = CliRunner().invoke(app, ["serve", *given])
    assert refused.exit_code == error.exit_code
    assert len(refused.output.splitlines()) == 1
    assert re.search(words, refused.output)
