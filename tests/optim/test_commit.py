"""What may raise, raises before anything is written; what is written is owned and counted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim import OPTIMIZERS
from tests.table import same_bits

SHAPE = (6, 2)


def rows(*which: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    indices = torch.tensor([which])
    values = torch.arange(1.0, 1 + len(which) * shape[1]).view(len(which), shape[1])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def run(program: str, *args: str) -> str:
    command = [sys.executable, "-W", "error", "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    before, moments = table.detach().clone(), opt.state[table]["exp_avg"].clone()
    with pytest.raises(sparsestep.InputError, match=r"^Adam: "):
        opt.step()
    assert same_bits(table, before)
    assert same_bits(opt.state[table]["exp_avg"], moments)
    assert int(opt.state[table]["step"]) == 1


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


# Memory


LITTLE_MEMORY = """
import resource, torch, sparsestep
torch.set_num_threads(2)

def make():
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(200_000, 4))
    opt = sparsestep.AdamW([table], lr=0.01, weight_decay=0.1, semantics="dense")
    return table, opt

def step(table, opt, count, seed):
    ids = torch.randint(200_000, (1, count), generator=torch.Generator().manual_seed(seed))
    table.grad = torch.sparse_coo_tensor(
        ids, torch.ones(count, 4), table.shape, check_invariants=False
    )
    opt.catch_up(table, ids)
    opt.step()

pairs = make(), make()
for seed in range(3):
    for table, opt in pairs:
        step(table, opt, 3_000, seed)
table, opt = pairs[0]
count = 3_000_000  # needs far more to find duplicates than there is room for
ids = torch.randint(200_000, (1, count))
values = torch.ones(1, 4).expand(count, 4).contiguous()
table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
try:
    opt.step()
except MemoryError:
    print("no memory")
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
for table, opt in pairs:
    step(table, opt, 3_000, 9)
    opt.catch_up()
(a, first), (b, second) = pairs
distance = float((a.detach() - b.detach()).abs().max())
assert distance < 1e-6, distance
assert int(first.state[a]["step"]) == int(second.state[b]["step"]) == 4
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory as Linux lets it")
def test_a_step_that_runs_out_of_memory_has_not_happened():
    assert run(LITTLE_MEMORY) == "no memory\n"


# Threads and processes


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


FORK = """
import os, sys, torch, sparsestep
torch.set_num_threads(2)
table = torch.nn.Parameter(torch.zeros(200_000, 16))
ids = torch.arange(100_000)[None]
values = torch.ones(100_000, 16).exp().log()  # torch's threads have been at work, ours not
table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
opt = sparsestep.SGD([table], lr=1.0)
child = os.fork()
if not child:
    opt.step()
    # Torch's own threads would be waited for in vain.
    torch.set_num_threads(1)
    os._exit(0 if bool((table.detach()[:100_000] == -values).all()) else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_steps_although_the_parent_has_used_torchs_threads():
    assert run(FORK) == "0\n"


# Ownership


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_is_freed_without_the_garbage_collector(
    optimizer: type[torch.optim.Optimizer],
):
    table = nn.Parameter(torch.zeros(SHAPE))
    opt = optimizer([{"params": [table], "mask": torch.ones(6, dtype=torch.bool)}])
    gc.disable()
    try:
        for grad in (rows(1), torch.ones(SHAPE), rows(2)):
            table.grad = grad
            opt.step()
        freed = weakref.ref(opt), [weakref.ref(t) for t in opt.state[table].values() if t is Tensor]
        del opt
        assert freed[0]() is None
        assert all(tensor() is None for tensor in freed[1])
    finally:
        gc.enable()


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_a_parameter_that_takes_anothers_id_begins_anew(semantics: str):
    """Replaced parameters are let go of, so an id may come again; what was known of it may not."""
    opt = sparsestep.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5, semantics=semantics)
    for _ in range(50):
        table = nn.Parameter(torch.zeros(SHAPE))
        opt.param_groups[0]["params"] = [table]
        opt.state.clear()
        for which in (0, 1):
            table.grad = rows(which)
            opt.step()
        opt.catch_up()
        expected = torch.zeros(SHAPE)
        expected[:2] = -torch.tensor([1.0, 2.0])
        expected[0] *= 1.5 if semantics == "dense" else 1.0
        assert same_bits(table, expected)
    assert len(opt.store.addresses) <= 2


# Groups that are changed behind the optimizer's back


def test_a_parameter_that_is_appended_to_a_masked_group():
    first, second = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE))
    mask = torch.tensor([True, False] * 3)
    opt = sparsestep.Adam([{"params": [first], "mask": [mask]}], lr=1.0)
    first.grad = second.grad = torch.ones(SHAPE)
    opt.step()
    opt.param_groups[0]["params"].append(second)
    before = first.detach().clone()
    with pytest.raises(sparsestep.InputError, match=r"mask must be .* a list of 2"):
        opt.step()
    assert same_bits(first, before)
    opt.param_groups[0]["mask"].append(~mask)
    opt.step()
    assert second.ne(0).any(1).tolist() == [False, True] * 3
    assert first.ne(0).any(1).tolist() == [True, False] * 3


def test_a_parameter_that_has_outgrown_its_mask_is_refused():
    table = nn.Parameter(torch.zeros(4, 2))
    mask = torch.tensor([True, False, True, False])
    opt = sparsestep.SGD([{"params": [table], "mask": mask}], lr=1.0)
    for _ in range(2):
        table.grad = torch.ones(4, 2)
        opt.step()
    table.grad = None
    table.data = torch.zeros(8, 2)
    table.grad = torch.ones(8, 2)
    with pytest.raises(sparsestep.InputError, match=r"mask 0 must have shape \(8,\)"):
        opt.step()
    assert not table.any()


# The step stays outside graphs


@pytest.mark.parametrize("optimizer", [sparsestep.SparseAdam, sparsestep.AdamW])
def test_a_compiled_function_may_call_step(optimizer: type[torch.optim.Optimizer]):
    def trained(compiled: bool) -> Tensor:
        table = nn.Parameter(torch.linspace(-1, 1, 12).view(SHAPE))
        opt = optimizer([table], lr=0.1)

        def train(ids: Tensor) -> None:
            opt.zero_grad()
            nn.functional.embedding(ids, table, sparse=True).square().sum().backward()
            opt.step()

        if compiled:
            train = torch.compile(train, backend="eager")
        for ids in (torch.tensor([1, 2]), torch.tensor([2, 5])):
            train(ids)
        return table.detach()

    assert same_bits(trained(True), trained(False))
