"""``dense="elementwise"``: row-wise updates for tables, element-wise ones for layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep import IndexedGrad, RowwiseAdagrad, RowwiseAdam
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import each_engine, randn, running_on, same_bits, snapshot

PAIRS = [(RowwiseAdagrad, torch.optim.Adagrad), (RowwiseAdam, torch.optim.Adam)]
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__module__)
each_class = pytest.mark.parametrize("cls", [RowwiseAdagrad, RowwiseAdam], ids=lambda c: c.__name__)

SECOND = {RowwiseAdagrad: "sum", RowwiseAdam: "exp_avg_sq"}


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(shape or (6, 4)))


def coo(seed: int, shape: tuple[int, ...] = (6, 4)) -> Tensor:
    rows = torch.randint(shape[0], (1, 3), generator=torch.Generator().manual_seed(seed))
    values = randn((3, *shape[1:]), seed)
    return torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)


def step(opt: Any, *grads: Any) -> None:
    for param, grad in zip(opt.param_groups[0]["params"], grads, strict=True):
        param.grad = grad
    opt.step()


def is_elementwise(opt: Any, param: Tensor) -> bool:
    second: Tensor = opt.state[param][SECOND[type(opt)]]
    return second.shape == param.shape


# Against torch


@each_engine
@each_pair
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "maximize": True, "eps": 1e-3}, {"lr": torch.tensor(0.05)}],
    ids=["plain", "decay", "tensor lr"],
)
def test_dense_gradients_are_updated_as_by_torch(ours: Any, theirs: Any, options: Any, engine: str):
    shapes = [(), (7,), (5, 4), (2, 3, 5), (3, 0)]
    values = [*map(randn, shapes), randn((4, 5)).t()]
    values += (torch.view_as_complex(randn(shape)) for shape in [(6, 2), (4, 3, 2)])
    params = [[nn.Parameter(value.clone()) for value in values] for _ in range(2)]
    options = {"lr": 0.1, **options}
    with running_on(engine) as name:
        opts = [ours(params[0], dense="elementwise", engine=name, **options)]
        opts.append(theirs(params[1], **options))
        for _ in range(20):
            grads = [torch.randn(v.shape, dtype=v.dtype) for v in values]
            for opt in opts:
                step(opt, *grads)
    for mine, torchs in zip(*params, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=2e-5, atol=2e-6)
        for key, value in opts[1].state[torchs].items():
            torch.testing.assert_close(opts[0].state[mine][key], value, rtol=2e-5, atol=1e-7)


class Clicks(nn.Module):
    """DLRM in small: three tables and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum", sparse=True) for _ in "abc")
        self.mlp = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def losses(self, *optimizers: torch.optim.Optimizer) -> list[float]:
        found = []
        source = torch.Generator().manual_seed(1)
        for _ in range(20):
            ids = torch.randint(50, (3, 32, 2), generator=source)
            clicks = torch.rand(32, generator=source).round()
            rows = [each(i) for each, i in zip(self.tables, ids, strict=True)]
            logits = self.mlp(torch.cat(rows, 1)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
            for opt in optimizers:
                opt.zero_grad()
            loss.backward()
            for opt in optimizers:
                opt.step()
            found.append(loss.item())
        return found


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_one_optimizer_trains_as_dlrms_two(semantics: Any):
    options = {"lr": 0.1, "semantics": semantics}
    one, two, by_rows = Clicks(), Clicks(), Clicks()
    losses = one.losses(RowwiseAdagrad(one.parameters(), dense="elementwise", **options))
    expected = two.losses(
        RowwiseAdagrad(two.tables.parameters(), **options),
        torch.optim.Adagrad(two.mlp.parameters(), lr=0.1),
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    others = by_rows.losses(RowwiseAdagrad(by_rows.parameters(), **options))
    assert abs(others[1] - expected[1]) > 1e-3 * expected[1]


# Which formula


@each_class
def test_sparse_gradients_are_updated_by_rows(cls: Any):
    opts = [cls([table()], lr=0.1, **more) for more in ({"dense": "elementwise"}, {})]
    for seed in range(4):
        for opt in opts:
            step(opt, coo(seed))
    assert all(map(same_bits, *(map(flat, opts))))


def flat(opt: RuleOptimizer) -> list[Tensor]:
    param = opt.param_groups[0]["params"][0]
    return [param.detach(), *(torch.as_tensor(v) for _, v in sorted(opt.state[param].items()))]


FORMULAS = {RowwiseAdagrad: sparsestep.Adagrad, RowwiseAdam: sparsestep.Adam}


@each_engine
@each_class
@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_the_first_gradient_decides(cls: Any, semantics: Any, first: str, engine: str):
    """Later gradients of the other kind are updated by the same formula."""
    formula = cls if first == "sparse" else FORMULAS[cls]
    kinds = (coo, lambda seed: randn((6, 4), seed))
    grads = [kinds[(seed + (first == "dense")) % 2](seed) for seed in range(5)]
    with running_on(engine) as name:
        options = {"lr": 0.1, "semantics": semantics, "engine": name}
        opt, expected = (
            cls([table()], dense="elementwise", **options),
            formula([table()], **options),
        )
        for grad in grads:
            step(opt, grad)
            step(expected, grad)
            for each in (opt, expected):
                each.catch_up()
    assert is_elementwise(opt, opt.param_groups[0]["params"][0]) == (first == "dense")
    for mine, theirs in zip(flat(opt), flat(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@each_class
@pytest.mark.parametrize("is_materialized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_state_created_in_advance_does_not_decide(cls: Any, is_materialized: bool, masked: bool):
    params = [table(), table(), table(6)]
    mask = torch.tensor([True, False, True, True, False, True])
    options = {"mask": [mask, mask, None]} if masked else {}
    opt = cls(params, lr=0.1, dense="elementwise", **options)
    if is_materialized:
        opt.materialize_state()
    grads = IndexedGrad(None, randn((6, 4), 1)), coo(1), randn((6,), 1)
    functional = getattr(sparsestep, f"Functional{cls.__name__}")(
        params, lr=0.1, dense="elementwise", **options
    )
    if is_materialized:
        functional.optimizer.materialize_state()
    functional.step(list(grads))
    step(opt, grads[0].values, *grads[1:])
    for each in (opt, functional.optimizer):
        assert [is_elementwise(each, param) for param in params] == [True, False, True]
    assert params[0][1].equal(randn((6, 4))[1]) == masked


# State


@each_class
@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.int8, "rounding_seed": 3}], ids=str)
def test_checkpoints_keep_both_kinds_of_state(cls: Any, options: Any):
    def make() -> Any:
        return cls([table(), table()], lr=0.1, dense="elementwise", **options)

    opt = make()
    for seed in range(3):
        step(opt, coo(seed), randn((6, 4), seed))
    saved = copy.deepcopy(opt.state_dict())
    plain = cls([table()], lr=0.1, **options).state_dict()["param_groups"][0]
    assert saved["param_groups"][0].keys() == {*plain, "dense"}
    other, unset = make(), cls([table(), table()])  # the checkpoint has the option
    for each in (other, unset):
        each.load_state_dict(saved)
        with torch.no_grad():
            for mine, theirs in zip(each.params(), opt.params(), strict=True):
                mine.copy_(theirs)
    for each in (opt, other, unset):
        step(each, coo(7), randn((6, 4), 7))
    for each in (other, unset):
        assert all(map(same_bits, *map(tensors, (opt, each))))


def tensors(opt: RuleOptimizer) -> list[Tensor]:
    found = []
    for kept in snapshot(opt):
        found += kept.values() if isinstance(kept, dict) else [kept]
    return list(map(torch.as_tensor, found))


@each_pair
def test_checkpoints_of_torch_are_those_of_layers(ours: Any, theirs: Any):
    opt, torchs = ours([table()], lr=0.1, dense="elementwise"), theirs([table()], lr=0.1)
    step(torchs, randn((6, 4), 1))
    opt.load_state_dict(torchs.state_dict())
    step(opt, coo(1))
    step(torchs, coo(1).to_dense())
    seen = coo(1).to_dense().any(1)
    second = SECOND[ours]
    (mine,), (other,) = opt.state.values(), torchs.state.values()
    torch.testing.assert_close(mine[second][seen], other[second][seen])
    torchs.load_state_dict(opt.state_dict())


@each_class
def test_rows_are_forgotten_in_both_kinds_of_state(cls: Any):
    opt = cls([table(), table()], lr=0.1, dense="elementwise")
    step(opt, coo(1), randn((6, 4), 1))
    for param in opt.params():
        opt.forget(param, torch.arange(5))
        second = opt.state[param][SECOND[cls]]
        assert not second[:5].any()
        assert second.shape == (param.shape if param is opt.param_groups[0]["params"][1] else (6,))
        assert second[5].any() or param is opt.param_groups[0]["params"][0]


@each_class
def test_a_table_with_state_per_element_grows(cls: Any):
    rows = nn.Embedding(6, 4)
    opt = cls(rows.parameters(), lr=0.1, dense="elementwise")
    step(opt, randn((6, 4), 1))
    before = opt.state[rows.weight][SECOND[cls]].clone()
    rows.weight.grad = None
    sparsestep.nn.grow(rows, 8, opt)
    second = opt.state[rows.weight][SECOND[cls]]
    assert second.shape == (8, 4)
    assert same_bits(second[:6], before)
    assert not second[6:].any()
    step(opt, randn((8, 4), 2))
