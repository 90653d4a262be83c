"""Who may reach a server: its user on one machine, from others who has a certificate and a token.

gRPC reads a request whole, however long it is, before a token in its header can be looked at. So
strangers are kept away before the first byte: by the permissions of a socket on one machine, by the
certificates of clients on a network. The token is demanded in addition, always.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

from emberkeep.errors import SecurityError

TOKEN = "EMBERKEEP_TOKEN"
"""The environment variable that holds the token where no file is named."""
HEADER = "x-emberkeep-token"
_LEAST_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What a side of a connection brings. Certificates and keys are PEM files, or their bytes.

    - A server brings `certificate` and `key`, and the `token` that it demands. With `authority` it
      demands of its clients a certificate that is signed by it.
    - A client brings the `token`, its own `certificate` and `key`, and `authority` (certificates
      that it trusts) where the server's is not signed by one of the system's. Servers that keep
      parity are clients of each other.
    """

    token: str | None = field(default=None, repr=False)
    certificate: Path | bytes | None = None
    key: Path | bytes | None = field(default=None, repr=False)
    authority: Path | bytes | None = None

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < _LEAST_TOKEN:
            raise SecurityError(
                f"a token has {_LEAST_TOKEN} characters or more: make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        if (self.certificate is None) != (self.key is None):
            raise SecurityError("TLS needs a certificate and its key: name both files")

    @property
    def tls(self) -> bool:
        """Whether a server with this speaks TLS."""
        return self.certificate is not None

    def carried(self) -> Security:
        """The same with the files' bytes: what can be given to a process on another machine."""
        return replace(
            self,
            certificate=None if self.certificate is None else read_pem(self.certificate),
            key=None if self.key is None else read_pem(self.key),
            authority=None if self.authority is None else read_pem(self.authority),
        )

    def of_client(self) -> Security:
        """What a client of a server with this brings: a certificate where the server demands it."""
        return Security(token=self.token) if self.authority is None else self

    def with_token(self) -> Security:
        """The same; with a random token where there is none."""
        return self if self.token else replace(self, token=secrets.token_urlsafe())

    def check_listening(self, host: str) -> None:
        """Refuses to listen beyond this machine without TLS, clients' certificates and a token."""
        self._check_reachable(
            host,
            ("--authority, who signs the certificates of clients", self.authority is None),
        )

    def check_metrics(self, host: str) -> None:
        """Refuses to show metrics beyond this machine without TLS and a token."""
        self._check_reachable(host)

    def _check_reachable(self, host: str, *more: tuple[str, bool]) -> None:
        if is_loopback(host):
            return
        needs = (
            ("--tls-certificate and --tls-key", not self.tls),
            *more,
            (f"a token (--token-file or {TOKEN})", self.token is None),
        )
        if missing := [what for what, absent in needs if absent]:
            raise SecurityError(
                f"{host} can be reached from other machines: that needs {' and '.join(missing)}; "
                "or listen on 127.0.0.1"
            )

    def check_address(self, address: str) -> None:
        """Refuses to send a token, or rows, to another machine in the clear."""
        scheme, host, _ = split_address(address)
        if scheme != "grpc+tcp" or is_loopback(host):
            return
        raise SecurityError(
            f"{address} is not on this machine and without TLS: write grpc+tls://{host}:…"
        )

    def admits(self, token: str | None) -> bool:
        """Whether a client may come in; takes the same time for every wrong token."""
        if self.token is None:
            return True
        return hmac.compare_digest((token or "").encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, str, int]:
    """Scheme, host and port of `host:port`, `grpc+tcp://host:port` or `grpc+tls://host:port`; of
    `grpc+unix:///path` the path, and no port."""
    scheme, found, rest = address.rpartition("://")
    if scheme == "grpc+unix" and rest.startswith("/"):
        return scheme, unquote(rest), 0
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not port.isdigit() or scheme not in ("", "grpc+tcp", "grpc+tls"):
        raise SecurityError(
            f"{address!r} is not the address of a server: write host:port, or grpc+tls://host:port"
        )
    return scheme if found else "grpc+tcp", host, int(port)


def read_token(path: Path | None) -> str | None:
    """The token in a file, else in the environment, else none."""
    if path is None:
        return os.environ.get(TOKEN) or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityError(f"the token cannot be read from {path}: {error}") from None


def read_pem(given: Path | bytes) -> bytes:
    if isinstance(given, bytes):
        return given
    try:
        return given.read_bytes()
    except OSError as error:
        raise SecurityError(f"{given} cannot be read: {error.strerror}") from None
