"""Random formulas: a list of operations on what was computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

UNARY: dict[str, Callable[[Any], Any]] = {
    "negative": lambda a: -a,
    "abs": abs,
    "sqrt": lambda a: a.abs().sqrt(),
    "rsqrt": lambda a: (a.square() + 1).rsqrt(),
    "reciprocal": lambda a: 1 / (a.square() + 0.5),
    "exp": lambda a: torch.exp(-a.abs()),
    "log": lambda a: (a.square() + 0.5).log(),
    "power": lambda a: (a.abs() + 0.5) ** 0.75,
    "sign": torch.sign,
    "clamp": lambda a: a.clamp(-1.0, 0.75),
    "cube": lambda a: a**3,
    "of its row": lambda a: a - a.mean(1, keepdim=True),
    "by its row": lambda a: a / (a.norm(dim=1, keepdim=True) + 0.25),
    "to its row": lambda a: a / (a.abs().amax(1, keepdim=True) + 0.25),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: torch.sub(a, b, alpha=0.5),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where((a > b) & (b >= 0), a, 0.25),
    "not": lambda a, b: torch.where(~(a <= b) | (a == b), b, a),
}
Formula = list[tuple[str, int, int]]
formulas: st.SearchStrategy[Formula] = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 99), st.just(0)),
        st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 99), st.integers(0, 99)),
    ),
    min_size=1,
    max_size=12,
)


def computed(formula: Formula, values: list[Any]) -> list[Any]:
    """The values, and what each operation makes of those before it."""
    found = list(values)
    for name, first, second in formula:
        a, b = found[first % len(found)], found[second % len(found)]
        found.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
    return found
