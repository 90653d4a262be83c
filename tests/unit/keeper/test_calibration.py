"""Widths that were measured: within the budget, with reasons, and nothing changed by the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.codecs import NonNegative, Quantized
from emberkeep.errors import ConfigError, StateError
from emberkeep.keeper.calibration import is_calibrated
from emberkeep.repository import Repository
from tests.servers import Farm, OnFarm

BUDGET = 1e-3


class Model(nn.Module):
    """One table that the labels follow from, and one that they do not."""

    def __init__(self, cluster: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = ek.EmbeddingBags(
            [ek.Table("useful", rows=64, dim=8), ek.Table("useless", rows=512, dim=8)],
            optimizer=ek.Adagrad(lr=0.1),
            cluster=cluster or ek.local(shards=2),
        )
        self.torch_rows = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.bags(ids)
        rows = found[:, 0] + 1e-6 * found[:, 1] + self.torch_rows(ids["useful"][:, None] % 50)
        return self.dense(rows).squeeze(1)


class Run:
    def __init__(self, store: Any = None, strategy: Any = None, **more: Any) -> None:
        self.model = Model(more.pop("cluster", None))
        self.events: list[tuple[str, Any]] = []
        dense = torch.optim.SGD(self.model.dense.parameters(), lr=0.05)
        torch_rows = torch.optim.Adagrad(self.model.torch_rows.parameters(), lr=0.05)
        self.keeper = ek.Keeper(
            store or MemoryStore(), self.model, [self.model.bags.optimizer, dense, torch_rows],
            strategy=strategy or ek.incremental(every=1000, accuracy_budget=BUDGET),
            on_event=lambda *event: self.events.append(event), **more,
        )  # fmt: skip

    def batch(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        random = np.random.default_rng(number)
        useful, useless = random.integers(0, 64, 64), random.integers(0, 512, 64)
        ids = {"useful": torch.from_numpy(useful), "useless": torch.from_numpy(useless)}
        return ids, torch.from_numpy((useful % 2).astype(np.float32))

    def loss(self, number: int) -> torch.Tensor:
        ids, labels = self.batch(number)
        return nn.functional.binary_cross_entropy_with_logits(self.model(ids), labels)

    def take(self, number: int) -> None:
        self.loss(number).backward()
        for optimizer in self.keeper._parts.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 30) -> Run:
        for _ in range(steps):
            self.take(self.keeper.steps)
            self.keeper.step()
        return self

    def validate(self) -> float:
        with torch.no_grad():
            return float(np.mean([self.loss(1000 + i).item() for i in range(4)]))

    def trial(self) -> None:
        for number in range(500, 505):
            self.take(number)
        torch.rand(3)

    def bits(self) -> dict[str, bytes]:
        state = {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}
        for table in ("useful", "useless"):
            ids, planes = self.model.bags.cluster.read_all(table)  # type: ignore[attr-defined]
            state |= {f"{table}/{name}": values.tobytes() for name, values in planes.items()}
            state[f"{table} ids"] = ids.tobytes()
        rows = self.keeper._parts.optimizers[2].state[self.model.torch_rows.weight]
        return {**state, "sum": rows["sum"].numpy().tobytes(), "rng": torch.get_rng_state().numpy()
                .tobytes()}  # fmt: skip


@pytest.mark.parametrize("with_trial", [False, True])
def test_nothing_is_changed_and_the_budget_is_kept(with_trial: bool) -> None:
    run = Run().train()
    before, loss, steps = run.bits(), run.validate(), run.keeper.steps
    widths = ek.calibrate(run.keeper, run.validate, trial=run.trial if with_trial else None)
    assert run.bits() == before
    assert (run.validate(), run.keeper.steps) == (loss, steps)
    assert set(widths.tables) == {"useful", "useless", "torch_rows"}
    useful, useless = widths.tables["useful"], widths.tables["useless"]
    assert useless.bits == 2  # it does not matter to the loss
    assert useful.bits != 2
    assert "2 bits +" in useful.why
    assert "too much" in useful.why
    assert useless.optimizer is with_trial
    assert "accuracy budget 0.1% for 1 restore" in widths.why
    # What a restore brings back costs no more than it may.
    run.keeper.save()
    manifest = run.keeper.wait()
    twin = Run(run.keeper._store)
    twin.keeper.resume()
    assert twin.validate() - loss <= BUDGET * loss
    assert twin.validate() != loss
    assert manifest is not None
    assert ("calibrated", widths.to_dict()) in run.events


def test_versions_are_exact_before_and_as_calibrated_after_and_a_resumed_run_goes_on_so() -> None:
    store = MemoryStore()
    run = Run(store).train()
    saving = run.keeper.save()  # and not waited for
    assert saving is not None
    ek.calibrate(run.keeper, run.validate, trial=run.trial)
    exact = saving.committed.result()
    run.train(1).keeper.save()
    stored = run.keeper.wait()
    codecs = stored.layout["codecs"]  # type: ignore[union-attr]
    assert exact.layout["codecs"] == {}
    assert "until widths are calibrated" in exact.layout["why"]
    assert codecs["useless/weight"] == Quantized(bits=2).to_dict()
    assert codecs["useless/accumulator"] == NonNegative().to_dict()
    assert stored.layout["kind"] == "full"  # type: ignore[union-attr]
    assert "accuracy budget" in stored.layout["why"]  # type: ignore[union-attr]
    run.train(1).keeper.close()  # an exact one, which knows the widths all the same
    again = Run(store)
    again.keeper.resume()
    again.train(1).keeper.save()
    manifest = again.keeper.wait()
    assert manifest.layout["codecs"] == codecs  # type: ignore[union-attr]
    # The budget was for one restore: a second one of a version that is not exact is one too many.
    again.train(1).keeper.save()
    again.keeper.wait()
    for _ in range(2):
        third = Run(store)
        third.keeper.resume()
        third.train(1).keeper.save()
        manifest = third.keeper.wait()
    assert manifest.layout["codecs"]["useless/weight"]["bits"] == 8  # type: ignore[union-attr]
    assert "2 restores, 1 were expected" in manifest.layout["why"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "other",
    [{"accuracy_budget": 1e-9}, {"expected_restores": 100}, {"bins": 3}, {"range_ratio": 0.1}],
)
def test_widths_are_not_those_of_another_budget(other: dict[str, Any]) -> None:
    store = MemoryStore()
    run = Run(store).train()
    ek.calibrate(run.keeper, run.validate)
    run.keeper.close()
    settings: dict[str, Any] = {"every": 1000, "accuracy_budget": BUDGET, **other}
    again = Run(store, ek.incremental(**settings))
    with pytest.warns(UserWarning, match="measured for .*exact until they are calibrated"):
        again.keeper.resume()
    assert not is_calibrated(again.keeper)
    again.train(1).keeper.save()
    assert again.keeper.wait().layout["codecs"] == {}  # type: ignore[union-attr]
    ek.calibrate(again.keeper, again.validate)
    again.train(1).keeper.close()
    third = Run(store, ek.incremental(**settings))
    third.keeper.resume()
    assert is_calibrated(third.keeper)


def test_widths_that_were_given_are_not_taken_for_measured_ones() -> None:
    store = MemoryStore()
    Run(store, ek.incremental(every=1000, bits={"useful": 2})).train(3).keeper.close()
    again = Run(store)
    with pytest.warns(UserWarning, match="were given before, .*exact until they are calibrated"):
        again.keeper.resume()
    assert not is_calibrated(again.keeper)


def test_a_budget_that_nothing_keeps_leaves_every_table_exact() -> None:
    run = Run(strategy=ek.incremental(every=1000, accuracy_budget=1e-12)).train()
    widths = ek.calibrate(run.keeper, run.validate, candidates=(2,))
    assert widths.tables["useful"].bits is None
    assert "too much" in widths.tables["useful"].why


def test_more_expected_restores_leave_less_for_each() -> None:
    few, many = (
        Run(strategy=ek.incremental(every=1000, accuracy_budget=BUDGET, expected_restores=n))
        for n in (1, 1000)
    )
    chosen = [
        ek.calibrate(run.train().keeper, run.validate).tables["useful"].bits for run in (few, many)
    ]
    assert (chosen[0] or 32) < (chosen[1] or 32)


@pytest.mark.processes
def test_rows_on_servers_are_calibrated_the_same(farm: Farm) -> None:
    run = Run().train(12)
    here = ek.calibrate(run.keeper, run.validate)
    one = OnFarm(farm, shards=1)
    served = Run(cluster=one).train(12)
    try:
        assert ek.calibrate(served.keeper, served.validate) == here
        assert served.validate() == run.validate()
    finally:
        served.model.bags.cluster.close()  # type: ignore[attr-defined]
        one.hosts.end()


def test_what_cannot_be_calibrated_is_refused() -> None:
    def refused(run: Run, message: str, kind: Any = ConfigError, **more: Any) -> None:
        validate: Callable[[], float] = more.pop("validate", run.validate)
        with pytest.raises(kind, match=message):
            ek.calibrate(run.keeper, validate, **more)

    refused(Run(strategy=ek.incremental(every=9)), "give the strategy accuracy_budget=")
    refused(Run(), "no step was trained yet", StateError)
    run = Run().train(3)
    before = run.bits()
    refused(run, "validate\\(\\) returned nan", StateError, validate=lambda: float("nan"))
    refused(run, "bits must be 2, 3, 4 or 8", candidates=(5,))
    refused(run, "candidates= is empty", candidates=())

    refused(run, "it must return the loss, a number", validate=lambda: "low")
    with pytest.raises(ConfigError, match="takes a keeper, not a Model"):
        ek.calibrate(run.model, run.validate)  # type: ignore[arg-type]

    def broken() -> float:
        raise RuntimeError("no samples")

    refused(run, "no samples", RuntimeError, validate=broken)
    assert run.bits() == before  # an error in a trial leaves everything as it was, too
    assert Repository.open(run.keeper._store).versions() == ()  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="whatever the rows were"):
        ek.calibrate(run.keeper, lambda: 0.7)
    run.keeper.close(save=False)
    refused(run, "the keeper is closed", StateError)


def test_widths_that_were_measured_since_stay_where_rows_come_back() -> None:
    run = Run().train()
    ek.calibrate(run.keeper, run.validate)
    run.train(1).keeper.save()
    manifest: Any = run.keeper.wait()
    newer = ek.calibrate(run.keeper, run.validate, candidates=(8,))
    saver: Any = run.keeper._saver
    saver._take_widths(manifest)
    assert saver.spec.widths == newer
