"""What the proxy does to connections, over sockets that echo."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest

from emberkeep.testing.proxy import Proxy

# How long nothing must arrive for that to be believed.
QUIET = 0.05


class Echo:
    """Sends everything back that it is sent, with a mark."""

    def __init__(self, mark: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._mark = mark
        self.received = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._echo, args=(client,), daemon=True).start()

    def _echo(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            while data := client.recv(1 << 16):
                self.received += data
                client.sendall(self._mark + data)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    made = Proxy(echo.address)
    yield made
    made.close()
    assert made.connections == 0


def dial(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def arrives(end: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = end.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def is_silent(end: socket.socket) -> bool:
    end.settimeout(QUIET)
    try:
        return not end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(10)


def test_bytes_arrive_whole_and_in_order(proxy: Proxy) -> None:
    sent = bytes(range(256)) * 20_000  # more than all buffers on the way hold
    with dial(proxy) as end:
        writer = threading.Thread(target=end.sendall, args=(sent,))
        writer.start()
        assert arrives(end, len(sent)) == sent
        writer.join()


@pytest.mark.parametrize("ways", [("requests",), ("answers",), ()])
def test_what_was_sent_over_a_cut_line_arrives_when_it_is_healed(
    proxy: Proxy, echo: Echo, ways: tuple[str, ...]
) -> None:
    with dial(proxy) as end:
        end.sendall(b"before")
        assert arrives(end, 6) == b"before"
        proxy.cut(*ways)  # type: ignore[arg-type]
        end.sendall(b"meanwhile")
        with dial(proxy) as late:
            late.sendall(b"late")
            assert is_silent(end)
            assert is_silent(late)
            assert (b"meanwhile" in echo.received) == (ways == ("answers",))
            proxy.heal()
            assert arrives(end, 9) == b"meanwhile"
            assert arrives(late, 4) == b"late"


def test_what_a_blackhole_took_never_comes_back(proxy: Proxy) -> None:
    with dial(proxy) as old:
        old.sendall(b"one")
        assert arrives(old, 3) == b"one"
        proxy.blackhole()
        old.sendall(b"two")
        with dial(proxy) as meanwhile:
            meanwhile.sendall(b"three")
            assert is_silent(meanwhile)
            proxy.heal()
            assert is_silent(meanwhile)
        assert is_silent(old)
    with dial(proxy) as after:
        after.sendall(b"four")
        assert arrives(after, 4) == b"four"


def test_half_open_connections_are_accepted_and_never_answered(proxy: Proxy) -> None:
    with dial(proxy) as old:
        old.sendall(b"one")
        assert arrives(old, 3) == b"one"
        proxy.half_open()
        with dial(proxy) as meanwhile:
            meanwhile.sendall(b"hello")
            assert is_silent(meanwhile)
            old.sendall(b"two")
            assert arrives(old, 3) == b"two"
            proxy.heal()
            assert is_silent(meanwhile)


def test_connections_are_reset(proxy: Proxy) -> None:
    with dial(proxy) as old:
        old.sendall(b"one")
        assert arrives(old, 3) == b"one"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            old.recv(1)
    with suppress(ConnectionResetError), dial(proxy) as meanwhile:
        assert meanwhile.recv(1) == b""
    proxy.heal()
    with dial(proxy) as after:
        after.sendall(b"two")
        assert arrives(after, 3) == b"two"


def test_delayed_bytes_arrive_later(proxy: Proxy) -> None:
    proxy.delay(timedelta(seconds=0.05))
    with dial(proxy) as end:
        start = time.monotonic()
        end.sendall(b"slow")
        assert arrives(end, 4) == b"slow"
        assert time.monotonic() - start >= 0.1  # there and back


def test_a_lost_answer_takes_its_connection_with_it(proxy: Proxy, echo: Echo) -> None:
    proxy.lose_answer()
    with suppress(ConnectionResetError), dial(proxy) as end:
        end.sendall(b"x" * 100)
        assert arrives(end, 100) == b""
    assert proxy.lost_answers == 1
    assert bytes(echo.received) == b"x" * 100


def test_another_server_is_reached_by_later_connections(proxy: Proxy) -> None:
    other = Echo(b"other ")
    proxy.point(other.address)
    with dial(proxy) as end:
        end.sendall(b"one")
        assert arrives(end, 9) == b"other one"
    other.close()


def test_a_server_that_is_not_there_ends_the_connection(proxy: Proxy, echo: Echo) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy.point(f"127.0.0.1:{nobody.getsockname()[1]}")
        with suppress(ConnectionResetError), dial(proxy) as end:
            assert end.recv(1) == b""


def test_a_client_that_ends_takes_the_connection_to_the_server_with_it(proxy: Proxy) -> None:
    with dial(proxy) as end:
        end.sendall(b"one")
        assert arrives(end, 3) == b"one"
    until = time.monotonic() + 10
    while proxy.connections and time.monotonic() < until:
        time.sleep(0.001)
    assert proxy.connections == 0
