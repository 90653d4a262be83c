"""What torch users do to a model without thinking: as in torch, or one line says why not."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emberkeep as ek
from emberkeep.errors import ConfigError, GradientError
from emberkeep.nn import AveragedModel

ROWS, DIM = 40, 4


class Net(nn.Module):
    def __init__(self, optimizer: Any = None, **settings: Any) -> None:
        super().__init__()
        table = ek.Table("t", rows=ROWS, dim=DIM)
        self.bags = ek.EmbeddingBags([table], optimizer=optimizer or ek.SGD(lr=0.1), **settings)
        torch.manual_seed(0)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.bags({"t": ids})[:, 0])
        return out


class Plain(nn.Module):
    """The same network with torch's own table."""

    def __init__(self, like: Net, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse)
        self.head = copy.deepcopy(like.head)
        with torch.no_grad():
            self.table.weight.copy_(rows_of(like))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def rows_of(net: Net) -> Tensor:
    return net.bags.rows("t", torch.arange(ROWS))["weight"]


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, ROWS, (8, 3), generator=torch.Generator().manual_seed(seed))


def backward(net: nn.Module, seed: int) -> None:
    net(ids_of(seed)).square().mean().backward()


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "EmbeddingBags of" in str(w.message)]


# -- tables that never train ---------------------------------------------------------------------


@pytest.mark.parametrize("given", ["model", "head"])
def test_an_optimizer_of_the_rest_alone_is_noticed_at_once(given: str) -> None:
    net = Net()
    parameters = net.parameters() if given == "model" else net.head.parameters()
    optimizer = torch.optim.Adam(parameters)
    before = rows_of(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
    assert torch.equal(rows_of(net), before)
    (line,) = said(caught)
    assert "'t'" in line
    assert "they do not train" in line
    assert ".optimizer.step()" in line


def test_gradients_that_are_always_dropped_are_noticed() -> None:
    net = Net()
    dense = torch.optim.SGD(net.head.parameters(), lr=0.1)
    dense_too = torch.optim.SGD(net.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for optimizer in (dense, net.bags.optimizer):
                optimizer.zero_grad()
            backward(net, step)
            dense.step()
            dense_too.step()
    assert len(said(caught)) == 1


@pytest.mark.parametrize("order", ["rows first", "rows last"])
def test_right_loops_are_not_warned_of(order: str) -> None:
    net = Net()
    dense = torch.optim.Adam(net.parameters())
    both = [net.bags.optimizer, dense] if order == "rows first" else [dense, net.bags.optimizer]
    other = nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            for _ in range(3):  # accumulates gradients
                backward(net, step)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            other(torch.ones(1, 2)).sum().backward()
            others.step()
            others.zero_grad()


# -- frozen rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["module", "model", "parameters", "no step"])
def test_frozen_rows_do_not_train_and_thaw(how: str) -> None:
    net = Net(ek.Adagrad(lr=0.1))
    if how == "module":
        net.bags.requires_grad_(False)
    elif how == "model":
        net.requires_grad_(False)
        net.head.requires_grad_(True)
    else:
        for parameter in net.bags.parameters():
            parameter.requires_grad = False
    before = rows_of(net)
    dense = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    for step in range(3):
        backward(net, step)
        dense.step()
        net.bags.optimizer.step()
    assert torch.equal(rows_of(net), before)
    assert net.bags.touched_ids("t").numel() == 0
    assert net.head.weight.grad is not None
    net.requires_grad_(True)
    backward(net, 0)
    net.bags.optimizer.step()
    assert not torch.equal(rows_of(net), before)


def test_weights_of_samples_train_over_frozen_rows() -> None:
    net = Net()
    net.bags.requires_grad_(False)
    weights = torch.ones(8, 3, requires_grad=True)
    net.bags({"t": ids_of(0)}, per_sample_weights={"t": weights}).sum().backward()
    net.bags.optimizer.step()
    expected = rows_of(net)[ids_of(0)].sum(-1)
    torch.testing.assert_close(weights.grad, expected)
    assert net.bags.touched_ids("t").numel() == 0


# -- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [False, True])
def test_clip_grad_norm_over_model_parameters_is_torchs(scaler: bool) -> None:
    ours = Net()
    peer = Plain(ours)
    scale = torch.amp.GradScaler("cpu", init_scale=256.0) if scaler else None
    dense, plain = torch.optim.SGD(ours.parameters(), 0.1), torch.optim.SGD(peer.parameters(), 0.1)
    for step in range(5):
        norms = []
        for net, optimizers in ((ours, [dense, ours.bags.optimizer]), (peer, [plain])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = net(ids_of(step)).square().mean() * 50
            (loss if scale is None else scale.scale(loss)).backward()
            if scale is not None:
                for optimizer in optimizers:
                    scale.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            for optimizer in optimizers:
                optimizer.step() if scale is None else scale.step(optimizer)
            if scale is not None:
                scale.update()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-6)
        assert float(norms[0]) > 0.5
    torch.testing.assert_close(rows_of(ours), peer.table.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.head.weight, peer.head.weight, rtol=1e-5, atol=1e-6)


def test_rows_that_are_counted_twice_are_noticed() -> None:
    net = Net()
    backward(net, 0)
    every = [*net.parameters(), *net.bags.optimizer.param_groups[0]["params"]]
    nn.utils.clip_grad_norm_(every, 1e-3)
    with pytest.warns(UserWarning, match="counts the rows already"):
        net.bags.optimizer.step()


def test_a_clip_by_another_gradient_that_is_not_finite_changes_no_row() -> None:
    net = Net()
    before = rows_of(net)
    backward(net, 0)
    net.head.weight.grad = torch.full_like(net.head.weight, float("nan"))
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(GradientError, match="no row was changed"):
        net.bags.optimizer.step()
    assert torch.equal(rows_of(net), before)


# -- to, copies, averages ------------------------------------------------------------------------


def test_to_moves_and_casts_outputs_and_trains_float32_rows() -> None:
    net = Net().to(torch.bfloat16)
    out = net.bags({"t": ids_of(0)})
    assert out.dtype == torch.bfloat16
    net(ids_of(0)).sum().backward()
    net.bags.optimizer.step()
    assert net.bags.rows("t", [0])["weight"].dtype == torch.float32
    assert net.bags.touched_ids("t").numel() > 0
    assert net.double()(ids_of(0)).dtype == torch.float64
    assert net.float()(ids_of(0)).dtype == torch.float32
    with pytest.raises(ConfigError, match="meta"):
        net.to("meta")
    with pytest.raises(ConfigError, match="servers"):
        net.share_memory()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_copy_has_the_rows_and_goes_its_own_way(how: str, shards: int, tmp_path: Path) -> None:
    net = Net(ek.Adam(lr=0.01), cluster=ek.local(shards=shards))

    def train(net: Net, first: int) -> None:
        for step in range(first, first + 3):
            backward(net, step)
            net.bags.optimizer.step()

    train(net, 0)
    net.bags.optimizer.param_groups[0]["lr"] = 0.02
    if how == "deepcopy":
        twin = copy.deepcopy(net)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        torch.save(net, tmp_path / "net.pt")
        twin = torch.load(tmp_path / "net.pt", weights_only=False)
    assert twin.bags.optimizer.param_groups[0]["lr"] == 0.02
    before = rows_of(net)
    train(twin, 3)
    assert torch.equal(rows_of(net), before)
    train(net, 3)
    states = [{k: v.numpy().tobytes() for k, v in n.bags.state_dict().items()} for n in (net, twin)]
    assert states[0] == states[1]


def test_a_copy_is_refused_where_rows_are_elsewhere(tmp_path: Path) -> None:
    tier = ek.Tier(tmp_path, memory="1MB")
    table = ek.Table("t", rows=ROWS, dim=DIM, tier=tier)
    bags = ek.EmbeddingBags([table], optimizer=ek.SGD(lr=0.1))
    with pytest.raises(ConfigError, match=r"below .*state_dict\(\) there"):
        copy.deepcopy(bags)
    bags.cluster.close()


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_an_average_of_models_averages_rows_as_torch_does(kind: str) -> None:
    ours = Net()
    peer = Plain(ours)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if kind == "ema" else None
    theirs = torch.optim.swa_utils.AveragedModel(peer, multi_avg_fn=average)
    own = AveragedModel(ours, multi_avg_fn=average)
    optimizers = [torch.optim.SGD(ours.head.parameters(), 0.1), ours.bags.optimizer]
    plain = torch.optim.SGD(peer.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="EmbeddingBags of")
        for step in range(5):
            for net, some in ((ours, optimizers), (peer, [plain])):
                for optimizer in some:
                    optimizer.zero_grad()
                backward(net, step)
                for optimizer in some:
                    optimizer.step()
            own.update_parameters(ours)
            theirs.update_parameters(peer)
        torch.testing.assert_close(own(ids_of(9)), theirs(ids_of(9)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        rows_of(own.module), theirs.module.table.weight.detach(), rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(rows_of(own.module), rows_of(ours))


def test_torchs_own_average_says_that_rows_are_not_in_it() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.head.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for step in range(3):
        backward(net, step)
        optimizer.step()
        net.bags.optimizer.step()
        average.update_parameters(net)
    with pytest.warns(UserWarning, match=r"emberkeep\.nn\.AveragedModel"):
        average(ids_of(0))


@pytest.mark.parametrize("edit", ["init", "data"])
def test_an_init_of_all_parameters_says_that_it_changes_no_row(edit: str) -> None:
    net = Net()
    for parameter in net.parameters():
        if edit == "init":
            nn.init.zeros_(parameter)
        else:
            parameter.data.add_(1.0)
    with pytest.warns(UserWarning, match="changes no row"):
        net(ids_of(0))


# -- what comes out ------------------------------------------------------------------------------


def test_an_output_by_name_in_any_case() -> None:
    tables = [ek.Table("a", rows=5, dim=2), ek.Table("b", rows=5, dim=2)]
    ids = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    by_name = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1), output="dict")
    stacked = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1))
    out = by_name(ids)
    assert list(out) == ["a", "b"]
    assert torch.equal(torch.stack(list(out.values()), 1), stacked(ids))
    other = [ek.Table("a", rows=5, dim=2), ek.Table("b", rows=5, dim=3)]
    with pytest.raises(ConfigError, match=r"the tables have \[2, 3\]: use 'dict'"):
        ek.EmbeddingBags(other, optimizer=ek.SGD(lr=0.1), output="tensor")
    with pytest.raises(ConfigError, match="'auto', 'tensor' or 'dict'"):
        ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1), output="list")  # type: ignore[arg-type]


def test_ddp_does_not_see_what_stands_for_rows() -> None:
    net = Net()
    assert "bags.stand_in" in dict(net.named_parameters())
    own = [name for m in net.modules() for name, _ in m.named_parameters(recurse=False)]
    assert own == ["weight", "bias"]
    assert not any("stand_in" in key for key in net.state_dict())
    net.load_state_dict(net.state_dict())


# -- rows from elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_ids_and_weights_alone_can_be_loaded(shards: int) -> None:
    net = Net(ek.Adagrad(lr=0.1), cluster=ek.local(shards=shards))
    backward(net, 0)
    net.bags.optimizer.step()
    before = rows_of(net)
    ids, weight = torch.tensor([5, 2, 30], dtype=torch.int32), torch.randn(3, DIM).double()
    result = net.load_state_dict(
        {"bags.rows.t.ids": ids, "bags.rows.t.weight": weight}, strict=False
    )
    rows = net.bags.rows("t", ids)
    assert torch.equal(rows["weight"], weight.float())
    assert not rows["accumulator"].any()
    assert net.bags.touched_ids("t").tolist() == [2, 5, 30]
    assert not torch.equal(rows_of(net), before)
    assert [key for key in result.missing_keys if key.startswith("bags.")] == [
        "bags.rows.t.origin", "bags.rows.t.steps", "bags.rows.t.accumulator",
    ]  # fmt: skip
    for state, text in (
        ({"ids": torch.tensor([1, 1]), "weight": torch.ones(2, DIM)}, "names an id twice"),
        ({"ids": torch.tensor([ROWS]), "weight": torch.ones(1, DIM)}, f"id {ROWS} is outside"),
        ({"ids": torch.tensor([1]), "weight": torch.ones(1, 2)}, "plane 'weight'"),
    ):
        held = rows_of(net)
        with pytest.raises(RuntimeError, match=text):
            net.bags.load_state_dict({f"rows.t.{k}": v for k, v in state.items()}, strict=False)
        assert torch.equal(rows_of(net), held)


def test_ddp_trains_rows_as_they_are() -> None:
    import torch.distributed as dist

    plain, wrapped = Net(), Net()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("error")  # restored by pytest
    try:
        ddp = nn.parallel.DistributedDataParallel(wrapped)
        for net, forward in ((plain, plain), (wrapped, ddp)):
            for step in range(3):
                backward(forward, step)
                net.bags.optimizer.step()
    finally:
        dist.destroy_process_group()
    assert torch.equal(rows_of(plain), rows_of(wrapped))


@pytest.mark.parametrize("how", ["model.zero_grad", "none"])
def test_zeroing_the_model_drops_the_gradients_of_a_skipped_step(how: str) -> None:
    ours = Net()
    peer = Plain(ours)
    plain = torch.optim.SGD(peer.parameters(), 0.1)
    for net in (ours, peer):
        backward(net, 1)
        if how == "model.zero_grad":
            net.zero_grad()
        backward(net, 2)
    plain.step()
    ours.bags.optimizer.step()
    torch.testing.assert_close(rows_of(ours), peer.table.weight.detach(), rtol=1e-5, atol=1e-6)


def test_two_lookups_in_one_backward_pass_are_both_trained() -> None:
    ours = Net()
    peer = Plain(ours)
    for net in (ours, peer):
        (net(ids_of(1)) + net(ids_of(2))).square().mean().backward()
    torch.optim.SGD(peer.parameters(), 0.1).step()
    ours.bags.optimizer.step()
    torch.testing.assert_close(rows_of(ours), peer.table.weight.detach(), rtol=1e-5, atol=1e-6)


def test_the_optimizer_goes_with_a_copy_and_takes_no_other_parameters() -> None:
    net = Net()
    twin, optimizer = copy.deepcopy((net, net.bags.optimizer))
    backward(twin, 0)
    optimizer.step()
    assert twin.bags.touched_ids("t").numel() > 0
    assert net.bags.touched_ids("t").numel() == 0
    with pytest.raises(ConfigError, match="trains rows alone"):
        net.bags.optimizer.add_param_group({"params": net.head.parameters(), "lr": 1.0})


@pytest.mark.parametrize("how", ["model.zero_grad", "grad=None"])
def test_a_step_after_gradients_were_taken_away_changes_no_row(how: str) -> None:
    """As in torch: what skips a bad batch by clearing gradients still calls step()."""
    net = Net()
    before = rows_of(net)
    backward(net, 0)
    if how == "model.zero_grad":
        net.zero_grad()
    else:
        for parameter in net.parameters():
            parameter.grad = None
    net.bags.optimizer.step()
    assert torch.equal(rows_of(net), before)
    backward(net, 1)
    net.bags.optimizer.step()
    assert not torch.equal(rows_of(net), before)


def test_rows_that_eval_keeps_from_training_are_noticed() -> None:
    """Forgetting train() after a validation does no harm to torch's embeddings."""
    net = Net()
    backward(net, 0)
    net.bags.optimizer.step()
    net.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        net(ids_of(1))
        net.bags.optimizer.step()
    backward(net, 1)
    with pytest.warns(UserWarning, match=r"after eval\(\) rows do not train.*call train\(\)"):
        net.bags.optimizer.step()
    net.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(net, 2)
        net.bags.optimizer.step()


def test_a_default_device_is_where_outputs_go() -> None:
    try:
        torch.set_default_device("meta")  # any that is not the host's
        with pytest.raises(ConfigError, match="cannot be on the meta device"):
            ek.EmbeddingBags([ek.Table("t", rows=4, dim=2)], optimizer=ek.SGD(lr=0.1))
        bags = ek.EmbeddingBags(
            [ek.Table("t", rows=4, dim=2, padding_idx=0)], optimizer=ek.SGD(lr=0.1), device="cpu"
        )
        ids = torch.tensor([[1, 0]], device="cpu")
        bags({"t": ids}).sum().backward()
        bags.optimizer.step()
        bags.load_state_dict(bags.state_dict())
        assert bags.rows("t", [1])["weight"].device.type == "cpu"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_is_refused(rate: float) -> None:
    net = Net()
    before = rows_of(net)
    net.bags.optimizer.param_groups[0]["lr"] = rate
    backward(net, 0)
    with pytest.raises(ConfigError, match="lr of tables t is"):
        net.bags.optimizer.step()
    assert torch.equal(rows_of(net), before)


# -- states of other kinds -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_of_other_types_are_cast_as_torch_casts(dtype: torch.dtype) -> None:
    net, other = Net(), Net()
    backward(net, 0)
    net.bags.optimizer.step()
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in net.state_dict().items()}
    other.load_state_dict(state)
    trained = net.bags.touched_ids("t")
    expected = net.bags.rows("t", trained)["weight"].to(dtype).float()
    assert torch.equal(other.bags.rows("t", trained)["weight"], expected)


def test_a_whole_weight_needs_no_ids() -> None:
    net = Net()
    weight = torch.randn(ROWS, DIM)
    found = net.load_state_dict({"bags.rows.t.weight": weight}, strict=False)
    assert "bags.rows.t.ids" in found.missing_keys
    assert torch.equal(rows_of(net), weight)
    with pytest.raises(RuntimeError, match=f"weights without ids; give all of its {ROWS} rows"):
        net.load_state_dict({"bags.rows.t.weight": weight[1:]}, strict=False)


@pytest.mark.parametrize(
    ("ids", "weight", "message"),
    [
        (torch.tensor([0.5, 1.5]), torch.ones(2, DIM), "ids are integers, not torch.float32"),
        (torch.tensor([[0, 1]]), torch.ones(2, DIM), "ids have one dimension"),
        (torch.tensor([0, 1]), torch.ones(2, DIM).to_sparse(), "a dense tensor"),
        (torch.tensor([0, 1]), "weights", "a tensor of numbers, not a str"),
    ],
)
def test_states_that_mean_nothing_are_refused(ids: Tensor, weight: Any, message: str) -> None:
    net = Net()
    before = rows_of(net)
    state = {"bags.rows.t.ids": ids, "bags.rows.t.weight": weight}
    with pytest.raises(RuntimeError, match=message):
        net.load_state_dict(state, strict=False)
    assert torch.equal(rows_of(net), before)


def test_a_whole_state_that_names_an_id_twice_is_refused() -> None:
    net = Net()
    backward(net, 0)
    net.bags.optimizer.step()
    state = net.state_dict()
    state["bags.rows.t.ids"] = torch.zeros_like(state["bags.rows.t.ids"])
    with pytest.raises(RuntimeError, match="names an id twice"):
        Net().load_state_dict(state)


def test_a_state_of_the_optimizer_finds_its_groups_by_their_tables() -> None:
    first = ek.Table("a", rows=4, dim=2)
    second = ek.Table("b", rows=4, dim=2, optimizer=ek.Adagrad(lr=0.5))
    one = ek.EmbeddingBags([first, second], optimizer=ek.SGD(lr=0.1))
    other = ek.EmbeddingBags([second, first], optimizer=ek.SGD(lr=0.2))
    one.optimizer.param_groups[1]["lr"] = 0.25
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    rates = {group["tables"][0]: group["lr"] for group in other.optimizer.param_groups}
    assert rates == {"a": 0.1, "b": 0.25}
    third = ek.EmbeddingBags([first, ek.Table("c", rows=4, dim=2)], optimizer=ek.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="set each group's lr by hand"):
        third.optimizer.load_state_dict(one.optimizer.state_dict())


def test_loaded_weights_do_not_train_with_the_state_of_others() -> None:
    """What a state does not bring starts as new, on a model that was trained before as well."""
    weight = torch.ones(10, 4)

    def loaded(steps: int) -> dict[str, Any]:
        bags = ek.EmbeddingBags([ek.Table("t", rows=10, dim=4)], optimizer=ek.Adam(lr=0.1))
        for _ in range(steps):
            bags({"t": torch.arange(10)}).sum().backward()
            bags.optimizer.step()
            bags.optimizer.zero_grad()
        bags.load_state_dict({"rows.t.weight": weight}, strict=False)
        bags({"t": torch.arange(10)}).sum().backward()
        bags.optimizer.step()
        return bags.rows("t", range(10))

    fresh, trained = loaded(0), loaded(5)
    assert all(torch.equal(fresh[name], trained[name]) for name in fresh)


@pytest.mark.parametrize("steps", [float("nan"), -1, "many"])
def test_steps_that_are_none_are_refused_before_any_row_changes(steps: Any) -> None:
    bags = ek.EmbeddingBags([ek.Table("t", rows=10, dim=4)], optimizer=ek.Adam(lr=0.1))
    bags({"t": torch.arange(10)}).sum().backward()
    bags.optimizer.step()
    state, before = bags.state_dict(), bags.rows("t", range(10))
    state["rows.t.weight"] = state["rows.t.weight"] + 1
    state["rows.t.steps"] = steps
    with pytest.raises(RuntimeError, match="steps are"):
        bags.load_state_dict(state)
    assert all(
        torch.equal(before[name], after) for name, after in bags.rows("t", range(10)).items()
    )
