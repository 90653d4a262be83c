"""Rows from outside on servers: between two pushes of their client, whatever arrives late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.table_states import NO_EDIT
from emberkeep.errors import EpochError, ProtocolError, TableFullError
from emberkeep.repository import Repository
from emberkeep.rows import upsert as upserts
from emberkeep.server import admission
from emberkeep.tables import Table
from tests.contracts.engine import wanted_of
from tests.unit.server.test_checked_pushes import Servers, owned, push, servers

__all__ = ["servers"]

ONES = {"weight": np.ones((1, 2), np.float32)}


def weights(cluster: Any, *ids: int) -> list[list[float]]:
    found: list[list[float]] = cluster.read("roomy", np.array(ids))["weight"].tolist()
    return found


def test_a_request_that_arrives_after_the_next_push_changes_nothing(servers: Servers) -> None:
    cluster = servers.clusters[0]
    (identity,) = owned(cluster, 0, 1)
    after = (cluster._incarnation, cluster._number, 1)
    cluster.upsert("roomy", [identity], ONES)
    push(cluster, {"roomy": [identity]})
    trained = weights(cluster, identity)
    assert trained != [[1.0, 1.0]]
    epoch = servers.epochs[0]
    with pytest.raises(EpochError, match="late"):
        epoch.upsert("roomy", np.array([identity]), ONES, NO_EDIT, after)
    assert weights(cluster, identity) == trained
    with pytest.raises(ProtocolError, match="once"):
        epoch.upsert("roomy", np.array([identity] * 2), ONES, NO_EDIT, after)


def test_rows_that_another_worker_has_pulled_ahead_are_pulled_again(servers: Servers) -> None:
    first = servers.clusters[0]
    second = servers.join()
    servers.clusters.append(second)
    ids = owned(first, 0, 1) + owned(first, 1, 1)
    wanted = wanted_of(second, {"full": [], "roomy": ids})
    second.prefetch(wanted)
    first.upsert("roomy", ids, {"weight": np.full((2, 2), 3.0)})
    push(second, {"full": [1]})
    (rows,) = second.pull(wanted)
    assert rows.tolist() == [[3.0, 3.0]] * 2


def test_rows_that_this_client_has_pulled_ahead_are_pulled_again(servers: Servers) -> None:
    cluster = servers.clusters[0]
    wanted = wanted_of(cluster, {"full": [], "roomy": [5, 6]})
    cluster.prefetch(wanted)
    cluster.upsert("roomy", [5, 6], {"weight": np.full((2, 2), 3.0)})
    assert cluster.pull(wanted)[0].tolist() == [[3.0, 3.0]] * 2


def test_so_are_rows_that_were_pulled_ahead_while_others_were_written(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a write under way the old rows are read; the push after it must not take them for new."""
    first = servers.clusters[0]
    second = servers.join()
    servers.clusters.append(second)
    ids = owned(first, 0, 1)
    first.upsert("roomy", ids, {"weight": np.full((1, 2), 2.0)})
    wanted = wanted_of(second, {"full": [], "roomy": ids})
    shard = servers.epochs[0].shard
    write = shard.upsert

    def interrupted(*given: Any) -> None:
        second.prefetch(wanted)
        second._await_ahead()
        write(*given)

    monkeypatch.setattr(shard, "upsert", interrupted)
    first.upsert("roomy", ids, {"weight": np.full((1, 2), 3.0)})
    push(second, {"full": [1]})
    assert second.pull(wanted)[0].tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("how", ["delete", "install"])
def test_so_are_rows_that_are_deleted_or_loaded(how: str, servers: Servers) -> None:
    first = servers.clusters[0]
    second = servers.join()
    servers.clusters.append(second)
    ids = np.array(owned(first, 0, 1) + owned(first, 1, 1))
    initial = weights(first, *ids)
    first.upsert("roomy", ids, {"weight": np.full((2, 2), 3.0)})
    wanted = wanted_of(second, {"full": [], "roomy": ids.tolist()})
    second.prefetch(wanted)
    if how == "delete":
        first.delete("roomy", ids)
    else:
        planes = first.read("roomy", ids)
        first.install("roomy", ids, {**planes, "weight": np.array(initial, np.float32)})
    push(second, {"full": [1]})
    assert second.pull(wanted)[0].tolist() == initial
    assert first.pull(wanted)[0].tolist() == initial


@pytest.mark.parametrize("how", ["clear", "load"])
def test_so_are_rows_of_tables_that_are_replaced_as_a_whole(how: str, tmp_path: Path) -> None:
    """A fixed row keeps its place, which says nothing of what is there."""
    servers = Servers([Table("full", rows=200, dim=2), Table("roomy", rows=200, dim=2)])
    first = servers.clusters[0]
    second = servers.join()
    ids = [5, 6]
    initial = weights(first, *ids)
    saver = Checkpointer(Repository.create(LocalStore(tmp_path), schema=first.schema()), first)
    saver.save(0)
    saved = saver.wait()
    assert saved is not None
    first.upsert("roomy", ids, {"weight": np.full((2, 2), 3.0)})
    wanted = wanted_of(second, {"full": [], "roomy": ids})
    second.prefetch(wanted)
    if how == "clear":
        first.clear()
    else:
        names = {table.name: table.name for table in first.tables}
        first.load_version(saver.repository, [saved], names)
    push(second, {"full": [1]})
    assert second.pull(wanted)[0].tolist() == initial
    for cluster in (second, first):
        cluster.close()


def test_a_table_that_another_worker_fills_in_between_is_said_as_it_is(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both shards had agreed: what is written by then cannot be said to be unchanged."""
    cluster = servers.clusters[0]
    a, b = owned(cluster, 0, 12), owned(cluster, 1, 12)
    monkeypatch.setattr(upserts, "check_room", lambda *given: np.zeros(given[2].size, np.bool_))
    for ids in (a, [*a, b[0]]):  # one shard alone, or one of two
        more = "rows of other shards may have been written" if len(ids) > 12 else "evict_oldest'$"
        with pytest.raises(TableFullError, match=more):
            cluster.upsert("full", np.array(ids), {"weight": np.ones((len(ids), 2))})


def test_a_deletion_does_not_come_between_check_and_application_of_a_push(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push has found the places of its rows: a place that was freed meanwhile would be that of
    the next new row as well."""
    first, second = servers.clusters[0], servers.join()
    servers.clusters.append(second)
    gone, new = owned(first, 0, 2)
    push(first, {"roomy": [gone]})
    shard = servers.epochs[0].shard
    check = shard.check
    deleting = threading.Thread(target=first.delete, args=("roomy", np.array([gone])))

    checked: list[object] = []

    def checks(*part: Any) -> Any:
        found = check(*part)
        checked.append(found)
        if len(checked) == 2:  # the places of the first are found again when the push is applied
            deleting.start()
            deleting.join(0.3)  # it waits for the push, however long that is
        return found

    monkeypatch.setattr(shard, "check", checks)
    push(second, {"roomy": [gone]})
    deleting.join()
    assert first.touched_ids("roomy").size == 0
    begins = weights(first, new)
    push(second, {"roomy": [new]})
    assert np.allclose(np.subtract(begins, weights(first, new)), 0.1)  # its first step


def test_a_push_that_adopted_rows_hold_is_not_applied_again(servers: Servers) -> None:
    """Its answer was lost, and a worker that outlives the trainer sends it to the next epoch."""
    cluster, epoch = servers.clusters[0], servers.epochs[0]
    (identity,) = owned(cluster, 0, 1)
    push(cluster, {"roomy": [identity]})
    held = epoch.pushes()
    header = {"epoch": 9, "coordinator": "b", "lease_seconds": 5, "meeting_seconds": 5}
    after = admission.adopt(epoch, header)
    assert after.pushes() == held
    assert list(held.values()) == [cluster._number]
