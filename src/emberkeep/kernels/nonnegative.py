"""Non-negative values in 8 bits, on a grid over their bit patterns.

The bits of a positive float32, read as an integer, grow as its logarithm does, in straight pieces
from one power of two to the next. Equal steps there are nearly equal ratios, in integer arithmetic.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, U8, U32
from emberkeep.kernels._jit import kernel

_f32 = np.float32
_i32 = np.int32
_u32 = np.uint32
_INFINITY, _LEAST_NORMAL = 0x7F800000, 0x00800000  # as bits


@kernel
def encode_nonnegative(
    values_RD: F32, start: int, stop: int, codes_RB: U8, params_R: U32, raw_R: U8
) -> None:
    """Encodes rows `start..stop` by their bit patterns, which are close to a logarithm.

    Code 0 is zero; code c is the float whose bits are `base + (c - 1) · step`. `base` keeps the
    upper 16 bits below the sign, `step` is a multiple of 256.
    """
    width = values_RD.shape[1]
    bits_RD = values_RD.view(np.int32)
    for row in range(start, stop):
        least, least_positive, most = _i32(0x7FFFFFFF), _i32(0x7FFFFFFF), _i32(0)
        line = bits_RD[row]
        codes = codes_RB[row]
        different = _i32(0)
        for d in range(width):
            word = line[d]
            least = min(least, word)
            least_positive = min(least_positive, word if word > 0 else _i32(0x7FFFFFFF))
            most = max(most, word)
            different |= word ^ line[0]
        raw_R[row] = 0
        params_R[row] = _u32(0)
        base = least_positive >> _i32(15)
        floor = base << _i32(15)
        units = (most - floor + 254 * 256 - 1) // (254 * 256)
        step = _i32(units * 256)
        inverse = _f32(1) / _f32(max(step, _i32(1)))
        steps = _i32(np.rint(_f32(most - floor) * inverse))
        if different == 0 and width >= 4:
            for d in range(width):
                codes[d] = 0
            for j in range(4):
                codes[j] = np.uint8((_u32(line[0]) >> _u32(8 * j)) & _u32(255))
        elif (
            different == 0
            or least < 0
            or least_positive < _LEAST_NORMAL
            or floor + np.int64(steps) * step >= _INFINITY
        ):
            raw_R[row] = 1
            for d in range(width):
                codes[d] = 0
        else:
            params_R[row] = _u32(base) | (_u32(units) << _u32(16))
            for d in range(width):
                code = _i32(np.rint(_f32(line[d] - _i32(floor)) * inverse)) + _i32(1)
                codes[d] = np.uint8(code if line[d] > 0 else _i32(0))


@kernel
def decode_nonnegative(codes_RB: U8, params_R: U32, start: int, stop: int, out_RD: F32) -> int:
    """Decodes rows `start..stop`; the number of values that no encoder writes is returned."""
    width = out_RD.shape[1]
    bits_RD = out_RD.view(np.int32)
    wrong = 0
    for row in range(start, stop):
        param = params_R[row]
        codes = codes_RB[row]
        out = bits_RD[row]
        if param == 0:
            value = _u32(0)
            for j in range(4 if width >= 4 else 0):
                value |= _u32(codes[j]) << _u32(8 * j)
            for d in range(width):
                out[d] = _i32(value)
            continue
        base = np.int64(param & _u32(0xFFFF)) << 15
        step = np.int64(param >> _u32(16)) << 8
        most = _i32(0)
        for d in range(width):
            code = np.int64(codes[d])
            most = max(most, _i32(code))
            out[d] = _i32(base + (code - 1) * step) if code > 0 else _i32(0)
        if base + (most - 1) * step >= _INFINITY or base < _LEAST_NORMAL:
            wrong += 1
    return wrong
