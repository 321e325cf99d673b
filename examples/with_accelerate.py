"""Accelerate: a fused model, accumulated gradients, clipping, bf16, and state saved and loaded.

Needs ``pip install accelerate``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsestep


def clicks() -> DataLoader[tuple[Tensor, ...]]:
    """Lists of ids, and whether there was a click."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1_000, (2_048, 5), generator=generator)
    return DataLoader(TensorDataset(ids, (ids < 300).any(dim=1).float()), batch_size=128)


def train(precision: str, epochs: int = 3) -> float:
    """Train, save, spoil, load; returns the loss on all data."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.EmbeddingBag(1_000, 16), nn.Linear(16, 1))
    model = sparsestep.nn.fuse(model)  # its gradients can be clipped by torch's function
    optimizer = sparsestep.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8 * epochs)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, clicks(), scheduler)

    for _ in range(epochs):
        for ids, clicked in loader:
            with accelerator.accumulate(model):
                loss = binary_cross_entropy_with_logits(model(ids).squeeze(1), clicked)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        accelerator.save_state(folder)
        for param in model.parameters():
            param.zero_()
        accelerator.load_state(folder)
        losses = [
            binary_cross_entropy_with_logits(model(ids).squeeze(1), clicked)
            for ids, clicked in loader
        ]
    return float(torch.stack(losses).mean())


def main() -> int:
    """Train; returns the exit code."""
    precision = sys.argv[1] if len(sys.argv) > 1 else "no"
    loss = train(precision)
    print(f"mixed precision {precision!r}: loss {loss:.4f}")
    return 0 if loss < 0.4 else 1


if __name__ == "__main__":
    sys.exit(main())
