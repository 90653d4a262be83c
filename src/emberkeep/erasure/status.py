"""How well rows are protected."""

from __future__ import annotations

from dataclasses import dataclass

from emberkeep.runtime.metrics import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityStatus:
    """How well rows are protected right now."""

    k: int
    r: int
    lag: int
    """Messages that are under way: 0 says that parity is up to date."""
    unprotected_stripes: int
    """Parity rows that are being filled after a host was lost."""
    missing_rows: int
    """Rows that a replacement has not got back yet; a call that asks for one gets it at once."""
    rebuilt_rows: int
    """Rows brought back so far, over all losses."""
    rebuilt_nbytes: int
    degraded_reads: int
    """Calls that had to wait for rows to be decoded."""
    recoveries: int
    messages: int
    sent_nbytes: int
    updates: tuple[int, ...]
    """Parity rows updated, shard by shard."""
    lost_shards: int = 0
    """Shards that are known to be lost and not replaced yet."""
    unprotected_since: float | None = None
    """The time (Unix) since when a host of parity holds nothing of what it is sent, or a thread
    that protects rows has failed; None if all is well."""
    left_out_hosts: int = 0
    """Streams from a shard to a host that go nowhere, because the host does not answer."""

    @property
    def protected(self) -> bool:
        """Whether `r` more shards may be lost."""
        behind = self.lag or self.unprotected_stripes or self.missing_rows
        gone = self.lost_shards or self.left_out_hosts
        return not (behind or gone or self.unprotected_since)

    def samples(self) -> list[Sample]:
        """The same for Prometheus."""
        return [
            ("parity_protected", "gauge", "1 if r more shards may be lost", self.protected),
            ("parity_lost_shards", "gauge", "shards lost and not replaced", self.lost_shards),
            ("parity_unprotected_since_seconds", "gauge",
             "Unix time since when a host holds nothing or a thread has failed, 0 if all is well",
             self.unprotected_since or 0.0),
            ("parity_left_out_hosts", "gauge", "streams to hosts that do not answer",
             self.left_out_hosts),
            ("parity_lag_messages", "gauge", "messages on their way to parity hosts", self.lag),
            ("parity_unprotected_stripes", "gauge", "parity rows yet to be filled",
             self.unprotected_stripes),
            ("parity_missing_rows", "gauge", "rows yet to come back", self.missing_rows),
            ("parity_rebuilt_rows_total", "counter", "rows that came back", self.rebuilt_rows),
            ("parity_rebuilt_bytes_total", "counter", "bytes of them", self.rebuilt_nbytes),
            ("parity_degraded_reads_total", "counter", "calls that had to wait for rows",
             self.degraded_reads),
            ("parity_recoveries_total", "counter", "lost shards brought back", self.recoveries),
            ("parity_messages_total", "counter", "messages to parity hosts", self.messages),
            ("parity_sent_bytes_total", "counter", "bytes of them", self.sent_nbytes),
        ]  # fmt: skip


def earliest(*moments: float | None) -> float | None:
    """The first of some moments; None if there is none."""
    return min((moment for moment in moments if moment), default=None)
