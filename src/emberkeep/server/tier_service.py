"""The tier of a server: where its rows live, and what an operator sees of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from emberkeep._types import Json
from emberkeep.errors import ConfigError
from emberkeep.server.epoch import Epoch
from emberkeep.tables import Table, Tier


@dataclass(frozen=True, slots=True)
class ServerTier:
    """All tables of a server live in files below one path, each shard's in a directory of its own:
    whatever place a server is given, it finds what that shard has left there, and nothing else.
    The memory is this server's."""

    tier: Tier

    def directory(self, shard: int) -> str:
        return os.path.join(self.tier.path, f"shard-{shard}")

    def holding(self, tables: Sequence[Table], shard: int) -> list[Table]:
        """The tables, as this server keeps them."""
        given = [table.name for table in tables if table.tier is not None]
        if given:
            raise ConfigError(
                f"table {given[0]!r} has a tier of its own, and on servers the tier is the "
                "servers': leave out tier= of the tables"
            )
        own = Tier(self.directory(shard), memory=self.tier.memory, exclusive=self.tier.exclusive)
        return [replace(table, tier=own) for table in tables]

    def status(self, epoch: Epoch | None) -> Json:
        """Where it is, and how its files are doing."""
        files = [] if epoch is None else epoch.shard.tier_status()
        return {
            "path": self.tier.path,
            "memory_nbytes": self.tier.memory,
            "files": [asdict(file) for file in files],
        }
