"""What holds for every rule, gradient, dtype and engine.

A rule is in the table once registered; two rules that a user might write are there too.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.cases import Case, cases, each_case, take_step
from tests.table import (
    EVERY,
    INSTRUCTION_SETS,
    PLAIN,
    Variant,
    dtypes,
    each_variant,
    on_each_engine,
    running_on,
    same_bits,
    snapshot,
    state_tensors,
    unchanged,
)

# A few roundings of the arithmetic, which is done in at least float32.
ROUNDINGS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def oracle_step(opt: RuleOptimizer, param: torch.Tensor, group: dict[str, Any], gradient: Any):
    """The rule applied in float64 to the touched part, from the optimizer's present state.

    The whole parameter is run through the rule, a row at a time, with a gradient of zero where
    nothing is held; only what is held counts. Returns the mask, the rows that are touched, the new
    param and state, and how far each would move if the inputs were wrong by a few roundings. Where
    terms cancel, that is more than a few roundings of the result, and no arithmetic of this
    precision can do better.
    """
    state, rule = opt.state.get(param, {}), opt.rule_for(group)
    settings = opt.settings([each is group for each in opt.param_groups].index(True))
    mask = gradient.mask()
    rows = (param.shape[0] if param.dim() else 1, -1)
    kept = []
    for spec in rule.state:
        if state.get(spec.name) is not None:
            kept.append(state[spec.name].double().reshape(rows))
        else:
            value = group[spec.initial] if isinstance(spec.initial, str) else spec.initial
            column = (rows[0], 1) if spec.per_row else param.reshape(rows).shape
            kept.append(torch.full(column, float(value), dtype=torch.float64))
    step = int(state.get("step", 1 if state else 0)) + 1
    inputs = [param.detach().double().reshape(rows), gradient.dense().reshape(rows), *kept]
    held = mask.expand(param.shape).reshape(rows)  # nothing else decays

    def new(param: torch.Tensor, grad: torch.Tensor, *kept: torch.Tensor) -> list[torch.Tensor]:
        grad = settings.sign * grad + torch.where(held, settings.l2 * param, 0.0)
        return rule.new_values([param * settings.shrink, *kept], grad, step, settings.hyper)

    exact = new(*inputs)
    # A few roundings of the larger of value and update ...
    roundings = ROUNDINGS[param.dtype]
    before = [inputs[0], *inputs[2:]]
    slack = [
        roundings * torch.maximum(e.abs(), (e - b).abs())
        for e, b in zip(exact, before, strict=True)
    ]
    # ... and of each input, carried through the formula.
    for index, value in enumerate(inputs):
        off = value * (1 + roundings)
        moved = new(*inputs[:index], off, *inputs[index + 1 :])
        slack = [s + (m - e).abs() for s, m, e in zip(slack, moved, exact, strict=True)]
    return mask, exact, slack


def close(ours: torch.Tensor, oracle: torch.Tensor, slack: torch.Tensor) -> bool:
    """Within the slack, and rounded once to where it is stored."""
    info = torch.finfo(ours.dtype)
    stored = oracle.abs() * (info.eps / 2) + info.smallest_normal * info.eps
    return bool(((ours.double() - oracle).abs() <= (slack + stored) * 1.01).all())


@on_each_engine(EVERY)
@each_case(case=cases(max_steps=4), dtype=dtypes)
def test_a_step_is_the_rule_on_what_was_touched(
    variant: Variant, engine: str, dtype: torch.dtype, case: Case
):
    torch.set_num_threads(1)  # what threads do is tested below; here they would only wait
    params = [torch.nn.Parameter(p) for p in case.params(dtype)]
    with running_on(engine) as name:
        opt = variant(case.groups(params), **case.options, engine=name)
        groups = {p: group for group in opt.param_groups for p in group["params"]}
        for gradients in case.steps:
            before = [p.detach().clone() for p in params]
            expected = [
                oracle_step(opt, p, groups[p], g) if g is not None and p.numel() else None
                for p, g in zip(params, gradients, strict=True)
            ]
            old_state = {p: copy.deepcopy(opt.state.get(p, {})) for p in params}
            take_step(opt, params, gradients, dtype)
            for param, old, result in zip(params, before, expected, strict=True):
                if result is None:
                    assert same_bits(param.detach(), old)
                    continue
                mask, new, slack = result
                rule = opt.rule_for(groups[param])
                touched_rows = mask.flatten(1).any(1) if mask.dim() > 1 else mask
                wholes = [(param.detach(), old, mask)]
                for spec in rule.state:
                    ours = opt.state[param][spec.name]
                    initial = groups[param].get(spec.initial, spec.initial)
                    was = old_state[param].get(spec.name)
                    was = torch.full_like(ours, initial) if was is None else was
                    wholes.append((ours, was, touched_rows if spec.per_row else mask))
                for (ours, was, held), value, room in zip(wholes, new, slack, strict=True):
                    value, room = value.reshape(ours.shape), room.reshape(ours.shape)
                    assert close(ours[held], value[held], room[held])
                    assert same_bits(ours[~held], was[~held])


@each_variant
@each_case(case=cases(max_steps=4), dtype=dtypes, threads=st.sampled_from([1, 2, 3, 8]))
def test_bits_do_not_depend_on_threads_or_instruction_set(
    variant: Variant, dtype: torch.dtype, case: Case, threads: int
):
    results = []
    for engine in INSTRUCTION_SETS:
        for count in (1, threads):
            torch.set_num_threads(count)
            with running_on(engine) as name:
                params, opt = case.run(variant, dtype, engine=name)
            results.append([*params, *state_tensors(opt)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@cache
def large_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Large enough for buckets, several chunks, a long chain and every thread."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 5000, (1, 40_000), generator=generator)
    indices[0, torch.randint(0, 40_000, (15_000,), generator=generator)] = 4321
    values = torch.randn(40_000, 24, generator=generator)
    weight = torch.randn(5000, 24, generator=generator)
    return indices, values, weight


@on_each_engine(EVERY)
def test_bits_do_not_depend_on_how_many_share_a_large_step(variant: Variant, engine: str):
    indices, values, weight = large_step()
    results = []
    with running_on(engine) as name:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            param = torch.nn.Parameter(weight.clone())
            opt = variant([param], lr=0.1, engine=name)
            param.grad = torch.sparse_coo_tensor(indices, values, weight.shape)
            opt.step()
            opt.step()
            results.append([param.detach(), *state_tensors(opt)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@on_each_engine(PLAIN)
@each_case(case=cases(max_steps=2), bad=st.sampled_from([-1, 6, 2**31, 2**62, -(2**62)]))
def test_a_bad_position_anywhere_changes_nothing(
    variant: Variant, engine: str, case: Case, bad: int
):
    with running_on(engine) as name:
        _, opt = case.run(variant, torch.float32, engine=name)
        last = torch.nn.Parameter(torch.zeros(6, 2))
        opt.add_param_group({"params": [last]})
        before = snapshot(opt)
        indices = torch.tensor([[0, bad, 3]])
        last.grad = torch.sparse_coo_tensor(
            indices, torch.ones(3, 2), (6, 2), check_invariants=False
        )
        with pytest.raises(ValueError, match=rf"indices of dim 0 must be in \[0, 6\). Got {bad}"):
            opt.step()
    assert unchanged(opt, before)


@on_each_engine(PLAIN)
@each_case(case=cases(max_steps=3), dtype=dtypes)
def test_a_gradient_is_never_written(variant: Variant, engine: str, dtype: torch.dtype, case: Case):
    params = [torch.nn.Parameter(p) for p in case.params(dtype)]
    with running_on(engine) as name:
        opt = variant(case.groups(params), **case.options, engine=name)
        for gradients in case.steps:
            take_step(opt, params, gradients, dtype)
            for param, gradient in zip(params, gradients, strict=True):
                if gradient is not None:
                    assert param.grad is not None
                    fresh = gradient.tensor(dtype)
                    assert same_bits(param.grad.to_dense(), fresh.to_dense())


def through_a_pickle(whole: Any) -> Any:
    return pickle.loads(pickle.dumps(whole))


@each_variant
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_pickle])
@each_case(case=cases())
def test_pickle_and_deepcopy_go_on_with_the_same_bits(
    variant: Variant, copied: Callable[[Any], Any], case: Case
):
    _, opt = case.run(variant, torch.float32)
    again_params, again = copied(([*opt.param_groups[0]["params"]], opt))
    gradient = torch.ones_like(opt.param_groups[0]["params"][0])
    for some, one in ((opt.param_groups[0]["params"], opt), (again_params, again)):
        for group in one.param_groups:
            for p in group["params"]:
                p.grad = None
        some[0].grad = gradient
        one.step()
    assert again.engine == opt.engine
    assert same_bits(opt.param_groups[0]["params"][0], again_params[0])
