"""`emberkeep verify`: proof that what is stored is what was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    choose,
    count_text,
    emit,
    numbers_text,
    open_repository,
    print_json,
    print_table,
    size_text,
)
from emberkeep.cli._shell import command
from emberkeep.cli._work import progress
from emberkeep.errors import DamageError

if TYPE_CHECKING:
    from emberkeep.repository import Damage


@command
def verify(
    url: Url,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="N|TAG", help="A version or a tag; all by default."),
    ] = None,
    shallow: Annotated[
        bool, typer.Option("--shallow", help="Check that files are there and as long as they were.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every file of all versions, or of one: present, unchanged, and usable.

    Names what is damaged or missing, and which versions it concerns.
    """
    from emberkeep.inspect.summary import check, files_of
    from emberkeep.runtime import pool

    repository, store = open_repository(url)
    chosen = None if version is None else (choose(repository, version),)
    listed = repository.versions() if chosen is None else chosen
    total = 0 if shallow else sum(file.size for file in files_of(repository, listed))
    with progress("verifying", total) as store.advance:
        report = check(repository, chosen, deep=not shallow, pool=pool.shared())
    if as_json:
        print_json(
            {
                "ok": report.ok,
                "versions": [v.number for v in report.versions],
                "undamaged": [v.number for v in report.undamaged],
                "files": report.files,
                "nbytes": report.nbytes,
                "damages": [
                    {
                        "name": damage.name,
                        "problem": damage.problem,
                        "versions": [v.number for v in damage.versions],
                    }
                    for damage in report.damages
                ],
                "unreferenced": list(report.unreferenced),
            }
        )
    else:
        checked = (
            f"{count_text(len(report.versions), 'version')}, {count_text(report.files, 'file')}, "
            f"{size_text(report.nbytes)}"
        )
        if report.ok:
            what = "all there" if shallow else "every byte is as it was saved"
            emit(f"{checked}: {what}")
        else:
            print_table(
                ["damaged", "problem", "versions"],
                [(d.name, _in_short(d), numbers_text(d.versions)) for d in report.damages],
            )
        # Of one version alone, nothing is known of what the others list.
        if report.unreferenced and version is None:
            files = count_text(len(report.unreferenced), "file")
            emit(f"{files} of no version (a save in progress, or a manifest that was deleted)")
    if not report.ok:
        whole = numbers_text(report.undamaged) or "none"
        raise DamageError(
            f"{count_text(len(report.damages), 'object')} damaged or missing; undamaged versions: "
            f"{whole}; copy the files back from a backup, or restore an undamaged version"
        )


def _in_short(damage: Damage) -> str:
    """The problem without the name, which stands beside it, and without a remedy."""
    return damage.problem.removeprefix(f"{damage.name} is ").partition(";")[0]
