"""A table in a file is a tensor like any other, and its state lies beside it."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

import sparsestep
from sparsestep.memory.mapped_file import file_of, mapped_files
from sparsestep.storage import Mapped, mapped
from tests.storage.training import DIM, ROWS, embedding, initial, state_of, table_in, train
from tests.table import DTYPES, EVERY, WITH_DENSE, Variant, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
each_variant = pytest.mark.parametrize("variant", EVERY, ids=str)


def allocated(path: Path) -> int:
    return os.stat(path).st_blocks * 512


@each_variant
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_every_optimizer_has_the_bits_that_it_has_in_memory(
    variant: Variant, engine: str, tmp_path: Path
):
    models = embedding(table_in(tmp_path / "table")), embedding(initial())
    optimizers = [variant(model.parameters(), lr=0.1, engine=engine) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 4)
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())
    for ours, theirs in zip(*map(state_of, optimizers), strict=True):
        assert same_bits(ours, theirs)
    names = {f"table.{spec.name}" for spec in variant.rule.state}
    assert set(os.listdir(tmp_path)) == {"table", *names}
    for spec in variant.rule.state:
        assert isinstance(optimizers[0].state[models[0].weight][spec.name], Mapped)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", WITH_DENSE, ids=lambda o: o.__name__)
def test_dense_semantics_work_as_in_memory(optimizer, decay, tmp_path: Path):
    models = embedding(table_in(tmp_path / "table")), embedding(initial())
    decays = {"weight_decay": decay, "decoupled_weight_decay": True} if decay else {}
    if optimizer in (sparsestep.AdamW, sparsestep.Lion):
        decays = {"weight_decay": decay}
    elif "decoupled_weight_decay" not in inspect.signature(optimizer).parameters:
        decays = {}
    for model in models:
        opt = optimizer(model.parameters(), lr=0.1, semantics="dense", **decays)
        opt.track(model)
        train(model, opt, 6)
        opt.catch_up()
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_every_dtype_in_modules_of_both_kinds(dtype, fused, tmp_path: Path):
    models = [
        nn.Sequential(embedding(t)) for t in (table_in(tmp_path / "t", dtype), initial(0, dtype))
    ]
    for model in models:
        if fused:
            sparsestep.nn.fuse(model)
        opt = sparsestep.Adam(model.parameters(), lr=0.1)
        train(model, opt, 3)
    assert same_bits(models[0][0].weight.detach(), models[1][0].weight.detach())
    assert isinstance(models[0][0].weight, Mapped)
    assert type(models[0][0].weight) is nn.Parameter


def test_gradients_of_other_kinds_and_masks(tmp_path: Path):
    tables = table_in(tmp_path / "table"), initial()
    mask = torch.arange(ROWS) % 50 == 3
    for table in tables:
        param = nn.Parameter(table)
        opt = sparsestep.AdamW([param], lr=0.1)
        param.grad = torch.full_like(param, 0.5)  # all rows
        opt.step()
        masked = sparsestep.Adam([{"params": [param], "mask": mask}], lr=0.1)
        masked.step()
        param.grad = torch.sparse_coo_tensor([[5, 7], [1, 2]], [1.0, 2.0], param.shape)
        opt.step()
    assert same_bits(*tables)


def test_updates_while_gradients_arrive(tmp_path: Path):
    models = embedding(table_in(tmp_path / "table")), embedding(initial())
    for model in models:
        opt = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.1)
        handle = opt.step_in_backward()
        train(model, opt, 3)
        handle.remove()
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may not have holes")
def test_what_was_not_touched_takes_no_room(tmp_path: Path):
    table = mapped(tmp_path / "table", (10_000_000, 64))
    model = embedding(table)
    opt = sparsestep.Adam(model.parameters(), lr=0.1)
    for rows in (torch.tensor([5, 9_999_999]), torch.tensor([5_000_000])):
        opt.zero_grad()
        model(rows).sum().backward()
        opt.step()
    for name in ("table", "table.exp_avg", "table.exp_avg_sq"):
        assert (tmp_path / name).stat().st_size > 2_000_000_000
        assert allocated(tmp_path / name) <= 8 * 4096
    assert table[5_000_000].lt(0).all()
    assert table[4_999_999].eq(0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may not have holes")
def test_to_catch_up_takes_no_room_for_rows_without_gradient(tmp_path: Path):
    model = embedding(mapped(tmp_path / "table", (100_000, 64)))
    opt = sparsestep.Adam(model.parameters(), lr=0.1, semantics="dense")
    opt.track(model)
    for rows in (torch.tensor([5]), torch.tensor([77_000])):
        opt.zero_grad()
        model(rows).sum().backward()
        opt.step()
    opt.catch_up()
    assert allocated(tmp_path / "table") <= 8 * 4096


def test_a_file_is_opened_again(tmp_path: Path):
    table_in(tmp_path / "table")[7] = 5.0
    gc.collect()
    again = mapped(str(tmp_path / "table"), [ROWS, DIM])
    assert again[7].eq(5).all()
    assert same_bits(again[8], initial()[8])
    another = mapped(tmp_path / "table", (ROWS, DIM))
    again[9] = 3.0
    assert another[9].eq(3).all()
    assert another.data_ptr() == again.data_ptr()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((DIM, ROWS), torch.float32), ((ROWS, DIM), torch.float64)]
)
def test_a_file_of_another_form_is_refused(shape, dtype, tmp_path: Path):
    mapped(tmp_path / "table", (ROWS, DIM))
    with pytest.raises(
        sparsestep.InputError, match=r"shape and dtype that it was created with\. Got"
    ):
        mapped(tmp_path / "table", shape, dtype)


def test_another_file_is_left_alone(tmp_path: Path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(sparsestep.InputError, match=r"must be a file that mapped\(\) has created"):
        mapped(tmp_path / "notes", (ROWS, DIM))
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("shape", [(), (0, 3), (3, -1), (2.5,), ("3",)])
def test_shapes_that_no_file_has(shape, tmp_path: Path):
    with pytest.raises(sparsestep.InputError, match="shape must be integers, all at least 1"):
        mapped(tmp_path / "table", shape)
    assert os.listdir(tmp_path) == []


def test_a_file_is_closed_with_its_last_tensor(tmp_path: Path):
    table = table_in(tmp_path / "table")
    model = embedding(table)
    opt = sparsestep.Adam(model.parameters())
    train(model, opt, 1)
    addresses = {file_of(model.weight).address}
    addresses |= {file_of(opt.state[model.weight]["exp_avg"]).address}
    assert addresses <= mapped_files.keys()
    del table, model, opt
    gc.collect()
    assert not addresses & mapped_files.keys()


def test_a_part_of_a_table_is_an_ordinary_parameter(tmp_path: Path):
    table = table_in(tmp_path / "table")
    param = nn.Parameter(table[: ROWS // 2])
    opt = sparsestep.Adagrad([param], lr=0.1)
    param.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, DIM), param.shape)
    opt.step()
    assert not isinstance(param, Mapped)
    assert not isinstance(opt.state[param]["sum"], Mapped)
    assert table[3].ne(initial()[3]).all()


def test_copies_and_pickles_are_ordinary_tensors(tmp_path: Path):
    table = table_in(tmp_path / "table")
    model = embedding(table)
    opt = sparsestep.Adam(model.parameters(), lr=0.1)
    train(model, opt, 2)
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert same_bits(copied, table)
        assert not isinstance(copied, Mapped)
        copied.prefetch(torch.tensor([0]))  # there is nothing to read
    other, other_opt = copy.deepcopy((model, opt))
    before = table.clone()
    train(other, other_opt, 1)
    assert same_bits(table, before)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert same_bits(torch.load(file)["weight"], before)


def test_a_loaded_state_lies_beside_the_table(tmp_path: Path):
    models = embedding(table_in(tmp_path / "table")), embedding(initial())
    there, here = (sparsestep.Adam(model.parameters(), lr=0.1) for model in models)
    train(models[1], here, 3)
    saved = copy.deepcopy(here.state_dict())
    with torch.no_grad():
        models[0].weight.copy_(models[1].weight)
    there.load_state_dict(saved)
    assert isinstance(there.state[models[0].weight]["exp_avg"], Mapped)
    for model, opt in zip(models, (there, here), strict=True):
        train(model, opt, 2, seed=1)
    assert same_bits(models[0].weight.detach(), models[1].weight.detach())
    kept = there.state[models[0].weight]["exp_avg_sq"]
    there.load_state_dict(there.state_dict())  # nothing is copied
    assert there.state[models[0].weight]["exp_avg_sq"].data_ptr() == kept.data_ptr()


def test_a_second_optimizer_begins_anew_and_leaves_the_first_alone(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table"))
    first = sparsestep.Adam(model.parameters(), lr=0.1)
    train(model, first, 2)
    before = [tensor.clone() for tensor in state_of(first)]
    second = sparsestep.Adam(model.parameters(), lr=0.1)
    second.materialize_state()
    assert second.state[model.weight]["exp_avg"].eq(0).all()
    train(model, second, 2)
    assert all(map(same_bits, state_of(first), before))


def test_state_in_files_is_shared_as_it_is(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table"))
    opt = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.1)
    opt.share_memory()
    assert isinstance(opt.state[model.weight]["sum"], Mapped)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch):
    """The file system's call is made to fail for the state alone, when the table is ready."""
    model = embedding(table_in(tmp_path / "table"))
    opt = sparsestep.Adam(model.parameters(), lr=0.1)
    train(model, opt, 1)
    before = [model.weight.detach().clone(), *(t.clone() for t in state_of(opt))]
    state = file_of(opt.state[model.weight]["exp_avg_sq"]).descriptor
    reserve = sparsestep.memory.file_pages.reserve

    def full(of, rows, descriptor, known):
        return 28 if descriptor == state else reserve(of, rows, descriptor, known)

    monkeypatch.setattr(sparsestep.memory.file_pages, "reserve", full)
    with pytest.raises(OSError, match=r"Errno 28. the disk must have room .* Nothing has changed"):
        train(model, opt, 1)
    assert all(map(same_bits, [model.weight.detach(), *state_of(opt)], before))
    monkeypatch.setattr(sparsestep.memory.file_pages, "reserve", reserve)
    train(model, opt, 1)
    assert not same_bits(model.weight.detach(), before[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("optimizer", [None, sparsestep.Adam], ids=["apart", "together"])
def test_gradients_that_only_python_knows_are_announced_when_they_are_checked(
    optimizer, tmp_path: Path
):
    tables = table_in(tmp_path / "table", optimizer=optimizer), initial()
    mask = torch.zeros(ROWS, DIM, dtype=torch.bool)
    mask[[3, 200]] = True
    for table in tables:
        param = nn.Parameter(table)
        opt = sparsestep.Adam([param], lr=0.1)
        for _ in range(2):
            param.grad = masked_tensor(torch.full_like(param, 0.5), mask)
            opt.step()
        del opt, param
        by_hand = sparsestep.FunctionalAdam([nn.Parameter(table)], lr=0.1)
        gradient = torch.full((ROWS, DIM), 0.25).to_sparse_csr()
        with torch.device("meta"):
            by_hand.step([gradient])
        touched: Any = sparsestep.IndexedGrad(1.5, torch.ones(1, DIM), ROWS, DIM)
        for wrong in (touched, torch.ones(3), "gradient"):
            with pytest.raises(sparsestep.InputError):
                by_hand.step([wrong])
    assert same_bits(*tables)


def test_a_state_of_one_column_is_loaded_whatever_its_strides(tmp_path: Path):
    param = nn.Parameter(mapped(tmp_path / "table", (4, 1), optimizer=sparsestep.Adagrad))
    opt = sparsestep.Adagrad([param])
    saved = opt.state_dict()
    column = torch.ones(12).as_strided((4, 1), (1, 3))  # contiguous, for it has no second column
    assert column.is_contiguous()
    saved["state"] = {0: {"step": torch.tensor(1.0), "sum": column}}
    opt.load_state_dict(saved)
    assert opt.state[param]["sum"].eq(1).all()
