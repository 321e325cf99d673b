from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

class LightningModule(nn.Module):
    def log(self, name: str, value: Tensor) -> None: ...

class Callback: ...

class Trainer:
    callback_metrics: dict[str, Tensor]
    def __init__(
        self,
        *,
        accelerator: Literal["cpu"] = ...,
        max_epochs: int,
        precision: Literal["32-true", "bf16-mixed"] = ...,
        gradient_clip_val: float | None = ...,
        gradient_clip_algorithm: Literal["norm", "value"] | None = ...,
        logger: bool = ...,
        enable_checkpointing: bool = ...,
        enable_progress_bar: bool = ...,
        enable_model_summary: bool = ...,
        callbacks: list[Callback] = ...,
    ) -> None: ...
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Iterable[object],
        *,
        ckpt_path: Path | None = None,
    ) -> None: ...
    def save_checkpoint(self, filepath: Path) -> None: ...

def seed_everything(seed: int, *, verbose: bool = True) -> int: ...
