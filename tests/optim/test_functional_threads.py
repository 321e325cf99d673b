"""Functional optimizers that several threads use at once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.faults.injectors import Lines
from tests.table import each_engine, running_on, same_bits, steps_of

SHAPE = (16, 4)
JOIN = 120.0  # seconds after which a thread counts as stuck


class Threads:
    """Threads that start together; what they raise is kept."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.raised: list[Exception] = []
        self._together = threading.Barrier(len(works))
        self._threads = [threading.Thread(target=self._run, args=[w], daemon=True) for w in works]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._together.wait(JOIN)
            work()
        except Exception as error:
            self.raised.append(error)

    def run(self) -> Threads:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(interval / 100)  # Python changes threads that much more often
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                thread.join(JOIN)
        finally:
            sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in self._threads)
        return self


def ones_in(rows: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 4), SHAPE)


def repeat(count: int, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@each_engine
def test_no_update_of_one_param_is_lost(dense: bool, engine: str):
    """Whole numbers and a learning rate that is a power of two: any order has the same sum."""
    param, expected = torch.zeros(SHAPE), torch.zeros(SHAPE)
    counts = 1000 if engine != "reference" or dense else 200
    works = []
    with running_on(engine) as name:
        opt = sparsestep.FunctionalSGD([param], 0.25, engine=name)
        for number in range(8):
            grad = ones_in([number, number, 15]) * float(number + 1)
            grad = grad.to_dense() if dense else grad
            expected -= 0.25 * counts * grad.to_dense()
            works.append(repeat(counts, partial(opt.step_param, param, grad)))
        assert not Threads(*works).run().raised
    assert torch.equal(param, expected)


def test_different_params_in_different_threads():
    """All new: they are added side by side, in any order."""
    ours, theirs = ([torch.ones(SHAPE) for _ in range(8)] for _ in range(2))
    opt = sparsestep.FunctionalAdam([], _allow_empty_param_list=True)
    alone = sparsestep.FunctionalAdam(theirs)
    grads = [ones_in([number, 3, number]) for number in range(8)]
    works = [repeat(50, partial(opt.step_param, *pair)) for pair in zip(ours, grads, strict=True)]
    assert not Threads(*works).run().raised
    repeat(50, partial(alone.step, grads))()
    for mine, its in zip(ours, theirs, strict=True):
        assert same_bits(mine, its)
        assert steps_of(opt.optimizer, mine) == steps_of(alone.optimizer, its)
    assert {id(p) for p in opt.param_group["params"]} == {id(p) for p in ours}


def test_one_new_param_in_several_threads_is_added_once():
    for _ in range(20):
        param = torch.zeros(SHAPE)
        opt = sparsestep.FunctionalSGD([], 1.0, _allow_empty_param_list=True)
        work = partial(opt.step_param, param, ones_in([5]))
        assert not Threads(*[work] * 8).run().raised
        assert len(opt.param_group["params"]) == 1
        assert param[5].tolist() == [-8.0] * 4


def test_step_and_step_param_at_once():
    """Each takes the locks that it needs, in one order: no deadlock."""
    params = [torch.zeros(SHAPE) for _ in range(4)]
    opt = sparsestep.FunctionalAdam(params, 1e-3)
    grad = ones_in([1, 7])

    def steps(*chosen: int) -> Callable[[], None]:
        grads = [grad if number in chosen else None for number in range(4)]
        return repeat(100, partial(opt.step, grads))

    def snapshots() -> None:
        for _ in range(50):
            assert len(opt.state_dict()["param_groups"][0]["params"]) == 4

    single = [repeat(200, partial(opt.step_param, params[number], grad)) for number in (0, 3)]
    works = [steps(0, 1, 2, 3), steps(3, 1), steps(2, 0), *single, snapshots]
    assert not Threads(*works).run().raised
    counts = [steps_of(opt.optimizer, param) for param in params]
    assert counts == [400, 200, 200, 400]


def test_checkpoints_while_params_are_taken_on():
    params = [torch.zeros(4, 2) for _ in range(64)]
    opt = sparsestep.FunctionalAdam(params[:1])
    opt.step_param(params[0], torch.ones(4, 2))
    done = threading.Event()

    def training() -> None:
        try:
            for param in params:
                opt.step_param(param, torch.ones(4, 2))
        finally:
            done.set()

    def saving() -> None:
        while not done.is_set():
            saved = opt.state_dict()
            known = saved["param_groups"][0]["params"]
            assert set(saved["state"]) <= set(known)
            assert all("exp_avg_sq" in state for state in saved["state"].values())

    def loading() -> None:
        while not done.is_set():
            try:
                opt.load_state_dict(opt.state_dict())
            except ValueError as error:  # one more was added in between
                if "doesn't match the size" not in str(error):
                    raise

    assert not Threads(training, saving, loading).run().raised
    assert len(opt.param_group["params"]) == 64


def test_an_exception_in_one_thread_leaves_the_others_working():
    param, other = torch.zeros(SHAPE), torch.zeros(SHAPE)
    opt = sparsestep.FunctionalSGD([param, other], 0.5)
    good, bad = ones_in([3]), ones_in([16])
    refused = []

    def right() -> None:
        for _ in range(200):
            opt.step_param(param, good)
            opt.step([good, good])

    def wrong() -> None:
        for _ in range(200):
            for call in (
                lambda: opt.step_param(param, bad),
                lambda: opt.step([good, bad]),
                lambda: opt.step_param(torch.zeros(SHAPE), bad),
            ):
                with pytest.raises(InputError):
                    call()
                refused.append(call)

    works = [right, wrong, right, partial(opt.step_param, param, bad), right]
    threads = Threads(*works).run()
    assert len(refused) == 600
    assert [isinstance(error, InputError) for error in threads.raised] == [True]
    assert param[3].tolist() == [-0.5 * 1200] * 4
    assert other[3].tolist() == [-0.5 * 600] * 4
    assert float(param.abs().sum()) == 2400.0
    assert len(opt.param_group["params"]) == 2


def test_an_interrupt_leaves_no_lock_held():
    """Ctrl-C at each line of a step, after which another thread takes one."""
    params = [torch.zeros(2), torch.zeros(3)]
    grads = [torch.ones(2), torch.ones(3)]
    opt = sparsestep.FunctionalSGD(params, 0.25)
    opt.step(grads)

    def is_free(lock: threading.RLock) -> bool:
        return lock.acquire(blocking=False) and lock.release() is None

    lines = Lines()
    for nth in range(lines.count(lambda: opt.step(grads))):
        with contextlib.suppress(KeyboardInterrupt):
            lines.inject(lambda: opt.step(grads), nth)
        free: list[bool] = []
        Threads(lambda free=free: free.extend(map(is_free, opt._locks.values()))).run()  # type: ignore[misc]
        assert free == [True, True], nth
