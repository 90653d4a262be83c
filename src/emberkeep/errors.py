"""Every error that Emberkeep raises on purpose.

One root, `EmberkeepError`. The class states what kind of thing went wrong and carries the exit
code of the command line; the message names what, where, and the remedy. Library code raises the
narrowest class; the command line prints the message as one line and exits with the code.
"""

from __future__ import annotations

from collections.abc import Sequence


class EmberkeepError(Exception):
    """The root. Catch it to catch everything Emberkeep raises on purpose."""

    exit_code = 1


class ConfigError(EmberkeepError):
    """A value that the user gave cannot work; nothing has been done yet."""

    exit_code = 2


class DataError(EmberkeepError):
    """Input data is malformed; the message names the file and the line."""

    exit_code = 3


class IdError(EmberkeepError):
    """An id does not belong to its table; no row was changed."""

    exit_code = 4


class GradientError(EmberkeepError):
    """A gradient is NaN or infinite; no row was changed."""

    exit_code = 5


class TableFullError(EmberkeepError):
    """A dynamic table has no room for a new id; no row was changed."""

    exit_code = 6


class StateError(EmberkeepError):
    """Saved state does not fit what it is loaded into; nothing was loaded."""

    exit_code = 7


class DamageError(EmberkeepError):
    """Stored bytes are not what was written; nothing of them was used."""

    exit_code = 8

    def __init__(self, message: str, *, name: str | None = None) -> None:
        """`name` is the damaged object's, where it is known."""
        super().__init__(message)
        self.name = name


class StorageError(EmberkeepError):
    """A store refused or failed an operation; whether it took effect may be unknown."""

    exit_code = 20


class FullError(StorageError):
    """A store has no room for more; gc may make some."""


class MissingObjectError(StorageError):
    """A store holds no object of that name."""

    exit_code = 21


class UnsupportedStoreError(StorageError):
    """A store lacks what the commit protocol needs; nothing was written."""

    exit_code = 22


class NoRepositoryError(StorageError):
    """There is no repository under that root."""

    exit_code = 23


class NoVersionError(EmberkeepError):
    """The repository's history holds no such version, or retention removed it."""

    exit_code = 24


class FencedError(EmberkeepError):
    """A newer writer took the repository over; this one cannot commit or delete any more."""

    exit_code = 25


class FormatError(EmberkeepError):
    """The repository was written in a format that this release does not know."""

    exit_code = 26


class CancelledError(EmberkeepError):
    """Background work was given up for newer work; nothing was committed by it."""

    exit_code = 27


class SaveError(EmberkeepError):
    """Background saves keep failing; the rows are still in memory."""

    exit_code = 28


class ShardLostError(EmberkeepError):
    """Shards are lost, or not recovered yet. Reading is worth retrying once they are back.

    A push that raises it has changed nothing where shards are of this process. On servers the other
    shards may have applied it: it is finished as soon as the lost ones are back, or a full recovery
    goes behind it, so it must not be made again.
    """

    exit_code = 29

    def __init__(self, shards: Sequence[int]) -> None:
        self.shards = tuple(shards)
        named = ", ".join(map(str, self.shards))
        plural = "s" if len(self.shards) > 1 else ""
        super().__init__(
            f"shard{plural} {named} lost and not recovered yet: recover with keeper.recover(), or "
            "start the run again to resume its newest version"
        )


class StreamError(EmberkeepError):
    """A parity host refuses a message: of another epoch, or not the next one; nothing was done."""

    exit_code = 50


class ParityLossError(EmberkeepError):
    """More shards are lost than parity can bring back; the repository is what is left."""

    exit_code = 51


class PeerError(EmberkeepError):
    """A shard that another one needs does not answer, or is short of memory; nothing was lost.
    Worth asking again."""

    exit_code = 52


class ProtocolError(EmberkeepError):
    """A message is not what the protocol says; nothing was done."""

    exit_code = 44


class ServerError(EmberkeepError):
    """A shard server does not answer in time, or refuses to serve; whether a push took effect is
    found out when it is sent again."""

    exit_code = 41


class EpochError(ServerError):
    """A message names another epoch than the server has: one of the two was replaced."""

    exit_code = 42


class RankError(EmberkeepError):
    """A rank of a synchronous job did not bring its part of a step in time; no row was changed."""

    exit_code = 45


class SecurityError(EmberkeepError):
    """A connection that would not be safe, or is not allowed; nothing was opened."""

    exit_code = 43


class TierError(EmberkeepError):
    """The file behind a tier failed or has no room; what was declared durable is not in doubt."""

    exit_code = 40


class TierInUseError(TierError):
    """Another process or another model has the files; worth retrying once that has ended."""


class ChangedError(EmberkeepError):
    """What was being read was rearranged by its writer meanwhile; nothing is wrong: read again."""

    exit_code = 36


class RecoveryError(EmberkeepError):
    """Shards are lost again and again while they are recovered; the repository is whole."""

    exit_code = 53


class StoppedError(EmberkeepError):
    """A background thread has ended with an error; what it did is not done any more."""

    exit_code = 54


class DeadlineError(EmberkeepError, TimeoutError):
    """What was waited for did not happen in time; it may happen yet."""

    exit_code = 55
