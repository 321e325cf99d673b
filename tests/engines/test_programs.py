"""Traced rules: the core computes what the formula says, to the bit."""

from __future__ import annotations

import array
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import engines
from sparsestep.engines.base import GroupSettings, ParamUpdate
from sparsestep.engines.lowering import OPCODES, lower
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.rules.rule import Rule, StateSpec
from sparsestep.rules.trace import TraceError, trace
from tests.engines import emulator
from tests.generate.cases import EXAMPLES
from tests.rules.random_formulas import Formula, computed, formulas
from tests.table import INSTRUCTION_SETS, VARIANTS, Variant, all_same_bits, running_on, same_bits

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the core is not installed")


def run(
    rule: Rule,
    values: list[Tensor],
    indices: Tensor | None = None,
    hyper: dict[str, Any] | None = None,
    step: int = 1,
    **settings: Any,
) -> list[Tensor]:
    """The new parameter and state of a rule that the core runs; values as the rule takes them."""
    param, grad, *state = (value.clone() for value in values)
    given = {"grad_sign": 1.0, "coupled_decay": 0.0, "decay_factor": 1.0, **settings}
    rounding = {"state_dtype": None, "seed": None, "stochastic_rounding": False}
    said = GroupSettings(rule, hyper or {}, describe_param=str, **given, **rounding)
    gradient = IndexedGrad(indices, grad, len(param), param.shape[1])
    update = ParamUpdate(said, {}, 0, param, param, grad, gradient, state=state)
    update.targets, update.step = [param, *state], step
    engines.run_updates([update], "native")
    return update.targets


def drawn(rows: int, columns: list[int], seed: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, generator=draw, dtype=torch.float64).to(dtype) for n in columns]


@settings(max_examples=4 * EXAMPLES)
@given(
    formula=formulas,
    seed=st.integers(0, 99),
    rows=st.integers(1, 4),
    block=st.sampled_from([1, 2, 7, 16, 33, 64, 65, 128, 200, 513, 1030]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    isa=st.sampled_from(INSTRUCTION_SETS or ["none"]),
    per_row=st.booleans(),
)
def test_random_formulas_have_the_bits_of_each_operation_on_its_own(
    formula: Formula,
    seed: int,
    rows: int,
    block: int,
    dtype: torch.dtype,
    isa: str,
    per_row: bool,
):
    def update(param: Any, grad: Any, state: Any, row: Any = 1.0) -> Any:
        found = computed(formula, [param, grad, state, row * grad])
        new = found[-1] + 0.0, found[-2] + 0.0
        return (*new, 0.5 * row + found[-1].amax(1, keepdim=True)) if per_row else new

    kept = (StateSpec("state"), StateSpec("row", per_row=True))[: 1 + per_row]
    rule = Rule("mine", update, kept, traceable_update=update)
    values = drawn(rows, [block, block, block, 1][: 3 + per_row], seed, dtype)
    expected = emulator.run(trace(rule, 1, {}), values)
    with running_on(isa):
        ours = run(rule, values)
    for new, right in zip(ours, expected, strict=True):
        assert same_bits(new, torch.from_numpy(right.copy()))


TRACED = [v for v in VARIANTS if "per_row" not in str(v)]  # bias by row is taken in float64


@pytest.mark.parametrize("variant", TRACED, ids=str)
def test_a_traced_rule_has_the_bits_of_its_native_kernel(variant: Variant):
    """Python's formula and the struct in C++ are the same operations in the same order.

    On every instruction set, also after RAdam's switch, to which property tests do not come.
    """
    optimizer = variant([torch.nn.Parameter(torch.ones(3, 2))])
    says = optimizer.settings(0)
    native, hyper = says.rule, says.hyperparams
    traced = replace(native, has_native_kernel=False, traceable_update=native.update)
    names = ("coupled_decay", "decay_factor", "grad_sign")
    options = {name: getattr(says, name) for name in names}
    indices = torch.tensor([4, 0, 4, 2, 4])
    for block, dtype in product((5, 64, 600), (torch.float32, torch.float64)):
        columns = [block, block, *(1 if s.per_row else block for s in native.state)]
        results = []
        for isa in INSTRUCTION_SETS:
            values = [value.abs() for value in drawn(5, columns, block, dtype)]
            with running_on(isa):
                for step in (1, 2, 9):
                    ours = run(traced, values, indices, hyper, step, **options)
                    theirs = run(native, values, indices, hyper, step, **options)
                    assert all_same_bits(ours, theirs)
                    values = [ours[0], -values[1], *ours[1:]]
            results.append(values)
        for other in results[1:]:
            assert all_same_bits(results[0], other)


def test_not_a_number_goes_through():
    def update(param: Any, grad: Any) -> Any:
        largest = torch.maximum(param, grad).clamp(max=1.0)
        return torch.where(grad == grad, largest, torch.sign(grad)) + grad.amax(1, keepdim=True)

    rule = Rule("mine", update, traceable_update=update)
    odd = torch.tensor([[float("nan"), 1.0, float("inf"), -0.0, 2.0]])
    for values in ([odd, odd.flip(1)], [odd.flip(1), odd], [torch.ones(1, 5), odd]):
        (expected,) = emulator.run(trace(rule, 1, {}), values)
        assert same_bits(run(rule, values)[0], torch.from_numpy(expected.copy()))


def test_results_that_are_other_inputs():
    def update(param: Any, grad: Any, first: Any, second: Any) -> Any:
        return first, param, second * 0.0 + grad

    rule = Rule("mine", update, (StateSpec("first"), StateSpec("second")), traceable_update=update)
    values = drawn(3, [70] * 4, 0, torch.float32)
    param, first, second = run(rule, values)
    assert same_bits(param, values[2])
    assert same_bits(first, values[0])
    assert same_bits(second, values[1])


def test_more_than_the_core_has_room_for():
    def many(*values: Any) -> Any:
        return (values[0] - values[1], *values[2:])

    state = tuple(StateSpec(f"s{i}") for i in range(9))
    with pytest.raises(TraceError, match="too much state"):
        lower(trace(Rule("mine", many, state), 1, {}))

    def long(param: Any, grad: Any) -> Any:
        for number in range(70):
            param = param * grad + number
        return param

    with pytest.raises(TraceError, match="too long"):
        lower(trace(Rule("mine", long), 1, {}))


def test_the_core_refuses_programs_that_it_could_not_run():
    core = sparsestep._native.ext
    assert core is not None

    def made(code: str, to: int, *operands: int) -> bytes:
        return array.array("H", [OPCODES[code], to, *operands]).tobytes()

    good = made("mul", 0, 1, 1, 1, 1)
    runs = core.Program(0, 0, 0, ((b"", good),), b"")
    bad = {
        "a register that there is not": made("mul", 0, 1, 64, 1, 1),
        "the gradient written": made("mul", 1, 1, 1, 1, 1),
        "a number written": made("mul", 2, 1, 1, 1, 1),
        "a sum in the last phase": made("sum", 2, 1, 1, 1, 1),
        "an instruction cut off": good[:-1],
        "a code that there is not": b"\xff\xff" + good[2:],
    }
    tiles = [(0, 0, 1, ((b"", tile),), b"") for tile in bad.values()]
    for program in (*tiles, (9, 0, 0, ((b"", good),), b""), (0, 0, 0, (), b"")):
        with pytest.raises(ValueError, match="no such program"):
            core.Program(*program)
    with pytest.raises(ValueError, match="wrong number"):
        core.NativeGroup(runs, ("sum",), 1, 1.0, 0.0, 1.0, (), False)
