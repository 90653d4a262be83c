"""What all commands share: how errors, interrupts and closed pipes end a command."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import typer

from emberkeep.errors import EmberkeepError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

_Parameters = ParamSpec("_Parameters")


def command(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Ends a command as a user expects: one line on stderr and the exit code of the error's class.

    `EMBERKEEP_TRACEBACK=1` shows the traceback instead.
    """

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        # What fails in gRPC comes out as an error of ours; its own lines only repeat it.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        try:
            with saying_what_is_awaited():
                function(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
        except EmberkeepError as error:
            if os.environ.get("EMBERKEEP_TRACEBACK"):
                raise
            say(" ".join(str(error).split()))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader went away (`| head`). What is still buffered must not fail at exit again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None

    run.__doc__ = _reflowed(function.__doc__)
    return run


def _reflowed(text: str | None) -> str | None:
    """Each paragraph on one line: --help breaks lines where the terminal ends, and keeps those that
    are there."""
    if text is None:
        return None
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def saying_what_is_awaited() -> Iterator[None]:
    """Prints what the body waits for, such as servers that start (`runtime.waiting`), unless
    `EMBERKEEP_QUIET` is set."""
    if os.environ.get("EMBERKEEP_QUIET"):
        yield
        return
    logger, handler = logging.getLogger("emberkeep"), _Said(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def say(message: str) -> None:
    """One line for people; stdout is kept for results."""
    print(f"emberkeep: {message}", file=sys.stderr, flush=True)
