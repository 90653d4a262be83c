"""Each kind of background thread meets an error that nobody has listed.

It is shown in status and metrics, raised at the next call, `close` ends, and what can be repeated
is. Errors are put into the work itself; nothing here depends on time.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint.save import Save
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.cluster.local import local_parity
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.cluster.remote import leases
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.leases import Leases
from emberkeep.data import reader as reader_module
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.messages import Differences, Message
from emberkeep.erasure.peers import Peer
from emberkeep.errors import SaveError, StoppedError, TierError
from emberkeep.keeper import tier_state
from emberkeep.repository import VersionId
from emberkeep.repository.grid.extraction_worker import ExtractionWorker
from emberkeep.repository.policies import Grid
from emberkeep.runtime import metrics
from emberkeep.runtime.background import Retry
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.runtime.pool import Pool
from emberkeep.server import parity_service as services
from emberkeep.server.parity_sender import Sender
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import Adagrad, Table
from emberkeep.tiers import durable_open, upkeep
from emberkeep.wire import flight_transport
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport
from tests.contracts.parity import PLAIN, check_parity, ones
from tests.faults.test_tier_faults import start, train
from tests.servers import Farm, FarmLauncher
from tests.threads import started_since
from tests.unit.data.test_reader import Numbers, numbers_of
from tests.unit.keeper.test_keeper import Run
from tests.unit.keeper.test_tier_keeper import Run as TierRun
from tests.unit.tiers.test_tiered_slab import Unsynced

SOON = timedelta(seconds=60)
ERRORS = [MemoryError("no memory"), OSError(5, "Input/output error")]
kinds = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


class Failing:
    """Raises an error the first `times` calls, then does what it stands for."""

    def __init__(
        self, error: BaseException, work: Callable[..., Any] | None = None, times: int = 10**9
    ) -> None:
        self.error, self.work, self.times, self.calls = error, work, times, 0
        self.done = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        result = None if self.work is None else self.work(*args, **kwargs)
        self.done.set()
        return result


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry, "pause", lambda *_: 0)


def errors_of(thread: str) -> Callable[[], int]:
    """How many errors a thread has met from here on, as the metrics say."""
    before = background_failures.errors(thread)
    return lambda: background_failures.errors(thread) - before


def page(samples: Iterable[metrics.Sample]) -> str:
    return metrics.Registry(
        lambda: metrics.families(({}, samples)), background_failures.families
    ).text()


def gauge(text: str, name: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"emberkeep_{name}"))
    return float(line.split()[-1])


# -- parity in this process ----------------------------------------------------------------------


def protected(**more: Any) -> LocalCluster:
    spec = Parity(k=2, r=1, background=True, **more)
    return local(shards=3, threads=1, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)


@kinds
def test_mail_that_fails_ends_protection_and_says_so(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Not repeated: some hosts may have taken in what others have not. Parity is filled again, in
    `tests/faults/test_parity_mail.py`; here nobody does."""
    monkeypatch.setattr(local_parity, "receive_together", Failing(error))
    monkeypatch.setattr(local_parity.LocalParity, "_sweep", lambda _: None)
    cluster, counted = protected(unprotected="stop"), errors_of("emberkeep-parity")
    began = time.time()
    ones(cluster, Random(0), Counter())
    mail = parity_of(cluster)._mail
    mail._worker.wait(lambda: mail.failure is not None and counted() == 1, "the failure", SOON)
    status = cluster.parity
    assert status is not None
    assert not status.protected
    assert status.unprotected_since is not None
    assert status.unprotected_since >= began
    text = page(status.samples())
    assert gauge(text, "parity_unprotected_since_seconds") == status.unprotected_since
    before = [slab.planes["weight"].copy() for shard in cluster.shards for slab in shard.slabs]
    with pytest.raises(StoppedError, match="not protected") as raised:
        ones(cluster, Random(1), Counter())
    assert raised.value.__cause__ is error
    after = [slab.planes["weight"] for shard in cluster.shards for slab in shard.slabs]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    with pytest.raises(StoppedError):
        cluster.close()
    assert counted() == 1


def parity_of(cluster: LocalCluster) -> local_parity.LocalParity:
    assert cluster._protection is not None
    return cluster._protection


def lose(cluster: LocalCluster) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for seed in range(3):
        ones(cluster, Random(seed), counts)
    cluster.kill(1)
    return counts


@kinds
def test_a_rebuild_that_fails_once_is_repeated(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cluster, counted = protected(), errors_of("emberkeep-rebuild")
    parity = cluster._protection
    assert parity is not None
    failing = Failing(error, parity.rebuild_chunk, times=2)
    monkeypatch.setattr(parity, "rebuild_chunk", failing)
    lose(cluster)
    cluster._from_parity()
    parity._rebuilds.wait(
        lambda: failing.done.is_set() and parity._rebuilds.error is None, "a repetition", SOON
    )
    assert counted() == 2
    monkeypatch.undo()
    cluster.rebuild()
    status = cluster.parity
    assert status is not None
    assert (status.missing_rows, status.unprotected_since) == (0, None)
    cluster.close()


@kinds
def test_a_rebuild_that_keeps_failing_is_unprotected_and_ends_a_run_that_shall_stop(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cluster, began = protected(unprotected="stop"), time.time()
    parity = cluster._protection
    assert parity is not None
    monkeypatch.setattr(parity, "rebuild_chunk", Failing(error))
    lose(cluster)
    cluster._from_parity()
    with pytest.raises(StoppedError, match="emberkeep-rebuild stopped") as raised:
        parity._rebuilds.wait(lambda: False, "the failure", SOON)
    assert raised.value.__cause__ is error
    status = cluster.parity
    assert status is not None
    assert (status.unprotected_since or 0) >= began
    with pytest.raises(StoppedError, match="emberkeep-rebuild stopped"):
        ones(cluster, Random(1), Counter())
    with pytest.raises(StoppedError):
        cluster.close()


@kinds
def test_parity_that_is_half_filled_starts_over(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cluster = protected()
    parity = parity_of(cluster)
    honest = parity.rebuilder.fill

    def fill_and_fail(stripes: int) -> int:
        honest(1)
        raise error

    monkeypatch.setattr(parity.rebuilder, "fill", fill_and_fail)
    lose(cluster)
    cluster._from_parity()
    with pytest.raises(StoppedError):
        parity._rebuilds.wait(lambda: False, "the failure", SOON)
    assert cluster.parity is not None
    assert cluster.parity.unprotected_since is not None
    monkeypatch.setattr(parity.rebuilder, "fill", honest)
    cluster.rebuild()
    check_parity(parity.rebuilder)
    assert cluster.parity.protected
    cluster.close()


# -- parity on servers ---------------------------------------------------------------------------


@kinds
def test_a_sender_repeats_whatever_it_met(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    held, stuck = threading.Event(), threading.Event()
    counted, began = errors_of("emberkeep-parity"), time.time()
    since: list[float | None] = []

    def note(sender: Sender) -> None:
        since.append(sender.failing_since)
        stuck.set()

    monkeypatch.setattr("emberkeep.server.parity_sender.Connection", FakeConnection)
    monkeypatch.setattr(Sender, "_send", Failing(error, lambda *_: 1, times=3))
    sender = Sender(
        Peer(1, "127.0.0.1:1", 1), Placement(3, 2, 1), security=Security(), deadline=SOON,
        acknowledged=lambda *_: held.set(), stuck=note,
    )  # fmt: skip
    sender.post(Message(0, 1, 1, 0, Differences((), None, ())))
    assert stuck.wait(60)
    assert held.wait(60)
    assert counted() == 3
    assert since[0] is not None
    assert since[0] >= began
    assert len(set(since)) == 1
    sender._worker.wait(lambda: sender.failing_since is None, "well again", SOON)
    assert (sender.trouble, sender.waiting) == ("", 0)
    sender.close()
    sender._worker.join(SOON)


class FakeConnection:
    """A connection on which nothing is sent: what sends is replaced, too."""

    def __init__(self, address: str, security: Security, transport: Transport) -> None:
        self.address = address

    def open(self, _: timedelta) -> None:
        pass

    def close(self) -> None:
        pass


@kinds
def test_a_server_whose_rebuild_has_ended_says_since_when(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(services.ParityService, "_rebuild_chunk", Failing(error))
    began = time.time()
    cluster = protected()
    (shard, *_) = cluster.shards
    service = services.ParityService(shard, Parity(k=2, r=1), 3, security=Security(), deadline=SOON)
    service.ask({"ask": "hurry"}, {})
    with pytest.raises(StoppedError):
        service._rebuilds.wait(lambda: False, "the failure", SOON)
    assert service.status()["unprotected_since"] >= began
    text = page(service.samples())
    assert gauge(text, "parity_unprotected_since_seconds") >= began
    with pytest.raises(StoppedError, match="emberkeep-rebuild stopped") as raised:
        service.ask({"ask": "hurry"}, {})  # as a cluster does that waits for it
    assert raised.value.__cause__ is error
    service.close()
    service._rebuilds.join(SOON)
    cluster.close()


@kinds
def test_a_lease_is_renewed_after_whatever_it_met(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    renewed, counted = threading.Event(), errors_of("emberkeep-lease")

    def answer(*_: Any, **__: Any) -> Any:
        renewed.set()
        return {"clock": 1.0}, {}

    class Connection(FakeConnection):
        act = Failing(error, answer, times=3)

    monkeypatch.setattr(leases, "Connection", Connection)
    shard: Any = SimpleNamespace(index=0, address="127.0.0.1:1", epoch=1)
    timing: Any = SimpleNamespace(lease=timedelta(milliseconds=4))
    kept = Leases("me", [shard], Security(), timing)
    assert renewed.wait(60)
    assert counted() >= 3
    renewal = kept._renewals[0].worker
    renewal.wait(lambda: renewal.error is None, "well again", SOON)
    kept.stop()
    renewal.join(SOON)


@kinds
def test_deadlines_are_kept_after_whatever_their_watcher_met(error: BaseException) -> None:
    counted, cancelled = errors_of("emberkeep-deadlines"), threading.Event()

    class Overdue:
        def __init__(self, cancel: Callable[[], object]) -> None:
            self.cancel = cancel

        def overdue(self) -> bool:
            return True

    bad: Any = Overdue(Failing(error))
    good: Any = Overdue(cancelled.set)
    flight_transport._watch(bad)
    flight_transport._watch(good)
    try:
        assert cancelled.wait(60)
        flight_transport._deadlines.wait(lambda: counted() > 0, "the failure", SOON)
    finally:
        del bad, good


@kinds
def test_a_job_of_a_server_that_fails_is_reported_and_the_next_one_runs(
    error: BaseException,
) -> None:
    events: list[tuple[str, Any]] = []
    ready = threading.Semaphore(0)

    def on_event(name: str, details: Any) -> None:
        events.append((name, details))
        ready.release()

    service, counted = ShardService(threads=1, on_event=on_event), errors_of("emberkeep-job")
    service.long_work.begin("written", 1, {"version": 1}, Failing(error))
    assert ready.acquire(timeout=60)
    assert events[0] == ("failed", {"what": "written", "error": str(error)})
    with pytest.raises(type(error)):
        list(service._work({"epoch": 1}, {}))
    service.long_work.begin("written", 1, {"version": 2}, lambda: {"fine": True})
    assert ready.acquire(timeout=60)
    assert next(service._work({"epoch": 1}, {}))[0] == {"done": True, "fine": True}
    assert counted() == 1


# -- clusters of servers -------------------------------------------------------------------------


def serving_cluster(farm: Farm) -> FlightCluster:
    return FlightCluster(
        [Table("t", rows=60, dim=4)], Adagrad(lr=0.1), FarmLauncher(farm, 2), seed=1, pool=Pool(1)
    )


@kinds
def test_a_prefetch_that_fails_is_dropped_and_its_rows_are_pulled(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = set(threading.enumerate())
    cluster, counted = serving_cluster(farm), errors_of("emberkeep-prefetch")
    wanted = [RowIds(np.arange(30), np.array([0, 30]))]
    take = cluster._take
    failing = Failing(error, take, times=1)
    monkeypatch.setattr(cluster, "_take", failing)
    cluster.prefetch(wanted)
    cluster.push(wanted, [np.ones((30, 4), np.float32)], lr=0.1)
    (after,) = cluster.pull(wanted)
    (again,) = cluster.pull(wanted)
    assert (failing.calls, counted()) == (3, 1)
    assert (after == again).all()
    cluster.close()
    for lease in started_since(before, "emberkeep-lease"):
        lease.join(SOON.total_seconds())
    assert started_since(before, "emberkeep-lease") == []


@kinds
def test_a_cluster_is_closed_whatever_fails_on_the_way(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = set(threading.enumerate())
    cluster = serving_cluster(farm)
    monkeypatch.setattr(cluster, "_drop_ahead", Failing(error))
    monkeypatch.setattr(cluster.handles[0], "release", Failing(error))
    with pytest.raises(type(error)):
        cluster.close()
    for lease in started_since(before, "emberkeep-lease"):
        lease.join(SOON.total_seconds())
    assert started_since(before, "emberkeep-lease") == []
    shard = cluster.handles[1]
    assert shard._connection is None
    assert shard.connect()["state"] == "empty"  # released
    shard.disconnect()


@kinds
def test_a_call_to_one_of_several_servers_that_fails_is_raised_after_all_have_ended(
    farm: Farm, error: BaseException
) -> None:
    cluster, counted = serving_cluster(farm), errors_of("emberkeep-shard")
    other = Failing(error, times=0)
    with pytest.raises(type(error)):
        cluster._each([Failing(error), other])
    assert other.done.is_set()
    assert counted() == 1
    assert cluster._each([lambda: 1, lambda: 2]) == [1, 2]
    cluster.close()


@kinds
@pytest.mark.parametrize("first", [True, False])
def test_a_call_to_a_peer_that_fails_is_raised_after_all_have_ended(
    first: bool, error: BaseException
) -> None:
    cluster = protected()
    service = services.ParityService(
        cluster.shards[0], Parity(k=2, r=1), 3, security=Security(), deadline=SOON
    )
    counted, started = errors_of("emberkeep-peer"), threading.Event()
    ended: list[str] = []

    def slow() -> None:
        assert started.wait(60)
        ended.append("slow")

    def fails() -> None:
        started.set()
        raise error

    with pytest.raises(type(error)):
        service._each([fails, slow] if first else [slow, fails])
    assert ended == ["slow"]
    assert counted() == (0 if first else 1)
    assert service._each([lambda: 1, lambda: 2]) == [1, 2]
    service.close()
    cluster.close()


# -- reading -------------------------------------------------------------------------------------


@kinds
def test_a_reader_that_fails_raises_where_the_batch_is_taken_and_may_go_on(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    counted = errors_of("emberkeep-reader")
    failing = Failing(error, reader_module._Feed.take, times=1)
    monkeypatch.setattr(reader_module._Feed, "take", lambda *given: failing(*given))
    reader = reader_module.Reader(Numbers(20), batch_size=5)
    with pytest.raises(type(error)):
        next(reader)
    assert counted() == 1
    assert numbers_of(list(reader)) == list(range(20))
    reader.close()


@kinds
def test_a_round_of_extraction_that_fails_is_counted_and_made_again(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    counted, events = errors_of("emberkeep-extract"), list[str]()
    writer: Any = SimpleNamespace(repository=SimpleNamespace(clock=SYSTEM_CLOCK))
    rounds: Any = ExtractionWorker(
        writer, Grid(), lambda name, _: events.append(name), lambda: None, nice=0
    )
    monkeypatch.setattr(rounds, "_round", Failing(error, len, times=1))
    rounds.arrived(SimpleNamespace(version=VersionId(1, 1), layout={}))
    rounds.join()
    rounds.arrived(SimpleNamespace(version=VersionId(2, 1), layout={}))
    rounds.join()
    assert counted() == 1
    assert "extraction_failed" in events
    assert rounds._waiting == []
    rounds.close()


# -- tiers ---------------------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)
    return start(tmp_path / "t")


@kinds
@pytest.mark.parametrize("where", ["_evict", "_clean", "reading"])
def test_tier_threads_end_the_shard_and_say_so(
    tier: LocalCluster, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    (slab,) = tier.shards[0].tiers()
    worker = slab.loads._reader if where == "reading" else slab._upkeep
    counted, began = errors_of(worker.name), time.time()
    train(tier, 0)
    if where == "reading":
        monkeypatch.setattr(slab.loads, "perform", Failing(error))
        slab.loads._left.append(SimpleNamespace(done=threading.Event()))  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(upkeep, where, Failing(error))
    worker.wake()
    with pytest.raises(StoppedError):
        worker.wait(lambda: False, "the failure", SOON)
    assert counted() == 1
    assert (background_failures.stopped_since(worker.name) or 0) >= began
    with pytest.raises(TierError, match="has failed") as raised:
        train(tier, 1)
    assert raised.value.__cause__ is error
    with pytest.raises(TierError, match="had ended"):
        tier.close()
    worker.join(SOON)


@kinds
def test_a_commit_of_a_tier_that_fails_is_raised_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(durable_open, "DISK", Unsynced)
    run, counted = TierRun(tmp_path / "t"), errors_of("emberkeep-tier-commit")
    run.train(2)
    with monkeypatch.context() as patched:
        patched.setattr(tier_state, "encode", Failing(error))
        run.keeper.checkpoint()
        with pytest.raises(type(error)):
            run.keeper.wait()
    assert counted() == 1
    assert run.keeper.durable is None
    run.save()
    assert run.keeper.durable == 2
    run.end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@kinds
def test_a_tier_that_cannot_even_give_a_batch_up_says_so_and_saves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Two faults in a row: a save that has no end would leave out all later ones in silence."""
    monkeypatch.setattr(durable_open, "DISK", Unsynced)
    run, abandon = TierRun(tmp_path / "t"), LocalCluster.abandon_tiers

    def fail_beside(cluster: LocalCluster, **given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise error
        abandon(cluster, **given)

    run.train(2)
    with monkeypatch.context() as patched:
        patched.setattr(tier_state, "encode", Failing(error))
        patched.setattr(LocalCluster, "abandon_tiers", fail_beside)
        cut = run.keeper.save()
        with pytest.raises(type(error)):
            run.keeper.wait()
    assert cut.copied.done()
    assert cut.committed.exception() is error
    assert not run.keeper._saver.busy  # type: ignore[union-attr]
    assert gauge(run.keeper.metrics(), "failed_saves_total") == 1
    run.train(1)  # what was raised once is not raised again
    run.save()
    assert run.keeper.durable == 3
    run.end()


def test_what_follows_the_commit_of_a_tier_does_not_unmake_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_open, "DISK", Unsynced)
    run, counted = TierRun(tmp_path / "t"), errors_of("emberkeep-tier-commit")
    run.train(1)
    run.save()
    run.train(1)
    with monkeypatch.context() as patched:
        states = cast(Any, run.keeper)._saver._state  # where old ones are looked for
        patched.setattr(states, "list", Failing(MemoryError("no memory")))
        with pytest.warns(UserWarning, match="step 2 is saved, but what follows"):
            run.save()
    assert counted() == 1
    assert run.keeper.durable == 2
    run.end()


# -- saving --------------------------------------------------------------------------------------


def deaf(event: str, _details: Any) -> None:
    raise ValueError(f"no ear for {event}")


@pytest.mark.filterwarnings("ignore:on_event:UserWarning", "ignore:saving step:UserWarning")
@pytest.mark.parametrize("tier", [False, True])
def test_a_listener_that_raises_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: bool
) -> None:
    monkeypatch.setattr(durable_open, "DISK", Unsynced)
    run: Any = TierRun(tmp_path / "t", on_event=deaf) if tier else Run()
    strategy = ek.incremental(every=1000)
    keeper = run.keeper if tier else run.keeper(MemoryStore(), strategy=strategy, on_event=deaf)
    train = (lambda: run.train(1)) if tier else (lambda: run.step(keeper))
    train()
    cut = keeper.save()
    keeper.wait()
    assert cut.committed.result(60).step == 1
    with monkeypatch.context() as patched:
        patched.setattr(tier_state, "encode", Failing(ERRORS[0]))
        patched.setattr(Checkpointer, "_write_version", Failing(ERRORS[0]))
        train()
        cut = keeper.save()
        with pytest.raises((MemoryError, SaveError)):
            keeper.wait()
        assert cut.committed.exception() is ERRORS[0]
    keeper.save()
    assert keeper.wait().step == 2
    keeper.close(save=False)
    if tier:
        run.end()


@pytest.mark.filterwarnings("ignore:saving step:UserWarning", "ignore:after Memory:UserWarning")
@kinds
def test_a_save_that_cannot_even_be_cleaned_up_after_ends(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run = Run()
    keeper = run.keeper(MemoryStore(), strategy=ek.incremental(every=1000, layout="full"))
    run.step(keeper)
    honest = Save.close
    with monkeypatch.context() as patched:
        first = MemoryError("the first of both")
        patched.setattr(Checkpointer, "_write_version", Failing(first))
        patched.setattr(
            Save, "close", lambda self, advanced: (honest(self, advanced), Failing(error)())
        )
        cut = keeper.save()
        with pytest.raises(SaveError):
            keeper.wait()
    assert cut.copied.exception(10) is first
    assert cut.committed.exception(10) is first
    keeper.save()
    assert keeper.wait().step == 1
    keeper.close(save=False)


@kinds
@pytest.mark.parametrize("what", ["extraction", "collecting", "the chain", "the rows"])
def test_what_follows_a_commit_does_not_unmake_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, what: str
) -> None:
    """The version is in the repository, and the next one holds everything."""
    run, store, counted = Run(), MemoryStore(), errors_of("emberkeep-save")
    strategy = ek.all_versions(every=1000) if what == "extraction" else ek.incremental(every=1000)
    keeper = run.keeper(store, strategy=strategy)
    honest = Save.close
    run.step(keeper)
    keeper.save()
    keeper.wait()
    run.step(keeper)
    with monkeypatch.context() as patched:
        failing = {
            "extraction": (ExtractionWorker, "arrived", Failing(error)),
            "collecting": (Checkpointer, "_collect", Failing(error)),
            "the chain": (Checkpointer, "_follow", Failing(error)),
            "the rows": (
                Save, "close", lambda self, advanced: (honest(self, ()), Failing(error)())
            ),
        }[what]  # fmt: skip
        patched.setattr(*failing)
        with pytest.warns(UserWarning, match="step 2 is saved, but what follows"):
            cut, kept = keeper.save(), keeper.wait()
    assert cut.committed.result() is kept
    assert cut.copied.done()
    assert len(keeper._saver.repository.versions()) == 2  # type: ignore[union-attr]
    assert counted() == 1
    run.step(keeper)
    keeper.close()
    expected = run.bits()
    again = Run()
    with again.keeper(store, strategy=strategy) as keeper:
        assert keeper.resume().step == 3
        assert again.bits() == expected


@kinds
def test_a_save_that_fails_is_counted_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run = Run()
    with run.keeper(MemoryStore(), strategy=ek.incremental(every=1, layout="full")) as keeper:
        with monkeypatch.context() as patched:
            patched.setattr(Checkpointer, "_write_version", Failing(error))
            run.step(keeper)
            with pytest.raises(SaveError) as raised:
                keeper.wait()
            assert raised.value.__cause__ is error
        run.step(keeper)
        keeper.wait()
        assert gauge(keeper.metrics(), "failed_saves_total") == 1
        assert gauge(keeper.metrics(), "versions_total") == 1


@kinds
def test_reading_ahead_raises_where_the_item_is_taken(error: BaseException) -> None:
    from emberkeep.runtime.readahead import Ahead

    counted = errors_of("emberkeep-ahead")
    take = Failing(error)
    with Ahead(take() for _ in itertools.count()) as running, pytest.raises(type(error)):
        next(running)
    assert counted() == 1


@kinds
def test_metrics_are_served_after_whatever_the_server_met(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    import urllib.request

    honest = metrics.ThreadingHTTPServer.serve_forever
    failing = Failing(error, honest, times=2)
    monkeypatch.setattr(metrics.ThreadingHTTPServer, "serve_forever", lambda self: failing(self))
    counted = errors_of("emberkeep-metrics")
    server = metrics.MetricsServer(lambda: "fine\n", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        assert answer.read() == b"fine\n"
    assert counted() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.close()
