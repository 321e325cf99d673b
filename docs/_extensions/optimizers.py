"""Tables of optimizers, from the registry ``sparsestep.optim.OPTIMIZERS``.

``{optimizer} AdamW`` is the page of one class, ``{optimizer-table} NAME`` a table of all classes
(``TABLES`` has the names), ``{functional-optimizers}`` the reference of their functional forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import sparsestep
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import StateSpec

# Options that make an optimizer keep more, a value that does it, and how the table says so.
ADDING_STATE = {
    "amsgrad": (True, "`amsgrad=True`"),
    "momentum": (0.9, "`momentum` is not 0"),
    "centered": (True, "`centered=True`"),
    "bias_correction": ("per_row", '`bias_correction="per_row"`'),
}
HEAD = ("name", "shape", "dtype", "initial value", "present")
ROWS, DIM = 1_000_000, 64  # of the table whose state is counted


def default_group(cls: type[RuleOptimizer]) -> dict[str, Any]:
    """The param group of an optimizer with its default options."""
    return cls([torch.zeros(1)]).param_groups[0]  # type: ignore[call-arg, arg-type]


def rows(cls: type[RuleOptimizer]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    group = default_group(cls)
    counted = "always" if cls.rule_for(group).counts_steps else "with `stochastic_rounding=True`"
    yield "`step`", "scalar", "float32" if cls.step_is_tensor else "Python number", "0", counted
    for kept, when in all_state(cls, group):
        shape = "one per row" if kept.per_row else "one per element"
        dtype = str(kept.dtype or "the parameter's, at least float32").replace("torch.", "")
        start = f"`{kept.initial}`" if isinstance(kept.initial, str) else f"{kept.initial:g}"
        yield f"`{kept.name}`", shape, dtype, start, when


def all_state(cls: type[RuleOptimizer], group: dict[str, Any]) -> Iterator[tuple[StateSpec, str]]:
    """Each tensor that it may keep, and when."""
    always = cls.rule_for(group).state
    yield from ((kept, "always") for kept in always)
    for name, (value, words) in ADDING_STATE.items():
        if name in group or name in cls.group_options:
            for kept in cls.rule_for({**group, name: value}).state:
                if kept not in always:
                    yield kept, f"with {words}"


def overview() -> Iterator[tuple[str, ...]]:
    """Every class with the first line of its docstring and its state."""
    yield "optimizer", "in one line", "state by default"
    for cls in OPTIMIZERS:
        page = f"{cls.__module__.rpartition('.')[2]}.md"
        line = (cls.__doc__ or "").partition("\n")[0].replace("``", "`")
        state = [
            f"`{kept.name}`{' per row' if kept.per_row else ''}"
            for kept in cls.rule_for(default_group(cls)).state
        ]
        yield f"[{cls.__name__}]({page})", line, ", ".join(state) or "none"


def state_size() -> Iterator[tuple[str, ...]]:
    """State values per element and per row, by class; then the options that add to them."""
    yield "", "state per element", "state per row", f"{ROWS:,} x {DIM}"
    by_default: dict[tuple[int, int], list[str]] = {}
    added: dict[tuple[str, int, int], list[str]] = {}
    for cls in OPTIMIZERS:
        group = default_group(cls)
        always = cls.rule_for(group).state
        by_default.setdefault(_sizes(always), []).append(cls.__name__)
        options: dict[str, list[StateSpec]] = {}
        for kept, when in all_state(cls, group):
            if when != "always":
                options.setdefault(when, []).append(kept)
        for when, more in options.items():
            added.setdefault((when, *_sizes(more)), []).append(cls.__name__)
    for (elements, rows_), names in sorted(by_default.items()):
        yield ", ".join(names), *_cells(elements, rows_, "")
    for (when, elements, rows_), names in added.items():
        yield f"{', '.join(names)} {when}", *_cells(elements, rows_, "+ ")


def _sizes(state: Any) -> tuple[int, int]:
    per_row = sum(kept.per_row for kept in state)
    return len(state) - per_row, per_row


def _cells(elements: int, per_row: int, sign: str) -> tuple[str, str, str]:
    megabytes = 4 * ROWS * (elements * DIM + per_row) // 10**6
    cells = (f"{sign}{n}" if n else "" for n in (elements, per_row))
    return *cells, f"{sign}{megabytes} MB"


def weight_decay() -> Iterator[tuple[str, ...]]:
    """Which decay each class has."""
    yield "", "coupled", "decoupled"
    kinds: dict[tuple[str, str], list[str]] = {}
    for cls in OPTIMIZERS:
        options = inspect.signature(cls).parameters
        if "weight_decay" not in options:
            cells = ("none", "none")
        elif "decoupled_weight_decay" not in options:
            cells = ("", "always")
        elif options["decoupled_weight_decay"].default:
            cells = ("", "default")
        else:
            cells = ("default", "`decoupled_weight_decay=True`")
        kinds.setdefault(cells, []).append(cls.__name__)
    for cells, names in sorted(kinds.items(), key=lambda item: item[0][0] == "none"):
        yield ", ".join(names), *cells


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "overview": overview,
    "state-size": state_size,
    "weight-decay": weight_decay,
}


def markdown(lines: list[tuple[str, ...]]) -> list[str]:
    """A table, its head first."""
    head, *body = lines
    return [f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *body)]


class _Generated(SphinxDirective):
    """Parses the Markdown that it makes."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of the text."""
        where = nodes.container()
        self.state.nested_parse(StringList(self.text(), source=self.env.docname), 0, where)
        return list(where.children)

    def text(self) -> list[str]:
        """The lines to parse."""
        raise NotImplementedError


class OptimizerPage(_Generated):
    """``{optimizer} AdamW``: the reference of a class, and what it keeps for each parameter."""

    def text(self) -> list[str]:
        """The body of the page."""
        cls = getattr(sparsestep, self.arguments[0])
        function = f"{cls.__module__.rpartition('.')[2]}_"
        return [
            *(
                "```{eval-rst}",
                f".. autoclass:: sparsestep.{cls.__name__}",
                ".. rubric:: State",
                "```",
            ),
            *("", *markdown([HEAD, *rows(cls)]), ""),
            "The methods are those of every optimizer: see "
            "[the common methods](index.md#common-methods). The function for gradients "
            f"that you pass yourself is {{func}}`sparsestep.functional.{function}`.",
        ]


class OptimizerTable(_Generated):
    """``{optimizer-table} NAME``: a table of all optimizers."""

    def text(self) -> list[str]:
        """The table."""
        return markdown(list(TABLES[self.arguments[0]]()))


class FunctionalOptimizers(_Generated):
    """``{functional-optimizers}``: the reference of all functional optimizers."""

    required_arguments = 0

    def text(self) -> list[str]:
        """Members once, since they are the same for all."""
        first, *others = (f".. autoclass:: sparsestep.Functional{c.__name__}" for c in OPTIMIZERS)
        members = ["   :members:", "   :inherited-members:", ""]
        return ["```{eval-rst}", first, *members, *others, "```"]


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("optimizer", OptimizerPage)
    app.add_directive("optimizer-table", OptimizerTable)
    app.add_directive("functional-optimizers", FunctionalOptimizers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
