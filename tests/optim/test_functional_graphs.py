"""The functions in graphs of torch.compile: one operation each, and no break of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparsestep
from sparsestep import IndexedGrad, InputError, functional
from sparsestep.optim import functional as graphs
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule, StateSpec
from tests.table import FUNCTIONS, OPTIMIZERS, Variant

ROWS, DIM = 30, 4

# A rule of each kind: with state, without, and with state per row. The others are alike.
USUAL = (sparsestep.SparseAdam, sparsestep.SGD, sparsestep.RowwiseAdagrad)
each_rule = pytest.mark.parametrize(
    "cls",
    [cls if cls in USUAL else pytest.param(cls, marks=pytest.mark.slow) for cls in OPTIMIZERS],
    ids=lambda cls: cls.__name__,
)


def rule_of(cls: type[RuleOptimizer]) -> Rule:
    return Variant(cls, {}).rule


def state_of(rule: Rule) -> list[Tensor]:
    return [torch.zeros((ROWS,) if spec.per_row else (ROWS, DIM)) for spec in rule.state]


def gradient_of(rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss of looked-up rows, and its gradient."""
    gradient, loss = torch.func.grad_and_value(lambda r: ((r.sum(1) - target) ** 2).mean())(rows)
    return gradient, loss


def trained(
    cls: type[RuleOptimizer],
    numbers: type,
    compiled: Callable[..., Any] = lambda function: function,
    **options: Any,
) -> list[Tensor]:
    """Parameter, state and losses of a function that looks up, derives and updates, four times."""

    def train(
        param: Tensor, state: list[Tensor], step: Any, lr: Any, ids: Tensor, target: Tensor
    ) -> Tensor:
        gradient, loss = gradient_of(param[ids], target)
        with torch.no_grad():
            update(param, IndexedGrad(ids, gradient), *state, step=step, lr=lr, **options)
        return loss

    update, state = FUNCTIONS[cls], state_of(rule_of(cls))
    run = compiled(train)
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(ROWS, DIM, generator=generator)
    losses = []
    for number in range(1, 5):
        ids = torch.randint(ROWS, (8,), generator=generator)
        target = torch.randn(8, generator=generator)
        step, lr = (torch.tensor(float(number)), torch.tensor(0.1 / number))
        if numbers is int:
            step, lr = number, 0.1
        losses.append(run(param, state, step, lr, ids, target))
    return [param, *state, torch.stack(losses)]


@each_rule
def test_a_training_step_is_one_graph(cls: type[RuleOptimizer]):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    whole = trained(
        cls, Tensor, lambda train: torch.compile(train, backend=counter, fullgraph=True)
    )
    # Numbers in tensors may change from step to step, and nothing is compiled again.
    assert counter.frame_count == 1
    for found, wanted in zip(whole, trained(cls, Tensor), strict=True):
        assert torch.equal(found, wanted)


def test_numbers_and_options_reach_the_rule():
    torch._dynamo.reset()
    cls = sparsestep.SparseAdam
    mask = torch.arange(ROWS) % 3 > 0
    options = {"betas": (0.5, 0.75), "eps": 0.25, "mask": mask, "maximize": True}
    whole = trained(
        *(cls, int, lambda train: torch.compile(train, backend="eager", fullgraph=True)),
        **options,
    )
    for found, wanted in zip(whole, trained(cls, int, **options), strict=True):
        assert torch.equal(found, wanted)


def arguments(rule: Rule, *, dense: bool) -> tuple[Any, ...]:
    """What the operation is called with."""
    hyper = {key: (0.5, 0.75) if key == "betas" else 0.25 for key in rule.hyperparam_names}
    param, positions = torch.randn(ROWS, DIM), torch.tensor([3, 1, 3])
    gradient = IndexedGrad(positions, torch.ones(3, DIM))
    if dense:
        gradient = IndexedGrad(None, torch.ones(ROWS, DIM))
    return (
        *("who", rule.key, param, state_of(rule), *gradient),
        *(1, None, *graphs._flatten(hyper), False, 0.0, False, None, "auto", None),
    )


@pytest.mark.parametrize("dense", [False, True])
@each_rule
def test_torch_finds_no_fault_with_the_operation(cls: type[RuleOptimizer], dense: bool):
    operation = torch.ops.sparsestep.apply_.default
    found = torch.library.opcheck(operation, arguments(rule_of(cls), dense=dense))
    assert set(found.values()) == {"SUCCESS"}


def test_a_bad_index_is_refused_and_nothing_written():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def update(param: Tensor, ids: Tensor, values: Tensor) -> None:
        functional.sgd_(param, IndexedGrad(ids, values), lr=1.0)

    param = torch.zeros(3, 1)
    with pytest.raises(InputError, match=r"sgd_: .* must be in \[0, 3\)\. Got 3"):
        update(param, torch.tensor([0, 3]), torch.ones(2, 1))
    assert not param.any()
    update(param, torch.tensor([0, 2]), torch.ones(2, 1))
    assert param.flatten().tolist() == [-1.0, 0.0, -1.0]


def test_rules_of_the_same_name_are_told_apart():
    torch._dynamo.reset()

    def rule_that_adds(number: float) -> Rule:
        def update(param: Tensor, grad: Tensor, sum: Tensor, *, lr: float) -> Any:
            return param + number * grad, sum + lr

        return Rule("mine", update, (StateSpec("sum"),))

    one, ten = rule_that_adds(1.0), rule_that_adds(10.0)

    @torch.compile(backend="eager", fullgraph=True)
    def update(param: Tensor, state: Tensor, ids: Tensor, values: Tensor) -> None:
        for rule in (one, ten):
            grad = IndexedGrad(ids, values)
            functional.apply_("mine", rule, param, grad, [state], 1, {"lr": 0.5})

    param, state = torch.zeros(3, 1), torch.zeros(3, 1)
    update(param, state, torch.tensor([1]), torch.ones(1, 1))
    assert param.flatten().tolist() == [0.0, 11.0, 0.0]
    assert state.flatten().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["function", "step", "step_param"])
def test_a_gradient_that_no_graph_can_hold_is_used_outside_of_it(kind: str):
    torch._dynamo.reset()
    param = torch.zeros(3, 2)
    optimizer = sparsestep.FunctionalSGD([param], lr=1.0)
    calls: dict[str, Callable[[Tensor], None]] = {
        "function": lambda grad: functional.sgd_(param, grad, lr=1.0),
        "step": lambda grad: optimizer.step([grad]),
        "step_param": lambda grad: optimizer.step_param(param, grad),
    }

    @torch.compile(backend="eager")
    def update(grad: Tensor) -> Tensor:
        calls[kind](grad)
        return param * 2

    grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
    assert update(grad).tolist() == [[0.0, 0.0], [-2.0, -2.0], [0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor_does_not_copy_a_table():
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()

    def train(param: Tensor, mean: Tensor, square: Tensor, ids: Tensor) -> Tensor:
        gradient, loss = gradient_of(param[ids], ids.float())
        with torch.no_grad():
            functional.sparse_adam_(param, IndexedGrad(ids, gradient), mean, square, step=1)
        return loss

    tables = [torch.zeros(10_007, DIM) for _ in range(3)]
    compiled = torch.compile(train, fullgraph=True)
    _, code = run_and_get_code(compiled, *tables, torch.tensor([5, 10_006]))
    call = "\n".join(code).split("def call")[1]
    assert "sparsestep.apply_" in call
    assert "empty_strided_cpu((10007" not in call
    assert tables[0][5].all()
    assert not tables[0][6].any()
