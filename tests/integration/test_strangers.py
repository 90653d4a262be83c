"""What a process without a certificate can make a server hold in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.wire.security import Security

MIB = 2**20
SENT = 256 * MIB

# gRPC reads all of an action before Python sees its token.
STRANGER = """
import sys
import pyarrow as pa
import pyarrow.flight as flight

address, authority = sys.argv[1], open(sys.argv[2], "rb").read()
client = flight.FlightClient(address, tls_root_certs=authority)
try:
    list(client.do_action(flight.Action("status", pa.py_buffer(bytes(int(sys.argv[3]))))))
except flight.FlightError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "authority.pem")
    return made


def peak() -> int:
    """The most memory that this process had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks")
def test_a_large_action_of_a_stranger_takes_no_memory(
    authority: trustme.CA, tmp_path: Path
) -> None:
    issued = authority.issue_cert("127.0.0.1")
    security = Security(
        token="a token of some length", certificate=issued.cert_chain_pems[0].bytes(),
        key=issued.private_key_pem.bytes(), authority=authority.cert_pem.bytes(),
    )  # fmt: skip
    server = ShardServer(ShardService(threads=1), security=security)
    forget_peak()
    before = peak()
    found = subprocess.run(
        [
            sys.executable, "-c", STRANGER, server.address, str(tmp_path / "authority.pem"),
            str(SENT),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "FlightUnavailableError"  # nobody has looked at a token
    assert peak() - before < SENT // 8
    server.shutdown()
