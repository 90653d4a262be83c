"""The one door to Ray: how it is loaded, connected to, and left.

Ray reads its settings when it is loaded, the token of the cluster that it is to join among them.
Nothing else loads Ray, so that the token is always there before.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from emberkeep.errors import ConfigError, ServerError, StateError
from emberkeep.server.ray.local_ray import NOT_INSTALLED, bring_token, reachable

NAMESPACE = "emberkeep"
_RUN = "EMBERKEEP_RUN"


def connected_ray() -> Any:
    """Ray, in a process that is connected to it: by `ensure_ray`, by its user, or as one of Ray's
    own."""
    if not is_connected():
        raise StateError("this process is not connected to Ray: call ensure_ray first")
    return sys.modules["ray"]


def is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def ensure_ray(address: str | None) -> None:
    """Connects to Ray: to the cluster at `address`, or to a local one that is started for this
    process; one that is connected already stays so. Signals act as they did before."""
    if is_connected():
        return
    if address is not None:
        address = reachable(address)
    ray = _load(address)
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "runtime_env": {"env_vars": environment(None)},
    }
    if address is None:
        options |= {"include_dashboard": False, "address": "local"}
    else:
        options["address"] = address
    try:
        with _keeping_sigterm(), _unsignalled():
            ray.init(logging_level="error", **options)
    except Exception as error:  # Ray raises plain Exception where its own processes do not start
        ray.shutdown()
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ServerError(
            f"Ray at {address or 'this machine'} cannot be used: {reason} (if it demands a token, "
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that holds it)"
        ) from None


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Ray for as long as the body lasts; a Ray that was there before stays."""
    before = is_connected()
    try:
        ensure_ray(address)
        yield
    finally:
        if not before:
            disconnect()


def disconnect() -> None:
    """Leaves Ray; one that was started for this process ends."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def run_name() -> str:
    """The run that this process belongs to, for people: the process that they may signal."""
    return os.environ.get(_RUN) or f"process {os.getpid()} on {socket.gethostname()}"


def join_run(name: str) -> None:
    """Makes this process one of a run that another process has started."""
    os.environ[_RUN] = name


def environment(threads: int | None) -> dict[str, str]:
    """What servers need to know of this process: where its own sources are."""
    variables = {"EMBERKEEP_QUIET": "1", "OMP_NUM_THREADS": "1"}
    source = str(Path(str(files("emberkeep"))).parent)
    variables["PYTHONPATH"] = os.pathsep.join(
        part for part in (source, os.environ.get("PYTHONPATH", "")) if part
    )
    if threads is not None:
        variables["EMBERKEEP_THREADS"] = str(threads)
    return variables


def _load(address: str | None) -> Any:
    """Ray, with the token of the cluster at `address` if that is the one which was started here."""
    loaded_before = "ray" in sys.modules
    brought = address is not None and bring_token(address)
    try:
        import ray
    except ImportError:
        raise ConfigError(NOT_INSTALLED) from None
    if loaded_before and brought:  # by the user's own program, without the token
        _read_settings_again()
    return ray


def _read_settings_again() -> None:
    try:
        from ray._raylet import (  # type: ignore[attr-defined]
            AuthenticationTokenLoader,
            Config,
        )

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    except (ImportError, AttributeError):  # Ray offers no public way
        raise ServerError(
            "Ray was loaded before its token was known, and reads it once: make the cluster "
            "before you import ray, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from None


@contextmanager
def _unsignalled() -> Iterator[None]:
    """What is started in the body does not hear SIGTERM, as Ray sees to it for Ctrl-C.

    A signal may reach every process of a group, and systemd's all of a service: the run would
    lose its servers and workers before it has saved. They end when this process ends Ray, or when
    it dies.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """`ray.init` replaces the handler of SIGTERM by one that ends the process with 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        # None stands for a handler that was not installed from Python: it cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
