"""The command line: one file per command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from emberkeep import __version__
from emberkeep.cli.train import train
from emberkeep.cli.warm import warm

app = typer.Typer(
    name="emberkeep",
    help="Keeps the embedding tables of recommendation models alive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected error is a bug: its whole traceback is wanted
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(warm)


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


def main() -> None:
    """The entry point of the `emberkeep` script."""
    app()
