"""Parameters and gradients with strides, views of one table, and gradients with a graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.gradients import coo
from tests.table import each_engine, each_optimizer, running_on, same_bits


def odd_params() -> dict[str, torch.Tensor]:
    base = torch.arange(64.0).reshape(8, 8)
    return {
        "0-d": torch.tensor(3.0),
        "1-d": torch.arange(8.0),
        "transposed": base.clone().t(),
        "columns of a wider table": base.clone()[:, 2:5],
        "every other row": base.clone()[::2],
        "every other element": torch.arange(16.0)[::2],
        "offset view": base.clone().flatten()[5:53].view(6, 8),
        "permuted 3-d": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "reversed 3-d": torch.arange(24.0).reshape(2, 3, 4).permute(2, 1, 0),
        "channels last": torch.arange(120.0)
        .reshape(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last),
    }


@each_optimizer
@each_engine
@pytest.mark.parametrize("kind", odd_params())
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_params_of_any_strides(optimizer, engine, kind, dense):
    odd = odd_params()[kind]
    plain = torch.nn.Parameter(odd.detach().clone(memory_format=torch.contiguous_format))
    odd.requires_grad_()
    with running_on(engine) as name:
        name = "auto" if name == "native" else name  # not every layout has a native way
        for step in range(3):
            for param in (odd, plain):
                if step == 0:
                    param.opt = optimizer([param], lr=0.1, engine=name)
                grad = torch.sin(torch.arange(float(odd.numel())) + step).reshape(odd.shape)
                param.grad = grad if dense else grad.to_sparse((odd.dim() + 1) // 2)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", sparsestep.SlowWarning)
                    param.opt.step()
    assert torch.allclose(odd, plain, rtol=1e-6)


@each_optimizer
def test_what_the_native_engine_cannot_do_is_said(optimizer: type[RuleOptimizer]):
    odd = torch.arange(24.0).reshape(2, 3, 4).permute(2, 1, 0).requires_grad_()
    odd.grad = coo([1], (4, 3, 2))
    with pytest.raises(InputError, match="rows are evenly spaced"):
        optimizer([odd], engine="native").step()
    opt = optimizer([odd])
    with pytest.warns(sparsestep.SlowWarning, match="reference engine"):
        opt.step()
    opt.step()  # once is enough: a second warning would be an error here


@each_optimizer
@each_engine
def test_views_of_one_table_are_updated_one_after_the_other(optimizer, engine):
    """Overlapping params: the second starts from what the first has written."""
    together, apart = torch.ones(2, 600, 8).unbind()
    with running_on(engine) as name:
        for table in (together, apart):
            views = [table[:400].requires_grad_(), table[200:].requires_grad_()]
            for view in views:
                view.grad = coo(list(range(0, 400, 2)), (400, 8))
            one = table is together
            for params in [views] if one else [[view] for view in views]:
                optimizer(params, lr=0.1, engine=name).step()
    assert same_bits(together, apart)


@each_optimizer
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), data=st.data())
def test_values_of_any_strides(optimizer: type[RuleOptimizer], rows, columns, data):
    """Autograd hands out expanded and transposed values."""
    kind = data.draw(st.sampled_from(["expanded", "transposed", "sliced"]))
    values = {
        "expanded": torch.ones(1, 1).expand(rows, columns),
        "transposed": torch.arange(float(rows * columns)).reshape(columns, rows).t(),
        "sliced": torch.arange(float(rows * columns * 2)).reshape(rows, columns * 2)[:, ::2],
    }[kind]
    ids = data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    results = []
    for each in (values, values.contiguous()):
        param = torch.nn.Parameter(torch.ones(5, columns))
        param.grad = torch.sparse_coo_tensor(torch.tensor([ids]), each, (5, columns))
        optimizer([param], lr=0.1).step()
        results.append(param.detach())
    assert same_bits(*results)


@each_optimizer
def test_gradients_that_carry_a_graph(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = optimizer([param], lr=0.1)
    (grad,) = torch.autograd.grad(param.pow(3).sum(), [param], create_graph=True)
    param.grad = grad
    opt.step()
    assert param.is_leaf
    assert bool((param < 1).all())


def test_the_state_of_a_complex_parameter_is_complex():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = sparsestep.Adam([param], lr=0.1)
    optimizer.materialize_state()
    optimizer.state[param]["exp_avg"] = torch.zeros(3)
    param.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(sparsestep.InputError, match=r"'exp_avg' of a torch\.complex64 param"):
        optimizer.step()
    assert bool((param == 1).all())


@each_optimizer
def test_lazy_parameters_get_their_state_with_the_first_step(optimizer: type[RuleOptimizer]):
    """Torch's Adagrad refuses them, for it makes its state at once."""
    torch.manual_seed(0)
    model = torch.nn.LazyLinear(3)
    opt = optimizer(model.parameters(), lr=0.1)
    opt.step()
    opt.materialize_state()
    assert opt.state_dict()["state"] == {}
    assert [each.shape for each in opt.explain()] == [(0,), (0,)]
    with pytest.raises(InputError, match="a lazy parameter must be initialized before its state"):
        opt.share_memory()
    model(torch.ones(2, 4)).sum().backward()
    plain = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    other = optimizer(plain, lr=0.1)
    for param, copied in zip(model.parameters(), plain, strict=True):
        copied.grad = param.grad
    opt.step()
    other.step()
    assert all(map(same_bits, model.parameters(), plain))
    assert [each.shape for each in opt.explain()] == [(3, 4), (3,)]
