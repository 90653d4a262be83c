"""A loop of one's own over shards that fail: at every store operation, in saves and recoveries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import Buffer, MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.errors import ConfigError, NoVersionError, RecoveryError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.strategies import Every
from tests.nightly import checkered, some

STEPS = 12


class Batches:
    """A reader with a place: batches of ids that follow from their number."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < STEPS:
            self.place += 1
            random = np.random.default_rng(self.place)
            ids = random.integers(0, 60, (2, 16))
            yield {"user": torch.from_numpy(ids[0]), "item": torch.from_numpy(ids[1])}

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Model(nn.Module):
    """Two modules of rows, each with shards of its own, and a dense layer."""

    def __init__(self, failures: tuple[Any, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = ek.EmbeddingBags(
            [ek.Table("user", rows=60, dim=4)],
            optimizer=ek.Adam(lr=0.1),
            cluster=ek.local(shards=3, failures=failures),
        )
        self.items = ek.EmbeddingBags(
            [ek.Table("item", rows=None, capacity=100, dim=4)],
            optimizer=ek.Adagrad(lr=0.1),
            cluster=ek.local(shards=2),
        )
        self.dense = nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, batch: Any) -> torch.Tensor:
        rows = torch.cat([self.users(batch)[:, 0], self.items(batch)[:, 0]], 1)
        return self.dense(self.dropout(rows))

    def kill(self, *shards: int) -> None:
        for cluster, first in ((self.users.cluster, 0), (self.items.cluster, 3)):
            count = cluster.shard_count
            lost_here = [s - first for s in shards if first <= s < first + count]
            cluster.kill(*lost_here)  # type: ignore[attr-defined]

    def bits(self) -> dict[str, bytes]:
        return {name: value.numpy().tobytes() for name, value in self.state_dict().items()}


class HookedStore(MemoryStore):
    """Calls a function before each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str, str], None] = lambda operation, name: None

    def put(self, name: str, data: Any) -> int:
        self.before("put", name)
        return super().put(name, data)

    def put_if_absent(self, name: str, data: Any) -> bool:
        self.before("put", name)
        return super().put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        self.before("get", name)
        return super().get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        self.before("get", name)
        return super().get_range(name, start, length)


def keeper_of(model: Model, store: Any, strategy: Any, **more: Any) -> ek.Keeper:
    optimizers = [
        model.users.optimizer, model.items.optimizer,
        torch.optim.Adam(model.dense.parameters(), lr=0.01),
    ]  # fmt: skip
    more = {"total_steps": STEPS, **more}
    return ek.Keeper(store, model, optimizers, reader=Batches(), strategy=strategy, **more)


def train(model: Model, keeper: ek.Keeper, at: dict[int, Any] | None = None) -> list[int]:
    """The documented loop; returns the batches that were trained on."""
    seen: list[int] = []
    keeper.resume()
    while True:
        for batch in keeper.batches():
            with keeper.surviving():
                action = (at or {}).pop(keeper.reader.place, None)
                if action:
                    keeper._saver.join()  # type: ignore[union-attr]
                    action()
                model(batch).sum().backward()
                for optimizer in keeper._parts.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(keeper.reader.place)
                keeper.step()
        with keeper.surviving():
            keeper.close()
            return seen


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, bytes]:
    model = Model()
    train(model, keeper_of(model, MemoryStore(), ek.incremental(every=5)))
    return model.bits()


FULL = ek.incremental(every=3, layout="consecutive", recovery="full")
PARTIAL = ek.partial(every=3, priority=None)
RANKED = ek.partial(every=6, priority="mfu", fraction=0.5)
KINDS: list[Any] = [FULL, PARTIAL, RANKED]


@pytest.mark.parametrize(
    ("lost", "step"), checkered([(0,), (4,), (1, 2, 3), (0, 1, 2, 3, 4)], [1, 3, 4, 12])
)
@pytest.mark.long
def test_full_recovery_takes_everything_back(
    lost: tuple[int, ...], step: int, uninterrupted: dict[str, bytes]
) -> None:
    model = Model()
    events: list[Any] = []
    keeper = keeper_of(
        model, MemoryStore(), FULL, on_event=lambda name, details: events.append((name, details))
    )
    seen = train(model, keeper, {step: lambda: model.kill(*lost)})
    assert model.bits() == uninterrupted
    back = (step - 1) // 3 * 3
    (details,) = [details for name, details in events if name == "recovered"]
    assert (details["shards"], details["step"]) == (lost, back)
    assert details["repeated_steps"] == step - 1 - back
    if step - 1 == back and len(lost) < 5 and not {3, 4} <= set(lost):
        # Nothing was trained since the version, and survivors know it.
        assert details["scope"] == "partial"
        assert "no row was trained since" in details["reason"]
        assert seen == [*range(1, STEPS + 1)]
    else:
        assert details["scope"] == "full"
        assert seen == [*range(1, step), *range(back + 1, STEPS + 1)]
    recoveries = keeper.recoveries()
    assert recoveries is not None
    assert (recoveries.failures, recoveries.pls) == (len(lost), 0.0)


@pytest.mark.parametrize("strategy", [PARTIAL, RANKED], ids=["whole", "prioritised"])
def test_partial_recovery_is_not_noticed_by_the_loop(strategy: Any) -> None:
    model = Model(failures=(ek.fail_at(1, step=6, when="push"),))
    store = MemoryStore()
    keeper = keeper_of(model, store, strategy)
    seen = train(model, keeper, {9: lambda: model.kill(3, 4)})
    assert seen == [*range(1, STEPS + 1)]
    recoveries = keeper.recoveries()
    assert recoveries is not None
    assert (recoveries.failures, recoveries.partial, recoveries.full) == (3, 2, 0)
    assert 0 < recoveries.pls <= (5 + 8 + 8) / (STEPS * 5)  # if no version in between was ready
    # Stored with every version, and there again in the next life.
    repository = Repository.open(store)
    pls = [repository.manifest(version).counters["pls"] for version in repository.versions()]
    assert pls[0] == 0.0
    assert pls == sorted(pls)
    assert pls[-1] == recoveries.pls
    again = Model()
    after = keeper_of(again, store, strategy)
    after.resume()
    resumed = after.recoveries()
    assert resumed is not None
    assert (resumed.pls, resumed.failures) == (recoveries.pls, 3)
    assert again.bits() == model.bits()
    after.close()
    # A share of the job, however long that is to be now.
    longer = keeper_of(Model(), store, strategy, total_steps=4 * STEPS)
    longer.resume()
    found = longer.recoveries()
    assert found is not None
    assert found.pls == pytest.approx(recoveries.pls / 4)
    longer.close()


def test_partial_recovery_that_would_lose_too_much_is_full(
    uninterrupted: dict[str, bytes],
) -> None:
    model = Model()
    # Without versions that are taken early for the bound's sake.
    strategy = replace(ek.partial(every=4, most_pls=0.03), least=None)
    keeper = keeper_of(model, MemoryStore(), strategy)
    recovered: list[Any] = []
    keeper._on_event = lambda name, details: (
        recovered.append(details) if name == "recovered" else None
    )
    seen = train(model, keeper, {6: lambda: model.kill(0), 8: lambda: model.kill(0, 3)})
    assert [it["scope"] for it in recovered] == ["partial", "full"]
    assert "the job may lose 0.03" in recovered[1]["reason"]
    assert seen == [*range(1, 8), *range(5, STEPS + 1)]
    # The version that was gone back to had lost nothing yet, and so has the model.
    recoveries = keeper.recoveries()
    assert recoveries is not None
    assert recoveries.pls == 0.0
    assert model.bits() == uninterrupted


def test_a_recovery_that_takes_much_of_the_target_brings_the_next_version_forward() -> None:
    """The schedule was asked at the start, when a version was due after 10 steps."""
    model = Model()
    strategy = replace(ek.partial(every=10, pls=10 / (5 * STEPS)), least=Every(steps=1))
    keeper = keeper_of(model, MemoryStore(), strategy)
    saves: list[int] = []
    keeper._on_event = lambda name, details: (
        saves.append(details["step"]) if name == "saved" else None
    )
    train(model, keeper, {6: lambda: model.kill(0)})
    assert saves[:2] == [0, 6]  # 5 of 10 are lost: the next failure may take 5


@pytest.mark.parametrize("priority", [None, "ssu"])
def test_a_version_is_taken_before_a_failure_could_lose_more_than_the_target(
    priority: Any,
) -> None:
    """Two of 5 shards are expected to fail together: of 60 shard-steps the target allows 6, so 3
    steps; when a failure has taken 4 of them, one step."""
    model, store = Model(), MemoryStore()
    strategy = ek.partial(every=9, pls=6 / (5 * STEPS), priority=priority)
    assert strategy.recovery is not None
    strategy = replace(
        strategy, least=Every(steps=1), recovery=replace(strategy.recovery, together=2)
    )
    keeper = keeper_of(model, store, strategy)
    saves: list[tuple[int, bool]] = []
    keeper._on_event = lambda name, details: (
        saves.append((details["step"], details["whole"])) if name == "saved" else None
    )
    train(model, keeper, {6: lambda: model.kill(0, 1)})
    whole = [step for step, is_whole in saves if is_whole]
    assert whole == [0, 3, *range(6, STEPS + 1)]
    recoveries = keeper.recoveries()
    assert recoveries is not None
    assert (recoveries.full, recoveries.partial) == (0, 1)
    assert recoveries.pls == pytest.approx(4 / (5 * STEPS))


@pytest.mark.parametrize("when", ["pull", "push"])
def test_a_call_that_turns_into_a_full_recovery_is_given_up_with_its_step(
    when: Any, uninterrupted: dict[str, bytes]
) -> None:
    """The rest of that step would be trained on rows of the version."""
    model, store = Model(failures=(ek.fail_at(1, step=6, when=when),)), HookedStore()
    keeper = keeper_of(model, store, PARTIAL)
    recovered: list[Any] = []
    keeper._on_event = lambda name, details: (
        recovered.append(details) if name == "recovered" else None
    )

    def lose_all(what: str, name: str) -> None:
        if what == "get" and model.users.cluster.lost():
            store.before = lambda what, name: None
            model.kill(0, 1, 2, 3, 4)

    def watch() -> None:
        store.before = lose_all

    seen = train(model, keeper, {6: watch})
    assert [(it["scope"], it["step"]) for it in recovered] == [("full", 3)]
    assert seen == [*range(1, 6), *range(4, STEPS + 1)]
    assert model.bits() == uninterrupted


@pytest.mark.long
@pytest.mark.parametrize("strategy", KINDS, ids=["full", "partial", "ranked"])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_shards_die_at_every_operation_of_the_store(
    strategy: Any, operation: str, uninterrupted: dict[str, bytes]
) -> None:
    """Puts are those of saves, gets those of recoveries."""
    operations = iter(some(range(1, 1000), KINDS.index(strategy), of=12))
    while _strike(strategy, operation, next(operations), uninterrupted):
        pass


def _strike(strategy: Any, operation: str, position: int, uninterrupted: dict[str, bytes]) -> bool:
    """One run in which a shard dies at an operation; whether there were so many."""
    model, store = Model(), HookedStore()
    count = 0

    def strike(what: str, name: str) -> None:
        nonlocal count
        if what == operation and not name.startswith(("writers", "repository")):
            count += 1
            if count == position:
                model.kill(position % 5)

    keeper = keeper_of(model, store, strategy, settings=SaveSettings(threads=1))
    store.before = strike
    seen = train(model, keeper, {5: lambda: model.kill(1)})
    assert seen[-1] == STEPS
    assert set(seen) == set(range(1, STEPS + 1))
    if strategy is FULL:
        assert model.bits() == uninterrupted
    recoveries = keeper.recoveries()
    assert recoveries is not None
    assert recoveries.failures >= 1
    return count >= position


def test_a_keeper_without_recovery_says_what_was_lost_and_recovers_when_asked() -> None:
    model = Model()
    keeper = keeper_of(model, MemoryStore(), ek.incremental(every=3))
    keeper.resume()
    model.kill(1)
    with pytest.raises(ShardLostError, match="shard 1"):
        model(next(iter(Batches())))
    with pytest.raises(NoVersionError, match="before the first version"):
        keeper.recover()
    keeper.close(save=False)


def test_nothing_lost_means_nothing_to_do() -> None:
    model = Model()
    keeper = keeper_of(model, MemoryStore(), FULL)
    keeper.resume()
    assert keeper.recover() is None
    keeper.close()
    assert model.users.cluster.on_loss is None


def test_a_failure_of_four_shards_of_two_clusters_is_one_restore() -> None:
    model, store = Model(), MemoryStore()
    with keeper_of(model, store, ek.partial(every=4, bits=4, priority=None)) as keeper:
        train(model, keeper, {6: lambda: model.kill(0, 1, 2, 3)})
        assert keeper.recoveries().partial == 1  # type: ignore[union-attr]
    assert Repository.open(store).restores(exact=False) == 1


def test_what_cannot_recover_partially_is_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="total_steps="):
        ek.Keeper(MemoryStore(), model, [], strategy=PARTIAL)
    plain = nn.EmbeddingBag(10, 2, sparse=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="has none"):
        ek.Keeper(MemoryStore(), plain, optimizer, strategy=PARTIAL, total_steps=9)
    both = nn.ModuleList([plain, Model()])
    with pytest.raises(ConfigError, match="torch's"):
        ek.Keeper(MemoryStore(), both, optimizer, strategy=RANKED, total_steps=9)


def _step(model: Model, keeper: ek.Keeper) -> None:
    model(next(iter(keeper.reader))).sum().backward()
    for optimizer in keeper._parts.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    keeper.step()
    keeper.wait()


def _five_versions() -> HookedStore:
    """After steps 0, 3, 6, 9 and 12."""
    store, model = HookedStore(), Model()
    train(model, keeper_of(model, store, FULL))
    return store


@pytest.mark.parametrize("how", ["number", "tag", "fall_back", "partial"])
def test_a_full_recovery_goes_back_to_the_version_that_the_run_goes_on_from(how: str) -> None:
    store = _five_versions()
    repository = Repository.open(store)
    versions = repository.versions()
    repository.tag("good", versions[2])
    if how == "fall_back":
        for version in versions[3:]:
            store.delete([repository.manifest(version).files[0].name])
    model = Model()
    # Without recovery=, a start from what fits begins with no version.
    strategy = ek.incremental(every=3, layout="consecutive")
    keeper = keeper_of(model, store, strategy if how == "partial" else FULL)
    if how == "fall_back":
        with pytest.warns(UserWarning, match="were passed over"):
            keeper.resume(fall_back=True)
    else:
        version = "good" if how == "tag" else versions[2].number
        keeper.resume(version, partial=how == "partial")
    before = model.bits()
    assert keeper.steps == 6
    for _ in range(2):  # a recovery is no version of its own
        _step(model, keeper)
        model.kill(0, 1, 2, 3, 4)
        recovered = keeper.recover()
        assert recovered is not None
        assert (recovered.scope, recovered.step) == ("full", 6)
        assert recovered.version == versions[2].number
        assert model.bits() == before
    for _ in range(3):
        _step(model, keeper)
    model.kill(0, 1, 2, 3, 4)
    recovered = keeper.recover()
    assert recovered is not None
    assert recovered.step == 9
    assert recovered.version == repository.versions()[-1].number > versions[-1].number


def test_the_first_version_after_newer_ones_were_left_is_whole() -> None:
    """A prioritised one holds no instant: the next start would go on from those that were left."""
    store, model = MemoryStore(), Model()
    strategy = ek.partial(every=4, priority="mfu", fraction=0.5)
    first = keeper_of(model, store, strategy)
    train(model, first)
    repository = Repository.open(store)
    whole = [v for v in repository.versions() if repository.manifest(v).whole]
    model = Model()
    events: list[Any] = []
    keeper = keeper_of(
        model, store, strategy, on_event=lambda name, details: events.append((name, details))
    )
    keeper.resume(whole[1].number)
    while not [name for name, _ in events if name == "saved"]:
        _step(model, keeper)
    assert [details["whole"] for name, details in events if name == "saved"] == [True]


def test_what_dies_at_the_same_step_after_each_recovery_ends() -> None:
    """Its need of memory, say. A step that was never reached begins the count again."""
    model = Model()
    keeper = keeper_of(model, MemoryStore(), ek.incremental(every=5))
    deaths = 0

    def die() -> None:
        nonlocal deaths
        deaths += 1
        model.kill(0)

    class Deaths(dict[int, Any]):
        def pop(self, place: int, default: Any = None) -> Any:
            return die if place == (7 if deaths < 20 else 8) else default

    with pytest.raises(RecoveryError, match="back to step 5 33 times, and never got beyond step 7"):
        train(model, keeper, Deaths({0: None}))
    assert deaths == 20 + 33
    keeper.close(save=False)
