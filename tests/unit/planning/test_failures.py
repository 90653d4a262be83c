"""Fits find what was drawn; draws follow from their seed; both models of the MTBF."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from emberkeep.errors import ConfigError, DataError
from emberkeep.planning.failures import (
    drawn_failures,
    fits,
    observed_survival,
    scaled_mtbf,
    uniform_times,
)

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("name", "gaps"),
    [
        ("gamma", np.random.default_rng(1).gamma(0.5, 20.0, 3000)),
        ("weibull", 10.0 * np.random.default_rng(2).weibull(0.6, 3000)),
        ("exponential", np.random.default_rng(4).exponential(14.0, 3000)),
        ("log-normal", np.random.default_rng(4).lognormal(1.0, 1.5, 3000)),
    ],
)
@pytest.mark.long
def test_the_best_fit_is_what_was_drawn(name: str, gaps: np.ndarray) -> None:
    best = fits(gaps)[0]
    assert best.name == name
    assert best.rmse < 0.02
    assert best.mean / HOUR == pytest.approx(gaps.mean(), rel=0.15)
    assert best.survival(np.zeros(1)) == 1.0
    assert np.all(best.hazard(np.array([1.0, 5.0, 20.0])) > 0)


def test_all_four_are_listed_best_first() -> None:
    found = fits(np.random.default_rng(0).gamma(2.0, 3.0, 200))
    assert {fit.name for fit in found} == {"gamma", "weibull", "exponential", "log-normal"}
    assert [fit.aic for fit in found] == sorted(fit.aic for fit in found)


def test_survival_counts_everyone_who_was_still_there() -> None:
    gaps, censored = np.array([1.0, 2.0, 2.0, 5.0]), np.array([9.0, 2.0, 1.5])
    # Of seven, then five, then four (one of two equal gaps after the other), then two.
    after = np.cumprod([6 / 7, 4 / 5, 3 / 4, 1 / 2])
    before = np.array([1.0, *after[:-1]])
    assert np.allclose(observed_survival(gaps, censored), (before + after) / 2)
    many = np.sort(np.random.default_rng(0).exponential(3.0, 1_000_000))  # a log of a whole fleet
    assert abs(observed_survival(many, np.empty(0)) - np.exp(-many / 3.0)).max() < 0.005


@pytest.mark.parametrize("gaps", [[1.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0], [1.0] * 5 + [np.inf]])
def test_what_cannot_be_fitted(gaps: list[float]) -> None:
    with pytest.raises(DataError, match="a fit needs 5 gaps or more"):
        fits(np.array(gaps))


def test_what_comes_by_the_clock_is_no_failure() -> None:
    """A log with a line a day ended in a traceback of the solver."""
    with pytest.raises(DataError, match=r"all gaps are about 24 h: .* give --mtbf"):
        fits(np.array([24.0] * 7))
    nearly = fits(24.0 + np.random.default_rng(0).normal(0, 0.5, 50))
    assert all(np.isfinite(fit.aic) for fit in nearly)


def test_draws_follow_from_the_seed_and_keep_the_mean() -> None:
    best = fits(np.random.default_rng(3).gamma(0.7, 20.0, 2000))[0]
    drawn = [best.draw(1000 * HOUR, seed=seed) for seed in range(40)]
    assert drawn[3] == best.draw(1000 * HOUR, seed=3)
    assert drawn[0] != drawn[1]
    assert all(list(times) == sorted(times) and times[-1] < 1000 * HOUR for times in drawn)
    # A longer job fails at the same times, and later ones.
    assert best.draw(2000 * HOUR, seed=3)[: len(drawn[3])] == drawn[3]
    assert 1000 / np.mean([len(t) for t in drawn]) == pytest.approx(best.mean / HOUR, rel=0.1)


def test_which_shards_go_down() -> None:
    times = uniform_times(200, 56 * HOUR, seed=5)
    assert times == uniform_times(200, 56 * HOUR, seed=5)
    assert list(times) == sorted(times)
    assert times[-1] < 56 * HOUR
    failures = drawn_failures(times, shards=8, together=4, seed=5)
    assert failures == drawn_failures(times, shards=8, together=4, seed=5)
    assert all(len(set(f.shards)) == 4 and max(f.shards) < 8 for f in failures)
    counts = np.bincount([s for f in failures for s in f.shards], minlength=8)
    assert counts.min() > 70
    with pytest.raises(ConfigError, match="1 to 8 of 8 shards can fail together, not 9"):
        drawn_failures(times, shards=8, together=9, seed=5)


@pytest.mark.parametrize(
    ("scaling", "to", "hours"),
    [
        ("linear", 8, 28.0),
        ("linear", 16, 14.0),
        ("linear", 1, 224.0),
        ("independent", 8, 28.0),
        ("independent", 16, 1 / (1 - (1 - 1 / 28) ** 2)),
        ("independent", 8000, 1.0),
    ],
)
def test_scaling(scaling: str, to: int, hours: float) -> None:
    found = scaled_mtbf(28 * HOUR, nodes=8, to=to, scaling=scaling)  # type: ignore[arg-type]
    assert found / HOUR == pytest.approx(hours)


def test_scaling_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="use the linear model"):
        scaled_mtbf(0.5 * HOUR, nodes=8, to=16, scaling="independent")
    with pytest.raises(ConfigError, match="nodes must be 1 or more"):
        scaled_mtbf(HOUR, nodes=0, to=16)


def test_runs_that_outlived_the_log_make_gaps_longer() -> None:
    """Half of all gaps are watched for 10 h only: what was seen to end is short."""
    gaps = 20.0 * np.random.default_rng(3).weibull(0.7, 4000)
    watched = np.where(np.arange(4000) % 2, 10.0, 1e9)
    seen, censored = gaps[gaps <= watched], watched[gaps > watched]
    naive = next(fit for fit in fits(seen) if fit.name == "weibull")
    fair = next(fit for fit in fits(seen, censored) if fit.name == "weibull")
    assert fair.parameters[0] == pytest.approx(0.7, rel=0.05)
    assert fair.mean / HOUR == pytest.approx(gaps.mean(), rel=0.08)
    assert naive.mean / HOUR < 0.8 * gaps.mean()
    assert fits(seen, censored)[0].name == "weibull"
    assert fair.rmse < 0.02


@pytest.mark.parametrize("together", [2, 4])
def test_when_and_what_are_drawn_from_streams_of_their_own(together: int) -> None:
    """From one stream for both, which shards go down would say when."""
    early = {shard: list[float]() for shard in range(8)}
    for seed in range(400):
        times = uniform_times(1, 56 * HOUR, seed=seed)
        for shard in drawn_failures(times, shards=8, together=together, seed=seed)[0].shards:
            early[shard].append(times[0] / (56 * HOUR))
    for shares in early.values():
        # The mean of so many, each as likely anywhere, and four times its standard error.
        assert abs(np.mean(shares) - 0.5) < 4 * 0.289 / len(shares) ** 0.5


def test_a_fit_is_drawn_from_around_another_mean() -> None:
    best = fits(np.random.default_rng(3).gamma(0.7, 20.0, 2000))[0]
    short = [time / HOUR for time in best.draw(1000 * HOUR, seed=3, mtbf=best.mean / 2)[:20]]
    long = [time / HOUR for time in best.draw(2000 * HOUR, seed=3)[:20]]
    np.testing.assert_allclose(2 * np.array(short), long, rtol=1e-6)
    gaps = best.gaps()
    np.testing.assert_allclose(
        gaps.survival(np.array([0.5, 2.0])),
        best.survival(np.array([0.5, 2.0]) * (best.mean / HOUR)),
    )


def test_a_distribution_without_a_mean_is_no_fit() -> None:
    gaps = np.exp(np.random.default_rng(0).normal(0, 8, 12))
    censored = np.exp(np.random.default_rng(1).normal(6, 1, 30))
    found = fits(gaps, censored)
    assert "exponential" in {fit.name for fit in found}
    assert "log-normal" not in {fit.name for fit in found}
    assert all(timedelta(0) < fit.mean for fit in found)
