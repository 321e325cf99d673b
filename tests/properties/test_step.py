"""A step is the rule on the entries of the gradient, to the same bits however it is run."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.optim import FUNCTIONAL
from tests.deferred.runs import assert_close, each_kind, kept, on_both_engines, room_for
from tests.generate.cases import Case, cases, each_case
from tests.generate.grads import Drawn, coo, strided
from tests.properties.marks import QUIET
from tests.subject import Subject
from tests.table import (
    EVERY,
    EVERYTHING,
    FEW,
    INSTRUCTION_SETS,
    PLAIN,
    STATEFUL,
    WITH_DENSE,
    Variant,
    all_same_bits,
    each_variant,
    on_each_engine,
    running_on,
    state_tensors,
    steps_of,
    through_a_file,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]
CONSTRAINTS = st.sampled_from([{"max_norm": 1.0}, {"max_norm": 0.01}, {"normalize": True}])


def constrained(case: Case, more: dict[str, Any]) -> Case:
    """The case with more options; with a constraint, if its parameters have rows."""
    has_rows = all(values.dim() > 1 for values in case.start)
    usable = has_rows or not {"max_norm", "normalize"} & more.keys()
    return replace(case, options={**case.options, **more}) if usable else case


@on_each_engine(EVERY)
@each_case(case=cases(max_steps=3))
def test_a_step_is_the_rule_on_the_entries_of_the_gradient(
    variant: Variant, engine: str, case: Case
):
    """Any layout, strides and dtype; other entries keep their bits, as do gradients."""
    check_steps(case, variant, engine)


@pytest.mark.parametrize("kind", ["masked", "constrained"])
@on_each_engine(EVERY if EVERYTHING else PLAIN)
@each_case(case=cases(max_steps=3), more=CONSTRAINTS, masked=st.booleans())
def test_a_step_is_the_rule_on_what_a_mask_selects_and_on_constrained_rows(
    variant: Variant, engine: str, kind: str, case: Case, more: dict[str, Any], masked: bool
):
    """A constraint is on whole rows of which elements are updated."""
    if kind == "constrained":
        case = constrained(case, more)
    check_steps(case, variant, engine, masked=masked or kind == "masked")


def check_steps(case: Case, variant: Variant, engine: str, *, masked: bool = False) -> None:
    if not case.applies(variant):
        return
    with running_on(engine) as name:
        subject = case.subject(variant, name, masked=masked)
        for drawn in case.steps:
            subject.checked_step(drawn)


@on_each_engine(PLAIN)
@each_case(examples=4, case=cases(max_steps=2, dtypes={torch.float32: 1}))
def test_state_and_parameter_may_have_different_dtypes(variant: Variant, engine: str, case: Case):
    in_half = Variant(variant.cls, {**variant.options, "state_dtype": torch.bfloat16})
    with running_on(engine) as name:
        subject = case.subject(in_half, name)
        for drawn in case.steps:
            subject.checked_step(drawn)


# Masks


def inside(drawn: Drawn | None, mask: Tensor | None) -> Drawn | None:
    """The gradient of what a mask selects, as a COO gradient of single elements."""
    if drawn is None or mask is None:
        return drawn
    held = drawn.held & mask.reshape(*mask.shape, *[1] * (drawn.held.dim() - mask.dim()))
    values = drawn.dense[held].to(drawn.grad.dtype)
    grad = torch.sparse_coo_tensor(held.nonzero().t(), values, held.shape, is_coalesced=True)
    return Drawn(grad, torch.where(held, drawn.dense, 0), held)


@on_each_engine(PLAIN)
@each_case(case=cases(max_steps=3, kinds=(strided, coo)))
def test_inside_a_mask_is_a_gradient_of_the_inside_alone(variant: Variant, engine: str, case: Case):
    """To the last bit, but for torch's square root, which depends on where a number stands."""
    if not case.applies(variant):
        return
    with running_on(engine) as name:
        masked, alone = case.subject(variant, name, masked=True), case.subject(variant, name)
        masks = [masked.mask_of(group, index) for group, index, _ in masked.each()]
        for drawn in case.steps:
            masked.give(drawn)
            alone.give([inside(*each) for each in zip(drawn, masks, strict=True)])
            masked.step_on_any_engine()
            alone.step_on_any_engine()
        if masked.optimizer.engine == alone.optimizer.engine == "native":
            assert masked.same_as(alone)
        for ours, theirs in zip(masked.tensors, alone.tensors, strict=True):
            rtol = 1e-2 if ours.dtype in (torch.float16, torch.bfloat16) else 1e-5
            assert torch.allclose(ours, theirs, rtol=rtol, atol=1e-6)


@on_each_engine(FEW)
def test_a_mask_of_a_single_number(variant: Variant, engine: str):
    with running_on(engine) as name:
        for selects in (True, False):
            number = torch.nn.Parameter(torch.ones(()))
            opt = variant([{"params": [number], "mask": torch.tensor(selects)}], engine=name)
            number.grad = torch.ones(())
            opt.step()
            assert (number.item() < 1) == selects
            assert steps_of(opt, number) in (1, None)


# Dense semantics


def dense(drawn: Drawn | None) -> Drawn | None:
    return drawn and Drawn(drawn.dense, drawn.dense, torch.ones_like(drawn.held))


@each_kind
@on_both_engines
@each_case(case=cases(max_steps=5, dtypes={torch.float64: 3, torch.complex128: 1}))
def test_a_deferred_run_is_the_dense_run(variant: Variant, engine: str, case: Case):
    """0-d to 4-d, empty, any layout, gradients that hold nothing, or none at all; two groups."""
    if not case.applies(variant):
        return
    deferred = Variant(variant.cls, {**variant.options, "semantics": "dense"})
    with running_on(engine) as name:
        ours, theirs = case.subject(deferred, name), case.subject(variant, name)
        for drawn in case.steps:
            ours.optimizer.catch_up()
            ours.give(drawn)
            theirs.give([dense(each) for each in drawn])
            ours.step_on_any_engine()
            theirs.step_on_any_engine()
        ours.optimizer.catch_up()
    for (_, _, p), (_, _, q) in zip(ours.each(), theirs.each(), strict=True):
        if p.numel():
            assert_close(kept(ours, p), kept(theirs, q), room_for(variant))
        assert steps_of(ours.optimizer, p) == steps_of(theirs.optimizer, q)


# Bits


@each_variant
@each_case(
    examples=24,
    case=cases(exact=False),
    threads=st.sampled_from([2, 3, 8]),
    more=st.just({}) | CONSTRAINTS,
)
def test_bits_do_not_depend_on_threads_or_instruction_set(
    variant: Variant, case: Case, threads: int, more: dict[str, Any]
):
    """Sums of duplicates are rounded here, so that their order shows."""
    if not case.applies(variant):
        return
    results = []
    for engine in INSTRUCTION_SETS:
        for count in (1, threads):
            torch.set_num_threads(count)
            with running_on(engine) as name:
                results.append(constrained(case, more).run(variant, name))
    for other in results[1:]:
        assert other.same_as(results[0])


ROUNDED = {"stochastic_rounding": True, "rounding_seed": 3}
CODED = {"state_dtype": torch.int8, "rounding_seed": 1}
# A rule, and options that change what state there is, or when it is written.
KEPT: list[tuple[Variant, dict[str, Any]]] = [
    *((variant, {}) for variant in EVERY),
    *((Variant(cls, {}), {"semantics": "dense"}) for cls in WITH_DENSE),
    *(
        (variant, {**more, "engine": engine})
        for variant in STATEFUL
        if variant.cls in (sparsestep.SGD, sparsestep.Adam, sparsestep.RowwiseAdam)
        for more in (CODED, {"state_dtype": torch.bfloat16, "stochastic_rounding": True})
        for engine in ("auto", "reference")
    ),
    *(
        (Variant(cls, {"dense": "elementwise"}), more)
        for cls in (sparsestep.RowwiseAdagrad, sparsestep.RowwiseAdam)
        for more in ({}, CODED)
    ),
    (Variant(sparsestep.Adam, {}), {"max_norm": 0.5}),
    (Variant(sparsestep.AdamW, {}), {"semantics": "dense", "engine": "reference"}),
]


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize(("variant", "more"), KEPT, ids=str)
@each_case(examples=8, case=cases(exact=False, max_steps=3), masked=st.booleans())
def test_copies_and_checkpoints_continue_with_the_same_bits(
    variant: Variant, more: dict[str, Any], case: Case, masked: bool
):
    """Deep copies, what comes out of a pickle, and a new optimizer that loads a file."""
    is_complex = case.start[0].is_complex()
    if not case.applies(variant) or (is_complex and "state_dtype" in more):
        return
    engine, more = more.get("engine", "auto"), {k: v for k, v in more.items() if k != "engine"}
    case, masked = constrained(case, more), masked and "semantics" not in more
    torch.manual_seed(1)  # of rounding at random
    subject = case.subject(variant, engine, masked=masked)
    torch.manual_seed(2)
    for drawn in case.steps:
        subject.give(drawn)
        subject.step()
        subject.give([None] * len(drawn))
        loaded = case.subject(variant, engine)
        loaded.front.load_state_dict(through_a_file(subject.front.state_dict()))
        for (_, _, ours), (_, _, theirs) in zip(loaded.each(), subject.each(), strict=True):
            ours.data.copy_(theirs.data)
        copies = [subject.copy(), loaded]
        if type(subject.front) in (variant.cls, *FUNCTIONAL):
            copies.append(Subject(pickle.loads(pickle.dumps(subject.front))))
        for each in (subject, *copies):
            each.give(case.steps[0])
            each.step()
            each.optimizer.catch_up()
        for other in copies:
            assert other.same_as(subject)
            assert other.optimizer.engine == subject.optimizer.engine


# A rule, the dtype of the parameter, its columns, and options.
LARGE = [
    *((variant, torch.float32, 24, {}) for variant in FEW),
    *(
        (Variant(cls, {}), half, 8, {"state_dtype": half, **ROUNDED})
        for cls in (sparsestep.SparseAdam, sparsestep.RowwiseAdagrad, sparsestep.Ftrl)
        for half in (torch.bfloat16, torch.float16)
    ),
    *((Variant(sparsestep.Adam, {}), torch.float32, n, CODED) for n in (1, 64, 513, 1500)),
]


@pytest.mark.parametrize(("variant", "dtype", "columns", "more"), LARGE, ids=str)
def test_bits_do_not_depend_on_how_many_share_a_large_step(
    variant: Variant, dtype: torch.dtype, columns: int, more: dict[str, Any]
):
    """Large enough for buckets, several chunks, a long chain and every thread."""
    generator = torch.Generator().manual_seed(0)
    count, rows = (40_000, 5_000) if columns < 64 else (700, 40)
    indices = torch.randint(0, rows, (1, count), generator=generator)
    indices[0, torch.randint(0, count, (count * 3 // 8,), generator=generator)] = rows - 7
    values = torch.randn(count, columns, generator=generator).to(dtype)
    for engines in ([*INSTRUCTION_SETS], ["reference"]):
        results = []
        for engine, threads in product(engines, (1, 2, 3, 8)):
            torch.set_num_threads(threads)
            param = torch.nn.Parameter(torch.ones(rows, columns, dtype=dtype))
            with running_on(engine) as name:
                opt = variant([param], lr=0.1, engine=name, **more)
                param.grad = torch.sparse_coo_tensor(indices, values, param.shape)
                opt.step()
                opt.step()
            results.append([param.detach(), *state_tensors(opt)])
        for other in results[1:]:
            assert all_same_bits(results[0], other)
