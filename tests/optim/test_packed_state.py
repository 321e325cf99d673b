"""State of parameters with a mask over elements: one value for each element that it keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.grads import masks as masks_module
from sparsestep.grads.masks import PackedMask
from tests.optim.own_rules import through_a_file
from tests.subject import refused
from tests.table import (
    COUNTERPARTS,
    EVERY,
    INSTRUCTION_SETS,
    Variant,
    running_on,
    same_bits,
    saved_state,
    state_of,
    state_tensors,
)

SHAPE = (9, 16)
ELEMENTWISE = [v for v in EVERY if not v.rule.needs_whole_rows and "per_row" not in str(v)]


def random_mask(seed: int, shape: tuple[int, ...] = SHAPE, share: float = 0.4) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def gradient(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Dense, COO over rows with duplicates, COO over elements."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator)
    if seed % 3 == 1:
        rows = torch.randint(0, shape[0], (1, 12), generator=generator)
        values = torch.randn(12, *shape[1:], generator=generator)
        return torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)
    return dense.relu().to_sparse() if seed % 3 == 2 else dense


def transposed(start: Tensor) -> Tensor:
    """Not contiguous, so its state is not packed."""
    return start.t().contiguous().t()


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}], ids=["", "bfloat16"])
@pytest.mark.parametrize("variant", ELEMENTWISE, ids=str)
def test_a_hundred_masks(variant: Variant, options: dict[str, Any]):
    """To the bit what the core computes with dense state; torch's square root may differ."""
    start = torch.linspace(-1, 1, 144).view(SHAPE)
    params = [torch.nn.Parameter(each) for each in (start, transposed(start), start.clone())]
    engines = ("auto", "auto", "reference")
    opts = [variant([p], lr=0.1, engine=e, **options) for p, e in zip(params, engines, strict=True)]
    for change in range(100):
        mask, before = random_mask(change), params[0].detach().clone()
        for opt, param in zip(opts, params, strict=True):
            opt.set_mask(param, mask)
            param.grad = gradient(change)
            opt.step()
        assert same_bits(params[0][~mask], before[~mask])
        assert same_bits(params[0].detach(), params[1].detach().contiguous()), change
        packed, dense, reference = (state_of(opt, p) for opt, p in zip(opts, params, strict=True))
        for name in packed.keys() - {"step"}:
            assert opts[0].state[params[0]][name].shape == (int(mask.sum()),)
            assert opts[1].state[params[1]][name].shape == SHAPE
            assert same_bits(packed[name], dense[name].contiguous()), (change, name)
            if not options:
                torch.testing.assert_close(packed[name], reference[name])
        if not options:
            torch.testing.assert_close(params[0], params[2])


def blocks(shape: tuple[int, int]) -> Tensor:
    kept = random_mask(5, (shape[0] // 16 + 1, 1, shape[1] // 16 + 1, 1), 0.2)
    return kept.expand(-1, 16, -1, 16).reshape(kept.shape[0] * 16, -1)[: shape[0], : shape[1]]


def only(*elements: int) -> Callable[[tuple[int, int]], Tensor]:
    def mask(shape: tuple[int, int]) -> Tensor:
        found = torch.zeros(shape, dtype=torch.bool)
        found.view(-1)[list(elements)] = True
        return found

    return mask


PATTERNS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "random": lambda shape: random_mask(1, shape, 0.1),
    "dense": lambda shape: random_mask(2, shape, 0.9),
    "2:4": lambda shape: (torch.arange(shape[0] * shape[1]) % 4 < 2).view(shape),
    "blocks": blocks,
    "everything": lambda shape: torch.ones(shape, dtype=torch.bool),
    "nothing": only(),
    "the ends": only(0, 63, 64, -1),
    "one far away": only(70_000),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_threads_and_instruction_sets(pattern: str, dtype: torch.dtype):
    """Enough elements for several tiles and threads, and not a multiple of 64."""
    shape = (211, 517)
    mask, start = PATTERNS[pattern](shape), torch.linspace(-1, 1, 211 * 517).view(shape).to(dtype)
    options: dict[str, Any] = {"weight_decay": 0.1, "maximize": True}
    if dtype is torch.bfloat16:
        options |= {"stochastic_rounding": True, "rounding_seed": 3}
    results = []
    for engine, threads in product(INSTRUCTION_SETS, (1, 3)):
        torch.set_num_threads(threads)
        param = torch.nn.Parameter(start.clone())
        with running_on(engine) as name:
            opt = sparsestep.Adam([param], lr=0.1, mask=mask, engine=name, **options)
            for step in range(3):
                grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
                param.grad = grad.to(dtype)
                opt.step()
        assert opt.state[param]["exp_avg"].shape == (int(mask.sum()),)
        results.append([param.detach(), *state_tensors(opt)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    assert same_bits(results[0][0][~mask], start[~mask])
    if mask.any():
        assert not torch.equal(results[0][0], start)
    if dtype is torch.float32:  # as if there were nothing else
        inside = torch.nn.Parameter(start[mask])
        alone = sparsestep.Adam([inside], lr=0.1, engine="reference", **options)
        for step in range(3):
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            inside.grad = grad[mask]
            alone.step()
        torch.testing.assert_close(results[0][0][mask], inside.detach())


def trained(cls: Any, mask: Tensor | None, steps: range = range(3), **options: Any) -> Any:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 144).view(SHAPE))
    opt = cls([{"params": [param], **({} if mask is None else {"mask": mask})}], lr=0.1, **options)
    train(opt, param, steps)
    return opt, param


def train(opt: Any, param: Tensor, steps: range) -> None:
    for step in steps:
        param.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        opt.step()


@pytest.mark.parametrize(("ours", "theirs"), COUNTERPARTS, ids=lambda each: each.__name__)
def test_checkpoints_exchange_with_torch(ours: Any, theirs: Any):
    mask, options = random_mask(0), {"momentum": 0.9} if "SGD" in ours.__name__ else {}
    opt, param = trained(ours, mask, **options)
    other, whole = trained(theirs, None, **options)
    for name, value in saved_state(opt, param).items():
        if isinstance(value, Tensor) and value.dim():
            assert value.shape == SHAPE
            torch.testing.assert_close(value[mask], other.state[whole][name][mask])
    other.load_state_dict(through_a_file(opt.state_dict()))
    opt.load_state_dict(through_a_file(trained(theirs, None, **options)[0].state_dict()))
    with torch.no_grad():
        whole.copy_(param)
    for each, weight in ((opt, param), (other, whole)):
        train(each, weight, range(3, 6))
    torch.testing.assert_close(param[mask], whole[mask])
    assert all(v.dim() == 1 for v in opt.state[param].values() if v.dim())


def test_a_packed_checkpoint():
    opt, param = trained(sparsestep.Adagrad, random_mask(0), initial_accumulator_value=0.5)
    saved = through_a_file(opt.state_dict(packed=True))
    assert saved["state"][0]["sum"].shape == (int(random_mask(0).sum()),)
    other, weight = trained(sparsestep.Adagrad, random_mask(1))
    other.load_state_dict(saved)
    assert same_bits(other.state[weight]["sum"], opt.state[param]["sum"])
    assert other.state[weight]["sum"].data_ptr() != saved["state"][0]["sum"].data_ptr()
    dense = opt.state_dict()["state"][0]["sum"]
    assert torch.equal(dense[~random_mask(0)], torch.full_like(dense, 0.5)[~random_mask(0)])
    for wrong in (saved["state"][0]["sum"][1:], torch.ones(144), torch.ones(16, 9)):
        bad = copy.deepcopy(saved)
        bad["state"][0]["sum"] = wrong
        with refused(other, match="'sum' must have shape"):
            other.load_state_dict(bad)
    with pytest.raises(InputError, match="'sum' must have shape"):  # without the mask
        sparsestep.Adagrad([weight]).load_state_dict(
            {**saved, "param_groups": [{**saved["param_groups"][0], "mask": None}]}
        )
    opt.param_groups[0]["mask"].logical_not_()  # no longer the one that the state is packed by
    assert opt.state_dict(packed=True)["state"][0]["sum"].shape == SHAPE


BY_HAND: dict[str, Callable[[dict[str, Any], Tensor], None]] = {
    "in place": lambda group, new: group["mask"].copy_(new),
    "replaced": lambda group, new: group.update(mask=new),
    "removed": lambda group, new: group.update(mask=None),
    "by rows": lambda group, new: group.update(mask=new[:, 0].clone()),
}


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("how", BY_HAND)
def test_a_mask_that_is_changed_by_hand(how: str, engine: str):
    """The params of set_mask; the state gets the parameter's shape, and none of it is dropped."""
    new = random_mask(0).flip(0)
    opt, param = trained(sparsestep.AdamW, random_mask(0), engine=engine)
    other, expected = trained(sparsestep.AdamW, random_mask(0), engine=engine)
    before = {name: value.clone() for name, value in opt.state[param].items()}
    BY_HAND[how](opt.param_groups[0], new)
    mask = opt.param_groups[0]["mask"]
    other.set_mask(expected, None if mask is None else mask.clone())
    copies = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    opt.param_groups[1]["params"][0].grad = torch.ones(2)
    opt.param_groups[1]["params"][0].data = torch.ones(3)
    with pytest.raises(InputError, match="shape"):
        opt.step()
    del opt.param_groups[1]
    for name, value in opt.state[param].items():
        assert same_bits(value, before[name])
    train(other, expected, range(3, 5))
    for each in (opt, *copies):
        (weight,) = each.param_groups[0]["params"]
        train(each, weight, range(3, 5))
        assert same_bits(weight.detach(), expected.detach())
        for name, value in other.state[expected].items():
            assert name == "step" or each.state[weight][name].shape == SHAPE, value


def test_rows_are_forgotten():
    opt, param = trained(sparsestep.Adam, random_mask(0))
    before = state_of(opt, param)
    opt.forget(param, torch.tensor([2, 5, 2]))
    for name in ("exp_avg", "exp_avg_sq"):
        before[name][[2, 5]] = 0
        assert same_bits(state_of(opt, param)[name], before[name])


def test_complex_parameters_and_state_that_was_there_before():
    """A mask that is set by hand drops no state; ``set_mask`` packs it."""
    mask, values = random_mask(0), torch.randn(*SHAPE, dtype=torch.complex64)
    params = [torch.nn.Parameter(values.clone()) for _ in range(2)]
    packed = sparsestep.Adam(params[:1], lr=0.1)
    dense = sparsestep.Adam(params[1:], lr=0.1)
    for step in range(4):
        if step == 2:  # the mask of an optimizer that has state
            packed.param_groups[0]["mask"] = mask
        for param, opt in zip(params, (packed, dense), strict=True):
            param.grad = torch.full(SHAPE, 1 + 1j * step)
            opt.step()
    assert packed.state[params[0]]["exp_avg"].shape == SHAPE
    packed.set_mask(params[0], mask.clone())
    assert packed.state[params[0]]["exp_avg"].shape == (int(mask.sum()),)
    torch.testing.assert_close(params[0][mask], params[1][mask])


def test_created_in_advance_shared_and_counted():
    mask = random_mask(0)
    opt = sparsestep.Adam([torch.nn.Parameter(torch.ones(SHAPE))], lr=0.1, mask=mask)
    opt.materialize_state()
    (param,) = opt.param_groups[0]["params"]
    assert opt.metrics()["state_bytes"] == 2 * 4 * int(mask.sum())
    opt.share_memory()
    param.grad = torch.ones(SHAPE)
    opt.step()
    assert opt.state[param]["exp_avg"].is_shared()
    with refused(opt, match="shared memory"):
        opt.set_mask(param, ~mask)


def test_without_the_core_the_bits_of_a_mask_are_the_same(monkeypatch: pytest.MonkeyPatch):
    for shape in ((0, 3), (1, 1), (9, 16), (3, 5, 43)):
        mask = random_mask(7, shape)
        ours = PackedMask.of(mask)
        monkeypatch.setattr(masks_module, "ext", None)
        assert PackedMask.of(mask).same_as(ours)
        monkeypatch.undo()
        assert torch.equal(ours.indices(), mask.view(-1).nonzero().squeeze(1))
        assert ours.kept == int(mask.sum())
        assert not ours.same_as(PackedMask.of(~mask)) or not mask.numel()


def test_rows_with_a_constraint_are_not_packed():
    """The norm of a row takes all of it."""
    params = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(2)]
    engines, mask = ("auto", "reference"), random_mask(0)
    for param, engine in zip(params, engines, strict=True):
        opt = sparsestep.AdamW([param], lr=0.1, mask=mask, engine=engine)
        train(opt, param, range(2))
        opt.param_groups[0]["max_norm"] = 1.0
        train(opt, param, range(2, 4))
        assert opt.state[param]["exp_avg"].shape == SHAPE
        del opt.param_groups[0]["max_norm"]
        train(opt, param, range(4, 6))
        assert opt.state[param]["exp_avg"].shape == SHAPE
    torch.testing.assert_close(*params)
