"""Objects in S3, Google Cloud Storage or Azure, through obstore.

obstore retries server errors, dropped connections and reads that time out by itself, within the
deadline given here, but not a write whose answer timed out. Small writes are repeated here: object
names are never reused for other bytes, so a repeated put changes nothing, and a repeated
conditional create says "taken", which the caller resolves by content. Streams cannot be rewound;
their failure is the caller's to handle.

Only an answer that says so of an object read is its absence: a bucket that is not there, a socket
or file that fails, a listing that ends in an error are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from emberkeep.blobs.direct_file import copy_bytes
from emberkeep.blobs.store import BlobInfo, Buffer, as_buffers, check_name, check_range
from emberkeep.errors import (
    ConfigError,
    MissingObjectError,
    StorageError,
    UnsupportedStoreError,
)
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    import obstore.store

_Result = TypeVar("_Result")

# A streamed object occupies at most parts × concurrency of memory while it is uploaded.
_PART_NBYTES = 8 * 1024 * 1024
_CONCURRENT_PARTS = 4
_DEADLINE = timedelta(minutes=2)
_FIRST_PAUSE_SECONDS = 0.2
# How S3, Azure and Google say "not found" of the whole bucket.
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")


class ObjectStore:
    """A store below a prefix of a bucket, or over any store object of obstore's.

    Large streams go up in parts and appear only when complete. Parts of interrupted uploads stay
    hidden in the bucket and cannot be listed here: a lifecycle rule should remove them.
    """

    reads_at_once = 64  # one connection has a fraction of the bandwidth, and every request waits

    def __init__(
        self,
        store: obstore.store.ObjectStore,
        *,
        url: str,
        deadline: timedelta = _DEADLINE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._store = store
        self._url = url
        self._deadline = deadline
        from emberkeep.runtime.crew import Crew  # numpy comes with it, and no help text needs that

        self.calls_at_once = Crew(self.reads_at_once, "emberkeep-requests", clock=clock)
        """Makes calls at once that do not depend on each other: each waits for the network."""

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        config: Any = None,
        client_options: dict[str, Any] | None = None,
        deadline: timedelta = _DEADLINE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> ObjectStore:
        """Opens `s3://`, `gs://` or `az://`; credentials and endpoint as obstore finds them.

        `config` and `client_options` are obstore's; the environment (`AWS_ENDPOINT_URL`,
        `AWS_ALLOW_HTTP`, ...) fills in what they leave out.
        """
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        retry: Any = {"max_retries": 8, "retry_timeout": deadline}
        options: Any = {"timeout": deadline, **(client_options or {})}
        try:
            store = from_url(url, config=config, client_options=options, retry_config=retry)
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot use {url}: {_first_line(error)}; check the URL, its options and the "
                "credentials in the environment"
            ) from error
        return cls(store, url=url, deadline=deadline, clock=clock)

    @property
    def url(self) -> str:
        return self._url

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        import obstore

        check_name(name)
        buffers = as_buffers(data)
        head, size = _take(buffers, _PART_NBYTES)
        if size <= _PART_NBYTES:
            # One request instead of the three of an upload in parts.
            whole = head[0] if len(head) == 1 else b"".join(head)
            self._repeated(name, lambda: obstore.put(self._store, name, whole, use_multipart=False))
            return size

        failures: list[OSError] = []

        def counted() -> Iterator[memoryview]:
            nonlocal size
            yield from head
            try:
                for view in buffers:
                    size += view.nbytes
                    yield view
            except OSError as error:
                failures.append(error)
                raise

        try:
            self._once(
                name,
                lambda: obstore.put(
                    self._store,
                    name,
                    counted(),
                    use_multipart=True,
                    chunk_size=_PART_NBYTES,
                    max_concurrency=_CONCURRENT_PARTS,
                ),
            )
        except StorageError:
            if failures:  # of the data, not of this store
                raise failures[0] from None
            raise
        return size

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        content = bytes(data)

        def create() -> bool:
            try:
                obstore.put(self._store, name, content, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        check_name(name)
        return self._repeated(name, create)

    def get(self, name: str) -> bytes:
        import obstore

        check_name(name)
        return self._look(name, lambda: bytes(obstore.get(self._store, name).bytes()))

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return memoryview(self._range(name, start, length))

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """Fills `into` with bytes from `start` on; how many there were before the object ended."""
        found = memoryview(self._range(name, start, len(into)))
        copy_bytes(into[: len(found)], found)
        return len(found)

    def _range(self, name: str, start: int, length: int) -> Any:
        """Bytes of an object, as obstore has them: they are not copied."""
        import obstore
        from obstore.exceptions import GenericError

        check_range(name, start, length)
        check_name(name)

        def read() -> Any:
            try:
                return obstore.get_range(self._store, name, start=start, length=length)
            except GenericError as error:
                if "non-partial response" not in str(error):
                    raise
                # A server that does not know ranges: read past what is before.
                return _skim(obstore.get(self._store, name).stream(), start, start + length)

        # Servers refuse empty ranges and ranges that begin at the end; asking for the size
        # first would cost a request on every read, so only refusals pay for it.
        try:
            if length:
                return self._look(name, read)
        except MissingObjectError:
            raise
        except StorageError as refusal:
            try:
                size = self.size(name)
            except StorageError:
                raise refusal from refusal.__cause__
            if start < size:
                raise
            return b""
        self.size(name)
        return b""

    def size(self, name: str) -> int:
        import obstore

        check_name(name)
        return self._look(name, lambda: int(obstore.head(self._store, name)["size"]))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        import obstore

        if prefix:
            check_name(prefix)
        what = f"the listing of {prefix}"
        pages = self._once(what, lambda: iter(obstore.list(self._store, prefix or None)))
        while True:
            page = self._once(what, lambda: next(pages, None))
            if page is None:
                return
            for entry in page:
                yield BlobInfo(
                    name=entry["path"], size=entry["size"], modified=entry["last_modified"]
                )

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        checked = [check_name(name) for name in names]
        if not checked:
            return

        def delete() -> None:
            try:
                obstore.delete(self._store, checked)
            except FileNotFoundError:
                # Some backends stop at the first absent name: go one by one.
                for name in checked:
                    try:
                        obstore.delete(self._store, name)
                    except FileNotFoundError:
                        continue

        self._repeated(checked[0], delete)

    def sweep(self, *, older_than: timedelta) -> int:
        return 0

    def _repeated(self, name: str, operation: Callable[[], _Result]) -> _Result:
        """Runs an operation that may safely run twice, until it answers or time is up."""
        give_up = self._clock.monotonic() + self._deadline.total_seconds()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._once(name, operation)
            except UnsupportedStoreError:
                raise
            except StorageError as error:
                if not _may_pass(error.__cause__) or self._clock.monotonic() + pause > give_up:
                    raise
            self._clock.sleep(pause)
            pause *= 2

    def _look(self, name: str, operation: Callable[[], _Result]) -> _Result:
        """Runs an operation that reads an object: `MissingObjectError` if there is none."""

        def look() -> _Result:
            try:
                return operation()
            except FileNotFoundError as error:
                if any(text in str(error) for text in _NO_BUCKET):
                    raise
                raise MissingObjectError(f"{self._url} holds no object {name}") from error

        return self._once(name, look)

    def _once(self, name: str, operation: Callable[[], _Result]) -> _Result:
        from obstore.exceptions import BaseError, NotSupportedError

        try:
            return operation()
        except (NotSupportedError, NotImplementedError) as error:
            raise UnsupportedStoreError(
                f"{self._url} does not support this operation on {name}: {_first_line(error)}"
            ) from error
        except (BaseError, OSError) as error:
            raise StorageError(
                f"{name} in {self._url}: {_first_line(error)}; check the network, the endpoint "
                "and the credentials, then try again"
            ) from error


def _take(buffers: Iterator[memoryview], nbytes: int) -> tuple[list[memoryview], int]:
    """Buffers until their sum exceeds `nbytes`, or all of them, and the sum."""
    taken: list[memoryview] = []
    size = 0
    for view in buffers:
        taken.append(view)
        size += view.nbytes
        if size > nbytes:
            break
    return taken, size


def _skim(stream: Iterable[Buffer], start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a stream, which is read no further than that."""
    found = bytearray()
    position = 0
    for chunk in stream:
        view = memoryview(chunk)
        found += view[max(start - position, 0) : max(stop - position, 0)]
        position += view.nbytes
        if position >= stop:
            break
    return bytes(found)


def _may_pass(cause: BaseException | None) -> bool:
    """Whether trying again could help: an answer that was lost, not one that said no."""
    from obstore.exceptions import GenericError

    return isinstance(cause, GenericError) and "non-2xx status code: 4" not in str(cause)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
