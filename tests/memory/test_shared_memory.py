"""State in shared memory, for processes that train one model."""

import pytest
import torch

import sparsestep
from tests.table import EVERY, same_bits


def table(rows: int = 6) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4).requires_grad_()


def step(opt: torch.optim.Optimizer, param: torch.Tensor, *rows: int) -> None:
    values = torch.ones(len(rows), 4)
    param.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, param.shape)
    opt.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_every_optimizer_shares_its_state(steps: int):
    for variant in EVERY:
        if variant.options.get("dampening"):
            continue  # refused
        params = table(), table()
        shared, other = (variant([param], lr=0.1) for param in params)
        for opt, param in zip((shared, other), params, strict=True):
            for _ in range(steps):
                step(opt, param, 1, 5)
            if opt is shared:
                opt.share_memory()
                assert {spec.name for spec in variant.rule.state} <= opt.state[param].keys()
            step(opt, param, 0, 5)
        tensors = [v for v in shared.state[params[0]].values() if isinstance(v, torch.Tensor)]
        assert all(tensor.is_shared() for tensor in tensors), "the step has kept it there"
        assert same_bits(*(param.detach() for param in params)), str(variant)


def test_large_state_is_shared_with_another_process():
    param = table(rows=100_000)
    param.requires_grad_(False).share_memory_()
    opt = sparsestep.Adam([param.requires_grad_()], lr=0.1)
    opt.share_memory()
    worker = torch.multiprocessing.get_context("fork").Process(target=step, args=(opt, param, 7))
    torch.set_num_threads(1)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    kept = opt.state[param]
    assert float(kept["step"]) == 1
    assert kept["exp_avg"][7].ne(0).all()
    assert kept["exp_avg"].count_nonzero() == 4
