"""Lookups in graphs of ``torch.compile``: one operation each, with eager's bits and gradients."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import sparsestep
from sparsestep import InputError
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    NgramEmbedding,
    Vocabulary,
)
from tests.torch_versions import needs_lookups_in_graphs

pytestmark = [
    needs_lookups_in_graphs,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # by the compiler itself
]

ROWS, DIM = 20, 4


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def ids_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(ROWS, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Model(nn.Module):
    """Tables, and a layer over all that they find."""

    def __init__(self, *tables: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.layer = nn.Linear(DIM, 3)

    def forward(self, *arguments: Any) -> Tensor:
        total = torch.zeros(())
        for table in self.tables:
            found = table(*arguments)
            for rows in found if isinstance(found, list) else [found]:
                total = total + self.layer(rows).square().sum()
        return total


def compiled(model: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def model_of(*tables: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(*[table() for table in tables])


def dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def grads_of(model: nn.Module, *others: Tensor) -> list[Any]:
    """The gradients, which are forgotten then."""
    params = [*model.parameters(), *others]
    found = [dense(param.grad) for param in params]
    for param in params:
        param.grad = None
    return found


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y
        for x, y in zip(ours, theirs, strict=True)
    )


def assert_as_eager(
    model: nn.Module, run: Any, *arguments: Any, others: tuple[Tensor, ...] = (), eager: Any = None
) -> list[Any]:
    """A call has the loss and the gradients of the model, which are returned."""
    losses = [each(*arguments) for each in (eager or model, run)]
    assert torch.equal(*losses)
    results = []
    for loss in losses:
        loss.backward()
        results.append(grads_of(model, *others))
    assert equal(*results)
    return results[0]


def with_offsets(seed: int) -> tuple[Tensor, Tensor]:
    return ids_of(9, seed=seed), torch.tensor([0, 3, 3, 7])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "rows": (lambda: Embedding(ROWS, DIM), lambda seed: (ids_of(3, 5, seed=seed),)),
    "rows, padding, by frequency": (
        lambda: Embedding(ROWS, DIM, padding_idx=3, scale_grad_by_freq=True),
        lambda seed: (ids_of(30, seed=seed, dtype=torch.int32),),
    ),
    **{
        f"{mode}, padding": (
            lambda mode=mode: EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=3),
            lambda seed: (ids_of(6, 5, seed=seed),),
        )
        for mode in ("sum", "mean", "max")
    },
    **{
        f"{mode}, offsets": (lambda mode=mode: EmbeddingBag(ROWS, DIM, mode=mode), with_offsets)
        for mode in ("sum", "mean", "max")
    },
    "last offset": (
        lambda: EmbeddingBag(ROWS, DIM, include_last_offset=True),
        lambda seed: (ids_of(9, seed=seed), torch.tensor([0, 3, 9])),
    ),
    "collection": (
        lambda: EmbeddingBagCollection([(ROWS, DIM), (30, DIM)]),
        lambda seed: (ids_of(6, 2, 3, seed=seed),),
    ),
    "n-grams": (
        lambda: NgramEmbedding(ROWS, DIM, orders=(2, 3), heads=2),
        lambda seed: (ids_of(2, 5, seed=seed), ids_of(2, 5, seed=seed + 9) // 12),
    ),
    "fused": (
        lambda: sparsestep.nn.fuse(nn.Embedding(ROWS, DIM)),
        lambda seed: (ids_of(3, 5, seed=seed),),
    ),
}


DYNAMIC: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
    "rows": lambda seed: (ids_of(3, 5 + 4 * seed),),
    "sum, offsets": lambda seed: (ids_of(5 + 4 * seed), torch.arange(0, 5 + 4 * seed, 2)),
    "n-grams": lambda seed: (ids_of(3, 5 + 4 * seed),),
}


@pytest.mark.parametrize(
    ("case", "dynamic"), [*((case, False) for case in CASES), *((case, True) for case in DYNAMIC)]
)
def test_one_graph_with_eager_bits(case: str, dynamic: bool):
    table, arguments = CASES[case]
    arguments = DYNAMIC[case] if dynamic else arguments
    model, counter = model_of(table), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic or None)
    for seed in range(3):
        assert_as_eager(model, run, *arguments(seed))
        run(*arguments(seed)).backward()
        assert all(isinstance(param.grad, CompactGrad) for param in model.tables.parameters())
        grads_of(model)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("case", CASES)
def test_inductor_has_equal_gradients(case: str):
    from torch._inductor.utils import run_and_get_code

    table, arguments = CASES[case]
    model = model_of(table)
    losses, code = run_and_get_code(compiled(model, "inductor"), *arguments(0))
    assert "sparsestep.embed" in "\n".join(code)
    results = []
    for loss in (losses, model(*arguments(0))):
        loss.backward()
        results.append(grads_of(model))
    assert all(map(torch.allclose, *results))


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_per_sample(frozen: bool):
    model = model_of(lambda: EmbeddingBag(ROWS, DIM, mode="sum"))
    model.tables.requires_grad_(not frozen)
    factors = torch.rand(4, 3, requires_grad=True)
    run, arguments = compiled(model), (ids_of(4, 3), None, factors)
    found = assert_as_eager(model, run, *arguments, others=(factors,))
    assert (found[0] is None) == frozen


def twice(table: nn.Module) -> nn.Module:
    """A model that looks up one table twice, in two modules that share the weight as well."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.other = table, Embedding(ROWS, DIM)
            self.other.weight = table.weight

        def forward(self, ids: Tensor) -> Tensor:
            # Both gradients of the first two are ones: equal calls are still two.
            return self.table(ids).sum() + self.table(ids).sum() + self.other(ids + 1).sum()

    return Twice()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_lookups_of_one_weight_add_up(backend: str):
    model = twice(Embedding(ROWS, DIM))
    with torch.no_grad():  # so that sums are exact in any order
        model.table.weight.random_(-50, 50)
    assert_as_eager(model, compiled(model, backend), ids_of(7) % 10)


def test_accumulation_retained_graphs_and_partial_backwards():
    model = model_of(lambda: Embedding(ROWS, DIM))
    weight, layer = model.tables[0].weight, model.layer.weight
    results = []
    for run in (model, compiled(model)):
        first, second = run(ids_of(7)), run(ids_of(7, seed=1))
        first.backward(retain_graph=True)
        torch.autograd.grad(first, [layer], retain_graph=True)  # of no use for the table
        first.backward()
        (alone,) = torch.autograd.grad(second, [weight], retain_graph=True)
        second.backward(inputs=[layer])
        results.append([*grads_of(model), dense(alone)])
    assert equal(*results)


def test_what_a_failed_backward_left_is_not_used():
    model = model_of(lambda: Embedding(ROWS, DIM))
    run = compiled(model)

    def fail(weight: Tensor) -> None:
        raise ValueError("hook")

    handle = model.layer.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="hook"):
        run(ids_of(7)).backward()
    handle.remove()
    grads_of(model)
    assert_as_eager(model, run, ids_of(7))


@pytest.mark.parametrize(
    ("reentrant", "compile_all"), [(False, False), (True, False), (False, True)]
)
def test_checkpointing_counts_once(reentrant: bool, compile_all: bool):
    model = model_of(lambda: Embedding(ROWS, DIM), lambda: EmbeddingBag(ROWS, DIM))
    scale = torch.ones((), requires_grad=True)  # reentrant checkpoints need such an argument

    def checkpointed(run: Any) -> Any:
        return lambda ids: checkpoint(
            lambda ids, scale: run(ids) * scale, ids, scale, use_reentrant=reentrant
        )

    eager = checkpointed(model)
    run = compiled(eager) if compile_all else checkpointed(compiled(model))
    assert_as_eager(model, run, ids_of(4, 3), others=(scale,), eager=eager)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_gradient_of_a_gradient(backend: str):
    model = model_of(lambda: Embedding(ROWS, DIM))
    loss = compiled(model, backend)(ids_of(7))

    def differentiate_twice() -> None:
        (grad,) = torch.autograd.grad(loss, [model.tables[0].weight], create_graph=True)
        grad.backward(grad.detach())

    with pytest.raises(RuntimeError, match=r"once_differentiable|double backward"):
        differentiate_twice()


@pytest.mark.parametrize(
    ("how", "cases"),
    [
        *((how, ["mean, padding", "rows"]) for how in ("clipped", "tracked", "step_in_backward")),
        *(("tracked", [case]) for case in ("collection", "n-grams")),
    ],
)
def test_training_as_eager(how: str, cases: list[str]):
    """Losses as well: the rows of tracked tables have caught up when they are read."""
    results = []
    for is_compiled in (False, True):
        model, losses = model_of(*(CASES[case][0] for case in cases)), []
        options = {"semantics": "dense"} if how == "tracked" else {}
        opt = sparsestep.AdamW(model.parameters(), lr=0.1, **options)
        if how == "tracked":
            opt.track(model)
        if how == "step_in_backward":
            opt.step_in_backward()
        run = compiled(model) if is_compiled else model
        for seed in range(4):
            opt.zero_grad()
            losses.append(run(*CASES[cases[0]][1](seed)))
            losses[-1].backward()
            if how == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        opt.catch_up()
        results.append([each.detach() for each in (*losses, *model.parameters())])
    assert equal(*results)


def test_a_bad_id_raises_as_in_eager():
    model = model_of(lambda: EmbeddingBagCollection([(ROWS, DIM), (30, DIM)]))
    run, ids = compiled(model), ids_of(4, 2)
    ids[2, 1] = 30
    errors = []
    for each in (model, run):
        with pytest.raises(IndexError) as raised:
            each(ids)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert "position" in errors[0]
    run(ids_of(4, 2)).backward()
    with pytest.raises(InputError, match="tokens must be at least 0"):
        compiled(model_of(lambda: NgramEmbedding(ROWS, DIM)))(torch.tensor([[1, -1, 2]]))


def test_without_gradients():
    model = model_of(lambda: Embedding(ROWS, DIM))
    run, ids = compiled(model), ids_of(7)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(run(ids), model(ids))
    model.tables.requires_grad_(False)
    run(ids).backward()
    assert model.tables[0].weight.grad is None
    model.tables.requires_grad_(True)
    run(ids).backward()
    assert isinstance(model.tables[0].weight.grad, CompactGrad)


def test_weights_that_change():
    rows, ids = CASES["rows"][0], ids_of(7)
    model, other = model_of(rows), model_of(rows)
    run = compiled(model)
    with torch.no_grad():
        other.tables[0].weight.zero_()
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model.load_state_dict(model_of(rows).state_dict(), assign=True),
        lambda: setattr(model.tables[0], "weight", nn.Parameter(torch.ones(ROWS, DIM))),
        lambda: sparsestep.nn.grow(model.tables[0], ROWS + 3),
        model.double,
    ]
    for change in changes:
        change()
        assert_as_eager(model, run, ids)


def test_copies_and_what_is_kept():
    model = model_of(lambda: Embedding(ROWS, DIM))
    run, ids = compiled(model), ids_of(7)
    run(ids).backward()
    grads_of(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.tables[0].graph_anchor is None
        results = []
        for each in (model, compiled(made)):
            loss = each(ids)
            loss.backward()
            results.append(grads_of(model if each is model else made))
        assert equal(*results)
    assert list(model.state_dict()) == ["tables.0.weight", "layer.weight", "layer.bias"]
    weight, loss = weakref.ref(model.tables[0].weight), run(ids)
    del model, run, made, each
    loss.backward()  # the gradient of a model that is gone
    del loss
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


class Named(nn.Module):
    """A table whose rows a vocabulary assigns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vocabulary, self.table = Vocabulary(6, evict="lru"), Embedding(6, DIM)
        self.opt = sparsestep.AdamW([self.table.weight], lr=0.1)
        self.vocabulary.attach(self.table, self.opt)

    def forward(self, ids: Tensor) -> Tensor:
        # Equal lookups are two: each counts the ids.
        return self.table(self.vocabulary(ids)).sum() + self.table(self.vocabulary(ids)).sum()


def test_vocabularies():
    model, results = Named(), []
    run, other = compiled(model), copy.deepcopy(model)
    other.vocabulary.attach(other.table, other.opt)
    assert other.vocabulary.graph_key is None
    counter = CompileCounterWithBackend("aot_eager")
    again = torch.compile(other, backend=counter, fullgraph=True)
    eager = Named()
    for each, call in ((eager, eager), (model, run), (other, again)):
        losses = []
        for step in range(6):
            each.opt.zero_grad()
            losses.append(call(torch.arange(step, step + 4) * 10**12))
            losses[-1].backward()
            each.opt.step()
        assert each.vocabulary.num_reused > 0
        results.append([each.table.weight.detach(), *losses, each.vocabulary.as_dict()])
    assert results[0][-1] == results[1].pop() == results[2].pop()
    assert equal(results[0][:-1], results[1])
    assert equal(results[1], results[2])
    assert counter.frame_count == 1


def test_what_stays_outside_of_graphs():
    """Eager code runs, with its gradients and its errors; with fullgraph=True, torch says why."""
    table, ids = Embedding(ROWS, DIM, max_norm=1.0), ids_of(7)
    for each, given in ((table, ids), (Embedding(ROWS, DIM), ids.byte())):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Embedding.*outside of graphs"):
            compiled(each)(given)
    run = torch.compile(lambda ids: table(ids).sum() * 2, backend="aot_eager")
    run(ids).backward()
    assert isinstance(table.weight.grad, CompactGrad)
    with pytest.raises(InputError, match="int64 or int32"):
        run(ids.float())
    bags = EmbeddingBag(ROWS, DIM)
    with pytest.raises(InputError, match="offsets"):
        torch.compile(bags, backend="aot_eager")(ids)
    rows = Embedding(ROWS, DIM)
    mapped = torch.vmap(rows)
    assert torch.equal(torch.compile(mapped, backend="aot_eager")(ids), rows(ids))


def test_torch_finds_no_fault_with_the_operations():
    model = model_of(
        lambda: EmbeddingBagCollection(
            [(ROWS, DIM), EmbeddingBag(ROWS, DIM, mode="max"), EmbeddingBag(ROWS, DIM, mode="sum")]
        ),
        lambda: NgramEmbedding(ROWS, DIM),
    )
    calls = []

    def record(graph: Any, inputs: Any) -> Any:
        class Recorder(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if "sparsestep" in str(target):
                    calls.append((target, args))
                return super().call_function(target, args, kwargs)

        return lambda *given: Recorder(graph).run(*given)

    collection, ngrams = model.tables
    factors = torch.rand(5, 2, requires_grad=True)

    def call(ids: Tensor) -> Any:
        found = collection([ids, ids, ids], None, [None, None, factors])
        return [*found, ngrams(ids)]

    torch.compile(call, backend=record, fullgraph=True)(ids_of(5, 2))
    assert len(calls) == 3
    for target, args in calls:
        operation = target if isinstance(target, torch._ops.OpOverload) else target.default
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        if "hash" in str(target):
            tests = tests[:2]
        found = torch.library.opcheck(operation, args, test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}


def test_a_forward_that_calls_super_reads_rows_that_have_caught_up():
    """Its argument is no id, and it is compiled as well."""

    class Shifted(nn.Embedding):
        def forward(self, mask: Tensor, *, offset: int = 2) -> Tensor:
            return super().forward(mask.cumsum(1) + offset).to(self.weight.dtype)

    results = []
    for kind in ("dense", "fused", "compiled"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Shifted(12, 3), nn.Linear(3, 1))
        if kind == "dense":
            opt: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            opt = sparsestep.nn.optimizer_for(model, sparsestep.AdamW, lr=0.1)
            assert isinstance(model[0], sparsestep.nn.Embedding)
            assert isinstance(model[0], Shifted)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        run = run if kind == "compiled" else model
        losses = []
        for step in range(8):
            opt.zero_grad()
            loss = run(torch.ones(1, 3 + step % 4, dtype=torch.int64)).square().sum()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        results.append(torch.stack(losses))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


class Reader(nn.Module):
    """A module of the user's own that looks up rows, and reads all of them as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, DIM))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, ids: Tensor) -> Tensor:
        found = nn.functional.embedding(ids, self.weight, sparse=True)
        return found * self.scale + self.weight.detach().mean()


@pytest.mark.filterwarnings("ignore:sparsestep. Reader holds a table")
def test_a_tracked_model_with_other_modules_is_one_graph():
    """Rows that they read are current, though none of our code runs in the graph."""
    results = []
    for is_compiled in (False, True):
        model = model_of(lambda: Embedding(ROWS, DIM), Reader, lambda: nn.Embedding(ROWS, DIM))
        model.head = nn.Linear(DIM, ROWS, bias=False)
        model.head.weight = model.tables[2].weight  # tied, so it is torch's module that looks up
        opt = sparsestep.nn.optimizer_for(model, sparsestep.AdamW, lr=0.1)
        run, losses = (compiled(model) if is_compiled else model), []
        for seed in range(6):
            opt.zero_grad()
            losses.append(run(ids_of(3, seed=seed)))
            losses[-1].backward()
            opt.step()
        results.append([loss.detach() for loss in losses])
    assert equal(*results)
