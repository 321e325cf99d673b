"""The same bits for any number of threads, any instruction set, and in repeated steps."""

from __future__ import annotations

import pickle
from functools import cache

import torch
from hypothesis import strategies as st

from tests.generate.cases import Case, cases, each_case
from tests.properties.marks import QUIET
from tests.subject import Subject
from tests.table import (
    FEW,
    INSTRUCTION_SETS,
    Variant,
    each_variant,
    on_each_engine,
    running_on,
    same_bits,
    state_tensors,
)

pytestmark = QUIET


@each_variant
@each_case(case=cases(exact=False), threads=st.sampled_from([2, 3, 8]))
def test_bits_do_not_depend_on_threads_or_instruction_set(
    variant: Variant, case: Case, threads: int
):
    """Sums of duplicates are rounded here, so that their order shows."""
    if not case.applies(variant):
        return
    results = []
    for engine in INSTRUCTION_SETS:
        for count in (1, threads):
            torch.set_num_threads(count)
            with running_on(engine) as name:
                results.append(case.run(variant, name))
    for other in results[1:]:
        assert other.same_as(results[0])


@each_variant
@each_case(examples=8, case=cases(exact=False, max_steps=3))
def test_copies_continue_with_the_same_bits(variant: Variant, case: Case):
    """Deep copies, and what comes out of a pickle."""
    if not case.applies(variant):
        return
    torch.set_num_threads(1)
    subject = case.subject(variant, "auto")
    for drawn in case.steps:
        subject.give(drawn)
        subject.step()
        subject.give([None] * len(drawn))
        copies = [subject.copy()]
        if not case.by_hand:
            copies.append(Subject(pickle.loads(pickle.dumps(subject.front))))
        for each in (subject, *copies):
            each.give(case.steps[0])
            each.step()
        for other in copies:
            assert other.same_as(subject)
            assert other.optimizer.engine == subject.optimizer.engine


@cache
def large_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Large enough for buckets, several chunks, a long chain and every thread."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 5000, (1, 40_000), generator=generator)
    indices[0, torch.randint(0, 40_000, (15_000,), generator=generator)] = 4321
    values = torch.randn(40_000, 24, generator=generator)
    weight = torch.randn(5000, 24, generator=generator)
    return indices, values, weight


@on_each_engine(FEW)
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
