"""`emberkeep tag` and `untag`: names for versions, which are then kept."""

from __future__ import annotations

from typing import Annotated

import typer

from emberkeep.cli._repository import Url, VersionOption, choose, emit, open_repository
from emberkeep.cli._shell import command
from emberkeep.errors import ConfigError, MissingObjectError

Name = Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '_', '-' and dots.")]


@command
def tag(url: Url, name: Name, version: VersionOption = None) -> None:
    """Name a version. Named versions are kept until they are untagged."""
    if name.isdigit():
        raise ConfigError(f"{name} would be taken for a version's number: begin with a letter")
    repository, _ = open_repository(url)
    chosen = choose(repository, version)
    repository.tag(name, chosen)
    emit(f"{name} names version {chosen.number}")


@command
def untag(url: Url, name: Name) -> None:
    """Take a name away; retention may then remove the version."""
    from emberkeep.repository.names import tag_name

    repository, _ = open_repository(url)
    try:
        repository.store.size(tag_name(name))
    except MissingObjectError:
        tags = repository.tags()
        have = f"there are {', '.join(sorted(tags))}" if tags else "there are none"
        raise ConfigError(f"{repository.store.url} has no tag {name!r}: {have}") from None
    repository.untag(name)
    emit(f"{name} names no version any more")
