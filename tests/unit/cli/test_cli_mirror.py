"""`emberkeep mirror` where the other repository has lost more than bytes of files."""

from __future__ import annotations

from pathlib import Path

import pytest

import emberkeep as ek
from emberkeep.blobs import LocalStore
from emberkeep.errors import DamageError
from emberkeep.repository import Repository
from emberkeep.repository.maintenance.repair import is_intact
from emberkeep.repository.maintenance.version_copy import newest_origin
from tests.integration.test_cli_repository import Shell, shell
from tests.unit.keeper.test_mirror import Life

__all__ = ["shell"]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A baseline and two increments on it, in two places."""
    run, copies = tmp_path / "run", tmp_path / "copies"
    strategy = ek.incremental(every=2, layout="one_shot", keep=5)
    life = Life(run, str(copies), strategy=strategy)
    life.train(2).settle().train(4).settle().train(6).keeper.close()
    baseline = Repository.open(LocalStore(copies)).versions()[0]
    (copies / baseline.manifest_name).write_bytes(b"damage")
    return run, copies


def test_a_baseline_whose_manifest_is_damaged_is_copied_again(
    shell: Shell, places: tuple[Path, Path]
) -> None:
    run, copies = places
    found = shell.json("mirror", run, copies)
    repository = Repository.open(LocalStore(copies))
    assert found["nbytes"] == sum(m.nbytes for m in repository.chain(found["copy"]))
    assert is_intact(repository, repository.versions()[-1])
    assert shell.json("mirror", run, copies)["nbytes"] == 0
    strategy = ek.incremental(every=2, layout="one_shot", keep=5)
    assert Life(copies.parent / "new", str(copies), strategy=strategy).resumed.step == 6  # type: ignore[union-attr]


def test_what_takes_the_place_of_a_damaged_version_is_no_newer_than_that_was(
    shell: Shell, places: tuple[Path, Path]
) -> None:
    run, copies = places
    repository = Repository.open(LocalStore(copies))
    for arguments in (("--version", 2), ()):
        copy = shell.json("mirror", run, copies, *arguments)["copy"]
        assert is_intact(repository, repository.version(copy))
        newest = newest_origin(repository)
        assert newest is not None
        assert repository.manifest(newest[1]).step == 6


def test_what_is_damaged_in_both_places_is_named(shell: Shell, places: tuple[Path, Path]) -> None:
    run, copies = places
    file = Repository.open(LocalStore(run)).manifest(1).files[0]
    (run / file.name).write_bytes(b"damage")
    assert shell("mirror", run, copies) == DamageError.exit_code
    assert "does not have its files intact either" in shell.err
    assert file.name in shell.err
