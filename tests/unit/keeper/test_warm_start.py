"""Models that have changed since a version: what fits comes back, everything else is named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.checkpoint import VersionSpec
from emberkeep.data import Reader, Synthetic
from emberkeep.errors import ConfigError, NoVersionError, StateError
from emberkeep.keeper.warm_start import WarmStart
from emberkeep.repository.policies import LAYOUTS
from emberkeep.strategies import Strategy
from tests.nightly import checkered
from tests.unit.nn.test_pooling import Servers

ROWS = 50
CLUSTERS: dict[str, Any] = {
    "local": None,
    "shards": ek.local(shards=3),
    "parity": ek.local(shards=3, parity=ek.Parity(k=2, r=1)),
    "servers": Servers(),
}


class Net(nn.Module):
    """`tables` are {name: settings}; `layers` {name: (in, out)}."""

    def __init__(
        self,
        tables: dict[str, dict[str, Any]],
        layers: dict[str, tuple[int, int]],
        optimizer: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        made = [ek.Table(name, **{"rows": ROWS, "dim": 4} | s) for name, s in tables.items()]
        self.bags = ek.EmbeddingBags(
            made, optimizer=optimizer or ek.Adagrad(lr=0.1), output="dict", **settings
        )
        torch.manual_seed(3)
        self.layers = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in layers.items()})
        self.dense = torch.optim.Adam(self.layers.parameters(), lr=0.01)

    def train_steps(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            ids = {f: torch.randint(0, 40, (8,), generator=generator) for f in self.bags.features}
            loss = sum(out.square().sum() for out in self.bags(ids).values())
            for layer in self.layers.values():
                loss = loss + layer(torch.ones(1, layer.in_features)).square().sum()
            loss.backward()
            for optimizer in (self.dense, self.bags.optimizer):
                optimizer.step()
                optimizer.zero_grad()

    def keeper(self, where: Any, **settings: Any) -> ek.Keeper:
        return ek.Keeper(where, self, self.dense, **settings)

    def planes(self, table: str) -> dict[str, Tensor]:
        (rows,) = [t.rows for t in self.bags.tables if t.name == table]
        return self.bags.rows(table, torch.arange(min(40, rows or 40)))


def saved(where: Path, net: Net, **settings: Any) -> Net:
    keeper = net.keeper(where, **settings)
    keeper.resume()
    for step in range(3):
        net.train_steps(step, 1)
        keeper.step()
        keeper.save()
        keeper.wait()
    keeper.close()
    return net


def started(net: Net, tmp_path: Path, **given: Any) -> WarmStart:
    keeper = net.keeper(tmp_path / "new")
    start = keeper.resume(source=tmp_path / "old", partial=True, **given)
    assert isinstance(start, WarmStart)
    assert keeper.steps == start.step == 3
    # What was started from is the run's own from its first version on.
    before = {t.name: net.planes(t.name) for t in net.bags.tables}
    keeper.save()
    keeper.close()
    again = keeper_again(net, tmp_path)
    for table, planes in before.items():
        assert equal(net.planes(table), planes)
    again.close(save=False)
    return start


def keeper_again(net: Net, tmp_path: Path) -> ek.Keeper:
    keeper = net.keeper(tmp_path / "new")
    kept = keeper.resume(source=tmp_path / "old", partial=True)
    assert kept is not None
    assert not isinstance(kept, WarmStart)
    return keeper


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(("layout", "cluster"), checkered(LAYOUTS, list(CLUSTERS)))
@pytest.mark.long
def test_a_table_added_another_removed_a_third_renamed(
    layout: Any, cluster: str, tmp_path: Path
) -> None:
    where = {"cluster": CLUSTERS[cluster]}
    strategy = Strategy(spec=VersionSpec(layout=layout))
    old = saved(
        tmp_path / "old", Net({"a": {}, "b": {}, "c": {}}, {"top": (3, 2)}, **where),
        strategy=strategy,
    )  # fmt: skip
    new = Net({"a": {}, "renamed": {}, "added": {}}, {"top": (3, 2)}, **where)
    fresh = new.planes("added")
    start = started(new, tmp_path, map={"b": "renamed"})
    assert equal(new.planes("a"), old.planes("a"))
    ids = old.bags.touched_ids("b")
    assert equal(new.bags.rows("renamed", ids), old.bags.rows("b", ids))
    assert torch.equal(new.bags.touched_ids("renamed"), ids)
    assert equal(new.planes("added"), fresh)
    assert set(start.rows) == {"a", "renamed"}
    assert start.rows["renamed"] == ids.numel()
    never = "rows that were never trained start by this model's name, seed and init"
    assert list(start.skipped) == [
        "table 'added' is not in the version: it starts as it is",
        "table 'c' of the version is not in the model",
        f"table 'renamed' (was 'b'): {never}",
    ]
    assert len(repr(start)) < 400
    assert "skipped: table 'added'" in repr(start)
    # Steps of tables went along, the optimizer's of dense layers, too.
    for net in (old, new):
        net.bags.requires_grad_(False)
        net.train_steps(9, 2)
    assert torch.equal(new.layers["top"].weight, old.layers["top"].weight)
    for net in (old, new):
        net.bags.cluster.close()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_table_widened_by_columns_and_rows(cluster: str, tmp_path: Path) -> None:
    where = {"cluster": CLUSTERS[cluster]}
    tables = {"wide": {}, "narrow": {"dim": 8}, "longer": {}, "shorter": {}}
    old = saved(tmp_path / "old", Net(tables, LAYER, **where))
    changed = {
        "wide": {"dim": 6}, "narrow": {"dim": 3}, "longer": {"rows": 200}, "shorter": {"rows": 20},
    }  # fmt: skip
    new = Net(changed, LAYER, **where)
    fresh = new.planes("wide")["weight"]
    start = started(new, tmp_path)
    was, now = old.planes("wide"), new.planes("wide")
    ids = old.bags.touched_ids("wide")
    assert torch.equal(
        new.bags.rows("wide", ids)["weight"][:, :4], old.bags.rows("wide", ids)["weight"]
    )
    assert torch.equal(now["accumulator"][:, :4], was["accumulator"])
    assert torch.equal(now["weight"][:, 4:], fresh[:, 4:])
    assert not now["accumulator"][:, 4:].any()
    assert torch.equal(new.planes("narrow")["weight"], old.planes("narrow")["weight"][:, :3])
    assert equal(new.planes("longer"), old.planes("longer"))
    first = torch.arange(20)
    assert equal(new.bags.rows("shorter", first), old.bags.rows("shorter", first))
    outside = int((old.bags.touched_ids("shorter") >= 20).sum())
    assert list(start.skipped) == [
        "table 'wide': dim was 4, is 6: new columns start as they are",
        "table 'narrow': dim was 8, is 3: the last columns were left out",
        f"table 'shorter': {outside} rows of the version are outside of it",
    ]
    for net in (old, new):
        net.bags.cluster.close()


LAYER = {"top": (3, 2)}


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (
            ek.Adagrad(lr=0.1), ek.Adam(lr=0.02),
            ["plane 'first_moment' is not", "plane 'second_moment' is not", "'accumulator' of the"],
        ),
        (ek.Adagrad(lr=0.1), ek.RowWiseAdagrad(lr=0.02), ["'accumulator' is not", "was left"]),
        (ek.Adam(lr=0.1), ek.SGD(lr=0.02), ["'first_moment' of", "'second_moment' of"]),
    ],
)  # fmt: skip
def test_an_optimizer_changed(before: Any, after: Any, lines: list[str], tmp_path: Path) -> None:
    old = saved(tmp_path / "old", Net({"a": {}}, LAYER, before))
    new = Net({"a": {}}, LAYER, after)
    start = started(new, tmp_path)
    assert torch.equal(new.planes("a")["weight"], old.planes("a")["weight"])
    assert new.bags.optimizer.param_groups[0]["lr"] == 0.02
    assert new.bags.cluster.steps("a") == 0
    for line, said in zip(lines, start.skipped[: len(lines)], strict=True):
        assert line in said
    assert start.skipped[-1] == "the optimizer of rows: settings such as lr stay as they are"


def test_layers_added_renamed_widened_and_removed_in_the_same_repository(tmp_path: Path) -> None:
    layers = {"same": (3, 2), "old": (3, 4), "wide": (3, 2), "gone": (2, 2)}
    old = saved(tmp_path, Net({"a": {}}, layers))
    new = Net({"a": {}}, {"same": (3, 2), "new": (3, 4), "wide": (5, 2), "added": (1, 1)})
    fresh = {name: layer.weight.clone() for name, layer in new.layers.items()}
    with pytest.raises(StateError, match="does not fit"):
        new.keeper(tmp_path).resume()
    keeper = new.keeper(tmp_path)
    start = keeper.resume(partial=True, map={"layers.old": "layers.new"})
    assert isinstance(start, WarmStart)
    assert equal(new.planes("a"), old.planes("a"))
    for name, was in (("same", "same"), ("new", "old")):
        assert torch.equal(new.layers[name].weight, old.layers[was].weight)
        own = new.dense.state[new.layers[name].weight]
        assert torch.equal(own["exp_avg"], old.dense.state[old.layers[was].weight]["exp_avg"])
    for name in ("wide", "added"):
        assert torch.equal(new.layers[name].weight, fresh[name])
    assert {line for line in start.skipped if line.startswith("tensor")} == {
        "tensor 'layers.added.weight' is not in the version",
        "tensor 'layers.added.bias' is not in the version",
        "tensor 'layers.gone.weight' of the version is not in the model",
        "tensor 'layers.gone.bias' of the version is not in the model",
        "tensor 'layers.wide.weight' was float32 [2, 3], is float32 [2, 5]",
    }
    assert any("'layers.wide.weight' has another shape" in line for line in start.skipped)
    new.train_steps(5, 1)
    keeper.step()
    keeper.close()
    again = new.keeper(tmp_path)
    kept = again.resume()
    assert kept is not None
    assert kept.step == 4
    again.close(save=False)


def test_tables_of_torchs_own(tmp_path: Path) -> None:
    class Torch(nn.Module):
        def __init__(self, **sizes: tuple[int, int]) -> None:
            super().__init__()
            for name, size in sizes.items():
                setattr(self, name, nn.Embedding(*size, sparse=True))

    old = Torch(a=(30, 4), b=(30, 4))
    keeper = ek.Keeper(tmp_path / "old", old, torch.optim.Adagrad(old.parameters(), lr=0.1))
    keeper.resume()
    keeper.close()
    keeper.close()
    new = Torch(a=(40, 6), c=(30, 4), d=(5, 2))
    fresh = {name: module.weight.clone() for name, module in new.named_children()}
    keeper = ek.Keeper(tmp_path / "new", new, torch.optim.Adagrad(new.parameters(), lr=0.1))
    old_keeper = ek.Keeper(tmp_path / "old", old, torch.optim.Adagrad(old.parameters(), lr=0.1))
    old_keeper.start_over()
    old_keeper.save()
    old_keeper.close()
    start = keeper.resume(source=tmp_path / "old", partial=True, map={"b": "c"})
    assert isinstance(start, WarmStart)
    assert torch.equal(new.a.weight[:30, :4], old.a.weight)
    assert torch.equal(new.a.weight[30:], fresh["a"][30:])
    assert torch.equal(new.a.weight[:30, 4:], fresh["a"][:30, 4:])
    assert torch.equal(new.c.weight, old.b.weight)
    assert torch.equal(new.d.weight, fresh["d"])
    assert "table 'd' is not in the version: it starts as it is" in start.skipped
    keeper.close()


def test_a_reader_of_other_data_starts_over_and_is_named(tmp_path: Path) -> None:
    def net() -> tuple[Net, Reader]:
        return Net({"a": {}}, LAYER), Reader(Synthetic(samples=64, rows_total=200), batch_size=8)

    old, reader = net()
    keeper = old.keeper(tmp_path / "old", reader=reader)
    keeper.resume()
    next(iter(reader))
    keeper.step()
    keeper.close()
    new, _ = net()
    other = Reader(Synthetic(samples=64, rows_total=200, seed=7), batch_size=8)
    keeper = new.keeper(tmp_path / "new", reader=other)
    start = keeper.resume(source=tmp_path / "old", partial=True)
    assert isinstance(start, WarmStart)
    (line,) = start.skipped
    assert line.startswith("the data starts over")
    keeper.close()


def test_what_is_misspelt_or_missing_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "old", Net({"a": {}}, LAYER))
    new = Net({"b": {}}, LAYER)
    before = new.planes("b")
    keeper = new.keeper(tmp_path / "new")
    old = tmp_path / "old"
    with pytest.raises(ConfigError, match="'x', which is no table or tensor of the version"):
        keeper.resume(source=old, partial=True, map={"x": "b"})
    with pytest.raises(ConfigError, match="'y', which is no table or tensor of the model"):
        keeper.resume(source=old, partial=True, map={"a": "y"})
    with pytest.raises(ConfigError, match="add partial=True"):
        keeper.resume(source=old, map={"a": "b"})
    with pytest.raises(
        StateError, match=r"table 'a' of the repository is not in the model.*source="
    ):
        keeper.resume(source=old)
    with pytest.raises(NoVersionError, match="no tag 'best': there are no tags"):
        keeper.resume("best", source=old, partial=True)
    assert equal(new.planes("b"), before)
    with pytest.raises(StateError, match=r"source="):
        new.keeper(old)
    keeper.close(save=False)


# -- tags ----------------------------------------------------------------------------------------


def test_a_version_by_its_tag(tmp_path: Path) -> None:
    net = Net({"a": {}}, LAYER)
    keeper = net.keeper(tmp_path, strategy=ek.incremental(every=10**9, keep=1))
    keeper.resume()
    with pytest.raises(NoVersionError, match="no version yet"):
        keeper.tag("best")
    states = []
    for step in range(4):
        net.train_steps(step, 1)
        keeper.step()
        keeper.save()
        states.append(net.planes("a"))
        if step in (0, 2):
            tagged = keeper.tag("best")
            assert tagged is not None
            assert tagged.step == step + 1
    assert keeper.tag("first", 1) is not None
    with pytest.raises(ConfigError, match="begin with a letter"):
        keeper.tag("7")
    keeper.close()
    again = net.keeper(tmp_path)
    kept = again.resume("best")
    assert kept is not None
    assert kept.step == 3
    assert len(repr(kept)) < 160
    assert equal(net.planes("a"), states[2])
    assert again.resume("first") is not None
    assert equal(net.planes("a"), states[0])
    with pytest.raises(NoVersionError, match="no tag 'worst': there are best, first"):
        again.resume("worst")
    again.close(save=False)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty path"):
        Net({"a": {}}, LAYER).keeper("")


def test_a_damaged_version_names_the_way_round(tmp_path: Path) -> None:
    from emberkeep.errors import DamageError

    net = saved(tmp_path, Net({"a": {}}, LAYER))
    newest = sorted((tmp_path / "data").rglob("*"), key=lambda p: p.stat().st_mtime)
    for path in [p for p in newest if p.is_file()][-2:]:
        path.write_bytes(b"x" * path.stat().st_size)
    keeper = net.keeper(tmp_path)
    with pytest.raises(DamageError, match="fall_back=True takes the newest intact version"):
        keeper.resume()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert keeper.resume(fall_back=True) is not None
    keeper.close(save=False)


# -- names that meet -----------------------------------------------------------------------------


def rates_of(bags: ek.EmbeddingBags) -> dict[str, float]:
    """How far the first step moves a row of each table; Adagrad's is as long as the rate."""
    before = {name: bags.rows(name, [0])["weight"] for name in bags.features}
    bags({name: torch.tensor([0]) for name in bags.features}).sum().backward()
    bags.optimizer.step()
    moved = {name: before[name] - bags.rows(name, [0])["weight"] for name in bags.features}
    return {name: round(float(by[0, 0]), 4) for name, by in moved.items()}


@pytest.mark.parametrize("partial", [False, True])
def test_rates_go_with_their_tables_in_whatever_order(partial: bool, tmp_path: Path) -> None:
    """Tables in another order have groups in another order: rates went by the place."""
    first = ek.Table("a", rows=4, dim=2)
    second = ek.Table("b", rows=4, dim=2, optimizer=ek.Adagrad(lr=0.5))
    bags = ek.EmbeddingBags([first, second], optimizer=ek.Adagrad(lr=0.1))
    for group, lr in zip(bags.optimizer.param_groups, (0.25, 0.75), strict=True):
        group["lr"] = lr
    with ek.Keeper(tmp_path / "old", bags, bags.optimizer) as keeper:
        keeper.resume()
        keeper.step()
        keeper.save()
    other = ek.EmbeddingBags([second, first], optimizer=ek.Adagrad(lr=0.1))
    where = tmp_path / ("new" if partial else "old")
    with ek.Keeper(where, other, other.optimizer) as keeper:
        keeper.resume(**({"source": tmp_path / "old", "partial": True} if partial else {}))
    assert rates_of(other) == {"a": 0.25, "b": 0.75}


class Towers(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        for name in names:
            self.add_module(name, nn.Linear(2, 2))


def test_a_name_that_is_mapped_goes_before_one_that_is_there(tmp_path: Path) -> None:
    before, after = Towers("tower", "encoder"), Towers("encoder")
    with ek.Keeper(tmp_path / "old", before, torch.optim.SGD(before.parameters(), 0.1)) as keeper:
        keeper.resume()
        keeper.step()
        keeper.save()
    with ek.Keeper(tmp_path / "new", after, torch.optim.SGD(after.parameters(), 0.1)) as keeper:
        with pytest.raises(ConfigError, match="the same name 'encoder'"):
            keeper.resume(
                source=tmp_path / "old", partial=True,
                map={"tower": "encoder", "encoder": "encoder"},
            )  # fmt: skip
        start = keeper.resume(source=tmp_path / "old", partial=True, map={"tower": "encoder"})
    assert torch.equal(after.encoder.weight, before.tower.weight)  # type: ignore[union-attr,arg-type]
    assert isinstance(start, WarmStart)
    assert any("'encoder.weight' of the version gives way" in line for line in start.skipped)


def test_what_resume_returns_prints_in_one_line(tmp_path: Path) -> None:
    net = Towers("tower")
    for _ in range(2):
        with ek.Keeper(tmp_path / "r", net, torch.optim.SGD(net.parameters(), 0.1)) as keeper:
            kept = keeper.resume()
            keeper.step()
            keeper.save()
    assert len(repr(kept)) < 160
    assert "step 1" in repr(kept)
