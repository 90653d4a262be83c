"""`emberkeep versions`: the history of a repository."""

from __future__ import annotations

from dataclasses import asdict

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    kind_text,
    numbers_text,
    open_repository,
    print_json,
    print_table,
    size_text,
)
from emberkeep.cli._shell import command, say
from emberkeep.errors import DamageError


@command
def versions(url: Url, as_json: JsonOption = False) -> None:
    """List the versions of a repository, oldest first."""
    from emberkeep.inspect.summary import list_versions

    repository, _ = open_repository(url)
    found = list_versions(repository)
    if as_json:
        lines = [asdict(line) for line in found]
        for line in lines:
            line["created"] = line["created"] and line["created"].isoformat()
        print_json(lines)
    elif not found:
        say(f"{repository.store.url} has no version yet")
    else:
        print_table(
            ["version", "saved (UTC)", "step", "kind", "stored", "rows", "size", "needs", "tags"],
            [
                (
                    line.number,
                    line.created and f"{line.created:%Y-%m-%d %H:%M:%S}",
                    line.step,
                    "damaged" if line.problem else kind_text(line.kind),
                    line.codec,
                    None if line.rows is None else f"{line.rows:,}",
                    size_text(line.nbytes),
                    numbers_text(line.needs),
                    ", ".join(line.tags),
                )
                for line in found
            ],
            right=("version", "step", "rows", "size"),
        )
    damaged = [line for line in found if line.problem]
    if damaged:
        raise DamageError(damaged[-1].problem or "")
