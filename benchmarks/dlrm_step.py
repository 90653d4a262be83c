"""A whole training step of DLRM, with torch's embeddings and with Emberkeep's.

The same network (Kaggle shape), the same batches, Adagrad everywhere; only the embeddings differ:
26 `nn.EmbeddingBag(sparse=True)` with `torch.optim.Adagrad`, or `emberkeep.EmbeddingBags`. Both
take turns within one run. The parts are timed separately: the dense part is forward and backward of
the network on given vectors plus its update; the embedding part is lookup, backward and update of
rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import emberkeep as ek
from _common import criteo_batches, interleaved_ms, options, report
from emberkeep.models import DLRM, KAGGLE, Ids

TABLES, ROWS, BATCH, DENSE = 26, 200_000, 2048, 13
DIM = KAGGLE.dim
LR = 0.01
FEATURES = tuple(f"C{table + 1}" for table in range(TABLES))
BATCHES = 16  # different ones in turn, so that no batch is found in the processor's caches


class TorchBags(nn.Module):
    """What a user of plain torch has: one sparse `EmbeddingBag` per table."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.register_buffer("offsets", torch.arange(BATCH))

    def forward(self, ids: Ids) -> Tensor:
        bags = zip(self.bags, FEATURES, strict=True)
        return torch.stack([bag(ids[name], self.offsets) for bag, name in bags], dim=1)


def whole_step(
    model: DLRM, optimizers: list[torch.optim.Optimizer], feed: Callable[[], tuple]
) -> Callable[[], None]:
    loss_of = nn.BCEWithLogitsLoss()

    def run() -> None:
        dense, ids, labels = feed()
        loss_of(model(dense, ids), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return run


def dense_step(
    model: DLRM, optimizer: torch.optim.Optimizer, feed: Callable[[], tuple]
) -> Callable[[], None]:
    loss_of = nn.BCEWithLogitsLoss()
    vectors = torch.randn(BATCH, TABLES, DIM).mul_(0.05).requires_grad_()

    def run() -> None:
        dense, _, labels = feed()
        loss_of(model.head(dense, vectors), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        vectors.grad = None

    return run


def embedding_step(
    bags: nn.Module, optimizer: torch.optim.Optimizer, feed: Callable[[], tuple]
) -> Callable[[], None]:
    gradient = torch.randn(BATCH, TABLES, DIM).mul_(1e-4)

    def run() -> None:
        _, ids, _ = feed()
        bags(ids).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    torch.manual_seed(0)
    made = criteo_batches(FEATURES, rows=ROWS, batch=BATCH, dense=DENSE, count=BATCHES)

    def feed() -> Callable[[], tuple]:
        turn = iter(range(1 << 60))
        return lambda: made[next(turn) % BATCHES]

    tables = [ek.Table(name, rows=ROWS, dim=DIM) for name in FEATURES]
    ours = ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=LR))
    torch_bags = TorchBags()
    model_ours, model_torch = DLRM(ours, KAGGLE), DLRM(torch_bags, KAGGLE)
    torch_optimizer = torch.optim.Adagrad(torch_bags.parameters(), lr=LR)

    def network_optimizer(model: DLRM) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=LR)

    dense_ours = network_optimizer(model_ours)
    dense_torch = network_optimizer(model_torch)
    taken = interleaved_ms(
        {
            "torch": whole_step(model_torch, [torch_optimizer, dense_torch], feed()),
            "emberkeep": whole_step(model_ours, [ours.optimizer, dense_ours], feed()),
            "torch embeddings": embedding_step(torch_bags, torch_optimizer, feed()),
            "emberkeep embeddings": embedding_step(ours, ours.optimizer, feed()),
            "dense": dense_step(model_ours, dense_ours, feed()),
        },
        repeats=30 if given.quick else 100,
        warmup=5,
    )

    def row(title: str, whole: float, part: float) -> list[str]:
        return [title, f"{BATCH / whole * 1e3:,.0f}", *(f"{ms:.1f}" for ms in (whole, part))]

    report(
        given,
        config={
            "tables": TABLES,
            "rows_per_table": ROWS,
            "dim": DIM,
            "batch": BATCH,
            "optimizer": "adagrad",
            "ids": "zipf 1.05",
            "bottom": list(KAGGLE.bottom),
            "top": list(KAGGLE.top),
            "threads": torch.get_num_threads(),
        },
        figures={
            "samples_per_second": BATCH / taken["emberkeep"] * 1e3,
            "torch_samples_per_second": BATCH / taken["torch"] * 1e3,
            "step_ms": taken["emberkeep"],
            "torch_step_ms": taken["torch"],
            "embedding_ms": taken["emberkeep embeddings"],
            "torch_embedding_ms": taken["torch embeddings"],
            "dense_ms": taken["dense"],
            "speedup_vs_torch": taken["torch"] / taken["emberkeep"],
        },
        columns=["embeddings", "samples/s", "step ms", "of it embeddings ms"],
        rows=[
            row("torch, 26 EmbeddingBag(sparse=True)", taken["torch"], taken["torch embeddings"]),
            row("emberkeep", taken["emberkeep"], taken["emberkeep embeddings"]),
        ],
        notes=[f"The dense part takes {taken['dense']:.1f} ms of either step."],
    )


if __name__ == "__main__":
    main()
