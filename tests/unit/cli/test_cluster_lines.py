"""What a training command says while servers start, are silent, lost and recovered."""

from __future__ import annotations

import logging

import pytest

from emberkeep.cli import _progress
from emberkeep.cli._progress import Lines
from emberkeep.cli._shell import saying_what_is_awaited
from emberkeep.runtime.waiting import Waiting
from emberkeep.testing.virtual_clock import VirtualClock


@pytest.mark.parametrize(
    ("event", "details", "line"),
    [
        (
            "silent", {"shard": 1, "seconds": 6.2, "until": 15.0},
            "shard 1 has been silent for 6 s, waiting until 15 s",
        ),
        ("returned", {"shard": 1, "seconds": 7.0},
         "shard 1 answers again after 7 s, with its rows"),
        ("lost", {"shards": (1, 2)}, "shards 1, 2 lost, recovering"),
        ("unprotected", {"shard": 1},
         "shard 1 not protected by parity: one more loss may cost rows"),
        ("protected", {"shard": 1, "seconds": 3}, "shard 1 protected by parity again after 3 s"),
        (
            "recovered",
            {"scope": "parity", "shards": (1,), "version": None, "step": 9, "repeated_steps": 0,
             "pls": 0.0, "seconds": 1.234,
             "reason": "every row came back from the other shards"},
            "lost shard 1 after step 9; every row came back from the other shards in 1.23 s",
        ),
    ],
)  # fmt: skip
def test_what_happens_to_a_cluster_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], event: str, details: dict[str, object], line: str
) -> None:
    Lines().on_event(event, details)
    assert capsys.readouterr().err == f"emberkeep: {line}\n"


def test_silence_does_not_flood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, hook = VirtualClock(), Lines()
    monkeypatch.setattr(_progress.time, "monotonic", clock.monotonic)
    for tenths in range(100):
        hook.on_event("silent", {"shard": 0, "seconds": tenths / 10, "until": 15})
        clock.sleep(0.1)
    assert len(capsys.readouterr().err.splitlines()) == 3  # at 0, 4 and 8 s
    hook.on_event("returned", {"shard": 0})
    hook.on_event("silent", {"shard": 0, "seconds": 0.5, "until": 15})  # another story
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_command_says_what_it_waits_for_and_a_library_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    Waiting(clock).say("nobody hears this")
    assert capsys.readouterr() == ("", "")
    monkeypatch.delenv("EMBERKEEP_QUIET", raising=False)
    with saying_what_is_awaited():
        waiting = Waiting(clock)
        waiting.say("starting 4 shard servers")
        for ready in range(4):
            clock.sleep(2)
            waiting.say(f"{ready + 1} of 4 are ready")
        waiting.over("4 shard servers ready")
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "emberkeep: starting 4 shard servers",
        "emberkeep: 3 of 4 are ready",
        "emberkeep: 4 shard servers ready after 8.0 s",
    ]
    assert not logging.getLogger("emberkeep").handlers
