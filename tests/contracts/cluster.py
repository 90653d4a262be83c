"""What every cluster must do when shards are lost and come back, whatever they are made of.

A backend is tested by a subclass of a few lines that says how a cluster is opened and how shards
of it are made to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.target_view import shard_view
from emberkeep.errors import ConfigError, ShardLostError, TableFullError
from emberkeep.repository import Repository
from emberkeep.rows.snapshot import Chunk
from emberkeep.rows.tracker import SINCE_BASELINE, SINCE_VERSION
from emberkeep.tables import Adagrad, Adam, Optimizer, Table
from tests.contracts.engine import grads_of, state, tables, wanted_of

SHARDS = 3
CHUNK_ROWS = 4096
BUFFER_NBYTES = 1 << 24


def batch_of(random: np.random.Generator) -> dict[str, list[int]]:
    return {
        "fixed": random.choice(40, 15, replace=False).tolist(),
        "dynamic": random.choice(50, 9, replace=False).tolist(),
        "evicting": random.choice(9, 3, replace=False).tolist(),
        "wide": random.choice(30, 7, replace=False).tolist(),
    }


def push(cluster: Any, random: np.random.Generator, steps: int = 1) -> None:
    for _ in range(steps):
        batch = batch_of(random)
        dims = {table.name: table.dim for table in cluster.tables}
        grads = {n: random.standard_normal((len(i), dims[n])) for n, i in batch.items()}
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def rows_of(cluster: Any, shards: Sequence[int]) -> dict[Any, Any]:
    """Everything that some shards hold."""
    held = {}
    for shard in shards:
        for table in cluster.tables:
            ids, planes = cluster.handles[shard].read_all(table.name)
            order = np.argsort(ids)
            held[shard, table.name] = {
                "ids": ids[order].tobytes(),
                **{name: values[order].tobytes() for name, values in planes.items()},
            }
    return held


def copy_of(cluster: Any, shard: int) -> Callable[[], None]:
    """Keeps a shard's rows as they are now; the call brings them into its replacement."""
    rows = {table.name: cluster.handles[shard].read_all(table.name) for table in cluster.tables}
    tables = cluster.table_state()

    def fill() -> None:
        part = shard_view(cluster, shard)
        for name, (ids, planes) in rows.items():
            part.install(name, ids, planes)
        part.load_table_state(tables)

    return fill


def drained(frozen: Sequence[Any]) -> dict[str, set[int]]:
    """The ids that frozen rows hand out, by table."""
    found: dict[str, set[int]] = {}
    for rows in frozen:
        chunk: Chunk
        for chunk in rows.chunks(CHUNK_ROWS):
            found.setdefault(chunk.table, set()).update(chunk.ids.tolist())
    return found


CALLS: dict[str, Callable[[Any], object]] = {
    "pull": lambda c: c.pull(wanted_of(c, {"fixed": [0, 1, 2]})),
    "push": lambda c: push(c, np.random.default_rng(1)),
    "upsert": lambda c: c.upsert("fixed", np.arange(9), {"weight": np.ones((9, 5))}),
    "read": lambda c: c.read("fixed", np.arange(6)),
    "read_all": lambda c: c.read_all("wide"),
    "touched_ids": lambda c: c.touched_ids("dynamic"),
    "table_state": lambda c: c.table_state(),
    "freeze": lambda c: c.freeze(None, BUFFER_NBYTES),
}


class ClusterContract:
    """Subclass it and say how a cluster is opened and how its shards fail."""

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0
    ) -> Any:
        raise NotImplementedError

    def kill(self, cluster: Any, *shards: int) -> None:
        """Makes shards fail: nothing of their memory is left."""
        raise NotImplementedError

    def trained(self, optimizer: Optimizer | None = None, steps: int = 4) -> Any:
        cluster = self.open(tables(), optimizer or Adagrad(lr=0.1), shards=SHARDS)
        cluster.track()
        push(cluster, np.random.default_rng(0), steps)
        return cluster

    # -- refusing --------------------------------------------------------------------------------

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
    def test_a_lost_shard_is_named_and_nothing_changes(self, call: Callable[[Any], Any]) -> None:
        cluster = self.trained()
        before = rows_of(cluster, [1])
        self.kill(cluster, 0, 2)
        with pytest.raises(ShardLostError) as refused:
            call(cluster)
        assert set(refused.value.shards) <= {0, 2}
        with pytest.raises(ShardLostError) as refused:  # by now both are known to be lost
            call(cluster)
        assert refused.value.shards
        assert rows_of(cluster, [1]) == before
        assert cluster.handles[1].state == "serving"

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
    def test_a_replacement_is_empty_and_refuses_until_it_was_recovered(
        self, call: Callable[[Any], Any]
    ) -> None:
        cluster = self.trained()
        before = rows_of(cluster, [0, 2])
        self.kill(cluster, 1)
        cluster.renew(1)
        assert cluster.lost() == (1,)
        assert cluster.status()[1].state == "recovering"
        with pytest.raises(ShardLostError) as refused:
            call(cluster)
        assert refused.value.shards == (1,)
        assert rows_of(cluster, [0, 2]) == before
        cluster.serve(1)
        assert cluster.lost() == ()
        call(cluster)

    def test_a_recovering_shard_answers_no_call_of_its_own(self) -> None:
        cluster = self.trained()
        cluster.renew(1)
        shard = cluster.handles[1]
        for call in (
            lambda: shard.read("fixed", np.array([1])),
            lambda: shard.read_all("fixed"),
            lambda: shard.touched_ids("fixed"),
            lambda: shard.table_state(),
            lambda: shard.freeze(None, BUFFER_NBYTES),
        ):
            with pytest.raises(ShardLostError):
                call()

    def test_shards_that_do_not_exist_are_refused(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        for call in (cluster.renew, cluster.serve):
            with pytest.raises(ConfigError, match=f"no shard {SHARDS}"):
                call(SHARDS)

    # -- coming back -----------------------------------------------------------------------------

    def test_each_life_has_a_later_epoch(self) -> None:
        cluster = self.trained()
        first = [shard.epoch for shard in cluster.status()]
        self.kill(cluster, 0)
        cluster.renew(0)
        cluster.serve(0)
        second = [shard.epoch for shard in cluster.status()]
        assert second[0] > first[0]
        assert second[1:] == first[1:]
        cluster.renew(*range(SHARDS))  # also of those that were never lost
        cluster.serve(*range(SHARDS))
        assert all(now.epoch > then for now, then in zip(cluster.status(), second, strict=True))
        assert all(cluster.touched_ids(table.name).size == 0 for table in cluster.tables)

    @pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=["adagrad", "adam"])
    def test_a_filled_replacement_trains_on_as_if_nothing_had_been(
        self, optimizer: Optimizer
    ) -> None:
        cluster, twin = self.trained(optimizer), self.trained(optimizer)
        fills = {shard: copy_of(cluster, shard) for shard in (0, 2)}
        self.kill(cluster, 0, 2)
        cluster.renew(0, 2)
        for fill in fills.values():
            fill()
        cluster.serve(0, 2)
        assert state(cluster) == state(twin)
        assert cluster.table_state() == twin.table_state()
        for one in (cluster, twin):
            push(one, np.random.default_rng(7), 3)
        assert state(cluster) == state(twin)
        assert cluster.table_state() == twin.table_state()

    def test_a_part_passes_over_the_rows_of_other_shards(self) -> None:
        source, target = self.trained(), self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        before = rows_of(source, range(SHARDS))
        target.renew(1)
        part = shard_view(target, 1)
        for table in source.tables:
            part.install(table.name, *source.read_all(table.name))
        target.serve(1)
        for table in source.tables:
            assert rows_of(target, [1])[1, table.name] == before[1, table.name]
            assert rows_of(target, [0])[0, table.name]["ids"] == b""
            everyone = source.touched_ids(table.name)
            held = target.handles[1].touched_ids(table.name).size
            assert part.delete(table.name, everyone) == held
            assert target.touched_ids(table.name).size == 0

    def test_a_call_is_made_again_when_the_loss_was_made_good(self) -> None:
        cluster, twin = self.trained(), self.trained()
        fill = copy_of(cluster, 1)
        heard: list[tuple[int, ...]] = []

        def recover(lost: ShardLostError) -> bool:
            heard.append(cluster.lost())
            cluster.renew(1)
            fill()
            cluster.serve(1)
            return True

        cluster.on_loss = recover
        for call in CALLS.values():
            if call is CALLS["freeze"]:
                continue
            fill = copy_of(cluster, 1)
            self.kill(cluster, 1)
            call(cluster)
            call(twin)
        assert heard == [(1,)] * (len(CALLS) - 1)
        assert state(cluster) == state(twin)
        self.kill(cluster, 1)
        cluster.on_loss = lambda lost: False
        with pytest.raises(ShardLostError):
            CALLS["pull"](cluster)

    # -- beside a checkpoint ---------------------------------------------------------------------

    def test_a_shard_that_dies_while_it_is_copied_ends_that_copy_alone(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        cluster.track()
        push(cluster, np.random.default_rng(0), 4)
        touched = {t.name: cluster.handles[0].touched_ids(t.name).tolist() for t in cluster.tables}
        frozen = cluster.freeze(None, BUFFER_NBYTES)
        self.kill(cluster, 1)
        assert drained(frozen[0]) == {name: set(ids) for name, ids in touched.items() if ids}
        with pytest.raises(ShardLostError) as refused:
            drained(frozen[1])
        assert refused.value.shards == (1,)
        for rows in (rows for shard in frozen for rows in shard):
            rows.close(())  # the save failed
        cluster.renew(1)
        cluster.serve(1)
        again = cluster.freeze(SINCE_VERSION, BUFFER_NBYTES)
        assert drained(again[0]) == {name: set(ids) for name, ids in touched.items() if ids}
        assert drained(again[1]) == {}
        for rows in (rows for shard in again for rows in shard):
            rows.close((SINCE_VERSION, SINCE_BASELINE))

    def test_frozen_rows_come_with_what_their_tables_knew(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        cluster.track()
        push(cluster, np.random.default_rng(0), 4)
        known = cluster.table_state()
        frozen = cluster.freeze(None, BUFFER_NBYTES)
        push(cluster, np.random.default_rng(1), 1)
        assert frozen.tables == known != cluster.table_state()
        for rows in (rows for shard in frozen for rows in shard):
            rows.close(())

    def test_a_shard_that_dies_after_it_was_copied_harms_no_copy(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        cluster.track()
        push(cluster, np.random.default_rng(0), 4)
        frozen = cluster.freeze(None, BUFFER_NBYTES)
        everything = [drained(part) for part in frozen]
        self.kill(cluster, *range(SHARDS))
        for rows in (rows for shard in frozen for rows in shard):
            rows.close((SINCE_VERSION, SINCE_BASELINE))
        assert all(everything)

    def test_changes_are_followed_in_a_replacement(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        cluster.track()
        push(cluster, np.random.default_rng(0), 4)
        fill = copy_of(cluster, 1)
        held = {t.name: set(cluster.handles[1].touched_ids(t.name).tolist()) for t in tables()}
        self.kill(cluster, 1)
        cluster.renew(1)
        fill()
        shard_view(cluster, 1).forget_changes(keep_since_baseline=True)
        cluster.serve(1)
        for since, expected in ((SINCE_VERSION, {}), (SINCE_BASELINE, held)):
            frozen = cluster.freeze(since, BUFFER_NBYTES)
            assert drained(frozen[1]) == expected
            for rows in (rows for shard in frozen for rows in shard):
                rows.close(())

    @pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
    def test_rows_that_do_not_fit_fewer_shards_are_never_lost_without_a_word(
        self, on_full: Any, tmp_path: Any
    ) -> None:
        table = Table("items", rows=None, capacity=30, dim=4, on_full=on_full)
        cluster = self.open([table], Adagrad(lr=0.1), shards=SHARDS)
        for at in range(0, 60, 3):
            batch = {"items": [at, at + 1, at + 2]}
            grads = grads_of(cluster, {"items": np.ones((3, 4))})
            cluster.push(wanted_of(cluster, batch), grads, lr=0.1)
        store = LocalStore(tmp_path)
        Repository.create(store, schema=cluster.schema())
        Checkpointer(Repository.open(store), cluster).close(1)
        rows = cluster.touched_ids("items").size
        fewer = self.open([table], Adagrad(lr=0.1), shards=1)
        restore = Checkpointer(Repository.open(store), fewer).restore
        if on_full == "error":
            with pytest.raises(TableFullError, match=rf"'items' has {rows} rows.*nothing was"):
                restore()
            assert fewer.touched_ids("items").size == 0
        else:
            with pytest.warns(RuntimeWarning, match=rf"{rows - 30} of {rows} rows.* evicted"):
                restore()
            assert fewer.touched_ids("items").size == 30

    def test_the_digest_of_rows_is_the_same_for_any_number_of_shards(self) -> None:
        """Made where rows live: no cluster hands rows or ids over for it."""
        whole = self.open(tables(), Adagrad(lr=0.1), shards=1)
        parts = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        for cluster in (whole, parts):
            push(cluster, np.random.default_rng(5), 4)
        before = {table.name: whole.digest(table.name) for table in tables()}
        assert before == {table.name: parts.digest(table.name) for table in tables()}
        assert all(d.rows == whole.touched_ids(name).size for name, d in before.items())
        ids, planes = parts.read_all("fixed")
        planes["accumulator"][0, 0] = np.nextafter(planes["accumulator"][0, 0], np.float32(9))
        parts.install("fixed", ids[:1], {name: values[:1] for name, values in planes.items()})
        changed = parts.digest("fixed")
        assert changed.rows == before["fixed"].rows
        assert changed.low != before["fixed"].low
        assert changed.high != before["fixed"].high

    def test_upserted_rows_are_part_of_the_next_increment_alone(self, tmp_path: Any) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        store = LocalStore(tmp_path)
        Repository.create(store, schema=cluster.schema())
        checkpointer = Checkpointer(Repository.open(store), cluster)
        push(cluster, np.random.default_rng(0), 3)
        checkpointer.save(1)
        checkpointer.wait()
        cluster.upsert("fixed", [1, 2, 3], {"weight": np.full((3, 5), 7.0)})
        cluster.upsert("dynamic", [777], {"weight": np.full((1, 5), 8.0)})
        frozen = cluster.freeze(SINCE_VERSION, BUFFER_NBYTES)
        changed = {n: ids for part in frozen for n, ids in drained(part).items()}
        assert changed.keys() == {"fixed", "dynamic"}
        for rows in (rows for shard in frozen for rows in shard):
            rows.close(())
        checkpointer.close(2)
        expected, target = state(cluster), self.open(tables(), Adagrad(lr=0.1), shards=SHARDS)
        restored = Checkpointer(Repository.open(store), target).restore()
        assert restored is not None
        assert restored.manifest.layout["kind"] != "full"
        assert state(target) == expected

    def test_an_upsert_that_one_shard_has_no_room_for_changes_none(self) -> None:
        table = Table("items", rows=None, capacity=30, dim=4)
        cluster = self.open([table], Adagrad(lr=0.1), shards=SHARDS)
        before = state(cluster)
        with pytest.raises(TableFullError, match=r"'items'.*no row was changed"):
            cluster.upsert("items", np.arange(200), {"weight": np.ones((200, 4))})
        assert state(cluster) == before
        cluster.upsert("items", np.arange(12), {"weight": np.ones((12, 4))})
        assert cluster.touched_ids("items").tolist() == list(range(12))
