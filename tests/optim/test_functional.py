"""Functional optimizers: constructors, state, checkpoints; and torch's functional classes."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from tests.table import same_bits, state_tensors

SHAPES = [(7, 5), (4,), (3, 2, 2)]
STATEFUL = [
    (sparsestep.FunctionalSGD, {"momentum": 0.9}),
    (sparsestep.FunctionalAdam, {}),
    (sparsestep.FunctionalRowwiseAdagrad, {}),
]
each_stateful = pytest.mark.parametrize(("cls", "options"), STATEFUL, ids=str)


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


def everything(opt: Any) -> list[Tensor]:
    inner = opt.optimizer if isinstance(opt, FunctionalOptimizer) else opt
    return [*(param.detach() for param in inner.param_groups[0]["params"]), *state_tensors(inner)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(same_bits, ours, theirs))


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
    assert_same(everything(opt), everything(known))
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


def test_params_that_cannot_be_added():
    param = torch.ones(3, 2)
    opt = sparsestep.FunctionalAdam([param])
    with pytest.raises(InputError, match="requires dense parameter tensors"):
        opt.step_param(torch.eye(3).to_sparse_coo(), torch.ones(3, 3))
    with pytest.raises(InputError, match="shape"):
        opt.step_param(torch.ones(3, 2), torch.ones(4, 2).to_sparse(1))
    masked = sparsestep.FunctionalAdam([param], mask=torch.tensor([True, False, True]))
    with pytest.raises(InputError, match="mask"):
        masked.step_param(torch.ones(3, 2), torch.ones(3, 2))
    masked.step([torch.ones(3, 2)])
    assert len(opt.param_group["params"]) == len(masked.param_group["params"]) == 1


@each_stateful
def test_checkpoints_go_back_and_forth(cls: Any, options: dict[str, Any]):
    kinds = [cls, cls.optimizer_class]
    for first, second in ((cls, cls), kinds, kinds[::-1]):
        steps = batches()
        opt = first([torch.nn.Parameter(param) for param in start()], **options)
        train(opt, steps[:3])
        copies = [torch.nn.Parameter(param.clone()) for param in everything(opt)[: len(SHAPES)]]
        other = second(copies, **options)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(opt, steps[3:])
        train(other, steps[3:])
        assert_same(everything(opt), everything(other))
        assert opt.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    opt = cls(start(), engine="reference", **options)
    again = pickle.loads(pickle.dumps(opt))
    assert again.optimizer.engine == "reference"
    for each in (opt, again):
        train(each, batches())
    assert_same(everything(opt), everything(again))


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


# Torch's functional classes


TORCH = ["Adam", "AdamW", "Adagrad", "SGD", "RMSprop"]


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Any]:
    """Torch's functional classes; importing them warns of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import (
            functional_adagrad,
            functional_adam,
            functional_adamw,
            functional_rmsprop,
            functional_sgd,
        )
    return {
        "Adam": functional_adam._FunctionalAdam,
        "AdamW": functional_adamw._FunctionalAdamW,
        "Adagrad": functional_adagrad._FunctionalAdagrad,
        "SGD": functional_sgd._FunctionalSGD,
        "RMSprop": functional_rmsprop._FunctionalRMSprop,
    }


@pytest.mark.parametrize("name", TORCH)
def test_positions_and_defaults_are_torchs(name: str, of_torch: dict[str, Any]):
    cls = getattr(sparsestep, f"Functional{name}")
    signature = inspect.signature(of_torch[name].__init__).parameters
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


@pytest.mark.parametrize("name", TORCH)
def test_dense_gradients_have_torchs_bits(name: str, of_torch: dict[str, Any]):
    params = start()
    with warnings.catch_warnings(record=True):
        peer = of_torch[name](params, 0.01)
    opt = getattr(sparsestep, f"Functional{name}")(start(), 0.01, foreach=False)
    # Some of torch's functional classes take gradients for those of other params if one is None.
    for grads in batches(sparse=False):
        if all(grad is not None for grad in grads):
            peer.step(grads)
            opt.step(grads)
    assert_same(opt.param_group["params"], params)
    assert not same_bits(params[0], start()[0])


# Repeated calls, which the core runs by itself


def _released(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(4)
    return tensor


def _inference_tensor(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


ROWS = torch.tensor([2, 0, 2])


CHANGES: list[dict[str, Any]] = [
    {"param": None},
    {"param": torch.zeros(3)},
    {"param": torch.zeros(2, 3, dtype=torch.int64)},
    {"param": _released(torch.zeros(3, 2))},
    {"param": _inference_tensor(torch.zeros(3, 2))},
    {"param": torch.complex(torch.ones(3, 2), torch.ones(3, 2)).conj().imag},
    {"param": torch.zeros(2).expand(3, 2)},
    {"exp_avg": torch.zeros(3)},
    {"exp_avg": torch.zeros(3, 2, dtype=torch.int32)},
    {"exp_avg": _released(torch.zeros(3, 2))},
    {"exp_avg": _inference_tensor(torch.zeros(3, 2))},
    {"exp_avg": None},
    {"grad": sparsestep.IndexedGrad(torch.tensor([0, 3, 0]), torch.ones(3, 2))},
    {"grad": sparsestep.IndexedGrad(ROWS, torch.ones(2, 2))},
    {"grad": sparsestep.IndexedGrad(ROWS.float(), torch.ones(3, 2))},
    {"grad": sparsestep.IndexedGrad(ROWS, torch.ones(3, 2, dtype=torch.int64))},
    {"grad": sparsestep.IndexedGrad(ROWS, torch.ones(3, 2), 3)},
    {"grad": sparsestep.IndexedGrad(ROWS, torch.ones(3, 2), 2, 2)},
    {"grad": torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (4, 2))},
    {"grad": None},
    {"step": None},
    {"step": 0},
    {"step": torch.tensor(1.5)},
    {"step": 1 << 63},
    {"lr": -1.0},
    {"betas": [0.9, 1.0]},
    {"maximize": "yes"},
    {"decoupled_weight_decay": 0},
    {"engine": "fast"},
]


def test_a_repeated_call_makes_all_checks():
    positional = ("param", "grad", "exp_avg", "exp_avg_sq")

    def call(given: dict[str, Any]) -> None:
        rest = {key: value for key, value in given.items() if key not in positional}
        sparsestep.functional.adam_(*(given[key] for key in positional), **rest)

    given = {
        "param": torch.zeros(3, 2),
        "grad": sparsestep.IndexedGrad(ROWS, torch.ones(3, 2)),
        "exp_avg": torch.zeros(3, 2),
        "exp_avg_sq": torch.zeros(3, 2),
        "step": 1,
        "decoupled_weight_decay": False,
    }
    for change in CHANGES:
        for _ in range(2):
            call(given)
        before = copy.deepcopy({key: given[key] for key in positional if key != "grad"})
        with pytest.raises(InputError):
            call({**given, **change})
        assert all(same_bits(given[key], value) for key, value in before.items()), change


@pytest.mark.parametrize("step", [3, torch.tensor(3.0)])
@pytest.mark.parametrize("is_coo", [True, False])
def test_a_repeated_call_has_the_bits_of_the_first(step: int | Tensor, is_coo: bool):
    values = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.1, 0.2]])
    grad: Any = sparsestep.IndexedGrad(ROWS, values)
    if is_coo:
        grad = torch.sparse_coo_tensor(ROWS[None], values, (3, 2))
    results = []
    for _ in range(3):
        tensors = [torch.ones(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)]
        versions = [tensor._version for tensor in tensors]
        sparsestep.functional.adam_(tensors[0], grad, *tensors[1:], step=step, lr=0.25)
        assert all(t._version > v for t, v in zip(tensors, versions, strict=True))
        results.append(tensors)
    for repeated in results[1:]:
        assert all(map(same_bits, repeated, results[0]))
