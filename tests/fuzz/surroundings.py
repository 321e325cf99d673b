"""What may be switched on around a step, and must make no difference to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tests.generate.source import Source


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "torch.device('meta')": lambda: torch.device("meta"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype float16": lambda: _default_dtype(torch.float16),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": _deterministic,
    "sparse invariants checked": torch.sparse.check_sparse_tensor_invariants,
    "profiler": torch.autograd.profiler.profile,
}


def any_surroundings(chance: Source) -> tuple[AbstractContextManager[object], str]:
    """Mostly none."""
    if not chance.one_in(5):
        return nullcontext(), ""
    name = chance.pick(list(_AROUND))
    if name == "profiler" and not chance.one_in(5):  # it is slow
        name = "no_grad"
    return _AROUND[name](), name
