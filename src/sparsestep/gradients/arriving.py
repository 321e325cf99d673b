"""Gradients that are still elsewhere: other processes have them until somebody needs them.

Whoever reads gradients calls ``arrive`` first. It costs nothing where no parameter is shared with
other processes. What a parameter's gradient is until then has ``Pending`` parts: autograd adds them
up and numbers scale them like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsestep.errors import InputError, sentence


class Source(Protocol):
    """Who has the gradients of some parameters that are still elsewhere.

    Attributes:
        number: in the order in which sources were made, which is that of all processes.
    """

    number: int

    def arrive(self) -> None:
        """Bring them here; all processes call it."""
        ...

    def is_divided(self, param: Tensor) -> bool:
        """Whether other processes have other rows of the parameter; if not, they have a copy."""
        ...

    def total(self, value: Tensor, order: float) -> Tensor:
        """The norm of what all processes have the norms of; all processes call it."""
        ...


class Pending(NamedTuple):
    """A part of a gradient that is still to be sent to the process that has the rows.

    Attributes:
        ticket: of the look-up that it belongs to; the source knows it.
        values: the gradient of the rows that were looked up.
    """

    ticket: Any
    values: Tensor


# References to the sources, by parameter. Neither is kept alive: a source knows its parameters.
# Where there are none, a step does not even call ``arrive``.
elsewhere = WeakTensorKeyDictionary()


def register(param: Tensor, source: Source) -> None:
    """Have the gradient of a parameter arrive from a source."""
    elsewhere[param] = ref(source, _purge)


def _purge(dead: ref[Source]) -> None:
    """Forget the parameters of a source that is no more."""
    if elsewhere:
        for param in [param for param, source in elsewhere.items() if source is dead]:
            del elsewhere[param]


def source_of(param: Tensor) -> Source | None:
    """Where the gradient of a parameter arrives from; ``None`` of an ordinary one."""
    found = elsewhere.get(param) if elsewhere else None
    return None if found is None else found()


def sources_of(params: Iterable[Tensor]) -> list[Source]:
    """Where the gradients of parameters arrive from, in the order of all processes."""
    if not elsewhere:
        return []
    found = {id(source): source for param in params if (source := source_of(param)) is not None}
    return sorted(found.values(), key=lambda source: source.number)


def arrive(params: Iterable[Tensor]) -> None:
    """Bring the gradients here that are still elsewhere; all processes call it.

    Example:
        >>> import torch
        >>> arrive([torch.zeros(3)])  # nothing is elsewhere
    """
    for source in sources_of(params):
        source.arrive()


class _Held(Protocol):
    @property
    def param(self) -> Tensor: ...


Held = TypeVar("Held", bound=_Held)


def norm_of_all(
    held: Sequence[Held],
    sources: Sequence[Source],
    order: float,
    norm: Callable[[Sequence[Held]], Tensor],
) -> Tensor:
    """The norm of gradients of which other processes have other rows; what is copied counts once.

    Args:
        held: the gradients that are here.
        sources: those of the parameters; all processes have the same.
        order: of the norm.
        norm: that of some gradients, at least one.
    """
    if not sources:
        return norm(held)
    totals, rest = [], list(held)
    for source in sources:
        divided = [each for each in rest if source.is_divided(each.param)]
        rest = [each for each in rest if not source.is_divided(each.param)]
        totals.append(source.total(norm(divided) if divided else torch.zeros(()), order))
    if rest:
        totals.append(norm(rest).to("cpu", torch.float64))
    total: Tensor = torch.linalg.vector_norm(torch.stack(totals), order)
    return total


def not_yet() -> InputError:
    """Say that a gradient was read that is still elsewhere."""
    contract = "the gradient of a sharded table must have been exchanged before it is read"
    remedy = "optimizer.step() and sparsestep.clip_grad_norm_ do so: call these first"
    return InputError(sentence(contract, "one that is still on its way", remedy))
