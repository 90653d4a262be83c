"""The command line: one file per command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from emberkeep import __version__
from emberkeep.cli.cluster import cluster
from emberkeep.cli.demo import demo
from emberkeep.cli.diff import diff
from emberkeep.cli.emulate import emulate
from emberkeep.cli.export import export
from emberkeep.cli.fork import fork
from emberkeep.cli.gc import gc
from emberkeep.cli.import_rows import import_rows
from emberkeep.cli.measure import measure
from emberkeep.cli.mirror import mirror
from emberkeep.cli.plan import plan
from emberkeep.cli.restore import restore
from emberkeep.cli.serve import serve
from emberkeep.cli.show import show
from emberkeep.cli.simulate import simulate
from emberkeep.cli.tag import tag, untag
from emberkeep.cli.train import train
from emberkeep.cli.verify import verify
from emberkeep.cli.versions import versions
from emberkeep.cli.warm import warm

# Commands by what people want to do, in the order in which they come to want it.
_TRY = "Try it"
_TRAIN = "Train"
_DECIDE = "Decide how to be safe"
_LOOK = "Look at versions"
_USE = "Get rows out and in"
_TIDY = "Keep a repository tidy"

app = typer.Typer(
    name="emberkeep",
    help="Keeps the embedding tables of recommendation models alive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected error is a bug: its whole traceback is wanted
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=_TRY)(demo)
app.command(rich_help_panel=_TRAIN)(train)
app.command(rich_help_panel=_TRAIN)(serve)
app.add_typer(cluster, name="cluster", rich_help_panel=_TRAIN)
app.command(rich_help_panel=_TRAIN)(warm)
app.command(rich_help_panel=_DECIDE)(measure)
app.command(rich_help_panel=_DECIDE)(plan)
app.command(rich_help_panel=_DECIDE)(emulate)
app.command(rich_help_panel=_DECIDE)(simulate)
app.command(rich_help_panel=_LOOK)(versions)
app.command(rich_help_panel=_LOOK)(show)
app.command(rich_help_panel=_LOOK)(diff)
app.command(rich_help_panel=_LOOK)(verify)
app.command(rich_help_panel=_USE)(restore)
app.command(rich_help_panel=_USE)(export)
app.command("import", rich_help_panel=_USE)(import_rows)
app.command(rich_help_panel=_USE)(fork)
app.command(rich_help_panel=_TIDY)(mirror)
app.command(rich_help_panel=_TIDY)(tag)
app.command(rich_help_panel=_TIDY)(untag)
app.command(rich_help_panel=_TIDY)(gc)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emberkeep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@functools.cache
def _entry() -> Callable[[], Any]:
    """All commands, put together from their signatures once: that takes a fifth of a second."""
    return typer.main.get_command(app)


def main() -> None:
    """The entry point of the `emberkeep` script."""
    _entry()()
