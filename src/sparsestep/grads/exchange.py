"""Gradients that are still in other processes, until they are needed.

Code that reads gradients calls ``arrive`` first, which costs nothing if no table is sharded. Until
then, the gradient has ``Pending`` parts, which autograd adds up and numbers scale like any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsestep._torch import foreach_unscale_, stack, without_torch_function
from sparsestep.errors import InputError, message

Facts = Mapping[str, str]


class Arrival(Protocol):
    """Gradients that have come, and may be given back until all processes agree.

    Attributes:
        error: why this process could not use what has come.
    """

    error: BaseException | None

    def undo(self) -> None:
        """Let parameters have the gradients that they had before."""
        ...


class Source(Protocol):
    """Who has the gradients of some parameters that are still elsewhere.

    Attributes:
        index: in the order in which sources were made, which is that of all processes.
    """

    index: int

    @property
    def is_lost(self) -> bool:
        """Whether other processes cannot be reached any more."""
        ...

    def exchange_grads(self, facts: Facts, error: BaseException | None) -> Arrival:
        """Bring them here; all processes call it.

        Args:
            facts: what must be the same in all processes.
            error: why this process refuses; then all raise.
        """
        ...

    def agree(self, error: BaseException | None) -> None:
        """Raise in every process if one has an error; all processes call it."""
        ...

    def name_of(self, param: Tensor) -> str | None:
        """What messages call a parameter; ``None`` if it is not one of this source's."""
        ...

    def is_divided(self, param: Tensor) -> bool:
        """Whether other processes have other rows of the parameter; if not, they have a copy."""
        ...

    def dealt(self, param: Tensor) -> tuple[int, int]:
        """How many rows of the whole there are to each that is here, and which is the first."""
        ...

    def total(self, value: Tensor, order: float) -> Tensor:
        """The norm of what all processes have the norms of; all processes call it."""
        ...


class Pending(NamedTuple):
    """A part of a gradient that is still to be sent to the process that has the rows.

    Attributes:
        ticket: of the lookup that it belongs to; the source knows it.
        values: the gradient of the rows that were looked up.
    """

    ticket: Any
    values: Tensor


# References to the sources, by parameter. Neither is kept alive: a source knows its parameters.
# Where there are none, a step does not even call ``arrive``.
_sources: Any = WeakTensorKeyDictionary()
# What it has inside: a dict says at once, and in every step, whether there is anything.
elsewhere: dict[Any, Any] = _sources.data


def register(param: Tensor, source: Source) -> None:
    """Have the gradient of a parameter arrive from a source."""
    _sources[param] = ref(source, _purge)


def _purge(dead: ref[Source]) -> None:
    """Forget the parameters of a source that is no more."""
    if elsewhere:
        for param in [param for param, source in _sources.items() if source is dead]:
            del _sources[param]


def source_of(param: Tensor) -> Source | None:
    """Where the gradient of a parameter arrives from; ``None`` of an ordinary one."""
    found = _sources.get(param) if elsewhere else None
    return None if found is None else found()


def sources_of(params: Iterable[Tensor]) -> list[Source]:
    """Where the gradients of parameters arrive from, in the order of all processes."""
    if not elsewhere:
        return []
    return _in_order(map(source_of, params))


def _in_order(sources: Iterable[Source | None]) -> list[Source]:
    found = {id(source): source for source in sources if source is not None}
    return sorted(found.values(), key=lambda source: source.index)


class GradExchange:
    """An exchange of gradients that counts only if all processes agree on what follows.

    A process with an error still takes part in the exchanges that follow: then nobody waits for it.
    An exchange that raises does so in all processes of its source, and is over.

    Args:
        sources: of the gradients.
        facts: returns what must be the same in all processes of a source.
    """

    def __init__(self, sources: Sequence[Source], facts: Callable[[Source], Facts]) -> None:
        self._exchanged: list[tuple[Source, Arrival]] = []
        self._error: BaseException | None = None
        for source in sources:
            try:
                arrival = source.exchange_grads(facts(source), self._error)
                self._exchanged.append((source, arrival))
                self._error = self._error or arrival.error
            except BaseException as raised:
                self._fail(source, raised)

    def agree(self, error: BaseException | None = None) -> None:
        """Raise in every process if one has an error; then no gradient has been exchanged.

        Args:
            error: of this process.
        """
        self._error = self._error or error
        for source, _ in self._exchanged:
            try:
                source.agree(self._error)
            except BaseException as raised:
                self._fail(source, raised)
        if self._error is not None:
            self._undo()
            raise self._error

    @property
    def error(self) -> BaseException | None:
        """What has gone wrong so far."""
        return self._error

    def _fail(self, source: Source, error: BaseException) -> None:
        self._error = self._error or error
        if source.is_lost:
            self._undo()
            raise error

    def _undo(self) -> None:
        for _, arrival in self._exchanged:
            arrival.undo()


def arrive(params: Iterable[Tensor], reader: str = "reads gradients") -> None:
    """Bring the gradients here that are still elsewhere; all processes call it.

    Args:
        params: the parameters.
        reader: what needs them; the same in all processes.

    Example:
        >>> import torch
        >>> arrive([torch.zeros(3)])  # nothing is elsewhere
    """
    sources = sources_of(params)
    if sources:
        GradExchange(sources, lambda _: {"caller": reader}).agree()


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
    total: Tensor = torch.linalg.vector_norm(stack(totals), order)
    return total


class Unscaled(Tensor):
    """Values of a sharded gradient, as a GradScaler asks for them.

    It looks for infinities in them and skips the step where it finds any: then all processes must.
    """

    _source: ref[Source]

    @staticmethod
    def of(values: Tensor, source: ref[Source]) -> Tensor:
        """The same values, of a gradient that came from there."""
        made = values.as_subclass(Unscaled)
        made._source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not foreach_unscale_:
            return super().__torch_function__(func, types, args, kwargs or {})
        values, found_inf, scale = args
        refs = {each._source for each in values if isinstance(each, Unscaled)}
        with without_torch_function():
            func([each.as_subclass(Tensor) for each in values], found_inf, scale)
            for source in _in_order(each() for each in refs):
                found_inf.copy_(source.total(found_inf, math.inf))
        return None


def read_otherwise() -> InputError:
    """Say that a loss has a sharded weight in it by other ways than lookups."""
    requirement = (
        "a sharded table must only be used in lookups: other ranks hold parts of its gradient"
    )
    remedy = "For a penalty on all rows, use the optimizer's weight_decay"
    return InputError(message(requirement, "a dense gradient to be added to it", remedy))


def summon(grad: Tensor) -> None:
    """Bring a gradient here that somebody reads; all processes do."""
    for param in list(_sources):
        if param.grad is grad:
            arrive([param])
            return
    requirement = "the gradient of a sharded table must be exchanged before you read it"
    remedy = "Call optimizer.step() or sparsestep.clip_grad_norm_ first"
    raise InputError(message(requirement, "a copy of one that is not exchanged yet", remedy))
