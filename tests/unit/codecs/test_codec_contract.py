"""Every codec of the project meets the contract of codecs."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep._types import Array
from emberkeep.codecs import Codec, NonNegative, NonNegative8, Quantized, Raw, row_codecs
from tests.contracts.codec import CodecContract


class TestRaw(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return Raw()

    def bound(self, codec: Codec, rows: Array) -> Array:
        return np.zeros_like(rows)


class TestQuantized(CodecContract):
    @pytest.fixture(params=[8, 4, 3, 2])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return Quantized(bits=request.param)

    def bound(self, codec: Codec, rows: Array) -> Array:
        """Half a step of a grid over the whole range; of fewer bits, for the row as a whole."""
        assert isinstance(codec, Quantized)
        step = np.ptp(rows, axis=1, keepdims=True).astype(np.float64) / (2**codec.bits - 1)
        whole = 1 if codec.bits == 8 else np.sqrt(rows.shape[1])
        return np.broadcast_to(0.505 * step * whole, rows.shape)


class _Accumulators(CodecContract):
    def rows(self, count: int, width: int, seed: int = 0) -> Array:
        return np.abs(super().rows(count, width, seed))

    def bound(self, codec: Codec, rows: Array) -> Array:
        """Half of the value, where a row spans all of float32; see docs/codecs.md."""
        return rows * 0.5


class TestNonNegative8(_Accumulators):
    @pytest.fixture
    def codec(self) -> Codec:
        return NonNegative8()


class TestNonNegative(_Accumulators):
    @pytest.fixture
    def codec(self) -> Codec:
        return NonNegative()


def test_no_codec_is_left_out() -> None:
    tested = {Raw, Quantized, NonNegative8, NonNegative}
    assert set(row_codecs.CODECS) == tested
