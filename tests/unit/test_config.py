from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep import config
from emberkeep.config import setting
from emberkeep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """The inner part."""

    rate: float = setting("how fast", default=0.5, above=0, below=1)
    count: int | None = setting("how many, all if not set", default=None, least=1)
    names: tuple[str, ...] = setting("which ones", default=())
    widths: tuple[int, ...] = setting("how wide", default=(4, 2), least=1)
    loud: bool = setting("how loud", default=False)
    folder: str | None = setting("where", default=None, path=True)

    def __post_init__(self) -> None:
        config.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice that must be made."""

    kind: Literal["left", "right"] = setting("which way")

    def __post_init__(self) -> None:
        config.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The whole."""

    way: Choice
    inner: Inner = field(default_factory=Inner)


GOOD = '[way]\nkind = "left"\n'


def parse(text: str, *overrides: str) -> Outer:
    return config.parse(Outer, text, source="run.toml", overrides=overrides)


def test_what_is_given_replaces_the_default() -> None:
    outer = parse(GOOD + '[inner]\nrate = 0.25\nnames = ["a", "b"]\ncount = 3\nloud = true\n')
    assert outer == Outer(
        way=Choice(kind="left"), inner=Inner(rate=0.25, names=("a", "b"), count=3, loud=True)
    )
    assert parse(GOOD).inner == Inner()


@given(
    st.floats(0.001, 0.999),
    st.none() | st.integers(1, 10**9),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=8)),
    st.booleans(),
)
def test_written_settings_read_back_the_same(
    rate: float, count: int | None, names: list[str], loud: bool
) -> None:
    inner = Inner(rate=rate, count=count, names=tuple(names), loud=loud)
    outer = Outer(way=Choice(kind="right"), inner=inner)
    assert parse(config.to_toml(outer)) == outer


def test_every_key_is_written_with_its_comment() -> None:
    text = config.to_toml(Outer(way=Choice(kind="left")))
    assert "# which way: left, right\nkind = " in text
    assert "# how many, all if not set\n# count =" in text
    assert "# The inner part.\n[inner]" in text


def test_overrides_come_after_the_file() -> None:
    outer = parse(GOOD, "inner.rate=0.75", "way.kind=right", 'inner.names=["x"]', "inner.count = 2")
    assert outer.way.kind == "right"
    assert outer.inner == Inner(rate=0.75, names=("x",), count=2)


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("", [], "run.toml: way.kind is missing: choose one of left, right"),
        ("[way\n", [], "run.toml is not valid TOML"),
        (GOOD + "[iner]", [], r"run.toml: unknown section iner \(did you mean inner\?\)"),
        (
            GOOD + "[inner]\nrat=1",
            [],
            r"unknown key inner.rat \(did you mean rate\?\); known: rate",
        ),
        (GOOD + "[inner]\nxyz=1", [], "unknown key inner.xyz; known: rate, count"),
        (GOOD + "[inner]\nrate=1", [], "run.toml: inner.rate must be above 0 and below 1, not 1"),
        (GOOD + "[inner]\nrate=nan", [], "inner.rate must be above 0 and below 1, not nan"),
        (GOOD + "[inner]\nrate='a'", [], "inner.rate must be a number, not 'a'"),
        (GOOD + "[inner]\ncount=0", [], "inner.count must be 1 or more, not 0"),
        (GOOD + "[inner]\ncount=1.5", [], "inner.count must be a whole number, not 1.5"),
        (GOOD + "[inner]\ncount=true", [], "inner.count must be a whole number, not True"),
        (GOOD + "[inner]\nloud=1", [], "inner.loud must be true or false, not 1"),
        (GOOD + "[inner]\nnames='a'", [], "inner.names must be a list, not 'a'"),
        (GOOD + "[inner]\nnames=[1]", [], "inner.names must be a string, not 1"),
        (GOOD + "[inner]\nwidths=[4, 0]", [], "inner.widths must be 1 or more, not 0"),
        ("inner = 3\n" + GOOD, [], r"inner is a section: write \[inner\]"),
        ("[way]\nkind='lef'", [], r"way.kind must be one of left, right.*did you mean left\?"),
        (GOOD, ["inner.count=0"], "run.toml with --set inner.count=0: inner.count must be 1 or"),
        (GOOD, ["inner.count"], "--set takes section.key=value, .* not 'inner.count'"),
        (GOOD, ["inner..count=1"], "--set takes section.key=value"),
        (GOOD, ["=1"], "--set takes section.key=value"),
        (GOOD, ["inner.count=1\nrate=0.1"], "--set takes section.key=value"),
        (GOOD, ["inner.cuont="], r"unknown key inner.cuont \(did you mean count\?\)"),
        (GOOD + "[inner]\ncount=1" + 400 * "0", [], "inner.count must be a whole number of at"),
        (GOOD + "[inner]\nrate=1" + 400 * "0", [], "inner.rate must be a number of at most 64"),
    ],
)
def test_a_complaint_names_the_source_and_the_key(
    text: str, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(text, *overrides)
    assert "\n" not in str(caught.value)


def test_a_class_checks_itself_without_a_file() -> None:
    with pytest.raises(ConfigError, match=r"^rate must be above 0"):
        Inner(rate=0)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"rate": "0.5"}, "rate must be a number, not '0.5'"),
        ({"rate": None}, "rate must be a number, not None"),
        ({"count": 2.5}, "count must be a whole number, not 2.5"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"loud": "no"}, "loud must be true or false, not 'no'"),
        ({"names": "ab"}, "names must be a list, not 'ab'"),
        ({"names": [1]}, "names must be a string, not 1"),
        ({"widths": [4, 0]}, "widths must be 1 or more, not 0"),
        ({"folder": Path("x"), "names": (Path("x"),)}, "names must be a string"),
    ],
)
def test_types_are_checked_without_a_file(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Inner(**wrong)


def test_what_python_spells_otherwise_becomes_what_a_file_gives() -> None:
    given = Inner(
        rate=np.float32(0.5), count=np.int64(3), names=["a"], widths=[1, 2], folder=Path("x")
    )
    assert given == Inner(rate=0.5, count=3, names=("a",), widths=(1, 2), folder="x")
    assert config.to_toml(given) == config.to_toml(
        Inner(rate=0.5, count=3, names=("a",), widths=(1, 2), folder="x")
    )


def test_names_in_overrides_may_be_quoted_and_spaced() -> None:
    assert parse(GOOD, "inner . rate = 0.25", '"inner"."count"=2').inner == Inner(
        rate=0.25, count=2
    )
    assert parse(GOOD, "inner.names=['a',\n'b']").inner.names == ("a", "b")
    assert parse(GOOD + "[inner]\ncount=3", "inner.count=").inner.count is None


@pytest.mark.parametrize("text", ["9" * 400 + "b", "9999999999 TB", "-1b", "1e3b"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text[:5]):
        config.size(text)


def test_milliseconds_are_not_minutes() -> None:
    assert config.duration("29ms") == timedelta(milliseconds=29)
    assert config.duration("1s 500 milliseconds") == timedelta(seconds=1.5)
    assert config.duration("2 minutes") == timedelta(minutes=2)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(Outer, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        config.load(Outer, tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        config.load(Outer, binary)
    good = tmp_path / "good.toml"
    good.write_text(GOOD)
    assert config.load(Outer, good).way.kind == "left"
