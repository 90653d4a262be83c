"""Servers that only processes of their user on this machine can reach.

They listen on a socket in a directory of their own, which nobody else can enter: a stranger sends
no byte to them. What stands for them by its port, `127.0.0.1:7070`, is a path that all processes of
the user know. The token of servers that were given none is in a file beside those directories.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from emberkeep.errors import SecurityError, ServerError
from emberkeep.runtime.system_calls import lives
from emberkeep.wire.security import is_loopback, split_address

SCHEME = "grpc+unix"
_SOCKET = "socket"
# Of `sun_path`, less its terminating zero; the shorter of Linux and macOS.
_LONGEST = 103


class PrivateSocket:
    """The right to listen at a path, which one process has at a time, until it ends.

    Its directory is made for it and belongs to it: only this user can enter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = _address(path)
        if len(os.fsencode(path)) > _LONGEST:
            raise ServerError(
                f"cannot listen on {path}: the system allows {_LONGEST} characters; set "
                "XDG_STATE_HOME or TMPDIR to a shorter path, or name another --socket"
            )
        _make_private(path.parent)
        # The lock tells a server that is there from the socket that a killed one has left.
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._directory)
            raise ServerError(
                f"cannot listen on {path}: {error.strerror or error}, another server is there; "
                "choose another --port or --socket, or end it"
            ) from None

    def remove(self) -> None:
        """Removes the socket and its directory: the server has ended."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()
        os.close(self._directory)


def socket_of(port: int) -> Path:
    """Where the server of this user listens that stands for a port of this machine."""
    return _home() / f"{os.uname().nodename}-{port}" / _SOCKET


def own_socket() -> PrivateSocket:
    """A socket of this process. What killed processes have left behind is removed."""
    prefix = f"{os.uname().nodename}-pid-"
    for left in _home().glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix)
        # A process that lives may have made its directory, and not locked it yet.
        if pid.isdigit() and not lives(int(pid)):
            with suppress(ServerError, SecurityError):
                PrivateSocket(left / _SOCKET).remove()
    return PrivateSocket(_home() / f"{prefix}{os.getpid()}" / _SOCKET)


def own_address(address: str) -> str:
    """`127.0.0.1:7070` as the address of this user's own server; other addresses as they are."""
    _, host, port = split_address(address)
    if "://" in address or not is_loopback(host):
        return address
    return _address(socket_of(port))


def token_file() -> Path:
    """Holds the token of this user's servers that were given none."""
    return _home() / "token"


def own_token() -> str | None:
    """What `token_file` holds; None where there is no such file."""
    path = token_file()
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise SecurityError(
                    f"{path} can be read by others, so its token proves nothing: remove it, and "
                    "start the servers again"
                )
            return file.read().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityError(f"the token cannot be read from {path}: {error}") from None


def make_token() -> str:
    """What `token_file` holds; it is made where there is none."""
    found = own_token()
    if found is not None:
        return found
    path = token_file()
    _make_private(path.parent)
    draft = path.with_name(f"token-{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe() + "\n")
        with suppress(FileExistsError):  # whichever server links it first decides
            os.link(draft, path)
    except OSError as error:
        raise SecurityError(_unwritable(path, error)) from None
    finally:
        draft.unlink(missing_ok=True)
    made = own_token()
    if made is None:
        raise SecurityError(f"{path} was removed while it was made: start the server again")
    return made


def _address(path: Path) -> str:
    return f"{SCHEME}://{quote(str(path))}"


def _home() -> Path:
    try:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:
        raise SecurityError(
            "this user has no home directory for a socket and a token: set XDG_STATE_HOME"
        ) from None
    return Path(base).absolute() / "emberkeep" / "servers"


def _make_private(directory: Path) -> None:
    """Makes a directory that only this user can enter; refuses one that is somebody else's."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise SecurityError(
                f"{directory} does not belong to this user, so nothing was opened there: remove it"
            )
        if status.st_mode & 0o077:
            raise SecurityError(
                f"others can enter {directory}, so nothing was opened there: make it private with "
                f"chmod 700 {directory}, or name a directory of its own"
            )
    except OSError as error:
        raise SecurityError(_unwritable(directory, error)) from None


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be made ({error.strerror or error}): set XDG_STATE_HOME to a directory "
        "that this user can write to"
    )
