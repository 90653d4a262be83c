"""`emberkeep export`: the tables of one version for other programs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from emberkeep.inspect.export import Exported


class Format(str, enum.Enum):
    safetensors = "safetensors"
    parquet = "parquet"
    arrow = "arrow"
    torch = "torch"
    dcp = "dcp"
    dynamicemb = "dynamicemb"


class Names(str, enum.Enum):
    emberkeep = "emberkeep"
    torch = "torch"
    torchrec = "torchrec"
    fbgemm = "fbgemm"


_SUFFIXES = {
    "": Format.safetensors,
    ".safetensors": Format.safetensors,
    ".parquet": Format.parquet,
    ".arrow": Format.arrow,
    ".feather": Format.arrow,
    ".pt": Format.torch,
    ".pth": Format.torch,
    ".dcp": Format.dcp,
}


@command
def export(
    url: Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="A file, or a directory for DCP, dynamicemb and several tables in columns.",
        ),
    ],
    file_format: Annotated[
        Format | None,
        typer.Option("--format", help="What to write; else what the end of PATH says."),
    ] = None,
    version: VersionOption = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", metavar="T", help="Only this table; repeatable.")
    ] = None,
    names: Annotated[
        Names, typer.Option("--names", help="Whose names tensors, columns and planes have.")
    ] = Names.emberkeep,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what is there, if an export has written it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of one version for other programs: ids, weights, optimizer planes."""
    from emberkeep.inspect import export_tensors
    from emberkeep.inspect.export_columns import to_columns
    from emberkeep.inspect.summary import files_of
    from emberkeep.runtime import pool

    chosen_format = file_format or _format_of(output)
    if chosen_format is Format.dynamicemb and names is not Names.emberkeep:
        raise ConfigError("dynamicemb's files have no names for planes: leave --names out")
    repository, store = open_repository(url)
    chosen = choose(repository, version)
    total = sum(file.size for file in files_of(repository, [chosen]))
    with progress(f"exporting version {chosen.number}", total) as store.advance:
        rest: dict[str, Any] = {"tables": tables, "force": force}
        if chosen_format is not Format.dynamicemb:
            rest["names"] = names.value
        if chosen_format in (Format.parquet, Format.arrow):
            rest["kind"] = chosen_format.value
        write: dict[Format, Callable[..., Exported]] = {
            Format.safetensors: export_tensors.to_safetensors,
            Format.parquet: to_columns,
            Format.arrow: to_columns,
            Format.torch: export_tensors.to_torch,
            Format.dcp: export_tensors.to_checkpoint,
            Format.dynamicemb: export_tensors.to_dump,
        }
        exported = write[chosen_format](repository, chosen, output, pool.shared(), **rest)
    print_exported(exported, output, as_json)


def _format_of(output: Path) -> Format:
    """What the end of a path says; what no format is called is not guessed."""
    try:
        return _SUFFIXES[output.suffix.lower()]
    except KeyError:
        raise ConfigError(
            f"what shall {output} be? Its name ends with none of "
            f"{', '.join(suffix for suffix in _SUFFIXES if suffix)}: name the kind by --format"
        ) from None


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
