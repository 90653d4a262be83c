"""Served shards: ranks that train together, prefetched pulls, hostile messages, who may come in."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    EmberkeepError,
    GradientError,
    ProtocolError,
    RankError,
    SecurityError,
    ServerError,
    StateError,
)
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from emberkeep.runtime.metrics import MetricsServer
from emberkeep.server.epoch import Session
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.pushes import Ledger, join
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Adagrad, Adam, Normal, Optimizer, Table
from emberkeep.wire.connection import Connection
from emberkeep.wire.protocol import (
    PULL,
    PUSH,
    Request,
    Shape,
    check_reply,
    describe_table,
    pack_frame,
    pack_request,
    table_from,
    unpack_frame,
    unpack_request,
)
from emberkeep.wire.security import Security
from tests.contracts.engine import assert_same_bits, grads_of, state, tables, wanted_of
from tests.nightly import examples
from tests.waiting import until

SECONDS = timedelta(seconds=60)


class Threads:
    """Servers in threads of this process: quick to start, and their memory can be looked at."""

    def __init__(self, shards: int, security: Security | None = None) -> None:
        self.security = security or Security()
        self._clusters: list[FlightCluster] = []
        self.served = [ShardService(threads=1) for _ in range(shards)]
        self.servers = [ShardServer(one, security=self.security) for one in self.served]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def cluster(
        self, tables: list[Table], optimizer: Optimizer, security: Security | None = None,
        **given: Any,
    ) -> FlightCluster:  # fmt: skip
        security = security or Security()
        hosts = FixedAddresses(self.addresses, security, patience=timedelta(seconds=5))
        given.setdefault("timing", Timing(patience=timedelta(seconds=20)))
        cluster = FlightCluster(
            tables, optimizer, hosts, pool=pool.Pool(1), security=security, **given
        )
        self._clusters.append(cluster)
        return cluster

    def end(self) -> None:
        """Streams first: Flight waits for them when it ends."""
        for cluster in self._clusters:
            cluster.close()
        for server in self.servers:
            server.shutdown()


@pytest.fixture
def servers() -> Iterator[Threads]:
    started = Threads(3)
    yield started
    started.end()


@pytest.fixture(scope="module", autouse=True)
def _ends() -> Iterator[None]:
    yield
    for threads in [*_threads, *_victims[:1]]:
        threads.end()


# -- ranks ---------------------------------------------------------------------------------------


def parts_of(step: int, rank: int) -> tuple[dict[str, list[int]], dict[str, Any]]:
    random = np.random.default_rng([step, rank])
    batch = {
        "fixed": random.choice(40, 12, replace=False).tolist(),
        "dynamic": random.choice(50, 6, replace=False).tolist() if step % 3 else [],
        "evicting": random.choice(9, 3, replace=False).tolist(),
        "wide": random.choice(30, 5, replace=False).tolist(),
    }
    dims = {table.name: table.dim for table in tables()}
    return batch, {n: random.standard_normal((len(i), dims[n])) for n, i in batch.items()}


@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=["adagrad", "adam"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_ranks_that_train_together_give_the_bits_of_one_process_that_joins_them(
    servers: Threads, optimizer: Optimizer, dynamic: bool
) -> None:
    given = tables() if dynamic else [table for table in tables() if not table.dynamic]
    world, steps = 3, 5
    first = servers.cluster(given, optimizer, rank=0, world=world)
    ranks = [
        first,
        *(servers.cluster(given, optimizer, rank=r, world=world, coordinate=False) for r in (1, 2)),
    ]
    twin = local(shards=3, threads=1).open(given, optimizer, seed=0)
    names = [table.name for table in given]

    def work(rank: int) -> None:
        cluster = ranks[rank]
        for step in range(steps):
            batch, grads = parts_of(step, rank)
            cluster.push(
                wanted_of(cluster, {n: batch[n] for n in names}),
                grads_of(cluster, {n: grads[n] for n in names}),
                lr=0.1,
            )

    with ThreadPoolExecutor(world) as threads:
        for done in [threads.submit(work, rank) for rank in range(world)]:
            done.result(timeout=60)
    for step in range(steps):
        parts = []
        for rank in range(world):
            batch, grads = parts_of(step, rank)
            parts.append(
                (
                    wanted_of(twin, {n: batch[n] for n in names}),
                    grads_of(twin, {n: grads[n] for n in names}),
                )
            )
        twin.push(*join(parts, pool.Pool(1)), lr=0.1)
    assert state(first) == state(twin)
    assert first.table_state() == twin.table_state()
    first.close()


def test_two_workers_equal_one_with_twice_the_batch_up_to_the_order_of_sums(
    servers: Threads,
) -> None:
    given = [Table("t", rows=30, dim=4)]
    both = [servers.cluster(given, SGD(lr=0.5), rank=0, world=2)]
    both.append(servers.cluster(given, SGD(lr=0.5), rank=1, world=2, coordinate=False))
    one = local().open(given, SGD(lr=0.5), seed=0)
    samples = np.random.default_rng(0).integers(0, 30, (6, 2, 16))
    weights = np.random.default_rng(1).standard_normal((6, 2, 16, 4)).astype(np.float32)

    def mean(ids: Any, grads: Any) -> tuple[list[RowIds], list[Any]]:
        unique = np.unique(ids)
        summed = np.zeros((unique.size, 4), np.float32)
        np.add.at(summed, np.searchsorted(unique, ids), grads)
        return [RowIds(unique, np.array([0, unique.size]))], [summed / np.float32(ids.size)]

    def work(rank: int) -> None:
        for step in range(6):
            both[rank].push(*mean(samples[step, rank], weights[step, rank]), lr=0.5)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, rank) for rank in range(2)]:
            done.result(timeout=60)
    for step in range(6):
        one.push(*mean(samples[step].reshape(-1), weights[step].reshape(-1, 4)), lr=0.5)
    ids = np.arange(30)
    np.testing.assert_allclose(
        both[0].read("t", ids)["weight"], one.read("t", ids)["weight"], atol=1e-6
    )
    both[0].close()


def test_a_rank_that_never_comes_is_waited_for_and_no_longer(servers: Threads) -> None:
    given = [Table("t", rows=30, dim=4)]
    timing = Timing(patience=timedelta(seconds=0.3))
    cluster = servers.cluster(given, SGD(lr=0.5), rank=0, world=2, timing=timing)
    ids = [RowIds(np.arange(30), np.array([0, 30]))]
    with pytest.raises(RankError, match="rank 1 of 2"):
        cluster.push(ids, [np.ones((30, 4), np.float32)], lr=1.0)
    assert cluster.touched_ids("t").size == 0
    cluster.close()


def test_numbers_are_applied_once_and_gaps_are_refused() -> None:
    ledger = Ledger()
    assert not ledger.applied(1, 7)  # the first number of a new ledger is as good as any
    ledger.note(1, 7)
    assert ledger.applied(1, 7)
    assert ledger.applied(1, 3)
    assert not ledger.applied(1, 8)
    with pytest.raises(ProtocolError, match="one was lost"):
        ledger.applied(1, 9)
    assert not ledger.applied(2, 1)


# -- prefetch ------------------------------------------------------------------------------------


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_a_prefetched_pull_is_what_a_pull_would_be(seed: int) -> None:
    """Also where the push before it evicts rows, inserts them, or is another rank's."""
    servers = _shared_threads()
    given = tables()
    ranks = [servers.cluster(given, Adagrad(lr=0.1), rank=0, world=2)]
    ranks.append(servers.cluster(given, Adagrad(lr=0.1), rank=1, world=2, coordinate=False))
    random = np.random.default_rng(seed)

    def batch() -> dict[str, list[int]]:
        return {
            "fixed": random.choice(40, 10, replace=False).tolist(),
            "dynamic": random.choice(20, 5, replace=False).tolist(),
            "evicting": random.choice(25, 4, replace=False).tolist(),
            "wide": random.choice(30, 5, replace=False).tolist(),
        }

    dims = {table.name: table.dim for table in given}
    with ThreadPoolExecutor(2) as threads:
        for _ in range(4):
            following = [wanted_of(ranks[r], batch()) for r in range(2)]
            for rank in range(2):
                ranks[rank].prefetch(following[rank])
            done = []
            for rank in range(2):
                own = batch()
                grads = {n: random.standard_normal((len(i), dims[n])) for n, i in own.items()}
                wanted = wanted_of(ranks[rank], own)
                done.append(
                    threads.submit(ranks[rank].push, wanted, grads_of(ranks[rank], grads), lr=0.1)
                )
            for one in done:
                one.result(timeout=120)
            for rank in range(2):
                assert ranks[rank]._ahead is not None
                ahead = ranks[rank].pull(following[rank])
                plain = ranks[rank].pull(following[rank])
                for a, b in zip(ahead, plain, strict=True):
                    assert_same_bits(a, b)
    ranks[0].close()
    ranks[1].close()


_threads: list[Threads] = []


def _shared_threads() -> Threads:
    if not _threads:
        _threads.append(Threads(2))
    return _threads[0]


# -- hostile messages ----------------------------------------------------------------------------

SHAPE = Shape((2, 1), (4, 3))
GOOD = pack_request(
    Request(
        kind=PUSH, epoch=1, incarnation=3, number=1, lr=0.1,
        wanted=[RowIds(np.arange(4), np.array([0, 2, 4])), RowIds(np.arange(3), np.array([0, 3]))],
        grads=[np.ones((4, 4), np.float32), np.ones((3, 3), np.float32)],
    )
)  # fmt: skip
FRAME = np.frombuffer(
    pack_frame({"epoch": 1, "table": "fixed"}, {"": np.arange(3), "weight": np.ones((3, 4))}),
    np.uint8,
)


def mutated(data: st.DataObject, blob: Any) -> Any:
    """Cut, lengthened, or with bytes and whole words replaced."""
    out = blob.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(["byte", "word", "cut", "grow"]))
        if what == "byte" and out.size:
            out[data.draw(st.integers(0, out.size - 1))] = data.draw(st.integers(0, 255))
        elif what == "word" and out.size >= 8:
            at = data.draw(st.integers(0, out.size - 8))
            word = data.draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300))
            out[at : at + 8] = np.frombuffer(np.int64(word).tobytes(), np.uint8)
        elif what == "cut":
            out = out[: data.draw(st.integers(0, out.size))].copy()
        else:
            more = data.draw(st.binary(max_size=64))
            out = np.concatenate([out, np.frombuffer(more, np.uint8)])
    return out


@settings(max_examples=examples(300))
@given(data=st.data())
def test_a_malformed_message_is_refused_before_anything_is_allocated_for_it(
    data: st.DataObject,
) -> None:
    try:
        request = unpack_request(mutated(data, GOOD), SHAPE)
        assert sum(ids.ids.nbytes for ids in request.wanted) <= GOOD.size + 256
    except ProtocolError:
        pass
    try:
        _, arrays = unpack_frame(mutated(data, FRAME).tobytes())
        assert sum(values.nbytes for values in arrays.values()) <= FRAME.size + 256
    except ProtocolError:
        pass


def fuzz(data: st.DataObject, messages: int) -> None:
    """Sends damaged messages to a live server; none of its rows may change."""
    served, address, before = _victim()
    connection = Connection(address, Security())
    connection.open(SECONDS)
    blob = pack_request(
        Request(kind=PULL, epoch=1, wanted=wanted_of(_Groups(), {"fixed": [1, 2], "wide": [3]}))
    )
    push = pack_request(
        Request(
            kind=PUSH, epoch=1, incarnation=9, number=2**40, lr=0.1,
            wanted=wanted_of(_Groups(), {"fixed": [1, 2], "wide": [3]}),
            grads=[np.full((2, 5), np.nan, np.float32), np.full((1, 9), np.nan, np.float32)],
        )
    )  # fmt: skip
    for _ in range(messages):
        good = data.draw(st.sampled_from([blob, push]))
        message = mutated(data, good)
        try:
            if message.size and data.draw(st.booleans()):
                connection.send(message, SECONDS)
                check_reply(connection.receive())
                connection.settled()
            else:
                kind = data.draw(st.sampled_from([*served._actions, "nothing"]))
                if kind in ("release", "admit", "delete", "clear", "install", "load_table_state"):
                    kind = "read"  # those may change rows when by chance they are well-formed
                header = data.draw(
                    st.dictionaries(
                        st.sampled_from(["epoch", "table", "url", "names", "since", "rows"]),
                        st.none() | st.integers(-2, 2) | st.text(max_size=4) | st.lists(st.none()),
                    )
                )
                frame = np.frombuffer(pack_frame(header, {"ids": np.arange(2)}), np.uint8)
                _send_raw(connection, kind, mutated(data, frame).tobytes())
        except EmberkeepError:
            connection.close()
            connection = Connection(address, Security())
            connection.open(SECONDS)
    connection.close()
    assert _rows(served) == before


class _Groups:
    """Enough of a cluster for `wanted_of`."""

    tables = tuple(tables())
    groups = ((0, 1, 2), (3,))


def _send_raw(connection: Connection, kind: str, content: bytes) -> None:
    for body in connection._channel.call(kind, content, SECONDS):
        unpack_frame(body)


def _rows(served: ShardService) -> Any:
    assert served._epoch is not None
    shard = served._epoch.shard
    return {
        table.name: [shard.read_all(table.name)[0].tobytes()]
        + [values.tobytes() for values in shard.read_all(table.name)[1].values()]
        for table in shard.tables
    }


_victims: list[Any] = []


def _victim() -> tuple[ShardService, str, Any]:
    if not _victims:
        threads = Threads(1)
        cluster = threads.cluster(tables(), Adagrad(lr=0.1))
        batch, grads = parts_of(1, 0)
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
        _victims.extend([threads, cluster, _rows(threads.served[0])])
    threads, _, before = _victims
    return threads.served[0], threads.addresses[0], before


def test_a_record_batch_is_refused_and_ends_its_stream() -> None:
    import pyarrow as pa

    served, address, before = _victim()
    connection = Connection(address, Security())
    connection.open(SECONDS)
    connection._channel._due = float("inf")  # as if it was sent
    connection._channel._writer.begin(pa.schema([("message", pa.uint8())]))
    connection._channel._writer.write_batch(
        pa.record_batch({"message": pa.array([1, 2], pa.uint8())})
    )
    with pytest.raises(ProtocolError, match="no record batch"):
        check_reply(connection.receive())
    with pytest.raises(ServerError):
        connection.receive()
    connection.close()
    assert _rows(served) == before


@settings(max_examples=12)
@given(data=st.data())
def test_a_server_survives_hostile_messages_and_no_row_changes(data: st.DataObject) -> None:
    fuzz(data, 8)


@pytest.mark.soak
@settings(max_examples=examples(500), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_server_survives_ten_thousand_hostile_messages(data: st.DataObject) -> None:
    fuzz(data, 20)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (RowIds(np.array([1, 2]), np.array([0, 2])), "other shards"),
        (RowIds(np.array([3, 3]), np.array([0, 2])), "every row once"),
    ],
)
def test_ids_that_would_ruin_a_shard_are_refused(
    servers: Threads, wanted: RowIds, words: str
) -> None:
    cluster = servers.cluster([Table("t", rows=30, dim=2)], SGD(lr=1.0))
    request = Request(
        kind=PUSH, epoch=cluster.handles[0].epoch, number=1, lr=1.0, wanted=[wanted],
        grads=[np.ones((2, 2), np.float32)],
    )  # fmt: skip
    with pytest.raises(ProtocolError, match=words):
        check_reply(servers.served[0].answer(pack_request(request), Session()))
    assert cluster.touched_ids("t").size == 0
    cluster.close()


def test_a_gradient_that_is_not_finite_changes_no_shard(servers: Threads) -> None:
    cluster = servers.cluster([Table("t", rows=30, dim=2)], SGD(lr=1.0))
    grads = np.ones((30, 2), np.float32)
    grads[17, 1] = np.inf
    with pytest.raises(GradientError, match="id 17"):
        cluster.push([RowIds(np.arange(30), np.array([0, 30]))], [grads], lr=1.0)
    assert cluster.touched_ids("t").size == 0
    cluster.close()


def test_tables_and_frames_come_back_as_they_were() -> None:
    for table in [
        *tables(),
        Table("n", rows=3, dim=2, init=Normal(0.5, 0.25), features=["a", "b"]),
    ]:
        assert table_from(json.loads(json.dumps(describe_table(table)))) == table
    with pytest.raises(ProtocolError):
        table_from({"name": "x"})


def test_a_worker_with_other_tables_is_refused(servers: Threads) -> None:
    first = servers.cluster([Table("t", rows=30, dim=2)], SGD(lr=1.0))
    with pytest.raises(StateError, match="other tables"):
        servers.cluster([Table("t", rows=31, dim=2)], SGD(lr=1.0), coordinate=False)
    first.close()


def test_asynchronous_workers_push_as_they_come(servers: Threads) -> None:
    given = [Table("t", rows=30, dim=2)]
    first = servers.cluster(given, SGD(lr=1.0))
    workers = [first, servers.cluster(given, SGD(lr=1.0), coordinate=False)]
    before = first.read("t", np.arange(30))["weight"]
    ids = [RowIds(np.arange(30), np.array([0, 30]))]

    def work(cluster: FlightCluster) -> None:
        for _ in range(10):
            cluster.pull(ids)
            cluster.push(ids, [np.ones((30, 2), np.float32)], lr=1.0)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(before - first.read("t", np.arange(30))["weight"], 20, atol=1e-4)
    assert first.table_state()["t"]["steps"] == 20
    first.close()


def test_a_version_beside_asynchronous_workers_holds_on_each_shard_what_was_answered_before(
    servers: Threads, tmp_path: Path
) -> None:
    """Worker w moves column w of all rows by 1: what a version holds says which pushes are in it.
    Each is in it on a shard whole or not at all; which is free only for those under way."""
    given, count, ids = [Table("t", rows=30, dim=2)], 30, np.arange(30)
    coordinator = servers.cluster(given, SGD(lr=1.0))
    workers = [servers.cluster(given, SGD(lr=1.0), coordinate=False) for _ in range(2)]
    initial = coordinator.read("t", ids)["weight"]
    everything = [RowIds(ids, np.array([0, count]))]
    sent, answered, ended = [0, 0], [0, 0], threading.Event()

    def work(worker: int) -> None:
        grads = np.zeros((count, 2), np.float32)
        grads[:, worker] = 1
        while not ended.is_set():
            sent[worker] += 1
            workers[worker].push(everything, [grads], lr=1.0)
            answered[worker] += 1

    repository = Repository.create(LocalStore(tmp_path), schema=coordinator.schema())
    keeper = Checkpointer(repository, coordinator)
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    bounds = []
    for step in range(1, 5):
        least = list(answered)
        keeper.save(step)
        bounds.append((least, list(sent)))
        keeper.wait()
    ended.set()
    for thread in threads:
        thread.join()
    twin = local().open(given, SGD(lr=1.0), seed=0)
    for number, (least, most) in enumerate(bounds, 1):
        Checkpointer(repository, twin).restore(number)
        moved_RD = np.rint(initial - twin.read("t", ids)["weight"])
        for shard in range(3):
            for worker in range(2):
                (pushes,) = np.unique(moved_RD[ids % 3 == shard, worker])
                assert least[worker] <= pushes <= most[worker]
    assert bounds[-1][0] > bounds[0][0]


# -- who may come in -----------------------------------------------------------------------------

TOKEN = "a token of some length"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("pems")
    authority, stranger = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    files = {name: where / f"{name}.pem" for name in ("certificate", "key", "authority", "other")}
    issued.private_key_pem.write_to_path(files["key"])
    for chain in issued.cert_chain_pems:
        chain.write_to_path(files["certificate"], append=True)
    authority.cert_pem.write_to_path(files["authority"])
    stranger.cert_pem.write_to_path(files["other"])
    return files


def test_servers_with_parity_trust_each_other_by_the_authority(pems: dict[str, Path]) -> None:
    guarded = Threads(
        3,
        Security(
            token=TOKEN, certificate=pems["certificate"], key=pems["key"],
            authority=pems["authority"],
        ),
    )  # fmt: skip
    cluster = guarded.cluster([Table("t", rows=30, dim=2)], SGD(lr=1.0), security=guarded.security)
    cluster.protect(Parity(k=2, r=1))
    ids = [RowIds(np.arange(30), np.array([0, 30]))]
    cluster.push(ids, [np.ones((30, 2), np.float32)], lr=1.0)
    assert cluster.parity.protected
    assert cluster.parity.messages == 6
    guarded.end()


def test_rows_travel_over_tls_to_those_with_the_token(pems: dict[str, Path]) -> None:
    guarded = Threads(1, Security(token=TOKEN, certificate=pems["certificate"], key=pems["key"]))
    trusted = Security(token=TOKEN, authority=pems["authority"])
    given = [Table("t", rows=30, dim=2)]
    cluster = guarded.cluster(given, SGD(lr=1.0), security=trusted)
    twin = local().open(given, SGD(lr=1.0), seed=0)
    ids = [RowIds(np.arange(30), np.array([0, 30]))]
    for one in (cluster, twin):
        one.push(ids, [np.ones((30, 2), np.float32)], lr=1.0)
    assert state(cluster) == state(twin)
    (address,) = guarded.addresses
    assert address.startswith("grpc+tls://")
    for token in (None, "another token, also long"):
        stranger = Connection(address, Security(token=token, authority=pems["authority"]))
        with pytest.raises(SecurityError, match="token"):
            stranger.act("status", deadline=SECONDS)
    with pytest.raises(SecurityError, match="is not trusted"):
        Connection(address, Security(token=TOKEN, authority=pems["other"])).act(
            "status", deadline=SECONDS
        )
    with pytest.raises(SecurityError, match="speaks TLS"):
        Connection(address.replace("tls", "tcp"), Security(token=TOKEN)).act(
            "status", deadline=SECONDS
        )
    guarded.end()


@pytest.mark.parametrize(
    ("security", "host", "words"),
    [
        ({}, "0.0.0.0", "TLS|tls-certificate"),
        ({"token": TOKEN}, "10.1.2.3", "tls-certificate"),
        ({}, "::", "token"),
    ],
)
def test_other_machines_need_tls_and_a_token(
    security: dict[str, Any], host: str, words: str
) -> None:
    with pytest.raises(SecurityError, match=words):
        ShardServer(ShardService(threads=1), host=host, security=Security(**security))


def test_unsafe_connections_are_refused_before_they_are_opened() -> None:
    with pytest.raises(SecurityError, match="grpc\\+tls"):
        Connection("10.1.2.3:7070", Security(token=TOKEN))
    with pytest.raises(SecurityError, match="host:port"):
        Connection("nonsense", Security())
    with pytest.raises(SecurityError, match="16 characters"):
        Security(token="short")
    with pytest.raises(SecurityError, match="both"):
        Security(certificate=Path("x"))


# -- seen from outside ---------------------------------------------------------------------------


def test_prometheus_reads_what_a_server_does(servers: Threads) -> None:
    often = Timing(deadline=timedelta(seconds=1), lease=timedelta(seconds=1))
    cluster = servers.cluster([Table("t", rows=30, dim=2)], SGD(lr=1.0), timing=often)
    cluster.track()
    ids = [RowIds(np.arange(30), np.array([0, 30]))]
    for _ in range(3):
        cluster.pull(ids)
        cluster.push(ids, [np.ones((30, 2), np.float32)], lr=1.0)
    cluster.tell(version=7, version_at=time.time() - 60, pls=0.25)
    until(lambda: "emberkeep_pls" in servers.served[1].page.text(), "a renewal of the lease")
    exporter = MetricsServer(servers.served[1].page.text, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    exporter.close()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("shard") == "1"
    }
    assert found.pop("emberkeep_version_age_seconds") == pytest.approx(60, abs=30)
    for name, value in {
        "rows_pulled_total": 30, "rows_pushed_total": 30, "pull_seconds_count": 3,
        "push_seconds_count": 3, "dirty_rows": 10, "state_serving": 1, "queue_depth": 0,
        "version": 7, "pls": 0.25,
    }.items():  # fmt: skip
        assert found[f"emberkeep_{name}"] == value, name
    cluster.close()


def test_a_port_that_is_taken_is_named() -> None:
    first = ShardServer(ShardService(threads=1))
    with pytest.raises(ServerError, match=f"127.0.0.1:{first.port}: Address already in use"):
        ShardServer(ShardService(threads=1), port=first.port)
    first.shutdown()


def test_a_certificate_that_is_none_is_named() -> None:
    security = Security(token="a token of enough characters", certificate=b"no", key=b"no")
    with pytest.raises(SecurityError, match="PEM"):
        ShardServer(ShardService(threads=1), security=security)
