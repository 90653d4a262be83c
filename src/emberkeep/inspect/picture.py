"""A grid as a picture: columns are births, rows are deaths, area is bytes.

For a terminal as lines of text, for a browser as one page that needs nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape

from emberkeep._types import Json
from emberkeep.repository import Repository, VersionId
from emberkeep.repository.grid.catalog import GridPlan, bundles_of, plan, uncovered

_SHADES = " .:-=+*#%@"
# Pixels: of a place at least and at most, of all places where there are few, of a label.
_SMALLEST, _LARGEST, _WIDTH, _LABEL = 14, 40, 900, 26
_LEFT, _TOP = 64, 30
_MOST_LABELS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The pieces of one birth and one death; `death` 0 says that they live on."""

    birth: int
    death: int
    nbytes: int
    rows: int
    read: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A grid as its newest catalog has it, seen from one version."""

    version: int
    grid: int
    generation: int
    covered: int
    newest: int
    cells: tuple[Cell, ...]
    files: int
    read_files: int
    read_nbytes: int
    stored_nbytes: int
    unused_nbytes: int

    def to_json(self) -> Json:
        return {
            "version": self.version,
            "grid": self.grid,
            "generation": self.generation,
            "covered": self.covered,
            "behind": self.newest - self.covered,
            "files": self.files,
            "stored_nbytes": self.stored_nbytes,
            "unused_nbytes": self.unused_nbytes,
            "read": {"files": self.read_files, "nbytes": self.read_nbytes},
            "pieces": [
                {
                    "birth": cell.birth,
                    "death": cell.death or None,
                    "rows": cell.rows,
                    "nbytes": cell.nbytes,
                    "read": cell.read,
                }
                for cell in self.cells
            ],
        }


def picture(repository: Repository, version: VersionId) -> Picture | None:
    """The grid that a version belongs to; None if it belongs to none."""
    manifest = repository.manifest(version)
    planned = plan(repository, manifest)
    if planned is None:
        return None
    later = uncovered(repository, manifest, planned.catalog.covered)
    bundles = [*planned.catalog.bundles, *(b for each in later for b in bundles_of(each))]
    nbytes: dict[tuple[int, int], int] = defaultdict(int)
    rows: dict[tuple[int, int], int] = defaultdict(int)
    for bundle in bundles:
        for piece in bundle.pieces:
            at = piece.birth, piece.death or 0
            nbytes[at] += piece.nbytes + piece.head_nbytes
            rows[at] += piece.rows
    number = version.number
    cells = tuple(
        Cell(
            birth=birth,
            death=death,
            nbytes=nbytes[birth, death],
            rows=rows[birth, death],
            read=birth <= number and (not death or number < death),
        )
        for birth, death in sorted(nbytes)
    )
    stored = sum(bundle.file.size for bundle in bundles)
    return Picture(
        version=number,
        grid=planned.catalog.grid.number,
        generation=planned.catalog.generation,
        covered=planned.catalog.covered,
        newest=_newest(repository, planned),
        cells=cells,
        files=len(bundles),
        read_files=len(planned.bundles),
        read_nbytes=planned.nbytes,
        stored_nbytes=stored,
        unused_nbytes=stored - sum(nbytes.values()),
    )


def _newest(repository: Repository, planned: GridPlan) -> int:
    """The newest version of the grid: it may be ahead of the catalog."""
    newest = max(planned.catalog.covered, planned.manifest.version.number)
    for version in repository.versions():
        if version.number > newest:
            text = repository.manifest(version).layout.get("grid")
            if text != str(planned.catalog.grid):
                break
            newest = version.number
    return newest


def as_text(drawn: Picture, width: int, height: int = 24) -> str:
    """Births from left to right, deaths downwards, what lives on in the first line.

    What the version reads is shown as digits, what it does not as dots to hashes: the higher or
    darker, the more bytes.
    """
    births = _bins([cell.birth for cell in drawn.cells], max(8, width - 12))
    deaths = _bins([cell.death for cell in drawn.cells if cell.death], height)
    amounts: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for cell in drawn.cells:
        row = 0 if not cell.death else 1 + deaths[cell.death]
        amounts[row, births[cell.birth]][int(cell.read)] += cell.nbytes
    most = max((sum(both) for both in amounts.values()), default=1) or 1
    columns = max(births.values(), default=0) + 1
    labels = ["alive", *([""] * (max(deaths.values(), default=-1) + 1))]
    for death, row in deaths.items():
        labels[row + 1] = labels[row + 1] or f"† {death}"
    lines = []
    for row, label in enumerate(labels):
        line = ""
        for column in range(columns):
            other, read = amounts.get((row, column), (0, 0))
            share = (other + read) / most
            if not share:
                line += " "
            elif read >= other:
                line += str(1 + min(8, int(9 * share)))
            else:
                line += _SHADES[1 + min(8, int(9 * share))]
        lines.append(f"{label:>10} {line.rstrip()}".rstrip())
    first = min((cell.birth for cell in drawn.cells), default=0)
    last = max((cell.birth for cell in drawn.cells), default=0)
    lines.append(f"{'born':>10} {first}{str(last).rjust(max(1, columns - len(str(first))))}")
    return "\n".join(lines)


def _bins(numbers: list[int], most: int) -> dict[int, int]:
    """Numbers in order as places, several in one where there are too many."""
    distinct = sorted(set(numbers))
    return {n: at * most // max(most, len(distinct)) for at, n in enumerate(distinct)}


def as_html(drawn: Picture, title: str) -> str:
    """One page: a square for each piece, as large as its bytes; hover for the numbers.

    Lines and the ground bound what the version reads: born no later than it, dead only after it.
    """
    births = _bins([cell.birth for cell in drawn.cells], 10**9)
    deaths = _bins([cell.death for cell in drawn.cells if cell.death], 10**9)
    most = max((cell.nbytes for cell in drawn.cells), default=1) or 1
    # A small grid is drawn larger: there is room for it.
    side = min(_LARGEST, max(_SMALLEST, _WIDTH // max(1, len(births), len(deaths))))
    wide = _LEFT + len(births) * side + 20
    high = round(_TOP + (1.5 + len(deaths)) * side) + 10

    def down(death: int) -> float:
        """Where a row begins; what lives on is separated from the dead."""
        return _TOP + (deaths[death] + 1.5) * side if death else _TOP

    shapes = [
        *(
            f'<text x="{_LEFT + (at + 0.5) * side}" y="{_TOP - 8}" text-anchor="middle">{birth}'
            "</text>"
            for birth, at in _labelled(births, side)
        ),
        *(
            f'<text x="{_LEFT - 8}" y="{down(death) + side / 2 + 4}" text-anchor="end">† {death}'
            "</text>"
            for death, _ in _labelled(deaths, side)
        ),
    ]
    right = _LEFT + sum(birth <= drawn.version for birth in births) * side
    later = [death for death in deaths if death > drawn.version]
    top = down(min(later)) if later else down(max(deaths)) + side if deaths else _TOP + side
    shapes += [
        f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT}" height="{height}" class="part"/>'
        for y, height in ((_TOP, side), (top, high - 10 - top))
    ]
    shapes += [
        f'<line x1="{right}" y1="{_TOP}" x2="{right}" y2="{high - 10}"/>',
        f'<line x1="{_LEFT}" y1="{top}" x2="{wide - 20}" y2="{top}"/>',
    ]
    for cell in drawn.cells:
        edge = max(1.5, side * (cell.nbytes / most) ** 0.5)
        x = _LEFT + births[cell.birth] * side + (side - edge) / 2
        y = down(cell.death) + (side - edge) / 2
        life = f"{cell.birth} to {cell.death or 'now'}"
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{edge:.1f}" height="{edge:.1f}" '
            f'class="{"read" if cell.read else "other"}"><title>lives {life}: {cell.rows:,} rows, '
            f"{cell.nbytes:,} bytes</title></rect>"
        )
    facts = (
        f"version {drawn.version} reads {drawn.read_nbytes:,} bytes of {drawn.read_files} files; "
        f"the grid holds {drawn.stored_nbytes:,} bytes in {drawn.files} files, "
        f"{drawn.unused_nbytes:,} of them unused; extraction covers version {drawn.covered} of "
        f"{drawn.newest}"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; color: #222; background: #fff; }}
svg {{ max-width: 100%; height: auto; }} line {{ stroke: #ffa94d; stroke-dasharray: 3 3; }}
.part {{ fill: #fff4e6; }} .read {{ fill: #d9480f; }} .other {{ fill: #868e96; }}
text {{ font-size: 11px; fill: #555; }}
</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(facts)}.</p>
<p>Columns are births, rows are deaths, the first row lives on; area is bytes. Orange is what a
restore of version {drawn.version} reads.</p>
<svg width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" xmlns="http://www.w3.org/2000/svg">
<text x="{_LEFT - 8}" y="{_TOP - 8}" text-anchor="end">born in</text>
<text x="{_LEFT - 8}" y="{_TOP + side / 2 + 4}" text-anchor="end">alive</text>
{"".join(shapes)}
</svg></body></html>
"""


def _labelled(places: dict[int, int], side: int) -> list[tuple[int, int]]:
    """The first, the last, and some between: as many as can be read at so many pixels a place."""
    gap = -(-_LABEL // side)
    step = max(gap, -(-len(places) // _MOST_LABELS))
    found = list(places.items())
    chosen = found[::step]
    if found and found[-1] not in chosen:
        # The last one takes the place of a neighbour that it would stand on.
        chosen = [
            *(chosen[:-1] if found[-1][1] - chosen[-1][1] < max(2, gap) else chosen),
            found[-1],
        ]
    return chosen
