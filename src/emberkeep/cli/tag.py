"""`emberkeep tag` and `untag`: names for versions, which are then kept."""

from __future__ import annotations

from typing import Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    VersionOption,
    choose,
    emit,
    open_repository,
    print_json,
)
from emberkeep.cli._shell import command
from emberkeep.errors import MissingObjectError, NoVersionError

Name = Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '_', '-' and dots.")]


@command
def tag(
    url: Url,
    name: Name,
    version: VersionOption = None,
    move: Annotated[
        bool, typer.Option("--move", help="Take the name from the version that has it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Name a version. Named versions are kept until they are untagged."""
    repository, _ = open_repository(url)
    chosen = choose(repository, version)
    repository.tag(name, chosen, move=move)
    if as_json:
        print_json({"tag": name, "version": chosen.number})
    else:
        emit(f"{name} names version {chosen.number}")


@command
def untag(url: Url, name: Name, as_json: JsonOption = False) -> None:
    """Take a name away; retention may then remove the version."""
    from emberkeep.repository.names import tag_name

    repository, _ = open_repository(url)
    try:
        repository.store.size(tag_name(name))
    except MissingObjectError:
        tags = repository.tags()
        have = f"there are {', '.join(sorted(tags))}" if tags else "there are none"
        raise NoVersionError(f"{repository.store.url} has no tag {name!r}: {have}") from None
    repository.untag(name)
    if as_json:
        print_json({"tag": name, "version": None})
    else:
        emit(f"{name} names no version any more")
