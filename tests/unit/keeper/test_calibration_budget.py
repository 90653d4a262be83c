"""What a calibration may spend in all, and what it says of what it cannot measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.errors import ConfigError
from emberkeep.keeper import keeper as keeper_module
from emberkeep.keeper.ranks import Ranks
from emberkeep.runtime.clock import SystemClock
from tests.integration.test_cli_repository import Shell
from tests.unit.keeper.test_calibration import BUDGET, Run


class Judged:
    """A run whose loss grows by given parts of the budget where rows are not as they were."""

    def __init__(self, weights: float, optimizer: float, after_trial: float = 0.0) -> None:
        self.run = Run().train()
        self.before = self.run.bits()
        self.costs = {"weight": weights, "accumulator": optimizer}
        self.after_trial, self.tried = after_trial, False

    def differs(self, plane: str) -> bool:
        now, names = self.run.bits(), [f"{table}/{plane}" for table in ("useful", "useless")]
        return any(now[name] != self.before[name] for name in names)

    def validate(self) -> float:
        parts = sum(cost for plane, cost in self.costs.items() if self.differs(plane))
        parts += self.after_trial * (self.tried and self.differs("weight"))
        return 1.0 + BUDGET * parts

    def trial(self) -> None:
        self.tried = True


@pytest.mark.parametrize(("weights", "quantized"), [(0.6, False), (0.3, True)])
def test_weights_and_optimizer_planes_spend_one_budget(weights: float, quantized: bool) -> None:
    judged = Judged(weights=weights, optimizer=0.6)
    widths = ek.calibrate(judged.run.keeper, judged.validate, trial=judged.trial)
    assert widths.tables["useless"].bits == 2
    assert [widths.tables[name].optimizer for name in ("useful", "useless")] == [quantized] * 2
    percent = 100 * BUDGET * (weights + 0.6 * quantized)
    assert f"tables quantized +{percent:.4f}%" in widths.why


def test_weights_that_cost_too_much_after_a_trial_are_warned_of() -> None:
    judged = Judged(weights=0.1, optimizer=0.1, after_trial=2.0)
    with pytest.warns(UserWarning, match=r"after the trial the loss has grown by \+0.2100%"):
        widths = ek.calibrate(judged.run.keeper, judged.validate, trial=judged.trial)
    assert not any(width.optimizer for width in widths.tables.values())


def test_tables_without_trained_rows_are_named() -> None:
    run = Run()
    run.model.dense(run.model.torch_rows(torch.arange(8)[:, None])).sum().backward()
    for optimizer in run.keeper._parts.optimizers[1:]:
        optimizer.step()
    run.keeper.step()
    with pytest.warns(UserWarning, match="tables useful, useless have no trained rows to measure"):
        widths = ek.calibrate(run.keeper, run.validate, trial=lambda: None)
    for name in ("useful", "useless"):
        width = widths.tables[name]
        assert (width.bits, width.optimizer) == (None, False)
        assert "no row was trained" in width.why
    assert widths.tables["torch_rows"].bits is not None


class Ahead(SystemClock):
    """The machine's clock, which can be put forward."""

    seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds


def test_a_calibration_slows_no_version_down() -> None:
    clock = Ahead()
    run = Run(clock=clock).train(8)
    run.keeper.save()

    def validate() -> float:
        clock.seconds += 1000
        return run.validate()

    ek.calibrate(run.keeper, validate)
    (cost,) = run.train(1).keeper.costs().each
    assert cost.slowdown_ms is not None
    assert cost.slowdown_ms < 500_000


def test_several_ranks_are_refused_a_budget_when_the_keeper_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Two(Ranks):
        def __init__(self) -> None:
            super().__init__()
            self.world = 2

        def meet(self, *_: object) -> None: ...

    monkeypatch.setattr(keeper_module, "Ranks", Two)
    model = torch.nn.EmbeddingBag(9, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured = ek.incremental(accuracy_budget=BUDGET)
    with pytest.raises(ConfigError, match=r"run of one process, and there are 2: .*bits={table"):
        ek.Keeper(MemoryStore(), model, optimizer, strategy=measured)
    ek.Keeper(MemoryStore(), model, optimizer).close(save=False)


def test_show_prints_widths_and_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(monkeypatch, capsys)
    run = Run(tmp_path / "r").train()
    run.keeper.save()
    widths = ek.calibrate(run.keeper, run.validate, trial=run.trial)
    run.train(1).keeper.save()
    run.keeper.wait()
    run.train(1).keeper.close()
    assert shell("show", tmp_path / "r", "--version", "1") == 0
    assert "widths of" not in shell.out
    for version in (2, 3):  # the last one is exact
        assert shell("show", tmp_path / "r", "--version", version) == 0
        lines = [line.strip() for line in shell.out.splitlines()]
        assert widths.why in lines
        for name, width in widths.tables.items():
            assert [line for line in lines if line.startswith(name) and width.why in line]
    assert "exact; saved by" in shell.out
