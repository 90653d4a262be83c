"""When an intermittent layout starts expected, against the best that could have been known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emberkeep.repository.policies import Layout, needs_baseline


def cycle(size: Callable[[int], float], most: int = 400) -> list[float]:
    """The increments between two baselines; `size` of the i-th one."""
    sizes: list[float] = []
    while len(sizes) < most and not needs_baseline("intermittent", sizes):
        sizes.append(size(len(sizes) + 1))
    return sizes


def written(sizes: list[float]) -> float:
    """Per version, as a fraction of a baseline."""
    return (1 + sum(sizes)) / (len(sizes) + 1)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.25, 0.4, 0.7])
def test_it_writes_nearly_as_little_as_the_best_cycle_in_hindsight(share: float) -> None:
    def size(interval: int) -> float:  # each interval changes rows at random
        return float(1 - (1 - share) ** interval)

    best = min(written([size(i) for i in range(1, n)]) for n in range(1, 400))
    assert written(cycle(size)) <= 1.04 * best


def test_rows_that_stay_the_same_need_no_new_baseline() -> None:
    assert len(cycle(lambda interval: 0.4)) == 400


def test_growth_is_expected_to_go_on() -> None:
    assert not needs_baseline("intermittent", [0.25])
    assert needs_baseline("intermittent", [0.25, 0.42])  # 0.59 is next: dearer than a baseline
    assert not needs_baseline("intermittent", [0.42, 0.25])  # rows were deleted


@pytest.mark.parametrize(
    ("sizes", "paper", "growth"),
    [
        ([0.25], False, False),
        ([0.25, 0.42], False, True),  # 1.67 against 3 * 0.42, and against 3 * 0.59
        ([0.25, 0.42, 0.55], False, True),
        ([0.25, 0.42, 0.58], True, True),  # 2.25 against 4 * 0.58
        ([1.0], True, True),
        ([0.9], False, False),
    ],
)
def test_the_paper_expects_the_last_increment_again(
    sizes: list[float], paper: bool, growth: bool
) -> None:
    assert needs_baseline("intermittent", sizes, "paper") is paper
    assert needs_baseline("intermittent", sizes, "growth") is growth


@pytest.mark.parametrize(
    ("layout", "sizes", "expected"),
    [
        ("full", [], True),
        ("one_shot", [1.0, 2.0], False),
        ("one_shot", [0.1] * 5000, False),  # each needs the baseline alone, and knows no sizes
        ("intermittent", [0.001] * 999, False),
        ("intermittent", [0.001] * 1000, True),
        ("consecutive", [], False),
        ("consecutive", [0.4, 0.5], False),
        ("consecutive", [0.4, 0.6], True),  # a restore would read twice what a baseline takes
        ("consecutive", [2.0], True),
        ("consecutive", [0.0] * 99, False),
        ("consecutive", [0.0] * 100, True),
    ],
)
def test_chains_end(layout: Layout, sizes: list[float], expected: bool) -> None:
    assert needs_baseline(layout, sizes) is expected
