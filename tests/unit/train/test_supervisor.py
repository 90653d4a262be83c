"""Workers are heard, started again, and stopped; without Ray: groups are played."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import (
    EmberkeepError,
    GradientError,
    RankError,
    ServerError,
    StateError,
    StorageError,
)
from emberkeep.keeper.signals import EXIT_CODE
from emberkeep.server.ray.ray_workers import Failure, Mailbox
from emberkeep.train.hooks import Hook, Step, TensorBoard
from emberkeep.train.supervisor import ATTEMPTS, Relay, Supervisor

BEGIN = ("begin",)
SAVED = ("event", "saved", {"step": 10, "version": 2})
RESUMED = ("event", "resumed", {"step": 10, "version": 2, "lost": []})
DIED = Failure(rank=1, reason="worker 1 (process 7) died", died=True)
DONE = {"auc": 0.5}


def step(number: int) -> tuple[str, dict[str, Any]]:
    return "step", {"phase": "embeddings", "number": number, "steps": 20, "samples": number,
                    "loss": 0.5, "at": float(number)}  # fmt: skip


def raised(error: EmberkeepError, rank: int = 0) -> Failure:
    return Failure(rank=rank, reason=f"worker {rank}: {error}", error=error)


class Played:
    """A group that says what it is given to say, one list at each poll, and then ends."""

    def __init__(self, *said: Any, failures: Sequence[Failure] = (), on_ask: Any = ()) -> None:
        self._said = list(said)
        self._on_ask = list(on_ask)
        self.failures: list[Failure] = []
        self._failures = list(failures)
        self.result: dict[str, Any] | None = None
        self.ended = self.closed = False
        self.asked: list[int] = []

    def poll(self, seconds: float) -> list[Any]:
        if self._said:
            now = self._said.pop(0)
            return now() if callable(now) else now
        self.ended, self.failures = True, self._failures
        self.result = None if self._failures else DONE
        return []

    def ask_to_stop(self, number: int) -> None:
        self.asked.append(number)
        self._said = list(self._on_ask)

    def close(self) -> None:
        self.ended = self.closed = True


class Heard(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.events: list[str] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step.number)

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        self.events.append(event)


def supervised(
    *groups: Played, kept: bool = True, fresh: bool = False
) -> tuple[Callable[[], Any], Heard, list[bool]]:
    waiting, heard, started = iter(groups), Heard(), list[bool]()

    def start(fresh: bool) -> Played:
        started.append(fresh)
        return next(waiting)

    return Supervisor(start, [heard], kept=kept, fresh=fresh).run, heard, started


def test_hooks_hear_what_rank_0_does() -> None:
    run, heard, _ = supervised(Played([BEGIN, step(1)], [step(2), SAVED]))
    assert run() == DONE
    assert heard.steps == [1, 2]
    assert heard.events == ["saved"]


def test_warnings_of_rank_0_are_raised_here() -> None:
    run, *_ = supervised(Played([("warning", "3 servers share 1 node")]))
    with pytest.warns(UserWarning, match="share 1 node"):
        run()


def test_fresh_is_for_the_first_start_over_alone() -> None:
    """Whichever attempt brings it about: a worker that dies before must not resume an old run."""
    started_over = ("event", "started_over", {})
    run, heard, started = supervised(
        Played([], failures=[DIED]),
        Played([BEGIN, started_over, step(1), SAVED], failures=[DIED]),
        Played([BEGIN, RESUMED, step(11)]),
        fresh=True,
    )
    assert run() == DONE
    assert started == [True, True, False]
    assert heard.events.count("restarting") == 2


def test_a_worker_that_dies_while_it_starts_is_started_again_though_nothing_is_kept() -> None:
    run, _, started = supervised(Played(failures=[DIED]), Played([step(1)]), kept=False)
    assert run() == DONE
    assert len(started) == 2
    run, *_ = supervised(Played([step(1)], failures=[DIED]), kept=False)
    with pytest.raises(
        ServerError, match=r"what they trained is lost: worker 1 \(process 7\) died"
    ):
        run()


def test_attempts_are_counted_from_the_last_new_version() -> None:
    dying = [Played([BEGIN], failures=[DIED]) for _ in range(ATTEMPTS)]
    run, *_ = supervised(*dying)
    with pytest.raises(ServerError, match=f"{ATTEMPTS} times without a new version"):
        run()
    dying = [
        Played([BEGIN, ("event", "saved", {"step": number})], failures=[DIED])
        for number in range(1, 3 * ATTEMPTS)
    ]
    run, _, started = supervised(*dying, Played())
    assert run() == DONE
    assert len(started) == 3 * ATTEMPTS


@pytest.mark.parametrize(
    ("failures", "final"),
    [
        ([raised(GradientError("the loss is nan"), 1)], True),
        ([DIED, raised(RankError("rank 1 did not come"))], False),
        ([raised(StateError("other settings"))], True),
        ([raised(StateError("rank 0 could not: see its error"), 1),
          raised(StorageError("a disk"))], False),
    ],
)  # fmt: skip
def test_what_would_happen_again_ends_the_run(failures: list[Failure], final: bool) -> None:
    run, _, started = supervised(Played([BEGIN], failures=failures), Played())
    if final:
        with pytest.raises(type(failures[0].error)):
            run()
        assert len(started) == 1
    else:
        assert run() == DONE


# -- signals --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """SIGTERM would end the test run, were it not heard."""
    before = [signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


def sends(number: int, *messages: Any) -> Callable[[], list[Any]]:
    def send() -> list[Any]:
        os.kill(os.getpid(), number)
        return list(messages)

    return send


STOPPED = ("event", "stopped", {"step": 12, "saved_step": 12})


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_has_the_workers_stop_with_a_version(
    number: signal.Signals, ends: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    group = Played([BEGIN, step(1)], sends(number), on_ask=[[step(12)], [STOPPED]])
    run, heard, _ = supervised(group)
    with pytest.raises(ends) as ended:
        run()
    assert group.asked == [number]
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == EXIT_CODE
    said = capfd.readouterr().err
    assert f"{number.name}: stopped after step 12; version of step 12 was saved" in said
    assert heard.steps == [1, 12]
    assert signal.getsignal(number) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once() -> None:
    group = Played([BEGIN], sends(signal.SIGINT), on_ask=[[], sends(signal.SIGINT), [STOPPED]])
    run, *_ = supervised(group)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert group.closed


def test_signals_act_at_once_before_the_run_begins_and_after_its_last_version() -> None:
    for said in ([], [[BEGIN, ("trained",)]]):
        group = Played(*said, sends(signal.SIGINT), [])
        run, *_ = supervised(group)
        with pytest.raises(KeyboardInterrupt):
            run()
        assert group.closed
        assert not group.asked


def test_workers_that_fail_or_start_again_after_a_signal_are_not_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    failing = Played([BEGIN, RESUMED], sends(signal.SIGTERM), on_ask=[[]])
    failing._failures = [DIED]
    again = Played(sends(signal.SIGTERM), [], [])
    for groups in ([failing], [Played([BEGIN, RESUMED], failures=[DIED]), again]):
        run, *_ = supervised(*groups)
        with pytest.raises(SystemExit):
            run()
        assert "stopped after step 10; version of step 10 was saved" in capfd.readouterr().err
    assert again.closed


# -- rank 0 ---------------------------------------------------------------------------------------


def test_rank_0_sends_all_that_hooks_hear_and_is_asked_to_stop(tmp_path: Path) -> None:
    mailbox = Mailbox()
    relay = Relay(mailbox)
    relay.on_step(Step(phase="embeddings", number=1, steps=2, samples=8, loss=0.25))
    relay.on_event("saved", {"step": 1})
    relay.warn("a word")
    relay.on_trained()
    asked: list[int] = []
    mailbox.ask(15)  # before there is a keeper
    relay.on_begin(asked.append)
    mailbox.ask(2)
    assert asked == [15, 2]
    messages = mailbox.take()
    assert [message[0] for message in messages] == ["step", "event", "warning", "trained", "begin"]
    assert mailbox.take() == []

    hook = TensorBoard(tmp_path / "tb")  # written where the command runs
    group = Played(messages)
    with pytest.warns(UserWarning, match="a word"):
        Supervisor(lambda _: group, [hook], kept=True, fresh=False).run()
    hook.close()
    (events,) = (tmp_path / "tb").iterdir()
    assert b"loss/embeddings" in events.read_bytes()


def test_a_mailbox_nobody_empties_is_bounded() -> None:
    mailbox = Mailbox()
    sender = threading.Thread(target=lambda: [mailbox.send(n) for n in range(100_003)])
    sender.start()
    sender.join()
    assert mailbox.take()[0] == 3
