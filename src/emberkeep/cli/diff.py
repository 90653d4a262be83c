"""`emberkeep diff`: which rows moved between two versions, and how far."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    choose,
    open_repository,
    print_json,
    print_table,
)
from emberkeep.cli._shell import command, say
from emberkeep.cli._work import progress


@command
def diff(
    url: Url,
    before: Annotated[str, typer.Argument(metavar="A", help="The one version, or its tag.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The other version, or its tag.")],
    tables: Annotated[
        list[str] | None, typer.Option("--table", metavar="T", help="Only this table; repeatable.")
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="K", min=0, help="Show the K rows that moved farthest.")
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare the weights of two versions, table by table."""
    from emberkeep.inspect.difference import compare
    from emberkeep.inspect.summary import codec_text, files_of
    from emberkeep.runtime import pool

    repository, store = open_repository(url)
    one, two = choose(repository, before), choose(repository, after)
    total = sum(file.size for version in (one, two) for file in files_of(repository, [version]))
    with progress("comparing", total) as store.advance:
        found = compare(repository, one, two, pool.shared(), tables=tables, top=top)
    stored = [codec_text(repository, repository.manifest(version)) for version in (one, two)]
    if as_json:
        lines = [asdict(line) for line in found]
        print_json({"a": one.number, "b": two.number, "stored": stored, "tables": lines})
        return
    print_table(
        [
            "table",
            f"only in {one.number}",
            f"only in {two.number}",
            "changed",
            "moved (ℓ2)",
            "largest",
            "rows that moved farthest",
        ],
        [
            (
                line.table,
                f"{line.removed:,}",
                f"{line.added:,}",
                f"{line.changed:,}",
                f"{line.l2:.4g}",
                f"{line.largest:.4g}",
                ", ".join(f"{row.id} ({row.distance:.3g})" for row in line.top),
            )
            for line in found
        ],
        right=(
            f"only in {one.number}",
            f"only in {two.number}",
            "changed",
            "moved (ℓ2)",
            "largest",
        ),
    )
    if stored[0] != stored[1] or stored[0] != "exact":
        say(f"stored as: {stored[0]} and {stored[1]}; a part of the movement may be rounding")
