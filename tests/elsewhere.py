"""A device that is not the CPU, for machines that have none: its tensors do not mix with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # a name that torch knows everywhere; nothing is done there


class Elsewhere(Tensor):
    """A tensor that says it is there. What it holds is on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a tensor from elsewhere outside of elsewhere()")


# What may read from one device and write to another.
_COPIES = ("aten::_to_copy", "aten::copy_")


class _Keeping(TorchDispatchMode):
    """Runs everything on the CPU, and refuses what a real device would."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        there = [isinstance(t, Elsewhere) for t in tensors]
        name, device = func._schema.name, kwargs.get("device")
        if name not in _COPIES and any(there):
            # A number goes to any device.
            strangers = [t for t, is_there in zip(tensors, there, strict=True) if not is_there]
            assert not any(t.dim() for t in strangers), f"{name} mixes devices"
        is_there = device == DEVICE if device is not None else bool(there and there[0])
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map(
            lambda t: t.inner if isinstance(t, Elsewhere) else t, (args, kwargs)
        )
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            return tensors[0]
        return tree_map(lambda t: Elsewhere(t) if is_there and isinstance(t, Tensor) else t, result)


class _Unravelling(TorchFunctionMode):
    """``unravel_index`` makes a tensor of numbers there, which no other mode sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.unravel_index and isinstance(args[0], Elsewhere):
            found = func(args[0].cpu(), *args[1:], **(kwargs or {}))
            return tuple(index.to(DEVICE) for index in found)
        return func(*args, **(kwargs or {}))


@contextmanager
def elsewhere() -> Iterator[None]:
    """Where tensors of the other device may be used."""
    with _Keeping(), _Unravelling():
        yield
