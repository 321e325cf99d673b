"""Parameters and options, drawn at random; all of them valid."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import sparsestep
from sparsestep import storage
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.source import Source
from tests.table import sign_sgd, sm3_by_rows

Options = dict[str, Any]

SHAPES: dict[tuple[int, ...], int] = {
    (7, 3): 12,
    (6, 5): 6,
    (4, 6): 6,
    (5,): 4,
    (): 2,
    (1,): 2,
    (40,): 1,
    (4, 1): 2,
    (1, 4): 1,
    (3, 0): 1,
    (0, 4): 1,
    (6, 33): 1,
    (2, 3, 4): 3,
    (2, 2, 3, 2): 1,
    (3, 600): 1,
}
DTYPES = {
    torch.float32: 10,
    torch.float64: 4,
    torch.bfloat16: 3,
    torch.float16: 3,
    torch.complex64: 1,
    torch.complex128: 1,
}
REAL = {dtype: weight for dtype, weight in DTYPES.items() if not dtype.is_complex}


def any_class(chance: Source) -> type[RuleOptimizer]:
    classes = [*OPTIMIZERS, *OPTIMIZERS, sign_sgd, sm3_by_rows]
    return chance.pick(classes)


def any_dtype(chance: Source, cls: type[RuleOptimizer]) -> torch.dtype:
    takes_complex = cls.supports_complex and cls in OPTIMIZERS
    return chance.weighted(DTYPES if takes_complex else REAL)


def any_param(
    chance: Source, dtype: torch.dtype, optimizer: Callable[[Any], RuleOptimizer] | None = None
) -> tuple[torch.nn.Parameter, str]:
    """A parameter, and how it lies; in a file only with the optimizer that it has room for."""
    shape = chance.weighted(SHAPES)
    values = chance.numbers(shape, dtype)
    text = f"{shape} {dtype}"
    form = chance.integer(0, 11)
    if form == 0 and len(shape) > 1:
        values, text = values.transpose(0, -1).contiguous().transpose(0, -1), text + " transposed"
    elif form == 1 and shape:
        values, text = values.repeat_interleave(2, -1)[..., ::2], text + " every other column"
    elif form == 2 and shape:
        values, text = values.repeat_interleave(3, 0)[1::3], text + " every third row"
    elif form == 3 and len(shape) > 2:
        values = values.transpose(-1, -2).contiguous().transpose(-1, -2)
        text += " last dims transposed"
    elif form == 4:
        values, text = _in_the_middle(values), text + " in the middle of a storage"
    elif form == 5 and optimizer is not None and values.dim() and values.numel():
        values, text = _in_a_file(values, optimizer), text + " in a file"
    return torch.nn.Parameter(values), text


def _in_the_middle(values: Tensor) -> Tensor:
    room = values.new_zeros(values.numel() + 3)
    room[1 : 1 + values.numel()] = values.reshape(-1)
    return room[1 : 1 + values.numel()].view(values.shape)


@cache
def folder_of_tables() -> tempfile.TemporaryDirectory[str]:
    """It stays as long as the process that asks for it first."""
    return tempfile.TemporaryDirectory()


def _in_a_file(values: Tensor, optimizer: Callable[[Any], RuleOptimizer]) -> Tensor:
    path = os.path.join(folder_of_tables().name, f"table-{os.getpid()}")
    if os.path.exists(path):
        os.unlink(path)  # open files keep it
    table = storage.mapped(path, values.shape, values.dtype, optimizer=optimizer)
    return table.copy_(values)


def any_mask(chance: Source, param: Tensor, *, by_row: bool = False) -> Tensor:
    whole = not by_row and param.dim() != 1 and chance.one_in(2)
    shape = param.shape if whole else param.shape[:1]
    return chance.flags(shape, chance.pick([0.0, 0.5, 0.5, 0.5, 1.0]))


def two_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Param groups with different learning rates; one, if there is one parameter."""
    half = (len(params) + 1) // 2
    groups: list[dict[str, Any]] = [{"params": params[:half]}]
    return [*groups, {"params": params[half:], "lr": 0.05}] if params[half:] else groups


# Options


def any_options(chance: Source, cls: type[RuleOptimizer]) -> Options:
    """What a class may be made with: the formula's options, and those of all."""
    found: Options = {"lr": chance.pick([0.0, 1e-3, 0.1, 0.1, 1.0])}
    if chance.one_in(10) and cls in OPTIMIZERS:
        found["lr"] = torch.tensor(found["lr"], dtype=torch.float64)
    if chance.one_in(2):
        found["maximize"] = chance.one_in(2)
    for name, values in _own_values(cls).items():
        if chance.one_in(3):
            found[name] = chance.pick(values)
    _made_consistent(chance, cls, found)
    if chance.one_in(8):
        found["state_dtype"] = chance.pick([torch.float32, torch.float64, torch.bfloat16])
    if chance.one_in(8):
        found["stochastic_rounding"] = True
    return found


# Values by the name of the option; a class takes those that are in its signature.
_VALUES: Options = {
    "betas": [(0.9, 0.999), (0.5, 0.75), (0.0, 0.99), (0.9, 0.0)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.0, 0.1],
    "decoupled_weight_decay": [True, False],
    "bias_correction": ["per_row", "global"],
    "amsgrad": [True],
    "momentum_decay": [0.0, 0.5],
    "momentum": [0.9, 0.5],
    "dampening": [0.5],
    "nesterov": [True],
    "centered": [True],
    "alpha": [0.5],
    "lr_decay": [0.5],
    "initial_accumulator_value": [0.25],
    "beta": [0.5],
    "l1": [0.5],
    "l2": [0.25],
    "foreach": [True, False],
    "fused": [True, False],
}


def _own_values(cls: type[RuleOptimizer]) -> Options:
    arguments = inspect.signature(cls).parameters
    found = {name: values for name, values in _VALUES.items() if name in arguments}
    if cls is sparsestep.AdamW:
        del found["decoupled_weight_decay"]  # always True
    return found


def _made_consistent(chance: Source, cls: type[RuleOptimizer], found: Options) -> None:
    if found.get("centered"):
        found["eps"] = 0.5  # a difference of squares, of which little may be left
    if found.get("nesterov"):
        found["dampening"] = 0
        found.setdefault("momentum", 0.9)
    if found.get("fused") and found.get("foreach"):
        del found["foreach"]
    if isinstance(found["lr"], Tensor) and found.get("foreach"):
        del found["foreach"]
    adams = (sparsestep.Adam, sparsestep.AdamW)
    if cls in adams and chance.one_in(12) and not found.get("foreach"):
        found["betas"] = tuple(
            torch.tensor(b, dtype=torch.float64) for b in found.get("betas", (0.9, 0.999))
        )
        found.pop("fused", None)


def written(options: Options) -> str:
    """Options as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
