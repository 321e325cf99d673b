"""What may be active around a step: autocast, which must not affect it, and profilers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sparsestep._torch import profiler_enabled


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Operations on a kind of device as they are, whatever surrounds them."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def labelled(name: str) -> AbstractContextManager[object]:
    """A name for what is done, in the trace of a profiler where there is one.

    Example:
        >>> with torch.profiler.profile() as trace, labelled("sparsestep: plan"):
        ...     pass
        >>> any(event.key == "sparsestep: plan" for event in trace.key_averages())
        True
    """
    return torch.profiler.record_function(name) if profiler_enabled() else nullcontext()


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` that keeps dtypes: under autocast torch's has no rule for float16 on CPUs.

    Example:
        >>> halves = [torch.ones(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
        >>> with torch.autocast("cpu"):
        ...     cat(halves)
        tensor([1., 0.], dtype=torch.float16)
    """
    with without_autocast(tensors[0].device.type):
        return torch.cat(tuple(tensors))


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """The same for ``torch.stack``, along a new first dim."""
    return cat([tensor.unsqueeze(0) for tensor in tensors])
