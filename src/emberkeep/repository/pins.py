"""Pins: a reader's word that it still needs a version.

gc spares a pinned version and all that it needs until the pin is released or expires. Expiry
exists because readers die; a reader that takes longer than the lifetime renews.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from datetime import datetime, timedelta

from emberkeep.errors import ConfigError, DamageError, NoVersionError
from emberkeep.repository import names
from emberkeep.repository.manifest import Manifest, utc
from emberkeep.repository.names import VersionId
from emberkeep.repository.repository import Repository
from emberkeep.runtime.fields import Fields


class Pin:
    """Holds one version against gc; as a context manager, until the block ends."""

    def __init__(
        self,
        repository: Repository,
        version: VersionId | int | None = None,
        *,
        lifetime: timedelta = timedelta(hours=1),
    ) -> None:
        """Pins a version, the newest by default; `NoVersionError` if it cannot be held."""
        if lifetime <= timedelta(0):
            raise ConfigError(f"a pin's lifetime must be positive, not {lifetime}")
        if version is None:
            version = repository.latest()
            if version is None:
                raise NoVersionError(f"{repository.store.url} has no version yet")
        elif isinstance(version, int):
            version = repository.version(version)
        self.version = version
        self._repository = repository
        self._lifetime = lifetime
        self._expires: datetime | None = None
        self._name = f"{names.PINS}/{secrets.token_hex(8)}.json"
        self.renew()
        self._held = ExitStack()
        try:
            self.manifest: Manifest = repository.ensure_kept(version)
        except BaseException:
            self.release()
            raise
        self._held.enter_context(repository.pinned(self.manifest))

    def renew(self) -> None:
        """Restarts the lifetime; too late once the pin has expired, for gc may have acted."""
        now = self._repository.clock.now()
        if self._expires is not None and now >= self._expires:
            raise NoVersionError(
                f"the pin of version {self.version} expired at {self._expires}: pin it again, with "
                "a longer lifetime or renewed more often"
            )
        body = {"version": str(self.version), "expires": (now + self._lifetime).isoformat()}
        content = self._repository.encode(self._name, "pin", body)
        self._repository.store.put(self._name, content)
        self._expires = now + self._lifetime

    def release(self) -> None:
        self._held.close()
        self._repository.store.delete([self._name])

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def pin_in(body: Fields) -> tuple[VersionId, datetime]:
    """What a pin says: its version, and when it expires."""
    return body.parsed("version", VersionId.parse), body.parsed("expires", utc)


def read_pins(repository: Repository) -> dict[str, tuple[VersionId, datetime]]:
    """Every pin by name, expired ones included: its version, and when it expires.

    A damaged pin holds nothing. Its reader at worst misses a file, and gets an error.
    """
    pins = {}
    for info in repository.store.list(names.PINS):
        try:
            body = repository.document(info.name, "pin")
            if body is not None:
                pins[info.name] = pin_in(body)
        except DamageError:
            continue
    return pins
