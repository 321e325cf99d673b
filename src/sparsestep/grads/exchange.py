"""Gradients of sharded parameters, which are exchanged with other processes when needed.

Code that reads gradients calls ``exchange_grads`` first, which costs nothing if no table is
sharded. Until then, the gradient has ``PendingGrad`` parts, which autograd adds up and numbers
scale like any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep._torch import foreach_unscale_, without_torch_function
from sparsestep.errors import InputError, message

if TYPE_CHECKING:
    from sparsestep.distributed.grads import ExchangedGrads, ShardedGradSource

Facts = Mapping[str, str]


class PendingGrad(NamedTuple):
    """A part of a gradient that has not been sent to the owner of the rows yet."""

    handle: Any  # of the lookup; the source knows it
    values: Tensor  # the gradient of the rows that were looked up


class _Registration(NamedTuple):
    """References to a parameter and to its source, which keeps it alive."""

    param: ref[Tensor]
    source: ref[ShardedGradSource]


# By the id of the parameter. An empty dict is a cheap test whether any parameter is sharded.
grad_sources: dict[int, _Registration] = {}


def register(param: Tensor, source: ShardedGradSource) -> None:
    """Let a source exchange the gradient of a parameter."""
    grad_sources[id(param)] = _Registration(ref(param), ref(source, _purge))


def _purge(dead: ref[ShardedGradSource]) -> None:
    """Remove the parameters of a source that was deleted."""
    for number, each in list(grad_sources.items()):
        if each.source is dead:
            grad_sources.pop(number, None)


def source_of(param: Tensor) -> ShardedGradSource | None:
    """The gradient source of a parameter; ``None`` for an ordinary one."""
    found = grad_sources.get(id(param))
    return None if found is None or found.param() is not param else found.source()


def sources_of(params: Iterable[Tensor]) -> list[ShardedGradSource]:
    """The gradient sources of parameters, in the order of all processes."""
    if not grad_sources:
        return []
    return _sort_sources(map(source_of, params))


def _sort_sources(sources: Iterable[ShardedGradSource | None]) -> list[ShardedGradSource]:
    found = {id(source): source for source in sources if source is not None}
    return sorted(found.values(), key=lambda source: source.index)


class GradExchange:
    """An exchange of gradients that is undone unless all processes agree to use it.

    A process with an error still takes part in the exchanges that follow: no other waits for it.
    An exchange that raises does so in all processes of its source, and is over. ``facts`` returns
    values that must be the same in all processes of a source.

    ``prepare`` prepares the use of the gradients, such as a step. It is called before the exchange
    if this process has nothing to send: if no other has either, the exchange has also been the
    agreement.
    """

    def __init__(
        self,
        sources: Sequence[ShardedGradSource],
        facts: Callable[[ShardedGradSource], Facts],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._undos: list[ExchangedGrads] = []
        self._exchanged: list[tuple[ShardedGradSource, ExchangedGrads]] = []
        self.error: BaseException | None = None  # the first one
        skipped = self._skip(sources[0], prepare) if prepare and len(sources) == 1 else None
        for source in sources:
            try:
                result = source.exchange_grads(facts(source), self.error, skipped)
                self._undos.append(result)
                self._exchanged.append((source, result))
                self.error = self.error or result.error
            except BaseException as raised:
                self._fail(source, raised)

    def _skip(
        self, source: ShardedGradSource, prepare: Callable[[], None]
    ) -> ExchangedGrads | None:
        skipped: ExchangedGrads | None = None
        try:
            skipped = source.skip_exchange()
            if skipped is not None:
                self._undos.append(skipped)
                prepare()
        except BaseException as raised:
            self.error = raised
        return skipped

    @property
    def is_agreed(self) -> bool:
        """Whether all processes were ready before the exchange, which had nothing to send."""
        return bool(self._exchanged) and all(result.is_agreed for _, result in self._exchanged)

    def agree(
        self, error: BaseException | None = None, values: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Raise in every process if one has an error; then no gradient has been exchanged.

        With a value for each source, returns the values of all processes, for each source.
        """
        self.error = self.error or error
        found: list[Tensor] = []
        for n, (source, result) in enumerate(self._exchanged):
            if result.is_agreed:
                continue
            try:
                found.append(source.agree(self.error, values[n] if values else None))
            except BaseException as raised:
                self._fail(source, raised)
        if self.error is not None:
            self._undo()
            raise self.error
        return found

    def _fail(self, source: ShardedGradSource, error: BaseException) -> None:
        self.error = self.error or error
        if source.is_lost:
            self._undo()
            raise error

    def _undo(self) -> None:
        for each in reversed(self._undos):
            each.undo()


def exchange_grads(params: Iterable[Tensor], reader: str = "reads gradients") -> None:
    """Exchange the pending gradients of parameters; all processes call it, for the same reader."""
    sources = sources_of(params)
    if sources:
        # A process that stops in the middle of an exchange keeps the others waiting.
        uninterrupted(lambda: GradExchange(sources, lambda _: {"caller": reader}).agree())


class UnscaledValues(Tensor):
    """Values of a sharded gradient, for a GradScaler.

    If it finds an infinity in one process, all processes must skip the step.
    """

    source: ref[ShardedGradSource]

    @staticmethod
    def of(values: Tensor, source: ref[ShardedGradSource]) -> Tensor:
        """The same values, of a gradient that came from there."""
        made = values.as_subclass(UnscaledValues)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not foreach_unscale_:
            return super().__torch_function__(func, types, args, kwargs or {})
        values, found_inf, scale = args
        refs = {each.source for each in values if isinstance(each, UnscaledValues)}
        with without_torch_function():
            func([each.as_subclass(Tensor) for each in values], found_inf, scale)
            for source in _sort_sources(each() for each in refs):
                norm = partial(source.all_ranks_norm, found_inf, math.inf)
                found_inf.copy_(uninterrupted(norm))
        return None


def dense_grad_error() -> InputError:
    """The error for a loss that uses a sharded weight other than by lookups."""
    requirement = (
        "a sharded table must only be used in lookups: other ranks hold parts of its gradient"
    )
    remedy = "For a penalty on all rows, use the optimizer's weight_decay"
    return InputError(message(requirement, "a dense gradient to be added to it", remedy))


def exchange_grad_of(grad: Tensor) -> None:
    """Exchange a gradient that is being read; all processes do."""
    for each in list(grad_sources.values()):
        param = each.param()
        if param is not None and param.grad is grad:
            exchange_grads([param])
            return
    requirement = "the gradient of a sharded table must be exchanged before you read it"
    remedy = "Call optimizer.step() or sparsestep.clip_grad_norm_ first"
    raise InputError(message(requirement, "a copy of one that is not exchanged yet", remedy))
