"""Masks: outside nothing changes, inside every entry moves as if there were nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.generate.cases import Case, cases, each_case
from tests.generate.grads import Drawn, coo, strided
from tests.properties.marks import QUIET
from tests.table import FEW, PLAIN, Variant, on_each_engine, running_on, same_bits, steps_of

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


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
        for (_, _, param), mask, start in zip(masked.each(), masks, case.start, strict=True):
            if mask is not None:
                assert same_bits(param[~mask], start[~mask])


@on_each_engine(FEW)
@pytest.mark.parametrize("shape", [(6, 3), ()], ids=["table", "number"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["nothing", "everything"])
def test_a_mask_that_selects_nothing_or_everything(
    variant: Variant, engine: str, share: float, shape: tuple[int, ...]
):
    """Nothing changes but the step count, or everything as without a mask."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask, dense = torch.full(shape[:1], bool(share)), torch.ones(shape)
    with running_on(engine) as name:
        masked, plain = (torch.nn.Parameter(start.clone()) for _ in range(2))
        opt = variant([{"params": [masked], "mask": mask}], engine=name)
        other = variant([plain], engine=name)
        for grad in (dense, dense.to_sparse(1) if shape else dense):
            masked.grad = plain.grad = grad
            opt.step()
            other.step()
    assert steps_of(opt, masked) == steps_of(other, plain)
    if share:
        assert torch.allclose(masked, plain, rtol=1e-5, atol=1e-6)
        assert not same_bits(masked.detach(), start)
        return
    assert same_bits(masked.detach(), start)
    for name, tensor in opt.state.get(masked, {}).items():
        assert name == "step" or bool((tensor == tensor.flatten()[0]).all())
