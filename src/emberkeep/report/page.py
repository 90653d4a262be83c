"""One HTML page with everything in it: no script, no font, no image from elsewhere."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberkeep import __version__
from emberkeep.errors import ConfigError, StorageError
from emberkeep.report.plots import Plot

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #23272e; --soft: #667080;
        --grid: #dfe3e8; --mark: #eef2f6; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e4e7eb; --soft: #98a2b0; --grid: #363c45; --mark: #22262c; } }
body { background: var(--paper); color: var(--ink); max-width: 60rem; margin: 2.5rem auto;
       padding: 0 1.25rem; font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { max-width: 46rem; } .soft, figcaption, footer { color: var(--soft); font-size: .9rem; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; min-width: var(--least); }
.wide { overflow-x: auto; }
@media (max-width: 30rem) { body { margin: 1.25rem auto; } h1 { font-size: 1.35rem; }
  table { font-size: .85rem; } th, td { padding-right: .55rem; } }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--grid);
         vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td:first-child { min-width: 4.2rem; } td.text:last-child { min-width: 14rem; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.chosen td { background: var(--mark); font-weight: 600; }
code { background: var(--mark); padding: .1rem .3rem; border-radius: .25rem; font-size: .9em; }
footer { margin: 3rem 0 1rem; }
"""

# Pixels for an inch of a plot, on a phone and at most.
_LEAST_SCALE, _MOST_SCALE = 63, 140


@dataclass(slots=True, kw_only=True)
class Page:
    """Sections in the order in which they are added."""

    title: str
    summary: str = ""
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def plot(self, plot: Plot, caption: str) -> None:
        """As wide as the page, but never too narrow for its text to be read: then it scrolls."""
        least, most = round(_LEAST_SCALE * plot.width), round(_MOST_SCALE * plot.width)
        self.parts.append(
            f'<figure role="img" aria-label="{html.escape(caption)}">'
            f'<div class="wide" style="--least: {least}px; max-width: {most}px">{plot.svg()}</div>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        texts: Sequence[str] = (),
        chosen: int | None = None,
    ) -> None:
        """Columns named in `texts` hold words; the row `chosen` stands out."""
        kinds = [' class="text"' if column in texts else "" for column in columns]
        head = "".join(
            f"<th{kind}>{html.escape(column)}</th>"
            for kind, column in zip(kinds, columns, strict=True)
        )
        body = ""
        for place, row in enumerate(rows):
            cells = "".join(
                f"<td{kind}>{html.escape('' if cell is None else str(cell))}</td>"
                for kind, cell in zip(kinds, row, strict=True)
            )
            body += f"<tr{' class=chosen' if place == chosen else ''}>{cells}</tr>"
        self.parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def html(self) -> str:
        title = html.escape(self.title)
        summary = f"<p>{html.escape(self.summary)}</p>" if self.summary else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>"
            f"<h1>{title}</h1>{summary}\n" + "\n".join(self.parts) + "\n"
            f"<footer>emberkeep {__version__}</footer></body></html>\n"
        )


def prepare(path: Path, *, reads: Sequence[Path | None] = ()) -> None:
    """Refuses a page that could not be written, before the work and not after it; also one beside
    which data would be written over a file that the work `reads`."""
    page = _place(path)
    for made in (page, page.with_suffix(".json"), page.with_suffix(".csv")):
        for given in reads:
            if given is not None and made.exists() and given.exists() and made.samefile(given):
                raise ConfigError(
                    f"{page} comes with {made.name} beside it, which would replace {given}: give "
                    "the page another name"
                )
    there = page.exists()
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.open("a", encoding="utf-8").close()
        if not there:
            page.unlink()
    except OSError as error:
        raise StorageError(f"{page} cannot be written: {error.strerror}") from error


def _place(path: Path) -> Path:
    return path if path.suffix == ".html" else path / "report.html"


def write(
    path: Path, page: Page, data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Writes the page, and beside it the data as JSON and, as a table, as CSV."""
    path = _place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.html(), encoding="utf-8")
        path.with_suffix(".json").write_text(
            json.dumps(strict(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
            encoding="utf-8",
        )
        if rows:
            path.with_suffix(".csv").write_text(_csv(rows), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return path


def strict(value: Any) -> Any:
    """What JSON has no word for (NaN, infinity) becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    return value


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
