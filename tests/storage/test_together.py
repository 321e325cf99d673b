"""A row and its state lie together in a file, and everything is as if they lay in memory."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparsestep
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import Mapped, mapped
from tests.storage.training import DIM, ROWS, embedding, initial, state_of, table_in, train
from tests.table import DTYPES, EVERY, WITH_DENSE, Variant, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

adam = functools.partial(sparsestep.Adam, lr=0.1)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("variant", EVERY, ids=str)
def test_every_optimizer_has_the_bits_that_it_has_in_memory(
    variant: Variant, engine: str, tmp_path: Path
):
    make = functools.partial(variant, lr=0.1, engine=engine)
    models = embedding(table_in(tmp_path / "table", optimizer=make)), embedding(initial())
    optimizers = [make(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 4)
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())
    for ours, theirs in zip(*map(state_of, optimizers), strict=True):
        assert same_bits(ours, theirs)
    assert os.listdir(tmp_path) == ["table"]
    for spec in variant.rule.state:
        assert isinstance(optimizers[0].state[models[0].weight][spec.name], Mapped)


@pytest.mark.parametrize(
    "options",
    [
        {"state_dtype": torch.int8},
        {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 3},
        {"amsgrad": True, "bias_correction": "per_row"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["coo", "compact"])
def test_state_and_gradients_of_every_kind(options, dtype, fused, tmp_path: Path):
    if options.get("stochastic_rounding") and dtype == torch.float64:
        options = {"state_dtype": torch.float32}
    make = functools.partial(sparsestep.Adam, lr=0.1, **options)
    tables = table_in(tmp_path / "t", dtype, make), initial(0, dtype)
    models, optimizers = [nn.Sequential(embedding(table)) for table in tables], []
    for model in models:
        if fused:
            sparsestep.nn.fuse(model)
        optimizers.append(make(model.parameters()))
        train(model, optimizers[-1], 4)
        assert "native" in str(optimizers[-1].explain())
    assert same_bits(*(model[0].weight.detach() for model in models))
    for ours, theirs in zip(*map(state_of, optimizers), strict=True):
        assert same_bits(ours, theirs)
    assert os.listdir(tmp_path) == ["t"]


@pytest.mark.parametrize("optimizer", WITH_DENSE, ids=lambda o: o.__name__)
def test_dense_semantics_work_as_in_memory(optimizer, tmp_path: Path):
    make = functools.partial(optimizer, lr=0.1, semantics="dense")
    models = embedding(table_in(tmp_path / "table", optimizer=make)), embedding(initial())
    for model in models:
        opt = make(model.parameters())
        opt.track(model)
        train(model, opt, 6)
        opt.catch_up()
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())
    assert os.listdir(tmp_path) == ["table"]


def test_gradients_of_other_layouts_and_masks(tmp_path: Path):
    tables = table_in(tmp_path / "table", optimizer=sparsestep.AdamW), initial()
    mask = torch.arange(ROWS) % 50 == 3
    for table in tables:
        param = nn.Parameter(table)
        opt = sparsestep.AdamW([{"params": [param], "mask": None}], lr=0.1)
        param.grad = torch.full_like(param, 0.5)  # all rows, by torch's kernel
        opt.step()
        opt.param_groups[0]["mask"] = mask
        opt.step()
        opt.param_groups[0]["mask"] = None
        param.grad = torch.sparse_coo_tensor([[5, 7], [1, 2]], [1.0, 2.0], param.shape)
        opt.step()
        opt.forget(param, torch.tensor([5, 3]))
        opt.step()
    assert same_bits(*tables)


class _Tables(TorchDispatchMode):
    """The sizes of the tables that torch's own bags were given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "embedding_bag" in str(func):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_core", [True, False])
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_are_looked_up_without_a_copy_of_the_table(mode, padding, by_core, tmp_path: Path):
    tables = table_in(tmp_path / "table", optimizer=adam), initial()
    ids, found = torch.tensor([[3, 4, 3], [299, 4, 0]]), []
    weights = torch.rand(2, 3) if mode == "weighted" else None
    for table in tables:
        bag = sparsestep.nn.EmbeddingBag.from_pretrained(
            table, freeze=False, mode="sum" if weights is not None else mode, padding_idx=padding
        )
        if by_core:
            output = bag(ids, per_sample_weights=weights)
        else:
            with _Tables() as seen:  # which keeps the core out of it
                output = bag(ids, per_sample_weights=weights)
            copies = mode != "max" and padding is None and table is tables[0]
            assert seen.rows == [4 if copies else ROWS]
        output.square().sum().backward()
        opt = adam(bag.parameters())
        opt.step()
        found += [output.detach(), bag.weight.detach()]
    assert same_bits(found[0], found[2])
    assert same_bits(found[1], found[3])


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may not have holes")
def test_what_was_not_touched_takes_no_room(tmp_path: Path):
    table = mapped(tmp_path / "table", (10_000_000, 64), optimizer=adam)
    model = embedding(table)
    opt = adam(model.parameters())
    for rows in (torch.tensor([5, 9_999_999]), torch.tensor([5_000_000])):
        opt.zero_grad()
        model(rows).sum().backward()
        opt.step()
    assert (tmp_path / "table").stat().st_size > 7_000_000_000
    assert os.stat(tmp_path / "table").st_blocks * 512 <= 8 * 4096
    assert table[5_000_000].lt(0).all()
    assert table[4_999_999].eq(0).all()


def test_a_new_optimizer_begins_anew(tmp_path: Path):
    """In the same process, and in one that opens the file again."""
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    opt = adam(model.parameters())
    train(model, opt, 3)
    before = model.weight.detach().clone()
    opt = adam(model.parameters())
    opt.materialize_state()
    assert not any(tensor.any() for tensor in state_of(opt))
    train(model, opt, 3)
    del model, opt
    gc.collect()
    model = embedding(mapped(tmp_path / "table", (ROWS, DIM)))
    with torch.no_grad():
        model.weight.copy_(before)
    in_memory = embedding(before.clone())
    for each in (model, in_memory):
        train(each, adam(each.parameters()), 3, seed=1)
    assert same_bits(model.weight.detach(), in_memory.weight.detach())
    assert os.listdir(tmp_path) == ["table"]


def test_a_second_optimizer_leaves_the_first_alone(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    first = adam(model.parameters())
    train(model, first, 2)
    before = [tensor.clone() for tensor in state_of(first)]
    second = adam(model.parameters())
    with pytest.warns(sparsestep.SlowWarning, match="room for the state of one optimizer"):
        second.materialize_state()
    assert not any(tensor.any() for tensor in state_of(second))
    train(model, second, 2)
    assert all(map(same_bits, state_of(first), before))
    assert {path.name for path in tmp_path.iterdir()} > {"table", "table.exp_avg"}


def test_state_without_room_lies_beside(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    opt = sparsestep.Adam(model.parameters(), state_dtype=torch.bfloat16)
    with pytest.warns(sparsestep.SlowWarning, match="as torch.bfloat16, where there is room for"):
        train(model, opt, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "table",
        "table.exp_avg",
        "table.exp_avg_sq",
    }
    assert opt.state[model.weight]["exp_avg"].dtype == torch.bfloat16


def test_a_state_from_elsewhere_is_loaded_into_the_rows(tmp_path: Path):
    models = embedding(table_in(tmp_path / "table", optimizer=adam)), embedding(initial())
    there, here = (adam(model.parameters()) for model in models)
    train(models[1], here, 3)
    with torch.no_grad():
        models[0].weight.copy_(models[1].weight)
    there.load_state_dict(copy.deepcopy(here.state_dict()))
    for model, opt in zip(models, (there, here), strict=True):
        train(model, opt, 2, seed=1)
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())
    kept = there.state[models[0].weight]["exp_avg_sq"]
    there.load_state_dict(there.state_dict())  # nothing is copied
    assert there.state[models[0].weight]["exp_avg_sq"].data_ptr() == kept.data_ptr()
    assert os.listdir(tmp_path) == ["table"]


def test_a_state_in_the_rows_is_replaced_when_all_of_a_checkpoint_is_read(tmp_path: Path):
    make = functools.partial(sparsestep.Adagrad, lr=0.1)  # its state is there from the beginning
    tables = table_in(tmp_path / "table", optimizer=make), initial()
    params = [[nn.Parameter(table), nn.Parameter(torch.zeros(3))] for table in tables]
    there, here = (make(each) for each in params)
    for each, opt in zip(params, (there, here), strict=True):
        each[0].grad = torch.sparse_coo_tensor([[7, 250]], torch.ones(2, DIM), (ROWS, DIM))
        opt.step()
    for _ in range(2):
        here.step()
    saved, before = copy.deepcopy(here.state_dict()), [t.clone() for t in state_of(there)]
    wrong = copy.deepcopy(saved)
    wrong["state"][1]["sum"] = torch.zeros(4)
    with pytest.raises(sparsestep.InputError, match="sum"):
        there.load_state_dict(wrong)
    assert all(map(same_bits, state_of(there), before))
    there.load_state_dict(saved)
    assert all(map(same_bits, state_of(there), state_of(here)))
    assert file_of(there.state[params[0][0]]["sum"]) is file_of(tables[0])
    assert os.listdir(tmp_path) == ["table"]


def test_a_checkpoint_that_is_refused_leaves_a_new_state(tmp_path: Path):
    """What an optimizer of an earlier process has left in the rows is not taken for its own."""
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    opt = adam(model.parameters())
    train(model, opt, 2)
    sparsestep.storage.save(tmp_path / "saved", model, opt)
    del opt
    gc.collect()
    opt = adam(model.parameters())
    base = tmp_path / "saved" / "base-000001.0"
    base.write_bytes(base.read_bytes()[:-1] + b"!")
    with pytest.raises(sparsestep.InputError, match="must be unchanged"):
        sparsestep.storage.load(tmp_path / "saved", model, opt)
    assert not any(opt.state[model.weight][name].any() for name in ("exp_avg", "exp_avg_sq"))


def test_copies_and_pickles_are_ordinary_tensors(tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam)
    model = embedding(table)
    opt = adam(model.parameters())
    train(model, opt, 2)
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert same_bits(copied, table)
        assert not isinstance(copied, Mapped)
    other, other_opt = copy.deepcopy((model, opt))
    before = table.clone()
    train(other, other_opt, 1)
    assert same_bits(table, before)
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    file.seek(0)
    saved = torch.load(file)
    assert same_bits(saved[0]["weight"], before)
    assert same_bits(saved[1]["state"][0]["exp_avg"], opt.state[model.weight]["exp_avg"])


def test_rows_are_prefetched_with_their_state(tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam)
    file = file_of(table)
    assert file.record.row_bytes == 320, "three tensors of 96 bytes, in whole cache lines"
    file.prefetch(torch.tensor([0, 20, 299]))
    pages = {(4096 + row * 320 + at) // 4096 for row in (0, 20, 299) for at in (0, 319)}
    assert set(file.asked.nonzero().squeeze(1).tolist()) == pages


def test_state_as_a_parameter_has_its_own_state_in_memory(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    opt = adam(model.parameters())
    train(model, opt, 1)
    param = nn.Parameter(opt.state[model.weight]["exp_avg"])
    other = sparsestep.Adam([param])
    param.grad = torch.ones_like(param)
    before = opt.state[model.weight]["exp_avg_sq"].clone()
    other.step()
    assert not isinstance(other.state[param]["exp_avg_sq"], Mapped)
    assert same_bits(before, opt.state[model.weight]["exp_avg_sq"])


def test_rows_of_any_shape(tmp_path: Path):
    shape: tuple[int, ...]
    for shape in ((40,), (40, 3), (40, 2, 3)):
        tables: list[Tensor] = [mapped(tmp_path / f"{len(shape)}", shape, optimizer=adam)]
        tables.append(torch.zeros(shape))
        for table in tables:
            param = nn.Parameter(table)
            opt = adam([param])
            for rows in ([3, 5, 3], [39, 0, 3]):
                values = torch.arange(3 * param[0].numel()).view(3, *shape[1:]) + 0.5
                param.grad = torch.sparse_coo_tensor([rows], values, shape)
                opt.step()
        assert same_bits(*tables)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1)], ids=str)
def test_state_of_an_earlier_optimizer_is_cleared_in_rows_of_one_element(shape, tmp_path: Path):
    param = nn.Parameter(mapped(tmp_path / "table", shape, optimizer=adam))
    for _ in range(2):
        opt = adam([param])
        opt.materialize_state()
        assert not any(tensor.any() for tensor in state_of(opt))
        param.grad = torch.ones(shape)
        opt.step()
