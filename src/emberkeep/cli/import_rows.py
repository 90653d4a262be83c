"""`emberkeep import`: rows of other systems, as one version of a repository."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    count_text,
    emit,
    print_json,
    refuse_if_active,
)
from emberkeep.cli._shell import command, say
from emberkeep.cli._work import progress
from emberkeep.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from emberkeep.inspect.importer import Imported


class DimChange(str, enum.Enum):
    error = "error"
    pad = "pad"
    truncate = "truncate"


@command
def import_rows(
    url: Url,
    files: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="FILE",
            help="A file, a directory or another repository; repeatable. What it is is seen from "
            "its content.",
        ),
    ],
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="OLD=NEW", help="Rows of OLD go to table NEW; repeatable."),
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="T", help="All rows go to this table.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="COLUMN", help="The column of ids (Parquet, Arrow)."),
    ] = None,
    vector: Annotated[
        str | None,
        typer.Option("--vector", metavar="COLUMN", help="The column of weights (Parquet, Arrow)."),
    ] = None,
    dim_change: Annotated[
        DimChange,
        typer.Option("--dim-change", help="What to do with weights of another width."),
    ] = DimChange.error,
    fill: Annotated[
        list[str] | None,
        typer.Option(
            "--fill",
            metavar="PLANE=X",
            help="What a plane begins with that new rows come without; 0 by default; repeatable.",
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="N|TAG", help="The version of another repository."),
    ] = None,
    init: Annotated[
        bool,
        typer.Option("--init", help="Begin a repository with the tables of the files, if none is."),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="NAME", help="With --init: whose planes rows have."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="With --init: the seed of rows that are not there yet.")
    ] = 0,
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch",
            metavar="DIR",
            help="Where rows are sorted on their way; about the size of the files.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Fence a trainer that may still be running.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring rows of other systems in, as one version; the same command goes on after a kill."""
    from emberkeep.blobs import open_store
    from emberkeep.inspect.importer import look
    from emberkeep.inspect.intake import Choice
    from emberkeep.inspect.plane_names import TableMap
    from emberkeep.runtime import pool

    for option, given in (("--optimizer", optimizer), ("--seed", seed or None)):
        if given is not None and not init:
            raise ConfigError(f"{option} describes a new repository: add --init")
    choice = Choice(
        tables=TableMap.parse(mapping or ()),
        table=table,
        dim_change=dim_change.value,
        fill=_numbers(fill or ()),
        optimizer=optimizer,
        seed=seed,
    )
    store = open_store(url)
    found = look(
        store, files, choice, pool.shared(), init=init, ids=ids, vector=vector, version=version
    )

    def may_write() -> None:
        if found.repository is not None and not yes:
            refuse_if_active(found.repository, "an import", remedy="or import to a fork of it")

    may_write()
    place = scratch or _scratch(url)
    try:
        with progress("importing", 2 * found.nbytes) as advance:  # read, and written
            imported = found.run(place, advance=advance, may_write=may_write)
    except (KeyboardInterrupt, StorageError, ConfigError):
        if place.exists():
            say(f"what was read is in {place}: start the same import again to go on from there")
        raise
    _print(imported, url, choice.fill, as_json)


def _scratch(url: str) -> Path:
    """Beside a repository that is a directory, so that both are on one disk; else here."""
    if "://" not in url:
        root = Path(url).absolute()
        return root.parent / f".{root.name}.import"
    return (
        Path.cwd() / f".emberkeep-import-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
    )


def _numbers(texts: list[str] | tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in texts:
        plane, _, number = text.partition("=")
        try:
            found[plane] = float(number)
        except ValueError:
            raise ConfigError(f"--fill takes PLANE=NUMBER, not {text!r}") from None
    return found


def _print(imported: Imported, url: str, fill: Mapping[str, float], as_json: bool) -> None:
    number, step = imported.manifest.version.number, imported.manifest.step
    if as_json:
        print_json(
            {
                "version": number,
                "step": step,
                "rows": dict(imported.rows),
                "new": dict(imported.new),
                "filled": {table: list(planes) for table, planes in imported.filled.items()},
                "passed_over": list(imported.passed_over),
                "formats": list(imported.kinds),
                "created": imported.created,
                "resumed": imported.resumed,
                "already_there": imported.again,
            }
        )
        return
    if imported.again:
        emit(f"version {number} of {url} is this import already: nothing was done")
        return
    for table, count in imported.rows.items():
        new = imported.new.get(table)
        begin = [f"{plane}={fill.get(plane, 0):g}" for plane in imported.filled.get(table, ())]
        emit(
            f"{table}: {count_text(count, 'row')}"
            + (f", {new:,} of them new" if new else "")
            + (f"; rows that came without begin with {', '.join(begin)}" if begin else "")
        )
    if imported.passed_over:
        names = imported.passed_over
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        say(f"passed over, as no table takes it: {', '.join(names[:8])}{more}")
    went_on = ", went on from an earlier start" if imported.resumed else ""
    emit(
        f"version {number} (step {step:,}) of {url}: "
        f"{count_text(sum(imported.rows.values()), 'row')} imported from "
        f"{', '.join(dict.fromkeys(imported.kinds))}{went_on}"
    )
