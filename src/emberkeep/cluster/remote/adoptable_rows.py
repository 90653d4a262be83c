"""What a trainer that is started again finds on servers: live rows of the one before, or files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Literal, get_args

from emberkeep._types import Json
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError

OnRestart = Literal["rewind", "adopt"]
"""Rows go back to a version with all else, or stay as they are."""
_SAME = ("tables", "optimizer", "seed", "shards")


def check_on_restart(on_restart: str, parity: Parity | None) -> None:
    if on_restart not in get_args(OnRestart):
        raise ConfigError(f"on_restart is rewind or adopt, not {on_restart!r}")
    if on_restart == "adopt" and parity is not None:
        raise ConfigError(
            "the parity of a run ends with its trainer: leave out parity=, or on_restart='adopt'"
        )


def adoptable(statuses: Sequence[Json], about: Json) -> str | None:
    """The run, by the id of its repository, whose rows all servers hold, if it is that of one model
    with the one that is meant; None, with a warning where there are other rows."""
    runs = {status.get("run", {}).get("repository", "") for status in statuses}
    same = all(
        status.get("adoptable")
        and status.get("origin") == {**{key: about[key] for key in _SAME}, "shard": index}
        for index, status in enumerate(statuses)
    )
    if same and len(runs) == 1 and runs != {""}:
        return str(runs.pop())
    if any(status.get("adoptable") for status in statuses):
        warnings.warn(
            "not all servers hold rows of this model and of one run, so none are adopted: the run "
            "goes back to its newest version",
            stacklevel=7,
        )
    return None


def rows_in_files(shards: Sequence[RemoteShard], replies: Sequence[Json]) -> str | None:
    """Which shard has come back with the rows of a batch, by what servers say of their points; None
    if none has."""
    for shard, reply in zip(shards, replies, strict=True):
        if (point := reply["point"]) is not None and shard.tier is not None:
            where = os.path.join(shard.tier["path"], f"shard-{shard.index}")
            return f"at {shard.address} {where} has the rows of step {point['batch']}"
    return None
