"""Ways to train that the processes go through."""

from __future__ import annotations

import torch

import sparsestep
from tests.distributed.shard_cases import KINDS, Case
from tests.table import EVERY, Variant, sm3_by_rows


def has_dense_form(variant: Variant) -> bool:
    try:
        variant([torch.zeros(1, 1)], semantics="dense")
    except sparsestep.InputError:
        return False
    return True


ROUNDED = (
    ("stochastic_rounding", True),
    ("rounding_seed", 7),
    ("state_dtype", torch.bfloat16),
)
CODED = (("state_dtype", torch.int8), ("rounding_seed", 7))
QUICK = {
    **{f"{kind}-global": Case(kind) for kind in KINDS},
    **{f"{kind}-fast": Case(kind, order="fast", reduce="mean") for kind in KINDS},
    "dense": Case("rows", semantics="dense", make=sparsestep.AdamW),
    "by row": Case("rows", make=sparsestep.RowwiseAdagrad),
    "clipped": Case("tables", clip=0.5),
    **{f"half-{kind}": Case(kind, order="fast", dtype=torch.bfloat16) for kind in KINDS},
    **{f"user rule-{kind}": Case(kind, make=sm3_by_rows) for kind in KINDS},
    # The random bits are those of the elements of the whole, whoever has them.
    **{
        f"rounded-{kind}-{rule.__name__}": Case(
            kind, make=rule, options=ROUNDED, dtype=torch.bfloat16
        )
        for kind in KINDS
        for rule in (sparsestep.Adam, sparsestep.RowwiseAdagrad, sm3_by_rows)
    },
    **{f"int8-{kind}": Case(kind, make=sparsestep.Adam, options=CODED) for kind in KINDS},
}

# Every rule with every kind, under both semantics where the rule has both.
SWEEP = {
    f"{variant}-{kind}-{semantics}": Case(
        kind,
        semantics=semantics,
        make=variant.cls,
        options=tuple(variant.options.items()),
    )
    for variant in EVERY
    for kind in KINDS
    for semantics in ("masked", "dense")
    if semantics == "masked" or has_dense_form(variant)
}
