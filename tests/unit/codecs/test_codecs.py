"""Rows come back exactly or within the stated bound; damaged buffers are refused, never read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emberkeep.codecs import Codec, NonNegative, NonNegative8, Quantized, Raw, codec_from_dict
from emberkeep.errors import ConfigError, DamageError, FormatError, StateError
from emberkeep.runtime.pool import Pool
from tests.nightly import examples

F32 = np.float32
BITS = (8, 4, 3, 2)
LOSSY: list[Codec] = [*(Quantized(bits=bits) for bits in BITS), NonNegative8(), NonNegative()]
ONE = Pool(1)


def there_and_back(codec: Codec, rows: np.ndarray, pool: Pool = ONE) -> np.ndarray:
    buffers = codec.encode(rows, pool)
    return codec.decode(buffers, rows=len(rows), width=rows.shape[1], dtype=rows.dtype, pool=pool)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def like_trained(rows: int, width: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, width)) * np.exp(random.normal(-3, 0.7, (rows, 1)))
    values *= np.where(random.random((rows, width)) < 0.01, 4, 1)
    return values.astype(F32)


@st.composite
def any_rows(draw: st.DrawFn, least: float | None = None) -> np.ndarray:
    """Blocks of every scale and shape, with every kind of float among them."""
    width = draw(st.integers(1, 40))
    count = draw(st.integers(0, 40))
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    exponents = random.uniform(-150, 127, (count, 1)) if draw(st.booleans()) else 0
    values = random.standard_normal((count, width)) * np.exp2(exponents)
    values += draw(st.sampled_from([0.0, 0.0, 1.0, -30.0, 1e6]))
    special = draw(hnp.arrays(F32, st.integers(1, 30), elements=st.floats(width=32)))
    with np.errstate(over="ignore"):
        values = values.astype(F32)
    places = random.random(values.shape) < draw(st.sampled_from([0.0, 0.01, 0.5]))
    values[places] = random.choice(special, places.sum())
    if least is not None:
        values = np.maximum(values, F32(least))  # NaN stays
    return values


def is_exact(rows: np.ndarray) -> np.ndarray:
    """The rows that every codec must return bit for bit."""
    bits = rows.view(np.uint32)
    constant = (bits == bits[:, :1]).all(axis=1)
    return constant | ~np.isfinite(rows).all(axis=1)


@given(
    any_rows(),
    st.sampled_from(BITS),
    st.sampled_from([(None, None), (None, None), (25, 0.0), (1000, 1.0), (1, 1.0)]),
)
@settings(max_examples=examples(200))
def test_quantized_rows_keep_their_bound(
    rows: np.ndarray, bits: int, search: tuple[int | None, float | None]
) -> None:
    codec = Quantized(bits=bits, bins=search[0], ratio=search[1])
    back = there_and_back(codec, rows)
    exact = is_exact(rows)
    assert same_bits(back[exact], rows[exact])
    rows64, back64 = rows[~exact].astype(np.float64), back[~exact].astype(np.float64)
    assert np.isfinite(back64).all()
    half_step = 0.505 * (rows64.max(axis=1) - rows64.min(axis=1)) / (2**bits - 1)
    error = np.abs(rows64 - back64)
    if codec.iterations == 0:
        assert (error <= half_step[:, None]).all()
    # The square of a tiny float64 may vanish: scale first.
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(half_step[:, None] > 0, error / half_step[:, None], error)
    assert (np.sqrt((relative**2).sum(axis=1)) <= np.sqrt(rows.shape[1])).all()


@given(any_rows(least=0.0))
@settings(max_examples=examples(150))
def test_accumulators_keep_their_ratio(rows: np.ndarray) -> None:
    back = there_and_back(NonNegative8(), rows)
    exact = is_exact(rows)
    assert same_bits(back[exact], rows[exact])
    rows64, back64 = rows[~exact].astype(np.float64), back[~exact].astype(np.float64)
    assert np.isfinite(back64).all()
    assert ((back64 == 0) == (rows64 == 0)).all()
    assert (back64 >= 0).all()
    for row, restored in zip(rows64, back64, strict=True):
        positive = row > 0
        spread = np.log2(row.max() / row[positive].min())
        error = np.abs(row[positive] - restored[positive])
        assert (error <= row[positive] * (spread / 500 + 1 / 4000)).all()


@given(any_rows())
@settings(max_examples=examples(50))
def test_accumulators_that_are_none_come_back_exactly(rows: np.ndarray) -> None:
    back = there_and_back(NonNegative8(), rows)
    odd = (np.signbit(rows) | ~np.isfinite(rows)).any(axis=1)
    assert same_bits(back[odd], rows[odd])


@given(hnp.arrays(np.uint32, st.tuples(st.integers(0, 50), st.just(1))))
@settings(max_examples=examples(300))
def test_one_value_a_row_keeps_half_of_its_bits(bits: np.ndarray) -> None:
    rows = bits.view(F32)
    back = there_and_back(NonNegative(), rows)
    whole = ~np.signbit(rows) & np.isfinite(rows) & (rows >= np.finfo(F32).tiny)
    assert same_bits(back[~whole], rows[~whole])
    error = np.abs(back[whole].astype(np.float64) - rows[whole])
    assert (error <= rows[whole].astype(np.float64) / 512).all()
    assert (back[whole] > 0).all()


def test_one_value_a_row_takes_two_bytes_unless_it_would_become_infinite() -> None:
    rows = np.array([[0.0], [1.0], [np.finfo(F32).max], [3.14159]], F32)
    buffers = NonNegative().encode(rows)
    assert buffers["codes"].shape == (4, NonNegative().nbytes_per_row(1)) == (4, 2)
    assert buffers["raw_rows"].tolist() == [2]
    for code in (0xFF00, 0xFFFF, 0x00FF, 0x0001):
        damaged = {**buffers, "codes": np.array([0, code, 0, 0], np.uint16).view(np.uint8)}
        with pytest.raises(DamageError, match="never writes"):
            NonNegative().decode(damaged, rows=4, width=1)
    damaged = {**buffers, "codes": np.full(4, 0x3F80, np.uint16).view(np.uint8)}
    with pytest.raises(DamageError, match="raw row"):
        NonNegative().decode(damaged, rows=4, width=1)


def test_a_restored_accumulator_never_explodes_the_step() -> None:
    """One coordinate was updated a billion times more strongly than the others."""
    accumulator = np.full((1, 16), 1e-10, F32)
    accumulator[0, 1:] *= np.arange(1, 16)
    accumulator[0, 0] = 10.0
    back = there_and_back(NonNegative8(), accumulator)
    step, restored = (1 / (np.sqrt(a.astype(np.float64)) + 1e-10) for a in (accumulator, back))
    assert (np.abs(restored / step - 1) < 0.04).all()


@given(
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20).flatmap(
        lambda shape: hnp.arrays(
            st.sampled_from([np.float32, np.int32, np.int64, np.float64, np.uint8]), shape
        )
    )
)
@settings(max_examples=examples(50))
def test_raw_returns_every_bit_of_any_plane(rows: np.ndarray) -> None:
    assert same_bits(there_and_back(Raw(), rows), rows)


SPECIAL_ROWS = {
    "zeros": [0.0] * 16,
    "negative zeros": [-0.0] * 16,
    "both zeros": [0.0, -0.0] * 8,
    "constant": [0.1] * 16,
    "constant denormal": [1e-44] * 16,
    "NaN": [float("nan"), *range(15)],
    "infinity": [float("-inf"), *range(15)],
    "overflowing range": [-3.4e38, 3.4e38, *range(14)],
    "denormals": [k * 1e-44 for k in range(16)],
    "far from zero": [1000 + k * 1e-3 for k in range(16)],
}


@pytest.mark.parametrize("codec", LOSSY[:4], ids=str)
@pytest.mark.parametrize("name", SPECIAL_ROWS)
def test_special_rows_are_exact(codec: Codec, name: str) -> None:
    rows = np.array([SPECIAL_ROWS[name], range(16)], F32)
    assert same_bits(there_and_back(codec, rows)[0], rows[0])


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_row_costs_no_more_than_another(bits: int) -> None:
    codec = Quantized(bits=bits)
    buffers = codec.encode(np.full((10, 16), 0.3, F32), ONE)
    assert len(buffers["raw_rows"]) == 0
    assert sum(b.nbytes for b in buffers.values()) == 10 * codec.nbytes_per_row(16)


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 16, 17, 64])
def test_bytes_are_as_announced_and_never_more_than_raw(codec: Codec, width: int) -> None:
    rows = np.abs(like_trained(50, width))
    buffers = codec.encode(rows, ONE)
    raw = len(buffers.get("raw_rows", ()))
    assert sum(b.nbytes for b in buffers.values()) == 50 * codec.nbytes_per_row(width) + raw * (
        4 + 4 * width
    )
    assert codec.nbytes_per_row(width) <= 4 * width
    if codec.columns(width) == Raw().columns(width):
        assert same_bits(there_and_back(codec, rows), rows)


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_a_row_encodes_alike_in_any_block_and_on_any_thread(codec: Codec) -> None:
    rows = np.abs(like_trained(5000, 24))
    rows[::97, 3] = np.nan
    whole = codec.encode(rows, ONE)
    threaded = codec.encode(rows, Pool(3))
    assert all(same_bits(whole[name], threaded[name]) for name in whole)
    cuts = [0, 1, 18, 333, 4100, 5000]
    parts = [codec.encode(rows[a:b], ONE) for a, b in pairwise(cuts)]
    for name in sorted(set(whole) - {"raw_rows"}):  # those count from their block's first row
        assert same_bits(whole[name], np.concatenate([part[name] for part in parts]))
    assert same_bits(there_and_back(codec, rows), there_and_back(codec, rows, Pool(3)))


def reference_params(row: np.ndarray, codec: Quantized) -> tuple[np.float32, np.float32]:
    """Scale and shift of one row, one candidate after the other, as the docs tell it."""
    top, fine = F32(2**codec.bits - 1), F32(2048 >> codec.bits)

    def grid(low: Any, high: Any, part: Any, rounding: float) -> tuple[Any, Any]:
        wanted = (high - low) * part
        much = wanted * F32(2**15 + 1)
        scale = much - (much - wanted)
        shift = np.floor(low * (F32(1) / scale) * fine + F32(rounding)) * (F32(1) / fine)
        return scale, shift

    def steps(scale: Any, shift: Any) -> tuple[np.ndarray, np.ndarray]:
        t = row * (F32(1) / scale) - shift
        return t, np.rint(np.clip(t, F32(0), top))

    def loss(scale: Any, shift: Any) -> Any:
        t, code = steps(scale, shift)
        squares = np.square(t - code)
        total = F32(0)
        whole = len(row) // 4 * 4
        for a, b, c, d in squares[:whole].reshape(-1, 4):
            total += (a + b) + (c + d)
        for square in squares[whole:]:
            total += square
        return total * (scale * unit) * (scale * unit)

    low, high = row.min(), row.max()
    step = (high - low) / F32(codec.bins)
    upward = F32(1 + 2.0**-9 + 2.0**-16)
    best = grid(low, high, upward / (top - F32(1) / fine), 0.0)
    unit = F32(1) / best[0]
    if codec.iterations == 0:
        return best
    least = loss(*best)
    for _ in range(codec.iterations):
        raised = grid(low + step, high, F32(1) / top, 0.5)
        cut = grid(low, high - step, F32(1) / top, 0.5)
        if loss(*raised) < loss(*cut):
            low, chosen = low + step, raised
        else:
            high, chosen = high - step, cut
        if loss(*chosen) < least:
            best, least = chosen, loss(*chosen)
    t, code = steps(*best)
    n, sums = F32(len(row)), []
    for terms in (code, code * code, t, t * code):
        total = F32(0)
        for term in terms:
            total += term
        sums.append(total)
    slope = (sums[3] * n - sums[0] * sums[2]) / max(sums[1] * n - sums[0] * sums[0], F32(1))
    low = best[0] * ((sums[2] - slope * sums[0]) / n + best[1])
    fitted = grid(low, low + best[0] * slope * top, F32(1) / top, 0.5)
    return fitted if loss(*fitted) < least else best


@pytest.mark.parametrize("width", [16, 23])
@pytest.mark.parametrize("bits", BITS)
def test_the_search_is_the_one_described(bits: int, width: int) -> None:
    codec = Quantized(bits=bits)
    rows = like_trained(100, width, seed=bits)
    params = codec.encode(rows, ONE)["params"]
    for row, param in zip(rows, params, strict=True):
        scale, shift = reference_params(row, codec)
        fine = 2048 >> bits
        assert int(param & 0xFFFF) == int(F32(scale).view(np.uint32)) >> 15
        assert int(np.uint16(param >> 16).view(np.int16)) == int(shift * fine)


def textbook_loss(row: np.ndarray, bits: int, bins: int, ratio: float) -> float:
    """The paper's greedy search in float64, parameters unrounded."""

    def loss(low: float, high: float) -> float:
        scale = (high - low) / (2**bits - 1)
        code = np.clip(np.rint((row - low) / scale), 0, 2**bits - 1)
        return float(np.linalg.norm(row - (code * scale + low)))

    low, high = float(row.min()), float(row.max())
    step, least, whole = (high - low) / bins, loss(low, high), high - low
    while high - low > (1 - ratio) * whole + 1e-9 * whole:
        raised, cut = loss(low + step, high), loss(low, high - step)
        low, high = (low + step, high) if raised < cut else (low, high - step)
        least = min(least, raised, cut)
    return least


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("bits", "bins", "ratio"), [(4, 45, 0.2), (3, 25, 0.2), (2, 25, 0.5)])
def test_no_more_is_lost_than_by_the_papers_search(
    bits: int, bins: int, ratio: float, width: int
) -> None:
    rows = like_trained(300, width, seed=7)
    back = there_and_back(Quantized(bits=bits), rows)
    ours = np.linalg.norm(rows.astype(np.float64) - back, axis=1).mean()
    textbook = np.mean([textbook_loss(row.astype(np.float64), bits, bins, ratio) for row in rows])
    assert ours <= textbook


def test_defaults_are_the_papers() -> None:
    chosen = {bits: Quantized(bits=bits) for bits in BITS}
    assert {b: (c.bins, c.iterations) for b, c in chosen.items()} == {
        8: (1, 0),
        4: (45, 9),
        3: (25, 5),
        2: (25, 13),
    }


@pytest.mark.parametrize("codec", [Raw(), *LOSSY, Quantized(bits=2, bins=200, ratio=1.0)], ids=str)
def test_a_codec_round_trips_through_its_dict(codec: Codec) -> None:
    assert codec_from_dict(codec.to_dict()) == codec


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"codec": "zstd", "version": 1}, "not known to this release"),
        ({"version": 1}, "describes no codec"),
        ({"codec": "raw", "version": 2}, "version 2"),
        ({"codec": "quantized", "version": 1, "bits": 5}, "bits must be"),
        ({"codec": "quantized", "version": 1, "bits": 4, "dither": True}, "dither"),
        ({"codec": "quantized", "version": 1, "bits": 4, "ratio": "much"}, "ratio must be"),
    ],
)
def test_a_spec_that_cannot_be_read_is_refused(spec: dict[str, Any], says: str) -> None:
    with pytest.raises((DamageError, FormatError), match=says):
        codec_from_dict(spec)


@pytest.mark.parametrize(
    "fields", [{"bits": 1}, {"bits": 4, "bins": 0}, {"bits": 4, "ratio": 1.1}, {"bits": 8.0}]
)
def test_a_spec_that_cannot_work_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Quantized(**fields)


def test_lossy_codecs_refuse_other_planes() -> None:
    with pytest.raises(ConfigError, match="use Raw"):
        Quantized(bits=8).encode(np.zeros((2, 8), np.int64))
    with pytest.raises(ConfigError, match="use Raw"):
        NonNegative8().decode({}, rows=1, width=8, dtype=np.float64)
    with pytest.raises(ConfigError, match="shape"):
        Quantized(bits=8).encode(np.zeros(8, F32))


@pytest.mark.parametrize("codec", [Raw(), *LOSSY], ids=str)
def test_rows_decode_from_read_only_bytes_into_place(codec: Codec) -> None:
    """As they come from a mapped file: flat, read-only, not aligned."""
    rows = np.abs(like_trained(40, 16))
    rows[3, 3] = np.inf
    flat = {}
    for name, buffer in codec.encode(rows, ONE).items():
        flat[name] = np.frombuffer(b"\0" + buffer.tobytes(), np.uint8, offset=1)
    out = np.empty_like(rows)
    assert codec.decode(flat, rows=40, width=16, out=out, pool=ONE) is out
    assert same_bits(out, there_and_back(codec, rows))
    with pytest.raises(StateError, match="do not fit"):
        codec.decode(flat, rows=40, width=16, out=np.empty((39, 16), F32), pool=ONE)


def damaged(buffers: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    for name, buffer in buffers.items():
        flat = np.ascontiguousarray(buffer).reshape(-1)
        yield {**buffers, name: flat[:-1]}
        yield {**buffers, name: np.concatenate([flat, flat[:1]])}
        yield {**buffers, name: flat.astype(np.float64)}
        yield {key: value for key, value in buffers.items() if key != name}
    yield {**buffers, "more": np.zeros(1)}


@pytest.mark.parametrize("codec", [Raw(), *LOSSY], ids=str)
def test_buffers_of_a_wrong_size_are_refused(codec: Codec) -> None:
    rows = np.abs(like_trained(40, 16))
    rows[[3, 9], 3] = np.inf
    for buffers in damaged(codec.encode(rows, ONE)):
        with pytest.raises(DamageError):
            codec.decode(buffers, rows=40, width=16, pool=ONE)


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("raw_rows", [3, 3]),
        ("raw_rows", [9, 3]),
        ("raw_rows", [3, 40]),
        ("raw_rows", [3, 2**32 - 1]),
        ("raw_rows", [3, 10]),
        ("params", [0xFFFFFFFF] * 40),
        ("params", [1] * 40),
    ],
)
def test_contents_that_no_encoder_writes_are_refused(
    codec: Codec, name: str, values: list[int]
) -> None:
    rows = np.abs(like_trained(40, 16))
    rows[[3, 9], 3] = np.inf
    buffers = {**codec.encode(rows, ONE), name: np.array(values, np.uint32)}
    with pytest.raises(DamageError):
        codec.decode(buffers, rows=40, width=16, pool=ONE)


@given(st.sampled_from(LOSSY), st.integers(2, 20), st.integers(0, 2**32))
@settings(max_examples=examples(50))
def test_random_bytes_never_crash(codec: Codec, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    buffers = codec.encode(random.random((30, width)).astype(F32), ONE)
    for name, buffer in buffers.items():
        if name in ("codes", "params"):
            buffers[name] = random.integers(0, 256, buffer.nbytes, np.uint8)
    try:
        back = codec.decode(buffers, rows=30, width=width, pool=ONE)
    except DamageError:
        return
    assert back.shape == (30, width)
