"""`emberkeep restore`: all of a version as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    VersionOption,
    choose,
    numbers_text,
    open_repository,
)
from emberkeep.cli._shell import command, say
from emberkeep.cli._work import progress
from emberkeep.cli.export import print_exported
from emberkeep.errors import ConfigError, DamageError, StorageError


@command
def restore(
    url: Url,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to put the files.")
    ],
    version: VersionOption = None,
    fall_back: Annotated[
        bool,
        typer.Option(
            "--fall-back", help="Take the newest undamaged version, and say what is lost."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace DIR if a restore has written it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a version, checked, as plain files: tables, dense state and everything else.

    DIR gets version.json, dense.safetensors and tables/<table>.safetensors, with ids and planes.
    To go on training from a version use the library; to start a new repository from it, `fork`.
    """
    from emberkeep.inspect.export import check_local, to_directory
    from emberkeep.inspect.summary import files_of
    from emberkeep.repository import newest_undamaged
    from emberkeep.runtime import pool

    check_local(output)
    repository, store = open_repository(url)
    if fall_back:
        if version is not None:
            raise ConfigError("--fall-back chooses the version: leave out --version")
        chosen, report = newest_undamaged(repository)
        if chosen is None:
            raise DamageError(f"{repository.store.url} has no undamaged version")
        if report.damages:
            lost = numbers_text(v for v in report.versions if v != chosen)
            say(f"version {chosen.number} is the newest undamaged one; lost: {lost}")
    else:
        chosen = choose(repository, version)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{output.parent} cannot be made: {error.strerror}; nothing was written"
        ) from error
    total = sum(file.size for file in files_of(repository, [chosen]))
    with progress(f"restoring version {chosen.number}", total) as store.advance:
        exported = to_directory(repository, chosen, output, pool.shared(), force=force)
    print_exported(exported, output, as_json)
