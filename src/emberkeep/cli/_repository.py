"""What the commands over a repository share: opening one, choosing a version, printing."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._work import ReadingStore
from emberkeep.errors import ConfigError, NoVersionError, StorageError

if TYPE_CHECKING:
    from emberkeep.repository import Repository, VersionId

# A process that wrote within this time may be at work.
_ACTIVE = timedelta(hours=24)

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A path, s3://, gs:// or az:// with a repository below it."),
]
VersionOption = Annotated[
    str | None,
    typer.Option("--version", metavar="N|TAG", help="A version or a tag; the newest by default."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def open_repository(url: str) -> tuple[Repository, ReadingStore]:
    """The repository under a URL, and its store, which can tell how much was read."""
    from emberkeep.blobs import open_store
    from emberkeep.repository import Repository

    store = ReadingStore(open_store(url))
    return Repository.open(store), store


def choose(repository: Repository, wanted: str | None) -> VersionId:
    """The version that the user named by number or tag, or the newest whole one."""
    if wanted is None:
        newest = repository.newest_whole()
        if newest is None:
            raise NoVersionError(f"{repository.store.url} has no version yet: save one first")
        return newest
    return repository.named(wanted)


def refuse_if_active(repository: Repository, what: str, *, remedy: str) -> None:
    """Refuses to become the writer where another may be at work; one of this machine that has
    ended is no reason."""
    from emberkeep.inspect.summary import newest_writer
    from emberkeep.runtime.system_calls import lives

    writer = newest_writer(repository)
    if writer is None or (writer.host == socket.gethostname() and not lives(writer.pid)):
        return
    idle = repository.clock.now() - writer.last_seen
    if idle < _ACTIVE:
        minutes = max(0, int(idle.total_seconds() // 60))
        ago = f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours"
        raise ConfigError(
            f"process {writer.pid} on {writer.host} wrote here {ago} ago; {what} would fence it, "
            f"so that it stops at its next save: say --yes if it has ended or may be stopped, "
            f"{remedy}"
        )


def print_json(value: Any) -> None:
    """One JSON document; what JSON has no word for (NaN) becomes null."""
    from emberkeep.report.page import strict

    encoding = getattr(sys.stdout, "encoding", None) or ""
    plain = encoding.lower().replace("-", "") != "utf8"  # then escaped: it stays JSON
    emit(json.dumps(strict(value), ensure_ascii=plain, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()
) -> None:
    """A table for people; columns named in `right` hold numbers. No text in it is markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # As text, not markup: a name may hold brackets.
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    terminal = to_terminal()
    # Lines of a log or a pipe are not folded: the next program wants them whole.
    width = shutil.get_terminal_size().columns if terminal else 1000
    text = io.StringIO()
    Console(file=text, force_terminal=terminal, width=width, highlight=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    emit("\n".join(line for line in lines if line))


def to_terminal() -> bool:
    """Whether people read stdout as it is written; not where it is closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def emit(text: str) -> None:
    """One or more lines on stdout, flushed: what cannot be written is an error, not lost. What the
    encoding of stdout has no character for becomes a question mark."""
    if sys.stdout is None:  # closed before the process began
        raise StorageError("the result could not be printed: standard output is closed")
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(f"{text}\n".encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered must not fail at exit once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError(f"the result could not be printed: {error.strerror}") from error


def size_text(nbytes: int | None) -> str:
    """Bytes in the unit that people would choose."""
    if nbytes is None:
        return ""
    if nbytes < 1000:
        return f"{nbytes} B"
    exponent = min(4, int(math.log10(nbytes) // 3))
    return f"{nbytes / 1000**exponent:.3g} {'kMGT'[exponent - 1]}B"


def count_text(count: int, what: str) -> str:
    """ "1 file", "3 files"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def kind_text(kind: str | None) -> str:
    """What a version holds: everything, or what changed since which other."""
    words = {"baseline": "since baseline", "version": "since version before"}
    return words.get(kind or "", kind or "unknown")


def numbers_text(versions: Iterable[Any]) -> str:
    """Version numbers, runs of them shortened: 1-4, 7."""
    runs: list[list[int]] = []
    for number in sorted(v if isinstance(v, int) else v.number for v in versions):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
