"""Servers whose rows live in files: batches that all of them come back to.

Every server *prepares* a batch in its files before any commits it. In between it is decided, by a
document beside the versions of the run, created only if there is none. So a server that dies at
any moment finds there, when it opens its files again, whether the batch that it has prepared took
place, and so does the one that takes over from a trainer; see `tiers.decisions`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.errors import (
    CancelledError,
    EmberkeepError,
    EpochError,
    ShardLostError,
    StateError,
)
from emberkeep.runtime.clock import Clock, Progress
from emberkeep.tiers.decisions import ABORTED, COMMITTED, RUN_DIRECTORY, decide
from emberkeep.tiers.superblock import Point

_STATES = f"{RUN_DIRECTORY}step-"
_POLL_SECONDS = (0.002, 0.1)
# What changes nothing: it may come beside, or after, whatever else is asked.
_QUESTIONS = ("points", "prepared")


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of all servers, whose cut was made in these epochs."""

    number: int
    nonce: str
    epochs: Mapping[tuple[int, int], int] = field(default_factory=dict)
    pushes: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    """By cluster and shard: the last push of each worker that its rows hold."""

    @property
    def state_name(self) -> str:
        return f"{_STATES}{self.number}-{self.nonce}.safetensors"


class RemoteTiers:
    """The tiers of the servers of one run, whose repository is in `store`.

    From here on its servers come back at the batch that is durable in their files.
    """

    def __init__(
        self, clusters: Sequence[RemoteCluster], store: BlobStore, run: str, clock: Clock
    ) -> None:
        self._clusters, self._store, self._run = clusters, store, run
        self._clock = clock
        self._pending: _Batch | None = None
        self._durable: _Batch | None = None
        self._outdated: set[str] = set()
        self._given_up = False
        self._look()
        for cluster in clusters:
            cluster.keeps_batches = True

    def _look(self) -> None:
        """Learns from the servers which batch is durable, if all of them have the same."""
        points = [self._point(shard) for _, shard in self._shards()]
        first = points[0]
        if first is not None and all(point == first for point in points):
            self._durable = _Batch(int(first["batch"]), str(first["nonce"]))
        listed = [info.name for info in self._store.list(RUN_DIRECTORY.rstrip("/"))]
        found = [_Batch(int(p["batch"]), str(p["nonce"])) for p in points if p is not None]
        self._given_up = not any(batch.state_name in listed for batch in found)
        kept = None if self._durable is None else self._durable.state_name
        # Servers that are there have recorded whatever was decided before they were admitted.
        self._outdated = {name for name in listed if name != kept}

    def _shards(self) -> list[tuple[tuple[int, int], RemoteShard]]:
        return [
            ((c, shard.index), shard)
            for c, cluster in enumerate(self._clusters)
            for shard in cluster.handles
        ]

    def _point(self, shard: RemoteShard) -> Json | None:
        point: Json | None = self._ask(shard, {"ask": "points"})["point"]
        return point

    # -- what is durable -------------------------------------------------------------------------

    def batch(self) -> int | None:
        """The batch that all servers come back to, or None."""
        return None if self._durable is None else self._durable.number

    def lost(self) -> bool:
        return any(cluster.lost() for cluster in self._clusters)

    def durable_state(self) -> str:
        """The name of what belongs to the rows of the durable batch."""
        assert self._durable is not None
        return self._durable.state_name

    def at_batch(self) -> bool | None:
        """Whether the rows of all servers are those of the durable batch, as they are now; None if
        not all files have it."""
        replies = [self._ask(shard, {"ask": "points"}) for _, shard in self._shards()]
        if not all(self._is_durable(reply["point"]) for reply in replies):
            return None
        return all(reply["unchanged"] for reply in replies)

    def _is_durable(self, point: Json | None) -> bool:
        durable = self._durable
        return (
            durable is not None
            and point is not None
            and (point["batch"], point["nonce"], point["run"])
            == (durable.number, durable.nonce, self._run)
        )

    def durable_steps(self, cluster: RemoteCluster) -> dict[str, int]:
        """The steps of tables at the durable batch."""
        steps: dict[str, int] = self._ask(cluster.handles[0], {"ask": "points"})["steps"]
        return steps

    def reopen(self) -> None:
        """Takes all servers back to what is durable in their files."""
        for cluster in self._clusters:
            every = range(cluster.shard_count)
            cluster.renew(*every)
            cluster.serve(*every)

    def renew(self, cluster: RemoteCluster, shards: Sequence[int]) -> tuple[list[int], list[int]]:
        """Replaces lost servers: those that are back at the durable batch, and the others, whose
        files are gone or are older, and which are empty."""
        cluster.renew(*shards)
        back, empty = [], []
        for index in shards:
            shard = cluster.handles[index]
            if self._is_durable(self._point(shard)):
                back.append(index)
            else:
                shard.clear()
                empty.append(index)
        return back, empty

    def serve(self, cluster: RemoteCluster, shards: Sequence[int]) -> None:
        """Has servers answer that are back at the durable batch."""
        assert self._durable is not None
        number, pushes = self._clusters.index(cluster), self._durable.pushes
        cluster.serve(*shards, pushes={i: pushes.get((number, i), {}) for i in shards})

    def given_up(self) -> bool:
        """Whether the run had gone back behind what files held when they were opened: nothing
        belongs to their rows."""
        return self._given_up

    def forget(self) -> None:
        """The run goes back behind the durable batch: it must never come back, nor one that some
        servers do not have now, and have again when their files are there."""
        listed = [info.name for info in self._store.list(RUN_DIRECTORY.rstrip("/"))]
        self._store.delete([name for name in listed if name.startswith(_STATES)])
        self._durable = None

    # -- the next batch --------------------------------------------------------------------------

    def prepare(self, batch: int) -> Callable[[], None]:
        """Declares the rows of all servers to be those of `batch`, as they are now; returns at
        once. The call that it returns waits until every file could come back to it."""
        self.abandon()
        nonce = secrets.token_hex(8)
        header = {
            "ask": "prepare", "batch": batch, "nonce": nonce, "home": self._store.url,
            "run": self._run,
        }  # fmt: skip
        self._pending = _Batch(batch, nonce)  # also if it fails half-way
        pushes = {
            (c, i): reply["pushes"]
            for c, cluster in enumerate(self._clusters)
            for i, reply in enumerate(cluster.ask_tiers(header))
        }
        epochs = {key: shard.epoch for key, shard in self._shards()}
        self._pending = _Batch(batch, nonce, epochs, pushes)
        return partial(self._await_prepared, self._pending)

    def pending_state(self) -> str:
        assert self._pending is not None
        return self._pending.state_name

    def _await_prepared(self, pending: _Batch) -> None:
        header = {"ask": "prepared", "batch": pending.number, "nonce": pending.nonce}
        for key, shard in self._shards():
            progress = Progress(self._clusters[key[0]].timing.bulk, self._clock)
            pause = _POLL_SECONDS[0]
            while not (reply := self._ask(shard, header, pending.epochs[key]))["prepared"]:
                progress.require(reply["progress"], partial(_to_write, shard))
                self._clock.sleep(pause)
                pause = min(_POLL_SECONDS[1], pause * 1.5)

    def commit(self) -> None:
        """Makes the batch that every server has prepared the one to come back to.

        If it raises, `abandon` finds out whether that happened.
        """
        pending = self._pending
        assert pending is not None
        renewed = [i for (c, i), shard in self._shards() if shard.epoch != pending.epochs[c, i]]
        if renewed:  # it may have come back without its files
            raise ShardLostError(renewed)
        if not self._decide(pending, COMMITTED):
            raise CancelledError(
                f"batch {pending.number} was given up meanwhile, by a server that came back; "
                "nothing was committed, and the next one is made as usual"
            )
        if not self._settle(pending, committed=True):
            # Another coordinator has them, and what it has decided since may be forgotten; or all
            # of them died just now, and will find the decision.
            raise ShardLostError([i for (_, i), _ in self._shards()])

    def abandon(self) -> None:
        """Gives up the batch under way; one that turns out to be committed is recorded as such."""
        pending = self._pending
        if pending is None:
            return
        for _, shard in self._shards():
            with suppress(ShardLostError):
                self._ask(shard, {"ask": "abandon"})
        self._settle(pending, committed=self._decide(pending, ABORTED))

    def tidy(self) -> None:
        """Nothing: what belonged to earlier batches goes once every server has recorded the
        next, and only what this process knows of."""

    def _decide(self, pending: _Batch, outcome: str) -> bool:
        point = Point(
            batch=pending.number, stamp=0, sequence=0, rows=0, floor=0, tables={},
            nonce=pending.nonce, home=self._store.url, run=self._run,
        )  # fmt: skip
        files = {
            f"{c}/shard-{i}/rows-{i}-0.tier": epoch for (c, i), epoch in pending.epochs.items()
        }
        return decide(self._store, RUN_DIRECTORY, point, outcome, files)

    def _settle(self, pending: _Batch, *, committed: bool) -> int:
        """Has every server record what was decided, and counts those that have; one that is lost
        does so when it opens its files again, and the document waits for that."""
        if not committed:
            self._outdated.add(pending.state_name)
        elif self._durable is not pending:  # else an attempt before has come so far
            if self._durable is not None:
                self._outdated.add(self._durable.state_name)
            self._durable = pending
        header = {"ask": "record", "nonce": pending.nonce, "committed": committed}
        recorded, errors, shards = 0, list[EmberkeepError](), self._shards()
        for key, shard in shards:
            try:
                recorded += bool(self._ask(shard, header, pending.epochs.get(key))["recorded"])
            except ShardLostError:
                pass
            except EmberkeepError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._pending = None
        self._outdated.add(f"{RUN_DIRECTORY}decision-{pending.number}-{pending.nonce}.json")
        if recorded == len(shards):
            # Whatever else a file has prepared, it has recorded before.
            self._drop_outdated()
        return recorded

    def _drop_outdated(self) -> None:
        """Drops what no server needs any more; what the store does not let go of goes later."""
        kept = set() if self._durable is None else {self._durable.state_name}
        with suppress(EmberkeepError):
            self._store.delete(sorted(self._outdated - kept))
            self._outdated.clear()

    def _ask(self, shard: RemoteShard, header: Json, epoch: int | None = None) -> Json:
        """Beside training: on a connection of its own. Lost is also a shard that has another
        epoch than the one meant."""
        if shard.state == "lost":
            raise ShardLostError((shard.index,))
        about = {**header, "epoch": shard.epoch if epoch is None else epoch}
        if header["ask"] not in _QUESTIONS:
            about = shard.ordered("tier", about)
        try:
            with shard.dialed() as connection:
                deadline = self._clusters[0].timing.deadline
                return connection.act("tier", about, deadline=deadline)[0]
        except EpochError:
            raise ShardLostError((shard.index,)) from None


def check_runs(clusters: Sequence[Cluster], url: str, run: str | None) -> None:
    """Refuses servers whose files are those of another run than the one at `url`, which is None
    where there is no repository yet."""
    for cluster in clusters:
        if not isinstance(cluster, RemoteCluster) or not cluster.tiered or not cluster.coordinates:
            continue
        for shard, reply in zip(cluster.handles, cluster.ask_tiers({"ask": "points"}), strict=True):
            point = reply["point"]
            if point is not None and point["run"] != run:
                here = "no repository is there" if run is None else f"this is {run}"
                raise StateError(
                    f"shard {shard.index} at {shard.address} has files of another run than {url}: "
                    f"theirs is that of the repository {point['run'] or '(none)'}, and {here}; "
                    "nothing was changed. Check the path, and that its disk is mounted; else name "
                    "another path for the tier, or remove its files"
                )


def _to_write(shard: RemoteShard) -> str:
    return f"shard {shard.index} at {shard.address} to write its files"
