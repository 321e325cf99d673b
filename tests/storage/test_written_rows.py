"""Writes reserve and mark exactly the rows that they write; only pages in use are mapped."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import sparsestep
from sparsestep._torch import version_of
from sparsestep.grads.compact import CompactGrad
from sparsestep.memory.mapped_file import MappedFile, file_of
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import mapped
from tests.storage import training
from tests.storage.training import adam, in_each_place
from tests.subject import refused

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="reserves blocks of the file"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]

ROWS, DIM, PAGE = 400, 1024, 4096  # one page per row
CHOSEN = [3, 77, 390]
coo = functools.partial(training.coo, shape=(ROWS, DIM))


def by_rows() -> Tensor:
    return torch.zeros(ROWS, dtype=torch.bool).index_fill_(0, torch.tensor(CHOSEN), True)


def by_elements() -> Tensor:
    mask = torch.zeros(ROWS, DIM, dtype=torch.bool)
    mask[CHOSEN, 5] = True
    return mask


GRADIENTS: dict[str, Callable[[], Any]] = {
    "strided": lambda: torch.ones(ROWS, DIM),
    "coo": lambda: coo([*CHOSEN, 5, 6]),
    "masked tensor": lambda: masked_tensor(torch.ones(ROWS, DIM), by_elements()),
}


def param_in(path: Path, **options: Any) -> nn.Parameter:
    """A parameter in a file that marks the rows that are written."""
    param = nn.Parameter(mapped(path, (ROWS, DIM), **options))
    file = file_of(param)
    file.dirty_rows, file.version = torch.zeros(ROWS, dtype=torch.bool), version_of(param)
    return param


def dirty_rows(param: Tensor) -> list[int]:
    return file_of(param).dirty_rows.nonzero().squeeze(1).tolist()


def files_of(param: Tensor, optimizer: RuleOptimizer | None = None) -> list[MappedFile]:
    state = {} if optimizer is None else optimizer.state[param]
    tensors = [param, *(value for value in state.values() if isinstance(value, Tensor))]
    found = {id(file): file for each in tensors if (file := file_of(each)) is not None}
    return list(found.values())


def check_written(param: Tensor, rows: list[int], optimizer: RuleOptimizer) -> None:
    """Exactly these rows are marked, and only their pages have blocks: plus the header's."""
    assert dirty_rows(param) == rows
    for file in files_of(param, optimizer):
        pages = file.rows.row_bytes // PAGE * len(rows)
        assert file.reserved.count_nonzero() == pages
        os.fsync(file.descriptor)
        assert os.fstat(file.descriptor).st_blocks * 512 <= (pages + 1) * PAGE + 64 * 1024


def step(gradient: str, param: nn.Parameter, opt: RuleOptimizer) -> None:
    param.grad = GRADIENTS[gradient]()
    opt.step()


def step_in_backward(param: nn.Parameter, opt: RuleOptimizer) -> None:
    handle = opt.step_in_backward()
    (param * 2).sum().backward()
    opt.step()
    handle.remove()


def step_with_compact_gradients(param: nn.Parameter, opt: RuleOptimizer) -> None:
    table = sparsestep.nn.Embedding.from_pretrained(param.detach(), freeze=False)
    table.weight = param
    opt.zero_grad()
    table(torch.tensor([*CHOSEN, 5, 6])).sum().backward()
    assert isinstance(param.grad, CompactGrad)
    opt.step()


STEPS = {
    **{name: functools.partial(step, name) for name in GRADIENTS},
    "in backward": step_in_backward,
    "compact": step_with_compact_gradients,
}


@in_each_place
@pytest.mark.parametrize("mask", [by_rows, by_elements])
@pytest.mark.parametrize("kind", STEPS)
def test_a_masked_step_writes_what_the_mask_selects(kind, mask, in_rows, tmp_path: Path):
    param = param_in(tmp_path / "table", optimizer=adam if in_rows else None)
    opt = adam([{"params": [param], "mask": mask()}])
    for _ in range(4):  # planned for the first time, and replayed
        STEPS[kind](param, opt)
    check_written(param, CHOSEN, opt)
    assert param.detach().any(1).nonzero().squeeze(1).tolist() == CHOSEN


def test_a_mask_that_changes_is_followed(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = adam([{"params": [param], "mask": by_rows()}])
    param.grad = torch.ones(ROWS, DIM)
    for _ in range(3):
        opt.step()
    changed = by_rows()
    changed[CHOSEN[0]] = False
    for mask, rows in ((changed, CHOSEN[1:]), (torch.arange(ROWS) == 9, [9])):
        file_of(param).dirty_rows.zero_()
        if mask is changed:
            opt.param_groups[0]["mask"].copy_(mask)
        else:
            opt.param_groups[0]["mask"] = mask
        opt.step()
        assert dirty_rows(param) == rows


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_masked_groups_beside_others(semantics, tmp_path: Path):
    params = [param_in(tmp_path / name) for name in ("a", "b", "c")]
    groups = [{"params": params[:2], "mask": [by_rows(), None]}, {"params": params[2:]}]
    opt = adam(groups, semantics=semantics)
    for _ in range(3):
        params[0].grad, params[1].grad, params[2].grad = torch.ones(ROWS, DIM), coo([8]), coo([9])
        opt.step()
    for param, rows in zip(params, (CHOSEN, [8], [9]), strict=True):
        check_written(param, rows, opt)


@pytest.mark.parametrize("mask", [by_rows, by_elements, None])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_functions_reserve_what_they_write(gradient, mask, tmp_path: Path):
    param = param_in(tmp_path / "table")
    state = [mapped(tmp_path / name, (ROWS, DIM)) for name in ("m", "v")]
    of_gradient = {"strided": list(range(ROWS)), "coo": sorted([*CHOSEN, 5, 6])}
    rows = of_gradient.get(gradient, CHOSEN) if mask is None else CHOSEN
    masked = {} if mask is None else {"mask": mask()}
    sparsestep.functional.adam_(param.detach(), GRADIENTS[gradient](), *state, step=1, **masked)
    for tensor in (param, *state):
        (file,) = files_of(tensor)
        assert file.reserved.count_nonzero() in (len(rows), len(rows) + 1)
    assert dirty_rows(param) == rows


@in_each_place
def test_the_first_dense_step_reserves_its_state(in_rows, tmp_path: Path):
    for optimizer in (sparsestep.Adam, sparsestep.AdamW, sparsestep.Adagrad):
        path = tmp_path / optimizer.__name__
        param = param_in(path, optimizer=optimizer if in_rows else None)
        opt = optimizer([param], lr=0.1)
        param.grad = torch.ones(ROWS, DIM)
        opt.step()
        for file in files_of(param, opt):
            assert file.reserved[1:].all()


def test_forgetting_catching_up_and_clipping_write_only_their_rows(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = adam([param], semantics="dense")
    for rows in ([3], [77], [3, 390]):
        opt.catch_up(param, torch.tensor(rows))
        param.grad = coo(rows)
        sparsestep.clip_grad_norm_([param], 1.0)
        opt.step()
    opt.catch_up()
    opt.forget(param, torch.tensor([77]))
    check_written(param, CHOSEN, opt)


# Pages in memory and on the disk

MANY, WIDTH = 60_000, 256  # 60 MB: four rows per page
AROUND = 16  # pages that a fault maps if they are cached: 64 KiB
SPREAD = torch.randperm(MANY, generator=torch.Generator().manual_seed(0))[:200]
MOST = 1.5 * len(SPREAD) + AROUND  # pages of these rows


def resident_pages(path: Path) -> int:
    """How many pages of a file are mapped, by all mappings of this process."""
    total, counts = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name = line.split()[0]
            if not name.endswith(":"):
                counts = line.rstrip().endswith(str(path))
            elif counts and name == "Rss:":
                total += int(line.split()[1]) * 1024 // PAGE
    return total


def write_all(path: Path) -> None:
    """Create a table whose rows are all on the disk and in the page cache, in large folios."""
    mapped(path, (MANY, WIDTH))
    gc.collect()
    with open(path, "r+b", buffering=0) as file:
        file.seek(PAGE)
        for _ in range(MANY * WIDTH * 4 >> 20):
            file.write(b"\1" * (1 << 20))
        os.fsync(file.fileno())
        file.seek(0)
        while file.read(1 << 20):
            pass


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps")
@pytest.mark.parametrize("is_written", [False, True], ids=["sparse", "written"])
def test_lookups_and_steps_map_the_pages_that_they_use(is_written, tmp_path: Path):
    path = tmp_path / "table"
    if is_written:
        write_all(path)
    table = mapped(path, (MANY, WIDTH))
    assert resident_pages(path) <= AROUND
    assert table[SPREAD].ne(0).any() == is_written
    assert resident_pages(path) <= MOST
    param = nn.Parameter(table)
    opt = adam([param])
    for _ in range(3):
        param.grad = training.coo(SPREAD.tolist(), (MANY, WIDTH))
        opt.step()
    for each in (path, *(tmp_path / f"table.{name}" for name in ("exp_avg", "exp_avg_sq"))):
        assert resident_pages(each) <= MOST
        if not is_written or each != path:
            assert os.stat(each).st_blocks * 512 <= MOST * PAGE


def test_clearing_old_state_leaves_holes(tmp_path: Path):
    """Rows of 768 bytes: many begin on a page that has data and end on one that has none."""
    path, shape = tmp_path / "table", (MANY, 64)
    param = nn.Parameter(mapped(path, shape, optimizer=adam))
    opt = adam([param])
    param.grad = training.coo(SPREAD.tolist(), shape)
    opt.step()
    file_of(param).flush_to_disk()
    before = os.stat(path).st_blocks
    del param, opt
    gc.collect()
    param = nn.Parameter(mapped(path, shape))
    opt = adam([param])
    opt.materialize_state()
    assert not any(opt.state[param][name].any() for name in ("exp_avg", "exp_avg_sq"))
    assert param.detach().any(1).count_nonzero() == len(SPREAD)
    os.fsync(file_of(param).descriptor)
    assert os.stat(path).st_blocks == before


def test_a_gradient_whose_memory_was_released_is_refused_by_a_repeated_step(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.Adam([param])
    for _ in range(3):
        indices, values = torch.tensor([[1, 2]]), torch.ones(2, *param.shape[1:])
        param.grad = torch.sparse_coo_tensor(indices, values, param.shape)
        opt.step()
    param.grad._indices().untyped_storage().resize_(0)
    with refused(opt, match="param 0 of group 0: the gradient must be a tensor with values"):
        opt.step()
