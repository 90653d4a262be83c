"""Draws the pictures of the README and the documentation into docs/pictures.

Each is one SVG that needs nothing else: it has its own paper and follows the reader's choice of
light or dark. The layers are read from docs/architecture.md and the bytes of versions from
benchmarks/results, so a picture says what the page beside it says.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"

STYLE = """
  svg { --paper: #fcfcfb; --ink: #23272e; --soft: #5d6775; --line: #b9c0c9; --box: #f0f2f5;
        --a: #3b82c4; --b: #e07b39; --c: #3a9d6e; --d: #8e6bbf; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #16181c; --ink: #e4e7eb; --soft: #a3adba; --line: #4b535e; --box: #22262c; } }
  text { font: 16.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
         fill: var(--ink); }
  .paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--line); }
  .bold { font-weight: 600; } .soft { fill: var(--soft); font-size: 14.5px; }
  .name { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 14px; }
  .a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); }
  .bar { fill: var(--line); } .end { text-anchor: end; } .middle { text-anchor: middle; }
  .way { fill: none; stroke: var(--soft); stroke-width: 1.6; marker-end: url(#tip); }
  #tip path { fill: var(--soft); }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole picture; `title` is read to those who do not see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{html.escape(title)}">\n'
        f"<style>{STYLE}</style>\n{TIP}\n"
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{kind}"/>'
    )


def way(path: str) -> str:
    """An arrow along a path."""
    return f'<path class="way" d="{path}"/>'


def architecture() -> str:
    """Where rows live, who moves them, and what brings them back."""
    parts = [
        box(20, 20, 440, 66),
        text(36, 46, "your training loop", "bold"),
        text(36, 70, "PyTorch: network, loss, optimizers, data", "soft"),
        box(500, 20, 240, 66),
        text(516, 46, "Keeper", "bold"),
        text(516, 70, "saves, resumes, recovers", "soft"),
        way("M460 53 H494"),
        way("M150 86 V122"),
        way("M330 122 V92"),
        text(160, 109, "ids, gradients", "soft"),
        text(340, 109, "vectors", "soft"),
        box(20, 128, 440, 262),
        text(36, 154, "tables, spread over shards", "bold"),
        text(36, 176, "in this process, on servers, or placed by Ray", "soft"),
    ]
    for shard in range(4):
        x = 36 + 104 * shard
        parts += [
            f'<rect x="{x}" y="190" width="92" height="118" rx="6" class="paper"/>',
            text(x + 46, 210, f"shard {shard}", "soft middle"),
        ]
        for row in range(4):
            y = 221 + 14 * row
            parts += [
                f'<rect x="{x + 9}" y="{y}" width="50" height="10" rx="2" class="a"/>',
                f'<rect x="{x + 62}" y="{y}" width="21" height="10" rx="2" class="b"/>',
            ]
        parts.append(f'<rect x="{x + 9}" y="{283}" width="74" height="15" rx="2" class="c"/>')
    parts += [
        '<rect x="36" y="322" width="12" height="12" rx="2" class="a"/>',
        text(53, 334, "weight", "soft"),
        '<rect x="116" y="322" width="12" height="12" rx="2" class="b"/>',
        text(133, 334, "optimizer state", "soft"),
        '<rect x="256" y="322" width="12" height="12" rx="2" class="c"/>',
        text(273, 334, "parity (optional)", "soft"),
        text(36, 356, "One row, several planes. A tier has rows in files and", "soft"),
        text(36, 376, "the hot ones in memory: tables larger than memory.", "soft"),
        box(500, 128, 240, 168),
        text(516, 154, "repository", "bold"),
        text(516, 176, "a directory, S3, GCS or Azure", "soft"),
        text(516, 287, "what changed, in 2 to 32 bits", "soft"),
    ]
    for version, height in enumerate((70, 20, 26, 34, 66, 22)):
        x = 518 + 36 * version
        parts += [
            f'<rect x="{x}" y="{252 - height}" width="24" height="{height}" rx="3" class="d"/>',
            text(x + 12, 267, str(version + 1), "soft middle"),
        ]
    parts += [
        way("M460 196 H494"),
        way("M500 240 H466"),
        way("M620 86 V122"),
        text(630, 109, "versions", "soft"),
        box(500, 330, 240, 60),
        text(516, 355, "followers", "bold"),
        text(516, 377, "serve the newest version", "soft"),
        way("M620 296 V324"),
        text(
            20,
            412,
            "Versions are written beside training. Lost shards come back alone, from parity or",
            "soft",
        ),
        text(20, 431, "from versions; or everything goes back to one instant.", "soft"),
    ]
    title = (
        "A training loop looks up rows of tables that are spread over shards. A keeper writes "
        "versions of them to a repository, from which lost shards come back and followers serve."
    )
    return svg(760, 446, title, parts)


def layers() -> str:
    """The twelve layers of docs/architecture.md, as they stand there."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"^ ?(\d+)  ((?:\w+ ? ?)+?) {2,}(\S.*)$", page, flags=re.MULTILINE)
    parts = []
    for place, (number, names, about) in enumerate(found):
        y = 16 + 46 * place
        parts += [
            box(16, y, 848, 38),
            text(42, y + 24, number, "soft middle"),
            text(66, y + 24, "\u00a0\u00a0".join(names.split()), "name"),
            text(850, y + 24, about, "soft end"),
        ]
    height = 16 + 46 * len(found)
    parts.append(
        text(
            16,
            height + 18,
            "A module imports modules of the layers below its own, and no others.",
            "soft",
        )
    )
    title = "; ".join(f"{number}: {names}" for number, names, _ in found)
    return svg(880, height + 34, f"Twelve layers. {title}", parts)


def versions() -> str:
    """How large a version is, from the last full run of benchmarks/checkpoint.py."""
    page = (ROOT / "benchmarks" / "results" / "checkpoint.md").read_text(encoding="utf-8")
    wanted = {
        "full, float32": ("everything, as torch.save", "bar"),
        "intermittent, float32": ("what changed, exact", "a"),
        "intermittent, 8 bits, accumulator 16 bits": ("what changed, 8 bits", "a"),
        "intermittent, 4 bits, accumulator 16 bits": ("what changed, 4 bits", "a"),
        "intermittent, 2 bits, accumulator 16 bits": ("what changed, 2 bits", "a"),
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    table = {cells[0]: cells for cells in lines if cells}
    column = table["what"].index("MB written")
    sizes = {name: float(table[name][column]) for name in wanted}
    most = max(sizes.values())
    parts = [text(20, 34, "Bytes of a version, while a 2.1 GB model trains", "bold")]
    for place, (name, (title, colour)) in enumerate(wanted.items()):
        y, width = 52 + 36 * place, 420 * sizes[name] / most
        less = "" if place == 0 else f", {most / sizes[name]:.1f}× less"
        parts += [
            text(226, y + 19, title, "end"),
            f'<rect x="236" y="{y}" width="{width:.1f}" height="26" rx="3" class="{colour}"/>',
            text(236 + width + 8, y + 19, f"{sizes[name]:,.0f} MB{less}", "soft"),
        ]
    below = 52 + 36 * len(wanted) + 18
    parts += [
        text(
            20,
            below,
            "Mean of five versions, each after a quarter of the rows has changed; with optimizer",
            "soft",
        ),
        text(
            20,
            below + 19,
            "state: in the last three in 16 bits (bits=4, quantize_optimizer=True), else exact.",
            "soft",
        ),
        text(20, below + 38, "From benchmarks/results/checkpoint.md.", "soft"),
    ]
    shown = "; ".join(f"{wanted[name][0]}: {size:,.0f} MB" for name, size in sizes.items())
    title = f"Bytes of a version. {shown}; accumulators of the last three in 16 bits"
    return svg(760, below + 55, title, parts)


DRAWN = {"architecture.svg": architecture, "layers.svg": layers, "versions.svg": versions}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")
        print(PICTURES / name)


if __name__ == "__main__":
    main()
