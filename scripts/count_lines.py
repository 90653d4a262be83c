"""Lines of code of src/emberkeep, by package: no blank lines, comments or docstrings."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "emberkeep"
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that hold a part of a statement; a string that stands alone is documentation."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def main(package: Path = PACKAGE) -> None:
    counts: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "(top level)"
        counts[name] += code_lines(path.read_text(encoding="utf-8"))
        files[name] += 1
    for name, count in counts.most_common():
        print(f"{count:7,}  {files[name]:4} files  {name}")
    print(f"{counts.total():7,}  {files.total():4} files  in total")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
