"""Whatever writes rows of a table in a file reserves and marks these rows, and no others."""

from __future__ import annotations

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

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="reserves blocks of the file"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]

ROWS, DIM, PAGE = 400, 1024, 4096  # one page per row
CHOSEN = [3, 77, 390]


def coo(rows: list[int]) -> Tensor:
    return torch.sparse_coo_tensor([rows], torch.ones(len(rows), DIM), (ROWS, DIM))


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
    """A parameter in a file that marks what is written."""
    param = nn.Parameter(mapped(path, (ROWS, DIM), **options))
    file = file_of(param)
    assert file is not None
    file.marks, file.version = torch.zeros(ROWS, dtype=torch.bool), version_of(param)
    return param


def files_of(param: Tensor, optimizer: RuleOptimizer | None = None) -> list[MappedFile]:
    state = {} if optimizer is None else optimizer.state[param]
    tensors = [param, *(value for value in state.values() if isinstance(value, Tensor))]
    found = {id(file): file for each in tensors if (file := file_of(each)) is not None}
    return list(found.values())


def check_announced(param: Tensor, rows: list[int], optimizer: RuleOptimizer | None = None) -> None:
    """Exactly these rows are marked, and only their pages have blocks: plus the header's."""
    file, *_ = files = files_of(param, optimizer)
    assert file.marks is not None
    assert file.marks.nonzero().squeeze(1).tolist() == rows
    for each in files:
        pages = each.rows.row_bytes // PAGE * len(rows)
        assert each.reserved.count_nonzero() == pages
        os.fsync(each.descriptor)
        assert os.fstat(each.descriptor).st_blocks * 512 <= (pages + 1) * PAGE + 64 * 1024


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("mask", [by_rows, by_elements])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_masked_step_writes_what_the_mask_selects(gradient, mask, together, tmp_path: Path):
    make = sparsestep.Adam if together else None
    param = param_in(tmp_path / "table", optimizer=make)
    opt = sparsestep.Adam([{"params": [param], "mask": mask()}], lr=0.1)
    for _ in range(4):  # planned for the first time, and again
        param.grad = GRADIENTS[gradient]()
        opt.step()
    check_announced(param, CHOSEN, opt)
    assert param.detach().any(1).nonzero().squeeze(1).tolist() == CHOSEN


def test_a_mask_that_changes_is_followed(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.Adam([{"params": [param], "mask": by_rows()}], lr=0.1)
    param.grad = torch.ones(ROWS, DIM)
    for _ in range(3):
        opt.step()
    file = file_of(param)
    assert file is not None
    assert file.marks is not None
    file.marks.zero_()
    opt.param_groups[0]["mask"][CHOSEN[0]] = False
    opt.step()
    assert file.marks.nonzero().squeeze(1).tolist() == CHOSEN[1:]
    file.marks.zero_()
    opt.param_groups[0]["mask"] = torch.arange(ROWS) == 9
    opt.step()
    assert file.marks.nonzero().squeeze(1).tolist() == [9]


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_masked_groups_beside_others(semantics, tmp_path: Path):
    params = [param_in(tmp_path / name) for name in ("a", "b", "c")]
    groups = [
        {"params": params[:2], "mask": [by_rows(), None]},
        {"params": params[2:]},
    ]
    opt = sparsestep.Adam(groups, lr=0.1, semantics=semantics)
    for _ in range(3):
        params[0].grad, params[1].grad, params[2].grad = torch.ones(ROWS, DIM), coo([8]), coo([9])
        opt.step()
    for param, rows in zip(params, (CHOSEN, [8], [9]), strict=True):
        check_announced(param, rows, opt)


def test_steps_in_backward_follow_masks(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.Adam([{"params": [param], "mask": by_rows()}], lr=0.1)
    handle = opt.step_in_backward()
    for _ in range(3):
        (param * 2).sum().backward()
        opt.step()
    handle.remove()
    check_announced(param, CHOSEN, opt)


@pytest.mark.parametrize("gradient", ["strided", "coo"])
def test_gradients_by_hand_follow_masks(gradient, tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.FunctionalAdam([param], lr=0.1, mask=by_rows())
    for _ in range(3):
        opt.step([GRADIENTS[gradient]()])
        opt.step_param(param, GRADIENTS[gradient]())
    check_announced(param, CHOSEN, opt.optimizer)


@pytest.mark.parametrize("mask", [by_rows, by_elements, None])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_functions_announce_what_they_write(gradient, mask, tmp_path: Path):
    param = param_in(tmp_path / "table")
    state = [mapped(tmp_path / name, (ROWS, DIM)) for name in ("m", "v")]
    rows = {"strided": list(range(ROWS)), "coo": sorted([*CHOSEN, 5, 6])}.get(gradient, CHOSEN)
    sparsestep.functional.adam_(
        *(param.detach(), GRADIENTS[gradient](), *state),
        step=1,
        mask=None if mask is None else mask(),
    )
    for tensor in (param, *state):
        (file,) = files_of(tensor)
        marked = rows if mask is None else CHOSEN
        assert file.reserved.count_nonzero() in (len(marked), len(marked) + 1)
    file, *_ = files_of(param)
    assert file.marks is not None
    assert file.marks.nonzero().squeeze(1).tolist() == marked


def test_compact_gradients_follow_masks(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.Adam([{"params": [param], "mask": by_rows()}], lr=0.1)
    table = sparsestep.nn.Embedding.from_pretrained(param.detach(), freeze=False)
    table.weight = param
    for _ in range(3):
        opt.zero_grad()
        table(torch.tensor([*CHOSEN, 5, 6])).sum().backward()
        assert isinstance(param.grad, CompactGrad)
        opt.step()
    check_announced(param, CHOSEN, opt)


@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.AdamW, sparsestep.Adagrad])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_the_first_dense_step_reserves_its_state(optimizer, together, tmp_path: Path):
    """It is torch's kernel that writes, into state that was created for this step."""
    param = param_in(tmp_path / "table", optimizer=optimizer if together else None)
    opt = optimizer([param], lr=0.1)
    param.grad = torch.ones(ROWS, DIM)
    opt.step()
    assert "torch" in str(opt.explain()) or together
    for file in files_of(param, opt):
        assert file.reserved[1:].all()


def test_forgetting_catching_up_and_clipping_write_only_their_rows(tmp_path: Path):
    param = param_in(tmp_path / "table")
    opt = sparsestep.Adam([param], lr=0.1, semantics="dense")
    for rows in ([3], [77], [3, 390]):
        opt.catch_up(param, torch.tensor(rows))
        param.grad = coo(rows)
        sparsestep.clip_grad_norm_([param], 1.0)
        opt.step()
    opt.catch_up()
    opt.forget(param, torch.tensor([77]))
    check_announced(param, CHOSEN, opt)
