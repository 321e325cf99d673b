"""A step on 1,000,000 x 64 with 65,536 lookups, after which the rows it has updated have norm 1.

Torch's operations normalize the whole table after the step, or the rows that were looked up;
``normalize=True`` does it in the step. A step without a constraint is the floor. All start from
normalized rows, and must end with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import normalize

import sparsestep
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import uniform_coo_grads

ROWS, DIM, LOOKUPS = 1_000_000, 64, 65_536


class Constrained(Stepping):
    """A step, then torch's operations on all rows, on those of the gradient, or on none."""

    def __init__(
        self, grads: list[list[Tensor]], unique: list[Tensor], which: str, **options: Any
    ) -> None:
        param = Parameter(normalize(torch.ones(ROWS, DIM)))
        super().__init__(sparsestep.SparseAdam([param], lr=1e-3, **options), [param], grads)
        self._which = which
        self._unique = unique

    def before(self, number: int, /) -> None:
        """Also find the rows of the gradient; not timed, in favor of normalizing them by hand."""
        super().before(number)
        self._rows = self._unique[number]

    def step(self) -> None:
        """The step, and the constraint."""
        super().step()
        param = self.params[0]
        if self._which == "none":
            return
        with torch.no_grad():
            if self._which == "all":
                normalize(param, out=param)
            else:
                param[self._rows] = normalize(param[self._rows])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 40)
    rounds = parser.parse_args(arguments).rounds
    grads = [[grad] for grad in uniform_coo_grads(ROWS, DIM, LOOKUPS)]
    unique = [torch.unique(grad.coalesce().indices()) for (grad,) in grads]
    racers = {
        "step, then the whole table": Constrained(grads, unique, "all"),
        "step, then the rows of the gradient": Constrained(grads, unique, "rows"),
        "normalize=True": Constrained(grads, unique, "none", normalize=True),
        "step alone": Constrained(grads, unique, "none"),
    }
    times = dict(zip(racers, medians(list(racers.values()), rounds), strict=True))
    ours = times["normalize=True"]
    for name, milliseconds in times.items():
        print(f"{name}: {milliseconds:.2f} ms, {milliseconds / ours:.2f} x normalize=True")
    for name, racer in racers.items():
        norms = racer.params[0].detach().norm(dim=1)
        assert name == "step alone" or torch.allclose(norms, torch.ones(ROWS)), name


if __name__ == "__main__":
    main()
