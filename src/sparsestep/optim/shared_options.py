"""Options of an optimizer that all ranks which share its tables must have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsestep.grads.exchange import Source
from sparsestep.optim.records import StateKeeper

# A mask belongs to the rows of a rank; the others say how torch's kernels run.
_LOCAL = {"mask", "foreach", "fused", "capturable", "differentiable"}


def facts_for(optimizer: StateKeeper, source: Source) -> dict[str, str]:
    """Describe how an optimizer trains the tables of a source, for comparison across ranks.

    Param groups without such a table do not count: a rank may have parameters of its own.
    """
    facts = {"caller": f"{type(optimizer).__name__}.step()", "semantics": optimizer.semantics}
    named = [list(filter(None, map(source.name_of, g["params"]))) for g in optimizer.param_groups]
    facts["param groups"] = "; ".join(", ".join(names) for names in named if names)
    for group, names in zip(optimizer.param_groups, named, strict=True):
        if not names:
            continue
        whose = names[0] if len(names) == 1 else f"the group of {names[0]}"
        for option in (*optimizer.option_names, *optimizer.group_options):
            if option in group and option not in _LOCAL:
                facts[f"{option} for {whose}"] = str(_plain(group[option]))
    return facts


def _plain(value: Any) -> Any:
    """An option without tensors: what a tensor prints depends on its dtype and device."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else value
