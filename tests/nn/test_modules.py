"""Our modules are torch's in everything but the gradient."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import sparsestep
from sparsestep.nn import Embedding, EmbeddingBag
from tests.nn.cases import copies, plain, same
from tests.torch_versions import uses_torchscript

KINDS = [(Embedding, nn.Embedding), (EmbeddingBag, nn.EmbeddingBag)]
each_kind = pytest.mark.parametrize(("ours", "theirs"), KINDS)
IDS = torch.tensor([[1, 2, 1]])


def assert_same(ours: Any, theirs: Any, run: Callable[[Any], Iterable[Tensor]]) -> None:
    """A program gives the same tensors with our class and with torch's."""
    found = []
    for kind in (ours, theirs):
        torch.manual_seed(0)
        found.append(list(run(kind)))
    for mine, other in zip(*found, strict=True):
        assert same(mine, other)


@each_kind
def test_constructors_copies_and_state_dict(ours: Any, theirs: Any):
    found, wanted = (
        [(p.name, p.kind, p.default) for p in inspect.signature(kind).parameters.values()]
        for kind in (ours, theirs)
    )
    assert found == wanted
    table = ours(10, 3, max_norm=2.0, padding_idx=-1, dtype=torch.float64)
    other = theirs(10, 3, max_norm=2.0, padding_idx=-1, dtype=torch.float64)
    assert isinstance(table, theirs)
    assert table.padding_idx == 9
    assert table.weight[9].tolist() == [0.0] * 3
    other.load_state_dict(table.state_dict())
    table.load_state_dict(other.state_dict())
    assert list(table.state_dict()) == ["weight"]
    options = repr(table).removesuffix(", fused=True)").replace(", sparse=True", "")
    assert f"{options})" == repr(other)
    table.name = "a"
    for copied in copies(table):
        assert (type(copied), copied.name) == (ours, "a")
        assert same(copied(IDS), table(IDS))
    weight = torch.randn(10, 3)
    for freeze in (True, False):
        table = ours.from_pretrained(weight, freeze=freeze, padding_idx=2, max_norm=1.0)
        assert type(table) is ours
        assert table.weight.data_ptr() == weight.data_ptr()
        assert (table.weight.requires_grad, table.padding_idx) == (not freeze, 2)
        assert same(table(IDS), theirs.from_pretrained(weight.clone(), padding_idx=2)(IDS))


@each_kind
def test_ids_in_a_buffer_that_is_used_again(ours: Any, theirs: Any):
    """Gradients of several batches are accumulated, each read into the same memory."""
    results = []
    for kind in (ours, theirs):
        torch.manual_seed(0)
        table = kind(10, 3)
        ids = torch.zeros(2, 3, dtype=torch.int64)
        for _ in range(3):
            ids.copy_(torch.randint(10, ids.shape))
            table(ids).sin().sum().backward()
        ids.zero_()
        results.append(table.weight.grad.to_dense())
    assert torch.allclose(*results)


@pytest.mark.parametrize("in_backward", [False, True])
def test_factors_that_the_same_step_updates(in_backward: bool):
    """Whichever is updated first, the table's gradient has the factors of the forward."""

    def run(kind: Any) -> Iterable[Tensor]:
        table = kind(10, 3, mode="sum", sparse=True)
        factors = nn.Parameter(torch.randn(2, 4))
        ids = torch.randint(10, (2, 4))
        optimizer = sparsestep.SGD([factors, table.weight], lr=0.5, momentum=0.9)
        if in_backward:
            optimizer.step_in_backward()
        for _ in range(3):
            optimizer.zero_grad()
            table(ids, per_sample_weights=factors).sin().sum().backward()
            optimizer.step()
        return table.weight, factors

    assert_same(EmbeddingBag, nn.EmbeddingBag, run)


@each_kind
def test_a_weight_that_is_computed_gets_an_ordinary_gradient(ours: Any, theirs: Any):
    def run(kind: Any) -> Iterable[Tensor]:
        table = nn.utils.parametrizations.weight_norm(kind(10, 3))
        table(IDS).sin().sum().backward()
        return [param.grad for param in table.parameters()]

    assert_same(ours, theirs, run)


def test_functional_call_with_another_weight():
    table = EmbeddingBag(10, 3, mode="sum")
    weight = torch.randn(10, 3, requires_grad=True)
    output = torch.func.functional_call(table, {"weight": weight}, (IDS,))
    output.sum().backward()
    assert table.weight.grad is None
    assert plain(weight.grad)._nnz() == 3


@each_kind
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func(ours: Any, theirs: Any):
    def run(kind: Any) -> Iterable[Tensor]:
        table = kind(10, 3)

        def loss(weight: Tensor, ids: Tensor) -> Tensor:
            return torch.func.functional_call(table, {"weight": weight}, (ids,)).sin().sum()

        weight, ids = table.weight.detach(), torch.tensor([[[1, 2]], [[3, 3]]])
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        return torch.func.grad(loss)(weight, IDS), each(weight, ids)

    assert_same(ours, theirs, run)
    collection = sparsestep.nn.EmbeddingBagCollection([(10, 3)])

    def loss(weight: Tensor) -> Tensor:
        named = {"tables.0.weight": weight}
        return torch.func.functional_call(collection, named, ([IDS],))[0].sin().sum()

    (weight,) = collection.parameters()
    collection([IDS])[0].sin().sum().backward()
    assert torch.allclose(torch.func.grad(loss)(weight.detach()), weight.grad.to_dense())


@pytest.mark.parametrize(("ours", "strict"), [(Embedding, True), (EmbeddingBag, False)])
def test_export(ours: Any, strict: bool):
    model = torch.nn.Sequential(ours(10, 3), torch.nn.Linear(3, 2))
    exported = torch.export.export(model, (IDS,), strict=strict).module()
    assert same(exported(IDS), model(IDS))


@each_kind
@pytest.mark.filterwarnings("ignore:`torch.jit")
@uses_torchscript
def test_tracing_and_scripting(ours: Any, theirs: Any):
    """In a script they are torch's; the model itself stays as it is. So do fused subclasses."""
    table = ours(10, 3)
    assert same(torch.jit.trace(table, IDS)(IDS), table(IDS))
    subclass = type("Subclass", (theirs,), {})
    for table in (ours(10, 3, padding_idx=2), sparsestep.nn.fuse(subclass(10, 3))):
        model = nn.Sequential(table, nn.Linear(3, 1))
        kind, table.name = type(table), "a"
        scripted = torch.jit.script(model)
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        for each in (scripted, torch.jit.load(file)):
            assert same(each(IDS), model(IDS))
        scripted(IDS).sum().backward()
        assert table.weight.grad is not None
        assert type(table) is kind


@each_kind
@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_shapes_without_numbers(ours: Any, theirs: Any, mode: Any):
    with mode:
        ids = torch.ones(1, 3, dtype=torch.int64)
        found = [kind(10, 3)(ids) for kind in (ours, theirs)]
        (bag,) = sparsestep.nn.EmbeddingBagCollection([(10, 3)])([ids])
        if isinstance(mode, FakeTensorMode):
            table = ours(10, 3)
            table(ids).sum().backward()
            assert isinstance(table.weight.grad, FakeTensor)
    assert found[0].shape == found[1].shape
    assert bag.shape == (1, 3)


@each_kind
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(ours: Any, theirs: Any, reentrant: bool):
    """What torch does not keep but computes again; and what it keeps elsewhere."""
    table, other = ours(10, 3), torch.zeros(1, requires_grad=True)
    table(IDS).sin().sum().backward()
    wanted, table.weight.grad = table.weight.grad.to_dense(), None
    again = checkpoint(lambda x: table(IDS).sin() + x, other, use_reentrant=reentrant)
    again.sum().backward()
    assert same(plain(table.weight.grad).to_dense(), wanted)
    table.weight.grad = None
    with torch.autograd.graph.save_on_cpu():
        output = table(IDS).sin().sum()
    output.backward()
    assert same(plain(table.weight.grad).to_dense(), wanted)


@each_kind
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection(ours: Any, theirs: Any):
    table = ours(10, 3)
    with torch.autograd.detect_anomaly():
        table(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="nan"):
            (table(IDS) * float("nan")).sum().backward()


@each_kind
def test_autocast_does_as_torch(ours: Any, theirs: Any):
    table = ours(10, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert table(IDS).dtype == theirs(10, 3)(IDS).dtype == torch.float32
        nn.Linear(3, 1)(table(IDS)).sum().backward()
    assert table.weight.grad.dtype == torch.float32
