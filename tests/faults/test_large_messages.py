"""Messages that nobody can carry: what is larger than one is cut where it can be, and refused in
one line where it cannot. No server is taken for dead because of its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from emberkeep._types import U8
from emberkeep.cluster.remote import remote_shard
from emberkeep.errors import ConfigError, ProtocolError
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import Table
from emberkeep.wire import protocol
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import check_reply, rows_reply
from emberkeep.wire.security import Security
from tests.contracts.engine import state, wanted_of
from tests.faults.test_servers_return import World

REQUESTS = "emberkeep.cluster.remote.row_requests"
TABLES = [
    Table("fixed", rows=900, dim=3),
    Table("other", rows=700, dim=3),
    Table("wide", rows=300, dim=9),
    Table("dynamic", rows=None, capacity=5000, dim=9),
]
ROWS = {"fixed": range(900), "other": range(50, 60), "wide": range(300), "dynamic": range(7, 90)}


class Large(World):
    """Servers whose replies are no larger than `limit`, and rows that are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 2**11) -> None:
        super().__init__(TABLES)
        self.replies: list[int] = []
        answer = ShardService.answer

        def measured(service: ShardService, blob: U8, session: Any) -> U8:
            reply = answer(service, blob, session)
            self.replies.append(reply.size)
            return reply

        monkeypatch.setattr(ShardService, "answer", measured)
        monkeypatch.setattr(f"{REQUESTS}.PULL_NBYTES", limit, raising=False)
        self.wanted = wanted_of(self.cluster, {name: list(ids) for name, ids in ROWS.items()})

    def push_all(self) -> None:
        for cluster in (self.cluster, self.twin):
            dims = [cluster.tables[group[0]].dim for group in cluster.groups]
            grads = [
                np.ones((w.ids.size, dim), np.float32)
                for w, dim in zip(self.wanted, dims, strict=True)
            ]
            cluster.push(self.wanted, grads, lr=0.1)


def test_a_large_pull_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Large(monkeypatch)
    world.push_all()
    world.replies.clear()
    pulled = world.cluster.pull(world.wanted)
    assert max(world.replies) < 2**11 + 2**8
    assert len(world.replies) > 9
    for own, other in zip(pulled, world.twin.pull(world.wanted), strict=True):
        assert own.tobytes() == other.tobytes()
    world.check()


def test_a_pull_of_more_rows_than_one_request_names_comes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Large(monkeypatch, 2**30)
    monkeypatch.setattr(protocol, "MAX_ROWS", 100)
    monkeypatch.setattr(f"{REQUESTS}.MAX_ROWS", 100, raising=False)
    pulled = world.cluster.pull(world.wanted)
    for own, other in zip(pulled, world.twin.pull(world.wanted), strict=True):
        assert own.tobytes() == other.tobytes()
    world.check()


def test_a_large_batch_is_pulled_when_it_is_wanted_and_not_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Large(monkeypatch)
    world.cluster.prefetch(world.wanted)
    world.push_all()
    pulled = world.cluster.pull(world.wanted)
    assert max(world.replies) < 2**11 + 2**8
    for own, other in zip(pulled, world.twin.pull(world.wanted), strict=True):
        assert own.tobytes() == other.tobytes()
    world.check()


@pytest.mark.parametrize("limit", ["MAX_MESSAGE_NBYTES", "MAX_ROWS"])
def test_a_push_that_no_message_holds_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    world = Large(monkeypatch)
    before = state(world.cluster)
    world.replies.clear()
    with monkeypatch.context() as lower:
        lower.setattr(f"{REQUESTS}.{limit}", 200, raising=False)
        with pytest.raises(ConfigError, match=r"push of \d+ rows .* no row was changed: use small"):
            world.push_all()
    assert world.replies == []
    assert not world.heard
    assert state(world.cluster) == before
    world.push_all()
    world.check()


def test_a_server_reads_no_rows_for_a_reply_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_NBYTES", 2**11, raising=False)
    assert rows_reply(1, [10, 20], [3, 9])[0].size < 2**11
    with pytest.raises(ProtocolError, match=r"100 rows would take .* pull fewer rows"):
        rows_reply(1, [50, 50], [3, 9])


class Wire:
    """One request, and a writer that carries no more than so many bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asked = [SimpleNamespace(data=None, app_metadata=b"pull")]
        self.written: list[U8] = []

    def read_chunk(self) -> Any:
        if not self._asked:
            raise StopIteration
        return self._asked.pop()

    def write_metadata(self, buffer: Any) -> None:
        if buffer.size > self._most:
            raise pa.ArrowCapacityError("cannot send more than that")
        self.written.append(np.frombuffer(buffer, np.uint8))

    def close(self) -> None: ...

    cancel = close


def test_a_reply_that_flight_does_not_carry_is_refused_and_not_left_out() -> None:
    served = SimpleNamespace(answer=lambda blob, session: np.zeros(5000, np.uint8))
    wire = Wire(4096)
    ShardServer._answer_all(cast(Any, SimpleNamespace(served=served)), wire, wire)
    (reply,) = wire.written
    with pytest.raises(ProtocolError, match="reply of 5000 bytes cannot be sent"):
        check_reply(reply)


def test_a_request_that_flight_does_not_carry_says_nothing_of_its_server() -> None:
    channel = cast(Any, FLIGHT.dial("127.0.0.1:7", Security()))
    channel._reader = channel._writer = Wire(4096)
    with pytest.raises(ProtocolError, match=r"5000 bytes to .*: use smaller batches"):
        channel.send(np.zeros(5000, np.uint8), remote_shard._LOOK)
    channel.close()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are small, and rows go in several."""
    for module, name, value in (
        (protocol, "MAX_FRAME_NBYTES", 2**14),
        (protocol, "FRAME_NBYTES", 2**11),
        (remote_shard, "FRAME_NBYTES", 2**11),
        (remote_shard, "_READ_ROWS", 64),
    ):
        monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.usefixtures("frames")
def test_many_rows_are_read_and_deleted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Large(monkeypatch)
    ids = np.random.default_rng(1).permutation(4900)
    planes = {"weight": np.ones((4900, 9), np.float32)}
    for cluster in (world.cluster, world.twin):
        cluster.upsert("dynamic", ids, planes)
    own, other = (cluster.read("dynamic", ids) for cluster in (world.cluster, world.twin))
    assert {name: v.tobytes() for name, v in own.items()} == {
        name: v.tobytes() for name, v in other.items()
    }
    assert world.cluster.read("dynamic", ids[:0])["weight"].shape == (0, 9)
    for cluster in (world.cluster, world.twin):
        assert cluster.delete("dynamic", np.arange(-4000, 4800)) == 4800
    # Each was one edit, whatever number of messages it took.
    assert world.cluster.table_state() == world.twin.table_state()
    world.check()


def test_an_upsert_whose_ids_no_frame_holds_is_refused_with_no_row_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Large(monkeypatch)
    monkeypatch.setattr(remote_shard, "MAX_IDS", 100, raising=False)
    with pytest.raises(ConfigError, match=r"no row was changed: upsert fewer"):
        world.cluster.upsert("dynamic", np.arange(900), {"weight": np.ones((900, 9), np.float32)})
    world.cluster.upsert("fixed", np.arange(900), {"weight": np.ones((900, 3), np.float32)})
    world.twin.upsert("fixed", np.arange(900), {"weight": np.ones((900, 3), np.float32)})
    world.check()
