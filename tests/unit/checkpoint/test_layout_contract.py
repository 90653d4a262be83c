"""Every layout of the project meets the contract of layouts."""

from __future__ import annotations

import pytest

from emberkeep.repository.policies import LAYOUTS, Layout
from tests.contracts.layout import LayoutContract


class TestFull(LayoutContract):
    @pytest.fixture
    def layout(self) -> Layout:
        return "full"


class TestOneShot(LayoutContract):
    @pytest.fixture
    def layout(self) -> Layout:
        return "one_shot"


class TestIntermittent(LayoutContract):
    @pytest.fixture
    def layout(self) -> Layout:
        return "intermittent"


class TestConsecutive(LayoutContract):
    @pytest.fixture
    def layout(self) -> Layout:
        return "consecutive"


class TestGrid(LayoutContract):
    @pytest.fixture
    def layout(self) -> Layout:
        return "grid"


def test_no_layout_is_left_out() -> None:
    tested = {"".join(part.title() for part in layout.split("_")) for layout in LAYOUTS}
    assert {suite.__name__ for suite in LayoutContract.__subclasses__()} == {
        f"Test{name}" for name in tested
    }
