"""Which of torch's functions leave a compact gradient what it is, and which depend on all of it."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_IN_PLACE = re.compile(r"(__i(add|sub|mul|truediv|floordiv|mod|pow)__|[a-z_0-9]*[a-z0-9]_)(\.\w+)?")


def is_in_place(func: Any) -> bool:
    """Whether it writes what it is called on."""
    return _IN_PLACE.fullmatch(getattr(func, "__name__", "")) is not None


# What modes that watch torch's operators call: these come to __torch_dispatch__ next.
OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

# These have to do with the values, the other attributes of a tensor only with the tensor.
_OF_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH", "layout", "is_sparse"}
_ATTRIBUTES = [
    attribute
    for name, attribute in vars(Tensor.__mro__[1]).items()
    if isinstance(attribute, types.GetSetDescriptorType) and name not in _OF_VALUES
]
# Methods for which the same holds, and those that have an answer.
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"),
    "__format__",
    *("is_floating_point", "is_complex", "is_conj", "is_neg", "is_inference", "is_signed"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    "backward",
    *("detach", "detach_", "clone", "copy_", "zero_", "add", "add_", "__add__", "__radd__"),
    *("__iadd__", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_"),
    *("div", "div_", "__truediv__", "__div__", "__itruediv__", "__idiv__", "true_divide"),
    *("true_divide_", "divide", "divide_", "neg", "neg_", "__neg__", "negative", "negative_"),
    *(f"_foreach_{name}" for name in ("add", "add_", "mul", "mul_", "div", "div_", "neg", "neg_")),
    *("_foreach_zero_", "_foreach_copy_"),
)
# Those whose answer is in ``compact_clip.py``: it depends on all rows, summed.
_CLIPPING = (
    *("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"),
    *("_foreach_norm", "_foreach_clamp_min", "_foreach_clamp_min_"),
    *("_foreach_clamp_max", "_foreach_clamp_max_"),
    "_amp_foreach_non_finite_check_and_unscale_",
)


def _named(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        for owner in (Tensor, torch):
            if hasattr(owner, name):
                yield getattr(owner, name)


OF_ALL_VALUES: frozenset[Any] = frozenset(
    [*_named(_CLIPPING), torch.linalg.vector_norm, torch.linalg.norm]
)
UNCHANGED: frozenset[Any] = frozenset(
    [
        *(attribute.__get__ for attribute in _ATTRIBUTES),
        *(attribute.__set__ for attribute in _ATTRIBUTES),
        *_named(_METHODS),
    ]
)
