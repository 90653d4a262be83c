"""Files of a server's tier under a model with other tables: refused as they are, never taken for
damaged because one of them is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import StateError
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.repository import Manifest
from emberkeep.tables import Table, Tier
from emberkeep.tiers import durable_open
from tests.faults.test_tier_servers_damage import damage
from tests.integration.test_tiered_keeper import OFTEN, SHARDS, TABLES, OnServers, Run, plain
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
MORE = [*TABLES, Table("d", rows=20, dim=5)]
WITHOUT = TABLES[:2]
WIDER = [*TABLES[:2], Table("c", rows=20, dim=5)]


@pytest.fixture
def launcher(farm: Farm, tmp_path: Path) -> Iterator[FarmLauncher]:
    """Servers on whose files a run has version 6 and batch 8."""
    started = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    run = Run(OnServers(started), tmp_path / "r", OFTEN)
    run.keeper.resume()
    run.train(9).end()
    yield started
    started.end()


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((root / "t").rglob("*.tier"))}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (MORE, r"its 3 tables are without 'd', this model's 4 are with 'd'"),
        (WITHOUT, r"its 3 tables are with 'c', this model's 2 are without 'c'"),
    ],
    ids=["one more table of another dim", "one fewer"],
)
def test_a_model_of_other_tables_is_refused(
    launcher: FarmLauncher, tmp_path: Path, tables: Sequence[Table], said: str
) -> None:
    before = files(tmp_path)
    with pytest.raises(StateError, match=rf"rows-\d-0.tier belongs to another model: {said}"):
        Run(OnServers(launcher), tmp_path / "r", OFTEN, tables=tables)
    assert files(tmp_path) == before
    again = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()


def test_so_it_is_where_another_file_says_so(launcher: FarmLauncher, tmp_path: Path) -> None:
    """The first one fits the model, and is not written before the others are looked at."""
    before = files(tmp_path)
    with pytest.raises(StateError, match=r"rows-.-1.tier belongs to another model: its planes"):
        Run(OnServers(launcher), tmp_path / "r", OFTEN, tables=WIDER)
    assert files(tmp_path) == before


def test_so_it_is_where_a_head_cannot_be_read(launcher: FarmLauncher, tmp_path: Path) -> None:
    for path in (tmp_path / "t").rglob("rows-*-0.tier"):
        with path.open("r+b") as file:
            file.write(b"\0" * durable_open.START)
    before = files(tmp_path)
    with pytest.raises(StateError, match=r"rows-.-1.tier belongs to another model: .* with 'd'"):
        Run(OnServers(launcher), tmp_path / "r", OFTEN, tables=MORE)
    assert files(tmp_path) == before


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_file_of_this_model_comes_from_the_repository(
    launcher: FarmLauncher, tmp_path: Path, what: str
) -> None:
    if what == "missing":
        (tmp_path / "t" / "shard-1" / "rows-1-1.tier").unlink()
    else:
        damage(tmp_path / "t" / "shard-1")
    again = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    kept = again.keeper.resume()
    assert isinstance(kept, Manifest)
    assert again.bits() == plain(6)
    assert (tmp_path / "t" / "shard-1" / "damaged" / "rows-1-0.tier").exists()
    again.end()


def test_disks_in_each_others_places_are_refused(launcher: FarmLauncher, tmp_path: Path) -> None:
    """Each shard's files would be missing where it looks for them, and are not lost."""
    first, second, aside = (tmp_path / "t" / name for name in ("shard-0", "shard-1", "aside"))

    def swap() -> None:
        for shard in range(SHARDS):
            launcher.kill(shard)
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    def swapped() -> list[dict[str, bytes]]:
        return [{path.name: path.read_bytes() for path in at.iterdir()} for at in (first, second)]

    swap()
    before = swapped()
    said = r"shard-(\d)/rows-(?!\1)\d-0.tier belongs to shard \d, .* mount every disk"
    with pytest.raises(StateError, match=f"(?i){said}"):
        Run(OnServers(launcher), tmp_path / "r", OFTEN)
    assert swapped() == before
    swap()
    again = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()


def test_nothing_is_created_where_the_repository_of_the_files_was(
    launcher: FarmLauncher, tmp_path: Path
) -> None:
    """A disk that is not mounted, say."""
    (tmp_path / "r").rename(tmp_path / "away")
    with pytest.raises(StateError, match=r"files of another run than .*/r: .* no repository is"):
        Run(OnServers(launcher), tmp_path / "r", OFTEN)
    assert not (tmp_path / "r" / "repository.json").exists()
    (tmp_path / "away").rename(tmp_path / "r")
    again = Run(OnServers(launcher), tmp_path / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    again.end()


@pytest.mark.parametrize("tables", [MORE, WITHOUT], ids=["one more", "one fewer"])
def test_in_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Sequence[Table]
) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    tier = Tier(tmp_path / "t", memory=60_000)

    def start(tables: Sequence[Table]) -> Run:
        own = [replace(table, tier=tier) for table in tables]
        return Run(local(shards=SHARDS), tmp_path / "r", OFTEN, tables=own)

    first = start(TABLES)
    first.keeper.resume()
    first.train(2).end()
    before = files(tmp_path)
    with pytest.raises(StateError, match="belongs to another model: its 3 tables"):
        start(tables)
    assert files(tmp_path) == before
    again = start(TABLES)
    assert again.keeper.resume() == DurableStep(2)
    again.end()
