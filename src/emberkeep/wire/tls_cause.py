"""Why TLS failed: unlike a server that cannot be reached, that is not worth a retry."""

from __future__ import annotations

import socket
import ssl
import tempfile
from contextlib import ExitStack
from pathlib import Path

from emberkeep.errors import SecurityError
from emberkeep.wire.security import Security, split_address

_PROBE_SECONDS = 1.0
_VERIFY_FAILED = "certificate verify failed: "
_FAILED = "failed to connect"
_HUNG_UP = "Socket closed"


def tls_cause(address: str, security: Security, reason: str) -> SecurityError | None:
    """The remedy, if a connection failed for `reason` because of TLS; None if it is not known to.

    What gRPC says of a handshake is enough where it says anything. Where the server has closed the
    connection without a word, it is asked once more.
    """
    scheme, host, _ = split_address(address)
    hung_up = _FAILED in reason and _HUNG_UP in reason
    if scheme == "grpc+tcp":
        if hung_up and _speaks_tls(address):
            return SecurityError(
                f"{address} speaks TLS, so nothing was sent: write grpc+tls://{host}:…"
            )
        return None
    if scheme != "grpc+tls":
        return None
    if "wrong version number" in reason:
        return SecurityError(
            f"{address} does not speak TLS, so nothing was sent: start its server with "
            "--tls-certificate and --tls-key, or look at what listens there"
        )
    if "is not in peer certificate" in reason:
        return SecurityError(
            f"{address} has a certificate for other hosts than {host}, so nothing was sent: use "
            "the name that is in it, or issue one for this name"
        )
    if _VERIFY_FAILED in reason:
        why = reason.partition(_VERIFY_FAILED)[2]
        remedy = (
            "renew it"
            if "expired" in why or "not yet valid" in why
            else "give the authority that signed it (authority=, --authority, cluster.authority)"
        )
        return SecurityError(
            f"the certificate of {address} is not trusted ({why}), so nothing was sent: {remedy}"
        )
    if "empty address list" in reason:
        return SecurityError(
            f"TLS to {address} cannot begin with this authority, certificate and key: give PEM "
            "files, and the key that belongs to the certificate"
        )
    # Twice: a server that is just ending closes connections, too.
    if hung_up and all(_turned_away(address, security) for _ in range(2)):
        what = "has no certificate" if security.certificate is None else "has another certificate"
        return SecurityError(
            f"{address} demands a certificate that its authority has signed, and this process "
            f"{what}: give certificate and key (cluster.certificate and cluster.key in TOML)"
        )
    return None


def _speaks_tls(address: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _first_byte(address, context)
    except ssl.SSLError as error:
        # An alert is TLS, too; what is no TLS has no version.
        return error.reason is not None and "ALERT" in error.reason.upper()
    except OSError:
        return False
    return True


def _turned_away(address: str, security: Security) -> bool:
    """Whether the server closes the connection when it has seen the client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The server's certificate was found good by gRPC.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        if security.certificate is not None and security.key is not None:
            _load(context, security.certificate, security.key)
        return not _first_byte(address, context)
    except ssl.SSLError as error:
        return error.reason is not None and "ALERT" in error.reason.upper()
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _load(context: ssl.SSLContext, *pems: Path | bytes) -> None:
    with ExitStack() as stack:
        names = []
        for pem in pems:
            if isinstance(pem, bytes):
                file = stack.enter_context(tempfile.NamedTemporaryFile())  # readable by this user
                file.write(pem)
                file.flush()
                names.append(file.name)
            else:
                names.append(str(pem))
        context.load_cert_chain(*names)


def _first_byte(address: str, context: ssl.SSLContext) -> bytes:
    """What a server of HTTP/2 says first, after the handshake; nothing if it hangs up."""
    _, host, port = split_address(address)
    with (
        socket.create_connection((host.strip("[]"), port), _PROBE_SECONDS) as raw,
        context.wrap_socket(raw) as stream,
    ):
        return stream.recv(1)
