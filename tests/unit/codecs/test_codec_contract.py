"""Every codec of the project meets the contract of codecs."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep._types import Array
from emberkeep.codecs import Codec, NonNegative, NonNegative8, Quantized, Raw
from tests.contracts.codec import CodecContract


class TestRaw(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return Raw()


class TestQuantized(CodecContract):
    @pytest.fixture(params=[8, 4, 3, 2])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return Quantized(bits=request.param)


class _Accumulators(CodecContract):
    def rows(self, count: int, width: int, seed: int = 0) -> Array:
        return np.abs(super().rows(count, width, seed))


class TestNonNegative8(_Accumulators):
    @pytest.fixture
    def codec(self) -> Codec:
        return NonNegative8()


class TestNonNegative(_Accumulators):
    @pytest.fixture
    def codec(self) -> Codec:
        return NonNegative()
