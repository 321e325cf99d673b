"""RowwiseAdagrad against FBGEMM's exact row-wise Adagrad on the CPU: the same numbers?

The same rows, gradients and eps, several steps, with duplicates. Printed is the largest distance of
any element and of any row's sum. FBGEMM adds up duplicates in an order of its own, so the last
places differ. With pooling, its CPU kernel ignores weight decay without a word, so decay is
compared without pooling, where FBGEMM uses another kernel.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

import sparsestep
from benchmarks.harness.contestants import import_peer
from benchmarks.harness.workload import Unavailable, uniform_coo_grads

ROWS, DIM, LOOKUPS = 5_000, 64, 4_096
LR, EPS, DECAY = 0.05, 1e-8, 0.1
TOLERANCE = 1e-5


class Mode(NamedTuple):
    """What is compared; ``pooling`` and ``decay`` are FBGEMM's names."""

    name: str
    pooling: str
    decay: str


MODES = (
    Mode("pooled", "SUM", "NONE"),
    Mode("not pooled", "NONE", "NONE"),
    Mode("coupled decay", "NONE", "L2"),
    Mode("decoupled decay", "NONE", "DECOUPLE"),
)


def fbgemm(start: Tensor, grads: list[Tensor], mode: Mode) -> tuple[Tensor, Tensor]:
    """The table and its sums after these steps, as FBGEMM computes them."""
    training = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = import_peer("fbgemm_gpu.split_embedding_configs")
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(*start.shape, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
        weight_decay=0.0 if mode.decay == "NONE" else DECAY,
        weight_decay_mode=training.WeightDecayMode[mode.decay],
        pooling_mode=common.PoolingMode[mode.pooling],
        device=torch.device("cpu"),
    )
    [weight] = table.split_embedding_weights()
    weight.detach().copy_(start)
    for grad in grads:
        # Bags of one id each: the gradient of the output is that of the rows.
        output = table(grad._indices()[0], torch.arange(LOOKUPS + 1))
        output.backward(grad._values())  # updates the table
    [(sums,)] = table.split_optimizer_states()
    return weight.detach(), sums


def ours(start: Tensor, grads: list[Tensor], mode: Mode) -> tuple[Tensor, Tensor]:
    """The same, as we compute them."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = sparsestep.RowwiseAdagrad(
        [weight],
        lr=LR,
        eps=EPS,
        weight_decay=0.0 if mode.decay == "NONE" else DECAY,
        decoupled_weight_decay=mode.decay == "DECOUPLE",
    )
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    return weight.detach(), optimizer.state[weight]["sum"]


def main() -> int:
    torch.manual_seed(0)
    start = torch.randn(ROWS, DIM)
    grads = uniform_coo_grads(ROWS, DIM, LOOKUPS)
    try:
        theirs = [fbgemm(start, grads, mode) for mode in MODES]
    except Unavailable as error:
        print(f"FBGEMM is {error}; get it with: pip install --no-deps fbgemm-gpu-cpu==1.8.0")
        return 0
    print(f"{ROWS:,} x {DIM}, {LOOKUPS:,} lookups, {len(grads)} steps; the largest distance:")
    worst = 0.0
    for mode, expected in zip(MODES, theirs, strict=True):
        mine = ours(start, grads, mode)
        element, sums = (
            float((a - b.view_as(a)).abs().max()) for a, b in zip(mine, expected, strict=True)
        )
        worst = max(worst, element)
        moved, largest = float((mine[0] - start).abs().max()), float(mine[1].max())
        print(
            f"{mode.name:16} {element:.1e} of an element (which moved up to {moved:.2f}), "
            f"{sums:.1e} of a sum (up to {largest:.1f})"
        )
    if worst > TOLERANCE:
        print(f"an element is off by more than {TOLERANCE:g}: not the same formula")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
