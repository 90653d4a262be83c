"""Padding, max pooling and an optimizer for each table: as `nn.EmbeddingBag`, on every cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.checkpoint import VersionSpec
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ConfigError
from emberkeep.repository.policies import LAYOUTS
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import Strategy
from emberkeep.tables import Optimizer, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from tests.nightly import checkered

ROWS, DIM, PADDING = 60, 6, 3
KINDS = ["local", "shards", "tier", "parity", "servers"]


class Servers:
    """Servers that are objects of this process."""

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> Cluster:
        network = LocalNetwork(VirtualClock())
        return FlightCluster(
            tables, optimizer, LocalServers(network, 2), seed=seed, pool=Pool(1),
            clock=network.clock, transport=network.transport("trainer"),
        )  # fmt: skip


Make = Callable[..., ek.EmbeddingBags]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[ek.EmbeddingBags] = []
    clusters: dict[str, Any] = {
        "local": None,
        "shards": ek.local(shards=3, threads=2),
        "tier": ek.local(shards=2),
        "parity": ek.local(shards=3, parity=ek.Parity(k=2, r=1)),
        "servers": Servers(),
    }

    def build(
        tables: list[dict[str, Any]], optimizer: Optimizer, **settings: Any
    ) -> ek.EmbeddingBags:
        tier = None
        if request.param == "tier":
            tier = ek.Tier(tmp_path / f"tier-{len(made)}", memory="1MB")
        bags = ek.EmbeddingBags(
            [Table(dim=DIM, tier=tier, **table) for table in tables], optimizer=optimizer,
            cluster=clusters[request.param], **settings,
        )  # fmt: skip
        made.append(bags)
        return bags

    yield build
    for bags in made:
        bags.cluster.close()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def jagged(seed: int, batch: int = 24, longest: int = 6) -> tuple[Tensor, Tensor]:
    """Bags with padding, ids that come twice, and none at all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (batch,), generator=generator)
    values = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
    return values, lengths.cumsum(0) - lengths


@pytest.mark.parametrize(
    ("make", "pooling", "kind", "padding"),
    checkered(KINDS, ["sum", "mean", "max"], ["fixed", "dynamic"], [None, PADDING]),
    indirect=["make"],
)
def test_bags_equal_torchs(make: Make, pooling: Any, kind: str, padding: int | None) -> None:
    size: dict[str, Any] = {"rows": ROWS} if kind == "fixed" else {"capacity": ROWS}
    ours = make([{"name": "t", "pooling": pooling, "padding_idx": padding, **size}], ek.SGD(lr=0.5))
    peer = nn.EmbeddingBag(ROWS, DIM, mode=pooling, padding_idx=padding)
    with torch.no_grad():
        peer.weight.copy_(ours.rows("t", torch.arange(ROWS))["weight"])
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.5)
    before = bits(ours.rows("t", [PADDING])["weight"])
    for step in range(6):
        batch: Any = jagged(step)
        if step % 3 == 1:
            batch = torch.randint(0, 9, (10, 4), generator=torch.Generator().manual_seed(step))
        if step % 3 == 2:  # one id for each sample, some of them padding
            batch = torch.arange(10) % 5
        theirs = peer(*batch) if isinstance(batch, tuple) else peer(batch.reshape(10, -1))
        out = ours({"t": batch})[:, 0]
        if pooling == "max":  # torch defines it to the bit: nothing is added
            assert bits(out) == bits(theirs)
        torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-6)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        out.backward(grad)
        ours.optimizer.step()
        optimizer.zero_grad()
        theirs.backward(grad)
        optimizer.step()
        rows = ours.rows("t", torch.arange(ROWS))["weight"]
        torch.testing.assert_close(rows, peer.weight.detach(), rtol=1e-5, atol=1e-6)
        with torch.no_grad():  # rounding of the step must not change which is the largest
            peer.weight.copy_(rows)
    assert (bits(ours.rows("t", [PADDING])["weight"]) == before) == (padding is not None)
    assert (PADDING in ours.touched_ids("t")) == (padding is None)


def test_sum_and_max_share_a_slab_and_the_norm_counts_both(make: Make) -> None:
    ours = make(
        [{"name": "a", "rows": ROWS, "pooling": "max"}, {"name": "b", "rows": ROWS}], ek.SGD(lr=1.0)
    )
    out = ours({"a": jagged(1), "b": jagged(2)})
    out.square().sum().backward()
    total = float(nn.utils.clip_grad_norm_(ours.parameters(), 1e9))
    before = {t: ours.rows(t, torch.arange(ROWS))["weight"] for t in "ab"}
    ours.optimizer.step()
    moved = [(before[t] - ours.rows(t, torch.arange(ROWS))["weight"]).square().sum() for t in "ab"]
    assert total == pytest.approx(float(sum(moved)) ** 0.5, rel=1e-4)


def test_weights_of_padding_have_no_gradient(make: Make) -> None:
    ours = make([{"name": "t", "rows": ROWS, "padding_idx": PADDING}], ek.SGD(lr=0.1))
    peer = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=PADDING)
    with torch.no_grad():
        peer.weight.copy_(ours.rows("t", torch.arange(ROWS))["weight"])
    ids = torch.tensor([[1, PADDING, 2], [PADDING, PADDING, 4]])
    scales = [torch.full((2, 3), 2.0, requires_grad=True) for _ in range(2)]
    ours({"t": ids}, per_sample_weights={"t": scales[0]}).square().sum().backward()
    peer(ids, per_sample_weights=scales[1]).square().sum().backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad)


def test_padding_without_pooling_is_zero_and_untrained() -> None:
    tables = [Table("t", rows=ROWS, dim=DIM, padding_idx=-1)]
    ours = ek.Embeddings(tables, optimizer=ek.SGD(lr=0.1))
    ids = torch.tensor([[1, ROWS - 1], [ROWS - 1, 2]])
    out = ours({"t": ids})["t"]
    assert out.shape == (2, 2, DIM)
    assert not out[ids == ROWS - 1].any()
    assert bits(out[0, 0]) == bits(ours.rows("t", [1])["weight"])
    out.sum().backward()
    ours.optimizer.step()
    assert ours.touched_ids("t").tolist() == [1, 2]


@pytest.mark.parametrize(("make", "layout"), checkered(KINDS, LAYOUTS), indirect=["make"])
@pytest.mark.long
def test_each_table_may_have_its_own_optimizer(make: Make, layout: Any, tmp_path: Path) -> None:
    adam, slow = ek.Adam(lr=0.02), ek.SGD(lr=0.001)
    specs = {"a": None, "b": adam, "c": slow, "d": adam}
    tables = [{"name": t, "rows": ROWS, "optimizer": spec} for t, spec in specs.items()]
    together = make(tables, ek.Adagrad(lr=0.1))
    alone = {
        t: ek.EmbeddingBags([Table(t, rows=ROWS, dim=DIM)], optimizer=spec or ek.Adagrad(lr=0.1))
        for t, spec in specs.items()
    }
    groups = together.optimizer.param_groups
    assert [(g["lr"], g["tables"]) for g in groups] == [
        (0.1, ["a"]), (0.02, ["b", "d"]), (0.001, ["c"]),
    ]  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(together.optimizer, 2, gamma=0.5)

    def train(step: int) -> None:
        batch = {t: jagged(10 * step + n) for n, t in enumerate(specs)}
        out = together(batch)
        assert out.shape == (24, 4, DIM)
        out.square().sum().backward()
        together.optimizer.step()
        schedule.step()
        for t, bags in alone.items():
            bags({t: batch[t]}).square().sum().backward()
            bags.optimizer.step()
            if step % 2:
                bags.optimizer.param_groups[0]["lr"] *= 0.5

    def state(t: str) -> list[bytes]:
        keys = [k for k in alone[t].state_dict() if not k.endswith("origin")]
        assert keys == [k for k in together.state_dict() if f".{t}." in k and "origin" not in k]
        pairs = [(together.state_dict()[key], alone[t].state_dict()[key]) for key in keys]
        for own, other in pairs:
            assert bits(own) == bits(other)
        return [bits(own) for own, _ in pairs]

    strategy = Strategy(spec=VersionSpec(layout=layout))
    keeper = ek.Keeper(tmp_path / "run", together, together.optimizer, strategy=strategy)
    keeper.resume()
    for step in range(4):
        train(step)
        keeper.step()
        keeper.save()
        keeper.wait()
    held = {t: state(t) for t in specs}
    keeper.close()
    # A version brings back what it holds.
    out = together({t: torch.arange(5) for t in specs})
    out.sum().backward()
    together.optimizer.step()
    again = ek.Keeper(tmp_path / "run", together, together.optimizer, strategy=strategy)
    assert again.resume() is not None
    assert {t: state(t) for t in specs} == held
    again.close()


def test_what_cannot_be_is_refused_when_it_is_written_down() -> None:
    with pytest.raises(ConfigError, match="'sum', 'mean' or 'max'"):
        Table("t", rows=3, dim=2, pooling="min")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="padding_idx=7 is outside of its 3 rows"):
        Table("t", rows=3, dim=2, padding_idx=7)
    with pytest.raises(ConfigError, match="padding_idx is an id"):
        Table("t", rows=3, dim=2, padding_idx=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"emberkeep\.Adagrad"):
        Table("t", rows=3, dim=2, optimizer=torch.optim.SGD)  # type: ignore[arg-type]
    assert Table("t", rows=3, dim=2, padding_idx=-1).padding_idx == 2
    assert Table("t", capacity=3, dim=2, padding_idx=-1).padding_idx == -1
    bags = ek.EmbeddingBags([Table("t", rows=3, dim=2, pooling="max")], optimizer=ek.SGD(lr=1))
    with pytest.raises(ConfigError, match="a max of weighted rows is not defined"):
        bags({"t": torch.ones(2, 2).long()}, per_sample_weights={"t": torch.ones(2, 2)})


def test_padding_may_be_an_integer_of_numpys() -> None:
    padding = ek.Table("t", rows=9, dim=2, padding_idx=np.int64(-1)).padding_idx  # type: ignore[arg-type]
    assert padding == 8
    assert type(padding) is int
    for wrong in (1.0, True, "1"):
        with pytest.raises(ConfigError, match="padding_idx is an id"):
            ek.Table("t", rows=9, dim=2, padding_idx=wrong)  # type: ignore[arg-type]


class Jagged:
    """A KeyedJaggedTensor of one feature, with weights."""

    def __init__(self, weights: Tensor | None) -> None:
        self._weights = weights

    def keys(self) -> list[str]:
        return ["t"]

    def values(self) -> Tensor:
        return torch.tensor([1, 2, 3])

    def lengths(self) -> Tensor:
        return torch.tensor([2, 1])

    def weights_or_none(self) -> Tensor | None:
        return self._weights


def test_weights_of_samples_are_refused_where_they_would_weigh_nothing() -> None:
    bags = ek.EmbeddingBags([Table("t", rows=ROWS, dim=DIM)], optimizer=ek.SGD(lr=1.0))
    weights = torch.tensor([2.0, 2.0, 2.0])
    with pytest.raises(ConfigError, match="given for typo; the features are t"):
        bags({"t": torch.tensor([1, 2, 3])}, {"typo": weights})
    with pytest.raises(ConfigError, match="weights of its own"):
        bags(Jagged(weights), {"t": weights})
    plain, weighted = bags(Jagged(None)), bags(Jagged(weights))
    assert torch.allclose(2 * plain, weighted)
    assert torch.equal(bags(Jagged(None), {"t": weights}), weighted)


def test_rows_that_are_not_pooled_are_not_weighed() -> None:
    rows = ek.Embeddings([Table("t", rows=ROWS, dim=DIM)], optimizer=ek.SGD(lr=1.0))
    before = rows.rows("t", [1, 2, 3])["weight"]
    weights = torch.full((3,), 2.0, requires_grad=True)
    found = rows(Jagged(weights))["t"]
    assert torch.equal(found, before)
    found.sum().backward()
    rows.optimizer.step()
    assert weights.grad is None
    assert torch.allclose(rows.rows("t", [1, 2, 3])["weight"], before - 1.0)
