"""Models of torch modules: saved beside training, resumed to the bit, refused when they differ."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.data import Reader, Synthetic
from emberkeep.errors import (
    ConfigError,
    DamageError,
    FencedError,
    NoRepositoryError,
    NoVersionError,
    SaveError,
    ShardLostError,
    StateError,
)
from emberkeep.keeper.plain_state import Packed, pack, unpack
from emberkeep.repository import KeepAll, Repository
from emberkeep.testing.virtual_clock import VirtualClock
from tests.nightly import checkered, examples

ROWS, DIM = 300, 4
EACH = ek.incremental(every=1, keep="all")
NOW = SaveSettings(retention=KeepAll(), grace=timedelta(0))


class Model(nn.Module):
    """Two tables of torch's own, a dense layer, dropout and a running mean."""

    def __init__(self, *, sparse: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, DIM, sparse=sparse, mode="sum", **kwargs)
        self.single = nn.Embedding(77, DIM, sparse=sparse)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, many: Tensor, one: Tensor) -> Tensor:
        both = torch.cat((self.bags(many), self.single(one)), dim=1)
        return self.out(self.drop(self.norm(both))).squeeze(1)


KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


class Run:
    """A model in training; its whole state as bytes."""

    def __init__(
        self, kind: str = "adagrad", *, sparse: bool = True, tables: Any = None, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model = Model(sparse=sparse)
        rows = [self.model.bags.weight, self.model.single.weight]
        dense = [p for p in self.model.parameters() if all(p is not r for r in rows)]
        self.rows = (tables or KINDS[kind])(rows)
        self.optimizers = [self.rows, torch.optim.Adam(dense, lr=0.01)]
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[1], [3, 9], 0.5)
        self.losses: list[float] = []

    def keeper(self, where: Any, **options: Any) -> ek.Keeper:
        options = {
            "strategy": EACH,
            "settings": NOW,
            "state": {"schedule": self.schedule},
            **options,
        }
        return ek.Keeper(where, self.model, self.optimizers, **options)

    def step(self, keeper: ek.Keeper | None = None) -> None:
        many = torch.randint(0, ROWS, (8, 3))
        # All three generators decide what a step does, so all three must come back.
        many[0, 0] = random.randrange(ROWS)
        many[0, 1] = int(np.random.randint(ROWS))  # noqa: NPY002
        loss = self.model(many, torch.randint(0, 77, (8,))).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())
        if keeper is not None:
            keeper.step()

    def bits(self) -> dict[str, bytes]:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedule": self.schedule.state_dict(),
        }
        packed = pack(state)
        plain = {"plain": repr(packed.plain).encode()}
        return {**plain, **{k: v.numpy().tobytes() for k, v in packed.tensors.items()}}


def uninterrupted(steps: int, **options: Any) -> Run:
    run = Run(**options)
    for _ in range(steps):
        run.step()
    return run


@pytest.mark.parametrize(
    ("kind", "layout"),
    checkered(list(KINDS), ["full", "one_shot", "intermittent", "consecutive", "grid"]),
)
@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_same_bits(kind: str, layout: Any) -> None:
    expected = uninterrupted(14, kind=kind)
    store = MemoryStore()
    strategy = ek.incremental(every=1, layout=layout, keep="all")
    run, keeper = None, None
    for step in range(14):
        if step % 4 == 0:  # the process is gone, with whatever it had not saved
            run = Run(kind, seed=step)
            keeper = run.keeper(store, strategy=strategy)
            resumed = keeper.resume()
            assert (resumed and resumed.step) == (step or None)
            if not step:
                run = Run(kind)
                keeper = run.keeper(store, strategy=strategy)
                keeper.resume()
        assert run is not None
        assert keeper is not None
        run.step(keeper)
        keeper.wait()
    assert run is not None
    assert run.bits() == expected.bits()


@pytest.mark.parametrize("kind", list(KINDS))
def test_versions_hold_the_instant_although_training_goes_on(kind: str) -> None:
    """Copy on write: rows are saved as they were when the version was cut, push or save first."""
    run, store = Run(kind), MemoryStore()
    keeper = run.keeper(store, strategy=ek.incremental(every=1000, keep="all"))
    states = {}
    for _ in range(6):
        run.step(keeper)
        before = {k: v.clone() for k, v in run.model.state_dict().items()}
        keeper.save()
        run.step(keeper)
        manifest = keeper.wait()
        assert manifest is not None
        states[manifest.version.number] = (manifest.step, before)
    for number, (step, expected) in states.items():
        fresh = Run(kind, seed=9)
        manifest = fresh.keeper(store).resume(number)
        assert manifest is not None
        assert manifest.step == step
        for name, tensor in fresh.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.long
@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(list(KINDS)),
    layout=st.sampled_from(["full", "one_shot", "intermittent", "consecutive", "grid"]),
    overlap=st.sampled_from(["wait", "cancel"]),
    acts=st.lists(
        st.sampled_from(["step", "step", "step", "save", "wait", "resume", "go back", "load"]),
        min_size=5,
        max_size=25,
    ),
    seed=st.integers(0, 99),
)
def test_whatever_happens_versions_hold_the_steps_they_name(
    kind: str, layout: Any, overlap: Any, acts: list[str], seed: int
) -> None:
    """Every act of a training process in any order; what comes back is what was there."""
    store, strategy = MemoryStore(), ek.incremental(every=1000, layout=layout, keep="all")
    how = replace(NOW, overlap=overlap, buffer_nbytes=4096)
    run = Run(kind, seed=seed)
    keeper = run.keeper(store, strategy=strategy, settings=how)
    keeper.resume()
    saved: list[tuple[Any, dict[str, bytes]]] = []
    other = uninterrupted(2, kind=kind, seed=seed + 1).model.state_dict()
    for act in acts:
        if act == "step":
            run.step(keeper)
        elif act == "load":
            run.model.load_state_dict(other)
        elif act == "save":
            saved.append((keeper.save(), run.bits()))
        elif act == "wait":
            keeper._saver.join()  # type: ignore[union-attr]
        else:
            keeper._saver.join()  # type: ignore[union-attr]
            committed = {
                saving.committed.result().version.number: bits
                for saving, bits in saved
                if saving.committed.exception() is None
            }
            if act == "resume":
                run = Run(kind, seed=seed + 2)
                keeper = run.keeper(store, strategy=strategy, settings=how)
            manifest = keeper.resume(min(committed, default=None) if act == "go back" else None)
            assert (manifest is None) == (not committed)
            if manifest is not None:
                assert run.bits() == committed[manifest.version.number]
    keeper.close(save=False)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_dense_gradients_are_followed_by_their_rows(kind: str) -> None:
    """As in an unsharded EmbeddingBagCollection, whose gradients are dense."""
    expected = uninterrupted(9, kind=kind, sparse=False)
    store = MemoryStore()
    run = Run(kind, sparse=False)
    keeper = run.keeper(store)
    for _ in range(5):
        run.step(keeper)
    manifest = keeper.wait()
    assert keeper.saved_whole == {}
    assert manifest is not None
    assert manifest.layout["kind"] == "baseline"
    rows = manifest.of_kind("rows")[0].metadata["rows"]
    assert 0 < rows["bags"] < ROWS / 2
    run = Run(kind, sparse=False, seed=3)
    run.keeper(store).resume()
    for _ in range(4):
        run.step()
    assert run.bits() == expected.bits()


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (lambda p: torch.optim.Adam(p, lr=0.1), "Adam also moves"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum=0.9"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1), "weight_decay=0.1"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize"),
    ],
)
def test_where_rows_move_without_a_gradient_tables_are_saved_whole(
    tables: Any, reason: str
) -> None:
    expected = uninterrupted(8, tables=tables, sparse=False)
    store, run = MemoryStore(), Run(tables=tables, sparse=False)
    with pytest.raises(ConfigError, match=reason):
        run.keeper(MemoryStore(), strict=True)
    with pytest.warns(UserWarning, match=f"saved whole every time.*'bags'.*{reason}"):
        keeper = run.keeper(store)
    assert set(keeper.saved_whole) == {"bags", "single"}
    for _ in range(5):
        run.step(keeper)
    manifest = keeper.wait()
    assert manifest is not None
    assert manifest.of_kind("rows") == ()
    run = Run(tables=tables, sparse=False, seed=4)
    with pytest.warns(UserWarning, match="saved whole"):
        run.keeper(store).resume()
    for _ in range(3):
        run.step()
    assert run.bits() == expected.bits()


@pytest.mark.filterwarnings("ignore:these tables are saved whole")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(9, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding(9, 2, dtype=torch.bfloat16), "bfloat16"),
        (nn.Embedding(9, 2, dtype=torch.float64), "float64"),
    ],
)
def test_modules_that_cannot_be_followed(module: nn.Module, reason: str) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ek.Keeper(MemoryStore(), module, optimizer) as keeper:
        assert reason in keeper.saved_whole["embedding"]


@pytest.mark.filterwarnings("ignore:these tables are saved whole")
def test_the_sparse_momentum_of_torch_comes_back() -> None:
    def tables(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    expected = uninterrupted(7, tables=tables)
    store, run = MemoryStore(), Run(tables=tables)
    with run.keeper(store) as keeper:
        for _ in range(4):
            run.step(keeper)
    run = Run(tables=tables, seed=2)
    run.keeper(store).resume()
    for _ in range(3):
        run.step()
    assert run.bits() == expected.bits()


@pytest.mark.filterwarnings("ignore:all rows of table 'single'")
def test_settings_that_change_later_are_noticed() -> None:
    run, store = Run("sgd"), MemoryStore()
    keeper = run.keeper(store)
    run.step(keeper)
    run.rows.param_groups[0]["momentum"] = 0.9
    with pytest.warns(UserWarning, match="all rows of table 'bags' count as changed"):
        run.step()
    with pytest.raises(StateError, match="momentum_buffer"):
        keeper.step()


def test_a_closure_counts_as_a_change_of_all_rows() -> None:
    run, store = Run("sgd"), MemoryStore()
    keeper = run.keeper(store, strategy=ek.incremental(every=1, layout="consecutive", keep="all"))

    def closure() -> Tensor:
        run.rows.zero_grad()
        loss = run.model.single(torch.tensor([1, 2, 3])).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        run.step(keeper)
    with pytest.warns(UserWarning, match="inside of step"):
        run.rows.step(closure)
    keeper.step()
    keeper.wait()
    fresh = Run("sgd", seed=5)
    fresh.keeper(store).resume()
    assert torch.equal(fresh.model.single.weight, run.model.single.weight)


def test_loading_and_editing_behind_the_keeper() -> None:
    run, store = Run(), MemoryStore()
    keeper = run.keeper(store, strategy=ek.incremental(every=1, layout="consecutive", keep="all"))
    other = uninterrupted(3, seed=8)
    edits = [
        lambda: run.model.load_state_dict(other.model.state_dict()),
        lambda: run.rows.load_state_dict(other.rows.state_dict()),
        lambda: setattr(run.model.bags.weight, "data", other.model.bags.weight.data.clone()),
        lambda: (keeper.mark_all_changed(), run.model.single.weight.data.mul_(2.0)),
    ]
    for edit in edits:
        run.step(keeper)
        keeper.save()
        edit()
        run.step(keeper)
        keeper.wait()
        fresh = Run(seed=5)
        fresh.keeper(store).resume()
        assert fresh.bits() == run.bits()
        keeper = run.keeper(store, strategy=EACH)
        keeper.resume()


def test_tied_weights_and_narrow_types_are_stored_once_and_come_back() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(20, 4, sparse=True)
            self.two = nn.Embedding(20, 4, sparse=True)
            self.two.weight = self.one.weight
            self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.again = self.narrow
            self.register_buffer("seen", torch.tensor(3, dtype=torch.int16))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def built() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Tied()
        return model, [
            torch.optim.SGD([model.one.weight], lr=1.0),
            torch.optim.SGD(model.narrow.parameters(), lr=1.0, momentum=0.5),
        ]

    store = MemoryStore()
    model, optimizers = built()
    with ek.Keeper(store, model, optimizers, strategy=EACH) as keeper:
        for _ in range(2):
            loss = model.one(torch.tensor([1])).sum() + model.two(torch.tensor([2])).sum()
            loss += model.narrow(torch.ones(1, 4, dtype=torch.bfloat16)).sum().float()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            keeper.step()
    schema = Repository.open(store).schema
    assert list(schema["tables"]) == ["one"]
    fresh, loaded = built()
    ek.Keeper(store, fresh, loaded).resume()
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert loaded[1].state_dict()["state"][0]["momentum_buffer"].dtype == torch.bfloat16


def test_emberkeep_and_torch_tables_together() -> None:
    """Names that clash are distinguished by path, and every table comes back with its own rows."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = ek.Table("user", rows=50, dim=DIM)
            adam = ek.Adam(lr=0.1)
            self.left = ek.EmbeddingBags([table], optimizer=adam, cluster=ek.local(shards=2))
            self.right = ek.EmbeddingBags([table], optimizer=ek.Adagrad(lr=0.1), seed=1)
            self.user = nn.EmbeddingBag(50, DIM, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            vectors = self.left({"user": ids}) + self.right({"user": ids})
            return (vectors.squeeze(1) + self.user(ids[:, None])).sum()

    def built() -> tuple[Both, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Both()
        return model, torch.optim.SparseAdam(model.user.parameters(), lr=0.1)

    def trained(model: Both, optimizer: torch.optim.Optimizer, steps: int, keeper: Any) -> None:
        for _ in range(steps):
            model(torch.randint(0, 50, (5,))).backward()
            for one in (model.left.optimizer, model.right.optimizer, optimizer):
                one.step()
                one.zero_grad()
            if keeper is not None:
                keeper.step()

    model, optimizer = built()
    trained(model, optimizer, 12, None)
    store = MemoryStore()
    for steps in (5, 4, 3):
        again, optimizer_again = built()
        with ek.Keeper(store, again, optimizer_again, strategy=EACH) as keeper:
            keeper.resume()
            trained(again, optimizer_again, steps, keeper)
    assert list(Repository.open(store).schema["tables"]) == ["user", "left.user", "right.user"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_what_does_not_fit_is_named_and_nothing_is_loaded() -> None:
    store = MemoryStore()
    with Run().keeper(store) as keeper:
        keeper.save()

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2 * DIM, 2)
            self.extra = nn.Linear(1, 1)
            del self.norm

    run = Run()
    run.model = Other()
    run.optimizers[0] = torch.optim.Adagrad(
        [run.model.bags.weight, run.model.single.weight], lr=0.1
    )
    before = run.model.bags.weight.clone()
    with run.keeper(store, state={"other": run.schedule}) as keeper:
        with pytest.raises(StateError) as refused:
            keeper.resume()
        keeper.steps = 0
    assert torch.equal(run.model.bags.weight, before)
    for part in (
        r"tensor 'extra.bias' is not in the version",
        r"tensor 'norm.running_mean' of the version is not in the model",
        r"tensor 'out.weight' was float32 [1, 8], is float32 [2, 8]",
        r"state 'other' is not in the version",
        r"state 'schedule' of the version is not in the model",
    ):
        assert part in str(refused.value)


def test_another_optimizer_or_another_shape_of_tables_is_refused_by_name() -> None:
    store = MemoryStore()
    Run("adagrad").keeper(store)
    with pytest.raises(StateError, match=r"'bags': planes was .*accumulator.*is"):
        Run("sgd").keeper(store)
    swapped = Run("adagrad")
    swapped.optimizers.reverse()
    with Run("adagrad").keeper(store) as keeper:
        keeper.save()
    with pytest.raises(StateError, match=r"optimizer '0' was Adagrad over bags\.weight"):
        swapped.keeper(store).resume()


def test_a_repository_with_versions_is_not_written_over_by_accident() -> None:
    store = MemoryStore()
    with Run().keeper(store) as keeper:
        keeper.save()
    run = Run(seed=1)
    keeper = run.keeper(store)
    with pytest.raises(StateError, match=r"call resume\(\)"):
        run.step(keeper)
    started = keeper.start_over()
    assert started is not None
    assert started.step == 0
    run.step(keeper)
    keeper.close()
    fresh = Run(seed=2)
    manifest = fresh.keeper(store).resume()
    assert manifest is not None
    assert manifest.step == 1
    assert fresh.bits() == run.bits()
    with pytest.raises(StateError, match="closed"):
        keeper.step()


def test_a_run_that_must_exist_does_not_start_over(tmp_path: Path) -> None:
    """An empty mount point is what a first start finds, too: only the user can tell which."""
    with pytest.raises(NoRepositoryError, match=r"mounted.*leave must_exist out"):
        Run().keeper(tmp_path, must_exist=True)
    assert list(tmp_path.iterdir()) == []
    run = Run()
    keeper = run.keeper(tmp_path)
    claims = sorted((tmp_path / "writers").iterdir())
    with pytest.raises(NoVersionError, match=r"has no version.*leave must_exist out"):
        Run().keeper(tmp_path, must_exist=True)
    assert sorted((tmp_path / "writers").iterdir()) == claims
    run.step(keeper)
    keeper.close()
    resumed = Run(seed=1)
    with resumed.keeper(tmp_path, must_exist=True) as again:
        manifest = again.resume()
    assert manifest is not None
    assert manifest.step == 1
    assert resumed.bits() == run.bits()


class Flaky(MemoryStore):
    """Refuses to write data while a test wants it."""

    broken = False

    def put(self, name: str, data: Any) -> int:
        if self.broken and name.startswith("data/"):
            raise SaveError("the store is broken")
        return super().put(name, data)


@pytest.mark.filterwarnings("ignore:saving step")
def test_failed_saves_surface_and_lose_nothing() -> None:
    store, run, events = Flaky(), Run(), []
    keeper = run.keeper(store, on_event=lambda name, details: events.append((name, details)))
    run.step(keeper)
    keeper.wait()
    store.broken = True
    run.step(keeper)
    with pytest.raises(SaveError, match="broken"):
        keeper.wait()
    for _ in range(3):
        run.step(keeper)
    keeper._saver.join()  # type: ignore[union-attr]
    with pytest.raises(SaveError, match="3 saves in a row"):
        run.step(keeper)
    assert [name for name, _ in events] == ["saved", *["save_failed"] * 4]
    assert keeper.costs().failed == 4
    store.broken = False
    last = keeper.close()
    assert last is not None
    fresh = Run(seed=1)
    fresh.keeper(store).resume()
    assert fresh.bits() == run.bits()


@pytest.mark.filterwarnings("ignore:saving step")
def test_a_process_that_was_replaced_stops_at_its_next_step() -> None:
    store = MemoryStore()
    old, new = Run(), Run()
    first = old.keeper(store)
    old.step(first)
    first.wait()
    second = new.keeper(store)
    second.resume()
    old.step(first)
    first._saver.join()  # type: ignore[union-attr]
    with pytest.raises(FencedError):
        old.step(first)
    new.step(second)
    assert second.close() is not None or second.steps == 2


def test_a_raising_listener_does_not_fail_a_save() -> None:
    run = Run()

    def listen(*_: Any) -> None:
        raise RuntimeError("not interested")

    keeper = run.keeper(MemoryStore(), on_event=listen)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.step(keeper)
        assert keeper.wait() is not None
    assert any("not interested" in str(warning.message) for warning in seen)


def test_a_listener_may_tag_what_was_saved_and_nothing_there_waits_for_itself() -> None:
    run, store = Run(), MemoryStore()
    got: dict[str, Any] = {}
    calls: dict[str, Any] = {}

    def listen(name: str, _: Any) -> None:
        if name != "saved":
            return
        for what, call in calls.items():
            try:
                got[what] = call()
            except Exception as error:
                got[what] = error
        calls.clear()

    keeper = run.keeper(store, on_event=listen)
    saver: Any = keeper._saver
    saver._patience = timedelta(milliseconds=1)  # what waits for itself would fail so
    calls |= {
        "wait": keeper.wait, "tag": lambda: keeper.tag("good"), "save": keeper.save,
        "close": keeper.close, "resume": keeper.resume, "join": lambda: saver.join(timedelta(1)),
    }  # fmt: skip
    run.step(keeper)
    saver._saving.ended.require("the save", timedelta(minutes=1))
    first = Repository.open(store).latest()
    assert got["wait"].version == got["tag"].version == first
    assert Repository.open(store).named("good") == first
    for what in ("save", "close", "resume", "join"):
        assert isinstance(got[what], StateError), what
        assert "in the training loop" in str(got[what])
    saver._patience = timedelta(minutes=1)
    run.step(keeper)  # it was not closed
    last = keeper.close()
    assert last is not None or keeper.steps == 2


def test_damage_is_refused_or_passed_over_as_asked() -> None:
    store, run = MemoryStore(), Run()
    keeper = run.keeper(store, strategy=ek.incremental(every=1, layout="full", keep="all"))
    for _ in range(3):
        run.step(keeper)
    keeper.close()
    newest = Repository.open(store).manifest(3).of_kind("dense")[0].name
    store.put(newest, b"no such thing")
    with pytest.raises(DamageError, match=newest):
        Run().keeper(store).resume()
    with pytest.warns(UserWarning, match=r"\[3\] are damaged"):
        manifest = Run().keeper(store).resume(fall_back=True)
    assert manifest is not None
    assert manifest.version.number == 2


def test_close_writes_a_lossless_version_where_that_is_missing() -> None:
    store, run = MemoryStore(), Run()
    lossy = ek.incremental(every=2, bits=2, keep="all")
    keeper = run.keeper(store, strategy=lossy)
    for _ in range(4):
        run.step(keeper)
    last = keeper.close()
    assert last is not None
    assert last.layout["codecs"] == {}
    fresh = Run(seed=6)
    keeper = fresh.keeper(store, strategy=lossy)
    keeper.resume()
    assert fresh.bits() == run.bits()
    assert keeper.close() is None  # the newest version holds the present state already
    assert len(Repository.open(store).versions()) == 3


def test_an_error_in_the_loop_saves_nothing() -> None:
    store, run = MemoryStore(), Run()
    keeper = run.keeper(store, strategy=ek.incremental(every=1000))
    run.step(keeper)

    def fails() -> None:
        with keeper:
            run.step(keeper)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert Repository.open(store).versions() == ()


# -- readers and schedules -----------------------------------------------------------------------


def test_the_reader_is_never_ahead_of_a_version_and_resumes_with_it() -> None:
    source = Synthetic(samples=320, rows_total=200)
    whole = [batch.labels.tobytes() for batch in Reader(source, batch_size=16)]
    seen: list[bytes] = []
    store = MemoryStore()
    stop_after = iter([7, 4, 100])
    while len(seen) < 20:
        run = Run()
        reader = Reader(source, batch_size=16)
        keeper = run.keeper(store, reader=reader, strategy=ek.incremental(every=3))
        manifest = keeper.resume()
        del seen[(manifest.step if manifest else 0) :]
        left = next(stop_after)
        for batch in reader:
            seen.append(batch.labels.tobytes())
            run.step(keeper)
            if keeper.steps % 3 == 0:
                version = keeper.wait()
                assert version is not None
                assert version.reader["samples"] == 16 * keeper.steps
            left -= 1
            if not left:
                break
    assert seen == whole
    assert reader.finished


def test_a_reader_that_was_not_there_is_missed() -> None:
    store = MemoryStore()
    reader = Reader(Synthetic(samples=64, rows_total=200), batch_size=16)
    with Run().keeper(store, reader=reader) as keeper:
        keeper.save()
    with pytest.raises(StateError, match="give the keeper reader="):
        Run().keeper(store).resume()


def test_several_batches_for_each_step() -> None:
    reader = Reader(Synthetic(samples=160, rows_total=200), batch_size=16)
    run = Run()
    keeper = run.keeper(MemoryStore(), reader=reader, batches_per_step=2)
    keeper.resume()
    for number, _ in enumerate(reader, start=1):
        if number % 2 == 0:
            run.step(keeper)
    assert keeper.steps == 5


class _Saves:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reader": torch.utils.data.DataLoader([1, 2])}, "reader= is a DataLoader.*Stateful"),
        ({"reader": _Saves()}, "reader= is a _Saves without load_state_dict"),
        ({"state": {"epoch": 3}}, r"state=\{'epoch': ...\} is an int without state_dict and load_"),
        (
            {"state": {"own": _Saves()}},
            r"state=\{'own': ...\} is a _Saves without load_state_dict",
        ),
        ({"state": {"own": None}}, "without state_dict and load_state_dict"),
        ({"state": {"kind": _Saves}}, "a class, not an object"),
        ({"state": _Saves()}, r"state= is a _Saves: give a dict"),
        ({"state": {3: _Saves()}}, "state= has the name 3"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match=reason):
        Run().keeper(store, **options)
    assert list(store.list("")) == []  # nothing was created


def test_a_resume_without_a_reader_says_that_the_data_starts_over() -> None:
    store, run = MemoryStore(), Run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Sparse")
        keeper = run.keeper(store)
        assert keeper.resume() is None  # a fresh start is no resume
        run.step(keeper)
        keeper.close()
    keeper = Run().keeper(store)
    with pytest.warns(UserWarning, match="the data starts over.*reader="):
        keeper.resume()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.resume()  # once is enough


@pytest.mark.parametrize("every", [3, "30min"])
@pytest.mark.parametrize("missing", ["skipped", "accumulated"])
def test_a_loop_with_too_few_steps_does_not_end_in_silence(every: Any, missing: str) -> None:
    reader = Reader(Synthetic(samples=160, rows_total=200), batch_size=16)
    run = Run()
    keeper = run.keeper(MemoryStore(), reader=reader, strategy=ek.incremental(every=every))
    keeper.resume()
    taken = 0

    def loop() -> None:
        nonlocal taken
        for _ in reader:
            taken += 1
            if missing == "skipped" and taken in (1, 2):
                continue  # as for a loss that is not finite
            if missing == "accumulated" and taken % 4:
                continue
            run.step(keeper)

    with pytest.raises(StateError, match=r"call keeper\.step\(\).*batches_per_step="):
        loop()
    assert taken < 10
    assert not reader.finished
    # Nothing is lost: once the steps are taken, the reader goes on.
    while not reader.finished:
        with contextlib.suppress(StateError):
            for _ in reader:
                taken += 1
                run.step(keeper)
        keeper.step()
    assert taken == 10
    keeper.close()


def test_the_budget_of_a_user_is_not_the_keepers() -> None:
    reader = Reader(Synthetic(samples=160, rows_total=200), batch_size=16)
    run = Run()
    keeper = run.keeper(MemoryStore(), reader=reader.hand_out(7), strategy=EACH)
    keeper.resume()
    for _ in reader:
        run.step(keeper)
    assert keeper.steps == 7
    keeper.close()
    assert sum(1 for _ in reader) == 0
    assert sum(1 for _ in reader.hand_out(None)) == 3


def test_a_reader_of_ones_own_with_tensors_in_its_state() -> None:
    class Own:
        place = torch.tensor([1, 2])

        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place, 3: "three"}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict[3] == "three"
            self.place = state_dict["place"]

    store, reader = MemoryStore(), Own()
    with Run().keeper(store, reader=reader) as keeper:
        keeper.save()
    other = Own()
    other.place = torch.tensor([0, 0])
    Run().keeper(store, reader=other).resume()
    assert torch.equal(other.place, torch.tensor([1, 2]))


def test_versions_by_time() -> None:
    run, saved, clock = Run(), [], VirtualClock()
    keeper = run.keeper(
        MemoryStore(),
        strategy=ek.incremental(every="60s"),
        on_event=lambda name, details: saved.append(details["step"]),
        clock=clock,
    )
    for _ in range(40):
        clock.sleep(5)
        run.step(keeper)
        keeper.wait()
    assert saved == [12, 24, 36]


class Both(nn.Module):
    """A table of torch's and one on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(ROWS, DIM, sparse=True)
        self.bags = ek.EmbeddingBags(
            [ek.Table("user", rows=60, dim=DIM)], optimizer=ek.SGD(lr=0.1),
            cluster=ek.local(shards=2),
        )  # fmt: skip

    def train(self, optimizers: list[Any]) -> None:
        ids = torch.randint(0, 60, (8,))
        (self.plain(ids).sum() + self.bags({"user": ids}).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("where", ["shard", "cluster", "worker"])
def test_a_freeze_that_fails_leaves_nothing_frozen(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, store = Both(), MemoryStore()
    optimizers = [torch.optim.SGD(model.plain.parameters(), lr=0.1), model.bags.optimizer]
    keeper = ek.Keeper(
        store, model, optimizers, strategy=ek.incremental(every=1000, layout="consecutive")
    )
    keeper.resume()
    model.train(optimizers)
    keeper.save()
    keeper.wait()
    model.train(optimizers)
    if where == "shard":
        model.bags.cluster.kill(1)  # type: ignore[attr-defined]
        with pytest.raises(ShardLostError):
            keeper.save()
        keeper.recover()
    else:

        def fails(*_: Any) -> None:
            raise MemoryError("on purpose")

        with monkeypatch.context() as patched:
            if where == "cluster":
                patched.setattr(model.bags.cluster, "freeze", fails)
            else:
                patched.setattr("emberkeep.runtime.readahead.Worker.do", fails)
            with pytest.raises(MemoryError):
                keeper.save()
    model.train(optimizers)
    keeper.save()
    assert keeper.wait() is not None
    keeper.close()
    torch.manual_seed(1)
    other = Both()
    fresh = [torch.optim.SGD(other.plain.parameters(), lr=0.1), other.bags.optimizer]
    ek.Keeper(store, other, fresh).resume()
    assert torch.equal(other.plain.weight, model.plain.weight)
    (ids, planes), (_, expected) = (it.bags.cluster.read_all("user") for it in (other, model))
    assert ids.size
    assert planes["weight"].tobytes() == expected["weight"].tobytes()


# -- SIGTERM, metrics ----------------------------------------------------------------------------


def test_sigterm_finishes_the_step_saves_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    store, run, events = MemoryStore(), Run(), []
    keeper = run.keeper(
        store,
        strategy=ek.incremental(every=1000),
        on_event=lambda name, details: events.append((name, details)),
    )
    run.step(keeper)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run.step(keeper)
    assert stopped.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert events[-1] == ("stopped", {"step": 2, "saved_step": 2})
    assert "stopped after step 2" in capsys.readouterr().err
    fresh = Run(seed=3)
    manifest = fresh.keeper(store).resume()
    assert manifest is not None
    assert manifest.step == 2
    assert fresh.bits() == run.bits()


def test_ctrl_c_saves_as_sigterm_does(ctrl_c: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, run, events = MemoryStore(), Run(), []
    keeper = run.keeper(
        store,
        strategy=ek.incremental(every=1000),
        on_event=lambda name, details: events.append((name, details)),
    )

    def loop() -> None:
        with keeper:
            run.step(keeper)
            ctrl_c()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # for a second one
            run.step(keeper)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert events[-1] == ("stopped", {"step": 2, "saved_step": 2})
    printed = capfd.readouterr().err
    assert printed.index("Ctrl-C again to end at once") < printed.index(
        "SIGINT: stopped after step 2"
    )
    fresh = Run(seed=3)
    manifest = fresh.keeper(store).resume()
    assert manifest is not None
    assert fresh.bits() == run.bits()


def test_a_second_ctrl_c_ends_at_once(ctrl_c: Any) -> None:
    """Whatever is being written, and in the middle of it."""
    release, second = threading.Event(), iter([ctrl_c])

    class Slow(MemoryStore):
        def put(self, name: str, data: Any) -> int:
            if name.startswith("data/"):
                for send in second:  # once: files put later must not interrupt the next test
                    send()  # the handler is the main thread's, which waits for this
                release.wait(60)
            return super().put(name, data)

    run = Run()
    keeper = run.keeper(Slow(), strategy=ek.incremental(every=1000))

    def loop() -> None:
        with keeper:
            run.step(keeper)
            ctrl_c()
            run.step(keeper)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert not release.is_set()
    release.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_is_not_forgotten(ctrl_c: Any, number: int) -> None:
    store, run = MemoryStore(), Run()
    keeper = run.keeper(store, strategy=ek.incremental(every=1000))
    run.step(keeper)
    signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        keeper.close()
    assert [v.number for v in Repository.open(store).versions()] == [1]


def test_an_ignored_sigint_stays_ignored(ctrl_c: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Run().keeper(MemoryStore()):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_sigterm_does_not_wait_longer_than_the_grace_period() -> None:
    release, clock = threading.Event(), VirtualClock(pace=100)

    class Slow(MemoryStore):
        def put(self, name: str, data: Any) -> int:
            if name.startswith("data/"):
                release.wait(30)
            return super().put(name, data)

    run = Run()
    keeper = run.keeper(Slow(), grace=timedelta(seconds=25), clock=clock)
    run.step(keeper)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.step(keeper)
    assert 25 <= clock.monotonic() < 26
    release.set()


def test_handlers_are_put_back_and_other_threads_have_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run().keeper(MemoryStore()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    found = []

    def elsewhere() -> None:
        with Run().keeper(MemoryStore()):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


def test_costs(tmp_path: Path) -> None:
    run = Run()
    with run.keeper(tmp_path / "run") as keeper:
        for _ in range(3):
            run.step(keeper)
        keeper.wait()
        costs = keeper.costs()
    assert costs.versions == 3
    assert 0 < costs.pause_ms_median <= costs.pause_ms_max <= costs.stall_seconds * 1e3
    assert costs.written_nbytes == costs.kept_nbytes > 0


# -- plain state ---------------------------------------------------------------------------------


def test_state_survives_without_pickle() -> None:
    state = {
        "numbers": [1, -2.5, float("inf"), True, None, 2**70],
        "nested": {"tuple": (1, (2,)), 3: "three", (1, 2): b"\x00\xff", "$odd": 1},
        "counter": Counter({3: 1, 9: 2}),
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "scalar": torch.tensor(1.5),
        "sparse": torch.sparse_coo_tensor([[2, 0, 2]], [1.0, 2.0, 3.0], [4]),
        "array": np.arange(3, dtype=np.uint32),
        "numpy": np.float64(0.1),
    }
    back = unpack(Packed.decode(pack(state).encode()))
    for key in ("numbers", "nested", "counter", "numpy"):
        assert back[key] == state[key]
        assert type(back[key]) in (type(state[key]), float)
    assert torch.equal(back["tensor"], state["tensor"])
    assert back["scalar"].shape == ()
    assert torch.equal(back["sparse"]._values(), torch.tensor([1.0, 2.0, 3.0]))
    assert not back["sparse"].is_coalesced()
    assert back["array"].dtype == np.uint32
    assert np.isnan(unpack(pack({"x": float("nan")}))["x"])


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(ConfigError, match="state/a/1 is a function"):
        pack({"a": [1, lambda: 2]})
    with pytest.raises(ConfigError, match="sparse_csr"):
        pack(torch.eye(2).to_sparse_csr())
    with pytest.raises(DamageError, match="dense state is damaged"):
        Packed.decode(b"\x05\x00\x00\x00\x00\x00\x00\x00{...}")


@pytest.mark.parametrize(
    ("chosen", "versions"),
    [({"accuracy_budget": 1e-4}, 1), ({"bits": {}}, 1), ({"bits": 4}, 2), ({}, 1)],
    ids=["uncalibrated", "no table", "rounded", "exact"],
)  # fmt: skip
def test_a_state_that_a_version_holds_exactly_is_not_saved_again(
    chosen: dict[str, Any], versions: int
) -> None:
    store, run = MemoryStore(), Run()
    keeper = run.keeper(store, strategy=ek.incremental(every=1000, keep="all", **chosen))
    run.step(keeper)
    keeper.save()
    keeper.wait()
    keeper.close()
    assert len(Repository.open(store).versions()) == versions
