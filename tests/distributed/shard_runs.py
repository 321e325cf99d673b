"""Ways to train that the processes go through."""

from __future__ import annotations

import torch

import sparsestep
from tests.distributed.shard_cases import KINDS, Case

QUICK = {
    **{f"{kind}-global": Case(kind) for kind in KINDS},
    **{f"{kind}-fast": Case(kind, order="fast", reduce="mean") for kind in KINDS},
    "dense": Case("rows", semantics="dense", make=sparsestep.AdamW),
    "by row": Case("rows", make=sparsestep.RowwiseAdagrad),
    "clipped": Case("tables", clip=0.5),
    "half": Case("rows", order="fast", dtype=torch.bfloat16),
}
