"""Contestants of ``python -m benchmarks``: workload, the limit, other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import limit, workload
from benchmarks.harness import race as harness
from benchmarks.harness import report as screen
from benchmarks.harness.cases import Case, case
from benchmarks.harness.contestants import (
    Factory,
    Native,
    Reference,
    TorchDenseAdam,
    TorchSparseAdam,
    rule_of,
    tensors,
)
from benchmarks.harness.limit import Limit
from benchmarks.harness.peers import DglSparseAdam, FbgemmAdagrad
from benchmarks.harness.results import Refusal
from benchmarks.harness.workload import SETS, Unavailable, Workload
from sparsestep import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    RAdam,
    RMSprop,
    RowwiseAdagrad,
    RowwiseAdam,
    SparseAdam,
    _native,
)
from sparsestep.optim.optimizer import RuleOptimizer

needs_core = pytest.mark.skipif(
    _native.ext is None or limit.limit_module is None, reason="make bench builds the limit"
)


def test_sets_differ_and_share_memory_with_their_tensors() -> None:
    sets = workload.gradient_sets(case(100, 16, 10, "uniform", tables=2))
    assert len(sets) == SETS
    assert len({tuple(g.positions.tolist()) for batch in sets for g in batch}) == 2 * SETS
    assert len({g.values.data_ptr() for batch in sets for g in batch}) == 2 * SETS
    for gradient in sets[0]:
        assert not gradient.coo.is_coalesced()
        assert gradient.coo._values().data_ptr() == gradient.values.data_ptr()


def test_large_gradients_share_values_but_not_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_VALUE_BYTES", 3 * 4 * 10 * 16)
    sets = workload.gradient_sets(case(100, 16, 10, "uniform"))
    assert len({batch[0].values.data_ptr() for batch in sets}) == 3
    assert len({tuple(batch[0].positions.tolist()) for batch in sets}) == SETS


@needs_core
@pytest.mark.parametrize(
    "made",
    [
        case(500, 16, 3000, "zipf"),
        case(10_000, 64, 4096, "half"),
        case(100, 32, 50, "uniform", tables=3),
    ],
    ids=lambda made: made.name,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_limit_computes_what_sparsestep_computes(made: Case, threads: int) -> None:
    with harness.threads(threads):
        compare_with_the_limit(Workload(made), SparseAdam)


def compare_with_the_limit(made: Workload, optimizer: Factory, **options: Any) -> None:
    ours, least = Native(made, optimizer, **options), Limit(made, optimizer, **options)
    for number in range(SETS):
        for contestant in (ours, least):
            contestant.before(number)
            contestant.step()
    start = workload.fill(torch.empty(made.case.rows, made.case.dim))
    states = tensors(rule_of(optimizer, **options), ours.optimizer, ours.params)
    for one, other, expected, state in zip(
        ours.params, least.params, states, least._states, strict=True
    ):
        assert one.data_ptr() != other.data_ptr()
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        torch.testing.assert_close(expected, state, rtol=1e-5, atol=1e-6)


# One set of options for each rule of the core.
RULES: dict[str, tuple[type[RuleOptimizer], dict[str, Any]]] = {
    "sparse_adam": (SparseAdam, {}),
    "sparse_adam_per_row": (SparseAdam, {"bias_correction": "per_row"}),
    "adam": (AdamW, {"weight_decay": 0.0}),
    "adam_per_row": (Adam, {"bias_correction": "per_row"}),
    "amsgrad": (Adam, {"amsgrad": True}),
    "amsgrad_per_row": (Adam, {"amsgrad": True, "bias_correction": "per_row"}),
    "radam": (RAdam, {}),
    "adagrad": (Adagrad, {"initial_accumulator_value": 0.1}),
    "rowwise_adagrad": (RowwiseAdagrad, {"initial_accumulator_value": 0.1}),
    "rowwise_adam": (RowwiseAdam, {"betas": (0.5, 0.9)}),
    "rowwise_adam_per_row": (RowwiseAdam, {"bias_correction": "per_row"}),
    "sgd": (SGD, {}),
    "sgd_momentum": (SGD, {"momentum": 0.9}),
    "rmsprop": (RMSprop, {}),
    "rmsprop_momentum": (RMSprop, {"momentum": 0.9}),
    "rmsprop_centered": (RMSprop, {"centered": True}),
    "rmsprop_centered_momentum": (RMSprop, {"centered": True, "momentum": 0.9}),
    "lion": (Lion, {}),
    "ftrl": (Ftrl, {"initial_accumulator_value": 0.1}),
}


@needs_core
def test_every_rule_of_the_core_is_there() -> None:
    assert _native.ext is not None
    assert _native.ext.rules().keys() == RULES.keys()
    assert limit.limit_module is not None
    assert set(limit.limit_module.rules()) == RULES.keys()


def test_the_limit_needs_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "limit_module", None)
    with pytest.raises(Unavailable, match="run make bench"):
        Limit(Workload(case(100, 16, 10, "uniform")))


@needs_core
@pytest.mark.parametrize("name", RULES)
def test_the_limit_of_every_rule(name: str) -> None:
    optimizer, options = RULES[name]
    assert rule_of(optimizer, **options).name == name
    compare_with_the_limit(Workload(case(500, 32, 3000, "zipf")), optimizer, **options)


def test_the_limit_shares_the_work_out_by_what_a_rule_writes() -> None:
    counts = torch.tensor([13, 1, 1, 1, 1, 1, 1, 1])
    assert limit.shares(counts, threads=2, rows=1) == (1, 8)
    assert limit.shares(counts, threads=2, rows=30) == (4, 8)


@needs_core
def test_optimizers_share_a_table_but_not_the_state_of_another_rule() -> None:
    made = Workload(case(100, 16, 10, "uniform"), shared=True)
    pairs = [
        (Native(made, each), Limit(made, each)) for each in (Adagrad, RowwiseAdagrad, RowwiseAdam)
    ]
    assert len({id(contestant.params) for pair in pairs for contestant in pair}) == 1
    assert {name: [len(each) for each in state] for name, state in made.states.items()} == {
        **{"adagrad": [1], "rowwise_adagrad": [1], "rowwise_adam": [2]}
    }
    for (ours, least), state in zip(pairs, made.states.values(), strict=True):
        assert least._states is state
        [kept] = ours.optimizer.state.values()
        assert kept["sum" if "sum" in kept else "exp_avg"] is state[0][0]


def test_plan_of_the_limit() -> None:
    positions = case(100, 16, 400, "zipf").positions(0)
    slots, offsets, entries, shares = limit.plan(positions, threads=3, rows=3)
    seen = list(dict.fromkeys(positions.tolist()))
    assert slots.tolist() == seen
    for place, slot in enumerate(seen):
        its = entries[offsets[place] : offsets[place + 1]].tolist()
        assert its == (positions == slot).nonzero().flatten().tolist()
    assert len(shares) == 3
    assert list(shares) == sorted(shares)
    assert shares[-1] == len(seen)
    weights = [int(offsets[end]) + 3 * end for end in (0, *shares)]
    parts = [after - before for before, after in pairwise(weights)]
    heaviest = int((offsets[1:] - offsets[:-1]).max()) + 3
    assert max(parts) - min(parts) <= 2 * heaviest


@needs_core
def test_contestants_share_one_table_where_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_OWN_TABLE_BYTES", 100)
    made = case(100, 16, 10, "uniform")
    shared = Workload(made)
    theirs, ours = TorchSparseAdam(shared), Native(shared)
    reference, least = Reference(shared), Limit(shared)
    assert theirs.params is ours.params is reference.params is least.params
    [(exp_avg, _)] = shared.states["sparse_adam"]
    assert bool((exp_avg != 0).any())
    for optimizer in (ours.optimizer, reference.optimizer):
        [state] = optimizer.state.values()
        assert state["exp_avg"] is exp_avg
    for contestant in (least, reference):
        before = exp_avg.clone()
        contestant.before(1)
        contestant.step()
        assert not torch.equal(exp_avg, before)
    result = harness.measure(made, "large", [TorchSparseAdam, Native], seconds=0.001)
    assert result.shared
    assert "one table for all" in screen.headline(result)


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(1000, 16, 10, "uniform")
    free = workload._RESERVE_BYTES + 4 * made.table_bytes
    monkeypatch.setattr(workload, "available_memory", lambda: free)
    result = harness.measure(made, "peers", [TorchSparseAdam, Reference], seconds=0.001)
    assert [timing.contestant for timing in result.timings] == [TorchSparseAdam.name]
    assert result.unavailable == [Refusal(Reference.name, "needs 0.0 GB, but only 0.0 GB are free")]


def test_available_memory(tmp_path: Path) -> None:
    source = tmp_path / "meminfo"
    source.write_text("MemTotal: 24 kB\nMemAvailable:   12 kB\n")
    assert workload.available_memory(source) == 12 * 1024
    assert workload.available_memory(tmp_path / "missing") == float("inf")


def test_refusals() -> None:
    huge = SimpleNamespace(case=case(10_000_000, 16, 1, "uniform"))
    with pytest.raises(Unavailable, match="over 100 million elements"):
        TorchDenseAdam(huge)  # type: ignore[arg-type]
    for peer in (FbgemmAdagrad, DglSparseAdam):
        with pytest.raises(Unavailable, match="not installed"):
            peer(Workload(case(100, 16, 10, "uniform")))


@needs_core
def test_the_limit_refuses_odd_dims() -> None:
    with pytest.raises(Unavailable, match="multiples of 16"):
        Limit(Workload(case(100, 20, 10, "uniform")))


def summed(made: Workload, number: int) -> list[Tensor]:
    return [gradient.coo.to_dense() for gradient in made.sets[number]]


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_fbgemm_gets_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tables(torch.nn.Module):
        """As documented: specs, then (ids, offsets) table by table, to [batch, sum of dims]."""

        def __init__(self, specs: list[tuple[int, int, str, str]], **options: Any) -> None:
            super().__init__()
            assert {spec[2:] for spec in specs} == {("host", "cpu")}
            assert options["optimizer"] == "adagrad"
            sizes = [spec[:2] for spec in specs]
            self.weights = torch.nn.ParameterList([torch.empty(size) for size in sizes])

        def split_embedding_weights(self) -> list[Tensor]:
            return list(self.weights)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            assert torch.equal(offsets, torch.arange(len(ids) + 1))
            parts = ids.view(len(self.weights), -1)
            return torch.cat([w[p] for w, p in zip(self.weights, parts, strict=True)], dim=1)

    install(
        monkeypatch,
        fbgemm_gpu={},
        fbgemm_gpu__split_table_batched_embeddings_ops_training={
            "SplitTableBatchedEmbeddingBagsCodegen": Tables,
            "ComputeDevice": SimpleNamespace(CPU="cpu"),
        },
        fbgemm_gpu__split_table_batched_embeddings_ops_common={
            "EmbeddingLocation": SimpleNamespace(HOST="host"),
            "PoolingMode": SimpleNamespace(SUM="sum"),
        },
        fbgemm_gpu__split_embedding_configs={
            "EmbOptimType": SimpleNamespace(EXACT_ADAGRAD="adagrad")
        },
    )
    made = Workload(case(50, 16, 20, "zipf", tables=2))
    contestant = FbgemmAdagrad(made)
    contestant._tables.zero_grad()
    contestant.before(3)
    contestant.step()
    for weight, expected in zip(contestant._tables.weights, summed(made, 3), strict=True):
        torch.testing.assert_close(weight.grad, expected)


def test_dgl_gets_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class NodeEmbedding:
        """As documented: a call returns a leaf, which is traced until the next step."""

        def __init__(
            self, rows: int, dim: int, name: str, init_func: Callable[..., Tensor]
        ) -> None:
            self.name, self.weight = name, init_func(torch.empty(rows, dim))
            self.trace: list[tuple[Tensor, Tensor]] = []

        def __call__(self, ids: Tensor) -> Tensor:
            rows = self.weight[ids].requires_grad_()
            self.trace.append((ids, rows))
            return rows

    class SparseAdam:
        def __init__(self, embeddings: list[NodeEmbedding], lr: float) -> None:
            assert len({each.name for each in embeddings}) == len(embeddings)
            self.embeddings = embeddings
            self.clean = False

        def zero_grad(self) -> None:
            self.clean = True

        def step(self) -> None:
            assert self.clean
            self.clean = False
            self.seen = []
            for each in self.embeddings:
                [(ids, rows)] = each.trace
                assert rows.grad is not None
                self.seen.append(torch.zeros_like(each.weight).index_add_(0, ids, rows.grad))
                each.trace = []

    install(
        monkeypatch,
        dgl={},
        dgl__nn={"NodeEmbedding": NodeEmbedding},
        dgl__optim={"SparseAdam": SparseAdam},
    )
    made = Workload(case(50, 16, 20, "zipf", tables=2))
    contestant = DglSparseAdam(made)
    contestant.before(3)
    contestant.step()
    for seen, expected in zip(contestant._optimizer.seen, summed(made, 3), strict=True):
        torch.testing.assert_close(seen, expected)


def test_a_peer_that_breaks_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, dgl={}, dgl__nn={}, dgl__optim={})
    with pytest.raises(Unavailable, match=r"does not run here \(.*NodeEmbedding"):
        DglSparseAdam(Workload(case(50, 16, 20, "zipf")))
