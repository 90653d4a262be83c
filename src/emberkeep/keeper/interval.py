"""How often versions can be taken where bandwidth is limited."""

from __future__ import annotations

import warnings
from datetime import timedelta

from emberkeep.checkpoint.codec_choice import choose
from emberkeep.checkpoint.spec import SaveSettings, VersionSpec
from emberkeep.codecs.table_codecs import codec_of
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.keeper.dense import Dense
from emberkeep.keeper.run_saver import Hear
from emberkeep.strategies import Strategy


def version_nbytes(subject: CombinedSubject, spec: VersionSpec) -> int:
    """The rows of a version that holds every row that the tables have room for."""
    codecs = choose(spec, 0).codecs
    slots = {
        name: table.slots
        for home in subject.homes()
        for name, own in home.names.items()
        for table in home.cluster.tables
        if table.name == own
    }
    return sum(
        (table["rows"] or slots[name])
        * sum(
            codec_of(codecs, name, plane).nbytes_per_row(width, kind)
            for plane, (width, kind) in table["planes"].items()
        )
        for name, table in subject.schema()["tables"].items()
    )


class Limit:
    """How often versions can be taken where bandwidth is limited.

    `tell` hears of it at once; an interval that is shorter than `shortest` is warned of, one in
    steps when it has passed for the first time. Without `tell` nobody hears of anything.
    """

    def __init__(
        self, subject: CombinedSubject, dense: Dense, strategy: Strategy, settings: SaveSettings,
        tell: Hear | None,
    ) -> None:  # fmt: skip
        self._subject, self._dense = subject, dense
        self._spec = strategy.spec
        self._rate = settings.most_mb_per_second
        # Beside batches in tiers, a version that is due while another is written is left out.
        self._every = strategy.remote or strategy.schedule
        self._waits = strategy.remote is None and settings.overlap == "wait"
        self._watches = self._rate is not None and tell is not None and self._waits
        self._cut_at: float | None = None
        if self._rate is None or tell is None:
            return
        nbytes, shortest = self._nbytes(), self.shortest
        assert shortest is not None
        details = {
            "most_mb_per_second": self._rate,
            "version_nbytes": nbytes,
            "shortest_interval_seconds": shortest.total_seconds(),
        }
        tell("bandwidth", details)
        every = self._every.time
        if every is not None and every < shortest:
            self._warn(f"one is wanted every {_text(every)}", stacklevel=4)

    @property
    def shortest(self) -> timedelta | None:
        """How long a version of all rows takes at most to write, with what is saved beside them:
        one can be taken no more often, unless it holds only what changed. None where nothing is
        limited. Optimizers may remember more than their settings tell before the first step."""
        return None if self._rate is None else timedelta(seconds=self._nbytes() / self._rate / 1e6)

    def _nbytes(self) -> int:
        return version_nbytes(self._subject, self._spec) + self._dense.nbytes()

    def due(self, now: float) -> None:
        """A version is due, by `clock.monotonic`; it has not waited for the one before yet."""
        if not self._watches or self._cut_at is None or self._every.steps is None:
            return
        self._watches = False
        found, shortest = timedelta(seconds=now - self._cut_at), self.shortest
        if shortest is not None and found < shortest:
            self._warn(f"one was due {_text(found)} after another", stacklevel=5)

    def cut(self, now: float) -> None:
        """A version was cut, and training goes on."""
        self._cut_at = now

    def _warn(self, wanted: str, *, stacklevel: int) -> None:
        shortest = self.shortest
        assert shortest is not None
        so = (
            "training stands still in step() until the one before is written"
            if self._waits
            else "versions that hold all rows come later than that"
        )
        warnings.warn(
            f"a version of all rows ({self._nbytes() / 1e6:,.3g} MB) takes {_text(shortest)} at "
            f"{self._rate:g} MB/s, and {wanted}: {so}; save less often, with fewer bits, or allow "
            "more bandwidth",
            stacklevel=stacklevel,
        )


def _text(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.3g} s"
