"""What is wrong with TLS is named at once, and is not taken for a server that is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import trustme

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.errors import SecurityError, ServerError
from emberkeep.runtime.pool import Pool
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Table
from emberkeep.wire.security import Security

TOKEN = "a token of some length"
AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
# Twenty lines a second were written in the two minutes that a missing server is waited for.
PATIENCE = timedelta(minutes=2)
SOON = 60.0


def issued(by: trustme.CA, *hosts: str) -> Security:
    """What a server or client with a certificate for those hosts brings."""
    made = by.issue_cert(*hosts)
    return Security(
        token=TOKEN, certificate=b"".join(pem.bytes() for pem in made.cert_chain_pems),
        key=made.private_key_pem.bytes(), authority=by.cert_pem.bytes(),
    )  # fmt: skip


GOOD = issued(AUTHORITY, "localhost", "127.0.0.1")
ELSEWHERE = issued(AUTHORITY, "elsewhere.example")


@pytest.fixture
def started() -> Iterator[list[ShardServer]]:
    servers: list[ShardServer] = []
    yield servers
    for server in servers:
        server.shutdown()


def failure(server: ShardServer, client: Security, address: str | None = None) -> Exception:
    """What a run meets that starts on the server."""
    hosts = FixedAddresses([address or server.address], client, patience=PATIENCE)
    with pytest.raises(Exception) as met:
        FlightCluster(
            [Table("t", rows=4, dim=2)], SGD(lr=1.0), hosts, pool=Pool(1), security=client
        )
    return met.value


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        (GOOD, replace(GOOD, authority=STRANGER.cert_pem.bytes()), "not trusted.* give the autho"),
        (GOOD, replace(GOOD, authority=None), "not trusted .*: give the authority"),
        (ELSEWHERE, GOOD, "certificate for other hosts than 127.0.0.1"),
        (GOOD, Security(token=TOKEN, authority=GOOD.authority), "this process has no certificate"),
        (
            GOOD,
            replace(issued(STRANGER, "localhost"), authority=GOOD.authority),
            "this process has another certificate",
        ),
        (GOOD, replace(GOOD, authority=b"nonsense"), "PEM"),
    ],
    ids=["other-authority", "no-authority", "other-host", "no-certificate", "foreign", "no-pem"],
)
def test_tls_that_fails_is_named_at_once(
    server: Security, client: Security, words: str, started: list[ShardServer],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    started.append(ShardServer(ShardService(threads=1), security=server))
    start = time.monotonic()
    error = failure(started[0], client)
    assert isinstance(error, SecurityError), error
    assert time.monotonic() - start < SOON
    assert re.search(words, str(error)), error
    assert capfd.readouterr().err == ""


def test_one_side_without_tls_is_named_at_once(started: list[ShardServer]) -> None:
    started.append(ShardServer(ShardService(threads=1), security=Security(token=TOKEN)))
    start = time.monotonic()
    error = failure(started[0], GOOD, started[0].address.replace("tcp", "tls"))
    assert isinstance(error, SecurityError)
    assert "does not speak TLS" in str(error)
    for security in (GOOD, replace(GOOD, authority=None)):
        started.append(ShardServer(ShardService(threads=1), security=security))
        error = failure(started[-1], GOOD, started[-1].address.replace("tls", "tcp"))
        assert isinstance(error, SecurityError)
        assert "speaks TLS, so nothing was sent: write grpc+tls://" in str(error)
    assert time.monotonic() - start < SOON


def test_another_token_is_named_at_once(started: list[ShardServer]) -> None:
    started.append(ShardServer(ShardService(threads=1), security=GOOD))
    start = time.monotonic()
    error = failure(started[0], replace(GOOD, token="another token of some length"))
    assert isinstance(error, SecurityError)
    assert time.monotonic() - start < SOON


def test_a_server_that_is_not_there_is_waited_for() -> None:
    hosts = FixedAddresses(["grpc+tls://127.0.0.1:1"], GOOD, patience=timedelta(seconds=0.3))
    with pytest.raises(ServerError, match="start emberkeep serve there"):
        hosts.replace(0, "")
