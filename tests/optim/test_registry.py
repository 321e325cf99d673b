"""What a new optimizer has to be added to; a failure says what is missing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep import functional, optim
from sparsestep.optim.mixed import MixedOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.test_formulas import PUBLISHED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def defined() -> list[type[RuleOptimizer]]:
    """Every optimizer class in a file of ``optim/``."""
    found = []
    for each in pkgutil.iter_modules(optim.__path__, "sparsestep.optim."):
        classes = vars(importlib.import_module(each.name)).values()
        found += [
            cls
            for cls in classes
            if inspect.isclass(cls)
            and cls.__module__ == each.name
            and RuleOptimizer in cls.__bases__
            and cls is not MixedOptimizer  # it has no rule of its own
            and torch.optim.Optimizer in cls.__bases__
        ]
    return found


@pytest.mark.parametrize("cls", defined(), ids=lambda cls: cls.__name__)
def test_an_optimizer_is_everywhere(cls: type[RuleOptimizer]):
    name, file = cls.__name__, cls.__module__.rpartition(".")[2]
    page = f"docs/optimizers/{file}.md"
    missing = {
        f"add {name} to OPTIMIZERS in optim/__init__.py": cls in optim.OPTIMIZERS,
        f"import {name} in sparsestep/__init__.py, and add it to __all__": (
            name in sparsestep.__all__
        ),
        f"import Functional{name} in sparsestep/__init__.py, and add it to __all__": (
            f"Functional{name}" in sparsestep.__all__
        ),
        f"import {file}_ in functional.py, and add it to __all__": (
            f"{file}_" in functional.__all__
        ),
        f"write {page}": (ROOT / page).exists(),
        f"name {name} in README.md": bool(re.search(rf"\b{name}\b", README)),
        f"transcribe the formula of {name} in tests/optim/test_formulas.py": (
            hasattr(torch.optim, name) or name in dict(PUBLISHED)
        ),
    }
    assert all(missing.values()), [what for what, is_done in missing.items() if not is_done]
