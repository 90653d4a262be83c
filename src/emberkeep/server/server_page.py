"""One server as an operator sees it: status, metrics, and whether it is ready."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from emberkeep._types import Json
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.memory import resident_nbytes
from emberkeep.runtime.metrics import Labels, Registry, Sample, families
from emberkeep.server.admission import Opening
from emberkeep.server.epoch import Epoch
from emberkeep.server.server_events import ServerEvents
from emberkeep.server.server_metrics import Metrics
from emberkeep.tiers.tier_use import TierUse

if TYPE_CHECKING:
    from prometheus_client import Metric

_STATES = ("empty", "recovering", "serving", "lost")


class ServerPage:
    """What can be said of a server at any moment, without a request of its run.

    `log` and `metrics_url` are where its log and its metrics are, if anywhere.
    """

    def __init__(
        self,
        metrics: Metrics,
        events: ServerEvents,
        *,
        epoch: Callable[[], Epoch | None],
        opening: Callable[[], Opening | None],
        draining: Callable[[], bool],
    ) -> None:
        self._metrics = metrics
        self._events = events
        self._epoch = epoch
        self._opening = opening
        self._draining = draining
        self._registry: Registry | None = None
        self.log: str | None = None
        self.metrics_url: str | None = None

    # -- for clusters and `emberkeep cluster status` ---------------------------------------------

    def status(self, header: Json) -> Json:
        """What the clients of a cluster ask for, and what an operator wants to know."""
        epoch, opening = self._epoch(), self._opening()
        run: Json = {"epoch": 0, "state": "empty"}
        if opening is not None:
            run = opening.status()
            run["run"] = {
                "id": opening.coordinator, "name": self._metrics.run_name,
                "trainer": self._metrics.trainer, "step": 0, "repository": "",
            }  # fmt: skip
        elif epoch is not None:
            run = self._of_run(epoch, header)
        return {
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "memory_nbytes": resident_nbytes(),
            "streams": self._events.streams,
            "refused_tokens": self._events.refused_tokens,
            "log": self.log,
            "metrics_url": self.metrics_url,
            "last_event": self._events.last,
            "metrics": self._metrics.to_dict(),
            **run,
        }

    def _of_run(self, epoch: Epoch, header: Json) -> Json:
        rows, nbytes = epoch.shard.held()
        parity = epoch.parity_service
        incarnation = int(header.get("incarnation", 0))
        applied = epoch.applied(incarnation, int(header.get("world", 1)))
        return {
            "epoch": epoch.number,
            "state": epoch.shard.state,
            "lapsed": epoch.lapsed,
            "left": epoch.left,
            "shard": epoch.shard.index,
            "shards": epoch.shards,
            "coordinator": epoch.coordinator,
            "tables": epoch.tables,
            "applied": applied,
            "settled": applied if parity is None else parity.settled_push(f"{incarnation:x}"),
            "rows_since": epoch.rows_since,
            **({"pushes": epoch.pushes()} if header.get("pushes") else {}),
            "dirty_rows": epoch.shard.dirty_rows(),
            "rows": rows,
            "row_nbytes": nbytes,
            "run": {
                "id": epoch.coordinator,
                "name": self._metrics.run_name,
                "trainer": self._metrics.trainer,
                "step": self._step(epoch),
                "repository": epoch.repository,
            },
            "origin": epoch.origin,
            "adoptable": epoch.adoptable,
            "lease_age_seconds": epoch.silent_seconds,
            "lease_seconds": epoch.lease_seconds,
            **({} if parity is None else {"parity": parity.status()}),
        }

    def _step(self, epoch: Epoch) -> int:
        """What the coordinator says; else how many pushes the rows have seen, which is the same
        where every step pushes."""
        if self._metrics.step is not None:
            return self._metrics.step
        return epoch.shard.steps()

    # -- for Prometheus --------------------------------------------------------------------------

    def text(self) -> str:
        """The page of metrics; figures have the shard and the id of the run as labels."""
        if self._registry is None:
            self._registry = Registry(self._collect)
        return self._registry.text()

    def _collect(self) -> Iterator[Metric]:
        epoch, labels = self._epoch(), dict[str, str]()
        if epoch is not None:
            labels = {"shard": str(epoch.shard.index), "run": epoch.coordinator}
        yield from families((labels, [*self._metrics.samples(), *self._samples(epoch)]))
        if epoch is not None:
            yield from self._info(epoch, labels)
            if epoch.parity_service is not None:
                yield from families((labels, epoch.parity_service.samples()))
        yield self._metrics.pulls.family(labels)
        yield self._metrics.pushes.family(labels)
        yield from background_failures.families(labels)

    def _info(self, epoch: Epoch, labels: Labels) -> list[Metric]:
        about = {"trainer": self._metrics.trainer, "name": self._metrics.run_name}
        text = "the run that the server belongs to; always 1"
        return families(({**labels, **about}, [("run_info", "gauge", text, 1.0)]))

    def _samples(self, epoch: Epoch | None) -> list[Sample]:
        state = "empty" if epoch is None else epoch.shard.state
        if self._opening() is not None:
            state = "recovering"
        samples: list[Sample] = [
            *(
                (f"state_{name}", "gauge", f"1 while the shard is {name}", float(state == name))
                for name in _STATES
            ),
            ("streams", "gauge", "open streams of clients and of parity", self._events.streams),
            ("connections_total", "counter", "streams that were opened", self._events.connections),
            ("refused_tokens_total", "counter", "calls whose token was missing or wrong",
             self._events.refused_tokens),
            ("trainers_refused_total", "counter", "trainers that were not admitted",
             self._events.refused_trainers),
            ("lease_expired_total", "counter", "times that the coordinator was silent for a lease",
             self._events.expired_leases),
        ]  # fmt: skip
        if epoch is None:
            return samples
        rows, nbytes = epoch.shard.held()
        tier = TierUse.of(epoch.shard.tier_status())
        return [
            *samples,
            *([] if tier is None else tier.samples()),
            ("dirty_rows", "gauge", "rows changed since the last cut", epoch.shard.dirty_rows()),
            ("rows", "gauge", "rows that were trained and are held", rows),
            ("row_bytes", "gauge", "bytes of them, all planes", nbytes),
            ("step", "gauge", "steps of the run", self._step(epoch)),
            ("lease_age_seconds", "gauge", "since the coordinator is not known to be alive",
             epoch.silent_seconds),
            ("lease_seconds", "gauge", "how old the lease may become", epoch.lease_seconds),
        ]  # fmt: skip

    # -- for supervisors -------------------------------------------------------------------------

    def not_ready(self) -> str | None:
        """Why pulls and pushes are refused; None if they are answered."""
        epoch = self._epoch()
        if self._draining():
            return "it is shutting down"
        if (opening := self._opening()) is not None:
            return f"shard {opening.index} opens its files"
        if epoch is None:
            return "it is empty: no run has taken it yet"
        if epoch.left:
            return "its trainer has ended: rows are kept for the next one"
        if epoch.lapsed:
            return (
                f"its lease has expired: the coordinator was last heard of "
                f"{epoch.silent_seconds:.1f} s ago, {epoch.lease_seconds:g} s are allowed"
            )
        if epoch.shard.state != "serving":
            return f"shard {epoch.shard.index} is {epoch.shard.state}"
        return None
