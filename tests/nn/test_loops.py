"""The usual loop, in every variant, gives the bits that it gives with torch's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.gradients.compact import Compact
from tests.nn.cases import OPTIMIZERS, plain, same, same_run
from tests.torch_versions import needs_gradients_that_autograd_lets_go


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tensors are small


each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def ids_of(step: int, *shape: int) -> Tensor:
    """Few ids often, many rarely."""
    generator = torch.Generator().manual_seed(step)
    return (30 * torch.rand(shape, generator=generator) ** 2).long()


class Once(nn.Module):
    """Tables of every kind, each of which is read once."""

    def __init__(self, kinds: Any, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sparse = {"sparse": True, "dtype": dtype}
        self.sums = kinds.EmbeddingBag(30, 4, mode="sum", **sparse)
        self.means = kinds.EmbeddingBag(30, 4, mode="mean", padding_idx=0, **sparse)
        self.rows = kinds.Embedding(30, 4, **sparse)
        self.out = nn.Linear(4, 1, dtype=dtype)

    def forward(self, step: int) -> Tensor:
        offsets = torch.tensor([0, 3, 3, 5])
        found = self.sums(ids_of(step, 8), offsets) + self.means(ids_of(step + 2, 4, 5))
        return self.out((found * self.rows(ids_of(step + 3, 4))).sin()).square().sum()


class Several(Once):
    """One of the tables is read twice, and one weight is shared by two modules."""

    def __init__(self, kinds: Any, dtype: torch.dtype) -> None:
        super().__init__(kinds, dtype)
        self.tied = kinds.EmbeddingBag(30, 4, mode="sum", sparse=True, dtype=dtype)
        self.tied.weight = self.rows.weight

    def forward(self, step: int) -> Tensor:
        factors = torch.linspace(-1, 2, 12, dtype=self.out.weight.dtype).view(4, 3)
        found = self.sums(ids_of(step + 1, 4, 3)) + self.sums(ids_of(step + 5, 4, 2))
        found = found * self.tied(ids_of(step + 4, 4, 3), per_sample_weights=factors)
        return super().forward(step) + self.out(found.sin()).square().sum()


Loop = Callable[[nn.Module, Any, int], None]


def usual(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    optimizer.step()


def zeroed(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(step).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        model(3 * step + part).backward()
    optimizer.step()


def closed(model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(step)
        loss.backward()
        return loss

    optimizer.step(closure)


def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    assert sparsestep.clip_grad_norm_(model.parameters(), 0.01) > 0.01
    optimizer.step()


def clamped(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    sparsestep.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()


def averaged(model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients divided by hand, as after accumulation."""
    accumulated(model, _Nothing(optimizer), step)
    for param in model.parameters():
        param.grad.div_(3)
        param.grad *= torch.tensor(2.0)
    optimizer.step()


class _Nothing:
    """An optimizer that forgets gradients and does no more."""

    def __init__(self, optimizer: Any) -> None:
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        pass


def hooked(model: nn.Module, optimizer: Any, step: int) -> None:
    """A hook on the weight that changes its gradient."""
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in model.parameters()]
    usual(model, optimizer, step)
    for handle in handles:
        handle.remove()


def by_torchs_grad(model: nn.Module, optimizer: Any, step: int) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(step), params), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


ALONE = [usual, zeroed, closed, clipped, clamped, hooked, by_torchs_grad]  # one backward a step
LOOPS = [*ALONE, accumulated, averaged]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def each_of(loops: list[Loop]) -> Any:
    return pytest.mark.parametrize("loop", loops, ids=lambda loop: loop.__name__)


def made(model: nn.Module, name: str) -> Any:
    optimizer = OPTIMIZERS[name](model.parameters())
    if optimizer.semantics == "dense":
        optimizer.track(model)
    return optimizer


def run(model: nn.Module, name: str, loop: Loop, steps: int = 5) -> Any:
    optimizer = made(model, name)
    for step in range(steps):
        loop(model, optimizer, step)
    return optimizer


@each_optimizer
@each_of(ALONE)
@both_dtypes
def test_the_bits_of_torchs_modules(name: str, loop: Loop, dtype: torch.dtype):
    ours = run(Once(sparsestep.nn, dtype), name, loop)
    theirs = run(Once(nn, dtype), name, loop)
    assert same_run(ours, theirs)


@each_optimizer
@each_of(LOOPS)
def test_the_numbers_of_torchs_modules(name: str, loop: Loop):
    """Where gradients are added up, torch sums some duplicates before others."""
    ours, theirs = Several(sparsestep.nn, torch.float64), Several(nn, torch.float64)
    run(ours, name, loop)
    run(theirs, name, loop)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)


@each_optimizer
@each_of([usual, zeroed, accumulated])
@both_dtypes
def test_the_bits_of_what_is_written_out(name: str, loop: Loop, dtype: torch.dtype):
    """Where gradients are added up, they are as if one were written after the other."""
    ours = run(Several(sparsestep.nn, dtype), name, loop)

    def written_out(model: nn.Module, optimizer: Any, step: int) -> None:
        loop(model, _Nothing(optimizer), step)
        for param in model.parameters():
            if isinstance(param.grad, Compact):
                param.grad = plain(param.grad)
        optimizer.step()
        optimizer.zero_grad()

    assert same_run(ours, run(Several(sparsestep.nn, dtype), name, written_out))


COMPACT = [usual, zeroed, accumulated, clipped, averaged, hooked]


@each_of(COMPACT)
def test_the_gradient_stays_compact(loop: Loop):
    model = Several(sparsestep.nn, torch.float32)
    run(model, "Adam", loop)
    for name, param in model.named_parameters():
        if not name.startswith("out"):
            assert isinstance(param.grad, Compact)
            assert not param.grad.is_materialized


@each_optimizer
@pytest.mark.parametrize("backwards", [1, 2])
def test_steps_in_backward(name: str, backwards: int):
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Several(kinds, torch.float64)
        optimizer = made(model, name)
        optimizer.step_in_backward(backwards=backwards)
        for step in range(6):
            model(step).backward()
        assert all(param.grad is None for param in model.parameters())
        runs.append(model)
    for p, q in zip(*(model.parameters() for model in runs), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)


@each_optimizer
@both_dtypes
def test_a_grad_scaler(name: str, dtype: torch.dtype):
    """Its scale is no power of two, so that what it divides by shows; one step overflows."""
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, dtype)
        optimizer = made(model, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(step)
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                sparsestep.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        runs.append(optimizer)
        assert scaler.get_scale() != 3.0
    assert same_run(*runs)


def test_a_step_without_a_new_gradient_counts():
    """As with torch's modules: after zero_grad(set_to_none=False) there is an empty gradient."""
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, torch.float32)
        optimizer = run(model, "Adam", usual)
        optimizer.zero_grad(set_to_none=False)
        for param in model.parameters():
            assert param.grad is not None
        optimizer.step()
        runs.append(optimizer)
    assert same_run(*runs)


TORCHS = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("name", TORCHS)
@each_of([usual, zeroed, hooked])
def test_torchs_own_optimizers(name: str, loop: Loop):
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, torch.float32)
        tables = [p for n, p in model.named_parameters() if not n.startswith("out")]
        optimizer = TORCHS[name](tables)
        for step in range(5):
            loop(model, optimizer, step)
        runs.append(optimizer)
    assert same_run(*runs)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_do_not_depend_on_threads(threads: int):
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        table = sparsestep.nn.EmbeddingBag(500, 16, mode="mean")
        optimizer = sparsestep.Adam(table.parameters())
        for step in range(3):
            optimizer.zero_grad()
            ids = (
                500 * torch.rand(3000, 7, generator=torch.Generator().manual_seed(step)) ** 3
            ).long()
            table(ids).sin().sum().backward()
            optimizer.step()
        results.append(optimizer)
    assert same_run(*results)


def test_a_frozen_table_has_no_gradient():
    weight = torch.randn(5, 2)
    table = sparsestep.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    factors = torch.ones(1, 3, requires_grad=True)
    table(torch.tensor([[1, 2, 1]]), per_sample_weights=factors).sum().backward()
    assert table.weight.grad is None
    assert torch.allclose(factors.grad, weight[[1, 2, 1]].sum(1)[None])
    assert not table(torch.tensor([[1]])).requires_grad


@pytest.mark.parametrize("first", ["compact", "sparse", "dense"])
@pytest.mark.parametrize("second", ["compact", "sparse", "dense"])
@pytest.mark.parametrize("graphs", [1, 2])
@each_optimizer
def test_a_weight_with_gradients_of_several_kinds(first: str, second: str, graphs: int, name: str):
    """Such as a table that is the last layer's weight as well."""
    ids = [torch.tensor([1, 3, 1]), torch.tensor([3, 2])]

    def total(weight: Tensor, kind: str, which: int) -> Tensor:
        if kind == "dense":
            return (weight * torch.arange(1.0, 11).view(5, 2) * (which + 1)).sum()
        cls = sparsestep.nn.Embedding if kind == "compact" else nn.Embedding
        table = cls(5, 2, sparse=True)
        table.weight = weight
        return table(ids[which]).sin().sum()

    runs = []
    for kinds in ((first, second), ("dense", "dense")):
        weight = nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2))
        dense = nn.Parameter(weight.detach().clone())
        parts = [total(weight, kind, which) for which, kind in enumerate((first, second))]
        if kinds == (first, second):
            for part in [sum(parts)] if graphs == 1 else parts:
                part.backward()
        else:
            wanted = [
                total(dense, "sparse" if kind == "compact" else kind, which)
                for which, kind in enumerate((first, second))
            ]
            grads = [torch.autograd.grad(part, dense)[0] for part in wanted]
            weight.grad = sum(g.to_dense() for g in grads)
            if "dense" not in (first, second):
                weight.grad = weight.grad.to_sparse(1)
        optimizer = OPTIMIZERS[name]([weight])
        optimizer.step()
        runs.append((weight, optimizer))
    (ours, _), (theirs, _) = runs
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.grad.is_sparse == theirs.grad.is_sparse
    assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-12)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("viewed", [True, False])
def test_memory_that_autograd_shares(kind: str, first: bool, viewed: bool):
    """A parameter is added to the output: its gradient may get the memory of the output's.

    The second backward adds to it in place. Torch's own sparse gradients are wrong here.
    """
    results = []
    for kinds in (sparsestep.nn, nn):
        torch.manual_seed(0)
        options = {"mode": "sum"} if kind == "EmbeddingBag" else {}
        table = getattr(kinds, kind)(5, 2, dtype=torch.float64, **options)
        other = nn.Parameter(torch.randn(6 if viewed else (3, 2), dtype=torch.float64))
        ids = torch.tensor([1, 2, 1])
        ids = ids[:, None] if kind == "EmbeddingBag" else ids
        factors = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        for _ in range(2):
            total = table(ids) + other.view(3, 2) if first else other.view(3, 2) + table(ids)
            (total * factors).sum().backward()
        results.append((table.weight.grad.to_dense(), other.grad))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


@needs_gradients_that_autograd_lets_go
def test_the_gradient_of_an_output_that_nobody_shares_is_not_copied():
    table = sparsestep.nn.EmbeddingBag(5, 2, mode="sum")
    output = table(torch.tensor([[1, 2], [1, 3]]))
    seen = []
    output.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (output * torch.randn(2, 2)).sum().backward()
    assert [table.weight.grad.touched().values.data_ptr()] == seen


def test_clipping_leaves_what_shares_memory_alone():
    results = []
    for cls in (sparsestep.nn.Embedding, nn.Embedding):
        torch.manual_seed(0)
        tables = [cls(5, 2, sparse=True) for _ in range(2)]
        ids = torch.tensor([1, 2, 1])
        added = tables[0](ids) + tables[1](ids)
        (added * torch.arange(6.0).view(3, 2)).sum().backward()
        for table, limit in zip(tables, (1.0, 2.0), strict=True):
            sparsestep.clip_grad_norm_(table.parameters(), limit)
        results.append([table.weight.grad.to_dense() for table in tables])
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


def test_ids_that_are_changed_before_backward_are_refused():
    for cls, ids in (
        (sparsestep.nn.Embedding, torch.tensor([1, 2])),
        (sparsestep.nn.EmbeddingBag, torch.tensor([[1, 2]])),
    ):
        output = cls(5, 2)(ids)
        ids.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_second_derivative_is_refused():
    table = sparsestep.nn.EmbeddingBag(5, 2)
    loss = table(torch.tensor([[1, 2]])).square().sum()
    (grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    with pytest.raises(sparsestep.InputError, match="cannot be differentiated once more"):
        grad.to_dense()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad * 2).backward(torch.ones(5, 2))
    assert grad.detach().to_dense().shape == (5, 2)


def test_a_copy_of_a_model_trains_alike():
    model = Several(sparsestep.nn, torch.float32)
    optimizer = run(model, "Adam", usual)
    copied, other = copy.deepcopy((model, optimizer))
    for step in range(5, 8):
        usual(model, optimizer, step)
        usual(copied, other, step)
    assert same_run(optimizer, other)
