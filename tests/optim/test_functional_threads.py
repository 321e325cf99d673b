"""Functional optimizers that several threads use at once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.faults.injectors import Lines
from tests.optim.functional_cases import STATEFUL, Variant, each_engine, each_stateful
from tests.table import same_bits, steps_of

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


def ones_in(rows: list[int], shape: tuple[int, int]) -> Tensor:
    indices = torch.tensor([rows])
    return torch.sparse_coo_tensor(indices, torch.ones(len(rows), shape[1]), shape)


@pytest.mark.parametrize("layout", ["sparse", "dense"])
@each_engine
def test_no_update_of_one_param_is_lost(layout: str, engine: str):
    """Whole numbers and a learning rate that is a power of two: any order has the same sum."""
    shape = (16, 4)
    param = torch.zeros(shape)
    opt = sparsestep.FunctionalSGD([param], 0.25, engine=engine)
    counts = 1000 if engine == "native" or layout == "dense" else 200
    expected = torch.zeros(shape)
    works = []
    for number in range(8):
        grad = ones_in([number, number, 15], shape) * float(number + 1)
        if layout == "dense":
            grad = grad.to_dense()
        expected -= 0.25 * counts * grad.to_dense()

        def work(grad: Tensor = grad) -> None:
            for _ in range(counts):
                opt.step_param(param, grad)

        works.append(work)
    assert not Threads(*works).run().raised
    assert torch.equal(param, expected)


@pytest.mark.parametrize(
    "variant", [v for v in STATEFUL if v.cls is not sparsestep.FunctionalSGD], ids=str
)
def test_every_update_is_counted(variant: Variant):
    param = torch.ones(16, 4)
    opt = variant([param], lr=1e-4)
    grad = ones_in([1, 2, 1], (16, 4))
    counts = 1000 if variant.cls is sparsestep.FunctionalAdam else 50

    def work() -> None:
        for _ in range(counts):
            opt.step_param(param, grad)

    assert not Threads(*[work] * 8).run().raised
    assert steps_of(opt.optimizer, param) == 8 * counts
    alone, same = variant([same := torch.ones(16, 4)], lr=1e-4), same
    for _ in range(8 * counts):
        alone.step_param(same, grad)
    assert same_bits(param, same)


@each_stateful
def test_different_params_in_different_threads(variant: Variant):
    """All new: they are taken on side by side, in any order."""
    ours, theirs = ([torch.ones(16, 4) for _ in range(8)] for _ in range(2))
    opt, alone = variant([], _allow_empty_param_list=True), variant(theirs)
    grads = [ones_in([number, 3, number], (16, 4)) for number in range(8)]

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(50):
                opt.step_param(ours[number], grads[number])

        return run

    assert not Threads(*(work(number) for number in range(8))).run().raised
    for _ in range(50):
        alone.step(grads)
    for mine, its in zip(ours, theirs, strict=True):
        assert same_bits(mine, its)
        assert steps_of(opt.optimizer, mine) == steps_of(alone.optimizer, its)
    assert {id(p) for p in opt.param_group["params"]} == {id(p) for p in ours}


def test_one_new_param_in_several_threads_is_taken_on_once():
    for _ in range(20):
        param = torch.zeros(16, 4)
        opt = sparsestep.FunctionalSGD([], 1.0, _allow_empty_param_list=True)
        grad = ones_in([5], (16, 4))
        assert not Threads(*[lambda: opt.step_param(param, grad)] * 8).run().raised  # noqa: B023
        assert len(opt.param_group["params"]) == 1
        assert param[5].tolist() == [-8.0] * 4


def test_step_and_step_param_at_once():
    """Each takes the locks that it needs, in one order: nobody waits for ever."""
    shape = (16, 4)
    params = [torch.zeros(shape) for _ in range(4)]
    opt = sparsestep.FunctionalAdam(params, 1e-3)
    grad = ones_in([1, 7], shape)

    def steps(*chosen: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(100):
                opt.step([grad if number in chosen else None for number in range(4)])

        return run

    def single(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(200):
                opt.step_param(params[number], grad)

        return run

    def snapshots() -> None:
        for _ in range(50):
            assert len(opt.state_dict()["param_groups"][0]["params"]) == 4

    works = [steps(0, 1, 2, 3), steps(3, 1), steps(2, 0), single(0), single(3), snapshots]
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
            except ValueError as error:  # one more was taken on in between
                if "doesn't match the size" not in str(error):
                    raise

    assert not Threads(training, saving, loading).run().raised
    assert len(opt.param_group["params"]) == 64


def test_an_exception_in_one_thread_leaves_the_others_working():
    shape = (16, 4)
    param, other = torch.zeros(shape), torch.zeros(shape)
    opt = sparsestep.FunctionalSGD([param, other], 0.5)
    good, bad = ones_in([3], shape), ones_in([16], shape)
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
                lambda: opt.step_param(torch.zeros(shape), bad),
            ):
                try:
                    call()
                except InputError as error:
                    refused.append(error)

    def once() -> None:
        opt.step_param(param, bad)

    threads = Threads(right, wrong, right, once, right).run()
    assert len(refused) == 600
    assert [isinstance(error, InputError) for error in threads.raised] == [True]
    assert param[3].tolist() == [-0.5 * 1200] * 4
    assert other[3].tolist() == [-0.5 * 600] * 4
    assert float(param.abs().sum()) == 2400.0
    assert len(opt.param_group["params"]) == 2


def test_threads_have_torchs_number_of_threads():
    """The work of one call may itself be shared out; calls at once then have a team each."""
    torch.set_num_threads(2)
    shape = (4000, 16)
    params = [torch.zeros(shape) for _ in range(4)]
    opt = sparsestep.FunctionalSGD(params, 0.5)
    rows = torch.arange(4000).repeat(2)
    grad = torch.sparse_coo_tensor(rows[None], torch.ones(8000, 16), shape)

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                opt.step_param(params[number], grad)

        return run

    assert not Threads(*(work(number) for number in range(4))).run().raised
    for param in params:
        assert torch.equal(param, torch.full(shape, -10.0))


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
