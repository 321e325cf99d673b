"""Each formula against a transcription of what was published, in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparsestep
from sparsestep.optimizer.base import RuleOptimizer
from tests.table import each_engine, running_on, same_bits

ROWS, COLUMNS = 7, 5
STEPS = 8
Table = np.ndarray
Touched = dict[int, Table]  # the sum of its entries for each row that the gradient holds


class Gradients:
    """The same gradients as tensors and as sums: rows come several times, others not at all."""

    def __init__(self, *, dense: bool) -> None:
        generator = np.random.default_rng(0)
        self.dense = dense
        self.entries: list[list[tuple[int, Table]]] = []
        for _ in range(STEPS):
            rows = range(ROWS) if dense else generator.integers(0, ROWS, 6)
            self.entries.append([(int(r), generator.normal(size=COLUMNS)) for r in rows])

    def tensor(self, step: int) -> torch.Tensor:
        rows, values = zip(*self.entries[step], strict=True)
        stacked = torch.from_numpy(np.stack(values))
        if self.dense:
            return stacked
        return torch.sparse_coo_tensor(torch.tensor([rows]), stacked, (ROWS, COLUMNS))

    def summed(self, step: int) -> Touched:
        sums: Touched = {}
        for row, values in self.entries[step]:
            sums[row] = sums.get(row, 0.0) + values
        return sums


def start() -> Table:
    return np.random.default_rng(1).normal(size=(ROWS, COLUMNS))


Formula = Callable[..., tuple[Table, dict[str, Table]]]


def rowwise_adagrad(
    grads: list[Touched], *, lr, eps, weight_decay=0.0, decoupled=False, initial=0.0
) -> tuple[Table, dict[str, Table]]:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD."""
    p, s = start(), np.full(ROWS, initial)
    for touched in grads:
        for row, g in touched.items():
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            s[row] += sum(float(x) ** 2 for x in g) / COLUMNS
            for j in range(COLUMNS):
                p[row, j] -= lr / (math.sqrt(s[row]) + eps) * g[j]
    return p, {"sum": s}


def rowwise_adam(
    grads: list[Touched], *, lr, betas, eps, weight_decay=0.0, decoupled=False, per_row=False
) -> tuple[Table, dict[str, Table]]:
    """FBGEMM's PARTIAL_ROWWISE_ADAM; the count is the table's or the row's own."""
    b1, b2 = betas
    p, m, v, counts = start(), np.zeros((ROWS, COLUMNS)), np.zeros(ROWS), np.zeros(ROWS)
    for step, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            counts[row] += 1
            t = counts[row] if per_row else step
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            v[row] = b2 * v[row] + (1 - b2) * sum(float(x) ** 2 for x in g) / COLUMNS
            for j in range(COLUMNS):
                m[row, j] = b1 * m[row, j] + (1 - b1) * g[j]
                m_hat, v_hat = m[row, j] / (1 - b1**t), v[row] / (1 - b2**t)
                p[row, j] -= lr * m_hat / (math.sqrt(v_hat) + eps)
    kept = {"exp_avg": m, "exp_avg_sq": v}
    return p, {**kept, "row_step": counts} if per_row else kept


def lion(grads: list[Touched], *, lr, betas, weight_decay=0.0) -> tuple[Table, dict[str, Table]]:
    """Chen et al., algorithm 2."""
    b1, b2 = betas
    p, m = start(), np.zeros((ROWS, COLUMNS))
    for touched in grads:
        for row, g in touched.items():
            for j in range(COLUMNS):
                c = b1 * m[row, j] + (1 - b1) * g[j]
                sign = np.sign(c)
                p[row, j] -= lr * (sign + weight_decay * p[row, j])
                m[row, j] = b2 * m[row, j] + (1 - b2) * g[j]
    return p, {"exp_avg": m}


def ftrl(grads: list[Touched], *, lr, beta, l1, l2, initial=0.0) -> tuple[Table, dict[str, Table]]:
    """McMahan et al., algorithm 1: weights are not stored but follow from z and n."""
    z, n = np.zeros((ROWS, COLUMNS)), np.full((ROWS, COLUMNS), initial)

    def weight(row: int, j: int) -> float:
        at = z[row, j]
        if abs(at) <= l1:
            return 0.0
        sign = np.sign(at)
        return -(at - sign * l1) / ((beta + math.sqrt(n[row, j])) / lr + l2)

    for touched in grads:
        for row, g in touched.items():
            for j in range(COLUMNS):
                w = weight(row, j)
                sigma = (math.sqrt(n[row, j] + g[j] ** 2) - math.sqrt(n[row, j])) / lr
                z[row, j] += g[j] - sigma * w
                n[row, j] += g[j] ** 2
    p = np.array([[weight(row, j) for j in range(COLUMNS)] for row in range(ROWS)])
    return p, {"linear": z, "sum": n}


def adagrad(
    grads: list[Touched], *, lr, lr_decay, eps, weight_decay=0.0, initial=0.0
) -> tuple[Table, dict[str, Table]]:
    """Duchi et al. with torch's decaying rate: the count is the table's."""
    p, s = start(), np.full((ROWS, COLUMNS), initial)
    for step, touched in enumerate(grads, start=1):
        rate = lr / (1 + (step - 1) * lr_decay)
        for row, g in touched.items():
            for j in range(COLUMNS):
                d = g[j] + weight_decay * p[row, j]
                s[row, j] += d * d
                p[row, j] -= rate * d / (math.sqrt(s[row, j]) + eps)
    return p, {"sum": s}


def momentum(
    grads: list[Touched], *, lr, mu, tau, nesterov=False
) -> tuple[Table, dict[str, Table]]:
    """Torch's SGD: the parameter's first step takes the gradient whole, later ones are damped."""
    p, b = start(), np.zeros((ROWS, COLUMNS))
    for step, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            b[row] = g if step == 1 else mu * b[row] + (1 - tau) * g
            p[row] -= lr * (g + mu * b[row]) if nesterov else lr * b[row]
    return p, {"momentum_buffer": b}


def amsgrad(grads: list[Touched], *, lr, betas, eps) -> tuple[Table, dict[str, Table]]:
    """Reddi et al. as torch has it: the maximum is of the average as kept, before correction."""
    b1, b2 = betas
    p = start()
    m, v, top = (np.zeros((ROWS, COLUMNS)) for _ in range(3))
    for t, touched in enumerate(grads, start=1):
        for row, g in touched.items():
            m[row] = b1 * m[row] + (1 - b1) * g
            v[row] = b2 * v[row] + (1 - b2) * g**2
            top[row] = np.maximum(top[row], v[row])
            root = np.sqrt(top[row] / (1 - b2**t))
            p[row] -= lr * (m[row] / (1 - b1**t)) / (root + eps)
    return p, {"exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": top}


def radam(
    grads: list[Touched], *, lr, betas, eps, weight_decay=0.0, decoupled=False
) -> tuple[Table, dict[str, Table]]:
    """Liu et al., algorithm 2, as torch has it: with eps, and from a length of 5 on, not 4."""
    b1, b2 = betas
    p, m, v = start(), np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    longest = 2 / (1 - b2) - 1
    for t, touched in enumerate(grads, start=1):
        length = longest - 2 * t * b2**t / (1 - b2**t)
        for row, g in touched.items():
            if decoupled:
                p[row] *= 1 - lr * weight_decay
            else:
                g = g + weight_decay * p[row]
            m[row] = b1 * m[row] + (1 - b1) * g
            v[row] = b2 * v[row] + (1 - b2) * g**2
            m_hat = m[row] / (1 - b1**t)
            if length <= 5:
                p[row] -= lr * m_hat
                continue
            scale = math.sqrt(1 - b2**t) / (np.sqrt(v[row]) + eps)
            above = (length - 4) * (length - 2) * longest
            rect = math.sqrt(above / ((longest - 4) * (longest - 2) * length))
            p[row] -= lr * rect * m_hat * scale
    return p, {"exp_avg": m, "exp_avg_sq": v}


B = (0.8, 0.95)
ADAM = {"lr": 0.1, "betas": B, "eps": 1e-3}
# The transcription, its numbers, our class, its options.
CASES: dict[str, tuple[Formula, dict[str, Any], type[RuleOptimizer], dict[str, Any]]] = {
    "RowwiseAdagrad": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3},
    ),
    "RowwiseAdagrad with coupled decay": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "initial": 0.5},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "initial_accumulator_value": 0.5},
    ),
    "RowwiseAdagrad with decoupled decay": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "decoupled": True},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "decoupled_weight_decay": True},
    ),
    "RowwiseAdam": (rowwise_adam, ADAM, sparsestep.RowwiseAdam, ADAM),
    "RowwiseAdam with coupled decay": (
        rowwise_adam,
        {**ADAM, "weight_decay": 0.2},
        sparsestep.RowwiseAdam,
        {**ADAM, "weight_decay": 0.2},
    ),
    "RowwiseAdam, rows counted, with decoupled decay": (
        rowwise_adam,
        {**ADAM, "weight_decay": 0.2, "decoupled": True, "per_row": True},
        sparsestep.RowwiseAdam,
        {
            **ADAM,
            "weight_decay": 0.2,
            "decoupled_weight_decay": True,
            "bias_correction": "per_row",
        },
    ),
    "Lion": (
        lion,
        {"lr": 0.1, "betas": B},
        sparsestep.Lion,
        {"lr": 0.1, "betas": B},
    ),
    "Lion with decay": (
        lion,
        {"lr": 0.1, "betas": B, "weight_decay": 0.2},
        sparsestep.Lion,
        {"lr": 0.1, "betas": B, "weight_decay": 0.2},
    ),
    "Ftrl": (
        ftrl,
        {"lr": 0.3, "beta": 0.5, "l1": 0.7, "l2": 0.1},
        sparsestep.Ftrl,
        {"lr": 0.3, "beta": 0.5, "l1": 0.7, "l2": 0.1},
    ),
    "Ftrl without regularisation": (
        ftrl,
        {"lr": 0.3, "beta": 1.0, "l1": 0.0, "l2": 0.0, "initial": 0.25},
        sparsestep.Ftrl,
        {"lr": 0.3, "initial_accumulator_value": 0.25},
    ),
    "Adagrad": (
        adagrad,
        {"lr": 0.1, "lr_decay": 0.3, "eps": 1e-3, "weight_decay": 0.2, "initial": 0.5},
        sparsestep.Adagrad,
        {
            "lr": 0.1,
            "lr_decay": 0.3,
            "eps": 1e-3,
            "weight_decay": 0.2,
            "initial_accumulator_value": 0.5,
        },
    ),
    "SGD with damped momentum": (
        momentum,
        {"lr": 0.1, "mu": 0.9, "tau": 0.4},
        sparsestep.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    ),
    "SGD with Nesterov's momentum": (
        momentum,
        {"lr": 0.1, "mu": 0.9, "tau": 0.0, "nesterov": True},
        sparsestep.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "RAdam": (radam, ADAM, sparsestep.RAdam, ADAM),
    "RAdam that is never rectified": (
        radam,
        {**ADAM, "betas": (0.8, 0.5), "weight_decay": 0.2},
        sparsestep.RAdam,
        {**ADAM, "betas": (0.8, 0.5), "weight_decay": 0.2},
    ),
    "RAdam with decoupled decay": (
        radam,
        {**ADAM, "betas": (0.9, 0.999), "weight_decay": 0.2, "decoupled": True},
        sparsestep.RAdam,
        {
            **ADAM,
            "betas": (0.9, 0.999),
            "weight_decay": 0.2,
            "decoupled_weight_decay": True,
        },
    ),
    "AMSGrad": (amsgrad, ADAM, sparsestep.Adam, {**ADAM, "amsgrad": True}),
}


def agree(ours: torch.Tensor, theirs: Table, precision: float) -> bool:
    return np.allclose(ours.detach().numpy(), theirs, rtol=precision, atol=precision)


@each_engine
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-13), (torch.float32, 2e-5)], ids=str
)
def test_steps_are_what_was_published(
    case: str, engine: str, dense: bool, maximize: bool, dtype: torch.dtype, precision: float
):
    formula, numbers, optimizer, options = CASES[case]
    gradients = Gradients(dense=dense)
    sums = [gradients.summed(step) for step in range(STEPS)]
    if maximize:
        sums = [{row: -g for row, g in touched.items()} for touched in sums]
    table, kept = formula(sums, **numbers)
    # FTRL's weights follow from its state, so they have to begin where that begins.
    begin = np.zeros((ROWS, COLUMNS)) if optimizer is sparsestep.Ftrl else start()
    param = torch.nn.Parameter(torch.from_numpy(begin).to(dtype))
    with running_on(engine) as name:
        opt = optimizer([param], engine=name, maximize=maximize, **options)
        for step in range(STEPS):
            param.grad = gradients.tensor(step).to(dtype)
            opt.step()
    assert agree(param, table, precision)
    for name, theirs in kept.items():
        assert agree(opt.state[param][name], theirs, precision), name
    assert opt.state[param].keys() - {"step"} == kept.keys()


# Bias correction row by row

PER_ROW = [
    (sparsestep.SparseAdam, {}),
    (sparsestep.Adam, {}),
    (sparsestep.Adam, {"amsgrad": True}),
    (sparsestep.AdamW, {"weight_decay": 0.1}),
    (sparsestep.RowwiseAdam, {"weight_decay": 0.1}),
]
each_per_row = pytest.mark.parametrize(
    ("optimizer", "options"), PER_ROW, ids=["SparseAdam", "Adam", "AMSGrad", "AdamW", "RowwiseAdam"]
)


def row_gradient(row: int, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[row]]), values[None], shape)


@each_per_row
@pytest.mark.parametrize("correction", ["per_row", "global"])
def test_a_row_first_seen_at_step_2001_moves_like_a_row_at_step_1(
    optimizer: type[RuleOptimizer], options: dict[str, Any], correction: str
):
    """Counted with the table, it would move three times as far."""
    param = torch.nn.Parameter(torch.ones(3, 4))
    values = torch.tensor([0.5, -1.0, 2.0, 0.25])
    opt = optimizer([param], lr=0.1, bias_correction=correction, **options)
    param.grad = row_gradient(0, values, param.shape)
    opt.step()
    first = param.detach()[0].clone()
    for _ in range(1999):
        opt.step()
    param.grad = row_gradient(2, values, param.shape)
    opt.step()
    assert int(opt.state[param]["step"]) == 2001
    late = param.detach()[2]
    assert same_bits(late, first) == (correction == "per_row")
    if correction == "global":
        assert bool(((late - 1).abs() > 2.5 * (first - 1).abs()).all())
    assert torch.equal(param.detach()[1], torch.ones(4))


@each_engine
@each_per_row
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str
)
def test_rows_counted_on_their_own_are_optimizers_on_their_own(
    optimizer: type[RuleOptimizer],
    options: dict[str, Any],
    engine: str,
    dtype: torch.dtype,
    precision: float,
):
    gradients = Gradients(dense=False)
    table = torch.nn.Parameter(torch.from_numpy(start()).to(dtype))
    rows = [torch.nn.Parameter(row[None].clone()) for row in table.detach()]
    counts = torch.zeros(ROWS)
    with running_on(engine) as name:
        options = {"lr": 0.1, "engine": name, **options}
        opt = optimizer([table], bias_correction="per_row", **options)
        of_rows = [optimizer([row], **options) for row in rows]
        for step in range(STEPS):
            table.grad = gradients.tensor(step).to(dtype)
            opt.step()
            for number, sums in gradients.summed(step).items():
                rows[number].grad = torch.from_numpy(sums[None]).to(dtype).to_sparse(1)
                of_rows[number].step()
                counts[number] += 1
    together = torch.cat([row.detach() for row in rows])
    assert torch.allclose(table.detach(), together, rtol=precision, atol=precision)
    assert torch.equal(opt.state[table]["row_step"], counts)


@each_engine
@each_per_row
def test_rows_are_counted_alike_for_dense_gradients(
    optimizer: type[RuleOptimizer], options: dict[str, Any], engine: str
):
    """Every row has been updated in every step, so that both counts are one."""
    results = []
    for correction in ("per_row", "global"):
        gradients = Gradients(dense=True)
        param = torch.nn.Parameter(torch.from_numpy(start()))
        with running_on(engine) as name:
            opt = optimizer([param], lr=0.1, engine=name, bias_correction=correction, **options)
            for step in range(STEPS):
                param.grad = gradients.tensor(step)
                opt.step()
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-13, atol=1e-13)


# Single steps


@each_engine
def test_sgd_takes_its_first_gradient_whole(engine: str):
    """A row that the first gradient does not hold has no first step of its own, as in torch."""
    param = torch.nn.Parameter(torch.zeros(2, 1))
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, dampening=0.75, engine=name)
        param.grad = row_gradient(0, torch.ones(1), param.shape)
        opt.step()
        assert param.detach().flatten().tolist() == [-1.0, 0.0]
        param.grad = row_gradient(1, torch.ones(1), param.shape)
        opt.step()
        assert param.detach().flatten().tolist() == [-1.0, -0.25]
        param.grad = row_gradient(0, torch.ones(1), param.shape)
        opt.step()
    assert param.detach().flatten().tolist() == [-1.75, -0.25]
    assert opt.state[param]["momentum_buffer"].flatten().tolist() == [0.75, 0.25]


@each_engine
def test_adagrads_rate_falls_with_the_steps_of_the_table(engine: str):
    """With a sum that begins at 9 and a gradient of 4, the root is 5."""
    moves = []
    for earlier in (0, 3):
        param = torch.nn.Parameter(torch.zeros(2, 1))
        with running_on(engine) as name:
            opt = sparsestep.Adagrad(
                [param],
                lr=1.0,
                lr_decay=1.0,
                initial_accumulator_value=9.0,
                eps=0.0,
                engine=name,
            )
            for _ in range(earlier):
                param.grad = row_gradient(1, torch.ones(1), param.shape)
                opt.step()
            param.grad = row_gradient(0, torch.full((1,), 4.0), param.shape)
            opt.step()
        moves.append(param[0].item())
    assert moves == pytest.approx([-0.8, -0.2])


@each_engine
@pytest.mark.parametrize("correction", ["global", "per_row"])
def test_amsgrads_maximum_is_of_the_average_that_is_kept(engine: str, correction: str):
    """Not of the corrected one: that is largest at the first step, for any gradient."""
    param = torch.nn.Parameter(torch.zeros(3, 2))
    highest = torch.zeros(3, 2)
    with running_on(engine) as name:
        opt = sparsestep.Adam([param], amsgrad=True, bias_correction=correction, engine=name)
        for size in (0.1, 4.0, 0.5, 0.0, 8.0, 0.0):
            param.grad = row_gradient(1, torch.tensor([size, -size]), param.shape)
            opt.step()
            kept = opt.state[param]
            highest = torch.maximum(highest, kept["exp_avg_sq"])
            assert same_bits(kept["max_exp_avg_sq"], highest)
    assert bool((kept["max_exp_avg_sq"][1] > kept["exp_avg_sq"][1]).all())
    assert torch.equal(kept["max_exp_avg_sq"][[0, 2]], torch.zeros(2, 2))


# Weight decay

COUPLED = [
    sparsestep.Adam,
    sparsestep.RAdam,
    sparsestep.Adagrad,
    sparsestep.RowwiseAdagrad,
    sparsestep.RowwiseAdam,
    sparsestep.SGD,
    sparsestep.RMSprop,
]
DECOUPLED = [*COUPLED, sparsestep.AdamW, sparsestep.Lion]
TOUCHED, RESTING = [1, 4], [0, 2, 3, 5]


def decayed(
    optimizer: type[RuleOptimizer], values: torch.Tensor, engine: str, **options: Any
) -> torch.Tensor:
    param = torch.nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    with running_on(engine) as name:
        opt = optimizer([param], lr=0.5, engine=name, **options)
        param.grad = torch.sparse_coo_tensor(torch.tensor([TOUCHED]), values, param.shape)
        opt.step()
    return param.detach()


BEGIN = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
VALUES = torch.tensor([[1.0, -2.0, 0.5], [0.25, 4.0, -1.0]])


@each_engine
@pytest.mark.parametrize("optimizer", COUPLED, ids=lambda o: o.__name__)
def test_coupled_decay_is_a_part_of_the_gradient_of_what_was_touched(
    optimizer: type[RuleOptimizer], engine: str
):
    with_decay = decayed(optimizer, VALUES, engine, weight_decay=0.125)
    by_hand = decayed(optimizer, VALUES + 0.125 * BEGIN[TOUCHED], engine)
    assert same_bits(with_decay, by_hand)
    assert same_bits(with_decay[RESTING], BEGIN[RESTING])


@each_engine
@pytest.mark.parametrize("optimizer", DECOUPLED, ids=lambda o: o.__name__)
def test_decoupled_decay_shrinks_what_was_touched_and_nothing_else(
    optimizer: type[RuleOptimizer], engine: str
):
    """A gradient of zeros moves nothing by itself, so that the decay alone is seen."""
    options = {"weight_decay": 0.25}
    if optimizer not in (sparsestep.AdamW, sparsestep.Lion):
        options["decoupled_weight_decay"] = True
    after = decayed(optimizer, torch.zeros(2, 3), engine, **options)
    assert same_bits(after[TOUCHED], 0.875 * BEGIN[TOUCHED])
    assert same_bits(after[RESTING], BEGIN[RESTING])
