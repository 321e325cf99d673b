"""The table of an optimizer's state, from the class: ``{optimizer-state} AdamW``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import State

# Options that make an optimizer keep more, a value that does it, and how the table says so.
ADDING_STATE = {
    "amsgrad": (True, "`amsgrad=True`"),
    "momentum": (0.9, "`momentum` is not 0"),
    "centered": (True, "`centered=True`"),
    "bias_correction": ("per_row", '`bias_correction="per_row"`'),
}
HEAD = ("name", "shape", "dtype", "initial value", "present")


def rows(cls: type[RuleOptimizer]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    group: dict[str, Any] = cls([torch.zeros(1)]).param_groups[0]  # type: ignore[call-arg, arg-type]
    counted = "always" if cls.rule_for(group).counts else "with `stochastic_rounding=True`"
    yield "`step`", "scalar", "float32" if cls.step_is_tensor else "Python number", "0", counted
    for kept, when in all_state(cls, group):
        shape = "one per row" if kept.per_row else "one per element"
        dtype = str(kept.dtype or "the parameter's, at least float32").replace("torch.", "")
        start = f"`{kept.initial}`" if isinstance(kept.initial, str) else f"{kept.initial:g}"
        yield f"`{kept.name}`", shape, dtype, start, when


def all_state(cls: type[RuleOptimizer], group: dict[str, Any]) -> Iterator[tuple[State, str]]:
    """Each tensor that it may keep, and when."""
    always = cls.rule_for(group).state
    yield from ((kept, "always") for kept in always)
    for name, (value, words) in ADDING_STATE.items():
        if name in group or name in cls.group_options:
            for kept in cls.rule_for({**group, name: value}).state:
                if kept not in always:
                    yield kept, f"with {words}"


class OptimizerState(SphinxDirective):
    """``{optimizer-state} AdamW``: what the optimizer keeps for each parameter."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table, from Markdown."""
        cls = getattr(sparsestep, self.arguments[0])
        lines = [HEAD, ("---",) * len(HEAD), *rows(cls)]
        text = [f"| {' | '.join(line)} |" for line in lines]
        where = nodes.container()
        self.state.nested_parse(StringList(text, source=self.env.docname), 0, where)
        return list(where.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("optimizer-state", OptimizerState)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
