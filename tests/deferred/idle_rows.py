"""One optimizer for each way in which an idle row moves, and learning rates that vary."""

from __future__ import annotations

import torch

import sparsestep
from sparsestep.engines.base import GroupSettings
from tests.table import Variant

ADAM = Variant(sparsestep.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.1})
KINDS = [
    ADAM,
    Variant(sparsestep.AdamW, {}),
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"betas": (0.9, 0.0)}),
    Variant(sparsestep.AdamW, {"betas": (0.0, 0.9)}),
    Variant(sparsestep.AdamW, {"eps": 1.0}),
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.SparseAdam, {}),
    Variant(
        sparsestep.RowwiseAdam,
        {"betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    Variant(sparsestep.SGD, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {"momentum": 0.9, "nesterov": True}),
    Variant(sparsestep.SGD, {"momentum": 0.9999}),  # reaches back further than is kept
    Variant(sparsestep.RMSprop, {"momentum": 0.5, "centered": True}),
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
    Variant(sparsestep.Lion, {"betas": (0.9, 0.0)}),  # no sign is left after one step
    Variant(sparsestep.Ftrl, {"l1": 0.1, "l2": 0.1}),
]

_settings: dict[tuple[str, float], GroupSettings] = {}


def settings_of(variant: Variant, lr: float) -> GroupSettings:
    key = (str(variant), lr)
    if key not in _settings:
        opt = variant([torch.zeros(1, 1)], lr=lr, semantics="dense")
        _settings[key] = opt.settings(0)
    return _settings[key]


def rates(steps: int, seed: int = 0) -> list[float]:
    """Learning rates that vary, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(steps, generator=generator, dtype=torch.float64) * 0.01
    return torch.where(torch.rand(steps, generator=generator) < 0.1, 0.0, drawn).tolist()
