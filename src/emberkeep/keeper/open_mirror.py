"""What may be the mirror of a run, and what opens it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, open_store, refuse_nested
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import ConfigError
from emberkeep.keeper.mirror import Mirror
from emberkeep.keeper.run_saver import Hear
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Interval, Strategy, schedule


def mirror_of(
    where: str | os.PathLike[str] | BlobStore | None, every: Interval | None, beside: BlobStore,
    schema: Callable[[], Json], strategy: Strategy, settings: SaveSettings, *, exclusive: bool,
    on_event: Hear, clock: Clock,
) -> Callable[..., Mirror] | None:  # fmt: skip
    """What opens the mirror of a keeper; None without one. Refuses what cannot be mirrored."""
    if where is None:
        if every is not None:
            raise ConfigError("mirror_every= is for a mirror: give mirror= too")
        if settings.mirror_mb_per_second is not None:
            raise ConfigError("mirror_mb_per_second is for a mirror: give mirror= too")
        return None
    if not where or (not isinstance(where, str | os.PathLike) and not hasattr(where, "put")):
        raise ConfigError(f"mirror={where!r} is no place: give a path, a URL or a store")
    store = open_store(where, clock=clock) if isinstance(where, str | os.PathLike) else where
    if store is beside or (store is not where and store.url == beside.url):
        raise ConfigError(f"the mirror of {beside.url} is the same place: choose another")
    refuse_nested(store.url, beside.url)
    if strategy.spec.layout == "grid":
        raise ConfigError(
            "a grid cannot be mirrored: its rows move between the files of its versions; choose "
            "another layout, leave mirror= out, or copy single versions with `emberkeep fork`"
        )
    return partial(
        Mirror, store,
        every=None if every is None else schedule(every, name="mirror_every"), schema=schema(),
        retention=strategy.retention, settings=settings, exclusive=exclusive, on_event=on_event,
        clock=clock,
    )  # fmt: skip
