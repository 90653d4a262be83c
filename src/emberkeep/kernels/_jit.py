"""How kernels are compiled and where the machine code is kept.

`kernel` compiles a function serially, without the GIL, and caches the result on disk: beside the
source, and in the user's cache directory under a digest of all that it was made of, where other
copies of the same source find it; or only in `NUMBA_CACHE_DIR` if that is set. A cache that is full
but read-only is used as it is. The first compilation of a process is announced once on stderr.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core import caching, config, event

_Function = TypeVar("_Function", bound=Callable[..., Any])


_KERNELS = Path(__file__).parent
_IMPORTED = re.compile(rb"^from emberkeep\.kernels\.(\w+) import", re.MULTILINE)


@functools.cache
def _source_stamp(py_file: str) -> bytes:
    """A digest of a kernel's source and of all that it imports: kernels inline each other, so a
    change of one voids every kernel that can hold a copy of it, and no other."""
    sources: dict[Path, bytes] = {}
    wanted = [Path(py_file)]
    while wanted:
        path = wanted.pop()
        if path not in sources:
            sources[path] = path.read_bytes()
            names = _IMPORTED.findall(sources[path])
            wanted.extend(_KERNELS / f"{name.decode()}.py" for name in names)
    digest = hashlib.sha256()
    for path, source in sorted(sources.items()):
        digest.update(path.name.encode() + b"\0" + source)
    return digest.digest()


class _Locator(caching.InTreeCacheLocator):  # type: ignore[misc]
    """The first directory that can be written, or failing that one that already holds kernels."""

    def get_source_stamp(self) -> bytes:
        return _source_stamp(self._py_file)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        found = []
        for path in _cache_directories(py_file):
            locator = cls(py_func, py_file)
            locator._cache_path = path
            found.append(locator)
        for locator in found:
            try:
                locator.ensure_cache_path()
            except OSError:
                # A warm cache on a read-only medium: numba only needs to read it.
                if any(Path(locator._cache_path).glob("*.nbi")):
                    return locator
            else:
                return locator
        return None


def _cache_directories(py_file: str) -> list[str]:
    if config.CACHE_DIR:
        below = _Locator.get_suitable_cache_subpath(py_file)
        return [os.path.join(config.CACHE_DIR, below)]
    return [os.path.join(os.path.dirname(py_file), "__pycache__"), _shared_directory(py_file)]


@functools.cache
def _shared_directory(py_file: str) -> str:
    """Where all copies of this source, in whatever environment, find what one has compiled: its
    name is a digest of what decides about the result. The rest, which is the processor, the types
    and Python's version, numba has in the files."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    versions = numba.__version__, llvmlite.__version__, np.__version__
    flags = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_"))
    digest = hashlib.sha256(_source_stamp(py_file) + repr((versions, flags)).encode())
    return os.path.join(user, "emberkeep", "kernels", digest.hexdigest()[:24])


_UNUSED_SECONDS = 60 * 86400


def _mark_used(directory: Path) -> None:
    """Makes a shared directory, or notes that it is in use; others that nobody has used for two
    months go when a new one comes."""
    try:
        os.utime(directory)
        return
    except FileNotFoundError:
        directory.mkdir(parents=True)
    now = directory.stat().st_mtime
    for other in directory.parent.iterdir():
        if other.stat().st_mtime < now - _UNUSED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """What was compiled for each signature, in files that are named by it.

    Numba numbers them, and writes the index first: of two processes that save at once, one can
    leave an index that leads to what the other has compiled, for other types. Files that were cut
    short, by a power cut say, are compiled again: what is no pickle raises whatever it likes."""

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except Exception:
            return None

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:
            return {}

    def save(self, key: Any, data: Any) -> None:
        named = hashlib.sha256(self._source_stamp + repr(key).encode()).hexdigest()[:16]
        name = f"{self._index_name.removesuffix('.nbi')}.{named}.nbc"
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    """A directory that is ours, and one that is shared with other copies of the source."""

    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = self._files(self._cache_path)
        directory = _shared_directory(function.__code__.co_filename)
        own = bool(config.CACHE_DIR) or self._cache_path == directory
        self._shared: _Files | None = None if own else self._files(directory)

    def _files(self, directory: str) -> _Files:
        return _Files(directory, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super()._load_overload(sig, target_context)
        if found is None and self._shared is not None:
            key = self._index_key(sig, target_context.codegen())
            with contextlib.suppress(OSError):
                reduced = self._shared.load(key)
                if reduced is not None:
                    found = self._impl.rebuild(target_context, reduced)
                    self._cache_file.save(key, reduced)
                    _mark_used(Path(self._shared._cache_path))
        return found

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        key, reduced = self._index_key(sig, data.codegen), self._impl.reduce(data)
        # A read-only or full directory costs time, never the result.
        with contextlib.suppress(OSError):
            self._impl.locator.ensure_cache_path()
            self._cache_file.save(key, reduced)
        if self._shared is not None:
            with contextlib.suppress(OSError):
                _mark_used(Path(self._shared._cache_path))
                self._shared.save(key, reduced)


class _Announcer(event.Listener):  # type: ignore[misc]
    """Says once per process that kernels are being compiled (a cache hit compiles nothing)."""

    def __init__(self) -> None:
        self.compiled = 0

    def on_start(self, event: Any) -> None:
        module = getattr(event.data["dispatcher"].py_func, "__module__", "")
        if not module.startswith("emberkeep."):
            return
        if self.compiled == 0 and not os.environ.get("EMBERKEEP_QUIET"):
            print("emberkeep: compiling kernels, first run only", file=sys.stderr, flush=True)
        self.compiled += 1

    def on_end(self, event: Any) -> None:
        pass


KERNELS: list[Any] = []
"""Every kernel of the modules that are imported, in this order; `signatures` of each are the types
that it was called with so far."""

announcer = _Announcer()
event.register("numba:compile", announcer)


def kernel(function: _Function) -> _Function:
    """A serial kernel: `njit(nogil=True)`, cached on disk, callable from other kernels."""
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    with contextlib.suppress(RuntimeError):  # no directory at all: compiled in every process
        compiled._cache = _KernelCache(function)
    KERNELS.append(compiled)
    return cast(_Function, compiled)


def variant(
    template: Callable[..., Any], name: str, *, of: Any = None, **given: Any
) -> Callable[..., Any]:
    """A kernel with the code of `template`, where the names in `given` have those values.

    It is compiled and cached as a kernel called `name` in the module `of` a kernel, or in that of
    the template. The values are globals to it: numba would make cells of a closure part of the
    cache's key, and those that hold kernels differ in every process.
    """
    home = template if of is None else of.py_func
    # Python 3.10 takes the qualified name from the name.
    qualified: dict[str, Any] = {"co_qualname": name} if sys.version_info >= (3, 11) else {}
    code = template.__code__.replace(
        co_filename=home.__code__.co_filename,
        co_firstlineno=home.__code__.co_firstlineno,
        co_name=name,
        **qualified,
    )
    values = {**template.__globals__, **given, "__name__": home.__module__}
    return kernel(types.FunctionType(code, values, name))


def inline(function: _Function) -> _Function:
    """A helper that only kernels call; compiled as part of them."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy", inline="never")(function))
