"""One kernel per optimizer: unique rows, aggregated gradients, every plane updated in one pass.

Arithmetic is float32 in the order that torch's sparse optimizers use, so results agree with them
up to fused multiply-adds. Powers are by repeated multiplication: the same bits on every machine.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, I32, I64
from emberkeep.kernels._intrinsics import prefetch_row
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels._jobs import writer
from emberkeep.kernels._lanes import adagrad_row, adam_row, subtract_scaled_row
from emberkeep.kernels.initial_values import AHEAD


@kernel
def sgd(
    start: int,
    stop: int,
    rows: I64,
    grads_UD: F32,
    lr: np.float32,
    weight_RD: F32,
) -> None:
    for i in range(start, stop):
        row = rows[i]
        if i + AHEAD < stop:
            prefetch_row(weight_RD, rows[i + AHEAD])
        subtract_scaled_row(weight_RD, row, grads_UD, i, lr)


@kernel
def momentum(
    start: int,
    stop: int,
    rows: I64,
    grads_UD: F32,
    lr: np.float32,
    factor: np.float32,
    nesterov: bool,
    weight_RD: F32,
    momentum_RD: F32,
) -> None:
    for i in range(start, stop):
        row = rows[i]
        if i + AHEAD < stop:
            prefetch_row(weight_RD, rows[i + AHEAD])
            prefetch_row(momentum_RD, rows[i + AHEAD])
        for d in range(weight_RD.shape[1]):
            velocity = factor * momentum_RD[row, d] + grads_UD[i, d]
            momentum_RD[row, d] = velocity
            change = grads_UD[i, d] + factor * velocity if nesterov else velocity
            weight_RD[row, d] -= lr * change


@kernel
def adagrad(
    start: int,
    stop: int,
    rows: I64,
    grads_UD: F32,
    lr: np.float32,
    eps: np.float32,
    weight_RD: F32,
    accumulator_RD: F32,
) -> None:
    for i in range(start, stop):
        row = rows[i]
        if i + AHEAD < stop:
            prefetch_row(weight_RD, rows[i + AHEAD])
            prefetch_row(accumulator_RD, rows[i + AHEAD])
        adagrad_row(weight_RD, row, accumulator_RD, row, grads_UD, i, lr, eps)


@kernel
def row_wise_adagrad(
    start: int,
    stop: int,
    rows: I64,
    grads_UD: F32,
    lr: np.float32,
    eps: np.float32,
    weight_RD: F32,
    accumulator_R1: F32,
) -> None:
    """The accumulator of a row is the running sum of the mean square of its gradient."""
    dim = weight_RD.shape[1]
    for i in range(start, stop):
        row = rows[i]
        if i + AHEAD < stop:
            prefetch_row(weight_RD, rows[i + AHEAD])
            prefetch_row(accumulator_R1, rows[i + AHEAD])
        # Four partial sums in a fixed order: independent additions, the same bits every time.
        a = np.float32(0.0)
        b = np.float32(0.0)
        c = np.float32(0.0)
        e = np.float32(0.0)
        whole = dim & ~3
        for d in range(0, whole, 4):
            a += grads_UD[i, d] * grads_UD[i, d]
            b += grads_UD[i, d + 1] * grads_UD[i, d + 1]
            c += grads_UD[i, d + 2] * grads_UD[i, d + 2]
            e += grads_UD[i, d + 3] * grads_UD[i, d + 3]
        for d in range(whole, dim):
            a += grads_UD[i, d] * grads_UD[i, d]
        total = accumulator_R1[row, 0] + ((a + b) + (c + e)) / np.float32(dim)
        accumulator_R1[row, 0] = total
        rate = lr / (np.sqrt(total) + eps)
        subtract_scaled_row(weight_RD, row, grads_UD, i, rate)


@inline
def _power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@kernel
def adam_rate(lr: float, beta1: float, beta2: float, step: int) -> float:
    """The step size with both bias corrections folded in, as torch's SparseAdam folds them."""
    return lr * np.sqrt(1.0 - _power(beta2, step)) / (1.0 - _power(beta1, step))


@kernel
def adam(
    start: int,
    stop: int,
    rows: I64,
    grads_UD: F32,
    offsets_T: I64,
    rates_T: F32,
    lr: float,
    beta1: float,
    beta2: float,
    eps: np.float32,
    weight_RD: F32,
    first_RD: F32,
    second_RD: F32,
    step_R1: I32,
) -> None:
    """Adam with the step of the table (`rates_T`), or of the row where `step_R1` has rows."""
    keep1 = np.float32(1.0 - beta1)
    keep2 = np.float32(1.0 - beta2)
    for t in range(rates_T.size):
        rate = rates_T[t]
        for i in range(max(start, offsets_T[t]), min(stop, offsets_T[t + 1])):
            row = rows[i]
            if i + AHEAD < stop:
                prefetch_row(weight_RD, rows[i + AHEAD])
                prefetch_row(first_RD, rows[i + AHEAD])
                prefetch_row(second_RD, rows[i + AHEAD])
            if step_R1.shape[0] > 0:
                step_R1[row, 0] += 1
                rate = np.float32(adam_rate(lr, beta1, beta2, int(step_R1[row, 0])))
            adam_row(
                weight_RD, row, first_RD, row, second_RD, row, grads_UD, i, rate, keep1, keep2, eps
            )


@kernel
def clip_rows(
    start: int,
    stop: int,
    rows: I64,
    max_norm: float,
    weight_RD: F32,
) -> None:
    """Scales each row whose norm exceeds `max_norm` back to it."""
    for i in range(start, stop):
        row = rows[i]
        square = 0.0
        for d in range(weight_RD.shape[1]):
            square += np.float64(weight_RD[row, d]) * np.float64(weight_RD[row, d])
        if square > max_norm * max_norm:
            scale = np.float32(max_norm / np.sqrt(square))
            for d in range(weight_RD.shape[1]):
                weight_RD[row, d] *= scale


write_sgd = writer(sgd)
write_momentum = writer(momentum)
write_adagrad = writer(adagrad)
write_row_wise_adagrad = writer(row_wise_adagrad)
write_adam = writer(adam)
write_clip_rows = writer(clip_rows)
