"""What codecs lose and how fast they are, beside torch's prepacked embeddings.

Loss is the mean over rows of ‖x − x̂‖, as in Check-N-Run; MB/s counts the float32 bytes that go in
(encode) or come out (decode). torch's `embedding_bag_*_prepack` runs on the same rows in the same
run, plain and with `optimized_qparams=True`: the search that ours is measured against, with the
same bins and ratio. Symmetric, asymmetric and k-means quantization show the ordering of the
paper's Figure 5; their parameters are kept in float32, and k-means keeps a codebook per row.
"""

from __future__ import annotations

import os

# torch's idle threads would spin for a while on the cores that the next contender needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from _common import interleaved_ms, options, report
from emberkeep.codecs import NonNegative8, Quantized, pack_ids, unpack_ids
from emberkeep.runtime.pool import Pool, default_threads

DIMS = (16, 64, 128)
BITS = (8, 4, 3, 2)
BLOCK_MB = 4
SEED = 0
KMEANS_ROUNDS = 15  # as in the paper
DENSITIES = (0.25, 0.05)
TORCH_NAMES = {8: "byte", 4: "4bit", 2: "2bit"}
COLUMNS = (
    "codec",
    "dim",
    "mean ℓ2 loss",
    "vs asymmetric",
    "bytes/row",
    "encode MB/s",
    "decode MB/s",
)
NOTE_ON_TORCH = (
    "torch's optimized prepack uses one whatever it is given. Medians; all contenders take turns."
)
NOTE_ON_FIGURES = (
    "`accumulator_*` is the 8-bit codec of non-negative planes on squares of such rows; "
    "`ids_*` counts the int64 bytes of ids drawn at random from that part of a range."
)


@dataclass(slots=True)
class Contender:
    """One way to quantize: what is timed, and how its rows are had back."""

    encode: Callable[[], object]
    restore: Callable[[], np.ndarray]
    nbytes_per_row: float
    decode: Callable[[], object] | None = None
    loss: float = field(default=float("nan"))


def trained_rows(rows: int, dim: int) -> np.ndarray:
    """Normal around a small mean, one value in 100 4× as large; log-normal scale per row."""
    random = np.random.default_rng(SEED)
    values = random.standard_normal((rows, dim)) + random.normal(0, 0.2, (rows, 1))
    values *= np.where(random.random((rows, dim)) < 0.01, 4, 1)
    return (values * np.exp(random.normal(-3, 0.7, (rows, 1)))).astype(np.float32)


def ours(codec: Quantized | NonNegative8, values: np.ndarray, pool: Pool) -> Contender:
    rows, width = values.shape
    buffers = codec.encode(values, pool)
    out = np.empty_like(values)
    decode = partial(codec.decode, buffers, rows=rows, width=width, out=out, pool=pool)
    nbytes = sum(buffer.nbytes for buffer in buffers.values()) / rows
    return Contender(partial(codec.encode, values, pool), decode, nbytes, decode)


def of_torch(bits: int, values: np.ndarray, optimized: bool) -> Contender:
    name = TORCH_NAMES[bits]
    weight = torch.from_numpy(values)
    pack = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")
    if optimized:
        codec = Quantized(bits=bits)
        pack = partial(pack, optimized_qparams=True, nbins=codec.bins, ratio=codec.ratio)
    packed = pack(weight)
    return Contender(
        partial(pack, weight),
        lambda: unpack(packed).numpy(),
        packed.shape[1],
        partial(unpack, packed),
    )


def uniform(values: np.ndarray, low: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    scale = (high - low) / (2**bits - 1)
    return np.rint((values - low) / scale) * scale + low


def asymmetric(values: np.ndarray, bits: int) -> np.ndarray:
    ends = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    return uniform(values, *ends, bits)


def symmetric(values: np.ndarray, bits: int) -> np.ndarray:
    high = np.abs(values).max(axis=1, keepdims=True)
    return uniform(values, -high, high, bits)


def kmeans(values: np.ndarray, bits: int) -> np.ndarray:
    """Each row's values in 2^bits clusters of their own, started at values drawn at random."""
    random = np.random.default_rng(SEED)
    rows, width = values.shape
    clusters = 2**bits
    drawn = random.permuted(np.tile(np.arange(width), (rows, 1)), axis=1)
    drawn = np.tile(drawn, (1, -(-clusters // width)))[:, :clusters]
    centres = np.take_along_axis(values, drawn, axis=1).astype(np.float64)
    base = clusters * np.arange(rows)[:, None]
    for _ in range(KMEANS_ROUNDS):
        centres.sort(axis=1)
        borders = (centres[:, 1:] + centres[:, :-1]) / 2
        label = np.zeros(values.shape, np.int64)
        for k in range(clusters - 1):
            label += values > borders[:, k : k + 1]
        at = (label + base).ravel()
        count = np.bincount(at, minlength=rows * clusters).reshape(rows, clusters)
        total = np.bincount(at, values.ravel(), rows * clusters).reshape(rows, clusters)
        centres = np.where(count > 0, total / np.maximum(count, 1), centres)
    return np.take_along_axis(centres, label, axis=1)


def mean_loss(values: np.ndarray, restored: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64) - restored, axis=1).mean())


def contenders(values: np.ndarray, many: Pool, one: Pool) -> dict[str, Contender]:
    width = values.shape[1]
    found = {}
    for bits in BITS:
        codec = Quantized(bits=bits)
        found[f"ours {bits}-bit"] = ours(codec, values, many)
        found[f"ours {bits}-bit, 1 thread"] = ours(codec, values, one)
        if bits in TORCH_NAMES:
            found[f"torch {bits}-bit"] = of_torch(bits, values, optimized=False)
        if bits in TORCH_NAMES and bits < 8:
            found[f"torch {bits}-bit optimized"] = of_torch(bits, values, optimized=True)
    for bits in BITS:
        codes = width * bits / 8
        for name, method, params in (
            ("symmetric", symmetric, 4),
            ("asymmetric", asymmetric, 8),
            ("k-means", kmeans, 4 * 2**bits),
        ):
            if name == "k-means" and 2**bits > width:
                continue  # more clusters than values: nothing would be lost, or saved
            run = partial(method, values, bits)
            found[f"{name} {bits}-bit"] = Contender(run, run, codes + params)
    for contender in found.values():
        contender.loss = mean_loss(values, contender.restore())
    return found


def is_timed(name: str) -> bool:
    return name.startswith(("ours", "torch"))


def speed(nbytes: int, ms: float) -> float:
    return nbytes / ms / 1e3


def main() -> None:
    given = options(__file__, __doc__ or "")
    repeats = 3 if given.quick else 15
    threads = default_threads()
    torch.set_num_threads(threads)
    many, one = Pool(threads), Pool(1)
    figures: dict[str, float] = {}
    table: list[list[str]] = []

    for dim in DIMS:
        values = trained_rows((BLOCK_MB << 20) // (4 * dim), dim)
        found = contenders(values, many, one)
        timed = {name: c for name, c in found.items() if is_timed(name)}
        encode_ms = interleaved_ms(
            {name: c.encode for name, c in timed.items()}, repeats=repeats, warmup=1
        )
        decode_ms = interleaved_ms(
            {name: c.decode for name, c in timed.items() if c.decode}, repeats=repeats, warmup=1
        )
        for name, contender in found.items():
            bits = int(name.split("-bit")[0].rsplit(maxsplit=1)[-1])
            plain = found[f"asymmetric {bits}-bit"].loss
            table.append(
                [
                    name,
                    str(dim),
                    f"{contender.loss:.5f}",
                    f"{contender.loss / plain:.3f}",
                    f"{contender.nbytes_per_row:.1f}",
                    f"{speed(values.nbytes, encode_ms[name]):.0f}" if name in encode_ms else "",
                    f"{speed(values.nbytes, decode_ms[name]):.0f}" if name in decode_ms else "",
                ]
            )
        for bits in (4, 2):
            peer = f"torch {bits}-bit optimized"
            own = f"ours {bits}-bit"
            at = f"{bits}bit_vs_torch_dim{dim}"
            figures[f"speed_{at}"] = encode_ms[peer] / encode_ms[own]
            figures[f"speed_1thread_{at}"] = encode_ms[peer] / encode_ms[f"{own}, 1 thread"]
            figures[f"loss_{at}"] = found[own].loss / found[peer].loss
        for bits in BITS:
            name = f"ours {bits}-bit"
            figures[f"encode_mb_per_s_{bits}bit_dim{dim}"] = speed(values.nbytes, encode_ms[name])
            figures[f"loss_{bits}bit_vs_asymmetric_dim{dim}"] = (
                found[name].loss / found[f"asymmetric {bits}-bit"].loss
            )
    figures |= accumulators(repeats, many) | ids(repeats)

    distribution = " ".join((trained_rows.__doc__ or "").split())
    report(
        given,
        config={
            "dims": list(DIMS),
            "block_mb": BLOCK_MB,
            "seed": SEED,
            "threads": threads,
            "bins_and_ratio": {
                f"{codec.bits}bit": [codec.bins, codec.ratio]
                for codec in (Quantized(bits=bits) for bits in BITS)
            },
            "kmeans_rounds": KMEANS_ROUNDS,
        },
        figures=figures,
        columns=COLUMNS,
        rows=table,
        notes=[
            f"Rows: {distribution} Seed {SEED}; nothing is tuned to them.",
            f"Both sides may use {threads} threads, except where 1 is said. {NOTE_ON_TORCH}",
            NOTE_ON_FIGURES,
        ],
    )


def accumulators(repeats: int, pool: Pool) -> dict[str, float]:
    values = trained_rows((BLOCK_MB << 20) // 256, 64) ** 2
    codec = ours(NonNegative8(), values, pool)
    ms = interleaved_ms(
        {"encode": codec.encode, "decode": codec.restore}, repeats=repeats, warmup=1
    )
    ratio = codec.restore().astype(np.float64) / values
    return {
        "accumulator_encode_mb_per_s": speed(values.nbytes, ms["encode"]),
        "accumulator_decode_mb_per_s": speed(values.nbytes, ms["decode"]),
        "accumulator_mean_relative_error": float(np.abs(ratio - 1).mean()),
    }


def ids(repeats: int) -> dict[str, float]:
    figures = {}
    random = np.random.default_rng(SEED)
    for density in DENSITIES:
        chosen = np.flatnonzero(random.random(4_000_000) < density).astype(np.int64)
        packed = pack_ids(chosen)
        ms = interleaved_ms(
            {
                "pack": partial(pack_ids, chosen),
                "unpack": partial(unpack_ids, packed, count=len(chosen)),
            },
            repeats=repeats,
            warmup=1,
        )
        of = f"{density * 100:.0f}pct"
        figures[f"ids_bits_{of}"] = 8 * len(packed) / len(chosen)
        figures[f"ids_pack_mb_per_s_{of}"] = speed(chosen.nbytes, ms["pack"])
        figures[f"ids_unpack_mb_per_s_{of}"] = speed(chosen.nbytes, ms["unpack"])
    return figures


if __name__ == "__main__":
    main()
