"""What may raise, raises before anything is written; steps of several threads take turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from tests.subject import refused
from tests.table import same_bits

SHAPE = (6, 2)


def rows(*which: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    indices = torch.tensor([which])
    values = torch.arange(1.0, 1 + len(which) * shape[1]).view(len(which), shape[1])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


# Torch's own kernel refuses after others have been planned


def refuse_foreach(opt: torch.optim.Optimizer, layer: nn.Parameter) -> None:
    opt.param_groups[0].update(foreach=True, lr=torch.tensor(0.1))


def refuse_fused(opt: torch.optim.Optimizer, layer: nn.Parameter) -> None:
    opt.param_groups[0].update(fused=True, foreach=True)


def refuse_state(opt: torch.optim.Optimizer, layer: nn.Parameter) -> None:
    del opt.state[layer]["step"]


def refuse_inference(opt: torch.optim.Optimizer, layer: nn.Parameter) -> None:
    with torch.inference_mode():
        layer.data = torch.zeros(layer.shape)


@pytest.mark.parametrize(
    "refuse",
    [refuse_foreach, refuse_fused, refuse_state, refuse_inference],
    ids=lambda f: f.__name__,
)
def test_nothing_is_written_where_torchs_kernel_would_refuse(
    refuse: Callable[[torch.optim.Optimizer, nn.Parameter], None],
):
    table, layer = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(3))
    opt = sparsestep.Adam([table, layer])
    table.grad, layer.grad = rows(1, 4), torch.ones(3)
    opt.step()
    refuse(opt, layer)
    layer.grad = torch.ones(3)
    with refused(opt, match=r"^Adam: "):
        opt.step()


@pytest.mark.parametrize("position", [0, 1])
def test_a_view_that_torch_does_not_write_stops_the_whole_step(position: int):
    plain = torch.zeros(SHAPE)
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    params, grads = [plain], [rows(1)]
    params.insert(position, conjugate)
    grads.insert(position, torch.ones(3, dtype=torch.complex64))
    opt = sparsestep.FunctionalAdam(params)
    with pytest.raises(sparsestep.InputError, match="conjugate"):
        opt.step(grads)
    assert not plain.any()
    assert not opt.state


# Threads


@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.SparseAdam])
def test_steps_of_several_threads_wait_for_each_other(optimizer: type[torch.optim.Optimizer]):
    """The first ones too, in which the state is made."""

    def trained(threads: int) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        table, layer = nn.Parameter(torch.zeros(500, 8)), nn.Parameter(torch.zeros(7, 3))
        table.grad = rows(*range(0, 500, 3), shape=(500, 8))
        layer.grad = torch.ones(7, 3)
        opt = optimizer([table, layer])
        barrier = threading.Barrier(threads)

        def work() -> None:
            barrier.wait()
            for _ in range(24 // threads):
                opt.step()

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return table.detach(), int(opt.state[table]["step"])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Python changes threads that much more often
    try:
        alone, together = trained(1), trained(4)
    finally:
        sys.setswitchinterval(interval)
    assert alone[1] == together[1] == 24
    assert same_bits(alone[0], together[0])


def test_two_threads_are_never_in_a_step_at_once():
    meeting: list[threading.Barrier] = []
    met: list[int] = []

    @sparsestep.rule(state={})
    def meet(param, grad, *, step, lr=0.1):
        if meeting:
            with suppress(threading.BrokenBarrierError):
                met.append(meeting[0].wait(0.5))
        return param - lr * grad

    table = nn.Parameter(torch.zeros(SHAPE))
    table.grad = rows(1, 4)
    opt = meet([table], engine="reference")
    opt.step()
    meeting.append(threading.Barrier(2))
    workers = [threading.Thread(target=opt.step) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not met
