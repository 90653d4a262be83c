"""Asynchronous workers that are stopped while others go on: each push is applied once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emberkeep._types import U8
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import NOTHING_TRAINED, Home, Recovery, recover_partially
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.cluster.table_states import Edit, edits_of
from emberkeep.errors import PeerError, SaveError, ServerError, ShardLostError, StorageError
from emberkeep.keeper.recoverer import Recoverer
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository import Repository
from emberkeep.strategies import Strategy, incremental, partial
from emberkeep.testing.local_transport import Rule
from emberkeep.wire.protocol import PUSH
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import BEHIND, SHARDS, World

_KIND_AT = 4  # in the header of a request
NAMES = {"fixed": "fixed"}


class LosesAnswers(MemoryStore):
    """The next version is committed, and nobody hears of it."""

    armed = False

    def put_if_absent(self, name: str, data: Any) -> bool:
        created = super().put_if_absent(name, data)
        if self.armed and name.startswith("versions/"):
            raise StorageError("the answer was lost")
        return created

    def get(self, name: str) -> bytes:
        if self.armed and name.startswith("versions/"):
            raise StorageError("the store does not answer")
        return super().get(name)


class Job:
    """A coordinator that saves and recovers partially, and a worker beside it."""

    def __init__(self, **more: Any) -> None:
        self.world = World(**more)
        self.cluster = self.world.cluster
        self.cluster.track()
        self.store = LosesAnswers()
        self.saver = Checkpointer(
            Repository.create(self.store, schema=self.cluster.schema()), self.cluster
        )
        self.cluster.on_loss = self.on_loss
        self.worker = self.world.open("worker", coordinate=False)

    def on_loss(self, lost: ShardLostError) -> bool:
        recover_partially(self.saver, Home(self.cluster, NAMES), lost.shards)
        return True

    def push(self, cluster: Any) -> None:
        wanted = wanted_of(cluster, {"fixed": list(range(40))})
        cluster.push(wanted, [np.ones((40, 3), np.float32)], lr=0.1)

    def save(self) -> None:
        self.saver.save(1)
        assert self.saver.wait() is not None

    def stop_worker_in_push(self, shard: int, meanwhile: Callable[[], object]) -> None:
        """A shard applies the worker's next push, which is stopped before it hears of it."""
        service = self.world.network.servers[self.world.names[shard]]
        answer = service.answer

        def stops(blob: U8, session: Any) -> U8:
            reply = answer(blob, session)
            if int(blob[_KIND_AT]) == PUSH:
                service.answer = answer  # type: ignore[method-assign]
                meanwhile()
                raise ServerError("the worker was stopped, and its stream is gone")
            return reply

        service.answer = stops  # type: ignore[method-assign]

    def pushes(self, shard: int) -> set[float]:
        """How many pushes the rows of a shard hold."""
        ids = self.cluster.positions("fixed", np.arange(40))[shard]
        return set(self.cluster.read("fixed", ids)["accumulator"].ravel().tolist())

    def close(self) -> None:
        self.saver.close()
        self.worker.close()
        self.cluster.close()


def test_a_worker_that_rejoins_goes_on_once_all_was_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that serves may need peers for it that do not answer at the moment."""
    job = Job()
    job.push(job.worker)
    job.save()
    sent, send_again = list[int](), job.worker._send_again

    def peers_are_away(shard: int) -> None:
        sent.append(shard)
        if len(sent) < 3:
            raise PeerError("a peer does not answer")
        send_again(shard)

    monkeypatch.setattr(job.worker, "_send_again", peers_are_away)
    job.world.launcher.kill(1)
    job.push(job.cluster)
    job.push(job.worker)
    assert sent == [1, 1, 1]
    job.close()


@pytest.mark.filterwarnings("ignore:saving step")
def test_a_push_that_a_version_holds_whose_answer_was_lost_is_not_applied_again() -> None:
    job = Job()
    job.push(job.cluster)
    job.push(job.worker)
    job.save()

    def version_and_loss() -> None:
        job.store.armed = True
        job.saver.save(2)
        with pytest.raises(SaveError):
            job.saver.wait()
        job.store.armed = False
        job.world.launcher.kill(1)
        job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))

    job.stop_worker_in_push(1, version_and_loss)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    job.close()


@pytest.mark.parametrize("recoveries", [1, 2])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_push_that_a_version_holds_is_not_applied_to_rows_that_come_from_it(
    shard: int, recoveries: int
) -> None:
    job = Job()
    job.push(job.cluster)
    job.push(job.worker)

    def version_and_loss() -> None:
        job.save()
        for _ in range(recoveries):
            job.world.launcher.kill(shard)
            job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))

    job.stop_worker_in_push(shard, version_and_loss)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    for cluster in (job.worker, job.cluster):
        job.push(cluster)
    job.save()
    job.world.launcher.kill(shard)
    job.push(job.cluster)
    assert [job.pushes(s) for s in range(SHARDS)] == [{6.0}] * SHARDS
    job.close()


def test_a_push_that_no_version_holds_is_applied_to_rows_that_come_from_one() -> None:
    """What the worker was answered since the version is lost with the shard, and counted."""
    job = Job()
    job.push(job.worker)
    job.save()
    for _ in range(3):
        job.push(job.worker)

    def loss() -> None:
        job.world.launcher.kill(1)
        job.cluster.pull(wanted_of(job.cluster, {"fixed": list(range(40))}))

    job.stop_worker_in_push(1, loss)
    job.push(job.worker)
    assert [job.pushes(s) for s in range(SHARDS)] == [{5.0}, {2.0}, {5.0}]
    job.close()


class Durable:
    """All that a recoverer asks of a saver whose newest state is in tiers."""

    whole: Any = SimpleNamespace(step=1)


class Watched(Job):
    """The same with what a keeper makes of losses: everything goes back, unless nothing is lost."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.world = World()
        self.cluster, clock = self.world.cluster, self.world.clock
        self.saver: Any = RepositorySaver(
            MemoryStore(clock), self.cluster,
            strategy or incremental(every=1, recovery="full"), about={},
            settings=SaveSettings(threads=1, nice=0), exclusive=False, must_exist=False,
            on_event=lambda *_: None, clock=clock,
        )  # fmt: skip
        self.worker = self.world.open("worker", coordinate=False)
        self.made: list[dict[str, Any]] = []
        self.recoverer = Recoverer(
            [Home(self.cluster, NAMES)], self.saver, Recovery(scope="full"), total_steps=100,
            steps=lambda: 1, go_back=None, clock=clock,
            tell=lambda event, details: self.made.append({"event": event, **details}),
        )  # fmt: skip

    def save(self, *, whole: bool = True) -> None:
        self.saver.cut(1, None, dict, whole=whole)
        saved = self.saver.wait()
        assert saved is not None
        assert saved.whole is whole

    def push_to(self, *shards: int, number: int) -> None:
        """The worker's next push comes to some shards; to others it is on its way."""
        worker = self.worker
        routed = worker._routed(wanted_of(worker, {"fixed": list(range(40))}))
        grads = [np.ones((40, 3), np.float32)]
        for shard in shards:
            (blob,) = worker._requests(PUSH, routed, grads, number=number, lr=0.1, only=shard)
            worker.handles[shard].send(blob, worker.timing.deadline)
            worker.handles[shard].receive()

    def comes_back(self) -> bool:
        """Whether lost shards come back alone; else the model has to go back."""
        try:
            self.cluster.table_state()
        except ShardLostError:
            assert not [made for made in self.made if made["event"] == "recovered"]
            return False
        made = self.made[-1]
        assert (made["event"], made["scope"]) == ("recovered", "partial")
        assert made["reason"].startswith(NOTHING_TRAINED)
        return True


def test_a_shard_comes_back_alone_if_nobody_has_pushed_since() -> None:
    job = Watched()
    for cluster in (job.cluster, job.worker, job.worker):
        job.push(cluster)
    job.save()
    job.world.launcher.kill(1)
    assert job.comes_back()
    assert [job.pushes(s) for s in range(SHARDS)] == [{3.0}] * SHARDS
    job.close()


@pytest.mark.parametrize("lost", range(SHARDS))
def test_a_push_that_a_version_holds_of_other_shards_is_not_overlooked(lost: int) -> None:
    """All shards have as many steps as the version, and of the lost one it has one less, which has
    answered the push since."""
    job = Watched()
    job.push(job.cluster)
    job.push_to(*(shard for shard in range(SHARDS) if shard != lost), number=1)
    job.save()
    job.push_to(lost, number=1)
    job.world.launcher.kill(lost)
    assert not job.comes_back()
    job.close()


def test_a_push_is_not_overlooked_for_one_that_the_others_are_without() -> None:
    """The lost shard alone had the worker's push in the version, and the others have one of the
    coordinator's since: as many steps."""
    job = Watched()
    job.push(job.cluster)
    job.push_to(1, number=1)
    job.save()
    job.push(job.cluster)
    job.world.launcher.kill(1)
    assert not job.comes_back()
    job.close()


def test_a_prioritised_version_has_not_saved_every_push() -> None:
    """The whole version is without the worker's push to the lost shard. A later one has some of
    those rows, and counted as if it had them all."""
    job = Watched(partial(every=1, priority="mfu"))
    job.push(job.cluster)
    job.push_to(0, 2, number=1)
    job.save()
    job.push_to(1, number=1)
    job.save(whole=False)
    job.world.launcher.kill(1)
    assert not job.comes_back()
    job.close()


@pytest.mark.parametrize("edit", ["upsert", "delete"])
@pytest.mark.parametrize("whose", ["cluster", "worker"])
@pytest.mark.parametrize("every_shard", [True, False])
def test_rows_from_outside_are_not_overlooked(edit: str, whose: str, every_shard: bool) -> None:
    """Nobody has pushed since the version, yet rows of the lost shard are other ones, and of the
    others perhaps none is."""
    job = Watched()
    job.push(job.cluster)
    job.save()
    rows = np.arange(40)
    if not every_shard:
        rows = rows[job.cluster.positions("fixed", rows)[1]]

    def make() -> None:
        cluster = getattr(job, whose)
        if edit == "upsert":
            cluster.upsert("fixed", rows, {"weight": np.ones((rows.size, 3), np.float32)})
        else:
            cluster.delete("fixed", rows)

    make()
    job.save()  # which holds them
    job.world.launcher.kill(1)
    assert job.comes_back()
    job.made.clear()
    make()
    job.world.launcher.kill(1)
    assert not job.comes_back()
    job.close()


def test_rows_from_outside_that_a_version_holds_of_other_shards_are_not_overlooked() -> None:
    """Two workers write at once; of the lost shard the version has one of both alone."""
    job = Watched()
    job.push(job.cluster)
    rows = np.arange(40)
    of_shard = job.cluster.positions("fixed", rows)
    other = job.cluster.handles

    def write(shards: Sequence[int], stamp: int) -> None:
        for shard in shards:
            own = rows[of_shard[shard]]
            other[shard].delete("fixed", own, Edit(stamp, stamp))

    write([0, 1, 2], 5)
    write([0, 2], 7)
    job.save()
    write([1], 7)
    job.world.launcher.kill(1)
    assert not job.comes_back()
    job.close()


def edits(cluster: Any) -> list[int]:
    return edits_of([shard.table_state() for shard in cluster.handles], "fixed")


def test_rows_from_outside_count_once_though_an_answer_was_lost() -> None:
    job = Watched()
    edit = Edit.of("fixed", np.arange(40))
    job.cluster.handles[0].delete("fixed", np.zeros(0, np.int64), edit)
    before = edits(job.cluster)
    job.cluster.handles[0].delete("fixed", np.zeros(0, np.int64), edit)
    assert edits(job.cluster) == before == [edit.stamp, 0, 0]
    job.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_rows_from_outside_are_over_for_a_shard_that_has_come_back(when: str) -> None:
    """Whether it was lost after them or while they were written: all shards know of the same."""
    job = Job()
    job.push(job.cluster)
    job.save()
    if when == "before":
        job.cluster.delete("fixed", np.arange(40))
        job.world.launcher.kill(1)
    else:
        job.world.launcher.kill(1)
        job.cluster.delete("fixed", np.arange(40))
    job.push(job.cluster)
    assert len({*edits(job.cluster)}) == 1
    assert edits(job.cluster)[0] > 0
    job.close()


def test_nobody_knows_what_was_lost_with_every_shard_of_a_cluster() -> None:
    """Others go on, and a tier's step is all that is known: no table tells how far it had come."""
    job = Watched()
    job.push(job.cluster)
    job.save()
    for shard in range(SHARDS):
        job.world.launcher.kill(shard)
        job.cluster.handles[shard].give_up()
    other = World()
    recoverer = Recoverer(
        [Home(job.cluster, NAMES), Home(other.cluster, {"other": "fixed"})], Durable(),
        Recovery(scope="full"), total_steps=100, steps=lambda: 2, go_back=None,
        tell=lambda *_: None, clock=job.world.clock,
    )  # fmt: skip
    decided = recoverer._plan_once()
    assert (decided.scope, decided.exact) == ("full", False)
    recoverer.release()
    other.cluster.close()
    job.close()


def test_a_push_that_a_shard_answers_while_it_is_given_up_is_not_overlooked() -> None:
    """It is there, and its rows are not to be had back: a worker may reach it until it is
    renewed."""
    job = Watched()
    job.push(job.cluster)
    job.save()
    renew = job.cluster._renew

    def later(index: int) -> None:
        job.cluster._renew = renew  # type: ignore[method-assign]
        job.push_to(*range(SHARDS), number=1)
        renew(index)

    job.cluster._renew = later  # type: ignore[method-assign]
    job.cluster.handles[1].give_up()
    assert not job.comes_back()
    assert job.cluster._renew is not later
    job.close()


@pytest.mark.parametrize("lost", range(SHARDS))
def test_a_worker_that_ends_stays_until_parity_has_its_pushes(lost: int) -> None:
    world = World(parity=BEHIND)
    worker = world.open("worker", coordinate=False)
    world.push()
    world.network.rules = [Rule(how="refuse", kind="parity")]  # parity stays behind
    world.push(by=worker)

    def lose() -> None:
        world.network.rules = []
        world.launcher.kill(lost)
        world.cluster.table_state()  # the coordinator notices it

    world.clock.at(1, lose)
    worker.close()
    assert world.clock.monotonic() >= 1
    world.check()


def test_a_worker_that_ends_does_not_wait_for_rows_that_are_gone() -> None:
    world = World(parity=BEHIND)
    worker = world.open("worker", coordinate=False)
    world.network.rules = [Rule(how="refuse", kind="parity")]
    world.push(by=worker)
    world.clock.at(1, world.cluster.close)
    worker.close()
    assert world.clock.monotonic() < 10


def test_a_worker_that_ends_does_not_wait_for_ever() -> None:
    world = World(parity=BEHIND)
    worker = world.open("worker", coordinate=False)
    world.network.rules = [Rule(how="refuse", kind="parity")]
    world.push(by=worker)
    world.clock.at(1, lambda: world.launcher.kill(1))  # and the coordinator does not notice
    with pytest.warns(RuntimeWarning, match="pushes of a worker that ends are lost if a server"):
        worker.close()
    world.cluster.close()
