"""Which saver keeps a run: the one of a repository, with its mirror, or that of a tier."""

from __future__ import annotations

import os

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import ConfigError
from emberkeep.keeper.mirror import mirror_of
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.keeper.run_saver import Hear, RunSaver
from emberkeep.keeper.tier_saver import TierSaver
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Interval, Strategy


def refuse_for_tier(*given: object) -> None:
    """Refuses what says something of a repository, where there is none."""
    if any(given):
        raise ConfigError(
            "about=, settings=, exclusive= and mirror= are for a repository, and the run "
            "is kept in its tier: leave them out, or give the keeper a repository"
        )


def run_name(saver: RunSaver | None) -> str:
    """What a run is called where its servers are looked at: the end of its URL."""
    url = "" if saver is None else saver.url
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]


def open_saver(
    store: BlobStore | None, parts: Parts, strategy: Strategy, settings: SaveSettings, *,
    leads: bool, about: Json, exclusive: bool, must_exist: bool,
    mirror: str | os.PathLike[str] | BlobStore | None, mirror_every: Interval | None,
    on_event: Hear, clock: Clock,
) -> RunSaver | None:  # fmt: skip
    """Without a store the tier keeps the run; None on ranks that do not write."""
    if store is None:
        return TierSaver(parts, strategy, must_exist=must_exist, on_event=on_event, clock=clock)
    if not leads:
        return None
    return RepositorySaver(
        store, parts.subject, strategy, about=about, settings=settings, exclusive=exclusive,
        must_exist=must_exist, on_event=on_event, clock=clock,
        mirror=mirror_of(
            mirror, mirror_every, store, parts.subject.schema, strategy, settings,
            exclusive=exclusive, on_event=on_event, clock=clock,
        ),
    )  # fmt: skip
