"""What a keeper tells of its run: what is durable, what it costs, whether it goes on; events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.cluster.protected_cluster import tier_use
from emberkeep.keeper.costs import Costs, Ledger
from emberkeep.keeper.interval import Limit
from emberkeep.keeper.mirror import MirrorStatus
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.recoverer import Recoverer, Recoveries
from emberkeep.keeper.repository_saver import RepositorySaver, kept_nbytes
from emberkeep.keeper.run_planner import RunPlanner
from emberkeep.keeper.run_saver import RunSaver
from emberkeep.runtime.clock import Clock
from emberkeep.tiers.tier_use import TierUse

if TYPE_CHECKING:
    from emberkeep.runtime.metrics import MetricsServer


class RunReport:
    """The part of `Keeper` that changes nothing of the run."""

    _saver: RunSaver | None
    _store: BlobStore | None
    _parts: Parts
    _ledger: Ledger
    _recoverer: Recoverer | None
    _server: MetricsServer | None
    _planner: RunPlanner | None
    _on_event: Callable[[str, Json], object] | None
    _clock: Clock
    _closed: bool
    _limit: Limit

    @property
    def shortest_interval(self) -> timedelta | None:
        """How long a version of all rows takes to write, stored as the next one is, with what is
        saved beside them and the prioritised versions up to the next whole one: one can be taken no
        more often, unless it holds only what changed. What extraction writes is not counted. None
        where bandwidth is not limited."""
        return self._limit.shortest

    @property
    def durable(self) -> int | None:
        """The step that a crash comes back to, as this process knows it; None before there is one,
        and on ranks that do not write."""
        whole = None if self._saver is None else self._saver.whole
        return None if whole is None else whole.step

    @property
    def saved_whole(self) -> Mapping[str, str]:
        """The tables that cannot be followed row by row, and why."""
        return dict(self._parts.whole)

    def mark_all_changed(self) -> None:
        """Call this before you change rows of torch's embeddings yourself, past the optimizer."""
        self._parts.tables.announce()

    def costs(self) -> Costs:
        """What this process has spent on versions so far."""
        if self._saver is not None:
            return self._ledger.costs(self._saver.kept_nbytes(), self.mirror_status())
        assert self._store is not None
        return self._ledger.costs(kept_nbytes(self._store))

    def metrics(self) -> str:
        """The same for Prometheus, and how well rows are protected where there is parity."""
        statuses = [home.cluster.parity for home in self._parts.subject.homes()]
        summaries = [
            found for found in (self.recoveries(), self.mirror_status(), self.tier_use()) if found
        ]
        return self._ledger.exposition(
            [status for status in statuses if status is not None],
            [sample for summary in summaries for sample in summary.samples()],
        )

    def recoveries(self) -> Recoveries | None:
        """What failures have cost this process so far; None for a model without shards."""
        return None if self._recoverer is None else self._recoverer.summary()

    def tier_use(self) -> TierUse | None:
        """How often rows were in memory, and how long training waited for those that were not, in
        all tiers of this process and of its servers; None without a tier. Counted since files were
        opened: a server that is lost has no part in it, and one that is back begins at 0."""
        return tier_use(home.cluster for home in self._parts.subject.homes())

    def mirror_status(self) -> MirrorStatus | None:
        """What the mirror has; None without one, and on ranks that do not write."""
        return self._saver.mirror_status() if isinstance(self._saver, RepositorySaver) else None

    def _not_ready(self) -> str | None:
        """Why training stands still; None if it does not."""
        if self._closed:
            return "the keeper is closed"
        lost = [shard for home in self._parts.subject.homes() for shard in home.cluster.lost()]
        return f"shards {', '.join(map(str, lost))} are lost" if lost else None

    @property
    def metrics_port(self) -> int | None:
        return None if self._server is None else self._server.port

    def _holds_run(self) -> bool:
        return self._saver is not None and self._saver.holds_run()

    def _url(self) -> str:
        assert self._saver is not None
        return self._saver.url

    def _risk(self) -> int | None:
        return None if self._recoverer is None else self._recoverer.risk()

    def _counters(self) -> Json:
        losses = {} if self._recoverer is None else self._recoverer.counters()
        plans = {} if self._planner is None else self._planner.counters()
        return {**self._ledger.counters(), **losses, **plans}

    def _tell(self, event: str, details: Json) -> None:
        if self._planner is not None:
            self._planner.hear(event, details)
        if event in ("saved", "resumed", "recovered", "planned"):
            run: dict[str, float | str] = {"step": self._ledger.step}
            if self._recoverer is not None:
                run["pls"] = self._recoverer.losses.pls
            if event == "planned":
                run |= {"plan": details["reason"]}
            if event == "saved":
                run |= {"version": details["version"], "version_at": self._clock.now().timestamp()}
            for home in self._parts.subject.homes():
                home.cluster.tell(**run)
        if self._on_event is not None:
            self._on_event(event, details)
