"""Plots that are read on light and on dark pages: drawn by matplotlib, inlined as SVG.

Nothing here touches pyplot: no backend is chosen and no global state changes, so a plot can be
made in any process. The same data give the same bytes.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins that become CSS in the SVG, so that text and lines follow the page's colours.
_INK, _GRID, _PAPER = "#0a0b0c", "#d9dde3", "#fdfefd"
_CSS = {_INK: "currentColor", _GRID: "var(--grid)", _PAPER: "var(--paper)"}

COLOURS = ("#3b82c4", "#e07b39", "#3a9d6e", "#8e6bbf", "#d1495b", "#2a9aa8", "#b3922e", "#8a8f98")
"""Of middle brightness: distinct on white and on black, also by those who confuse red and green
where shapes or labels differ too."""

PARTS = {"save": "#3b82c4", "load": "#3a9d6e", "lost": "#d1495b", "reschedule": "#b3922e",
         "slowdown": "#8e6bbf"}  # fmt: skip
"""The parts of an overhead always have the same colours."""

PART_TEXTS = {
    "save": "saving",
    "load": "loading",
    "lost": "lost computation",
    "reschedule": "rescheduling",
    "slowdown": "slower steps",
}


def check_available() -> None:
    """Refuses where plots cannot be drawn; worth asking before work whose end is a page."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "pages with plots need matplotlib, which is not installed: run pip install "
            "'emberkeep[plots]'"
        )


@contextmanager
def _style() -> Iterator[None]:
    check_available()
    import matplotlib as mpl

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "emberkeep",
        "font.family": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "legend.facecolor": _PAPER,
        "legend.edgecolor": _PAPER,
        "legend.framealpha": 1.0,
        "legend.fontsize": 8.5,
        "lines.linewidth": 1.7,
        "hatch.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
        ),
    }
    with mpl.rc_context(style):
        yield


@contextmanager
def drawing(
    *, width: float = 8.0, height: float = 3.4, panels: int = 1, **grid: Any
) -> Iterator[tuple[Plot, list[Axes]]]:
    """A plot to draw on, side by side in `panels`; it is complete at the end of the block."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, **grid)[0].tolist()
        yield Plot(figure), axes


class Plot:
    """A figure that goes onto a page."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    @property
    def width(self) -> float:
        """In inches, as it was drawn; the page scales it."""
        return float(self.figure.get_figwidth())

    def svg(self) -> str:
        """An `<svg>` element to be inlined; text stays text."""
        out = io.StringIO()
        with _style():
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        # The size is the page's to choose: the viewBox keeps the proportions.
        for size in ("width", "height"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, css in _CSS.items():
            text = text.replace(colour, css)
        return text.strip()


def stacked_bars(
    axes: Axes,
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    *,
    hatched: Sequence[bool] | None = None,
    texts: Sequence[str] | None = None,
) -> None:
    """One bar for each name, stacked from overhead parts in percent, the sum above it."""
    below = [0.0] * len(names)
    for part, colour in PARTS.items():
        heights = [given.get(part, 0.0) for given in parts]
        if any(heights):
            axes.bar(
                range(len(names)), heights, bottom=below, width=0.62, color=colour,
                label=PART_TEXTS[part],
            )  # fmt: skip
            below = [b + h for b, h in zip(below, heights, strict=True)]
    if hatched is not None and any(hatched):
        refused = [place for place, is_hatched in enumerate(hatched) if is_hatched]
        axes.bar(
            refused, [below[place] for place in refused], width=0.62, fill=False, hatch="////",
            edgecolor=_INK, linewidth=0, label="refused: does not pay",
        )  # fmt: skip
    for place, total in enumerate(below):
        text = f"{total:.2f}%" if texts is None else texts[place]
        axes.annotate(
            text, (place, total), xytext=(0, 3), textcoords="offset points",
            ha="center", va="bottom", fontsize=8.5,
        )  # fmt: skip
    axes.set_xticks(range(len(names)), list(names))
    axes.set_ylim(0, max(below, default=1.0) * 1.18 or 1.0)
    axes.grid(visible=False, axis="x")


def legend_of(axes: Axes, **options: Any) -> None:
    """A legend, where there is something to explain."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**options)
