"""Pages need nothing beside them, say what they were given, and are the same bytes every time."""

from __future__ import annotations

import csv
import json
import re
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

from emberkeep.checkpoint import Job
from emberkeep.checkpoint.overheads import Overhead
from emberkeep.errors import ConfigError, StorageError
from emberkeep.planning.emulator import (
    STRATEGIES,
    Emulated,
    Emulation,
    Outcome,
    projected,
    small_task,
    tactics,
)
from emberkeep.planning.sweeps import Point, lines
from emberkeep.report import emulation_page as pages
from emberkeep.report.page import Page, prepare, strict, write
from emberkeep.report.plots import drawing, stacked_bars

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
JOB = Job(
    duration=56 * HOUR,
    mtbf=28 * HOUR,
    shards=8,
    save=5.7 * MINUTE,
    load=2.5 * MINUTE,
    reschedule=2.5 * MINUTE,
)
ALONE = Outcome(strategy="none", auc=0.76, log_loss=0.47, steps=500)


def outcome(name: str, **changes: object) -> Outcome:
    spent = projected(JOB, steps=500, saves=3.0, failures=2, steps_again=20 * (name == "full"))
    first = Outcome(
        strategy=name, auc=0.7595, log_loss=0.47, steps=500, pls=0.08, overhead=spent,
        interval=2 * HOUR,
    )  # fmt: skip
    return replace(first, **changes)  # type: ignore[arg-type]


def points() -> list[Point]:
    return [
        Point(
            target_pls=0.1 * run, failures=run, fraction=0.125, seed=0, auc_loss=0.01 * run * slope,
            outcome=outcome(name, pls=0.1 * run, started_over=run == 3), full_overhead=0.08,
            refused=run == 4,
        )
        for name, slope in (("cpr", 1.0), ("cpr_ssu", 0.5))
        for run in (1, 2, 3, 4)
    ]  # fmt: skip


def every_page() -> dict[str, Page]:
    found = Emulated(
        spec=Emulation(settings=small_task(), job=JOB),
        alone=ALONE,
        outcomes={name: outcome(name) for name in STRATEGIES},
    )
    return {
        "emulation": pages.emulation_page(found),
        "targets": pages.targets_page(points(), ALONE),
        "failures": pages.failures_page(points()),
        "losses": pages.losses_page(points(), lines(points())),
    }


@pytest.mark.long
def test_pages_are_whole_and_need_nothing_else() -> None:
    again = every_page()
    for name, page in every_page().items():
        text = page.html()
        assert text == again[name].html()
        assert text.count("<svg") == 1
        assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", text)
        # Every plot is well-formed, has no size of its own, and takes its ink from the page.
        (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
        root = ElementTree.fromstring(svg)
        assert "viewBox" in root.attrib
        assert "width" not in root.attrib
        assert "currentColor" in svg
        assert "var(--grid)" in svg
    assert "lost computation" in again["emulation"].html()
    assert "refused: does not pay" in again["failures"].html()


def test_what_a_user_types_is_text_not_markup() -> None:
    page = Page(title="<b>", summary="a & b")
    page.text("<i>")
    page.table(["<u>"], [["</td><script>"]])
    text = page.html()
    for tag in ("<b>", "<i>", "<u>", "<script>"):
        assert tag not in text
    assert "a &amp; b" in text


def test_data_lies_beside_the_page(tmp_path: Path) -> None:
    document = {"a": [1.5, float("nan")], "b": {"c": float("inf")}}
    path = write(
        tmp_path / "new" / "x.html", Page(title="t"), document, [{"a": 1}, {"a": 2, "b": 3}]
    )
    assert path == tmp_path / "new" / "x.html"
    assert json.loads(path.with_suffix(".json").read_text()) == {"a": [1.5, None], "b": {"c": None}}
    with path.with_suffix(".csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]
    assert write(tmp_path / "dir", Page(title="t"), {}) == tmp_path / "dir" / "report.html"
    with pytest.raises(StorageError, match="cannot be written"):
        write(path / "y.html", Page(title="t"), {})


def test_strict() -> None:
    assert strict({"x": (1, float("-inf")), "y": "s"}) == {"x": [1, None], "y": "s"}


def test_bars_of_nothing() -> None:
    with drawing() as (plot, (axes,)):
        stacked_bars(axes, ["a"], [{}])
    assert plot.svg().startswith("<svg")


def test_lines() -> None:
    found = lines(points())
    assert found["cpr"].slope == pytest.approx(0.1)
    assert found["cpr_ssu"].slope == pytest.approx(0.05)
    assert found["cpr"].correlation == pytest.approx(1.0)
    assert found["cpr"].runs == 4
    late = replace(points()[2], auc_loss=1.0)
    bent = lines([*points()[:2], late, points()[3]])["cpr"]
    assert bent.correlation < 0.7
    assert bent.correlation_saved == pytest.approx(1.0)
    assert bent.slope > bent.slope_saved == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "partial", "priority", "every"),
    [
        ("full", False, None, 20),
        ("partial", True, None, 20),
        ("cpr", True, None, 400),
        ("cpr_mfu", True, "mfu", 400),
        ("cpr_ssu", True, "ssu", 400),
        ("cpr_scar", True, "scar", 400),
    ],
)
def test_tactics(name: str, partial: bool, priority: str | None, every: int) -> None:
    found = tactics(name, JOB, steps=500)  # type: ignore[arg-type]
    assert (found.partial, found.priority, found.every) == (partial, priority, every)


def test_tactics_that_do_not_pay_are_full_recovery() -> None:
    often = replace(JOB, mtbf=1.4 * HOUR, failing_together=4)
    assert not tactics("cpr_ssu", often, steps=500, pls=0.02).partial
    assert "recovered fully" in tactics("cpr_ssu", often, steps=500, pls=0.02).note
    assert tactics("cpr_ssu", often, steps=500, pls=0.02, force=True).partial
    assert tactics("partial", often, steps=500, pls=0.02).partial
    assert not tactics("cpr", JOB, steps=500, pls=0.0, force=True).partial


def test_time_is_projected() -> None:
    spent = projected(JOB, steps=560, saves=24, failures=2, steps_again=23)
    assert spent.save == pytest.approx(24 * 5.7 / 60 / 56)
    assert spent.load == spent.reschedule == pytest.approx(2 * 2.5 / 60 / 56)
    assert spent.lost == pytest.approx(23 / 560)


@pytest.mark.parametrize("gap", [0.0, 0.00002, 0.0001, 0.0003, 0.0006, 0.001])
@pytest.mark.long
def test_auc_labels_do_not_lie_on_the_line_or_on_each_other(gap: float) -> None:
    """The line is the run without failures; some strategies come close to it, one is far below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    aucs = [ALONE.auc, ALONE.auc - gap, ALONE.auc - 0.0015, ALONE.auc - gap / 2, ALONE.auc + gap]
    named = dict(zip(STRATEGIES, aucs, strict=False))
    spec = Emulation(settings=small_task(), job=JOB)
    outcomes = {name: outcome(name, auc=auc) for name, auc in named.items()}
    plot = pages.strategies_plot(Emulated(spec=spec, alone=ALONE, outcomes=outcomes))
    renderer = FigureCanvasAgg(plot.figure).get_renderer()
    plot.figure.draw(renderer)
    axes = plot.figure.axes[1]
    line = axes.transData.transform((0, ALONE.auc))[1]
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 5
    for box in boxes:
        assert not box.y0 < line < box.y1, (gap, box, line)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("together", "words"), [(1, "is lost."), (2, " and "), (3, "are lost.")])
def test_lost_shards_in_plain_english(together: int, words: str) -> None:
    spec = Emulation(settings=small_task(), job=replace(JOB, failing_together=together))
    found = Emulated(spec=spec, alone=ALONE, outcomes={"full": outcome("full")})
    page = pages.emulation_page(found).html()
    lost = re.findall(r"<p>(After [^<]*)</p>", page)
    assert len(lost) == 2
    for text in lost:
        assert words in text
        assert re.search(r": shard \d is lost|: shards \d(, \d)? and \d are lost", text)


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    """An emulation of an hour ended with "cannot be written"."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        prepare(tmp_path / "file" / "plan.html")
    prepare(tmp_path / "new" / "plan.html")
    assert not (tmp_path / "new" / "plan.html").exists()
    (tmp_path / "plan.html").write_text("before")
    prepare(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == "before"


@pytest.mark.parametrize("name", ["trace.csv", "trace.json"])
def test_what_a_plan_reads_is_not_written_over(tmp_path: Path, name: str) -> None:
    """`plan --failures trace.csv --page trace.html` replaced the log by its own table."""
    log = tmp_path / name
    log.write_text("hours\n1\n")
    with pytest.raises(ConfigError, match=rf"{name} beside it, which would replace"):
        prepare(tmp_path / "trace.html", reads=(None, log))
    prepare(tmp_path / "other.html", reads=(None, log, tmp_path / "absent"))
    assert log.read_text() == "hours\n1\n"


def test_sweeps_in_which_nothing_happened() -> None:
    idle = replace(outcome("cpr"), overhead=Overhead(), pls=0.0)
    point = Point(target_pls=0.1, failures=0, fraction=0.1, seed=0, outcome=idle, auc_loss=0.0,
                  full_overhead=0.0)  # fmt: skip
    assert pages.failures_table([point])[1][0][4] == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for page in (pages.failures_page([point]), pages.targets_page([point], ALONE)):
            assert "<svg" in page.html()


def test_every_strategy_has_a_marker() -> None:
    drawn = [replace(points()[0], outcome=outcome(name)) for name in STRATEGIES]
    assert "<svg" in pages.losses_page(drawn, lines(drawn)).html()


def test_ranks_of_equal_values_are_shared() -> None:
    pls, losses = [0.0, 0.0, 0.0, 0.0, 0.1, 0.2], [3.0, 2.0, 1.0, 0.0, 5.0, 4.0]
    drawn = [
        replace(points()[0], outcome=outcome("cpr", pls=p), auc_loss=loss)
        for p, loss in zip(pls, losses, strict=True)
    ]
    for order in (drawn, drawn[::-1]):
        assert lines(order)["cpr"].rank_correlation == pytest.approx(0.77754, abs=1e-5)
