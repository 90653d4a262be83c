"""Servers whose rows live in files."""

from __future__ import annotations

from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError
from emberkeep.tables import Tier


def check_tier(tier: Tier | None, parity: Parity | None) -> None:
    """Refuses parity of servers that have a tier."""
    if tier is not None and parity is not None:
        raise refuse_parity()


def refuse_parity() -> ConfigError:
    return ConfigError(
        "parity over a tier would itself be larger than memory: leave out parity= (a server comes "
        "back from its own files), or the tier"
    )
