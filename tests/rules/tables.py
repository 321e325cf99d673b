"""A small table, and how it is trained."""

import torch
from torch import Tensor

from sparsestep.optim.optimizer import RuleOptimizer


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4).to(dtype).requires_grad_()


def rows(*numbers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.linspace(0.5, 1, 4 * len(numbers)).reshape(-1, 4).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([numbers]), values, (6, 4), check_invariants=True)


def train(opt: RuleOptimizer, param: Tensor, steps: int = 4) -> Tensor:
    for step in range(steps):
        param.grad = rows(step, 5, dtype=param.dtype)
        opt.step()
    opt.catch_up()
    return param.detach()
