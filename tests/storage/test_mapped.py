"""A table in a file is a tensor like any other, wherever its state lies."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparsestep
from sparsestep.memory import mapped_file
from sparsestep.memory.mapped_file import file_of, mapped_files
from sparsestep.storage import Mapped, mapped
from tests.storage.training import (
    DIM,
    ROWS,
    adam,
    coo,
    embedding,
    in_each_place,
    initial,
    needs_holes,
    now,
    saved_run,
    state_of,
    table_in,
    train,
)
from tests.table import DTYPES, EVERY, WITH_DENSE, all_same_bits, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


STATE_OPTIONS: list[dict[str, Any]] = [
    {"state_dtype": torch.int8},
    {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 3},
    {"amsgrad": True, "bias_correction": "per_row"},
]


def cases() -> Iterator[tuple[Any, torch.dtype]]:
    """Every rule, on both engines and under both semantics; dtypes of tables and state."""
    for engine, variants in (("native", EVERY), ("reference", EVERY[::5])):
        for variant in variants:
            yield functools.partial(variant, engine=engine), torch.float32
    decaying = [(cls, {"weight_decay": 0.1}) for cls in (sparsestep.AdamW, sparsestep.Lion)]
    for cls, options in (*((cls, {}) for cls in WITH_DENSE), *decaying):
        yield functools.partial(cls, semantics="dense", **options), torch.float32
    for dtype, options in itertools.product(DTYPES, STATE_OPTIONS):
        if options.get("stochastic_rounding") and dtype == torch.float64:
            options = {"state_dtype": torch.float32}
        yield functools.partial(adam, engine="native", **options), dtype


@in_each_place
def test_training_has_the_bits_that_it_has_in_memory(in_rows, tmp_path: Path):
    for number, (make, dtype) in enumerate(cases()):
        make = functools.partial(make, lr=0.1)
        (folder := tmp_path / str(number)).mkdir()
        table = table_in(folder / "table", dtype, make if in_rows else None)
        found = []
        for each in (initial(0, dtype), table):
            model = nn.Sequential(embedding(each))
            if number % 2:
                sparsestep.nn.fuse(model)
            opt = make(model.parameters())
            if opt.semantics == "dense":
                opt.track(model)
            train(model, opt, 4)
            opt.catch_up()
            found.append(now(model, opt))
        assert all_same_bits(*found), (make, dtype)
        weight = model[0].weight
        assert type(weight) is nn.Parameter
        assert isinstance(weight, Mapped)
        state = {key: t for key, t in opt.state[weight].items() if torch.is_tensor(t) and t.dim()}
        assert {spec.name for spec in opt.rule_for(opt.param_groups[0]).state} <= state.keys()
        assert all(isinstance(tensor, Mapped) for tensor in state.values())
        beside = set() if in_rows else {f"table.{key}" for key in state}
        assert set(os.listdir(folder)) == {"table", *beside}, (make, dtype)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@in_each_place
def test_gradients_of_other_layouts_masks_and_steps_in_backward(in_rows, tmp_path: Path):
    make = functools.partial(sparsestep.AdamW, lr=0.1)
    tables = table_in(tmp_path / "table", optimizer=make if in_rows else None), initial()
    mask = torch.arange(ROWS) % 50 == 3
    elements = torch.zeros(ROWS, DIM, dtype=torch.bool)
    elements[[3, 200]] = True
    for table in tables:
        model = embedding(table)
        param = model.weight
        opt = make([{"params": [param], "mask": None}])
        param.grad = torch.full_like(param, 0.5)  # all rows, by torch's kernel
        opt.step()
        opt.param_groups[0]["mask"] = mask
        opt.step()
        opt.param_groups[0]["mask"] = None
        for grad in (
            masked_tensor(torch.full_like(param, 0.5), elements),
            torch.sparse_coo_tensor([[5, 7], [1, 2]], [1.0, 2.0], param.shape),
        ):
            param.grad = grad
            opt.step()
        opt.forget(param, torch.tensor([5, 3]))
        opt.step()
        opt.zero_grad()
        handle = opt.step_in_backward()
        train(model, opt, 3)
        handle.remove()
        del model, opt, param, handle
        by_hand = sparsestep.FunctionalAdamW([nn.Parameter(table)], lr=0.1)
        with torch.device("meta"):
            by_hand.step([torch.full((ROWS, DIM), 0.25, device="cpu").to_sparse_csr()])
        indexed: Any = sparsestep.IndexedGrad(1.5, torch.ones(1, DIM), ROWS, DIM)
        for wrong in (indexed, torch.ones(3), "gradient"):
            with pytest.raises(sparsestep.InputError):
                by_hand.step([wrong])
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


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_are_looked_up_without_a_copy_of_the_table(mode, is_native, tmp_path: Path):
    for padding in (None, 4):
        tables = table_in(tmp_path / f"{padding}", optimizer=adam), initial()
        ids, found = torch.tensor([[3, 4, 3], [299, 4, 0]]), []
        weights = torch.rand(2, 3) if mode == "weighted" else None
        for table in tables:
            bag = sparsestep.nn.EmbeddingBag.from_pretrained(
                table,
                freeze=False,
                mode="sum" if mode == "weighted" else mode,
                padding_idx=padding,
            )
            if is_native:
                output = bag(ids, per_sample_weights=weights)
            else:
                with _Tables() as seen:  # a dispatch mode excludes the core
                    output = bag(ids, per_sample_weights=weights)
                copies = mode != "max" and padding is None and table is tables[0]
                assert seen.rows == [4 if copies else ROWS]
            output.square().sum().backward()
            opt = adam(bag.parameters())
            opt.step()
            found += [output.detach(), bag.weight.detach()]
        assert all_same_bits(found[:2], found[2:])


@needs_holes
@in_each_place
def test_rows_that_were_not_touched_take_no_room(in_rows, tmp_path: Path):
    table = mapped(tmp_path / "table", (10_000_000, 64), optimizer=adam if in_rows else None)
    model = embedding(table)
    opt = adam(model.parameters())
    for rows in (torch.tensor([5, 9_999_999]), torch.tensor([5_000_000])):
        opt.zero_grad()
        model(rows).sum().backward()
        opt.step()
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 2_000_000_000
        assert path.stat().st_blocks * 512 <= 8 * 4096
    assert table[5_000_000].lt(0).all()
    assert table[4_999_999].eq(0).all()
    gc.collect()
    assert file_of(table).address in mapped_files
    del table, model, opt
    gc.collect()
    assert not mapped_files, "a file is closed with its last tensor"


# Files


def test_refused_arguments_leave_no_file_and_no_change(tmp_path: Path, monkeypatch):
    table = mapped(tmp_path / "table", (ROWS, DIM), optimizer=adam)
    mapped(tmp_path / "plain", (ROWS, DIM))
    for name, wrong in (
        ("new", {"shape": (3, -1)}),
        ("new", {"shape": (2.5,)}),
        ("new", {"shape": (2**62, 4)}),
        ("new", {"dtype": torch.quint8}),
        ("new", {"optimizer": sparsestep.SGD([table])}),
        ("table", {"optimizer": sparsestep.SGD}),
    ):
        with pytest.raises(sparsestep.InputError):
            mapped(tmp_path / name, **{"shape": (ROWS, DIM), **wrong})
    with pytest.raises(sparsestep.InputError, match="where a row has room for none"):
        mapped(tmp_path / "plain", (ROWS, DIM), optimizer=adam)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(sparsestep.InputError, match="must be a file that mapped"):
        mapped(tmp_path / "pipe", (ROWS, DIM))
    monkeypatch.setattr(sparsestep.memory.mapped_file, "ext", None)
    with pytest.raises(sparsestep.InputError, match="needs the compiled extension"):
        mapped(tmp_path / "new", (ROWS, DIM))
    assert set(os.listdir(tmp_path)) == {"pipe", "plain", "table"}
    assert not table.any()


@in_each_place
def test_copies_and_pickles_are_ordinary_tensors(in_rows, tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam if in_rows else None)
    model = embedding(table)
    opt = adam(model.parameters())
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
    torch.save([model.state_dict(), opt.state_dict()], file)
    file.seek(0)
    saved = torch.load(file)
    assert same_bits(saved[0]["weight"], before)
    assert same_bits(saved[1]["state"][0]["exp_avg"], opt.state[model.weight]["exp_avg"])


def test_parts_of_a_table_and_its_state_are_ordinary_parameters(tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam)
    part = nn.Parameter(table[: ROWS // 2])
    model = embedding(table)
    first = adam(model.parameters())
    train(model, first, 1)
    for param in (part, nn.Parameter(first.state[model.weight]["exp_avg"])):
        before = first.state[model.weight]["exp_avg_sq"].clone()
        second = adam([param])
        param.grad = torch.ones_like(param)
        second.step()
        assert not isinstance(second.state[param]["exp_avg_sq"], Mapped)
        assert same_bits(before, first.state[model.weight]["exp_avg_sq"])
    assert not isinstance(part, Mapped)
    assert table[3].ne(initial()[3]).all()


# State


@in_each_place
def test_a_loaded_state_lies_with_the_table(in_rows, tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam if in_rows else None)
    models = embedding(table), embedding(initial())
    there, here = (adam(model.parameters()) for model in models)
    train(models[1], here, 3)
    with torch.no_grad():
        models[0].weight.copy_(models[1].weight)
    there.load_state_dict(copy.deepcopy(here.state_dict()))
    state = there.state[models[0].weight]
    assert isinstance(state["exp_avg"], Mapped)
    assert (file_of(state["exp_avg"]) is file_of(table)) == in_rows
    for model, opt in zip(models, (there, here), strict=True):
        train(model, opt, 2, seed=1)
    assert same_bits(*(model.weight.detach() for model in models))
    kept = state["exp_avg_sq"].data_ptr()
    there.load_state_dict(there.state_dict())  # nothing is copied
    assert there.state[models[0].weight]["exp_avg_sq"].data_ptr() == kept
    there.share_memory()
    assert there.state[models[0].weight]["exp_avg_sq"].data_ptr() == kept


@in_each_place
def test_a_second_optimizer_leaves_the_first_alone(in_rows, tmp_path: Path):
    model = embedding(table_in(tmp_path / "table", optimizer=adam if in_rows else None))
    first = adam(model.parameters())
    train(model, first, 2)
    before = [tensor.clone() for tensor in state_of(first)]
    second = adam(model.parameters())
    if in_rows:
        with pytest.warns(sparsestep.SlowWarning, match="room for the state of one optimizer"):
            second.materialize_state()
    second.materialize_state()
    assert not any(tensor.any() for tensor in state_of(second))
    train(model, second, 2)
    assert all_same_bits(state_of(first), before)
    assert {path.name for path in tmp_path.iterdir()} > {"table", "table.exp_avg"}


@pytest.mark.parametrize("shape", [(ROWS, DIM), (1,), (3, 1)], ids=str)
def test_a_new_optimizer_resets_the_state_in_the_rows(shape, tmp_path: Path):
    """In the same process, and in one that opens the file again."""
    param = nn.Parameter(mapped(tmp_path / "table", shape, optimizer=adam))
    for _ in range(2):
        param = nn.Parameter(mapped(tmp_path / "table", shape))
        opt = adam([param])
        opt.materialize_state()
        assert not any(tensor.any() for tensor in state_of(opt))
        expected = param.detach().clone().requires_grad_()
        other = adam([expected])
        for each, optimizer in ((param, opt), (expected, other)):
            each.grad = torch.ones(shape)
            optimizer.step()
        assert same_bits(param.detach(), expected.detach())
        del param, opt
        gc.collect()
    assert os.listdir(tmp_path) == ["table"]


def test_state_that_does_not_fit_the_rows_lies_apart(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table", optimizer=adam))
    opt = adam(model.parameters(), state_dtype=torch.bfloat16)
    with pytest.warns(sparsestep.SlowWarning, match="as torch.bfloat16, where there is room for"):
        train(model, opt, 1)
    assert set(os.listdir(tmp_path)) == {"table", "table.exp_avg", "table.exp_avg_sq"}
    assert opt.state[model.weight]["exp_avg"].dtype == torch.bfloat16


def test_a_state_in_the_rows_is_replaced_when_all_of_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch
):
    """Also rows that are zero in the checkpoint, of which nothing is copied."""
    monkeypatch.setattr(mapped_file, "_CHUNK_BYTES", 1)
    make = functools.partial(sparsestep.Adagrad, lr=0.1)  # its state is there from the beginning
    tables = table_in(tmp_path / "table", optimizer=make), initial()
    params = [[nn.Parameter(table), nn.Parameter(torch.zeros(3))] for table in tables]
    there, here = (make(each) for each in params)
    for each, opt, rows in zip(params, (there, here), ([7, 9, 250], [7, 250]), strict=True):
        each[0].grad = coo(rows, (ROWS, DIM))
        opt.step()
    for _ in range(2):
        here.step()
    saved, before = copy.deepcopy(here.state_dict()), [t.clone() for t in state_of(there)]
    wrong = copy.deepcopy(saved)
    wrong["state"][1]["sum"] = torch.zeros(4)
    with pytest.raises(sparsestep.InputError, match="sum"):
        there.load_state_dict(wrong)
    assert all_same_bits(state_of(there), before)
    there.load_state_dict(saved)
    assert all_same_bits(state_of(there), state_of(here))
    assert file_of(there.state[params[0][0]]["sum"]) is file_of(tables[0])
    assert os.listdir(tmp_path) == ["table"]


def test_a_checkpoint_that_is_refused_leaves_a_new_state(tmp_path: Path):
    """The state that an optimizer of an earlier process has left in the rows is not used."""
    run, _ = saved_run(tmp_path, in_rows=True)
    run.optimizer = None
    gc.collect()
    run.optimizer = adam(run.model.parameters())
    base = tmp_path / "saved" / "base-000001.0"
    base.write_bytes(base.read_bytes()[:-1] + b"!")
    with pytest.raises(sparsestep.InputError, match="must be unchanged"):
        run.load()
    state = run.optimizer.state[run.model[0].weight]
    assert not any(state[name].any() for name in ("exp_avg", "exp_avg_sq"))


def test_a_state_of_one_column_is_loaded_with_any_strides(tmp_path: Path):
    param = nn.Parameter(mapped(tmp_path / "table", (4, 1), optimizer=sparsestep.Adagrad))
    opt = sparsestep.Adagrad([param])
    saved = opt.state_dict()
    column = torch.ones(12).as_strided((4, 1), (1, 3))  # contiguous, for it has no second column
    assert column.is_contiguous()
    saved["state"] = {0: {"step": torch.tensor(1.0), "sum": column}}
    opt.load_state_dict(saved)
    assert opt.state[param]["sum"].eq(1).all()


def test_a_parameter_without_rows_beside_a_table_in_a_file(tmp_path: Path):
    table = nn.Parameter(sparsestep.storage.mapped(tmp_path / "table", (7, 3)))
    empty = nn.Parameter(torch.zeros(0, 4))
    optimizer = sparsestep.SGD([table, empty], lr=1.0)
    rows, values = torch.zeros(0, 1, dtype=torch.int64), torch.zeros(1, 0, 4)
    empty.grad = torch.sparse_coo_tensor(rows, values, (0, 4), check_invariants=True)
    table.grad = torch.ones(7, 3).to_sparse(1)
    optimizer.step()
    assert table.detach().eq(-1).all()


def test_a_gradient_on_another_device_is_refused_under_a_mask(tmp_path: Path):
    table = nn.Parameter(sparsestep.storage.mapped(tmp_path / "table", (7, 3)))
    rows, values = torch.tensor([[1, 2]], device="meta"), torch.ones(2, 3, device="meta")
    functional = sparsestep.FunctionalSGD([table], lr=1.0, mask=torch.arange(7) < 3)
    grad = torch.sparse_coo_tensor(rows, values, (7, 3), check_invariants=False)
    with pytest.raises(sparsestep.InputError, match="meta"):
        functional.step([grad])
    assert not table.detach().any()
