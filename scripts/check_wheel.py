"""Holds a built wheel against what it must be: pure Python, typed, with every module of the source.

python scripts/check_wheel.py dist
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel; nothing if it may be published."""
    found = []
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"{wheel.name} is for one platform or interpreter: it must be py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = next((name for name in names if name.endswith(".dist-info/WHEEL")), None)
        pure = described is not None and b"Root-Is-Purelib: true" in archive.read(described)
    if not pure:
        found.append("it does not say that it is pure Python")
    compiled = sorted(name for name in names if name.endswith((".so", ".pyd", ".dylib")))
    found += [f"it holds compiled code: {name}" for name in compiled]
    wanted = {
        file.relative_to(SOURCE).as_posix()
        for pattern in ("*.py", "py.typed")
        for file in SOURCE.rglob(pattern)
    }
    found += [f"{name} is missing" for name in sorted(wanted - names)]
    return found


def main() -> int:
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    if len(wheels) != 1:
        print(f"{sys.argv[1]} holds {len(wheels)} wheels, not one", file=sys.stderr)
        return 1
    found = problems(wheels[0])
    for problem in found:
        print(f"{wheels[0].name}: {problem}", file=sys.stderr)
    if not found:
        print(f"{wheels[0].name}: pure Python, complete")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
