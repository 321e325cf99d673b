"""Functional optimizers: the numbers of the classes, with gradients passed in, from any thread."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.gradients.layouts import Gradient
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer
from sparsestep.rules import OPTIMIZERS
from sparsestep.rules.functional import FUNCTIONAL
from tests.table import OPTIONS, same_bits, state_tensors, steps_of

SHAPES = [(7, 5), (4,), (3, 2, 2)]
STEPS = 5
JOIN = 120.0  # seconds after which a thread counts as stuck

each_functional = pytest.mark.parametrize("cls", FUNCTIONAL, ids=lambda cls: cls.__name__)
each_engine = pytest.mark.parametrize("engine", ["reference", "native"])


@dataclass(frozen=True)
class Variant:
    """A functional optimizer with options; called like the class."""

    cls: type[FunctionalOptimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Any, **more: Any) -> FunctionalOptimizer:
        return self.cls(params, **{**self.options, **more})

    def optimizer(self, params: Any, **more: Any) -> RuleOptimizer:
        return self.cls.optimizer_class(params, **{**self.options, **more})

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.options.items())])


VARIANTS = [
    Variant(cls, options)
    for cls in FUNCTIONAL
    for options in [{}, *OPTIONS.get(cls.optimizer_class, [])]
]
STATEFUL = [
    Variant(cls, {"momentum": 0.9} if cls is sparsestep.FunctionalSGD else {}) for cls in FUNCTIONAL
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
each_stateful = pytest.mark.parametrize("variant", STATEFUL, ids=str)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sparse(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    rows = torch.randint(0, shape[0], (1, 6), generator=generator)
    return torch.sparse_coo_tensor(rows, torch.randn((6, *shape[1:]), generator=generator), shape)


def dense(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def batches(
    make: Callable[[tuple[int, ...], torch.Generator], Tensor], *, steps: int = STEPS
) -> list[list[Tensor | None]]:
    """Gradients for each param, step by step; not every param has one in every step."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[Tensor | None]] = [
        [make(shape, generator) for shape in SHAPES] for _ in range(steps)
    ]
    found[1][0] = found[2][1] = found[-1][2] = None
    return found


def train(opt: torch.optim.Optimizer, params: list[Tensor], steps: list[Any]) -> None:
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        opt.step()


def everything(opt: FunctionalOptimizer | torch.optim.Optimizer) -> list[Tensor]:
    """Params and state tensors."""
    inner = opt._optimizer if isinstance(opt, FunctionalOptimizer) else opt
    params = [param.detach() for param in inner.param_groups[0]["params"]]
    return [*params, *state_tensors(inner)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number


def kept(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


# The constructor


def test_every_optimizer_has_a_functional_one():
    assert [cls.optimizer_class for cls in FUNCTIONAL] == list(OPTIMIZERS)
    for cls in FUNCTIONAL:
        assert cls.__name__ == f"Functional{cls.optimizer_class.__name__}"
        assert getattr(sparsestep, cls.__name__) is cls
        assert cls.__name__ in sparsestep.__all__


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
    modules = (
        *(functional_adagrad, functional_adam, functional_adamw),
        *(functional_rmsprop, functional_sgd),
    )
    return {
        name: getattr(m, f"_Functional{name}")
        for m in modules
        for name in TORCH
        if hasattr(m, f"_Functional{name}")
    }


@pytest.mark.parametrize("name", TORCH)
def test_positions_and_defaults_are_those_of_torchs_functional_class(
    name: str, of_torch: dict[str, Any]
):
    cls = getattr(sparsestep, f"Functional{name}")
    signature = inspect.signature(of_torch[name].__init__).parameters
    names = [n for n in signature if n not in ("self", "params")]
    assert (*cls.positional, "_allow_empty_param_list") == tuple(names)
    ours = cls([torch.zeros(1)])
    for option in cls.positional:
        theirs = signature[option].default
        if option in cls.only_in_torch:
            assert cls.only_in_torch[option] == theirs
        elif option in ("foreach", "fused"):
            assert not ours.defaults[option]
        elif (name, option) == ("SGD", "lr"):  # torch's two classes differ
            assert (ours.defaults[option], theirs) == (
                torch.optim.SGD([torch.zeros(1)]).defaults["lr"],
                1e-2,
            )
        else:
            assert ours.defaults[option] == theirs


@each_functional
def test_the_signature_is_what_the_constructor_takes(cls: type[FunctionalOptimizer]):
    signature = inspect.signature(cls)
    assert inspect.signature(cls.__init__).parameters["self"]
    options = list(signature.parameters.values())[1:]
    assert not [option for option in options if option.kind is option.VAR_KEYWORD]
    named = {o.name for o in options if o.kind is o.KEYWORD_ONLY}
    placed = [o.name for o in options if o.kind is o.POSITIONAL_OR_KEYWORD]
    assert placed == [*cls.positional, "_allow_empty_param_list"]
    own = set(inspect.signature(cls.optimizer_class).parameters) - {"params"}
    assert named | (set(cls.positional) - set(cls.only_in_torch)) == own
    cls([torch.zeros(1)], **{option.name: option.default for option in options})


OTHERS = {
    "lr": 0.5,
    "betas": (0.5, 0.75),
    "eps": 0.25,
    "weight_decay": 0.125,
    "amsgrad": True,
    "maximize": True,
    "foreach": False,
    "fused": False,
    "lr_decay": 0.5,
    "initial_accumulator_value": 2.0,
    "warmup_lr_multiplier": 1.0,
    "warmup_num_iters": 0.0,
    "coalesce_grad": True,
    "momentum": 0.5,
    "dampening": 0.25,
    "nesterov": False,
    "alpha": 0.5,
    "centered": True,
    "beta": 0.5,
    "l1": 0.25,
    "l2": 0.125,
}


@each_functional
def test_options_by_position_are_options_by_name(cls: type[FunctionalOptimizer]):
    values = [OTHERS[name] for name in cls.positional]
    by_position = cls([torch.zeros(1)], *values)
    by_name = cls([torch.zeros(1)], **dict(zip(cls.positional, values, strict=True)))
    assert by_position.defaults == by_name.defaults
    for name, value in zip(cls.positional, values, strict=True):
        assert name in cls.only_in_torch or by_position.param_group[name] == value


@each_functional
def test_too_many_options_or_one_twice(cls: type[FunctionalOptimizer]):
    values = [OTHERS[name] for name in cls.positional]
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) takes at most \d+ options by pos"):
        cls([torch.zeros(1)], *values, False, 1.0)
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) got multiple values for argument"):
        cls([torch.zeros(1)], 0.1, lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup'"):
        cls([torch.zeros(1)], warmup=1.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [("warmup_lr_multiplier", 2.0), ("warmup_num_iters", 10.0), ("coalesce_grad", False)],
)
def test_what_only_torch_has_is_refused_unless_it_changes_nothing(option: str, value: Any):
    usual = sparsestep.FunctionalAdagrad.only_in_torch[option]
    message = (
        f"^FunctionalAdagrad: {option} is an option of torch's class alone and must be {usual}"
    )
    with pytest.raises(InputError, match=message):
        sparsestep.FunctionalAdagrad([torch.zeros(1)], **{option: value})
    opt = sparsestep.FunctionalAdagrad([torch.zeros(1)], **{option: usual})
    assert option not in opt.defaults
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        sparsestep.FunctionalAdam([torch.zeros(1)], **{option: usual})


@each_functional
def test_an_empty_parameter_list(cls: type[FunctionalOptimizer]):
    message = f"^{cls.__name__}: optimizer got an empty parameter list"
    with pytest.raises(ValueError, match=message):
        cls([])
    with pytest.raises(InputError, match=message):
        cls(iter([]), _allow_empty_param_list=False)
    opt = cls([], _allow_empty_param_list=True)
    opt.step([])
    assert opt.param_group["params"] == []
    values = [OTHERS[name] for name in cls.positional]
    assert cls([], *values, True).param_group["params"] == []


@each_functional
def test_bad_options_are_refused(cls: type[FunctionalOptimizer]):
    with pytest.raises(InputError, match="Invalid learning rate: -1"):
        cls([torch.zeros(1)], lr=-1.0)
    with pytest.raises(InputError, match="engine must be one of"):
        cls([torch.zeros(1)], engine="quantum")


@each_functional
def test_params_may_come_from_a_generator_and_need_not_require_grad(
    cls: type[FunctionalOptimizer],
):
    params = start()
    opt = cls(param for param in params)
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step([torch.ones_like(param) for param in params])
    assert repr(opt).startswith(f"{cls.__name__} (")


# The numbers


@each_variant
@each_engine
@pytest.mark.parametrize("make", [sparse, dense], ids=["sparse", "dense"])
def test_step_has_the_bits_of_the_class(variant: Variant, engine: str, make: Any):
    params = start()
    opt = variant(params, engine=engine)
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = variant.optimizer(leaves, engine=engine)
    for grads in batches(make):
        assert opt.step(grads) is None
    train(theirs, leaves, batches(make))
    assert_same(everything(opt), everything(theirs))
    for param, leaf in zip(params, leaves, strict=True):
        assert steps_of(opt._optimizer, param) == steps_of(theirs, leaf)


@each_variant
@each_engine
@pytest.mark.parametrize("make", [sparse, dense], ids=["sparse", "dense"])
def test_step_param_has_the_bits_of_step(variant: Variant, engine: str, make: Any):
    ours, theirs = start(), start()
    by_param, by_step = variant(ours, engine=engine), variant(theirs, engine=engine)
    for grads in batches(make):
        for param, grad in zip(ours, grads, strict=True):
            assert by_param.step_param(param, grad) is None
        by_step.step(grads)
    assert_same(everything(by_param), everything(by_step))


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("by_param", [False, True], ids=["step", "step_param"])
def test_dense_gradients_have_torchs_bits(name: str, by_param: bool):
    cls = getattr(sparsestep, f"Functional{name}")
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = getattr(torch.optim, name)(leaves)
    params = start()
    opt = cls(params)
    for grads in batches(dense):
        if by_param:
            for param, grad in zip(params, grads, strict=True):
                opt.step_param(param, grad)
        else:
            opt.step(grads)
    train(theirs, leaves, batches(dense))
    assert_same(everything(opt), everything(theirs))


@pytest.mark.parametrize("name", TORCH)
def test_dense_gradients_have_the_bits_of_torchs_functional_class(
    name: str, of_torch: dict[str, Any]
):
    ours, theirs = start(), start()
    opt = getattr(sparsestep, f"Functional{name}")(ours, 0.01)
    with warnings.catch_warnings(record=True):
        peer = of_torch[name](theirs, 0.01)
    for grads in batches(dense):
        if any(grad is None for grad in grads):
            continue  # some of torch's take the gradients for those of other params then
        opt.step(grads)
        peer.step(grads)
    assert_same(ours, theirs)
    assert not same_bits(ours[0], start()[0])


@each_functional
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_every_layout_is_taken(cls: type[FunctionalOptimizer]):
    """Also those that cannot be a dense param's ``.grad``."""
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    where = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    coo = (values * where).to_sparse_coo()
    flat = where.reshape(-1).nonzero().squeeze(1)
    layouts: list[Gradient] = [
        coo,
        coo.to_sparse_csr(),
        coo.to_sparse_csc(),
        torch.masked.masked_tensor(values, where),
        sparsestep.Touched(flat, values.reshape(-1)[flat], 24, 1),
    ]
    results = []
    for grad in layouts:
        param = torch.ones(4, 6)
        opt = cls([param], 0.1)
        opt.step([grad])
        opt.step_param(param, grad)
        results.append(param)
    for result in results[1:]:
        assert same_bits(result, results[0])
    assert torch.equal(results[0] != 1, where) or cls is sparsestep.FunctionalFtrl


@each_functional
def test_options_may_change_between_steps(cls: type[FunctionalOptimizer]):
    params, leaves = start(), [torch.nn.Parameter(param) for param in start()]
    opt, theirs = cls(params), cls.optimizer_class(leaves)
    for number, grads in enumerate(batches(sparse)):
        opt.param_group["lr"] = theirs.param_groups[0]["lr"] = 0.1 / (number + 1)
        opt.step(grads)
        train(theirs, leaves, [grads])
    assert_same(everything(opt), everything(theirs))
    assert opt.defaults["lr"] != opt.param_group["lr"]


@each_stateful
def test_a_param_that_is_given_twice_gets_both_gradients(variant: Variant):
    twice, once = start()[0], start()[0]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = variant([twice, twice])
    other = variant([once])
    grads = [batch[0] for batch in batches(sparse) if batch[0] is not None]
    opt.step(grads[:2])
    for grad in grads[:2]:
        other.step([grad])
    assert same_bits(twice, once)


def test_masks_and_rounding_are_those_of_the_class():
    mask = torch.arange(7) % 2 == 0
    masks = [mask, None, None]
    for options in ({"mask": masks}, {"stochastic_rounding": True}):
        params = [param.bfloat16() for param in start()]
        leaves = [torch.nn.Parameter(param.bfloat16()) for param in start()]
        opt, theirs = (
            sparsestep.FunctionalAdam(params, **options),
            sparsestep.Adam(leaves, **options),
        )
        for grads in batches(sparse):
            halves = [None if grad is None else grad.bfloat16() for grad in grads]
            for param, half in zip(params, halves, strict=True):
                opt.step_param(param, half)
            train(theirs, leaves, [halves])
        assert_same(everything(opt), everything(theirs))


# What it leaves alone


class Aloof(torch.nn.Parameter):
    """A param that must not be asked for its gradient, nor given one."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        raise AssertionError("param.grad was read")

    @grad.setter
    def grad(self, value: Any) -> None:
        raise AssertionError("param.grad was written")


@each_variant
@each_engine
def test_param_grad_is_neither_read_nor_written(variant: Variant, engine: str):
    params = [Aloof(param) for param in start()]
    opt = variant(params, engine=engine)
    for make in (sparse, dense):
        for grads in batches(make):
            opt.step(grads)
            for param, grad in zip(params, grads, strict=True):
                opt.step_param(param, grad)
    new = Aloof(torch.ones(3))
    opt.step_param(new, torch.ones(3))
    opt.load_state_dict(opt.state_dict())


@each_functional
def test_the_gradients_in_param_grad_stay_as_they_are(cls: type[FunctionalOptimizer]):
    leaf = torch.nn.Parameter(torch.ones(3, 2))
    leaf.grad = torch.full((3, 2), 7.0)
    grad = torch.ones(3, 2)
    cls([leaf], maximize=True).step([grad])
    assert torch.equal(leaf.grad, torch.full((3, 2), 7.0))
    assert torch.equal(grad, torch.ones(3, 2))
    assert leaf.is_leaf
    assert leaf.requires_grad


@each_stateful
@each_engine
def test_no_graph_is_made_and_versions_advance(variant: Variant, engine: str):
    for grad in (batches(sparse)[0][0], batches(dense)[0][0]):
        leaf = torch.nn.Parameter(start()[0])
        opt = variant([leaf], engine=engine)
        before = leaf._version
        opt.step([grad])
        opt.step_param(leaf, grad)
        assert leaf._version >= before + 2
        assert leaf.grad_fn is None
        tensors = [t for t in opt.state[leaf].values() if isinstance(t, Tensor)]
        assert not any(tensor.requires_grad for tensor in tensors)


@each_functional
def test_nothing_warns(cls: type[FunctionalOptimizer]):
    """Torch's functional classes warn of TorchScript, when imported and when made."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        params = start()
        opt = cls(params)
        for grads in batches(sparse):
            opt.step(grads)
        opt.step_param(params[0], None)
        opt.load_state_dict(opt.state_dict())
    assert not said


# State


@each_stateful
def test_state_is_found_by_the_param(variant: Variant):
    params = start()
    opt = variant(params)
    opt.step(batches(sparse)[1])  # nothing for the first
    rule = opt.optimizer_class._rule_for(opt.param_group)
    for spec in rule.state:
        assert opt.state[params[1]][spec.name].shape == (
            params[1].shape[:1] if spec.per_row else params[1].shape
        )
    if opt.optimizer_class is not sparsestep.Adagrad:  # which makes it at once, as torch's does
        assert not opt.state.get(params[0])
    assert steps_of(opt._optimizer, params[1]) == (1 if rule.counts else None)


@each_stateful
def test_none_for_a_gradient_changes_nothing(variant: Variant):
    params = start()
    opt = variant(params)
    opt.step(batches(sparse)[0])
    before = kept(everything(opt))
    opt.step([None, None, None])
    for param in params:
        opt.step_param(param, None)
    assert_same(everything(opt), before)


@each_stateful
def test_a_param_is_taken_on_by_its_first_step(variant: Variant):
    params, others = start(), start()
    opt, known = variant([], _allow_empty_param_list=True), variant(others)
    opt.step_param(params[0], None)  # also without a gradient
    assert [id(p) for p in opt.param_group["params"]] == [id(params[0])]
    for grads in batches(sparse):
        for param, grad in zip(params, grads, strict=True):
            opt.step_param(param, grad)
        known.step(grads)
    assert_same(everything(opt), everything(known))
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step(batches(sparse)[0])  # and is one of those that step() is for


@each_functional
def test_params_that_cannot_be_taken_on(cls: type[FunctionalOptimizer]):
    param = torch.ones(3, 2)
    opt = cls([param])
    message = f"^{cls.__name__}: Sparse params at indices .* requires dense parameter tensors"
    with pytest.raises(InputError, match=message):
        opt.step_param(torch.eye(3).to_sparse_coo(), torch.ones(3, 3))
    masked = cls([param], mask=torch.tensor([True, False, True]))
    with pytest.raises(InputError, match=f"^{cls.__name__}: with a mask, all parameters must be"):
        masked.step_param(torch.ones(3, 2), torch.ones(3, 2))
    masked.step([torch.ones(3, 2)])
    assert len(opt.param_group["params"]) == len(masked.param_group["params"]) == 1


@each_functional
def test_params_with_names_are_named_in_messages(cls: type[FunctionalOptimizer]):
    layer = torch.nn.Linear(2, 3)
    opt = cls(layer.named_parameters())
    with pytest.raises(InputError, match=r"param 1 of group 0 \(bias\): the gradient must have"):
        opt.step_param(layer.bias, torch.ones(4))
    new = torch.ones(2)
    opt.step_param(new, torch.ones(2))
    with pytest.raises(InputError, match=r"param 2 of group 0 \(.*\): the gradient must have"):
        opt.step_param(new, torch.ones(4))


# Bad input


BAD: dict[str, tuple[Any, str]] = {
    "index": (
        torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.ones(2, 2, 2), SHAPES[2]),
        r"must be in \[0, 3\). Got 3",
    ),
    "shape": (torch.ones(3, 2), r"parameter's shape, \(3, 2, 2\). Got \(3, 2\)"),
    "dtype": (torch.ones(SHAPES[2], dtype=torch.complex64), "of a like dtype"),
    "device": (torch.ones(SHAPES[2], device="meta"), "parameter's device, cpu. Got meta"),
}


@each_stateful
@each_engine
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_bad_input_changes_nothing(variant: Variant, engine: str, bad: str, first: bool):
    grad, message = BAD[bad]
    message = f"^{variant.cls.optimizer_class.__name__}: param 2 of group 0: .*{message}"
    params = start()
    opt = variant(params, engine=engine)
    if not first:
        opt.step(batches(sparse)[0])
    before = kept(everything(opt))
    good = batches(sparse)[0][:2]
    for call in (lambda: opt.step([*good, grad]), lambda: opt.step_param(params[2], grad)):
        with pytest.raises(InputError, match=message):
            call()
        assert_same(everything(opt), before)
    opt.step(batches(sparse)[0])  # no lock is left behind
    opt.step_param(params[2], torch.ones(SHAPES[2]))


@each_stateful
@each_engine
@pytest.mark.parametrize("bad", BAD)
def test_a_param_whose_first_gradient_is_bad_is_not_taken_on(
    variant: Variant, engine: str, bad: str
):
    grad, message = BAD[bad]
    params = start()
    opt = variant(params[:2], engine=engine)
    before = kept(everything(opt))
    with pytest.raises(InputError, match=message):
        opt.step_param(params[2], grad)
    assert_same(everything(opt), before)
    assert len(opt.param_group["params"]) == 2
    assert params[2] not in opt.state
    assert same_bits(params[2], start()[2])
    opt.step(batches(sparse)[0][:2])
    opt.step_param(params[2], batches(sparse)[0][2])
    known = variant(again := start(), engine=engine)
    known.step(batches(sparse)[0])
    assert_same(params, again)


@each_functional
@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_of_gradients(cls: type[FunctionalOptimizer], count: int):
    params = start()
    opt = cls(params)
    message = (
        f"^{cls.__name__}: the gradients passed in does not equal to the size of the parameters! "
        f"Params length: 3. Gradients length: {count}. "
    )
    with pytest.raises(ValueError, match=message):
        opt.step([torch.ones(SHAPES[0])] * count)
    assert_same(params, start())


# Checkpoints, pickles, copies


@each_stateful
@pytest.mark.parametrize("direction", ["from the class", "to the class", "between functional ones"])
def test_checkpoints_go_back_and_forth(variant: Variant, direction: str):
    steps = batches(sparse)
    leaves = [torch.nn.Parameter(param) for param in start()]
    params = start()
    cls = variant.optimizer(leaves)
    first: Any = variant(params) if direction != "from the class" else cls
    for grads in steps[:3]:
        if isinstance(first, FunctionalOptimizer):
            first.step(grads)
        else:
            train(first, leaves, [grads])
    saved = copy.deepcopy(first.state_dict())
    copies: list[Tensor] = [p.detach().clone() for p in (params if first is not cls else leaves)]
    if direction == "to the class":
        copies = [torch.nn.Parameter(param) for param in copies]
    second: Any = (variant if direction != "to the class" else variant.optimizer)(copies)
    second.load_state_dict(saved)
    for grads in steps[3:]:
        for each, tensors in ((first, params if first is not cls else leaves), (second, copies)):
            if isinstance(each, FunctionalOptimizer):
                each.step(grads)
            else:
                train(each, tensors, [grads])
    assert_same(everything(first), everything(second))
    assert first.state_dict()["param_groups"] == second.state_dict()["param_groups"]


@pytest.mark.parametrize("name", [*TORCH, "SparseAdam"])
def test_checkpoints_of_torchs_classes(name: str):
    make = sparse if name == "SparseAdam" else dense
    steps = batches(make)
    options = {"momentum": 0.9} if name == "SGD" else {}
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = getattr(torch.optim, name)(leaves, **options)
    train(theirs, leaves, steps[:3])
    params = [leaf.detach().clone() for leaf in leaves]
    opt = getattr(sparsestep, f"Functional{name}")(params, **options)
    opt.load_state_dict(theirs.state_dict())
    for grads in steps[3:]:
        opt.step(grads)
    train(theirs, leaves, steps[3:])
    if make is dense:
        assert_same(everything(opt), everything(theirs))
    else:
        torch.testing.assert_close(everything(opt), everything(theirs))
    # And back.
    again = [torch.nn.Parameter(param) for param in params]
    other = getattr(torch.optim, name)(again, **options)
    other.load_state_dict(opt.state_dict())
    train(other, again, steps[:1])
    train(theirs, leaves, steps[:1])
    torch.testing.assert_close(everything(other), everything(theirs))


@each_stateful
@pytest.mark.parametrize(
    "copied",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_copies_go_on_by_themselves(variant: Variant, copied: Callable[[Any], Any]):
    steps = batches(sparse)
    params = start()
    opt = variant(params[:2], engine="reference")
    opt.step_param(params[2], steps[0][2])  # taken on: the copy knows it as well
    for grads in steps[:3]:
        opt.step(grads)
    other = copied(opt)
    before = kept(everything(opt))
    for grads in steps[3:]:
        other.step(grads)
    assert_same(everything(opt), before)
    for grads in steps[3:]:
        opt.step(grads)
    assert_same(everything(opt), everything(other))
    assert other._optimizer.engine == "reference"
    mine = other.param_group["params"][2]
    other.step_param(mine, steps[0][2])
    assert len(other.param_group["params"]) == 3


# Threads


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
    assert steps_of(opt._optimizer, param) == 8 * counts
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
        assert steps_of(opt._optimizer, mine) == steps_of(alone._optimizer, its)
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
    counts = [steps_of(opt._optimizer, param) for param in params]
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
    assert [type(error) for error in threads.raised] == [InputError]
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
