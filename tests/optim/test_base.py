"""A torch optimizer in every respect: construction, groups, hooks, closures."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.gradients import coo
from tests.table import (
    WITH_DECAY,
    Variant,
    each_engine,
    each_optimizer,
    each_stateful,
    running_on,
    same_bits,
    state_tensors,
    steps_of,
)

# Construction


@each_optimizer
def test_generators_of_params(optimizer: type[RuleOptimizer]):
    model = torch.nn.ModuleList(torch.nn.Embedding(5, 2, sparse=True) for _ in range(3))
    for params in (
        model.parameters(),
        (p for p in model.parameters()),
        [{"params": (p for p in model.parameters())}],
        iter([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]),
        model.named_parameters(),
    ):
        opt = optimizer(params)
        found = [p for group in opt.param_groups for p in group["params"]]
        assert len(found) in (2, 3)
        assert all(isinstance(p, torch.nn.Parameter) for p in found)


@each_stateful
def test_zero_learning_rate_moves_nothing_but_counts(variant: Variant):
    param = torch.nn.Parameter(torch.randn(4, 2))
    before = param.detach().clone()
    opt = variant([param], lr=0.0)
    param.grad = coo([1, 3], (4, 2))
    opt.step()
    assert torch.equal(param, before)
    assert steps_of(opt, param) in (1, None)
    for kept in state_tensors(opt):
        assert kept.dim() == 0 or kept[1].abs().min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "SparseAdam: Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element"),
        ({"eps": 0.0}, "Invalid epsilon value: 0.0"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": (0.9,)}, "betas must be a pair"),
        ({"engine": "cuda"}, "engine must be one of auto, native, reference, triton. Got 'cuda'"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sparsestep.SparseAdam([torch.zeros(2)], **options)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": 0.0}])
def test_bad_options_of_a_group(options: dict):
    opt = sparsestep.SparseAdam([torch.zeros(2)])
    with pytest.raises(ValueError, match="SparseAdam: param group 1: Invalid"):
        opt.add_param_group({"params": [torch.zeros(3)], **options})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("option", ["weight_decay", "amsgrad", "fused", "foreach"])
def test_options_that_it_does_not_have_are_refused(option: str):
    with pytest.raises(TypeError):
        sparsestep.SparseAdam([torch.zeros(2)], **{option: True})
    with pytest.raises(
        InputError, match=f"may only set lr, betas, eps, maximize, mask.*Got {option}"
    ):
        sparsestep.SparseAdam([{"params": [torch.zeros(2)], option: True}])


def test_a_group_may_carry_notes():
    opt = sparsestep.SparseAdam([{"params": [torch.zeros(2)], "name": "users"}])
    assert opt.param_groups[0]["name"] == "users"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_params_are_refused(layout: torch.layout):
    bad = torch.eye(3).to_sparse(layout=layout)
    with pytest.raises(
        ValueError,
        match=r"Sparse params at indices \[\[0, 1\]\]: SparseAdam requires dense parameter tensors",
    ):
        sparsestep.SparseAdam([torch.zeros(2), bad])


def test_complex_params_are_refused():
    with pytest.raises(
        ValueError,
        match=r"Complex params at indices \[\[1, 0\]\]: "
        "SparseAdam does not support complex parameters",
    ):
        sparsestep.SparseAdam(
            [{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2, dtype=torch.complex64)]}]
        )


# Steps


@each_optimizer
@each_engine
def test_none_gradients_are_skipped(optimizer: type[RuleOptimizer], engine: str):
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    with running_on(engine) as name:
        opt = optimizer(params, engine=name)
        first = params[0].detach().clone()
        params[1].grad = torch.ones(3)
        opt.step()
    assert torch.equal(params[0].detach(), first)
    assert steps_of(opt, params[0]) in (0, None)
    assert steps_of(opt, params[1]) in (1, None)


@each_optimizer
@each_engine
def test_an_empty_gradient_counts_and_changes_nothing_else(
    optimizer: type[RuleOptimizer], engine: str
):
    param = torch.nn.Parameter(torch.randn(4, 2))
    with running_on(engine) as name:
        opt = optimizer([param], engine=name)
        param.grad = coo([1], (4, 2))
        opt.step()
        kept = [param.detach().clone(), *(t.clone() for t in state_tensors(opt) if t.dim())]
        param.grad = torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.zeros(0, 2), (4, 2))
        opt.step()
    assert steps_of(opt, param) in (2, None)
    after = [param.detach(), *(t for t in state_tensors(opt) if t.dim())]
    assert all(map(same_bits, kept, after))


@each_engine
@each_stateful
def test_a_stored_zero_is_touched(variant: Variant, engine: str):
    param = torch.nn.Parameter(torch.full((3, 2), 2.0))
    has_momentum = {"exp_avg", "momentum_buffer"} & set(variant.rule.state_names)
    options = {} if has_momentum or variant.cls not in WITH_DECAY else {"weight_decay": 0.1}
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, engine=name, **options)
        param.grad = coo([0, 1], (3, 2))
        opt.step()
        once = param.detach().clone()
        param.grad = coo([0], (3, 2), value=0.0)
        opt.step()
    if variant.cls is sparsestep.Ftrl:
        # Its value is a function of the gradients so far: a zero does not move it.
        assert steps_of(opt, param) == 2
    else:
        assert bool((param[0] != once[0]).all())  # its momentum or decay goes on
    assert same_bits(param[1:].detach(), once[1:])


@each_optimizer
def test_closure_hooks_and_zero_grad(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.ones(3, 2))
    opt = optimizer([param], lr=0.1)
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = param.square().sum()
        loss.backward()
        calls.append("closure")
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == 6.0
    assert calls == ["pre", "closure", "post"]
    opt.zero_grad()
    assert param.grad is None


@each_optimizer
def test_global_hooks_and_profilers_see_the_step(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.ones(3, 2))
    opt = optimizer([param], lr=0.1)
    param.grad = torch.ones(3, 2)
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    opt.step()
    for handle in handles:
        handle.remove()
    opt.step()
    assert seen == ["pre", "post"]
    with torch.autograd.profiler.profile() as profile:
        opt.step()
    assert any(f"Optimizer.step#{optimizer.__name__}.step" in e.key for e in profile.key_averages())
    assert steps_of(opt, param) in (3, None)


@each_optimizer
def test_a_hook_may_change_the_arguments(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.ones(3, 2))
    opt = optimizer([param], lr=0.1)
    opt.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7.0), kwargs))
    assert opt.step() == 7.0


@each_optimizer
def test_zero_grad_that_keeps_the_tensors(optimizer: type[RuleOptimizer]):
    table = torch.nn.Embedding(5, 2, sparse=True)
    opt = optimizer(table.parameters(), lr=0.1)
    for _ in range(2):
        opt.zero_grad(set_to_none=False)
        table(torch.tensor([1, 2])).sum().backward()
        opt.step()
    assert steps_of(opt, table.weight) in (2, None)


@each_stateful
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_param_given_twice_is_updated_twice(variant: Variant, dense: bool):
    """As torch does it: three times in one step is three steps."""
    often, apart = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opts = [variant([often, often, often], lr=0.1), variant([apart], lr=0.1)]
    for param in (often, apart):
        grad = coo([1, 2], (4, 2))
        param.grad = grad.to_dense() if dense else grad
    for _ in range(2):
        opts[0].step()
        for _ in range(3):
            opts[1].step()
    assert steps_of(opts[0], often) in (6, None)
    assert same_bits(often.detach(), apart.detach())


@each_optimizer
@each_engine
@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])], ids=str)
def test_learning_rate_as_number_or_tensor(optimizer: type[RuleOptimizer], engine: str, lr):
    params = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    with running_on(engine) as name:
        for param, rate in zip(params, (lr.clone(), lr.item()), strict=True):
            opt = optimizer([param], lr=rate, engine=name)
            param.grad = coo([1], (4, 2))
            opt.step()
            opt.param_groups[0]["lr"] *= 0.5
            opt.step()
    assert same_bits(params[0].detach(), params[1].detach())


@each_optimizer
def test_writing_a_param_is_noticed_by_autograd(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = optimizer([param])
    loss = param.square().sum()
    param.grad = coo([1], (4, 2))
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
