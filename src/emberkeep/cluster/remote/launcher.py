"""Where the servers of a cluster are, and how a dead one is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from emberkeep.errors import ConfigError, ServerError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.stopping import Stop
from emberkeep.runtime.waiting import Waiting
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security, split_address
from emberkeep.wire.transport import Transport

_POLL_SECONDS = 0.1


class Launcher(Protocol):
    """Starts servers. A cluster asks it for addresses, and for replacements."""

    stop: Stop
    """Of the cluster, which puts it there: ends a wait for a replacement that may be long."""

    @property
    def count(self) -> int: ...

    def address(self, shard: int) -> str:
        """Where the shard's server is now."""
        ...

    @property
    def replaceable(self) -> bool:
        """Whether another server can take the place of one that lives and does not answer. Where
        none can, nothing is won by giving one up."""
        ...

    def gone(self, shard: int, life: str) -> bool:
        """Whether the server of that life is known to have ended; not whether it answers."""
        ...

    def replace(self, shard: int, life: str) -> str:
        """The address of an empty server in the place of one that does not answer.

        Returns once the server of that `life` can never answer again: it is known to be dead, or
        its lease has passed. `ServerError` if no replacement comes.
        """
        ...

    def close(self) -> None:
        """Ends what this object has started."""
        ...


class FixedAddresses:
    """Servers at addresses that stay: somebody else starts them, and starts them again.

    A server with another life at an address proves that the one before is dead: two processes
    cannot listen on one port. One that answers again is as good: in its next epoch it is empty.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security,
        *,
        patience: timedelta,
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not addresses:
            raise ConfigError("connect() needs the address of every shard server, in order")
        for address in addresses:
            split_address(address)
            security.check_address(address)
        self._addresses = tuple(addresses)
        self._security = security
        self._patience = patience
        self._transport = transport
        self._clock = clock
        self.stop = Stop(clock)

    @property
    def count(self) -> int:
        return len(self._addresses)

    def address(self, shard: int) -> str:
        return self._addresses[shard]

    @property
    def replaceable(self) -> bool:
        return False

    def gone(self, shard: int, life: str) -> bool:
        """Only another server at the address proves it, and that one answers."""
        return False

    def replace(self, shard: int, life: str) -> str:
        address = self._addresses[shard]
        until = self._clock.monotonic() + self._patience.total_seconds()
        waiting, why = Waiting(self._clock), "it shuts down"
        while (left := until - self._clock.monotonic()) > 0:
            connection = Connection(address, self._security, transport=self._transport)
            try:
                status, _ = connection.act("status", deadline=timedelta(seconds=2))
            except ServerError as error:  # what no patience cures comes out: security, protocol
                why = str(error)
            else:
                if not status["draining"]:
                    return address
            finally:
                connection.close()
            waiting.say(
                f"waiting for a server of shard {shard} at {address}, {left:.0f} s more at most: "
                f"{why}"
            )
            self.stop.pause(_POLL_SECONDS, f"a server of shard {shard} at {address}")
        raise ServerError(
            f"shard {shard} at {address} does not answer, and nobody started it within "
            f"{self._patience.total_seconds():g} s: start emberkeep serve there"
        )

    def close(self) -> None:
        """The servers are not ours to end."""
