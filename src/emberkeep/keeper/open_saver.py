"""Which saver keeps a run: the one of a repository, with its mirror, or that of a tier."""

from __future__ import annotations

import os
import warnings
from typing import Any

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.checkpoint.codec_choice import OPTIMIZER_PLANES, has_optimizer_planes
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import ConfigError
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.open_mirror import mirror_of
from emberkeep.keeper.ranks import Ranks
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.keeper.run_saver import Hear, RunSaver
from emberkeep.keeper.tier_saver import tier_saver
from emberkeep.keeper.tiered_saver import TieredSaver, check_ranks
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Interval, Strategy


def refuse_for_tier(*given: object) -> None:
    """Refuses what says something of a repository, where there is none."""
    if any(given):
        raise ConfigError(
            "about=, settings=, exclusive= and mirror= are for a repository, as is mirror_every=, "
            "and the run is kept in its tier: leave them out, or give the keeper a repository"
        )


def run_name(saver: RunSaver | None) -> str:
    """What a run is called where its servers are looked at: the end of its URL."""
    url = "" if saver is None else saver.url
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]


def open_saver(
    store: BlobStore | None, parts: Parts, strategy: Strategy, settings: SaveSettings, *,
    ranks: Ranks, about: Json, exclusive: bool, must_exist: bool,
    mirror: str | os.PathLike[str] | BlobStore | None, mirror_every: Interval | None,
    on_event: Hear, clock: Clock,
) -> RunSaver | None:  # fmt: skip
    """Without a store the tier keeps the run; None on ranks that do not write. A strategy may have
    both."""
    if store is None:
        return tier_saver(parts, strategy, must_exist=must_exist, on_event=on_event, clock=clock)
    check_ranks(strategy, ranks.world)
    if not ranks.leads:
        return None
    quantized = strategy.spec.quantize_optimizer
    if quantized and not has_optimizer_planes(parts.subject.schema()["tables"]):
        warnings.warn(
            "quantize_optimizer has no effect: it stores the planes "
            f"{' and '.join(OPTIMIZER_PLANES)} (Adagrad, RowWiseAdagrad, Adam) in fewer bits, and "
            "no table has one of them; leave it out",
            stacklevel=3,
        )
    copies = mirror_of(
        mirror, mirror_every, store, parts.subject.schema, strategy, settings,
        exclusive=exclusive, on_event=on_event, clock=clock,
    )  # fmt: skip
    common: dict[str, Any] = {
        "about": about, "settings": settings, "exclusive": exclusive, "must_exist": must_exist,
        "on_event": on_event, "clock": clock, "mirror": copies,
    }  # fmt: skip
    if strategy.remote is not None:
        return TieredSaver(store, parts, strategy, **common)
    # Ranks that wait for each other hear of a failure when the keeper is made.
    return RepositorySaver(store, parts.subject, strategy, **common, beside=ranks.world == 1)
