"""Values of options: tensors, switches, numbers, and changes between steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.rules.tables import rows, table, train
from tests.table import VARIANTS, Variant, same_bits

WITH_BETAS = [v for v in VARIANTS if "betas" in v([table()]).defaults]


@pytest.mark.parametrize("grad", [rows(1, 5), torch.linspace(-1, 1, 24).reshape(6, 4)])
@pytest.mark.parametrize("variant", WITH_BETAS, ids=str)
def test_betas_may_be_changed_in_place(variant: Variant, grad: Tensor):
    param, other = table(), table()
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    opt, plain = variant([param], betas=betas), variant([other], betas=(0.5, 0.75))
    for step in range(4):
        if step == 2:
            betas[0].fill_(0.25)
            betas[1].fill_(0.5)
            plain.param_groups[0]["betas"] = (0.25, 0.5)
        param.grad, other.grad = grad, grad
        opt.step()
        plain.step()
    assert opt.param_groups[0]["betas"] is betas
    assert torch.allclose(param, other, rtol=1e-6), "torch's kernel rounds tensors otherwise"


@pytest.mark.parametrize("fused", [None, True])
def test_tensor_betas_have_torchs_bits(fused: bool | None):
    results = []
    for cls in (sparsestep.Adam, torch.optim.Adam):
        param, betas = table(), (torch.tensor(0.5), torch.tensor(0.75))
        opt = cls([param], betas=betas, fused=fused)
        for _ in range(3):
            param.grad = torch.linspace(-1, 1, 24).reshape(6, 4)
            opt.step()
            betas[0].mul_(0.5)
        results.append(param.detach())
    assert same_bits(*results)


@pytest.mark.parametrize("optimizer", [sparsestep.SGD, sparsestep.RMSprop])
def test_other_options_may_be_tensors_too(optimizer: Any):
    param, other = table(), table()
    opt = optimizer([param], lr=torch.tensor(0.5), momentum=torch.tensor(0.5))
    plain = optimizer([other], lr=0.5, momentum=0.5)
    assert same_bits(train(opt, param), train(plain, other))
    assert opt.state[param].keys() == plain.state[other].keys()


@pytest.mark.parametrize(("name", "value"), [("amsgrad", 1), ("maximize", 0), ("nesterov", 0)])
def test_a_switch_may_be_written_as_a_number(name: str, value: int):
    """Torch's fused kernels take True or False alone, and are called when others have written."""
    cls = sparsestep.SGD if name == "nesterov" else sparsestep.Adam
    runs = []
    for given in (bool(value), value):
        table, weight = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
        opt = cls([table, weight], lr=0.1, fused=True)
        opt.param_groups[0][name] = given
        table.grad = torch.eye(4)[:, :2].to_sparse(1)
        weight.grad = torch.ones(4, 2)
        opt.step()
        runs.append((table.detach(), weight.detach()))
    assert all(map(same_bits, *runs))


@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize(
    ("cls", "name", "value", "message"),
    [
        (sparsestep.Adam, "betas", (0.9, 0.99, 0.999), "betas must be a pair"),
        (sparsestep.SGD, "momentum", float("nan"), "Invalid momentum value: nan"),
    ],
)
def test_what_it_could_not_be_made_with_is_refused_later_too(
    cls: type[RuleOptimizer], name: str, value: Any, message: str, semantics: str
):
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = cls([param], lr=0.1, semantics=semantics)
    opt.param_groups[0][name] = value
    param.grad = torch.eye(4)[:, :2].to_sparse(1)
    with pytest.raises(InputError, match=message):
        opt.step()
    assert bool((param == 1).all())


def test_a_schedule_may_end_just_below_zero():
    """LinearLR(end_factor=0) does: 0.1 ends at -5e-18 here."""
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.7, 0.0, total_iters=3)
    lowest = 0.0
    for _ in range(5):
        param.grad = torch.ones(4, 2).to_sparse(1)
        opt.step()
        schedule.step()
        lowest = min(lowest, opt.param_groups[0]["lr"])
    assert lowest < 0.0


@pytest.mark.parametrize("name", ["weight_decay", "momentum", "dampening"])
def test_a_number_may_be_written_as_a_switch(name: str):
    """Torch's kernels take no True for 1, and are called when others have written."""
    runs = []
    for given in (1, True):
        table, weight = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
        opt = sparsestep.SGD([table, weight], lr=0.1, momentum=0.5)
        opt.param_groups[0][name] = given
        for _ in range(2):
            table.grad = torch.eye(4)[:, :2].to_sparse(1)
            weight.grad = torch.ones(4, 2)
            opt.step()
        runs.append((table.detach(), weight.detach()))
    assert all(map(same_bits, *runs))


@pytest.mark.parametrize("name", ["lr", "dampening"])
@pytest.mark.parametrize("value", [(0.9, 1.0), [], "0.5", None], ids=repr)
def test_what_is_no_number_is_refused(name: str, value: Any):
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1, momentum=0.5)
    opt.param_groups[0][name] = value
    param.grad = torch.eye(4)[:, :2].to_sparse(1)
    with pytest.raises(InputError, match=f"SGD: param group 0: {name} must be a number"):
        opt.step()
    assert bool((param == 1).all())
