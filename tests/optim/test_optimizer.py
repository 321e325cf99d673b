"""A torch optimizer in every respect: construction, groups, hooks, unusual parameters."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import OPTIMIZERS
from tests.generate.garbage import Unusable
from tests.subject import refused
from tests.table import (
    FEW,
    WITH_DENSE,
    all_same_bits,
    each_engine,
    running_on,
    same_bits,
    state_tensors,
    steps_of,
)


def coo(rows: list[int], shape: tuple[int, ...], value: float = 1.0) -> torch.Tensor:
    values = torch.full((len(rows), *shape[1:]), value)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape)


# Steps


def test_hooks_closures_and_profilers():
    param = nn.Parameter(torch.ones(3, 2))
    opt = sparsestep.SparseAdam([param], lr=0.1)
    calls = []
    handles = [
        opt.register_step_pre_hook(lambda *_: calls.append("pre")),
        opt.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = param.square().sum()
        loss.backward()
        calls.append("closure")
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == 6.0
    assert sorted(calls[:2]) == ["global pre", "pre"]
    assert calls[2] == "closure"
    assert sorted(calls[3:]) == ["global post", "post"]
    for handle in handles:
        handle.remove()
    with torch.autograd.profiler.profile() as profile:
        opt.step()
    assert any("Optimizer.step#SparseAdam.step" in event.key for event in profile.key_averages())
    assert len(calls) == 5
    opt.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7.0), kwargs))
    assert opt.step() == 7.0, "a hook may change the arguments"


def test_a_param_given_twice_is_updated_twice():
    """As torch does it: three times in one step is three steps."""
    for variant, dense in product(FEW, (False, True)):
        often, apart = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
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
        assert same_bits(often, apart), variant
        if variant.cls is sparsestep.SGD:  # as torch's
            assert opts[0].state_dict()["state"] == {}


def test_two_threads_are_never_in_a_step_at_once():
    meeting: list[threading.Barrier] = []
    met: list[int] = []

    @sparsestep.rule(state={})
    def meet(param, grad, *, step, lr=0.1):
        if meeting:
            with suppress(threading.BrokenBarrierError):
                met.append(meeting[0].wait(0.5))
        return param - lr * grad

    table = nn.Parameter(torch.zeros(6, 2))
    table.grad = coo([1, 4], (6, 2))
    opt = meet([table], engine="reference")
    opt.step()
    meeting.append(threading.Barrier(2))
    workers = [threading.Thread(target=opt.step) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not met


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_what_is_created_loaded_or_masked_in_inference_mode_can_be_written_outside(cls: Any):
    masks = [torch.ones(6, 2, dtype=torch.bool), torch.eye(6, 2, dtype=torch.bool)]
    params = [nn.Parameter(torch.ones(6, 2)) for _ in masks]
    opt = cls(iter([{"params": iter(params), "mask": masks}]), lr=0.1)
    for inside in (True, False):
        with torch.inference_mode(inside):
            for param in params:
                param.grad = torch.ones(6, 2)
            opt.step()
        params[1].data = params[1].t().contiguous().t()  # its state has to be made again
    opt.step()
    with torch.inference_mode():
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        opt.set_mask(params[0], torch.tensor([True, False] * 3))
    opt.step()
    assert all(params[0][0] != 1)
    tensors = [*opt.param_groups[0]["mask"], *state_tensors(opt)]
    assert not any(each.is_inference() for each in tensors)


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize("cls", WITH_DENSE)
def test_rows_that_were_deferred_in_inference_mode_catch_up_outside(cls: Any):
    param = nn.Parameter(torch.ones(6, 2))
    opt = cls([param], lr=0.1, semantics="dense")
    for row in range(4):
        param.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 2), (6, 2))
        with torch.inference_mode(row == 0):
            opt.step()
    opt.catch_up()
    assert all(param[3] != 1)


# Torch's own kernel refuses after others have been planned


def use_inference_tensor(layer: nn.Parameter) -> None:
    with torch.inference_mode():
        layer.data = torch.zeros(layer.shape)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "foreach": lambda opt, layer: opt.param_groups[0].update(foreach=True, lr=torch.tensor(0.1)),
    "fused": lambda opt, layer: opt.param_groups[0].update(fused=True, foreach=True),
    "state": lambda opt, layer: opt.state[layer].pop("step"),
    "inference": lambda opt, layer: use_inference_tensor(layer),
}


def test_nothing_is_written_where_torchs_kernel_would_refuse():
    for kind, spoil in REFUSED.items():
        table, layer = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(3))
        opt = sparsestep.Adam([table, layer])
        table.grad, layer.grad = coo([1, 4], (6, 2)), torch.ones(3)
        opt.step()
        spoil(opt, layer)
        layer.grad = torch.ones(3)
        with refused(opt, note=kind):
            opt.step()
    view, whole = torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(6, 2)
    for params in ([view, whole], [whole, view]):
        by_hand = sparsestep.FunctionalAdam(params)
        with refused(by_hand, note="a view that torch does not write"):
            by_hand.step([torch.ones_like(param) for param in params])


# Groups that are changed behind the optimizer's back


def test_a_parameter_that_is_appended_to_a_masked_group():
    first, second = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(6, 2))
    mask = torch.tensor([True, False] * 3)
    opt = sparsestep.Adam([{"params": [first], "mask": [mask]}], lr=1.0)
    first.grad = second.grad = torch.ones(6, 2)
    opt.step()
    opt.param_groups[0]["params"].append(second)
    with refused(opt):
        opt.step()
    opt.param_groups[0]["mask"].append(~mask)
    opt.step()
    assert second.ne(0).any(1).tolist() == [False, True] * 3
    assert first.ne(0).any(1).tolist() == [True, False] * 3
    second.grad = None
    second.data = torch.zeros(8, 2)
    second.grad = torch.ones(8, 2)
    with refused(opt):
        opt.step()


def test_a_parameter_that_takes_anothers_id_starts_over():
    """Replaced parameters are freed, so an id may come again; what was known of it may not."""
    opt = sparsestep.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5, semantics="dense")
    for _ in range(20):
        table = nn.Parameter(torch.zeros(6, 2))
        opt.param_groups[0]["params"] = [table]
        opt.state.clear()
        for row in (0, 1):
            table.grad = coo([row], (6, 2), value=row + 1.0)
            opt.step()
        opt.catch_up()
        expected = torch.zeros(6, 2)
        expected[0] = -1.5
        expected[1] = -2.0
        assert same_bits(table, expected)
    assert len(opt.store.addresses) <= 2


def test_an_optimizer_is_freed_without_the_garbage_collector():
    for cls in OPTIMIZERS:
        table = nn.Parameter(torch.zeros(6, 2))
        opt = cls([{"params": [table], "mask": torch.ones(6, dtype=torch.bool)}])
        gc.disable()
        try:
            for grad in (coo([1], (6, 2)), torch.ones(6, 2), coo([2], (6, 2))):
                table.grad = grad
                opt.step()
            freed = [weakref.ref(each) for each in (opt, *state_tensors(opt))]
            del opt
            assert not any(ref() is not None for ref in freed), cls
        finally:
            gc.enable()


# Unusual parameters and gradients; tests/properties/test_step.py draws strides


@each_engine
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_values_of_a_compressed_gradient_may_be_expanded(engine: str):
    starts, columns = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1])
    results = []
    for values in (torch.ones(1).expand(3), torch.ones(3)):
        param = torch.ones(3, 2)
        grad = torch.sparse_csr_tensor(starts, columns, values, (3, 2))
        assert grad.values().stride() == values.stride()
        with running_on(engine) as name:
            sparsestep.FunctionalAdam([param], lr=0.1, engine=name).step([grad])
        results.append(param)
    assert same_bits(*results)
    assert (results[0] < 1).tolist() == [[True, True], [False, False], [False, True]]


@pytest.mark.parametrize("cls", [sparsestep.Adam, sparsestep.Adagrad])
def test_lazy_parameters_get_their_state_with_the_first_step(cls: Any):
    """Torch's Adagrad refuses them, for it makes its state at once."""
    model = nn.LazyLinear(3)
    opt = cls(model.parameters(), lr=0.1)
    opt.step()
    opt.materialize_state()
    assert opt.state_dict()["state"] == {}
    assert [each.shape for each in opt.explain()] == [(0,), (0,)]
    with pytest.raises(InputError, match="lazy"):
        opt.share_memory()
    model(torch.ones(2, 4)).sum().backward()
    plain = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    other = cls(plain, lr=0.1)
    for param, copied in zip(model.parameters(), plain, strict=True):
        copied.grad = param.grad
    opt.step()
    other.step()
    assert all_same_bits(model.parameters(), plain)
    assert [each.shape for each in opt.explain()] == [(3, 4), (3,)]


def test_a_value_that_stays_in_a_tensor_with_gaps():
    """With a learning rate of zero FTRL keeps its sum; torch copies no tensor onto itself."""
    param = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64)[::2])
    optimizer = sparsestep.Ftrl([param], lr=torch.tensor(0.0), engine="reference")
    param.grad = torch.randn(1, dtype=torch.complex64)
    optimizer.step()
    assert bool(param.isfinite().all())


@pytest.mark.parametrize("kernel", [{}, {"foreach": True}])
def test_a_wrapper_as_state_is_refused_even_if_it_is_empty(kernel: dict[str, Any]):
    param = nn.Parameter(torch.ones(0, 4))
    opt = sparsestep.Adagrad([param], lr=0.1, **kernel)
    param.grad = torch.ones(0, 4)
    opt.step()
    opt.state[param]["sum"] = Unusable(torch.zeros(0, 4))
    with refused(opt, match="its state must own memory"):
        opt.step()
