"""`emberkeep gc`: removes versions that need not be kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    count_text,
    emit,
    numbers_text,
    open_repository,
    print_json,
    print_table,
    refuse_if_active,
    size_text,
)
from emberkeep.cli._shell import command
from emberkeep.errors import ConfigError


@command
def gc(
    url: Url,
    keep_last: Annotated[int, typer.Option(metavar="N", help="Keep the newest N versions.")] = 3,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="M", help="Also keep every version whose number M divides."),
    ] = None,
    keep_for: Annotated[
        str | None, typer.Option(metavar="AGE", help="Also keep versions younger than this: 14d.")
    ] = None,
    drop_after: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Keep none that is older, but the newest and tagged ones."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="MINUTES", min=0, help="Spare what is younger than this.")
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Fence a trainer that may still be running.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old versions, and files that no version needs.

    Tagged and pinned versions stay, those younger than --grace, and whatever a kept version needs;
    it says why each of them stays. Only the writer of a repository may remove anything, so this
    takes over from a trainer that is still running: it will stop at its next save. Trainers run gc
    themselves, after every save.
    """
    from emberkeep.blobs.wrapper import spending_reserve
    from emberkeep.inspect.summary import plan_collection
    from emberkeep.repository import Collector, KeepEvery, KeepLast, KeepNamed, Writer
    from emberkeep.strategies import retention

    try:
        spared = timedelta(minutes=grace)
    except OverflowError:
        raise ConfigError(f"--grace {grace:g} is too long: give minutes, such as 10") from None
    last = KeepLast(n=keep_last)
    wanted = keep_last if keep_every is None else last | KeepEvery(m=keep_every) | KeepNamed()
    policy = retention(wanted, keep_for=keep_for, drop_after=drop_after)
    repository, _ = open_repository(url)
    if dry_run:
        collected = plan_collection(repository, policy, grace=spared)
    else:
        if not yes:
            refuse_if_active(repository, "gc", remedy="or --dry-run to look")
        with spending_reserve(repository.store):
            collected = Collector(Writer.open(repository), policy=policy, grace=spared).collect()
    kept, removed, nbytes = collected.kept, collected.removed, collected.nbytes
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "kept": [v.number for v in kept],
                "reasons": {str(v.number): list(collected.reasons[v]) for v in kept},
                "removed": [v.number for v in removed],
                "nbytes": nbytes,
            }
        )
        return
    verb = "would remove" if dry_run else "removed"
    gone = f"{count_text(len(removed), 'version')} ({numbers_text(removed)})" if removed else (
        "no version"
    )  # fmt: skip
    emit(f"{verb} {gone}, {size_text(nbytes)}; kept: {numbers_text(kept) or 'none'}")
    print_table(
        ["kept", "because"],
        [(v.number, "; ".join(collected.reasons[v])) for v in kept],
        right=["kept"],
    )
