"""Lightning: tables with sparse gradients and dense layers under one optimizer.

Clipping by norm and by value, ``precision="bf16-mixed"``, checkpoints and resuming are options of
Lightning's ``Trainer``; the module needs no code for them. Needs ``pip install lightning``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsestep

USERS, ITEMS = 500, 800


class Recommender(lightning.LightningModule):
    """Two tables, whose gradients hold only what a batch looked up, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users = sparsestep.nn.Embedding(USERS, 16)
        self.items = sparsestep.nn.Embedding(ITEMS, 16)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        users, items, clicks = batch
        both = torch.cat([self.users(users), self.items(items)], dim=1)
        loss = binary_cross_entropy_with_logits(self.layers(both).squeeze(1), clicks)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for sparse and dense gradients."""
        return sparsestep.AdamW(self.parameters(), lr=0.02)


class LogMetrics(lightning.Callback):
    """Logs optimizer.metrics() after every batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Gradients are still there: Lightning clears them before the next backward."""
        for optimizer in trainer.optimizers:
            found = {f"optimizer/{name}": float(n) for name, n in optimizer.metrics().items()}
            pl_module.log_dict(found)


def clicks() -> DataLoader[tuple[Tensor, ...]]:
    """Batches of users, items and whether there was a click."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(0, USERS, (2_048,), generator=generator)
    items = torch.randint(0, ITEMS, (2_048,), generator=generator)
    return DataLoader(TensorDataset(users, items, (users < items).float()), batch_size=256)


def train(epochs: int, folder: Path, resume: Path | None = None, **options: Any) -> Recommender:
    """A trained module; its checkpoint is ``last.ckpt`` in the folder."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LogMetrics()],
        **options,
    )
    module = Recommender()
    trainer.fit(module, clicks(), ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    assert trainer.callback_metrics["optimizer/rows_touched"] > 0
    print(f"{epochs} epochs, {options}: loss {float(trainer.callback_metrics['loss']):.4f}")
    return module


def main() -> int:
    """Train in several ways; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(3, folder, gradient_clip_val=0.5)  # by norm
        train(3, folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        train(3, folder, gradient_clip_val=0.5, precision="bf16-mixed")
        whole = train(4, folder)
        train(2, folder)
        resumed = train(4, folder, resume=folder / "last.ckpt")
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    print(f"Resumed after two epochs, the weights are the same: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
