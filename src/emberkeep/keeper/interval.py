"""How often versions can be taken where bandwidth is limited."""

from __future__ import annotations

import warnings
from datetime import timedelta

from emberkeep.checkpoint.codec_choice import choose
from emberkeep.checkpoint.spec import SaveSettings, VersionSpec
from emberkeep.codecs.table_codecs import codec_of
from emberkeep.keeper.combined_subject import CombinedSubject
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


def shortest_interval(
    subject: CombinedSubject, strategy: Strategy, settings: SaveSettings, tell: Hear | None
) -> timedelta | None:
    """How long a version of all rows takes at most to write: one can be taken no more often, unless
    it holds only what changed. None where nothing is limited.

    `tell` hears of it; an interval that is shorter is warned of.
    """
    rate = settings.most_mb_per_second
    if rate is None:
        return None
    nbytes = version_nbytes(subject, strategy.spec)
    shortest, every = timedelta(seconds=nbytes / (rate * 1e6)), strategy.schedule.time
    if tell is None:
        return shortest
    details = {
        "most_mb_per_second": rate,
        "version_nbytes": nbytes,
        "shortest_interval_seconds": shortest.total_seconds(),
    }
    tell("bandwidth", details)
    if every is not None and every < shortest:
        warnings.warn(
            f"a version of all rows ({nbytes / 1e6:,.0f} MB) takes {_text(shortest)} at {rate:g} "
            f"MB/s, and one is wanted every {_text(every)}: versions that hold all rows come later "
            "than that; save less often, with fewer bits, or allow more bandwidth",
            stacklevel=3,
        )
    return shortest


def _text(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.3g} s"
