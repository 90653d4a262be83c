"""What the encoder writes, byte for byte: a faster one must write the same.

The rows are made of whole numbers, so that they are the same on every machine and with every NumPy.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from emberkeep.codecs import Quantized
from emberkeep.runtime.pool import Pool

ONE = Pool(1)
WIDTHS = (2, 3, 7, 8, 13, 16, 31, 64, 67, 130)


def rows_of_every_kind(width: int) -> np.ndarray:
    random = np.random.default_rng(width)
    rows = 400
    # Sums of three, with a scale and a mean for each row, and one value in 64 eight times as large.
    values = random.integers(-(2**16), 2**16, (3, rows, width)).sum(axis=0).astype(np.float64)
    values *= np.where(random.integers(0, 64, values.shape) == 0, 8, 1)
    values += random.integers(-(2**16), 2**16, (rows, 1))
    values[rows // 2 :] *= np.exp2(random.integers(-150, 100, (rows - rows // 2, 1)))
    found = np.ldexp(values, -20).astype(np.float32)
    found[1::23] = found[1::23, :1]
    found[2::23] = np.abs(found[2::23])
    found[3::23] = -np.abs(found[3::23])
    found[4::23] = np.sign(found[4::23])
    found[5::23, ::2] = -0.0
    found[6::23] = np.where(found[6::23] > 0, np.float32(0), np.float32(-0.0))
    found[7::23] += np.float32(7)
    found[8::46, -1] = np.nan
    found[9::46, 0] = np.inf
    found[10::46, width // 2] = -np.inf
    found[11::46, 0] = -np.nan
    found[12::23] = random.integers(0, 2**23, found[12::23].shape, np.uint32).view(np.float32)
    found[13::23] = random.integers(0, 2**32, found[13::23].shape, np.uint32).view(np.float32)
    return found


def digest(codec: Quantized) -> str:
    found = hashlib.sha256()
    for width in WIDTHS:
        buffers = codec.encode(rows_of_every_kind(width), ONE)
        for name in sorted(buffers):
            found.update(name.encode() + buffers[name].tobytes())
    return found.hexdigest()[:32]


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Quantized(bits=2), "a3cbda56dbe0b5d9b544b554d2460702"),
        (Quantized(bits=3), "db87075af0d9e35f7c9493da7091a4b6"),
        (Quantized(bits=4), "2be6c047729c9cf063446b8fd6baf1b4"),
        (Quantized(bits=8), "befcfac7fbe7df503e07c301fe0bbd51"),
        (Quantized(bits=2, bins=200, ratio=1.0), "9f5a7f9d0b0fc25ce2c24e66994b6409"),
        (Quantized(bits=4, bins=3, ratio=1.0), "e8043d0e2505cfac61ac1d0ea8ac434a"),
        (Quantized(bits=8, bins=10, ratio=0.5), "d1fa0d16dc509030d9f89a1b74459929"),
    ],
    ids=str,
)
def test_the_bytes_stay_the_same(codec: Quantized, expected: str) -> None:
    assert digest(codec) == expected


def test_the_rows_are_of_every_kind() -> None:
    """Without raw rows, constant rows and others among them, the digests would say little."""
    buffers = Quantized(bits=4).encode(rows_of_every_kind(64), ONE)
    raw = len(buffers["raw_rows"])
    assert raw > 50
    assert np.count_nonzero(buffers["params"] == 0) > raw + 10
    assert np.count_nonzero(buffers["params"]) > 150
