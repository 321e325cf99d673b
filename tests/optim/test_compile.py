"""``torch.compile``: functions are one operation of a graph, steps stay outside of graphs."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import sparsestep
from sparsestep import IndexedGrad, InputError, functional
from sparsestep.optim import functional as graphs
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule, StateSpec
from tests.optim.own_rules import adagrad_formula, randn, seeded, trained
from tests.table import FUNCTIONS, OPTIMIZERS, Variant, sign_sgd
from tests.torch_versions import needs_graphs_for_any_number, uses_torchscript


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Functions in graphs


ROWS, DIM = 30, 4

# A rule of each kind: with state, without, and with state per row. The others are alike.
FEW = (sparsestep.SparseAdam, sparsestep.SGD, sparsestep.RowwiseAdagrad)
each_rule = pytest.mark.parametrize(
    "cls",
    [cls if cls in FEW else pytest.param(cls, marks=pytest.mark.slow) for cls in OPTIMIZERS],
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


def updated(
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
    counter = CompileCounterWithBackend("aot_eager")
    whole = updated(cls, Tensor, partial(torch.compile, backend=counter, fullgraph=True))
    # Numbers in tensors may change from step to step, and nothing is compiled again.
    assert counter.frame_count == 1
    for found, wanted in zip(whole, updated(cls, Tensor), strict=True):
        assert torch.equal(found, wanted)


def test_numbers_and_options_reach_the_rule():
    cls = sparsestep.SparseAdam
    mask = torch.arange(ROWS) % 3 > 0
    options = {"betas": (0.5, 0.75), "eps": 0.25, "mask": mask, "maximize": True}
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    whole = updated(cls, int, compiled, **options)
    for found, wanted in zip(whole, updated(cls, int, **options), strict=True):
        assert torch.equal(found, wanted)


def arguments(rule: Rule, *, dense: bool) -> tuple[Any, ...]:
    """What the operation is called with."""
    hyper = {key: (0.5, 0.75) if key == "betas" else 0.25 for key in rule.hyperparam_names}
    param, indices = torch.randn(ROWS, DIM), torch.tensor([3, 1, 3])
    gradient = IndexedGrad(indices, torch.ones(3, DIM))
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
    @torch.compile(backend="aot_eager", fullgraph=True)
    def update(param: Tensor, ids: Tensor, values: Tensor) -> None:
        functional.sgd_(param, IndexedGrad(ids, values), lr=1.0)

    param = torch.zeros(3, 1)
    with pytest.raises(InputError, match="sgd_: "):
        update(param, torch.tensor([0, 3]), torch.ones(2, 1))
    assert not param.any()
    update(param, torch.tensor([0, 2]), torch.ones(2, 1))
    assert param.flatten().tolist() == [-1.0, 0.0, -1.0]


def test_rules_of_the_same_name_are_told_apart():
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


def test_a_gradient_that_no_graph_can_hold_is_used_outside_of_it():
    param = torch.zeros(3, 2)
    optimizer = sparsestep.FunctionalSGD([param], lr=1.0)

    @torch.compile(backend="eager")
    def update(grad: Tensor) -> Tensor:
        functional.sgd_(param, grad, lr=1.0)
        optimizer.step([grad])
        optimizer.step_param(param, grad)
        return param * 2

    grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
    assert update(grad).tolist() == [[0.0, 0.0], [-6.0, -6.0], [0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor_does_not_copy_a_table():
    from torch._inductor.utils import run_and_get_code

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


# Steps outside of graphs


def learned(table: nn.Module, optimizer: Any, compiled: str, **options: Any) -> list[Tensor]:
    """What a model learns in four steps; ``compiled`` says which part of them is."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(table), nn.Linear(4, 1))
    opt = optimizer(model.parameters(), lr=0.1, **options)
    if options:
        opt.track(model)
    run = torch.compile(model, backend="eager") if compiled == "the model" else model

    def train(ids: Tensor) -> Tensor:
        opt.zero_grad()
        loss: Tensor = run(ids).sum()
        loss.backward()
        opt.step()
        return loss

    if compiled == "the whole step":
        train = torch.compile(train, backend="eager")
    for number in range(4):
        train(torch.tensor([[number, number + 3], [number, 2 * number]]))
    opt.catch_up()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("compiled", ["the whole step", "the model"])
def test_it_learns_the_same_and_says_nothing(compiled: str, capfd: pytest.CaptureFixture[str]):
    table, optimizer, options = nn.Embedding(20, 4, sparse=True), sign_sgd, {"semantics": "dense"}
    if compiled == "the model":
        table, optimizer, options = (
            sparsestep.nn.EmbeddingBag(20, 4, mode="sum"),
            sparsestep.AdamW,
            {},
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # torch takes back some of its own
        ours = learned(table, optimizer, compiled, **options)
    printed = capfd.readouterr()
    assert ([str(each.message) for each in said], printed.out, printed.err) == ([], "", "")
    assert all(map(torch.equal, ours, learned(table, optimizer, "nothing", **options)))


def test_an_optimizer_made_in_a_compiled_function():
    """As torch's suite makes one of its own."""

    def made(param: Tensor) -> tuple[Any, Tensor]:
        opt = sparsestep.Adagrad([param], lr=0.1)
        return opt, param.square().sum()

    results = []
    for make in (torch.compile(made, backend="eager"), made):
        param = nn.Parameter(torch.ones(3, 2))
        opt, loss = make(param)
        loss.backward()
        opt.step()
        results.append((param.detach(), opt.defaults, vars(opt).keys()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


# Formulas of a user's own, compiled


def adam_formula(param, grad, mean, square, *, step, lr, betas=(0.9, 0.999), eps=1e-8):
    mean = mean + (1 - betas[0]) * (grad - mean)
    square.mul_(betas[1]).add_((1 - betas[1]) * grad * grad)
    root = (square / (1 - betas[1] ** step)).sqrt() + eps
    return param - lr / (1 - betas[0] ** step) * mean / root, mean, square


def trained_under_a_schedule(steps: int = 12, **how: Any) -> Tensor:
    """As many rows as it comes, dense gradients in between, and another rate in each step."""
    made = sparsestep.rule(adam_formula, state={"mean": 0.0, "square": 0.0}, **how)
    param = torch.nn.Parameter(randn(12, 4))
    opt = made([param], lr=0.1)
    for step in range(steps):
        opt.param_groups[0]["lr"] *= 0.9
        rows = torch.randint(0, 12, (1, 2 + step % 5), generator=seeded(step))
        values = randn(rows.shape[1], 4, seed=step)
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        if step % 4 == 3:
            param.grad = param.grad.to_dense()
        opt.step()
    return param.detach()


@needs_graphs_for_any_number
def test_a_compiled_rule_has_the_same_numbers():
    compiled = trained_under_a_schedule(compile={"backend": "aot_eager", "fullgraph": True})
    assert torch.allclose(compiled, trained_under_a_schedule(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@uses_torchscript
@pytest.mark.skipif(not shutil.which("c++"), reason="inductor needs a C++ compiler")
def test_a_rule_compiled_by_inductor_has_the_same_numbers():
    compiled = trained_under_a_schedule(3, compile=True)
    assert torch.allclose(compiled, trained_under_a_schedule(3), rtol=1e-5, atol=1e-6)


def test_a_rule_is_compiled_a_few_times_however_many_steps_and_rules_there_are():
    """Not for every rate, count and number of rows: torch gives up on a function after eight."""
    counter = CompileCounterWithBackend("eager")
    compiled = trained_under_a_schedule(compile={"backend": counter})
    assert torch.allclose(compiled, trained_under_a_schedule(), rtol=1e-6, atol=1e-6)
    assert 1 <= counter.frame_count <= 4
    for _ in range(10):
        counter = CompileCounterWithBackend("eager")
        made = sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile={"backend": counter})
        trained(made, lr=0.1)
        assert counter.frame_count >= 1
