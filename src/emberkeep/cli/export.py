"""`emberkeep export`: the tables of one version for other programs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    VersionOption,
    choose,
    count_text,
    emit,
    open_repository,
    print_json,
    size_text,
)
from emberkeep.cli._shell import command
from emberkeep.cli._work import progress

if TYPE_CHECKING:
    from emberkeep.inspect.export import Exported


class Format(str, enum.Enum):
    safetensors = "safetensors"
    parquet = "parquet"


@command
def export(
    url: Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="A file for safetensors, a directory for Parquet.",
        ),
    ],
    file_format: Annotated[
        Format, typer.Option("--format", help="What to write.")
    ] = Format.safetensors,
    version: VersionOption = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", metavar="T", help="Only this table; repeatable.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what is there, if an export has written it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of one version as safetensors or Parquet: ids, weights, optimizer planes."""
    from emberkeep.inspect.export import to_parquet, to_safetensors
    from emberkeep.inspect.summary import files_of
    from emberkeep.runtime import pool

    repository, store = open_repository(url)
    chosen = choose(repository, version)
    write = to_parquet if file_format is Format.parquet else to_safetensors
    total = sum(file.size for file in files_of(repository, [chosen]))
    with progress(f"exporting version {chosen.number}", total) as store.advance:
        exported = write(repository, chosen, output, pool.shared(), tables=tables, force=force)
    print_exported(exported, output, as_json)


def print_exported(exported: Exported, output: Path, as_json: bool) -> None:
    number, rows = exported.manifest.version.number, exported.rows
    if as_json:
        print_json(
            {
                "version": number,
                "step": exported.manifest.step,
                "rows": dict(rows),
                "nbytes": exported.nbytes,
                "files": [str(file) for file in exported.files],
            }
        )
        return
    emit(
        f"version {number} (step {exported.manifest.step:,}) written to {output}: "
        f"{count_text(sum(rows.values()), 'row')} of {count_text(len(rows), 'table')}, "
        f"{count_text(len(exported.files), 'file')}, {size_text(exported.nbytes)}"
    )
