"""What every codec of rows must do, whatever it gives up: a suite to inherit from.

A codec is tested by a subclass with a fixture `codec` and its bound: how far a value may be from
what was encoded. What else it promises is its own to test: `tests/unit/codecs/test_codecs.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from emberkeep._types import Array
from emberkeep.codecs import Codec, codec_from_dict
from emberkeep.errors import DamageError, EmberkeepError, FormatError
from emberkeep.runtime.pool import Pool

WIDTHS = (1, 2, 7, 16, 33)


class CodecContract:
    """The guarantees of `Codec`, as tests."""

    def rows(self, count: int, width: int, seed: int = 0) -> Array:
        """Rows such as the codec is for; float32, of every scale, some of them constant."""
        random = np.random.default_rng(seed)
        values = random.standard_normal((count, width)) * np.exp2(
            random.uniform(-30, 30, (count, 1))
        )
        values[::7] = values[::7, :1]
        return values.astype(np.float32)

    def bound(self, codec: Codec, rows: Array) -> Array:
        """The most by which each value may come back changed, for rows of several columns."""
        raise NotImplementedError("a codec says how much it may lose")

    def back(self, codec: Codec, rows: Array, threads: int = 1) -> Array:
        pool = Pool(threads)
        return codec.decode(
            codec.encode(rows, pool), rows=len(rows), width=rows.shape[1], pool=pool
        )

    def test_it_round_trips_through_a_document(self, codec: Codec) -> None:
        document = json.loads(json.dumps(codec.to_dict()))
        assert codec_from_dict(document) == codec
        assert document["codec"] == codec.name
        with pytest.raises(FormatError, match="this release reads version 1"):
            codec_from_dict({**document, "version": 2})
        with pytest.raises(DamageError):
            codec_from_dict({**document, "no_such_field": 1})

    @pytest.mark.parametrize("width", WIDTHS)
    def test_rows_come_back_in_shape(self, codec: Codec, width: int) -> None:
        for count in (0, 1, 50):
            back = self.back(codec, self.rows(count, width))
            assert back.shape == (count, width)
            assert back.dtype == np.float32

    @pytest.mark.parametrize("width", WIDTHS[1:])
    def test_values_come_back_within_its_bound(self, codec: Codec, width: int) -> None:
        rows = self.rows(60, width)
        changed = np.abs(self.back(codec, rows).astype(np.float64) - rows)
        assert (changed <= self.bound(codec, rows)).all()

    @pytest.mark.parametrize("width", WIDTHS[1:])
    def test_constant_rows_come_back_exactly(self, codec: Codec, width: int) -> None:
        """Rows that nothing was trained in are constant as a rule: zeros, or what an accumulator
        begins with. Those of one value alone may be rounded."""
        float32 = np.finfo(np.float32)
        odd = [0.0, -0.0, -1.5, float32.max, float32.tiny, float32.smallest_subnormal]
        values = np.concatenate([np.array(odd, np.float32), self.rows(60, 1)[:, 0]])
        rows = np.repeat(values[:, None], width, axis=1)
        assert self.back(codec, rows).tobytes() == rows.tobytes()

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_row_depends_on_nothing_but_itself(self, codec: Codec, width: int) -> None:
        """Not on its block, not on the number of threads: versions written in other pieces, or on
        other machines, restore to the same bits."""
        rows = self.rows(40, width)
        together = self.back(codec, rows)
        assert self.back(codec, rows, threads=3).tobytes() == together.tobytes()
        for row, back in zip(rows, together, strict=True):
            assert self.back(codec, row[None]).tobytes() == back.tobytes()

    @pytest.mark.parametrize("width", WIDTHS)
    def test_what_is_not_a_number_comes_back_exactly(self, codec: Codec, width: int) -> None:
        rows = self.rows(6, width)
        rows[0, 0], rows[1, -1], rows[2, 0] = np.nan, np.inf, -np.inf
        back = self.back(codec, rows)
        if width > 1:  # a plane of one value may be stored in half of its bits
            assert back[:3].tobytes() == rows[:3].tobytes()
        assert (np.isnan(back) == np.isnan(rows)).all()
        assert (np.isinf(back) == np.isinf(rows)).all()

    @pytest.mark.parametrize("width", WIDTHS)
    def test_its_account_of_bytes_is_true(self, codec: Codec, width: int) -> None:
        rows = self.rows(20, width)
        buffers, columns = codec.encode(rows, Pool(1)), codec.columns(width)
        assert sum(columns.values()) == codec.nbytes_per_row(width)
        for name, nbytes in columns.items():
            assert buffers[name].nbytes == nbytes * len(rows)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_other_buffers_are_refused(self, codec: Codec, width: int) -> None:
        """Sizes are settled before a kernel runs: kernels do not check bounds."""
        rows = self.rows(9, width)
        buffers = codec.encode(rows, Pool(1))

        def refused(wrong: dict[str, Array], count: int = 9) -> None:
            with pytest.raises(EmberkeepError):
                codec.decode(wrong, rows=count, width=width, pool=Pool(1))

        refused({**buffers, "more": np.zeros(1, np.uint8)})
        refused(buffers, count=10)
        for name in codec.columns(width):
            refused({other: b for other, b in buffers.items() if other != name})
            refused({**buffers, name: buffers[name][:-1]})

    def test_it_decodes_where_it_is_asked_to(self, codec: Codec) -> None:
        rows = self.rows(12, 16)
        out = np.empty((12, 16), np.float32)
        assert codec.decode(codec.encode(rows), rows=12, width=16, out=out) is out
        assert out.tobytes() == self.back(codec, rows).tobytes()
