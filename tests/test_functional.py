"""One function per rule: the optimizer's numbers, with nothing hidden between two calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import functional
from sparsestep.contract.rule import Rule
from sparsestep.engines import ENGINES, rounding
from sparsestep.errors import InputError
from sparsestep.gradients.layouts import Gradient
from sparsestep.gradients.touched import Touched
from sparsestep.optimizer import state as states
from sparsestep.optimizer.base import RuleOptimizer
from tests.table import FUNCTIONS, each_engine, running_on, same_bits

SHAPE = (7, 5)
STEPS = 6


@dataclass(frozen=True)
class Function:
    """A function, its class, and options that go to the one, to the other, or to both."""

    call: Callable[..., None]
    cls: type[RuleOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    class_only: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {**self.options, **self.class_only}
        return "-".join([self.call.__name__, *(f"{k}={v}" for k, v in given.items())])

    def optimizer(self, params: list[Tensor], **more: Any) -> RuleOptimizer:
        return self.cls(params, **{**self.options, **self.class_only, **more})

    @property
    def rule(self) -> Rule:
        return self.cls._rule_for(self.optimizer([torch.zeros(1)]).param_groups[0])

    def state(self, param: Tensor) -> dict[str, Tensor]:
        """State as it is before the first step, by name."""
        group = self.optimizer([torch.zeros(1)]).param_groups[0]
        made = states.new(self.rule, param, group, None, None)
        return {kept.name: tensor for kept, tensor in zip(self.rule.state, made, strict=True)}

    def __call__(self, param: Tensor, grad: Any, state: dict[str, Tensor], **more: Any) -> Any:
        return self.call(param, grad, **state, **{"step": 1, **self.options, **more})


F = functional
BASIC = [Function(call, cls) for cls, call in FUNCTIONS.items()]
DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
CENTERED = {"centered": True}
MORE = [
    Function(F.sparse_adam_, sparsestep.SparseAdam, {"betas": (0.5, 0.75), "eps": 1e-3}),
    Function(F.adam_, sparsestep.Adam, {}, {"amsgrad": True}),
    Function(F.adam_, sparsestep.Adam, {"weight_decay": 0.1}, {"amsgrad": True}),
    Function(F.adam_, sparsestep.Adam, DECOUPLED),
    Function(F.adamw_, sparsestep.AdamW, {"weight_decay": 0.25}, {"amsgrad": True}),
    Function(F.radam_, sparsestep.RAdam, {"betas": (0.5, 0.99), "weight_decay": 0.1}),
    Function(F.radam_, sparsestep.RAdam, DECOUPLED),
    Function(F.adagrad_, sparsestep.Adagrad, {"lr_decay": 0.5, "weight_decay": 0.1}),
    Function(F.adagrad_, sparsestep.Adagrad, DECOUPLED, {"initial_accumulator_value": 0.25}),
    Function(F.rowwise_adagrad_, sparsestep.RowwiseAdagrad, {"eps": 1e-3, "weight_decay": 0.1}),
    Function(F.rowwise_adagrad_, sparsestep.RowwiseAdagrad, DECOUPLED),
    Function(F.rowwise_adam_, sparsestep.RowwiseAdam, {"weight_decay": 0.1}),
    Function(F.rowwise_adam_, sparsestep.RowwiseAdam, DECOUPLED),
    Function(F.sgd_, sparsestep.SGD, {"weight_decay": 0.1}),
    Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9, "dampening": 0.5}),
    Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9, "nesterov": True, **DECOUPLED}),
    Function(F.rmsprop_, sparsestep.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    Function(F.rmsprop_, sparsestep.RMSprop, {"alpha": 0.5, "eps": 0.5}, CENTERED),
    Function(F.rmsprop_, sparsestep.RMSprop, {"momentum": 0.9, "eps": 0.5, **DECOUPLED}, CENTERED),
    Function(F.lion_, sparsestep.Lion, {"betas": (0.5, 0.75), "weight_decay": 0.1}),
    Function(F.ftrl_, sparsestep.Ftrl, {"l1": 0.5, "l2": 0.25, "beta": 0.5}),
]
STATEFUL = [f for f in BASIC if f.call is not F.sgd_]
STATEFUL.append(Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9}))

of_two_engines = pytest.mark.parametrize("engine", ["reference", "native"])
each_function = pytest.mark.parametrize("function", BASIC, ids=str)
each_variant = pytest.mark.parametrize("function", [*BASIC, *MORE], ids=str)
each_stateful = pytest.mark.parametrize("function", STATEFUL, ids=str)


def test_every_optimizer_has_its_function():
    public = {name for name in vars(functional) if name.endswith("_") and name[0] != "_"}
    assert public == {"apply_", *(function.call.__name__ for function in BASIC)}


def coo(indices: list[list[int]], values: Tensor, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape)


def gradients(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[Tensor]:
    """Rows in any order, with repetitions; now and then single elements, or nothing at all."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    found = []
    for step in range(steps):
        if step == 2:
            found.append(coo([[]], values(0, 5)))
        elif step == 3:
            found.append(coo([[6, 0, 6, 2], [1, 4, 1, 0]], values(4)))
        else:
            rows = torch.randint(0, SHAPE[0], (1, 8), generator=generator)
            found.append(coo(rows.tolist(), values(8, 5)))
    return found


def start(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return values.requires_grad_(requires_grad)


def on(engine: str) -> AbstractContextManager[str]:
    return nullcontext(engine) if engine in ENGINES else running_on(engine)


def train_both(
    function: Function,
    grads: list[Tensor],
    engine: str,
    dtype: torch.dtype = torch.float32,
    per_step: Callable[[int], dict[str, Any]] = lambda step: {},
    class_only: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Param and state after the same gradients, by the function and by the class."""
    param, kept = start(dtype), torch.nn.Parameter(start(dtype))
    state = function.state(param)
    with on(engine) as name:
        opt = function.optimizer([kept], engine=name, **both, **(class_only or {}))
        for step, grad in enumerate(grads, 1):
            given = {"step": step, **both, **per_step(step)}
            assert function(param, grad, state, engine=name, **given) is None
            kept.grad = grad
            opt.step()
    return [param, *state.values()], [kept.detach(), *(opt.state[kept][n] for n in state)]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number


# The numbers are those of the class


@each_variant
@each_engine
def test_the_bits_of_the_class(function: Function, engine: str):
    ours, theirs = train_both(function, gradients(), engine)
    assert_same_bits(ours, theirs)
    assert not same_bits(ours[0], start())


@each_variant
@of_two_engines
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_the_class_in_other_dtypes(function: Function, engine: str, dtype: torch.dtype):
    assert_same_bits(*train_both(function, gradients(dtype), engine, dtype))


COMPLEX = [function for function in [*BASIC, *MORE] if function.cls._supports_complex]


@pytest.mark.parametrize("function", COMPLEX, ids=str)
@of_two_engines
def test_complex_parameters(function: Function, engine: str):
    dtype = torch.complex64
    assert_same_bits(*train_both(function, gradients(dtype), engine, dtype))


@each_function
@each_engine
def test_maximize(function: Function, engine: str):
    assert_same_bits(*train_both(function, gradients(), engine, maximize=True))


@each_function
@of_two_engines
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_tensor_as_learning_rate(function: Function, engine: str, shape: tuple[int, ...]):
    rate = torch.full(shape, 0.03)
    ours, theirs = train_both(function, gradients(), engine, lr=rate)
    assert_same_bits(ours, theirs)
    assert same_bits(rate, torch.full(shape, 0.03))
    numbers, _ = train_both(function, gradients(), engine, lr=rate.item())
    assert_same_bits(ours, numbers)


@each_stateful
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_a_tensor_as_step(function: Function, dtype: torch.dtype):
    """As the state of torch's classes holds it; it is read and not advanced."""
    params = [start(), start()]
    kept = [function.state(param) for param in params]
    count = torch.zeros((), dtype=dtype)
    for step, grad in enumerate(gradients(), 1):
        count += 1
        function(params[0], grad, kept[0], step=step)
        function(params[1], grad, kept[1], step=count)
        assert int(count) == step
    assert_same_bits(*([p, *s.values()] for p, s in zip(params, kept, strict=True)))


@each_function
@each_engine
def test_a_mask(function: Function, engine: str):
    rows = torch.tensor([True, False, True, True, False, False, True])
    masks = [rows]
    if not function.rule.by_row:
        masks.append(torch.rand(SHAPE, generator=torch.Generator().manual_seed(3)) < 0.5)
    for mask in masks:
        dense = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))]
        ours, theirs = train_both(function, [*gradients(), *dense], engine, mask=mask)
        assert_same_bits(ours, theirs)
        kept = ~mask if mask.dim() == 2 else ~mask[:, None].expand(SHAPE)
        assert same_bits(ours[0][kept], start()[kept])


@each_function
@each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_seed_rounds_at_random(function: Function, engine: str, dtype: torch.dtype):
    def seed(step: int) -> dict[str, Any]:
        return {"seed": rounding.seed_for(torch.initial_seed(), 0, step)}

    random = {"stochastic_rounding": True}
    ours, theirs = train_both(function, gradients(dtype), engine, dtype, seed, random)
    assert_same_bits(ours, theirs)
    nearest, _ = train_both(function, gradients(dtype), engine, dtype)
    assert function.call is F.ftrl_ or not same_bits(ours[0], nearest[0])


@each_engine
@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**64, 2**80 + 17])
def test_any_whole_number_is_a_seed(engine: str, seed: int):
    params = [torch.ones(SHAPE, dtype=torch.bfloat16) for _ in range(2)]
    with running_on(engine) as name:
        for param, same in zip(params, (seed, seed % 2**64), strict=True):
            F.sgd_(param, torch.ones(SHAPE, dtype=torch.bfloat16), seed=same, engine=name)
    assert same_bits(*params)
    assert len(params[0].unique()) == 2


@each_engine
def test_the_first_step_of_momentum_takes_the_gradient_whole(engine: str):
    grad = coo([[1]], torch.full((1, 5), 2.0))
    with running_on(engine) as name:
        for step, expected in ((1, 2.0), (2, 1.0)):
            param, buffer = torch.zeros(SHAPE), torch.zeros(SHAPE)
            options: dict[str, Any] = {"lr": 0.5, "momentum": 0.25, "dampening": 0.5}
            F.sgd_(param, grad, buffer, step=step, engine=name, **options)
            assert buffer[1].tolist() == [expected] * 5
            assert param[1].tolist() == [-expected / 2] * 5
            # By default it is not the first.
            F.sgd_(param, grad, buffer, engine=name, **options)
            assert buffer[1].tolist() == [0.25 * expected + 1.0] * 5


def test_options_of_the_class_that_are_the_functions_defaults():
    for function in BASIC:
        defaults = function.optimizer([start()]).defaults
        given = function.call.__kwdefaults__
        for name, value in given.items():
            if name in defaults and name != "step":
                assert defaults[name] == value, (function, name)


# Dense gradients, and every other layout


TORCH = [f for f in [*BASIC, *MORE] if f.cls._has_torch_kernel]
TORCH = [f for f in TORCH if not f.options.keys() & set(f.cls._extras)]  # torch has none of them


@pytest.mark.parametrize("function", TORCH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_engine
def test_dense_gradients_have_torchs_numbers_but_for_rounding(
    function: Function, dtype: torch.dtype, engine: str
):
    param, kept = start(dtype), torch.nn.Parameter(start(dtype))
    state = function.state(param)
    theirs = getattr(torch.optim, function.cls.__name__)
    opt = theirs([kept], **function.options, **function.class_only)
    generator = torch.Generator().manual_seed(2)
    with running_on(engine) as name:
        for step in range(1, STEPS + 1):
            kept.grad = torch.randn(SHAPE, generator=generator, dtype=dtype)
            function(param, kept.grad, state, step=step, engine=name)
            opt.step()
    few = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(param, kept.detach(), rtol=few, atol=few)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, opt.state[kept][name], rtol=few, atol=few)


@each_variant
@each_engine
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_every_layout_of_the_same_gradient(function: Function, engine: str):
    """Compressed, masked or by hand: what is touched decides, not how it is written down."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    where = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5)) < 0.4
    sparse = (values * where).to_sparse_coo()
    flat = where.reshape(-1).nonzero().squeeze(1)
    layouts: dict[str, Gradient] = {
        "coo": sparse,
        "csr": sparse.to_sparse_csr(),
        "csc": sparse.to_sparse_csc(),
        "masked": torch.masked.masked_tensor(values, where),
        "by hand": Touched(flat, values.reshape(-1)[flat], 35, 1),
    }
    results = {}
    with running_on(engine) as name:
        for layout, grad in layouts.items():
            param = start()
            state = function.state(param)
            function(param, grad, state, engine=name)
            results[layout] = [param, *state.values()]
    for layout in layouts:
        assert_same_bits(results["coo"], results[layout])
    assert same_bits(results["coo"][0][~where], start()[~where])


# Autograd is not involved


@each_function
@of_two_engines
@pytest.mark.parametrize("grad_enabled", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_a_leaf_that_requires_grad(
    function: Function, engine: str, grad_enabled: bool, layout: str
):
    plain, leaf = start(), start(requires_grad=True)
    kept = [function.state(plain), function.state(plain)]
    grad = gradients()[0] if layout == "sparse" else torch.ones(SHAPE)
    versions = [leaf._version, *(tensor._version for tensor in kept[1].values())]
    function(plain, grad, kept[0], engine=engine)
    with torch.set_grad_enabled(grad_enabled):
        assert function(leaf, grad, kept[1], engine=engine) is None
    assert same_bits(plain, leaf.detach())
    assert leaf.is_leaf
    assert leaf.grad_fn is None
    assert leaf.grad is None
    written = [leaf, *kept[1].values()]
    assert not any(tensor.requires_grad for tensor in written[1:])
    for tensor, before in zip(written, versions, strict=True):
        assert tensor._version > before


@each_function
def test_a_gradient_that_has_a_graph_of_its_own(function: Function):
    """As ``torch.autograd.grad(..., create_graph=True)`` gives it."""
    params = [start(requires_grad=True), start()]
    grad = params[0].square()
    assert grad.requires_grad
    for param, given in zip(params, (grad, grad.detach()), strict=True):
        state = function.state(param)
        function(param, given, state)
        assert not any(tensor.requires_grad for tensor in state.values())
    assert same_bits(params[0].detach(), params[1])
    assert params[0].is_leaf


@of_two_engines
def test_autograd_notices_that_a_saved_param_was_written(engine: str):
    leaf = start(requires_grad=True)
    loss = leaf.square().sum()
    F.sgd_(leaf, gradients()[0], engine=engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_function
def test_the_gradient_is_not_written(function: Function):
    grads = [gradients()[0], torch.randn(SHAPE)]
    for grad in grads:
        before = grad.clone()
        param = start()
        function(param, grad, function.state(param), maximize=True)
        assert torch.equal(grad.to_dense(), before.to_dense())


@of_two_engines
def test_parameters_and_state_with_strides(engine: str):
    plain, strided = start(), start().t().contiguous().t()
    sums = [torch.zeros(SHAPE), torch.zeros(5, 7).t()]
    by_rows = [grad for grad in gradients() if grad.sparse_dim() == 1]
    for step, grad in enumerate(by_rows, 1):
        F.adagrad_(plain, grad, sums[0], step=step, engine=engine)
        F.adagrad_(strided, grad, sums[1], step=step, engine=engine)
    assert same_bits(plain, strided)
    assert same_bits(*sums)


# Bad input


def spoiled(function: Function, how: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """State with the last tensor replaced."""
    state = function.state(start())
    name = list(state)[-1]
    return {**state, name: how(state[name])}


BAD_STATE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda t: torch.zeros(*t.shape, 2), r"must have shape \("),
    "integers": (lambda t: t.long(), "must be of a real float dtype. Got torch.int64"),
    "imaginary": (lambda t: t.to(torch.complex64), "must be of a real float dtype. Got"),
    "elsewhere": (lambda t: t.to("meta"), "and be on cpu"),
    "shared memory": (lambda t: torch.zeros(1).expand(t.shape), "must have memory of its own"),
    "sparse": (lambda t: t.to_sparse_coo(), "must be a strided tensor"),
    "no tensor": (lambda t: 0.0, "must hold a tensor"),
}


@each_stateful
@of_two_engines
@pytest.mark.parametrize("bad", BAD_STATE)
def test_state_that_does_not_fit(function: Function, engine: str, bad: str):
    how, message = BAD_STATE[bad]
    param, state = start(), spoiled(function, how)
    with pytest.raises(InputError, match=message) as raised:
        function(param, gradients()[0], state, engine=engine)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert same_bits(param, start())
    fresh = function.state(param)
    for key in list(state)[:-1]:
        assert same_bits(state[key], fresh[key])


def test_state_of_a_complex_parameter_has_its_dtype():
    """Real state would be half as large as what is written."""
    param = start(torch.complex64)
    grad = torch.ones(SHAPE, dtype=torch.complex64)
    for engine in ("reference", "native"):
        with pytest.raises(InputError, match=r"^adagrad_: the state 'sum' of a torch.complex64"):
            F.adagrad_(param, grad, torch.zeros(SHAPE), step=1, engine=engine)
        rows = torch.zeros(7, dtype=torch.complex64)
        with pytest.raises(InputError, match=r"^rowwise_adagrad_: the state 'sum' of"):
            F.rowwise_adagrad_(param, grad, rows, engine=engine)
    assert same_bits(param, start(torch.complex64))


BAD_GRADIENTS: dict[str, tuple[Any, str]] = {
    "index too large": (coo([[0, 7]], torch.ones(2, 5)), r"must be in \[0, 7\). Got 7"),
    "index negative": (coo([[-1, 2]], torch.ones(2, 5)), r"must be in \[0, 7\). Got -1"),
    "second index": (coo([[1, 0], [5, 3]], torch.ones(2)), r"dim 1 must be in \[0, 5\). Got 5"),
    "another shape": (torch.ones(7, 4), r"parameter's shape, \(7, 5\). Got \(7, 4\)"),
    "imaginary": (torch.ones(SHAPE, dtype=torch.complex64), "of a like dtype"),
    "elsewhere": (torch.ones(SHAPE, device="meta"), "on the parameter's device, cpu. Got meta"),
    "none": (None, "must be a tensor or a Touched. Got NoneType"),
    "a list": ([0.0], "must be a tensor or a Touched. Got list"),
    "by hand, floats as positions": (Touched(torch.ones(1), torch.ones(1, 5)), "positions of a"),
    "by hand, too few values": (Touched(torch.tensor([1, 2]), torch.ones(1, 5)), "as many rows"),
    "by hand, bad position": (Touched(torch.tensor([9]), torch.ones(1, 5)), "Got 9"),
}


@each_function
@of_two_engines
@pytest.mark.parametrize("bad", BAD_GRADIENTS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_gradients_that_do_not_fit(function: Function, engine: str, bad: str, masked: bool):
    grad, message = BAD_GRADIENTS[bad]
    param = start()
    state, fresh = function.state(param), function.state(param)
    mask = torch.ones(7, dtype=torch.bool) if masked else None
    with pytest.raises(InputError, match=message) as raised:
        function(param, grad, state, engine=engine, mask=mask)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert_same_bits([param, *state.values()], [start(), *fresh.values()])


ROWS = torch.ones(7, dtype=torch.bool)
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "step 0": ({"step": 0}, "step must be the number of this update, from 1. Got 0"),
    "step -1": ({"step": torch.tensor(-1.0)}, "from 1. Got -1"),
    "step 1.5": ({"step": 1.5}, "from 1. Got 1.5"),
    "step nan": ({"step": torch.tensor(float("nan"))}, "from 1. Got nan"),
    "two steps": ({"step": torch.tensor([1, 2])}, "from 1. Got a tensor"),
    "engine": ({"engine": "quantum"}, "engine must be one of auto, native, reference. Got 'qua"),
    "lr": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "two lrs": ({"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element"),
    "mask of numbers": ({"mask": ROWS.float()}, "must be a bool tensor. Got torch.float32"),
    "mask of another length": ({"mask": ROWS[1:]}, r"must have shape \(7,\)"),
    "list of masks": ({"mask": [ROWS]}, "must be a bool tensor. Got list"),
}


@each_stateful
@pytest.mark.parametrize("bad", BAD_OPTIONS)
def test_options_that_make_no_sense(function: Function, bad: str):
    options, message = BAD_OPTIONS[bad]
    param = start()
    state, fresh = function.state(param), function.state(param)
    with pytest.raises(InputError, match=message) as raised:
        function(param, gradients()[0], state, **options)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert_same_bits([param, *state.values()], [start(), *fresh.values()])


OWN_OPTIONS = {
    "eps": -1e-8,
    "weight_decay": -0.1,
    "betas": (0.5, 1.0),
    "lr_decay": -1.0,
    "alpha": -0.5,
    "momentum": -0.9,
    "beta": -1.0,
    "l1": -1.0,
    "l2": -1.0,
}


@each_stateful
def test_options_that_the_class_refuses_too(function: Function):
    defaults = function.optimizer([start()]).defaults
    refused = [name for name in OWN_OPTIONS if name in defaults]
    if function.call is F.rmsprop_:
        refused.remove("momentum")  # needs a buffer first
    assert refused
    for name in refused:
        with pytest.raises(InputError, match="Invalid") as by_class:
            function.cls([start()], **{name: OWN_OPTIONS[name]})
        with pytest.raises(InputError, match="Invalid") as by_function:
            function(start(), gradients()[0], function.state(start()), **{name: OWN_OPTIONS[name]})
        said = [str(raised.value).split(": ", 1) for raised in (by_function, by_class)]
        # "at least" or "greater than": SparseAdam's eps
        assert said[0][0] == function.call.__name__
        assert said[0][1].split(". It")[0] == said[1][1].split(". It")[0]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (F.sparse_adam_, {"weight_decay": 0.1}),
        (F.sparse_adam_, {"decoupled_weight_decay": True}),
        (F.ftrl_, {"weight_decay": 0.1}),
        (F.ftrl_, {"decoupled_weight_decay": True}),
        (F.adamw_, {"decoupled_weight_decay": False}),
        (F.lion_, {"decoupled_weight_decay": False}),
        (F.adam_, {"amsgrad": True}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_that_a_rule_does_not_have(call: Callable[..., None], options: dict[str, Any]):
    function = next(f for f in BASIC if f.call is call)
    param = start()
    with pytest.raises(TypeError, match=next(iter(options))):
        function(param, gradients()[0], function.state(param), **options)
    assert same_bits(param, start())


def test_what_else_is_refused():
    param, grad = start(), gradients()[0]

    def zeros() -> Tensor:
        return torch.zeros(SHAPE)

    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: F.sgd_(param, grad, momentum=0.9), "sgd_: momentum needs a momentum_buffer"),
        (
            lambda: F.rmsprop_(param, grad, zeros(), momentum=0.9),
            "rmsprop_: momentum needs a momentum_buffer",
        ),
        (
            lambda: F.sgd_(param, grad, zeros(), nesterov=True),
            "sgd_: Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            lambda: F.sgd_(param, grad, zeros(), momentum=0.9, dampening=0.1, nesterov=True),
            "sgd_: Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            lambda: F.sparse_adam_(param, grad, zeros(), zeros(), step=1, eps=0),
            "sparse_adam_: eps must be greater than 0",
        ),
        (
            lambda: F.sparse_adam_(param.cfloat(), grad.cfloat(), zeros(), zeros(), step=1),
            "sparse_adam_: the parameter must be real. Got torch.complex64",
        ),
        (
            lambda: F.sgd_(param.long(), grad.long()),
            "sgd_: a parameter must be of a real float dtype. Got torch.int64",
        ),
        (
            lambda: F.sgd_(param.to_sparse_coo(), grad),
            "sgd_: the parameter must be a strided tensor. Got torch.sparse_coo",
        ),
        (
            lambda: F.sgd_(param[:1].expand(SHAPE), grad),
            "sgd_: every element of a parameter must have memory of its own",
        ),
    ]
    for call, message in refused:
        with pytest.raises(InputError) as raised:
            call()
        assert str(raised.value).startswith(message)
    assert same_bits(param, start())
