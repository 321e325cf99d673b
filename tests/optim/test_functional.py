"""Functional optimizers: constructors, state, checkpoints, threads; torch's functional classes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from tests.faults.injectors import Lines
from tests.subject import Subject
from tests.table import all_same_bits, each_engine, running_on, same_bits, steps_of

SHAPES = [(7, 5), (4,), (3, 2, 2)]
each_stateful = pytest.mark.parametrize(
    ("cls", "options"),
    [
        (sparsestep.FunctionalSGD, {"momentum": 0.9}),
        (sparsestep.FunctionalAdam, {}),
        (sparsestep.FunctionalRowwiseAdagrad, {}),
    ],
    ids=str,
)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def batches(*, sparse: bool = True) -> list[list[Tensor | None]]:
    """Gradients for each param, step by step; not every param has one in every step."""
    generator = torch.Generator().manual_seed(1)

    def gradient(shape: tuple[int, ...]) -> Tensor:
        if not sparse:
            return torch.randn(shape, generator=generator)
        rows = torch.randint(0, shape[0], (1, 6), generator=generator)
        values = torch.randn((6, *shape[1:]), generator=generator)
        return torch.sparse_coo_tensor(rows, values, shape)

    found: list[list[Any]] = [[gradient(shape) for shape in SHAPES] for _ in range(5)]
    found[1][0] = found[2][1] = found[-1][2] = None
    return found


def train(opt: Any, steps: list[list[Tensor | None]]) -> None:
    """Either kind of optimizer."""
    for grads in steps:
        if isinstance(opt, FunctionalOptimizer):
            opt.step(grads)
            continue
        for param, grad in zip(opt.param_groups[0]["params"], grads, strict=True):
            param.grad = grad
        opt.step()


class Aloof(torch.nn.Parameter):
    """A param that must not be asked for its gradient, nor given one."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        raise AssertionError("param.grad was read")

    @grad.setter
    def grad(self, value: Any) -> None:
        raise AssertionError("param.grad was written")


def test_param_grad_is_neither_read_nor_written():
    params = [Aloof(param) for param in start()]
    opt = sparsestep.FunctionalAdam(params)
    for sparse in (True, False):
        for grads in batches(sparse=sparse):
            opt.step(grads)
            for param, grad in zip(params, grads, strict=True):
                opt.step_param(param, grad)
    opt.step_param(Aloof(torch.ones(3)), torch.ones(3))
    opt.load_state_dict(opt.state_dict())


# State


@each_stateful
def test_a_param_is_added_by_its_first_step(cls: Any, options: dict[str, Any]):
    params, others = start(), start()
    opt, known = cls([], _allow_empty_param_list=True, **options), cls(others, **options)
    opt.step_param(params[0], None)  # also without a gradient
    assert [id(p) for p in opt.param_group["params"]] == [id(params[0])]
    for grads in batches():
        for param, grad in zip(params, grads, strict=True):
            opt.step_param(param, grad)
        known.step(grads)
    assert Subject(opt).same_as(Subject(known))
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step(batches()[0])  # and is one of those that step() is for


def test_a_param_is_found_after_the_group_has_changed():
    params = [torch.zeros(2), torch.zeros(2)]
    opt = sparsestep.FunctionalSGD(params, 1.0)
    opt.step_param(params[0], torch.ones(2))
    opt.param_group["params"].reverse()
    opt.step_param(params[0], torch.ones(2))
    assert params[0].tolist() == [-2.0, -2.0]
    assert not params[1].any()


@each_stateful
def test_checkpoints_go_from_one_kind_of_optimizer_to_the_other(cls: Any, options: dict[str, Any]):
    kinds = [cls, cls.optimizer_class]
    for first, second in (kinds, kinds[::-1]):
        steps = batches()
        opt = first([torch.nn.Parameter(param) for param in start()], **options)
        train(opt, steps[:3])
        tensors = Subject(opt).tensors[: len(SHAPES)]
        other = second([torch.nn.Parameter(param.clone()) for param in tensors], **options)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        for each in (opt, other):
            train(each, steps[3:])
        assert Subject(opt).same_as(Subject(other))
        assert opt.state_dict()["param_groups"] == other.state_dict()["param_groups"]


# Constructors


@pytest.mark.parametrize("cls", FUNCTIONAL, ids=lambda cls: cls.__name__)
def test_the_signature_is_what_the_constructor_takes(cls: type[FunctionalOptimizer]):
    assert cls.__name__ == f"Functional{cls.optimizer_class.__name__}"
    options = list(inspect.signature(cls).parameters.values())[1:]
    assert not [option for option in options if option.kind is option.VAR_KEYWORD]
    named = {o.name for o in options if o.kind is o.KEYWORD_ONLY}
    placed = [o.name for o in options if o.kind is o.POSITIONAL_OR_KEYWORD]
    assert placed == [*cls.positional, "_allow_empty_param_list"]
    own = set(inspect.signature(cls.optimizer_class).parameters) - {"params"}
    assert named | (set(cls.positional) - set(cls.torch_only)) == own
    made = cls([torch.zeros(1)], **{option.name: option.default for option in options})
    assert repr(made).startswith(f"{cls.__name__} (")


def test_arguments_by_position():
    cls = sparsestep.FunctionalAdam
    values = [0.5, (0.5, 0.75), 0.25, 0.125, True, True, False, False]
    by_position = cls([], *values, True)
    by_name = cls([torch.zeros(1)], **dict(zip(cls.positional, values, strict=True)))
    assert by_position.defaults == by_name.defaults
    assert [by_position.param_group[name] for name in cls.positional] == values
    by_position.step([])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD", "RMSprop"])
def test_torchs_functional_classes(name: str):
    """Their positions, defaults, and bits of dense gradients."""
    with warnings.catch_warnings(record=True):  # of TorchScript
        warnings.simplefilter("ignore")
        module = __import__(f"torch.distributed.optim.functional_{name.lower()}", fromlist=[name])
        torchs = getattr(module, f"_Functional{name}")
        params = start()
        peer = torchs(params, 0.01)
    cls = getattr(sparsestep, f"Functional{name}")
    signature = inspect.signature(torchs.__init__).parameters
    names = [n for n in signature if n not in ("self", "params")]
    assert [*cls.positional, "_allow_empty_param_list"] == names
    ours = cls([torch.zeros(1)])
    for option in cls.positional:
        theirs = signature[option].default
        if option in cls.torch_only:
            assert cls.torch_only[option] == theirs
        elif option in ("foreach", "fused"):
            assert not ours.defaults[option]
        elif (name, option) == ("SGD", "lr"):  # torch's two classes differ
            assert (ours.defaults[option], theirs) == (1e-3, 1e-2)
        else:
            assert ours.defaults[option] == theirs
    opt = cls(start(), 0.01, foreach=False)
    # Some of torch's functional classes take gradients for those of other params if one is None.
    for grads in batches(sparse=False):
        if all(grad is not None for grad in grads):
            peer.step(grads)
            opt.step(grads)
    assert all_same_bits(opt.param_group["params"], params)
    assert not same_bits(params[0], start()[0])


# Several threads at once


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
        sys.setswitchinterval(1e-7)  # Python changes threads as often as it can
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


def bad_step(opt: FunctionalOptimizer, param: Tensor) -> None:
    with pytest.raises(InputError, match="shape"):
        opt.step_param(param, torch.ones(3))


def repeat(count: int, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@each_engine
def test_no_update_of_one_param_is_lost(dense: bool, engine: str):
    """Whole numbers and a learning rate that is a power of two: any order has the same sum.

    One thread's calls raise.
    """
    param, other, expected = torch.zeros(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    counts = 1000 if engine != "reference" or dense else 200
    works = []
    with running_on(engine) as name:
        opt = sparsestep.FunctionalSGD([param, other], 0.25, engine=name)
        good, bad = ones_in([3]), ones_in([16])

        def wrong() -> None:
            for call in (
                lambda: opt.step_param(param, bad),
                lambda: opt.step([good, bad]),
                lambda: opt.step_param(torch.zeros(SHAPE), bad),
            ):
                with pytest.raises(InputError):
                    call()

        works.append(repeat(200, wrong))
        for number in range(8):
            grad = ones_in([number, number, 15]) * float(number + 1)
            grad = grad.to_dense() if dense else grad
            expected -= 0.25 * counts * grad.to_dense()
            works.append(repeat(counts, partial(opt.step_param, param, grad)))
        assert not Threads(*works).run().raised
    assert torch.equal(param, expected)
    assert not other.any()
    assert len(opt.param_group["params"]) == 2


@pytest.mark.parametrize("attempt", range(5))
def test_new_params_in_different_threads(attempt: int):
    """They are added side by side, in any order, each by two threads and once."""
    ours, theirs = ([torch.ones(SHAPE) for _ in range(8)] for _ in range(2))
    opt = sparsestep.FunctionalAdam([], _allow_empty_param_list=True)
    alone = sparsestep.FunctionalAdam(theirs)
    grads = [ones_in([number, 3, number]) for number in range(8)]
    pairs = list(zip(ours, grads, strict=True))
    works = [repeat(25, partial(opt.step_param, *pair)) for pair in pairs * 2]
    works += [repeat(5, partial(bad_step, opt, param)) for param in ours]
    assert not Threads(*works).run().raised
    repeat(50, partial(alone.step, grads))()
    for mine, its in zip(ours, theirs, strict=True):
        assert same_bits(mine, its)
        assert steps_of(opt.optimizer, mine) == steps_of(alone.optimizer, its)
    assert sorted(map(id, opt.param_group["params"])) == sorted(map(id, ours))


def test_step_and_step_param_at_once():
    """Each takes the locks that it needs, in one order: no deadlock."""
    params = [torch.zeros(SHAPE) for _ in range(4)]
    opt = sparsestep.FunctionalAdam(params, 1e-3)
    grad = ones_in([1, 7])

    def steps(*chosen: int) -> Callable[[], None]:
        grads = [grad if number in chosen else None for number in range(4)]
        return repeat(100, partial(opt.step, grads))

    single = [repeat(200, partial(opt.step_param, params[number], grad)) for number in (0, 3)]
    works = [steps(0, 1, 2, 3), steps(3, 1), steps(2, 0), *single, repeat(50, opt.state_dict)]
    assert not Threads(*works).run().raised
    assert [steps_of(opt.optimizer, param) for param in params] == [400, 200, 200, 400]


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
            assert set(saved["state"]) <= set(saved["param_groups"][0]["params"])
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
