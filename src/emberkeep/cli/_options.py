"""Options that several commands share."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from emberkeep.config import duration
from emberkeep.errors import ConfigError

TlsCertificate = Annotated[
    Path | None, typer.Option(metavar="PEM", help="The servers' certificate.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")]
Authority = Annotated[
    Path | None, typer.Option(metavar="PEM", help="Who signed it, if not one of the system's.")
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Holds the token; EMBERKEEP_TOKEN by default.")
]


def option(name: str, text: str, metavar: str = "TIME") -> Any:
    return typer.Option(name, metavar=metavar, help=text)


def read_time(name: str, text: str) -> timedelta:
    """What the user gave for the option `name`."""
    try:
        return duration(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is no duration: write 56h, 5.7min, 1h 30min") from None
