"""Tables that are trained with a mask, and gradients of what it selects alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.cases import Gradient
from tests.table import running_on, same_bits, state_tensors

BY_ROW = (sparsestep.RowwiseAdagrad, sparsestep.RowwiseAdam)
# Everything that would move an entry which has no gradient of its own.
OPTIONS: dict[type[RuleOptimizer], dict[str, Any]] = {
    sparsestep.SparseAdam: {},
    sparsestep.Adam: {"weight_decay": 0.1, "amsgrad": True},
    sparsestep.AdamW: {"weight_decay": 0.1},
    sparsestep.RAdam: {"weight_decay": 0.1},
    sparsestep.Adagrad: {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
    sparsestep.RowwiseAdagrad: {"weight_decay": 0.1},
    sparsestep.RowwiseAdam: {"weight_decay": 0.1, "decoupled_weight_decay": True},
    sparsestep.SGD: {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    sparsestep.RMSprop: {"weight_decay": 0.1, "momentum": 0.9, "centered": True},
    sparsestep.Lion: {"weight_decay": 0.1},
    sparsestep.Ftrl: {"l1": 0.05, "l2": 0.1},
}
SHAPE = (6, 3, 2)
SPARSE_DIMS = {"rows": 1, "hybrid": 2, "elements": 3}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values whose sums are exact in every order."""
    return torch.randint(-16, 17, shape, generator=generator) / 8


def gradient_of(
    layout: str, seed: int, shape: tuple[int, ...] = SHAPE, entries: int = 10
) -> Gradient:
    """Random, with duplicates where the layout has room for them."""
    generator = seeded(seed)
    if layout == "dense":
        return Gradient(shape, None, exact(shape, generator))
    sparse_dim = min(SPARSE_DIMS[layout], len(shape))
    if layout == "elements":
        sparse_dim = len(shape)
    indices = torch.stack(
        [
            torch.randint(0, max(1, size), (entries,), generator=generator)
            for size in shape[:sparse_dim]
        ]
    )
    return Gradient(shape, indices, exact((entries, *shape[sparse_dim:]), generator))


def inside(gradient: Gradient, mask: Tensor) -> Gradient:
    """The gradient that holds only what the mask selects, entry by entry in the same order."""
    indices, values = gradient.indices, gradient.values
    if indices is None:
        indices, values = torch.zeros(0, 1, dtype=torch.int64), values[None]
    sparse_dim, entries = indices.shape
    # Split each entry until it is as fine as the mask.
    finer = gradient.shape[sparse_dim : mask.dim()]
    within = torch.ones(finer).nonzero().t()
    pieces = within.shape[1]
    indices = torch.cat([indices.repeat_interleave(pieces, 1), within.repeat(1, entries)])
    values = values.reshape(entries * pieces, *gradient.shape[len(indices) :])
    kept = mask[tuple(indices[: mask.dim()])]
    return Gradient(gradient.shape, indices[:, kept], values[kept])


def train(
    optimizer: type[RuleOptimizer],
    gradients: list[Gradient],
    engine: str,
    dtype: torch.dtype = torch.float32,
    *,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, RuleOptimizer]:
    shape = gradients[0].shape
    param = torch.nn.Parameter(torch.randn(shape, generator=seeded(99)).to(dtype))
    group = {"params": [param]} if mask is None else {"params": [param], "mask": mask}
    with running_on(engine) as name:
        opt = optimizer([group], lr=0.1, engine=name, **OPTIONS[optimizer], **options)
        for gradient in gradients:
            param.grad = gradient.tensor(dtype)
            opt.step()
    return param.detach(), opt


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def same(one: RuleOptimizer, other: RuleOptimizer) -> bool:
    """Params, state and step counts, to the last bit."""
    ours, theirs = (
        [real(t) for t in (*(p.detach() for p in o.param_groups[0]["params"]), *state_tensors(o))]
        for o in (one, other)
    )
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def start_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(99)).to(dtype)


ROWS = torch.tensor([True, False, True, True, False, False])
ELEMENTS = torch.rand(SHAPE, generator=seeded(7)) < 0.5
