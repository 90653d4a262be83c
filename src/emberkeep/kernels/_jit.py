"""How kernels are compiled and where the machine code is kept.

`kernel` compiles a function serially, without the GIL, and caches the result on disk: beside the
source, or in the user's cache directory where the source cannot be written, or in
`NUMBA_CACHE_DIR` if that is set. A cache that is full but read-only is used as it is. The first
compilation of a process is announced once on stderr.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
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
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    tag = hashlib.sha1(os.path.dirname(os.path.abspath(py_file)).encode()).hexdigest()[:12]
    return [
        os.path.join(os.path.dirname(py_file), "__pycache__"),
        os.path.join(user, "emberkeep", f"kernels-{tag}"),
    ]


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            return  # a read-only or full cache directory costs time, never the result


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


announcer = _Announcer()
event.register("numba:compile", announcer)


def kernel(function: _Function) -> _Function:
    """A serial kernel: `njit(nogil=True)`, cached on disk, callable from other kernels."""
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    with contextlib.suppress(RuntimeError):  # no directory at all: compiled in every process
        compiled._cache = _KernelCache(function)
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
