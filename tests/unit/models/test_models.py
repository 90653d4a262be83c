from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from emberkeep.errors import ConfigError
from emberkeep.models import DLRM, KAGGLE, PNN, TERABYTE, DeepFM, DenseOnly, DLRMShape, Ids

BATCH, FEATURES, DENSE, DIM = 5, 4, 3, 8
SMALL = DLRMShape(bottom=(16, DIM), top=(12, 1))


class Lookup(nn.Module):
    """The least that a model asks of its embeddings."""

    def __init__(self, dim: int, rows: int = 10) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(7)
        self.rows = nn.Parameter(torch.randn(FEATURES, rows, dim, generator=random))

    def forward(self, ids: Ids) -> Tensor:
        return torch.stack([self.rows[i][ids[f"f{i}"]] for i in range(FEATURES)], dim=1)


def inputs() -> tuple[Tensor, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    dense = torch.randn(BATCH, DENSE, generator=random)
    return dense, {
        f"f{i}": torch.randint(0, 10, (BATCH,), generator=random) for i in range(FEATURES)
    }


def build(kind: str, seed: int = 0) -> nn.Module:
    if kind == "dlrm":
        return DLRM(Lookup(DIM), SMALL, features=FEATURES, dense=DENSE, seed=seed)
    if kind == "deepfm":
        return DeepFM(
            Lookup(DIM + 1), dim=DIM, features=FEATURES, dense=DENSE, hidden=(16, 8), seed=seed
        )
    if kind == "pnn":
        return PNN(Lookup(DIM), dim=DIM, features=FEATURES, dense=DENSE, hidden=(16,), seed=seed)
    return DenseOnly(SMALL, dense=DENSE, seed=seed)


def test_dlrm_equals_its_definition() -> None:
    model = build("dlrm")
    dense, ids = inputs()
    x = model.bottom(dense)
    for sample in range(BATCH):
        vectors = [x[sample], *model.embeddings(ids)[sample]]
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected = model.top(torch.cat((x[sample], torch.stack(pairs))))
        torch.testing.assert_close(model(dense, ids)[sample], expected.squeeze())


def test_deepfm_equals_its_definition() -> None:
    model = build("deepfm")
    dense, ids = inputs()
    for sample in range(BATCH):
        scaled = dense[sample].unsqueeze(1) * model.fields.vectors
        fields = torch.cat((model.embeddings(ids)[sample], scaled))
        vectors, weights = fields[:, :DIM], fields[:, DIM]
        second = sum(a @ b for a, b in itertools.combinations(vectors, 2))
        expected = model.bias + weights.sum() + second + model.deep(vectors.flatten()).squeeze()
        torch.testing.assert_close(model(dense, ids)[sample], expected, rtol=1e-4, atol=1e-5)


def test_pnn_equals_its_definition() -> None:
    model = build("pnn")
    dense, ids = inputs()
    for sample in range(BATCH):
        vectors = torch.cat(
            (model.embeddings(ids)[sample], dense[sample].unsqueeze(1) * model.fields.vectors)
        )
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected = model.deep(torch.cat((vectors.flatten(), torch.stack(pairs)))).squeeze()
        torch.testing.assert_close(model(dense, ids)[sample], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "pnn", "dense"])
def test_initial_parameters_depend_on_the_seed_alone(kind: str) -> None:
    before = torch.random.get_rng_state()
    first = build(kind, seed=5)
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator moved"
    torch.manual_seed(2)
    same, other = build(kind, seed=5), build(kind, seed=6)
    pairs = list(zip(first.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )
    assert all(torch.isfinite(a).all() for a, _ in pairs)


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "pnn"])
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    model = build(kind)
    dense, ids = inputs()
    logits = model(dense, ids)
    assert logits.shape == (BATCH,)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_presets_have_the_papers_shapes() -> None:
    def widths(network: nn.Sequential) -> list[tuple[int, int]]:
        return [(m.in_features, m.out_features) for m in network if isinstance(m, nn.Linear)]

    kaggle, terabyte = DLRM(nn.Identity(), KAGGLE), DLRM(nn.Identity(), TERABYTE)
    assert (KAGGLE.dim, TERABYTE.dim) == (16, 64)
    assert widths(kaggle.bottom) == [(13, 512), (512, 256), (256, 64), (64, 16)]
    assert widths(kaggle.top) == [(16 + 27 * 26 // 2, 512), (512, 256), (256, 1)]
    assert widths(terabyte.bottom) == [(13, 512), (512, 256), (256, 64)]
    assert widths(terabyte.top) == [(64 + 27 * 26 // 2, 512), (512, 512), (512, 256), (256, 1)]


def test_derived_buffers_stay_out_of_the_state() -> None:
    assert not [name for name in build("dlrm").state_dict() if "pairs" in name]


@pytest.mark.parametrize(
    ("bottom", "top"), [((), (1,)), ((16,), ()), ((16, 0), (1,)), ((16,), (8, 2))]
)
def test_a_shape_that_cannot_work_is_refused(bottom: tuple, top: tuple) -> None:
    with pytest.raises(ConfigError):
        DLRMShape(bottom=bottom, top=top)
