"""Metrics for other machines: over TLS, for those who have the token."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import trustme

from emberkeep.runtime.metrics import MetricsServer
from emberkeep.wire.security import Security

TOKEN = "a token of some length"
AUTHORITY = trustme.CA()


@pytest.fixture
def port() -> Iterator[int]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(tls)
    server = MetricsServer(
        lambda: "emberkeep_step 1\n", 0, tls=tls, admits=Security(token=TOKEN).admits
    )
    yield server.port
    server.close()


def read(url: str, authorization: str | None) -> str:
    headers = {} if authorization is None else {"Authorization": authorization}
    trusting = ssl.create_default_context()
    AUTHORITY.configure_trust(trusting)
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10, context=trusting) as answer:
        return str(answer.read().decode())


def test_the_token_is_demanded(port: int) -> None:
    # One that drags its handshake out keeps nobody waiting.
    with socket.create_connection(("127.0.0.1", port)):
        url = f"https://127.0.0.1:{port}/metrics"
        assert read(url, f"Bearer {TOKEN}") == "emberkeep_step 1\n"
        for wrong in (None, f"Basic {TOKEN}", "Bearer another token of some length", "Bearer"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                read(url, wrong)
            assert refused.value.code == 401
            assert b"emberkeep" not in refused.value.read()


def test_nothing_is_said_without_tls(port: int) -> None:
    with pytest.raises(OSError):  # which one depends on how the server hangs up
        read(f"http://127.0.0.1:{port}/metrics", f"Bearer {TOKEN}")
