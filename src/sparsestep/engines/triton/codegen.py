"""Prints a traced formula as a Triton kernel that sums runs of entries and applies the rule.

The source is short and meant to be read: loads, one line for each operation of the program, stores.
``kernels.py`` has the functions that it calls.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from types import ModuleType
from typing import Any

from sparsestep.rules.trace import ROW_REDUCTIONS, ConstantRef, Operation, values_in

_GOLDEN = 0x9E3779B97F4A7C15  # as in rounding.py
_LANES = 16  # in which the core sums a row


@dataclass(frozen=True)
class KernelSpec:
    """The structure of a kernel; everything else is an argument of it."""

    inputs: tuple[str, ...]  # names of the parameter, its gradient and its state
    operations: tuple[Operation, ...]
    results: tuple[int, ...]  # places of the new parameter and state
    negates: bool = False  # the gradient
    adds_decay: bool = False  # to the gradient
    shrinks: bool = False  # the parameter, before the rule
    at_random: bool = False  # rounds half precision stochastically
    width: int = 64  # columns per program

    @property
    def by_row(self) -> bool:
        """Whether a program needs whole rows."""
        return any(operation.per_row for operation in self.operations)


@lru_cache(maxsize=256)
def load_kernel(spec: KernelSpec) -> Any:
    """Return the kernel, which Triton compiles when it is launched."""
    from sparsestep.engines.triton import kernels

    text = generate_source(spec)
    name = f"<sparsestep kernel {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for Triton
    module = ModuleType("sparsestep_kernel")
    vars(module).update({k: v for k, v in vars(kernels).items() if not k.startswith("__")})
    exec(compile(text, name, "exec"), vars(module))
    return vars(module)["step"]


def generate_source(spec: KernelSpec) -> str:
    """Return the source of a kernel.

    Example:
        >>> from sparsestep.rules.rule import Rule
        >>> from sparsestep.rules.trace import trace
        >>> rule = Rule("mine", lambda param, grad, *, lr: param - lr * grad)
        >>> program = trace(rule, 1, {"lr": 0.5})
        >>> spec = KernelSpec(program.inputs, tuple(program.operations), program.results)
        >>> text = generate_source(spec)
        >>> print(text[text.index("    v0") :])
            v0 = tl.load(at0 + cell, mask=inside, other=0.0).to(T)  # param
            v1 = gradient(values, indices, order, value_index, scale, blocks, n,
                          entry, slot, first, column, inside, T, C)
            v2 = number(n0, T) * v1
            v3 = v0 - v2
            tl.store(at0 + cell, rounded(v3, at0.dtype.element_ty), mask=moved)
        <BLANKLINE>
    """
    lines = [*_emit_row_sum(spec), *_signature(spec), *_emit_loads(spec)]
    wide = _float64_values(spec.operations)
    for place, operation in enumerate(spec.operations):
        if operation.name != "input":
            lines.append(f"    v{place} = {_emit_expression(operation, wide[place])}")
    lines += _emit_stores(spec)
    return "\n".join(lines) + "\n"


_EXPRESSIONS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "divided({0}, {1})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "pow": "power({0}, {1})",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "sign({0})",
    "sqrt": "root({0})",
    "rsqrt": "inverse(root({0}))",
    "reciprocal": "inverse({0})",
    "exp": "exponential({0})",
    "log": "logarithm({0})",
    "lt": "({0} < {1}).to(T)",
    "le": "({0} <= {1}).to(T)",
    "gt": "({0} > {1}).to(T)",
    "ge": "({0} >= {1}).to(T)",
    "eq": "({0} == {1}).to(T)",
    "ne": "({0} != {1}).to(T)",
    "where": "tl.where({0} != 0, {1}, {2})",
    "mean": "divided(row_sum({0}, inside, ROWS), number(C, T))",
    "sum": "row_sum({0}, inside, ROWS)",
    "amax": "largest({0}, inside)",
    "wide": "{0}.to(tl.float64)",
    "narrow": "{0}.to(T)",
}


def _float64_values(operations: Sequence[Operation]) -> list[bool]:
    """Return which values are float64 in any kernel: from "wide" up to "narrow"."""
    found: list[bool] = []
    for name, arguments, _ in operations:
        among = any(found[place] for place in values_in(arguments))
        found.append(name == "wide" or (among and name != "narrow"))
    return found


def _emit_expression(operation: Operation, is_wide: bool) -> str:
    dtype = "tl.float64" if is_wide else "T"
    arguments = [
        f"number(n{a.place}, {dtype})" if isinstance(a, ConstantRef) else f"v{a}"
        for a in operation.arguments
    ]
    return _EXPRESSIONS[operation.name].format(*arguments)


def _signature(spec: KernelSpec) -> list[str]:
    written = [place for place in range(len(spec.inputs)) if place != 1]
    used = chain.from_iterable(operation.arguments for operation in spec.operations)
    constants = sum(isinstance(argument, ConstantRef) for argument in used)
    numbers = ["l2", "shrink", *(f"n{place}" for place in range(constants))]
    arguments = [
        *(f"at{place}" for place in written),
        *("values", "indices", "order", "value_index", "scale"),
        *("element_mask", "blocks", "ok"),
        *("n: tl.int64", "seed: tl.int64"),
        # Without a type, a launch passes a Python number as float32.
        *(f"{name}: tl.float64" for name in numbers),
        *(f"{name}: tl.constexpr" for name in ("T", "C", "ROWS", "BLOCK")),
    ]
    return [
        '@triton.jit(do_not_specialize=["n", "seed"])',
        f"def step({', '.join(arguments)}):",
        "    entry, slot, first = load_slots(indices, ok, n, ROWS)",
        "    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]",
        "    row, in_rows = slot[:, None], first[:, None]",
        "    cell, inside = row * C + column, in_rows & (column < C)",
        "    moved = inside",
        "    if element_mask is not None:",
        "        moved = select_elements(",
        "            element_mask, order, value_index, entry, first, column, inside, C)",
    ]


def _pointer(spec: KernelSpec, place: int) -> tuple[str, str, str]:
    """An input's address, its mask for loads, and its mask for stores."""
    if spec.operations[place].per_row:
        return f"at{place} + row", "in_rows", "in_rows"
    return f"at{place} + cell", "inside", "moved"


_GRADIENT = (
    "gradient(values, indices, order, value_index, scale, blocks, n,\n"
    "                  entry, slot, first, column, inside, T, C)"
)


def _emit_loads(spec: KernelSpec) -> Iterator[str]:
    for place, name in enumerate(spec.inputs):
        if place == 1:
            yield f"    v1 = {_GRADIENT}"
            continue
        pointer, there, _ = _pointer(spec, place)
        yield f"    v{place} = tl.load({pointer}, mask={there}, other=0.0).to(T)  # {name!s:.40}"
    if spec.negates:
        yield "    v1 = -v1"
    if spec.adds_decay:
        yield "    v1 = v1 + tl.where(moved, number(l2, T) * v0, 0.0)"
    if spec.shrinks:
        yield "    v0 = v0 * number(shrink, T)"


def _emit_stores(spec: KernelSpec) -> Iterator[str]:
    written = [place for place in range(len(spec.inputs)) if place != 1]
    for count, (place, result) in enumerate(zip(written, spec.results, strict=True)):
        pointer, _, moved = _pointer(spec, place)
        bits = ""
        if spec.at_random:
            element = pointer.split(" + ")[1]
            key = (count + 1) * _GOLDEN & 0xFFFFFFFFFFFFFFFF
            bits = f", random_bits(seed, {key:#x}, {element})"
        value = f"rounded(v{result}, at{place}.dtype.element_ty{bits})"
        yield f"    tl.store({pointer}, {value}, mask={moved})"


def _emit_row_sum(spec: KernelSpec) -> Iterator[str]:
    """The sum of a row in the core's order: sixteen lanes, then halves of them."""
    if not any(operation.name in ROW_REDUCTIONS for operation in spec.operations):
        return
    yield "@triton.jit"
    yield "def row_sum(a, inside, ROWS: tl.constexpr):"
    yield "    a = tl.where(inside, a, 0.0)"
    parts, width = ["a"], spec.width
    while width > _LANES:
        for part in parts:
            yield f"    {part}0, {part}1 = halves({part}, ROWS, {width})"
        parts = [f"{part}{half}" for part in parts for half in "01"]
        width //= 2
    yield f"    total = 0.0 + {' + '.join(parts)}"
    while width > 1:
        yield f"    low, high = halves(total, ROWS, {width})"
        yield "    total = low + high"
        width //= 2
    yield "    return total"
    yield ""
    yield ""
