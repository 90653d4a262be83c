"""The parts of the grid on their own: packed heads, decisions, pictures, the command."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import emberkeep as ek
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import VersionSpec
from emberkeep.cli import app
from emberkeep.errors import ConfigError, DamageError, DeadlineError
from emberkeep.inspect.picture import as_html, as_text, picture
from emberkeep.kernels import first_rows, gather, scatter
from emberkeep.kernels import grid_arrays as kernels
from emberkeep.repository import VersionId
from emberkeep.repository.grid.bundle_reader import runs
from emberkeep.repository.grid.bundles import Unpacked, pack_head, unpack_heads
from emberkeep.repository.grid.extraction import Extracted
from emberkeep.repository.grid.extraction_worker import ExtractionWorker
from emberkeep.repository.policies import Grid, GridCosts, resets
from emberkeep.rows.priority import Priority
from emberkeep.runtime.fields import Fields
from emberkeep.runtime.memory import ScatteredRows, lazy_zeros
from emberkeep.testing.virtual_clock import VirtualClock
from tests.unit.repositories import Run

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True)


@settings(deadline=None, max_examples=60)
@given(groups=st.lists(IDS, min_size=1, max_size=5))
def test_heads_come_back(groups: list[list[int]]) -> None:
    ids = np.array([i for group in groups for i in sorted(group)], np.int64)
    tables = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g) for g in groups])
    head = pack_head(tables, ids)
    count = int(head[:4].view("<u4")[0])
    counts = head[4 : 4 + 8 * count].view("<u4").reshape(-1, 2)[:, 1].astype(np.int64)
    packed, found = np.array(head[4 + 8 * count :]), np.empty(ids.size, np.int64)
    assert kernels.unpack_ids(packed, counts, found) == packed.size
    assert (found == ids).all()
    assert kernels.unpack_ids(packed[:-1], counts, found) == -1


def test_heads_are_unpacked_together_and_each_is_checked() -> None:
    random = np.random.default_rng(0)
    data, named, starts, sizes = b"between", [], [], []
    for rows in (0, 1, 40, 300):
        tables = np.sort(random.integers(0, 5, rows)).astype(np.int32)
        ids = random.integers(0, 1000, rows)
        head = pack_head(tables, ids).tobytes()
        starts.append(len(data))
        sizes.append(len(head))
        named.append((tables, ids))
        data += head + b"between"

    def unpack(starts: list[int], sizes: list[int], rows: list[int]) -> Unpacked:
        flat = np.frombuffer(bytearray(data), np.uint8)
        numbers = (np.array(each, np.int64) for each in (starts, sizes, rows))
        return unpack_heads(flat, *numbers, "head {}".format)

    rows = [ids.size for _, ids in named]
    found = unpack(starts[::-1], sizes[::-1], rows[::-1])
    assert (np.repeat(found.tables_G, found.counts_G)
            == np.concatenate([tables for tables, _ in named[::-1]])).all()  # fmt: skip
    assert (found.ids == np.concatenate([ids for _, ids in named[::-1]])).all()
    assert found.groups_P.sum() == found.counts_G.size
    assert unpack([], [], []).ids.size == 0
    for number in range(4):
        # What no digest can see: a head that is whole and names other rows than its piece has.
        wrong = list(rows)
        wrong[number] += 1
        with pytest.raises(DamageError, match=f"head {number} is damaged"):
            unpack(starts, sizes, wrong)
        wrong = list(sizes)
        wrong[number] = 3
        with pytest.raises(DamageError, match=f"head {number} is damaged"):
            unpack(starts, wrong, rows)


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 12_000_000)), min_size=1, max_size=40
    )
)
def test_pieces_that_stand_close_together_are_read_together(pieces: list[tuple[int, int]]) -> None:
    starts, sizes, end = [], [], 0
    for gap, nbytes in pieces:
        starts.append(end + gap)
        sizes.append(nbytes)
        end = starts[-1] + nbytes
    found = list(runs(starts, sizes))
    assert [at for first, last, _, _ in found for at in range(first, last)] == [*range(len(pieces))]
    for first, last, start, length in found:
        assert start == starts[first]
        assert start + length == starts[last - 1] + sizes[last - 1]
        assert length <= 32 * 2**20 or last == first + 1
        assert all(gap <= 128 * 1024 for gap, _ in pieces[first + 1 : last])
    for (_, end_of, start, _), (_, last, _, _) in pairwise(found):
        far = pieces[end_of][0] > 128 * 1024
        assert far or starts[end_of] + sizes[end_of] - start > 32 * 2**20, last
    assert list(runs([], [])) == []


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**16), pieces=st.integers(1, 5), tables=st.integers(1, 4))
def test_the_first_of_equal_ids_is_kept_and_found(seed: int, pieces: int, tables: int) -> None:
    random = np.random.default_rng(seed)
    limits = random.integers(1, 150, tables)
    groups_P = random.integers(0, 5, pieces)
    tables_G = random.integers(0, tables, groups_P.sum()).astype(np.int32)
    ids_G = [
        np.unique(random.integers(0, limits[table], random.integers(0, 9))) for table in tables_G
    ]
    counts_G = np.array([ids.size for ids in ids_G], np.int64)
    ids = np.concatenate([np.empty(0, np.int64), *ids_G])
    firsts_P = np.cumsum(groups_P) - groups_P
    rows_P = np.array(
        [counts_G[f : f + n].sum() for f, n in zip(firsts_P, groups_P, strict=True)], np.int64
    )
    starts_P = np.cumsum(rows_P) - rows_P
    sizes = (limits + 63) // 64 * 64
    passed_over = random.integers(0, tables + 1)
    bases = np.where(np.arange(tables) == passed_over, -1, np.cumsum(sizes) - sizes)
    bits, kept = np.zeros(sizes.sum() // 64, np.uint64), np.zeros(ids.size, np.bool_)
    kept_G = np.zeros(counts_G.size, np.int64)
    args = tables_G, counts_G, ids, bases, limits
    assert first_rows.claim_fixed(*args, bits, kept, kept_G) == -1
    expected, met = [], set()
    for table, identity in zip(np.repeat(tables_G, counts_G).tolist(), ids.tolist(), strict=True):
        expected.append(table != passed_over and (table, identity) not in met)
        met.add((table, identity))
    assert kept.tolist() == expected
    starts_G = np.cumsum(counts_G) - counts_G
    assert kept_G.tolist() == [
        kept[start : start + count].sum() for start, count in zip(starts_G, counts_G, strict=True)
    ]
    if ids.size and tables_G[counts_G > 0][0] != passed_over:
        low = np.array(limits)
        low[tables_G[counts_G > 0][0]] = 0
        group = int(np.flatnonzero(counts_G)[0])
        assert (
            first_rows.claim_fixed(tables_G, counts_G, ids, bases, low, bits, kept, kept_G) == group
        )

    # Two columns of 3 and 8 bytes; bodies stand in another order, with something between them.
    widths, before = np.array([3, 8]), np.array([0, 3])
    wanted = random.permutation(pieces)[: random.integers(1, pieces + 1)]
    bodies = np.cumsum(11 * rows_P[wanted] + 5) - 11 * rows_P[wanted]
    data = random.integers(0, 256, int((11 * rows_P[wanted] + 5).sum()) + 16).astype(np.uint8)
    counts_T = np.zeros(tables, np.int64)
    gather.count_kept(wanted, groups_P, firsts_P, tables_G, kept_G, counts_T)
    found, starts = np.empty(counts_T.sum(), np.int64), np.empty((2, counts_T.sum()), np.int64)
    gather.locate(
        wanted, bodies, rows_P, starts_P, groups_P, firsts_P, tables_G, counts_G, kept_G, ids,
        kept, before, widths, np.cumsum(counts_T) - counts_T, found, starts,
    )  # fmt: skip
    rows: list[tuple[int, int, bytes, bytes]] = []
    for piece, body in zip(wanted.tolist(), bodies.tolist(), strict=True):
        some = slice(starts_P[piece], starts_P[piece] + rows_P[piece])
        table_R = np.repeat(tables_G, counts_G)[some]
        first = data[body : body + 3 * rows_P[piece]].reshape(-1, 3)
        second = data[body + first.size : body + 11 * rows_P[piece]].reshape(-1, 8)
        rows += [
            (int(table_R[r]), int(ids[some][r]), first[r].tobytes(), second[r].tobytes())
            for r in np.flatnonzero(kept[some])
        ]
    rows.sort(key=lambda row: row[0])
    copies = [np.empty((found.size, width), np.uint8) for width in widths]
    for starts_U, copy in zip(starts, copies, strict=True):
        half = found.size // 2
        gather.copy_rows(0, half, data, starts_U, copy)
        gather.copy_rows(half, found.size, data, starts_U, copy)
    assert found.tolist() == [row[1] for row in rows]
    assert [each.tobytes() for each in copies[0]] == [row[2] for row in rows]
    assert [each.tobytes() for each in copies[1]] == [row[3] for row in rows]


@pytest.mark.parametrize("dim", [1, 8, 16, 24, 48, 128])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_rows_are_scattered_whatever_their_width_and_place(dim: int, offset: int) -> None:
    random = np.random.default_rng(dim)
    memory = lazy_zeros((700 * dim + offset,), np.float32)
    plane = memory[offset : offset + 700 * dim].reshape(700, dim)
    expected = np.array(plane)
    places, rows = random.permutation(700)[:500], random.integers(0, 900, 500)
    values = random.standard_normal((900, dim)).astype(np.float32)
    for start, stop in ((0, 3), (3, 190), (190, 500)):
        scatter.scatter_rows(start, stop, values, rows, places, plane)
    expected[places] = values[rows]
    assert plane.tobytes() == expected.tobytes()
    for start, stop in ((0, 65), (65, 65), (65, 500)):
        scatter.scatter(start, stop, values, places, plane)
    expected[places] = values[:500]
    assert plane.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("in_order", [True, False])
def test_scattered_rows_are_installed_as_rows_in_order(shards: int, in_order: bool) -> None:
    tables = [ek.Table("fixed", rows=5000, dim=8), ek.Table("any", rows=None, capacity=900, dim=8)]
    random = np.random.default_rng(0)
    one, other = (
        ek.local(shards=shards).open(tables, ek.Adam(lr=0.1, step="row"), seed=0) for _ in range(2)
    )
    words = random.standard_normal(30_000).astype(np.float32)
    offsets = [0, 700, 1400]
    ids = np.concatenate([random.choice(5000, 700, replace=False) for _ in tables])
    planes: dict[str, Any] = {
        name: ScatteredRows(words, random.integers(0, words.size - 8, 1400), 8)
        for name in ("weight", "first_moment", "second_moment")
    }
    planes["step"] = ScatteredRows(words.view(np.int32), random.integers(0, words.size, 1400), 1)
    # Also in an order that no slab has.
    names = ["fixed", "any"] if in_order else ["any", "fixed"]
    one.install_scattered(names, offsets, ids, planes)
    for table, start, stop in zip(names, offsets, offsets[1:], strict=False):
        own = {name: np.asarray(value[start:stop]) for name, value in planes.items()}
        other.install(table, ids[start:stop], own)
        found, expected = one.read_all(table), other.read_all(table)
        assert (found[0] == np.sort(ids[start:stop])).all()
        assert (expected[0] == found[0]).all()
        for name in planes:
            assert found[1][name].tobytes() == expected[1][name].tobytes(), name


def test_sums_do_not_depend_on_order_and_see_every_bit() -> None:
    random = np.random.default_rng(0)
    column = random.integers(0, 256, (50, 13)).astype(np.uint8)
    tables, ids = random.integers(0, 3, 50).astype(np.int32), np.arange(50)

    def total(column: Any, tables: Any, ids: Any) -> int:
        sums = np.zeros(ids.size, np.uint64)
        kernels.hash_column(np.ascontiguousarray(column), np.uint64(1), sums)
        return int(kernels.sum_of_rows(tables, ids, sums))

    order = random.permutation(50)
    whole = total(column, tables, ids)
    assert total(column[order], tables[order], ids[order]) == whole
    first, rest = order[:20], order[20:]
    parts = [total(column[some], tables[some], ids[some]) for some in (first, rest)]
    assert sum(parts) % 2**64 == whole
    for byte in (0, 7, 8, 12):
        changed = column.copy()
        changed[17, byte] ^= 1
        assert total(changed, tables, ids) != whole


def costs(**changes: Any) -> GridCosts:
    known = {
        "write_base": 10.0, "write_increment": 1.0, "read_base": 4.0, "read_more": 1.0,
        "grid_nbytes": 300, "base_nbytes": 100,
    }  # fmt: skip
    return GridCosts(**{**known, **changes})


@pytest.mark.parametrize(
    ("rules", "known", "reason"),
    [
        (Grid(), costs(), None),
        (Grid(), costs(read_more=9.1), "faster"),
        (Grid(), costs(read_more=9.0), None),
        (Grid(resets=False), costs(read_more=99.0), None),
        (Grid(restore_budget=timedelta(seconds=4.5)), costs(), "restore_budget"),
        (Grid(restore_budget=timedelta(seconds=6)), costs(), None),
        (Grid(restore_budget=timedelta(seconds=3)), costs(), None),  # no baseline is that fast
        (Grid(storage_budget_nbytes=200), costs(), "storage_budget"),
        (Grid(storage_budget_nbytes=300), costs(), None),
        (Grid(storage_budget_nbytes=99), costs(), None),
    ],
)
def test_when_a_new_baseline_is_taken(rules: Grid, known: GridCosts, reason: str | None) -> None:
    assert resets(rules, known) == reason


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"ratio": 1.5}, "from 0 to 1"),
        ({"most_behind": 0}, "1 or more"),
        ({"behind": "hope"}, "'wait' or 'skip'"),
        ({"restore_budget": "0s"}, "no time|above 0"),
        ({"storage_budget_nbytes": 0}, "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ek.all_versions(**wrong)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ConfigError, match="goes with layout='grid'"):
        VersionSpec(layout="full", grid=Grid())
    with pytest.raises(ConfigError, match="not of one instant"):
        VersionSpec(layout="grid", priority=Priority())
    assert ek.incr_cp is ek.all_versions


def test_the_grid_is_drawn(tmp_path: Path) -> None:
    run = Run(store=LocalStore(tmp_path / "run"), layout="grid")
    for _ in range(8):
        run.save()
    run.keeper.settle()
    drawn = picture(run.repository, run.repository.version(4))
    assert drawn is not None
    assert drawn.covered == drawn.newest == 8
    assert all(cell.read == (cell.birth <= 4 and not 0 < cell.death <= 4) for cell in drawn.cells)
    assert "alive" in as_text(drawn, 80)
    assert as_html(drawn, "<run>").count("<title>lives") == len(drawn.cells)
    shell = CliRunner()
    page = tmp_path / "grid.html"
    shown = shell.invoke(
        app, ["show", str(tmp_path / "run"), "--grid", "--version", "4", "--html", str(page)]
    )
    assert shown.exit_code == 0, shown.output
    assert "version 4 reads" in shown.output
    assert "&lt;" not in page.read_text() or page.stat().st_size > 500
    plain = Run(store=LocalStore(tmp_path / "plain"), layout="full")
    plain.save()
    assert shell.invoke(app, ["show", str(tmp_path / "plain"), "--grid"]).exit_code != 0
    assert shell.invoke(app, ["show", str(tmp_path / "run"), "--html", "x.html"]).exit_code != 0


class SlowExtractor:
    """Takes versions in when it is let, and remembers what it was asked for."""

    asked: ClassVar[list[tuple[int, bool]]] = []
    go = threading.Semaphore(0)

    def __init__(self, writer: Any, grid: Any, *_: Any) -> None:
        self.grid = grid

    def settle(self, newest: Any, *, split: bool) -> Extracted:
        assert self.go.acquire(timeout=60)
        self.asked.append((newest.version.number, split))
        return Extracted(covered=newest.version.number, generation=1, skipped=not split)


WRITER: Any = SimpleNamespace(repository=SimpleNamespace(clock=VirtualClock()))


@pytest.mark.parametrize("behind", ["skip", "wait"])
def test_extraction_that_is_too_far_behind(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.repository.grid.extraction_worker.Extractor", SlowExtractor)
    monkeypatch.setattr(SlowExtractor, "asked", [])
    events: list[str] = []
    collected: list[int] = []
    rules = Grid(most_behind=2, behind=behind)
    rounds = ExtractionWorker(
        WRITER, rules, lambda name, _: events.append(name), lambda: collected.append(1),
        nice=0,
    )  # fmt: skip

    def arrive(number: int) -> None:
        layout = Fields("a", {"grid": str(VersionId(1, 1))})
        manifest: Any = SimpleNamespace(version=VersionId(number, 1), described=layout)
        rounds.arrived(manifest)

    for number in range(1, 6):
        arrive(number)
    saving = threading.Thread(target=rounds.make_room)
    saving.start()
    if behind == "skip":
        saving.join()  # nobody waits, although nothing has been taken in
    SlowExtractor.go.release(10)
    rounds.join()
    saving.join()
    newest = [number for number, _ in SlowExtractor.asked]
    assert newest == sorted(newest)
    assert newest[-1] == 5
    # Whatever was passed over was split by the round after it.
    assert SlowExtractor.asked[-1][1]
    assert len(collected) == len(SlowExtractor.asked) == events.count("extracted")
    if behind == "skip":
        assert "extraction_behind" not in events
        splits = [split for _, split in SlowExtractor.asked]
        assert False not in [a or b for a, b in pairwise(splits)]
    else:
        assert all(split for _, split in SlowExtractor.asked)
    while SlowExtractor.go.acquire(blocking=False):
        pass


def test_nobody_waits_for_ever_for_a_round_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.repository.grid.extraction_worker.Extractor", SlowExtractor)
    clock = VirtualClock(pace=1e6)
    writer: Any = SimpleNamespace(repository=SimpleNamespace(clock=clock))
    rounds = ExtractionWorker(
        writer, Grid(most_behind=1, behind="wait"), lambda *_: None, lambda: None, nice=0
    )
    for number in (1, 2):
        layout = Fields("a", {"grid": str(VersionId(1, 1))})
        manifest: Any = SimpleNamespace(version=VersionId(number, 1), described=layout)
        rounds.arrived(manifest)
    with pytest.raises(DeadlineError, match="extraction, which is 2 versions behind"):
        rounds.make_room()
    assert clock.monotonic() >= 3600
    SlowExtractor.go.release(2)
    rounds._worker.close()  # which ends after the rounds: they go on as if nobody had waited
    assert not rounds._busy
    while SlowExtractor.go.acquire(blocking=False):
        pass


def test_what_will_be_moved_is_no_reason_for_a_baseline() -> None:
    rounds: Any = ExtractionWorker(WRITER, Grid(ratio=0.2), lambda *_: None, lambda: None, nice=0)
    grid = VersionId(1, 1)
    rounds._extractor = SimpleNamespace(
        grid=grid, catalog=object(), stored_nbytes=900, living=(500, 100), read_seconds=1.0,
        read_nbytes=100,
    )  # fmt: skip
    costs = rounds.costs(grid, 0.01, 10)
    assert costs.read_base == pytest.approx(1.0)
    assert costs.read_more == pytest.approx(0.25)
