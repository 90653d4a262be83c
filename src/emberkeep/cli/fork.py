"""`emberkeep fork`: a new repository that begins with a version of another."""

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
    size_text,
)
from emberkeep.cli._shell import command
from emberkeep.cli._work import WritingStore, progress


@command
def fork(
    url: Url,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Where the new repository begins.")],
    version: VersionOption = None,
    exclusive: Annotated[
        bool,
        typer.Option(
            "--exclusive", help="NEW cannot create conditionally; one process alone writes there."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a version, with all that it needs, to a new repository; neither depends on the other."""
    from emberkeep.blobs import open_store
    from emberkeep.inspect.summary import files_of
    from emberkeep.repository import fork as copy

    repository, _ = open_repository(url)
    chosen = choose(repository, version)
    target = WritingStore(open_store(new))
    nbytes = sum(file.size for file in files_of(repository, [chosen]))
    with progress(f"copying version {chosen.number}", nbytes) as target.advance:
        copied = copy(repository, chosen, target, exclusive=exclusive)
    if as_json:
        print_json({"version": chosen.number, "repository": copied.id, "nbytes": nbytes})
    else:
        emit(f"version {chosen.number} copied to {target.url}: {size_text(nbytes)}")
