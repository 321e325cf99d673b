"""``set_mask``, state that is packed by a mask over elements, and checkpoints of masked tables."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsestep
from sparsestep import storage
from sparsestep.grads import masks as masks_module
from sparsestep.grads.masks import PackedMask
from sparsestep.memory.lazy import SavedByRow, rows_in_use, saved_by_row, strided
from sparsestep.optim import param_groups
from sparsestep.optim import state as states
from tests.generate.garbage import Unusable
from tests.ieee import use_ieee_operations
from tests.optim.own_rules import seeded
from tests.optim.test_int8 import LARGEST
from tests.processes import run_python
from tests.subject import refused
from tests.table import (
    COUNTERPARTS,
    EVERY,
    FEW,
    INSTRUCTION_SETS,
    WITH_DENSE,
    Variant,
    all_same_bits,
    running_on,
    same_bits,
    saved_state,
    sm3_by_rows,
    state_of,
    state_tensors,
    through_a_file,
)
from tests.torch_versions import loads_sparse_tensors

SHAPE = (9, 16)
each_kind_of_mask = pytest.mark.parametrize("by_row", [True, False])


def random_mask(seed: int, shape: tuple[int, ...] = SHAPE, share: float = 0.4) -> Tensor:
    return torch.rand(shape, generator=seeded(seed)) < share


def new_param(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 144, dtype=dtype).view(SHAPE))


def rows_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A COO gradient over rows, some of them twice."""
    rows = torch.randint(0, SHAPE[0], (1, 8), generator=seeded(seed))
    values = torch.randn(8, *SHAPE[1:], generator=seeded(seed)).to(dtype)
    return torch.sparse_coo_tensor(rows, values, SHAPE, check_invariants=True)


def gradient(seed: int) -> Tensor:
    """Dense, over rows, or over elements."""
    dense = torch.randn(SHAPE, generator=seeded(seed))
    return (dense, rows_of(seed), dense.relu().to_sparse())[seed % 3]


def train(opt: Any, param: Tensor, steps: range) -> None:
    for step in steps:
        param.grad = torch.randn(param.shape, generator=seeded(step))
        if isinstance(opt, torch.optim.SparseAdam):
            param.grad = param.grad.to_sparse(1)
        opt.step()


def trained(cls: Any, mask: Tensor | None, **options: Any) -> tuple[Any, Tensor]:
    param = new_param()
    opt = cls([{"params": [param], **({} if mask is None else {"mask": mask})}], lr=0.1, **options)
    train(opt, param, range(3))
    return opt, param


# set_mask: state of entries that stay is kept, all other state starts over


CHANGES = 14


def mask_of(change: int, *, by_row: bool) -> Tensor | None:
    """Masks over rows, over elements, and none at all."""
    if change % 7 == 6:
        return None
    return random_mask(change, SHAPE[:1] if by_row or change % 3 == 2 else SHAPE, 0.5)


def over_elements(mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(SHAPE, dtype=torch.bool)
    return mask if mask.dim() > 1 else mask.view(-1, 1).expand(SHAPE)


def edited_by_hand(
    make: Any,
    opt: Any,
    param: Tensor,
    old: Tensor | None,
    new: Tensor | None,
    given: dict[str, float],
) -> tuple[Any, Tensor]:
    """Another optimizer with the new mask, and the state of what both masks have."""
    other = torch.nn.Parameter(param.detach().clone())
    fresh = make(other, new)
    if param not in opt.state:
        return fresh, other
    fresh.materialize_state()
    initial, before, after = state_of(fresh, other), over_elements(old), over_elements(new)
    found = {}
    for name, value in state_of(opt, param).items():
        if name == "step":
            found[name] = value.clone() if isinstance(value, Tensor) else value
            continue
        begun = initial.get(name, torch.zeros_like(value))
        # State per row stays with any element that both masks have.
        kept, is_new = before == after, after & ~before
        if value.dim() < 2:
            kept, is_new = kept.all(1) | (before & after).any(1), is_new.any(1)
        begun = torch.where(is_new, given[name], begun).to(value.dtype) if name in given else begun
        found[name] = torch.where(kept, value, begun)
    if found:
        fresh.state[other] = found
    return fresh, other


CASES = [
    *((variant, {}) for variant in EVERY),
    *((variant, {"engine": "reference"}) for variant in FEW),
    *((variant, {"state_dtype": torch.bfloat16}) for variant in FEW),
    *((variant, {"state_dtype": torch.int8, "rounding_seed": 5}) for variant in LARGEST.values()),
]


@pytest.mark.parametrize(("variant", "options"), CASES, ids=str)
def test_it_equals_an_optimizer_whose_state_was_edited(variant: Variant, options: dict[str, Any]):
    def make(param: Tensor, mask: Tensor | None) -> Any:
        return variant([param], **options, **({} if mask is None else {"mask": mask}))

    param: Tensor = new_param()
    opt, old, changed = make(param, None), None, 0
    rule = opt.stored_rule_for(opt.param_groups[0])
    names = [spec.name for spec in rule.state if spec.dtype is None]  # no codes, and no counts
    for change in range(CHANGES):
        new = mask_of(change, by_row=change % 4 > 1)
        given = dict.fromkeys(names[: change % 4], 0.25)
        other, expected = edited_by_hand(make, opt, param, old, new, given)
        before = param.detach().clone()
        opt.set_mask(param, new, initial=given)
        assert same_bits(param, before)
        if change % 5 == 4:  # the mask is part of the checkpoint
            again = make(param, None)
            again.load_state_dict(opt.state_dict())
            opt = again
        for step in range(2):
            param.grad = expected.grad = gradient(2 * change + step)
            opt.step()
            other.step()
        assert same_bits(param, expected), change
        changed += not torch.equal(before, param)
        assert torch.equal(param[~over_elements(new)], before[~over_elements(new)])
        found = state_of(opt, param)
        for name, value in state_of(other, expected).items():
            assert same_bits(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        old = new
    assert changed > CHANGES // 2


@pytest.mark.parametrize("cls", WITH_DENSE, ids=lambda cls: cls.__name__)
def test_with_dense_semantics_rows_catch_up_first(cls: Any):
    """Masked semantics with dense gradients takes every step of every selected row."""
    options = {"weight_decay": 0.1} if cls is sparsestep.AdamW else {}
    options |= {"momentum": 0.9} if cls is sparsestep.SGD else {}
    params = [new_param(torch.float64) for _ in range(2)]
    sparse = cls([params[0]], lr=0.1, semantics="dense", **options)
    dense = cls([params[1]], lr=0.1, **options)
    for change in range(CHANGES):
        mask = mask_of(change, by_row=True)
        sparse.set_mask(params[0], mask)
        dense.set_mask(params[1], mask)
        for step in range(4):
            grad = rows_of(4 * change + step, torch.float64)
            sparse.catch_up(params[0], grad._indices()[0])
            params[0].grad, params[1].grad = grad, grad.to_dense()
            sparse.step()
            dense.step()
    sparse.catch_up()
    torch.testing.assert_close(*params, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_other_shapes_layouts_and_parameters_that_share_a_group():
    transposed = torch.nn.Parameter(torch.ones(4, 6).t())
    imaginary = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    number, vector = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.ones(5))
    empty = torch.nn.Parameter(torch.ones(0, 3))
    params = [transposed, imaginary, number, vector, empty]
    opt = sparsestep.Adagrad(params, lr=0.1, initial_accumulator_value=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    states = {param: opt.state[param]["sum"].clone() for param in params}
    for param in params:
        mask = random_mask(1, param.shape, 0.5)
        opt.set_mask(param, mask)
        begun = 0.5 * (1 + 1j) if param.is_complex() else 0.5
        assert torch.equal(state_of(opt, param)["sum"], states[param].masked_fill(~mask, begun))
    assert len(opt.param_groups[0]["mask"]) == 5
    for param in params:
        opt.set_mask(param, None)
    assert "mask" not in opt.param_groups[0]
    twice = sparsestep.SGD([vector, vector], lr=1.0)  # has one mask
    twice.set_mask(vector, torch.arange(5) < 1)
    twice.step()
    assert (vector.detach() - vector[-1]).tolist() == [-2.0, 0.0, 0.0, 0.0, 0.0]


def test_the_mask_is_copied_and_a_refusal_changes_nothing():
    param, mask = torch.nn.Parameter(torch.zeros(2, 3)), torch.tensor([True, True])
    opt = sparsestep.Adagrad([param], lr=1.0)
    opt.set_mask(param, mask)
    param.grad = torch.ones(2, 3)
    opt.step()
    mask[0] = False
    opt.step()
    assert opt.state[param]["sum"].tolist() == [[2.0] * 3, [2.0] * 3]
    opt.set_mask(param, mask)
    opt.step()
    assert opt.state[param]["sum"].tolist() == [[0.0] * 3, [3.0] * 3]
    own = opt.param_groups[0]["mask"]
    sparse = torch.ones(2, 3, dtype=torch.bool).to_sparse()
    wrongs = (torch.ones(3, dtype=torch.bool), torch.ones(2), "mask", [True] * 2, own, sparse)
    for wrong in wrongs:
        with refused(opt):
            opt.set_mask(param, wrong)
    for initial in ({"exp_avg": 1.0}, {"sum": "1"}, {"sum": float("nan")}, 1.0):
        with refused(opt):
            opt.set_mask(param, ~mask, initial=initial)
    with refused(opt):
        opt.set_mask(torch.ones(2, 3), mask)


@each_kind_of_mask
def test_tables_in_files(tmp_path: Path, by_row: bool):
    table = storage.mapped(tmp_path / "table", (50, 4), optimizer=sparsestep.Adagrad)
    param = torch.nn.Parameter(table)
    opt = sparsestep.Adagrad([param], lr=0.1)
    param.grad = torch.ones(50, 4)
    opt.step()
    mask = random_mask(0, (50,) if by_row else (50, 4))
    opt.set_mask(param, mask)
    kept = mask.view(50, -1).expand(50, 4).float()
    assert torch.equal(opt.state[param]["sum"], kept)


@each_kind_of_mask
def test_new_entries_start_over_whatever_a_checkpoint_had_for_them(by_row: bool):
    param, mask = torch.nn.Parameter(torch.zeros(SHAPE)), mask_of(0, by_row=by_row)
    whole = sparsestep.Adagrad([param], lr=0.1)
    param.grad = torch.ones(SHAPE)
    whole.step()
    for new in (None, torch.ones(SHAPE, dtype=torch.bool)):
        opt = sparsestep.Adagrad([param], lr=0.1, mask=mask)
        opt.load_state_dict(whole.state_dict())
        opt.set_mask(param, new)
        assert torch.equal(state_of(opt, param)["sum"], over_elements(mask).float())


# Packed state: one value for each element that a mask keeps


HALF = {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 3}
INT8 = {"state_dtype": torch.int8, "rounding_seed": 3}
PACKED = [
    *((variant, {}) for variant in EVERY),
    *((variant, {"state_dtype": torch.bfloat16}) for variant in FEW),
    *((variant, HALF) for variant in LARGEST.values()),
    *((variant, INT8) for variant in LARGEST.values()),
]
each_packed = pytest.mark.parametrize(("variant", "options"), PACKED, ids=str)


def assert_packed(opt: Any, param: Tensor, mask: Tensor) -> None:
    rule, state, _ = opt.stored_state(param)
    for spec in rule.state:
        kept = len(param) if spec.per_row else int(mask.sum())
        assert state[spec.name].shape == (kept,)


@cache
def changing_masks() -> list[Tensor]:
    """Elements, two of every four, and blocks."""
    found = []
    for change in range(0, 100, 3):
        order = torch.rand(36, 4, generator=seeded(change)).argsort(1)
        blocks = random_mask(change, (3, 1, 4, 1), 0.5).expand(-1, 3, -1, 4)
        found += [random_mask(change), (order < 2).view(SHAPE), blocks.reshape(SHAPE)]
    return found[:100]


gradients = cache(lambda: [gradient(step) for step in range(100)])


@each_packed
def test_packed_state_has_the_bits_of_dense_state_and_of_the_reference_engine(
    variant: Variant, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Under a hundred masks, another one in every step."""
    use_ieee_operations(monkeypatch)
    params, packs_by = [new_param() for _ in range(3)], states.packs_by
    packed, reference, dense = params
    for module in (states, param_groups):
        monkeypatch.setattr(
            module, "packs_by", lambda *given: given[2] is not dense and packs_by(*given)
        )
    opts = [
        variant([param], lr=0.1, engine=engine, **options)
        for param, engine in zip(params, ("auto", "reference", "auto"), strict=True)
    ]
    for change, mask in enumerate(changing_masks()):
        before = packed.detach().clone()
        for opt, param in zip(opts, params, strict=True):
            opt.set_mask(param, mask)
            param.grad = gradients()[change]
            opt.step()
        assert same_bits(packed[~mask], before[~mask])
        assert same_bits(packed, reference), change
        assert same_bits(packed, dense), change
    assert_packed(opts[0], packed, mask)
    assert_packed(opts[1], reference, mask)
    ours, *others = (state_of(opt, param) for opt, param in zip(opts, params, strict=True))
    for name, value in ours.items():
        for theirs in others:
            assert same_bits(torch.as_tensor(value), torch.as_tensor(theirs[name])), name
        if name != "step":
            assert opts[2].state[dense][name].shape == value.shape


def only(*elements: int) -> Callable[[tuple[int, int]], Tensor]:
    def mask(shape: tuple[int, int]) -> Tensor:
        found = torch.zeros(shape, dtype=torch.bool)
        found.view(-1)[list(elements)] = True
        return found

    return mask


PATTERNS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "random": lambda shape: random_mask(1, shape, 0.1),
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
    grads = [torch.randn(shape, generator=seeded(step)).to(dtype) for step in range(3)]
    options: dict[str, Any] = {"weight_decay": 0.1, "maximize": True}
    if dtype is torch.bfloat16:
        options |= {"stochastic_rounding": True, "rounding_seed": 3}
    results = []
    for engine, threads in product(INSTRUCTION_SETS, (1, 3)):
        torch.set_num_threads(threads)
        param = torch.nn.Parameter(start.clone())
        with running_on(engine) as name:
            opt = sparsestep.Adam([param], lr=0.1, mask=mask, engine=name, **options)
            for param.grad in grads:
                opt.step()
        assert opt.state[param]["exp_avg"].shape == (int(mask.sum()),)
        results.append([param.detach(), *state_tensors(opt)])
        before, other = state_of(opt, param), mask.roll(7)
        opt.set_mask(param, other)
        for key, value in state_of(opt, param).items():
            if key != "step":
                assert same_bits(value, torch.where(mask & other, before[key], 0))
    for other in results[1:]:
        assert all_same_bits(results[0], other)
    assert same_bits(results[0][0][~mask], start[~mask])
    if dtype is torch.float32:  # as if there were nothing else
        inside = torch.nn.Parameter(start[mask])
        alone = sparsestep.Adam([inside], lr=0.1, engine="reference", **options)
        for grad in grads:
            inside.grad = grad[mask]
            alone.step()
        torch.testing.assert_close(results[0][0][mask], inside.detach())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [*COUNTERPARTS, (sparsestep.SparseAdam, torch.optim.SparseAdam)],
    ids=lambda each: each.__name__,
)
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
    assert_packed(opt, param, mask)


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
        with refused(other):
            other.load_state_dict(bad)
    with refused(other):
        other.load_state_dict(
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
    BY_HAND[how](opt.param_groups[0], new)
    mask = opt.param_groups[0]["mask"]
    other.set_mask(expected, None if mask is None else mask.clone())
    copies = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    opt.param_groups[1]["params"][0].grad = torch.ones(2)
    opt.param_groups[1]["params"][0].data = torch.ones(3)
    before = {name: value.clone() for name, value in opt.state[param].items()}
    with pytest.raises(sparsestep.InputError):
        opt.step()
    del opt.param_groups[1]
    assert all(same_bits(value, before[name]) for name, value in opt.state[param].items())
    train(other, expected, range(3, 5))
    for each in (opt, *copies):
        (weight,) = each.param_groups[0]["params"]
        train(each, weight, range(3, 5))
        assert same_bits(weight.detach(), expected.detach())
        for name in ("exp_avg", "exp_avg_sq"):
            assert each.state[weight][name].shape == SHAPE


def test_complex_parameters_and_state_that_was_there_before():
    """A mask that is set by hand drops no state; ``set_mask`` packs it."""
    mask, values = random_mask(0), torch.randn(*SHAPE, dtype=torch.complex64)
    params = [torch.nn.Parameter(values.clone()) for _ in range(2)]
    packed, dense = (sparsestep.Adam([param], lr=0.1) for param in params)
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


def test_forgotten_created_in_advance_shared_and_counted():
    opt, param = trained(sparsestep.Adam, random_mask(0))
    before = state_of(opt, param)
    opt.forget(param, torch.tensor([2, 5, 2]))
    for name in ("exp_avg", "exp_avg_sq"):
        before[name][[2, 5]] = 0
        assert same_bits(state_of(opt, param)[name], before[name])
    mask, param = random_mask(0), new_param()
    opt = sparsestep.Adam([param], lr=0.1, mask=mask)
    opt.materialize_state()
    assert opt.metrics()["state_bytes"] == 2 * 4 * int(mask.sum())
    opt.share_memory()
    train(opt, param, range(1))
    assert opt.state[param]["exp_avg"].is_shared()
    with refused(opt):
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
    params = []
    for engine in ("auto", "reference"):
        opt, param = trained(sparsestep.AdamW, random_mask(0), engine=engine)
        opt.param_groups[0]["max_norm"] = 1.0
        train(opt, param, range(2, 4))
        assert opt.state[param]["exp_avg"].shape == SHAPE
        del opt.param_groups[0]["max_norm"]
        train(opt, param, range(4, 6))
        assert opt.state[param]["exp_avg"].shape == SHAPE
        params.append(param)
    torch.testing.assert_close(*params)


INT8_ADAMW = Variant(sparsestep.AdamW, {**INT8, "weight_decay": 0.0})


def test_packed_checkpoints_change_between_int8_and_float():
    """As dense ones do: codes have a scale for each row of the parameter."""
    mask, plain = random_mask(1), Variant(sparsestep.AdamW, {"rounding_seed": 3})
    for first, second in ((INT8_ADAMW, plain), (plain, INT8_ADAMW)):
        ours, _ = trained(first, mask)
        found = []
        for packed in (False, True):
            other, weight = trained(second, mask)
            state = ours.state_dict(packed=packed)["state"]
            other.load_state_dict({**other.state_dict(), "state": state})
            found.append(other.state[weight])
        for key, value in found[0].items():
            assert same_bits(value, found[1][key])
        assert found[0]["exp_avg"].shape == (int(mask.sum()),)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_entries_of_elements_stay_apart_within_their_row(engine: str):
    """A gradient of single elements under a mask over elements, for a rule of whole rows."""
    param, options = new_param(), {"weight_decay": 0.1, "engine": engine}
    ours = sparsestep.RowwiseAdam([param], mask=over_elements(None).clone(), **options)
    param.grad = torch.sparse_coo_tensor([[0, 0, 4], [1, 2, 5]], torch.ones(3), SHAPE)
    ours.step()
    assert (param != new_param()).nonzero().tolist() == [[0, 1], [0, 2], [4, 5]]


def test_int8_state_that_does_not_start_at_zero_is_not_reset_by_elements():
    mask = random_mask(1)
    ours, param = trained(sparsestep.Adagrad, mask, initial_accumulator_value=0.5, **INT8)
    with refused(ours, match="start at zero"):
        ours.set_mask(param, ~mask)


def test_packed_state_or_options_that_cannot_be_read_are_refused():
    """State gets another shape in ``state_dict()`` and in a step without a mask."""
    for cls, name, value in (
        (sparsestep.Adagrad, "initial_accumulator_value", 0.5),
        (sparsestep.SGD, "momentum", 0.9),
    ):
        opt, param = trained(cls, random_mask(1), **{name: value})
        group = opt.param_groups[0]
        for wrong in ("x", torch.ones(2)):
            group[name] = wrong
            with refused(opt, match=name):
                opt.state_dict()
        del group[name]
        with pytest.raises(sparsestep.InputError, match=name):
            opt.state_dict()
        group.update({"mask": None, name: value})
        (state,) = (key for key in opt.state[param] if key != "step")
        opt.state[param][state] = Unusable(opt.state[param][state])
        with pytest.raises(sparsestep.InputError, match="memory"):
            opt.step()


@pytest.mark.parametrize("missing", ["exp_avg_sq", "step"])
def test_state_dict_has_what_there_is(missing: str):
    """As without a mask, state that was removed by hand is refused where it is needed, by steps."""
    opt, param = trained(sparsestep.RowwiseAdam, random_mask(1))
    del opt.state[param][missing]
    saved = opt.state_dict()["state"][0]
    assert saved["exp_avg"].shape == SHAPE
    assert missing not in saved
    with pytest.raises(sparsestep.InputError, match=missing):
        opt.step()


def test_masks_and_state_of_one_column_may_have_gaps():
    """Torch flattens them to views that are not contiguous."""

    def with_gaps(column: Tensor) -> Tensor:
        return torch.cat([column, ~column if column.dtype is torch.bool else column + 1], 1)[:, :1]

    found = []
    for view in (torch.clone, with_gaps):
        param = torch.nn.Parameter(torch.zeros(9, 1))
        unmasked, ours = sparsestep.Adam([param], lr=0.1), sparsestep.Adam([param])
        train(unmasked, param, range(1))
        saved = unmasked.state_dict()
        for name in ("exp_avg", "exp_avg_sq"):
            saved["state"][0][name] = view(saved["state"][0][name])
        saved["param_groups"][0]["mask"] = view(torch.arange(9).view(9, 1) % 3 > 0)
        ours.load_state_dict(saved)
        train(ours, param, range(1))
        state = ours.state_dict()["state"][0]
        found.append([param.detach(), state["exp_avg"], state["exp_avg_sq"]])
    assert all_same_bits(*found)


# Checkpoints of tables of which a mask lets few rows move


ROWS, DIM = 2_000, 8


def new_table() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(ROWS, DIM, generator=seeded(1)))


def few(*rows: int) -> Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


def masked(variant: Any, param: Tensor, mask: Tensor | None) -> Any:
    return variant([{"params": [param], "mask": mask}], lr=0.1)


def kept_for(opt: Any, param: Tensor) -> dict[str, Tensor]:
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


@loads_sparse_tensors
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_new_tokens_take_kilobytes_of_a_file_and_of_memory():
    assert run_python("-c", NEW_TOKENS) == "ok\n"


# Also with state that is not lazy in memory, because it begins with another value than zero.
@loads_sparse_tensors
@pytest.mark.parametrize(
    "variant",
    [
        Variant(sparsestep.Adam, {"amsgrad": True, "bias_correction": "per_row"}),
        Variant(sparsestep.Adagrad, {"initial_accumulator_value": 0.25}),
        Variant(sm3_by_rows, {}),
    ],
    ids=str,
)
def test_what_is_copied_pickled_or_read_from_a_file_goes_on(variant: Variant):
    """And shares nothing with the optimizer. Rows that cannot have moved are not written."""
    first, second, both = few(3, 4), few(1_999), few(3, 4, 77, 1_999)
    param = new_table()
    opt = masked(variant, param, first)
    train(opt, param, range(2))
    opt.param_groups[0]["mask"] = second  # others moved under an earlier mask
    train(opt, param, range(2, 4))
    filed = through_a_file(opt.state_dict())
    for name, value in kept_for(opt, param).items():
        if value.dim() and not value[5].any():
            assert filed["state"][0][name].layout is torch.sparse_coo
            assert set(filed["state"][0][name].indices()[0].tolist()) <= {3, 4, 1_999}
    start, runs = param.detach().clone(), []
    copied = copy.deepcopy(opt.state_dict()), pickle.loads(pickle.dumps(opt.state_dict()))
    for saved in (None, filed, filed, *copied, *copied):
        if saved is not None:
            param = torch.nn.Parameter(start.clone())
            opt = masked(variant, param, None)
            opt.load_state_dict(saved)
            assert torch.equal(opt.param_groups[0]["mask"], second)
        train(opt, param, range(5, 7))
        opt.param_groups[0]["mask"] = both
        train(opt, param, range(7, 9))
        assert {type(value) for value in state_tensors(opt)} == {Tensor}
        runs.append([param.detach(), *state_tensors(opt)])
    assert all(all_same_bits(runs[0], other) for other in runs[1:])


def test_in_memory_it_is_torchs_form():
    """All rows, the optimizer's own memory, plain tensors of whatever is computed from them."""
    param, theirs = new_table(), new_table()
    opt = masked(sparsestep.AdamW, param, few(3, 4))
    train(opt, param, range(2))
    found = opt.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        value, own = found["state"][0][name], opt.state[param][name]
        assert type(own) is Tensor
        assert isinstance(value, SavedByRow)
        assert value.data_ptr() == own.data_ptr()
        assert torch.equal(value, own)
        assert {type(x) for x in (value + 1, value[3], value.clone(), value.cpu() + 0)} == {Tensor}
    torchs = torch.optim.AdamW([theirs], lr=0.1)
    torchs.load_state_dict(copy.deepcopy(found))
    train(torchs, theirs, range(2, 4))


@loads_sparse_tensors
def test_other_state_is_written_whole():
    """Without a mask, under a mask of elements, and where most rows are in use."""
    elements = torch.zeros(ROWS, DIM, dtype=torch.bool)
    elements[3, 2] = True
    param, vector = new_table(), torch.nn.Parameter(torch.zeros(5))
    for mask in (None, [None, None], [elements, None], [torch.arange(ROWS) % 3 > 0, None]):
        opt = sparsestep.AdamW([{"params": [param, vector], "mask": mask}], lr=0.1)
        vector.grad = torch.ones(5)
        train(opt, param, range(1))
        saved = through_a_file(opt.state_dict())["state"]
        for record in saved.values():
            assert {(type(value), value.layout) for value in record.values()} == {
                (Tensor, torch.strided)
            }
        assert torch.equal(saved[0]["exp_avg"], state_of(opt, param)["exp_avg"])


def test_rows_that_do_not_exist_are_refused():
    param, values = new_table(), torch.ones(2, DIM)
    opt = masked(sparsestep.AdamW, param, few(3, 4))
    train(opt, param, range(2))
    for row, rows in ((-1, ROWS), (ROWS, ROWS), (0, ROWS - 1)):
        saved = opt.state_dict()
        saved["state"][0]["exp_avg"] = torch.sparse_coo_tensor(
            torch.tensor([[3, row]]), values, (rows, DIM), check_invariants=False, is_coalesced=True
        )
        with refused(opt):
            opt.load_state_dict(saved)


@loads_sparse_tensors
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("direct", [True, False], ids=["state_dict", "get_optimizer_state_dict"])
def test_distributed_checkpoints_have_all_rows(direct: bool, tmp_path: Any):
    """So they may be loaded under another mask, and by any number of processes."""
    models = [torch.nn.Embedding.from_pretrained(new_table(), freeze=False) for _ in range(2)]
    masks = (few(3, 4), few(3, 4, 5))
    opt, fresh = (masked(sparsestep.AdamW, m.weight, k) for m, k in zip(models, masks, strict=True))
    train(opt, models[0].weight, range(2))
    fresh.materialize_state()
    saved, target = (
        each.state_dict() if direct else get_optimizer_state_dict(module, each)
        for module, each in zip(models, (opt, fresh), strict=True)
    )
    checkpoint.save({"state": saved["state"]}, checkpoint_id=tmp_path)
    target = {"state": target["state"]}
    checkpoint.load(target, checkpoint_id=tmp_path)
    found = target["state"]["weight" if not direct else 0]
    if direct:
        groups = fresh.state_dict()["param_groups"]
        fresh.load_state_dict({"state": target["state"], "param_groups": groups})
        found = fresh.state[models[1].weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[name], opt.state[models[0].weight][name])


DTYPES = [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@loads_sparse_tensors
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    rows=st.sets(st.integers(0, 8)),
    value=st.sampled_from([1.0, -0.0, float("nan"), 1e-7]),
)
@example(dtype=torch.complex128, shape=[1], rows={0}, value=1.0)
def test_any_tensor_comes_back_to_the_bit(
    dtype: torch.dtype, shape: list[int], rows: set[int], value: float
):
    state = torch.zeros(shape, dtype=dtype)
    if state.numel() == 1:  # contiguous with any strides
        state = torch.zeros(9, dtype=dtype).as_strided(shape, [3] * len(shape))
    if dtype.is_floating_point or dtype.is_complex or value == 1.0:
        for row in rows & set(range(shape[0])):
            state[row].reshape(-1)[-1:] = value
    read = strided("it", through_a_file(saved_by_row(state)))
    assert type(read) is Tensor
    assert same_bits(read, state)
    assert all(state[row].reshape(-1).view(torch.uint8).any() for row in rows_in_use(state))
