"""The synthetic generator: reproducible, skewed as promised, and worth learning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.data import KAGGLE_ROWS, Synthetic, field_rows, skewed_ids
from emberkeep.data.accuracy import auc
from emberkeep.errors import ConfigError
from tests.nightly import examples

SMALL = Synthetic(rows_total=20_000, seed=3)


@settings(max_examples=examples(30), deadline=None)
@given(
    start=st.integers(0, 10**12),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_a_sample_depends_on_its_number_alone(start: int, cuts: list[int]) -> None:
    total = sum(cuts)
    whole = SMALL.batch(start, total)
    at = 0
    for count in cuts:
        part = SMALL.batch(start + at, count)
        np.testing.assert_array_equal(part.dense, whole.dense[at : at + count])
        np.testing.assert_array_equal(part.labels, whole.labels[at : at + count])
        for name, ids in part.ids.items():
            np.testing.assert_array_equal(ids, whole.ids[name][at : at + count])
        at += count


def test_the_same_parameters_give_the_same_samples_and_another_seed_others() -> None:
    again = Synthetic(rows_total=20_000, seed=3).batch(0, 500)
    np.testing.assert_array_equal(again.ids["C3"], SMALL.batch(0, 500).ids["C3"])
    other = Synthetic(rows_total=20_000, seed=4)
    assert (other.batch(0, 500).ids["C3"] != again.ids["C3"]).mean() > 0.9
    assert other.fingerprint() != SMALL.fingerprint()


def test_samples_of_a_seed_stay_what_they_were() -> None:
    """Pinned values: a change here would silently change every run that is resumed."""
    batch = Synthetic(rows_total=20_000, seed=3).batch(10**6, 4)
    assert batch.ids["C3"].tolist() == [3630, 2373, 3518, 4425]
    assert batch.labels.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_shape_is_criteos() -> None:
    batch = SMALL.batch(0, 3000)
    assert batch.dense.shape == (3000, 13)
    assert batch.dense.dtype == np.float32
    assert (batch.dense >= 0).all()
    assert list(batch.ids) == [f"C{f}" for f in range(1, 27)]
    for name, rows in SMALL.rows.items():
        ids = batch.ids[name]
        assert ids.dtype == np.int64
        assert ids.flags.c_contiguous
        assert 0 <= ids.min() <= ids.max() < rows


def test_field_rows_keep_kaggles_proportions() -> None:
    assert field_rows(sum(KAGGLE_ROWS)) == KAGGLE_ROWS
    rows = field_rows(1_000_000)
    assert sum(rows) == pytest.approx(1_000_000, rel=0.001)
    assert min(rows) == 3
    assert max(rows) == pytest.approx(max(KAGGLE_ROWS) * 1_000_000 / sum(KAGGLE_ROWS), rel=0.001)


def test_the_cursor_ends_after_the_samples() -> None:
    source = Synthetic(samples=10, rows_total=1000)
    cursor = source.open(4)
    assert cursor.skip(2) == 2
    assert len(cursor.read(100)) == 4
    assert len(cursor.read(100)) == 0
    assert cursor.skip(1) == 0
    assert len(source.open(50).read(3)) == 0


def seen_shares(ids: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """Accesses of the top 1% and top 10% of the seen ids; share of ids seen once."""
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    seen = len(counts)
    return (
        counts[: seen // 100].sum() / len(ids),
        counts[: seen // 10].sum() / len(ids),
        float((counts == 1).mean()),
    )


@pytest.mark.parametrize("rows", [rows for rows in KAGGLE_ROWS if rows > 2_000_000])
def test_criteo_skew_over_two_million_samples(rows: int) -> None:
    top_1, top_10, once = seen_shares(skewed_ids(rows, 2_000_000, "criteo", seed=1))
    assert top_1 == pytest.approx(0.73, abs=0.015)
    assert top_10 == pytest.approx(0.89, abs=0.015)
    assert once > 0.6


@pytest.mark.parametrize("rows", [20_000, 1_000_000, 10_000_000])
def test_retail_skew_by_share_of_the_table(rows: int) -> None:
    count = 1_000_000
    counts = np.sort(np.bincount(skewed_ids(rows, count, "retail", seed=1), minlength=rows))[::-1]
    assert counts[: rows // 1000].sum() / count == pytest.approx(0.895, abs=0.01)
    assert counts[: rows // 2000].sum() / count == pytest.approx(0.857, abs=0.015)
    if rows <= count:  # in a larger table the draw itself decides who is among the top 1%
        assert counts[: rows // 100].sum() / count == pytest.approx(0.957, abs=0.015)


def test_uniform_and_zipf_exponents() -> None:
    rows, count = 50, 200_000
    uniform = np.bincount(skewed_ids(rows, count, "uniform"), minlength=rows)
    assert uniform.min() > 0.9 * count / rows
    for exponent in (0.5, 1.0, 2.0):
        counts = np.sort(np.bincount(skewed_ids(rows, count, exponent), minlength=rows))[::-1]
        x = np.arange(1, rows + 2, dtype=np.float64)
        mass = np.log(x) if exponent == 1.0 else (x ** (1 - exponent) - 1) / (1 - exponent)
        expected = np.diff(mass) / mass[-1] * count
        np.testing.assert_allclose(counts[:10], expected[:10], rtol=0.1)


@settings(max_examples=examples(40), deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 1000))
def test_every_id_of_a_table_can_come_up(rows: int, seed: int) -> None:
    ids = skewed_ids(rows, rows * 30, "uniform", seed=seed)
    assert len(np.unique(ids)) == rows


def test_hot_ids_are_not_the_small_ones() -> None:
    rows = 1_000_000
    ids = skewed_ids(rows, 100_000, "criteo", seed=5)
    values, counts = np.unique(ids, return_counts=True)
    hottest = values[np.argsort(counts)[-50:]]
    assert (hottest > rows // 2).sum() in range(12, 39)
    assert len(np.unique(hottest // (rows // 100))) > 30
    other = skewed_ids(rows, 100_000, "criteo", seed=6)
    assert np.intersect1d(hottest, other).size < 25


def test_an_id_stream_can_be_entered_anywhere() -> None:
    whole = skewed_ids(1000, 500, 1.1, seed=2)
    np.testing.assert_array_equal(skewed_ids(1000, 200, 1.1, seed=2, start=300), whole[300:])


@pytest.mark.parametrize("skew", ["criteo", "retail", "uniform", 1.05])
def test_a_quarter_clicks(skew: str | float) -> None:
    source = Synthetic(rows_total=100_000, skew=skew, seed=11)
    assert source.batch(500_000, 40_000).labels.mean() == pytest.approx(0.25, abs=0.02)


def test_labels_are_draws_from_the_probabilities() -> None:
    labels = SMALL.batch(0, 100_000).labels
    probabilities = SMALL.probabilities(0, 100_000)
    for low in np.arange(0.0, 0.9, 0.1):
        chosen = (probabilities >= low) & (probabilities < low + 0.1)
        assert labels[chosen].mean() == pytest.approx(probabilities[chosen].mean(), abs=0.03)


def test_the_ceiling_is_the_auc_of_the_truth() -> None:
    ceiling = SMALL.bayes_auc(50_000, start=7)
    truth = SMALL.probabilities(7, 50_000)
    assert ceiling == auc(SMALL.batch(7, 50_000).labels, truth)
    assert 0.80 < ceiling < 0.86


def test_most_of_the_signal_is_in_the_ids() -> None:
    """The best model of the dense values alone stays far below one that knows the ids.

    Both are linear models fitted by least squares; the second also gets the mean label of each id
    in the training samples.
    """
    train, test = SMALL.batch(0, 60_000), SMALL.batch(1_000_000, 40_000)
    dense_score = least_squares(train.dense, train.labels, test.dense)
    effects_train, effects_test = [train.dense], [test.dense]
    for name in train.ids:
        means = smoothed_means(train.ids[name], train.labels, SMALL.rows[name])
        effects_train.append(means[train.ids[name]][:, None])
        effects_test.append(means[test.ids[name]][:, None])
    ids_score = least_squares(np.hstack(effects_train), train.labels, np.hstack(effects_test))
    dense_auc, ids_auc = auc(test.labels, dense_score), auc(test.labels, ids_score)
    assert dense_auc < 0.64
    assert ids_auc > dense_auc + 0.07
    assert ids_auc < SMALL.bayes_auc(40_000, start=1_000_000)


def least_squares(
    train: npt.NDArray[np.float32], labels: npt.NDArray[np.float32], test: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    weights = np.linalg.lstsq(
        np.c_[train, np.ones(len(train))].astype(np.float64), labels.astype(np.float64), rcond=None
    )[0]
    return np.c_[test, np.ones(len(test))].astype(np.float64) @ weights


def smoothed_means(
    ids: npt.NDArray[np.int64], labels: npt.NDArray[np.float32], rows: int
) -> npt.NDArray[np.float32]:
    clicks = np.bincount(ids, weights=labels, minlength=rows)
    views = np.bincount(ids, minlength=rows)
    return ((clicks + 0.25 * 20) / (views + 20)).astype(np.float32)


@pytest.mark.parametrize("skew", ["zipf", -0.1, 11.0, float("nan")])
def test_an_impossible_skew_is_refused(skew: str | float) -> None:
    with pytest.raises(ConfigError, match="skew must be"):
        Synthetic(skew=skew)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows_total"):
        Synthetic(rows_total=10)
    with pytest.raises(ConfigError, match="samples"):
        Synthetic(samples=0)
    with pytest.raises(ConfigError, match="rows must lie"):
        skewed_ids(0, 1)
