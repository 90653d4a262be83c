"""A hook of mkdocs: what pages link to outside of docs/ becomes part of the site.

On GitHub and in an editor `../CHANGELOG.md` or `../benchmarks/results` are files of the repository.
The site has copies of them below `repository/`, so that the same links work there, from a disk as
from a server.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COPIED = (
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "examples/*.md",
    "examples/*.py", "benchmarks/results/*.md", "benchmarks/results/*.png",
)  # fmt: skip
LISTED = ("benchmarks/results", "examples")

_LINK = re.compile(r'(\]\(|src=")([^)\s#"]+)((?:#[^)\s"]*)?)')


def site_uri(path: Path) -> str:
    """Where a file of the repository is on the site, as mkdocs names its sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"repository/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{uri}/{'README' if (path / 'README.md').exists() else 'index'}.md"
    return uri if path.suffix in (".md", ".png") else f"{uri}.md"


def copies() -> dict[str, str | Path]:
    """What is added: by its place on the site, its text or the file that it is."""
    found: dict[str, str | Path] = {}
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in (".md", ".png"):
                found[site_uri(path)] = path
            else:
                text = path.read_text(encoding="utf-8")
                language = "python" if path.suffix == ".py" else "text"
                found[site_uri(path)] = f"# {path.name}\n\n````{language}\n{text}````\n"
    for folder in LISTED:
        uri = site_uri(ROOT / folder)
        names = sorted(path.name for path in (ROOT / folder).glob("*.md"))
        found.setdefault(uri, f"# {folder}\n\n" + "\n".join(f"- [{n}]({n})" for n in names) + "\n")
    return found


def on_files(files: Files, *, config: Any) -> Files:
    for uri, given in copies().items():
        if isinstance(given, Path):
            files.append(File.generated(config, uri, abs_src_path=str(given)))
        else:
            files.append(File.generated(config, uri, content=given))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page, with links as they are on the site."""
    uri = page.file.src_uri
    copied = uri.startswith("repository/")
    source = ROOT / uri.removeprefix("repository/") if copied else DOCS / uri

    def replaced(found: re.Match[str]) -> str:
        if "://" in found[2] or found[2].startswith("mailto:"):
            return found[0]
        target = (source.parent / found[2]).resolve()
        if not target.exists() or (not copied and target.is_relative_to(DOCS)):
            return found[0]
        return f"{found[1]}{os.path.relpath(site_uri(target), os.path.dirname(uri))}{found[3]}"

    return _LINK.sub(replaced, markdown)
