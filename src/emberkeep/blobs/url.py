"""From what a user writes, a path or a URL, to a store."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from emberkeep.blobs.local_store import LocalStore
from emberkeep.blobs.memory_store import MemoryStore
from emberkeep.blobs.object_store import ObjectStore
from emberkeep.blobs.store import BlobStore
from emberkeep.errors import ConfigError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

_REMOTE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url")
_memory_stores: dict[str, MemoryStore] = {}


def open_store(
    url: str | os.PathLike[str], *, clock: Clock = SYSTEM_CLOCK, **options: Any
) -> BlobStore:
    """The store under a path or URL. Nothing is read or written yet.

    - a path or `file:///path`: a local directory;
    - `memory://name`: this process's memory, the same store for the same name;
    - `s3://bucket/prefix`, `gs://...`, `az://...`: an object store. Query parameters and keyword
      options are obstore's configuration: `s3://b/p?endpoint=http://host:9000&allow_http=true`.
      The environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...) fills in the rest.
    """
    text = os.fspath(url)
    if not text.strip():
        raise ConfigError("an empty path would be the current directory: name one, or '.'")
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in _REMOTE:
        return _open_remote(text, options, clock)
    if options:
        raise ConfigError(f"{text} takes no options, but got {', '.join(sorted(options))}")
    if scheme == "":
        return LocalStore(text, clock=clock)
    parts = urlsplit(text)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{text} names a host: write file:///path, with three slashes")
        return LocalStore(unquote(parts.path), clock=clock)
    if scheme == "memory":
        return _memory_stores.setdefault(parts.netloc + parts.path, MemoryStore(clock))
    raise ConfigError(
        f"{text}: unknown scheme {scheme!r}; use a path, file://, s3://, gs:// or az://"
    )


def _open_remote(text: str, options: dict[str, Any], clock: Clock) -> ObjectStore:
    parts = urlsplit(text)
    plain = parts._replace(query="", fragment="").geturl()
    deadline = options.pop("deadline", None)
    settings = {**dict(parse_qsl(parts.query)), **options}
    client = {key: settings.pop(key) for key in _CLIENT_OPTIONS if key in settings}
    # obstore takes all else of the environment, but this one only as an option of the client.
    if "allow_http" not in client and "AWS_ALLOW_HTTP" in os.environ:
        client["allow_http"] = os.environ["AWS_ALLOW_HTTP"]
    for key in ("allow_http", "allow_invalid_certificates"):
        if isinstance(client.get(key), str):
            client[key] = client[key].lower() in ("1", "true", "yes", "on")
    timing: dict[str, Any] = {} if deadline is None else {"deadline": deadline}
    return ObjectStore.from_url(
        plain, config=settings or None, client_options=client, clock=clock, **timing
    )


def is_shared(url: str) -> bool:
    """Whether other processes can open that store."""
    return not url.startswith("memory:")


def refuse_nested(one: str, other: str) -> None:
    """Refuses two stores, by their URLs, of which one lies inside the other: each would take files
    of the other for strays of its own. Symbolic links are followed."""
    places = {_place(url): url for url in (one, other) if is_shared(url)}
    if len(places) < 2:
        return
    outer, inner = sorted(places, key=len)
    if inner.startswith(f"{outer}/"):
        raise ConfigError(
            f"{places[inner]} lies inside {places[outer]}: two repositories cannot share a "
            "place, so nothing was changed; choose another"
        )


def _place(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return f"file://{os.path.realpath(unquote(parts.path)).rstrip('/')}"
    return url.rstrip("/")
