"""Checkpoints of parameters of which a mask lets few rows move."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsestep
from sparsestep.memory.lazy import SavedByRow, rows_in_use, saved_by_row, strided
from sparsestep.optim.optimizer import RuleOptimizer
from tests import table
from tests.optim.own_rules import seeded, through_a_file
from tests.subject import refused
from tests.table import Variant, same_bits, sm3_by_rows
from tests.torch_versions import loads_sparse_tensors

pytestmark = loads_sparse_tensors

ROWS, DIM = 2_000, 8


def new_table() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(ROWS, DIM, generator=seeded(1)))


def mask_of(*rows: int) -> Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


def masked(variant: Any, param: Tensor, mask: Tensor | None, **options: Any) -> RuleOptimizer:
    made: RuleOptimizer = variant([{"params": [param], "mask": mask}], lr=0.1, **options)
    return made


def train(param: Tensor, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        param.grad = torch.randn(ROWS, DIM, generator=seeded(step))
        opt.step()


def state_of(opt: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in opt.state[param].items()}


NEW_TOKENS = r"""
import io, re, torch, sparsestep
def resident():  # without the pages of libraries
    return int(re.search(r"RssAnon:\s*(\d+) kB", open("/proc/self/status").read())[1]) / 1024
ROWS, DIM, NEW = 150_000, 1_024, 5
shape, cpu = torch.Size([ROWS, DIM]), torch.device("cpu")
param, grad = (sparsestep.memory.lazy.zeros(shape, torch.float32, cpu) for _ in range(2))
mask = torch.arange(ROWS) >= ROWS - NEW
grad[mask] = 1.0
make = lambda: sparsestep.AdamW([{"params": [param], "mask": mask}], lr=0.1)
opt, other = make(), make()
param.grad = grad
opt.step()
before = resident()
torch.save(opt.state_dict(), file := io.BytesIO())
size = len(file.getvalue())
assert size < 250_000, size  # 150,000 of them are the mask, and 1,228,800,000 would be all rows
file.seek(0)
other.load_state_dict(torch.load(file, weights_only=True))
grown = resident() - before
assert grown < 16, f"{grown} MiB"
for name, tensor in opt.state[param].items():
    assert torch.equal(tensor[-NEW:] if name != "step" else tensor,
        other.state[param][name][-NEW:] if name != "step" else other.state[param][name])
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_new_tokens_take_kilobytes_of_a_file_and_of_memory():
    done = subprocess.run(
        [sys.executable, "-c", NEW_TOKENS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr


# Also with state that is not lazy in memory, because it begins with another value than zero.
FEW = [
    Variant(sparsestep.Adam, {"amsgrad": True, "bias_correction": "per_row"}),
    Variant(sparsestep.Adagrad, {"initial_accumulator_value": 0.25}),
    Variant(sm3_by_rows, {}),
]


@pytest.mark.parametrize("variant", FEW, ids=str)
def test_the_loaded_optimizer_goes_on(variant: Variant):
    """Rows that cannot have moved are not written; others moved under an earlier mask."""
    first, second, both = mask_of(3, 4), mask_of(1_999), mask_of(3, 4, 77, 1_999)
    param, resumed = new_table(), new_table()
    opt, fresh = masked(variant, param, first), masked(variant, resumed, None)
    train(param, opt, range(2))
    opt.param_groups[0]["mask"] = second
    train(param, opt, range(2, 4))
    saved = through_a_file(opt.state_dict())
    for name, value in state_of(opt, param).items():
        if value.dim() and not value[5].any():
            assert saved["state"][0][name].layout is torch.sparse_coo
            assert set(saved["state"][0][name].indices()[0].tolist()) <= {3, 4, 1_999}
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.param_groups[0]["mask"], second)
    resumed.data.copy_(param.data)
    for each in ((param, opt), (resumed, fresh)):
        train(*each, range(5, 7))
        each[1].param_groups[0]["mask"] = both
        train(*each, range(7, 9))
    assert same_bits(resumed.detach(), param.detach())
    ours, theirs = state_of(fresh, resumed), state_of(opt, param)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


def test_in_memory_it_is_torchs_form():
    """All rows, the optimizer's own memory, plain tensors of whatever is computed from them."""
    param, theirs = new_table(), new_table()
    opt = masked(sparsestep.AdamW, param, mask_of(3, 4))
    train(param, opt, range(2))
    found = opt.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        value, own = found["state"][0][name], opt.state[param][name]
        assert type(own) is Tensor
        assert isinstance(value, SavedByRow)
        assert value.shape == param.shape
        assert value.data_ptr() == own.data_ptr()
        assert torch.equal(value, own)
        assert {type(x) for x in (value + 1, value[3], value.clone(), value.cpu() + 0)} == {Tensor}
    torchs = torch.optim.AdamW([theirs], lr=0.1)
    torchs.load_state_dict(copy.deepcopy(found))
    train(theirs, torchs, range(2, 4))


def test_other_state_is_written_whole():
    """Without a mask, under a mask of elements, and where most rows are in use."""
    elements = torch.zeros(ROWS, DIM, dtype=torch.bool)
    elements[3, 2] = True
    param, vector = new_table(), torch.nn.Parameter(torch.zeros(5))
    for mask in (None, [None, None], [elements, None], [torch.arange(ROWS) % 3 > 0, None]):
        opt = sparsestep.AdamW([{"params": [param, vector], "mask": mask}], lr=0.1)
        vector.grad = torch.ones(5)
        train(param, opt, range(1))
        saved = through_a_file(opt.state_dict())["state"]
        for record in saved.values():
            assert {(type(value), value.layout) for value in record.values()} == {
                (Tensor, torch.strided)
            }
        assert torch.equal(saved[0]["exp_avg"], table.state_of(opt, param)["exp_avg"])


def test_copies_pickles_and_loaded_state_share_nothing_with_a_state_dict():
    param, other = new_table(), new_table()
    opt, fresh = (masked(sparsestep.AdamW, each, mask_of(3, 4)) for each in (param, other))
    train(param, opt, range(2))
    before = {name: value.clone() for name, value in state_of(opt, param).items()}
    kept = copy.deepcopy(opt.state_dict())
    sent = pickle.loads(pickle.dumps(opt.state_dict()))
    filed = through_a_file(opt.state_dict())
    train(param, opt, range(2, 4))
    for saved in (kept, sent, filed):
        fresh.load_state_dict(saved)
        for name, value in state_of(fresh, other).items():
            assert same_bits(value, before[name])
        assert type(fresh.state[other]["exp_avg"]) is Tensor
        train(other, fresh, range(2, 4))
        assert torch.equal(saved["state"][0]["exp_avg"].to_dense(), before["exp_avg"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("direct", [True, False], ids=["state_dict", "get_optimizer_state_dict"])
def test_distributed_checkpoints_have_all_rows(direct: bool, tmp_path: Any):
    """So they may be loaded under another mask, and by any number of processes."""
    pairs = []
    for mask in (mask_of(3, 4), mask_of(3, 4, 5)):
        model = torch.nn.Embedding(ROWS, DIM)
        model.weight.data.copy_(new_table().data)
        pairs.append((model, masked(sparsestep.AdamW, model.weight, mask)))
    (model, opt), (other, fresh) = pairs
    train(model.weight, opt, range(2))
    fresh.materialize_state()
    saved, target = (
        each.state_dict() if direct else get_optimizer_state_dict(module, each)
        for module, each in pairs
    )
    checkpoint.save({"state": saved["state"]}, checkpoint_id=tmp_path)
    target = {"state": target["state"]}
    checkpoint.load(target, checkpoint_id=tmp_path)
    if direct:
        groups = fresh.state_dict()["param_groups"]
        fresh.load_state_dict({"state": target["state"], "param_groups": groups})
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(fresh.state[other.weight][name], opt.state[model.weight][name])
    else:
        assert torch.equal(target["state"]["weight"]["exp_avg"], opt.state[model.weight]["exp_avg"])


def test_rows_that_are_none_are_refused():
    param = new_table()
    opt = masked(sparsestep.AdamW, param, mask_of(3, 4))
    train(param, opt, range(2))
    values = torch.ones(2, DIM)
    for row, rows, words in ((-1, ROWS, "-1"), (ROWS, ROWS, str(ROWS)), (0, ROWS - 1, "")):
        saved = opt.state_dict()
        saved["state"][0]["exp_avg"] = torch.sparse_coo_tensor(
            torch.tensor([[3, row]]), values, (rows, DIM), check_invariants=False, is_coalesced=True
        )
        with refused(opt, match=f"param 0 of group 0: .*'exp_avg'.*{words}"):
            opt.load_state_dict(saved)


DTYPES = [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    rows=st.sets(st.integers(0, 8)),
    value=st.sampled_from([1.0, -0.0, float("nan"), 1e-7]),
)
def test_any_tensor_comes_back_to_the_bit(
    dtype: torch.dtype, shape: list[int], rows: set[int], value: float
):
    state = torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex or value == 1.0:
        for row in rows & set(range(shape[0])):
            state[row].reshape(-1)[-1:] = value
    bits = bytes(state.reshape(-1).view(torch.uint8).tolist())
    read = strided("it", through_a_file(saved_by_row(state)))
    assert read.shape == state.shape
    assert read.dtype is state.dtype
    assert type(read) is Tensor
    assert bytes(read.reshape(-1).view(torch.uint8).tolist()) == bits
    assert all(state[row].reshape(-1).view(torch.uint8).any() for row in rows_in_use(state))
