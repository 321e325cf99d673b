"""Row-wise optimizers: ``dense="elementwise"`` for layers, and a first beta of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep import IndexedGrad, RowwiseAdagrad, RowwiseAdam
from tests.subject import Subject, refused
from tests.table import each_engine, randn, running_on, same_bits

SHAPE = (6, 4)
# The class, the element-wise one and torch's, and the second moment.
KINDS = {
    RowwiseAdagrad: (sparsestep.Adagrad, torch.optim.Adagrad, "sum"),
    RowwiseAdam: (sparsestep.Adam, torch.optim.Adam, "exp_avg_sq"),
}
each_class = pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.__name__)


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(shape or SHAPE))


def coo(seed: int) -> Tensor:
    rows = torch.randint(SHAPE[0], (1, 3), generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(rows, randn((3, 4), seed), SHAPE, check_invariants=True)


def step(opt: Any, *grads: Any) -> None:
    for param, grad in zip(opt.param_groups[0]["params"], grads, strict=True):
        param.grad = grad
    opt.step()


def second_of(opt: Any, param: Tensor) -> Tensor:
    return opt.state[param][KINDS[type(opt)][2]]


# Which formula


@each_engine
@each_class
@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_the_first_gradient_decides(cls: Any, semantics: Any, first: str, engine: str):
    """Later gradients of the other kind are updated by the same formula."""
    formula = cls if first == "sparse" else KINDS[cls][0]
    values = [randn(SHAPE)]
    if first == "dense":
        values += [*map(randn, [(), (7,), (2, 3, 5), (3, 0)]), randn((4, 5)).t()]
        values += [torch.view_as_complex(randn((4, 3, 2)))]
    with running_on(engine) as name:
        options = {"lr": torch.tensor(0.1), "eps": 1e-3, "semantics": semantics, "engine": name}
        opt, expected = (
            make([nn.Parameter(value.clone()) for value in values], **options, **more)
            for make, more in ((cls, {"dense": "elementwise"}), (formula, {}))
        )
        for seed in range(5):
            others = [torch.randn(value.shape, dtype=value.dtype) for value in values[1:]]
            is_sparse = (seed + (first == "dense")) % 2 == 0
            for each in (opt, expected):
                step(each, coo(seed) if is_sparse else randn(SHAPE, seed), *others)
                each.catch_up()
    assert (second_of(opt, next(opt.params())).dim() == 2) == (first == "dense")
    for mine, theirs in zip(Subject(opt).tensors, Subject(expected).tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@each_class
@pytest.mark.parametrize("is_materialized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_state_created_in_advance_does_not_decide(cls: Any, is_materialized: bool, masked: bool):
    params = [table(), table(), table(6)]
    mask = torch.tensor([True, False, True, True, False, True])
    options = {
        "lr": 0.1,
        "dense": "elementwise",
        **({"mask": [mask, mask, None]} if masked else {}),
    }
    opt = cls(params, **options)
    functional = getattr(sparsestep, f"Functional{cls.__name__}")(params, **options)
    if is_materialized:
        opt.materialize_state()
        functional.optimizer.materialize_state()
    functional.step([IndexedGrad(None, randn(SHAPE, 1)), coo(1), randn((6,), 1)])
    step(opt, randn(SHAPE, 1), coo(1), randn((6,), 1))
    for each in (opt, functional.optimizer):
        shapes = [second_of(each, param).shape for param in params]
        assert shapes == [SHAPE, (6,), (6,)]
    assert params[0][1].equal(randn(SHAPE)[1]) == masked


# State


@each_class
def test_checkpoints_of_torch_are_those_of_layers(cls: Any):
    opt, torchs = cls([table()], lr=0.1, dense="elementwise"), KINDS[cls][1]([table()], lr=0.1)
    step(torchs, randn(SHAPE, 1))
    opt.load_state_dict(torchs.state_dict())
    step(opt, coo(1))
    step(torchs, coo(1).to_dense())
    seen = coo(1).to_dense().any(1)
    (mine,), (other,) = opt.state.values(), torchs.state.values()
    torch.testing.assert_close(mine[KINDS[cls][2]][seen], other[KINDS[cls][2]][seen])
    torchs.load_state_dict(opt.state_dict())


@each_class
def test_rows_are_forgotten_and_tables_grow_in_both_kinds_of_state(cls: Any):
    sparse, dense = nn.Embedding(6, 4), nn.Embedding(6, 4)
    opt = cls([sparse.weight, dense.weight], lr=0.1, dense="elementwise")
    step(opt, torch.ones(SHAPE).to_sparse(1), torch.ones(SHAPE))
    for rows, shape in ((sparse, (8,)), (dense, (8, 4))):
        before = second_of(opt, rows.weight).clone()
        opt.forget(rows.weight, torch.arange(5))
        rows.weight.grad = None
        sparsestep.nn.grow(rows, 8, opt)
        second = second_of(opt, rows.weight)
        assert second.shape == shape
        assert same_bits(second[5], before[5])
        assert second[5].all()
        assert not second[:5].any()
        assert not second[6:].any()
    step(opt, None, randn((8, 4), 2))


# A first beta of zero: no first moment


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize("semantics", ["masked", "dense"])
@each_engine
def test_momentum_may_end_and_runs_may_be_resumed(semantics: Any, engine: str):
    """A first moment that is left over has no effect, in a checkpoint either."""

    def reloaded(old: Any, param: Tensor) -> tuple[Tensor, Any]:
        param = nn.Parameter(param.detach().clone())
        opt = RowwiseAdam([param], semantics=semantics, engine=name)
        opt.load_state_dict(old.state_dict())
        return param, opt

    with running_on(engine) as name:
        runs = []
        for is_resumed in (False, True):
            param: Tensor = table()
            opt = RowwiseAdam([param], 0.1, betas=(0.9, 0.9), semantics=semantics, engine=name)
            for number in range(8):
                if number == 3:
                    opt.param_groups[0]["betas"] = (0.0, 0.9)
                if number == 5 and is_resumed:
                    opt.catch_up()
                    opt.state[param]["exp_avg"].fill_(torch.nan)
                    param, opt = reloaded(opt, param)
                step(opt, coo(number))
            opt.catch_up()
            runs.append((param.detach(), opt.state[param]["exp_avg_sq"]))
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs)
        del opt.state[param]["exp_avg"]
        step(opt, coo(9))
        param, opt = reloaded(opt, param)
        assert opt.state[param].keys() == {"step", "exp_avg_sq"}
        opt.param_groups[0]["betas"] = (0.9, 0.9)
        with refused(opt):
            step(opt, coo(10))
