"""How shards are spread over machines where parity protects them: at most `r` on one.

A stripe survives the loss of `r` shards. A machine that holds more of them takes rows with it that
parity cannot bring back.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError
from emberkeep.tables import Tier
from emberkeep.wire.security import is_loopback, split_address


def places(shards: int, nodes: int, parity: Parity) -> list[int] | None:
    """For each shard the number of its node, at most `r` shards on one; None where nodes are too
    few for that.

    One node stays free if the others are enough: shards of a node that dies need a place, and may
    not join those of another.
    """
    least = -(-shards // parity.r)
    if nodes < least:
        return None
    used = max(least, min(shards, nodes - 1))
    return [shard % used for shard in range(shards)]


def warn_of_sharing(parity: Parity, nodes: Sequence[str], remedy: str, what: str = "node") -> None:
    """Says what the death of one node costs if that is more than parity bears. `nodes` has the
    node of each shard."""
    counts = Counter(nodes)
    together = max(counts.values())
    if together <= parity.r:
        return
    plural = "s" if len(counts) > 1 else ""
    warnings.warn(
        f"{len(nodes)} servers share {len(counts)} {what}{plural}: a {what} that dies takes "
        f"{together} with it, and parity brings {parity.r} back; the rest comes from versions; "
        f"{remedy}",
        stacklevel=3,
    )


def warn_of_shared_machines(parity: Parity | None, addresses: Sequence[str]) -> None:
    """The same for servers at addresses.

    Nothing is said where all of them are on the machine of this process: its death ends the run
    as well, and `ek.servers` is no different.
    """
    hosts = [split_address(address)[1] for address in addresses]
    if parity is not None and not all(is_loopback(host) for host in hosts):
        warn_of_sharing(
            parity, hosts, f"start at most {parity.r} of them on each machine", what="machine"
        )


def check_tier(tier: Tier | None, parity: Parity | None) -> None:
    """Refuses parity of servers that have a tier."""
    if tier is not None and parity is not None:
        raise refuse_parity()


def refuse_parity() -> ConfigError:
    return ConfigError(
        "parity over a tier would itself be larger than memory: leave out parity= (a server comes "
        "back from its own files), or the tier"
    )
