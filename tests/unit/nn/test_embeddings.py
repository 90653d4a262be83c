"""The torch front: what users of `nn.EmbeddingBag` and TorchRec expect of it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.errors import ConfigError, GradientError, IdError
from emberkeep.tables import Optimizer

TORCH_PEERS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (ek.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        ek.Adagrad(lr=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    ),
    "adam": (ek.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
}


def bags(optimizer: Optimizer | None = None, **settings: Any) -> ek.EmbeddingBags:
    tables = [
        ek.Table("user", rows=None, capacity=500, dim=8),
        ek.Table("item", rows=70, dim=8, features=["viewed", "bought"], pooling="mean"),
    ]
    return ek.EmbeddingBags(tables, optimizer=optimizer or ek.SGD(lr=0.1), **settings)


def jagged(generator: torch.Generator, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    """Bags of 0 to 5 ids."""
    lengths = torch.randint(0, 6, (batch,), generator=generator)
    offsets = lengths.cumsum(0) - lengths
    return torch.randint(0, rows, (int(lengths.sum()),), generator=generator), offsets


def batch_of(seed: int, size: int = 32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "user": torch.randint(0, 90, (size, 3), generator=generator),
        "viewed": jagged(generator, size, 70),
        "bought": torch.randint(0, 70, (size,), generator=generator),
    }


def trained(module: Any) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("spec", "peer"), TORCH_PEERS.values(), ids=TORCH_PEERS.keys())
def test_training_equals_torch_on_random_multi_hot_batches(
    spec: Optimizer, peer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    ours = bags(spec)
    user = nn.EmbeddingBag(90, 8, mode="sum", sparse=True)
    item = nn.EmbeddingBag(70, 8, mode="mean", sparse=True)
    with torch.no_grad():
        user.weight.copy_(ours.rows("user", torch.arange(90))["weight"])
        item.weight.copy_(ours.rows("item", torch.arange(70))["weight"])
    optimizer = peer([user.weight, item.weight])
    for step in range(25):
        batch = batch_of(step)
        out = ours(batch)
        expected = torch.stack(
            [user(batch["user"]), item(*batch["viewed"]), item(batch["bought"][:, None])], dim=1
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        out.backward(grad)
        ours.optimizer.step()
        optimizer.zero_grad()
        expected.backward(grad)
        optimizer.step()
    for table, module, rows in (("user", user, 90), ("item", item, 70)):
        got = ours.rows(table, torch.arange(rows))["weight"]
        torch.testing.assert_close(got, module.weight.detach(), rtol=1e-5, atol=2e-6)


def test_training_is_the_same_bits_from_run_to_run_and_for_every_thread_count() -> None:
    states = []
    for threads in (1, 1, 2, 4):
        module = bags(ek.Adam(lr=0.01), cluster=ek.local(threads=threads))
        for step in range(6):
            out = module(batch_of(step, size=900))
            out.backward(torch.sin(torch.arange(out.numel())).reshape(out.shape))
            module.optimizer.step()
        states.append(trained(module))
    assert all(state == states[0] for state in states)


class Jagged:
    """What is used of a KeyedJaggedTensor."""

    def __init__(self, features: dict[str, Any], weights: Tensor | None = None) -> None:
        parts, lengths = [], []
        for given in features.values():
            values, offsets = given if isinstance(given, tuple) else (given, None)
            if offsets is None:
                length = torch.full((values.shape[0],), values[0].numel())
            else:
                length = torch.diff(offsets, append=torch.tensor([values.numel()]))
            parts.append(values.reshape(-1))
            lengths.append(length)
        self._keys, self._weights = list(features), weights
        self._values, self._lengths = torch.cat(parts), torch.cat(lengths)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights


def test_a_keyed_jagged_tensor_is_the_same_batch() -> None:
    module, batch = bags(), batch_of(1)
    assert torch.equal(module(batch), module(Jagged(batch)))
    shuffled = {name: batch[name] for name in ("bought", "user", "viewed")}
    assert torch.equal(module(batch), module(Jagged({**shuffled, "other": batch["user"]})))


def test_offsets_may_carry_the_last_one() -> None:
    with_last, without = bags(include_last_offset=True), bags()
    batch = batch_of(2)
    values, offsets = batch["viewed"]
    longer = {**batch, "viewed": (values, torch.cat([offsets, torch.tensor([values.numel()])]))}
    assert torch.equal(with_last(longer), without(batch))


@pytest.mark.parametrize("form", ["mapping", "jagged"])
def test_per_sample_weights_scale_rows_and_get_gradients(form: str) -> None:
    table = ek.Table("t", rows=50, dim=6)
    ours = ek.EmbeddingBags([table], optimizer=ek.SGD(lr=0.3))
    reference = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)
    with torch.no_grad():
        reference.weight.copy_(ours.rows("t", torch.arange(50))["weight"])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        values, offsets = jagged(generator, 20, 50)
        weights = torch.rand(values.numel(), generator=generator)
        scale_ours, scale_torch = (
            weights.clone().requires_grad_(),
            weights.clone().requires_grad_(),
        )
        if form == "mapping":
            out = ours({"t": (values, offsets)}, per_sample_weights={"t": scale_ours})[:, 0]
        else:
            out = ours(Jagged({"t": (values, offsets)}, scale_ours))[:, 0]
        expected = reference(values, offsets, per_sample_weights=scale_torch)
        torch.testing.assert_close(out, expected)
        grad = torch.randn(out.shape, generator=generator)
        out.backward(grad)
        ours.optimizer.step()
        optimizer.zero_grad()
        expected.backward(grad)
        optimizer.step()
        torch.testing.assert_close(scale_ours.grad, scale_torch.grad)
    torch.testing.assert_close(
        ours.rows("t", torch.arange(50))["weight"], reference.weight.detach()
    )


def test_weights_of_a_mean_are_refused() -> None:
    batch = batch_of(0)
    weights = torch.ones(batch["viewed"][0].numel())
    with pytest.raises(ConfigError, match=r"'viewed'.*pooling='sum'"):
        bags()(batch, per_sample_weights={"viewed": weights})


def test_dims_that_differ_give_one_tensor_per_feature() -> None:
    tables = [
        ek.Table("a", rows=9, dim=4),
        ek.Table("b", rows=9, dim=6),
        ek.Table("c", rows=9, dim=4),
    ]
    module = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=1.0))
    ids = torch.tensor([1, 2, 2])
    out = module({"a": ids, "b": ids, "c": ids})
    assert {name: tuple(rows.shape) for name, rows in out.items()} == {
        "a": (3, 4), "b": (3, 6), "c": (3, 4),
    }  # fmt: skip
    before = module.rows("b", [2])["weight"]
    (out["a"].sum() + 3 * out["b"].sum()).backward()
    module.optimizer.step()
    torch.testing.assert_close(module.rows("b", [2])["weight"], before - 6.0)


def test_embeddings_without_pooling() -> None:
    tables = [
        ek.Table("word", rows=30, dim=4, features=["title", "query"]),
        ek.Table("x", rows=5, dim=3),
    ]
    module = ek.Embeddings(tables, optimizer=ek.Adagrad(lr=0.1))
    peer = nn.Embedding(30, 4, sparse=True)
    with torch.no_grad():
        peer.weight.copy_(module.rows("word", torch.arange(30))["weight"])
    optimizer = torch.optim.Adagrad(peer.parameters(), lr=0.1)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        title = torch.randint(0, 30, (7, 5), generator=generator)
        query = torch.randint(0, 30, (11,), generator=generator)
        out = module({"title": title, "query": (query, torch.tensor([0, 4])), "x": torch.tensor(3)})
        assert out["title"].shape == (7, 5, 4)
        assert out["query"].shape == (11, 4)
        assert out["x"].shape == (3,)
        grad_t, grad_q = torch.randn(7, 5, 4, generator=generator), torch.randn(11, 4)
        torch.autograd.backward([out["title"], out["query"]], [grad_t, grad_q])
        module.optimizer.step()
        optimizer.zero_grad()
        torch.autograd.backward([peer(title), peer(query)], [grad_t, grad_q])
        optimizer.step()
    torch.testing.assert_close(
        module.rows("word", torch.arange(30))["weight"], peer.weight.detach(), rtol=1e-5, atol=1e-6
    )


def test_gradients_accumulate_over_backward_passes_until_the_step() -> None:
    split, whole = bags(ek.Adagrad(lr=0.1)), bags(ek.Adagrad(lr=0.1))
    first, second = batch_of(1), batch_of(2)
    (split(first).sum() * 2).backward()
    (split(second) ** 2).sum().backward()
    (whole(first).sum() * 2 + (whole(second) ** 2).sum()).backward()
    for module in (split, whole):
        module.optimizer.step()
    for table in ("user", "item"):
        ids = split.touched_ids(table)
        assert torch.equal(ids, whole.touched_ids(table))
        for plane, values in split.rows(table, ids).items():
            torch.testing.assert_close(values, whole.rows(table, ids)[plane], rtol=1e-5, atol=1e-6)


def test_zero_grad_drops_what_was_accumulated() -> None:
    module = bags()
    module(batch_of(0)).sum().backward()
    module.optimizer.zero_grad()
    module.optimizer.step()
    assert module.touched_ids("user").numel() == 0


def test_schedulers_change_the_rate_of_the_rows() -> None:
    module = ek.EmbeddingBags([ek.Table("t", rows=4, dim=2)], optimizer=ek.SGD(lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(module.optimizer, step_size=1, gamma=0.1)
    ids, moved = {"t": torch.tensor([1])}, []
    for _ in range(3):
        before = module.rows("t", [1])["weight"]
        module(ids).sum().backward()
        module.optimizer.step()
        scheduler.step()
        moved.append(float((before - module.rows("t", [1])["weight"])[0, 0]))
    assert moved == pytest.approx([1.0, 0.1, 0.01], rel=1e-4)
    assert module.optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(1e-3)


def test_max_norm_bounds_every_trained_row() -> None:
    module = bags(ek.SGD(lr=5.0, max_norm=0.7))
    for step in range(5):
        module(batch_of(step)).square().sum().backward()
        module.optimizer.step()
    for table in ("user", "item"):
        norms = module.rows(table, module.touched_ids(table))["weight"].norm(dim=1)
        assert float(norms.max()) <= 0.7 * (1 + 1e-6)


def test_clip_grad_norm_counts_and_scales_the_rows() -> None:
    module = ek.EmbeddingBags([ek.Table("t", rows=9, dim=4)], optimizer=ek.SGD(lr=1.0))
    linear = nn.Linear(4, 1, bias=False)
    before = module.rows("t", torch.arange(9))["weight"]
    module({"t": torch.tensor([[2, 2], [3, 5]])}).backward(torch.full((2, 1, 4), 3.0))
    linear.weight.grad = torch.full((1, 4), 2.0)
    # Row 2 was looked up twice: its gradient is 6 in each of 4 columns; rows 3 and 5 have 3.
    expected = (4 * 36 + 2 * 4 * 9 + 4 * 4) ** 0.5
    handles = module.optimizer.param_groups[0]["params"]
    total = nn.utils.clip_grad_norm_([*linear.parameters(), *handles], max_norm=1.0)
    assert float(total) == pytest.approx(expected)
    module.optimizer.step()
    moved = before - module.rows("t", torch.arange(9))["weight"]
    torch.testing.assert_close(moved[2], torch.full((4,), 6.0 / expected), rtol=1e-4, atol=1e-5)


def test_grad_scaler_unscales_and_skips() -> None:
    plain, scaled = (
        ek.EmbeddingBags([ek.Table("t", rows=20, dim=4)], optimizer=ek.Adagrad(lr=0.1))
        for _ in range(2)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        ids = {"t": torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(seed))}
        plain(ids).square().sum().backward()
        plain.optimizer.step()
        scaler.scale(scaled(ids).square().sum()).backward()
        scaler.step(scaled.optimizer)
        scaler.update()
        scaled.optimizer.zero_grad()
    assert trained(plain) == trained(scaled)
    before = trained(scaled)
    scaler.scale(scaled(ids).sum() * float("inf")).backward()
    scaler.step(scaled.optimizer)
    scaler.update()
    assert trained(scaled) == before
    assert scaler.get_scale() == 512.0


def test_bf16_autocast_trains_float32_rows() -> None:
    module, linear = bags(), nn.Linear(8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear(module(batch_of(0)))
        assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    module.optimizer.step()
    ids = module.touched_ids("user")
    assert ids.numel() > 0
    assert torch.isfinite(module.rows("user", ids)["weight"]).all()


@pytest.mark.parametrize("mode", ["no_grad", "eval"])
def test_evaluation_changes_nothing(mode: str) -> None:
    module = bags()
    module(batch_of(0)).sum().backward()
    module.optimizer.step()
    before = trained(module)
    dirty = [slab.dirty_rows() for slab in module.cluster.shards[0].slabs]
    if mode == "eval":
        module.eval()
        out = module(batch_of(9))
        assert not out.requires_grad
    else:
        with torch.no_grad():
            module(batch_of(9))
    module.optimizer.step()
    assert trained(module) == before
    assert [slab.dirty_rows() for slab in module.cluster.shards[0].slabs] == dirty


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(ek.Adagrad(lr=0.1))
        torch.manual_seed(1)
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.top(self.bags(batch).flatten(1))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_compiled_model_equals_the_eager_one(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    eager, net = Net(), Net()
    compiled = torch.compile(net, backend=backend)
    for step in range(3):
        losses = []
        for model, source in ((eager, eager), (compiled, net)):
            loss = model(batch_of(step)).square().mean()
            loss.backward()
            source.bags.optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ids = eager.bags.touched_ids("user")
    torch.testing.assert_close(eager.bags.rows("user", ids), net.bags.rows("user", ids))


def test_state_dict_holds_every_trained_row_with_its_planes() -> None:
    source = bags(ek.Adam(lr=0.01))
    for step in range(3):
        source(batch_of(step)).sum().backward()
        source.optimizer.step()
    target = bags(ek.Adam(lr=0.01))
    target(batch_of(7)).sum().backward()  # rows that the state does not have go back to initial
    target.optimizer.step()
    target.load_state_dict(source.state_dict())
    assert trained(target) == trained(source)
    for module in (source, target):  # the step of the tables came along too
        module(batch_of(8)).sum().backward()
        module.optimizer.step()
    assert trained(target) == trained(source)


def test_a_state_of_an_earlier_release_is_known_however_whole_numbers_were_written() -> None:
    tables = [ek.Table("t", rows=4, dim=2, init=ek.Uniform(-1, 1))]
    module = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1))
    state = module.state_dict()
    (earlier, *_) = tables[0].earlier_origins(module.cluster.seed)
    state["rows.t.origin"] = torch.tensor(int(earlier, 16) - 2**63)
    module.load_state_dict(state)
    state["rows.t.origin"] += 1
    with pytest.raises(RuntimeError, match="another seed"):
        module.load_state_dict(state)


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    module = bags(ek.Adagrad(lr=0.1))
    module(batch_of(0)).sum().backward()
    module.optimizer.step()
    state, before = module.state_dict(), trained(module)
    without = {name: value for name, value in state.items() if "item.weight" not in name}
    with pytest.raises(RuntimeError, match=r"rows\.item\.weight"):
        module.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"rows\.other"):
        module.load_state_dict({**state, "rows.other.ids": torch.zeros(0)})
    with pytest.raises(RuntimeError, match="another seed"):
        bags(ek.Adagrad(lr=0.1), seed=1).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"'user'.*planes"):
        bags(ek.SGD(lr=0.1)).load_state_dict(state)
    narrow = {**state, "rows.item.weight": state["rows.item.weight"][:, :-1]}
    with pytest.raises(RuntimeError, match="'item', plane 'weight'"):
        module.load_state_dict(narrow)
    assert trained(module) == before


def test_errors_name_what_is_wrong() -> None:
    module = bags()
    batch = batch_of(0)
    with pytest.raises(IdError, match=r"'item' has rows 0\.\.69, id 70"):
        module({**batch, "bought": torch.full((32,), 70)})
    with pytest.raises(ConfigError, match="'bought' is missing"):
        module({name: batch[name] for name in ("user", "viewed")})
    with pytest.raises(ConfigError, match="'bought' has 3 samples where 'user' has 32"):
        module({**batch, "bought": torch.zeros(3, dtype=torch.long)})
    with pytest.raises(ConfigError, match=r"integers, not torch\.float32"):
        module({**batch, "bought": torch.zeros(32)})
    with pytest.raises(ConfigError, match="offsets must start at 0"):
        module({**batch, "viewed": (torch.zeros(4, dtype=torch.long), torch.arange(1, 33))})
    with pytest.raises(ConfigError, match="keys"):
        module([1, 2])
    with pytest.raises(ConfigError, match="no table 'nope'"):
        module.rows("nope", [1])
    with pytest.raises(ConfigError, match=r"emberkeep\.Adagrad"):
        ek.EmbeddingBags([ek.Table("t", rows=2, dim=2)], optimizer="adagrad")  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_changes_no_row() -> None:
    module = bags()
    module(batch_of(0)).sum().backward()
    module.optimizer.step()
    before = trained(module)
    out = module(batch_of(1))
    grad = torch.zeros(out.shape)
    grad[3, 2] = float("nan")
    out.backward(grad)
    with pytest.raises(GradientError, match="'item', id"):
        module.optimizer.step()
    assert trained(module) == before
    module.optimizer.zero_grad()
    module.optimizer.step()


def test_a_forgotten_optimizer_is_noticed() -> None:
    module = ek.EmbeddingBags([ek.Table("t", rows=2, dim=1)], optimizer=ek.SGD(lr=0.1))
    for _ in range(255):
        module({"t": torch.tensor([0])}).sum().backward()
    loss = module({"t": torch.tensor([0])}).sum()
    with pytest.warns(UserWarning, match=r"optimizer\.step"):
        loss.backward()


def test_ids_of_every_integer_type_and_empty_batches() -> None:
    module = ek.EmbeddingBags([ek.Table("t", rows=300, dim=2)], optimizer=ek.SGD(lr=0.1))
    expected = module({"t": torch.tensor([3, 200])})
    for kind in (torch.int32, torch.uint8, torch.int16):
        assert torch.equal(module({"t": torch.tensor([3, 200], dtype=kind)}), expected)
    assert torch.equal(module({"t": np.array([3, 200])}), expected)
    assert torch.equal(module({"t": torch.tensor([3, 0, 200, 0])[::2]}), expected)
    empty = module({"t": torch.zeros(0, dtype=torch.long)})
    assert empty.shape == (0, 1, 2)
    empty.sum().backward()
    module.optimizer.step()
    no_ids = module({"t": torch.zeros((4, 0), dtype=torch.long)})
    assert torch.equal(no_ids, torch.zeros(4, 1, 2))


def test_a_prefetch_of_rows_in_memory_finds_its_unique_rows_and_changes_no_bit() -> None:
    def trained(*, ahead: bool) -> dict[str, Tensor]:
        bags = ek.EmbeddingBags([ek.Table("t", rows=50, dim=4)], optimizer=ek.Adagrad(lr=0.1))
        random = torch.Generator().manual_seed(0)
        batches = [{"t": torch.randint(50, (16,), generator=random)} for _ in range(5)]
        for batch, following in itertools.pairwise(batches):
            bags(batch).square().sum().backward()
            if ahead:
                bags.prefetch(following)
                planned = bags._next[0]
                assert planned is not None
                assert planned[2].lookups[0]._unique is not None
            bags.optimizer.step()
            bags.optimizer.zero_grad()
        return bags.rows("t", range(50))

    ahead, plain = trained(ahead=True), trained(ahead=False)
    assert all(torch.equal(ahead[name], plain[name]) for name in plain)


def test_a_batch_that_is_filled_again_after_a_prefetch_is_looked_up_as_it_is_then() -> None:
    bags = ek.EmbeddingBags([ek.Table("t", rows=50, dim=4)], optimizer=ek.SGD(lr=0.1))
    fresh = {ids: bags({"t": torch.arange(ids, ids + 3)}).detach() for ids in (0, 10, 20)}
    assert not torch.equal(fresh[0], fresh[10])
    batch = {"t": torch.arange(3)}
    bags.prefetch(batch)
    batch["t"].add_(10)  # a loader's buffer
    assert torch.equal(bags(batch), fresh[10])
    bags.prefetch(batch)
    batch["t"] = torch.arange(20, 23)
    assert torch.equal(bags(batch), fresh[20])
    values, offsets = torch.arange(3), torch.tensor([0, 1, 2])
    bagged = {"t": (values, offsets)}
    expected = bags({"t": (values, torch.tensor([0, 2, 2]))}).detach()
    bags.prefetch(bagged)
    offsets[1] = 2
    assert torch.equal(bags(bagged), expected)
    bags.prefetch(bagged)
    assert torch.equal(bags(bagged), expected)  # unchanged, it is used
