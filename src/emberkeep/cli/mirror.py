"""`emberkeep mirror`: copies the newest version of a repository to another."""

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
def mirror(
    url: Url,
    to: Annotated[str, typer.Argument(metavar="TO", help="Where it is copied to.")],
    version: VersionOption = None,
    most_mb_per_second: Annotated[
        float | None, typer.Option(metavar="MB", help="Copy no faster than this.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Read what is there already, and put back what is damaged.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Copy a version, with what it needs, to another repository; what is there is not copied again,
    but checked, and files that are damaged there are put back.

    A trainer does this itself with checkpoint.mirror. By hand it makes up for a copy that a trainer
    could not make, or brings a version back from a mirror. How often the run was restored goes with
    it, and so do names that the other repository does not have. That is created if it is not there;
    only its writer may add to it, so a trainer that mirrors to it is stopped.
    """
    from emberkeep.blobs import open_store, refuse_nested
    from emberkeep.errors import ConfigError, DamageError
    from emberkeep.repository import Repository, Writer
    from emberkeep.repository.maintenance.repair import first_damage, repair
    from emberkeep.repository.maintenance.run_records import copy_restores, copy_tags
    from emberkeep.repository.maintenance.version_copy import (
        check_copyable,
        copies_in,
        copy_version,
        new_nbytes,
        newest_origin,
        same_run,
    )
    from emberkeep.runtime.bandwidth import Bandwidth

    repository, _ = open_repository(url)
    chosen = choose(repository, version)
    bandwidth = Bandwidth(most_mb_per_second)
    store = WritingStore(open_store(to))
    if store.url == repository.store.url:
        raise ConfigError(f"{to} is the same place: choose another")
    refuse_nested(store.url, repository.store.url)
    manifest = repository.manifest(chosen)
    check_copyable(manifest)
    if Repository.exists(store):
        target = Repository.open(store)
        if not same_run(repository, target):
            raise ConfigError(f"{store.url} holds versions of another run: choose another place")
    else:
        target = Repository.create(
            store, schema=repository.schema, exclusive=repository.exclusive, clock=repository.clock
        )
    nbytes = new_nbytes(repository, chosen, target)
    present = copies_in(repository, chosen, target) if check else ()
    writer, mended, again = Writer.open(target), 0, False
    with progress(f"copying version {chosen.number}", nbytes) as store.advance:
        for copy in present:
            put = repair(target, copy, repository, passing=bandwidth.passing)
            if put is not None:
                mended += put
                continue
            damage = first_damage(repository, chosen)
            if damage is not None:
                raise DamageError(
                    f"version {copy.number} of {store.url} is damaged, and {url} does not have its "
                    f"files intact either: nothing was copied; choose another version ({damage})",
                    name=damage.name,
                )
            # What it needs has lost its manifest there: no file can be put back without one.
            again, nbytes = True, sum(m.nbytes for m in repository.chain(chosen))
            break
        newest = newest_origin(target)
        copied = copy_version(
            repository, chosen, writer, again=again, passing=bandwidth.passing,
            # In the place of a damaged version, and no newer than that was.
            aside=again and newest is not None and newest[1] not in present,
        ).version  # fmt: skip
    copy_restores(repository, target)
    copy_tags(repository, target, epoch=writer.epoch, move=False)
    if as_json:
        print_json(
            {
                "version": chosen.number,
                "copy": copied.number,
                "nbytes": nbytes,
                "repaired_nbytes": mended,
            }
        )
    else:
        emit(
            f"version {chosen.number} is version {copied.number} of {store.url}: "
            f"{size_text(nbytes)} copied{f', {size_text(mended)} repaired' if mended else ''}"
        )
