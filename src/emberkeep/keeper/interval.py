"""How often versions can be taken where bandwidth is limited."""

from __future__ import annotations

import warnings
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.checkpoint.codec_choice import choose
from emberkeep.checkpoint.spec import SaveSettings, VersionSpec
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.codecs.table_codecs import codec_of
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.keeper.dense import Dense
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.keeper.run_saver import Hear, RunSaver
from emberkeep.rows.priority import prioritised
from emberkeep.strategies import Strategy

_ID_NBYTES = 8


def prioritised_shares(subject: CombinedSubject, spec: VersionSpec) -> dict[str, float]:
    """How much of each table a prioritised version holds at most; nothing if there are none."""
    shares: dict[str, float] = {}
    if spec.priority is None:
        return shares
    for home in subject.homes():
        large = prioritised([table.slots for table in home.cluster.tables])
        of = {table.name: t in large for t, table in enumerate(home.cluster.tables)}
        for name, own in home.names.items():
            shares[name] = spec.priority.fraction if of[own] else 1.0
    return shares


def nbytes_by_table(
    subject: CombinedSubject, spec: VersionSpec, restores: int = 0
) -> dict[str, int]:
    """The rows of a version that holds every row that the tables have room for, after so many
    restores of versions that were not exact."""
    codecs = choose(spec, restores).codecs
    slots = {
        name: table.slots
        for home in subject.homes()
        for name, own in home.names.items()
        for table in home.cluster.tables
        if table.name == own
    }
    by_table = {}
    for name, table in subject.schema()["tables"].items():
        per_row = sum(
            codec_of(codecs, name, plane).nbytes_per_row(width, kind)
            for plane, (width, kind) in table["planes"].items()
        )
        # Ids of dynamic tables may be random, and nothing makes those shorter.
        by_table[name] = (table["rows"] or slots[name]) * (
            per_row if table["rows"] else per_row + _ID_NBYTES
        )
    return by_table


class Limit:
    """How often versions can be taken where bandwidth is limited.

    `tell` hears of it at once, and again with the first version that is stored in another way; an
    interval that is shorter than `shortest` is warned of, one in steps when it has passed for the
    first time. Without `tell` nobody hears of anything.
    """

    def __init__(
        self, subject: CombinedSubject, dense: Dense, strategy: Strategy, settings: SaveSettings,
        tell: Hear | None, saver: RunSaver | None = None,
    ) -> None:  # fmt: skip
        """The `saver` knows how the next version is stored; without one, the strategy does."""
        self._subject, self._dense, self._saver = subject, dense, saver
        self._given, self._plans = strategy.spec, strategy.auto is not None
        self._rate = settings.most_mb_per_second
        self._tell = None if self._rate is None else tell
        # Beside batches in tiers, a version that is due while another is written is left out.
        self._every = strategy.remote or strategy.schedule
        self._in_tiers = strategy.remote is not None
        self._waits = not self._in_tiers and settings.overlap == "wait"
        self._cut_at: float | None = None
        self._watches = False
        self._said: Json | None = None
        if self._tell is not None:
            self._say(self._tell, stacklevel=5)

    @property
    def shortest(self) -> timedelta | None:
        """How long a version of all rows takes to write, stored as the next one is, with what is
        saved beside them and the prioritised versions from it to the next: one can be taken no more
        often, unless it holds only what changed. None where nothing is limited.

        Headers of files are not counted, nor what the extraction of a grid writes meanwhile. Each
        server has an equal part of the bandwidth, and so has this process where it holds rows, or
        in a grid: it takes longer where servers hold different amounts. Optimizers may remember
        more than their settings tell before the first step.
        """
        if self._rate is None:
            return None
        remote = [home for home in self._subject.homes() if isinstance(home.cluster, RemoteCluster)]
        servers = sum(len(home.cluster.handles) for home in remote)
        rows, dense = self._rows_nbytes(), self._dense.nbytes()
        on_servers = sum(rows[name] for home in remote for name in home.names)
        here = sum(rows.values()) - on_servers
        in_grid = self._spec.layout == "grid"
        parts = max(1, servers + (in_grid or here > 0)) if servers else 1
        nbytes = max(on_servers / max(1, servers), here) * parts
        nbytes += dense * (parts if in_grid else 1)
        return timedelta(seconds=nbytes / self._rate / 1e6)

    @property
    def _spec(self) -> VersionSpec:
        return self._saver.spec if isinstance(self._saver, RepositorySaver) else self._given

    def _restores(self) -> int:
        """How many restores count for the choice of codecs. Nobody waits for a takeover to know
        them where they do not."""
        spec = self._spec
        counts = spec.expected_restores is not None or spec.accuracy_budget is not None
        return self._saver.lossy_restores if self._saver is not None and counts else 0

    def _saves(self) -> int:
        """How many versions are taken from a whole one to the next."""
        priority = self._spec.priority
        if priority is None:
            return 1
        return min(priority.rounds, self._every.saves) if self._every.parts > 1 else priority.rounds

    def _nbytes(self) -> int:
        return sum(self._rows_nbytes().values()) + self._dense.nbytes()

    def _rows_nbytes(self) -> dict[str, int]:
        """Of each table, what is written from a whole version to the next."""
        shares, more = prioritised_shares(self._subject, self._spec), self._saves() - 1
        whole = nbytes_by_table(self._subject, self._spec, self._restores())
        return {
            name: nbytes + more * round(nbytes * shares.get(name, 0.0))
            for name, nbytes in whole.items()
        }

    def _say(self, tell: Hear, *, stacklevel: int) -> None:
        """How it is now, if versions were stored in another way when it was said before."""
        codecs = choose(self._spec, self._restores()).codecs
        stored: Json = {key: codec.to_dict() for key, codec in codecs.items()}
        if stored == self._said:
            return
        again, self._said = self._said is not None, stored
        nbytes, shortest = self._nbytes(), self.shortest
        assert shortest is not None
        details = {
            "most_mb_per_second": self._rate,
            "version_nbytes": nbytes,
            "shortest_interval_seconds": shortest.total_seconds(),
        }
        tell("bandwidth", details)
        if again and self._plans:  # the interval is another by now, and was chosen for that
            return
        self._watches = self._every.steps is not None and not self._in_tiers
        every, saves = self._every.time, self._saves()
        wanted = None if every is None else every * saves / self._every.parts
        if wanted is not None and wanted < shortest:
            one = "one is" if saves == 1 else "they are"
            self._warn(f"{one} wanted every {_text(wanted)}", stacklevel=stacklevel)

    def due(self, now: float) -> None:
        """A version is due, by `clock.monotonic`; it has not waited for the one before yet."""
        if not self._watches or self._cut_at is None:
            return
        self._watches = False
        found, shortest = timedelta(seconds=now - self._cut_at), self.shortest
        if shortest is not None and found * self._saves() < shortest:
            self._warn(f"one was due {_text(found)} after another", stacklevel=5)

    def cut(self, now: float) -> None:
        """A version was cut, and training goes on."""
        self._cut_at = now
        if self._tell is not None:
            self._say(self._tell, stacklevel=7)

    def _warn(self, wanted: str, *, stacklevel: int) -> None:
        shortest, more = self.shortest, self._saves() - 1
        assert shortest is not None
        so = (
            "training stands still in step() until the one before is written"
            if self._waits
            else "versions that hold all rows come later than that"
        )
        what = "a version of all rows"
        if more:
            what += f" with the {more} prioritised ones after it"
        size = f"{self._nbytes() / 1e6:,.3g} MB"
        if self._spec.layout == "grid":
            size += ", not counting what extraction writes"
        warnings.warn(
            f"{what} ({size}) takes {_text(shortest)} at {self._rate:g} MB/s, and {wanted}: {so}; "
            "save less often, with fewer bits, or allow more bandwidth",
            stacklevel=stacklevel,
        )


def _text(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.3g} s"
