"""Functional optimizers: gradients are passed to ``step``, from any number of threads.

They keep the state, like optimizers, but never read ``param.grad``: you pass the gradients. Updates
of the same parameter wait for each other, and none is lost; different parameters are updated in
parallel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, ClassVar, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from sparsestep._torch import disable_compiler
from sparsestep.errors import InputError, counted, sentence
from sparsestep.grads.layouts import Gradient
from sparsestep.locks import fork_safe_lock
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.step import Plan

P = ParamSpec("P")
Constructor = Callable[..., None]


def takes(
    optimizer: Callable[P, RuleOptimizer],
) -> Callable[[Constructor], Callable[Concatenate[Any, P], None]]:
    """Let type checkers see a constructor with the arguments of an optimizer class."""
    return lambda constructor: constructor


class FunctionalOptimizer:
    """Base of the functional optimizers; a subclass names the optimizer that does the work.

    Example:
        >>> import torch, sparsestep
        >>> weight = torch.zeros(5, 2)
        >>> optimizer = sparsestep.FunctionalSGD([weight], lr=0.5)
        >>> optimizer.step([sparsestep.Touched(torch.tensor([3]), torch.ones(1, 2))])
        >>> optimizer.step_param(weight, torch.eye(5, 2).to_sparse_coo())
        >>> weight.tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """

    optimizer_class: ClassVar[type[RuleOptimizer]]
    # The options that may be given by position, in the order that torch's functional class has.
    positional: ClassVar[tuple[str, ...]] = ("lr",)
    # Those that only torch's class has, and the value that means what is done here.
    only_in_torch: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Iterable[Tensor], *args: Any, **options: Any) -> None:
        name = type(self).__name__
        places = (*self.positional, "_allow_empty_param_list")
        if len(args) > len(places):
            most = len(places)
            raise TypeError(f"{name}() takes at most {most} options by position, got {len(args)}")
        for key, value in zip(places, args, strict=False):
            if key in options:
                raise TypeError(f"{name}() got multiple values for argument {key!r}")
            options[key] = value
        for key, usual in self.only_in_torch.items():
            value = options.pop(key, usual)
            if value != usual:
                contract = f"{name}: {key} is an option of torch's class only and must be {usual}"
                raise InputError(sentence(contract, value, "Leave it out"))
        may_be_empty = options.pop("_allow_empty_param_list", False)
        params = list(params)
        if not params and not may_be_empty:
            raise InputError(f"{name}: optimizer got an empty parameter list.")
        self._optimizer = self.optimizer_class([{"params": params}], **options)
        self._prepare()

    def _prepare(self) -> None:
        self._adding = fork_safe_lock()  # is taken before the lock of any parameter
        self._locks: dict[int, RLock] = {}
        self._places: dict[int, int] = {}

    @property
    def param_group(self) -> dict[str, Any]:
        """The parameters and the options, which you may change between steps."""
        return self._optimizer.param_groups[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that were passed to the constructor."""
        return self._optimizer.defaults

    @property
    def state(self) -> Any:
        """The state of each parameter, under torch's names."""
        return self._optimizer.state

    def step(self, gradients: Sequence[Gradient | None]) -> None:
        """Update all parameters whose gradient is not ``None``, or raise and update none.

        Args:
            gradients: one for each parameter, in any layout, or ``None``.

        Raises:
            InputError: a gradient is invalid, or there are more or fewer of them than parameters.
        """
        if torch.compiler.is_compiling():
            _uncompiled_step(self, gradients)
            return
        with self._adding:  # not while one is on trial
            params = list(self.param_group["params"])
        gradients = list(gradients)
        if len(params) != len(gradients):
            raise InputError(
                f"{type(self).__name__}: expected {counted(len(params), 'gradient')}, got "
                f"{len(gradients)}. Pass None for a parameter without a gradient."
            )
        targets = [param for param, grad in zip(params, gradients, strict=True) if grad is not None]
        with self._alone_with(targets):
            step = Plan(self._optimizer)
            step.add_group(0, self.param_group, grads=gradients)
            step.run()
            self._optimizer._updates += 1
            for _, index in step.repeats:  # a parameter that was given more than once
                self._update(index, gradients[index])

    def step_param(self, param: Tensor, grad: Gradient | None) -> None:
        """Update one parameter. A new parameter is added.

        Args:
            param: the parameter.
            grad: its gradient, in any layout, or ``None``.

        Raises:
            InputError: the gradient is invalid; nothing has changed.
        """
        if torch.compiler.is_compiling():
            _uncompiled_step_param(self, param, grad)
            return
        if self._place_of(param) is None and self._take_on(param, grad):
            return
        if grad is not None:
            with self._lock_of(id(param)):
                place = self._place_of(param)
                assert place is not None
                self._update(place, grad)

    def _place_of(self, param: Tensor) -> int | None:
        """Its number in the group, which others may have changed meanwhile."""
        params = self.param_group["params"]
        place = self._places.get(id(param))
        if place is not None and place < len(params) and params[place] is param:
            return place
        found = next((i for i, known in enumerate(params) if known is param), None)
        if found is not None:
            self._places[id(param)] = found
        return found

    def _lock_of(self, key: int) -> RLock:
        return self._locks.get(key) or self._locks.setdefault(key, fork_safe_lock())

    def _update(self, index: int, grad: Gradient | None) -> None:
        if torch.compiler.is_compiling():  # it may look here without having looked at step_param
            _uncompiled_update(self, index, grad)
            return
        step = Plan(self._optimizer)
        step.add_group(0, self.param_group, only=index, grads=[grad])
        step.run()
        self._optimizer._updates += 1

    def _take_on(self, param: Tensor, grad: Gradient | None) -> bool:
        """Add a parameter, with its first step; false if another thread has added it meanwhile."""
        with self._adding:
            if self._place_of(param) is not None:
                return False
            group = self.param_group
            self._check_new(param, group)
            params, names = group["params"], group.get("param_names")
            index = len(params)
            params.append(param)
            if names is not None:
                names.append(f"param {index}")
            try:
                self._update(index, grad)
            except Exception:  # then nobody has heard of it yet
                del params[index:]
                if names is not None:
                    del names[index:]
                self._optimizer._known.pop(id(param), None)
                self._optimizer._clocks.pop(id(param), None)
                raise
            return True

    def _check_new(self, param: Any, group: dict[str, Any]) -> None:
        try:
            if not isinstance(param, Tensor):
                raise InputError(sentence("a parameter must be a tensor", type(param).__name__))
            if group.get("mask") is not None:
                contract = "with a mask, all parameters must be known from the start"
                raise InputError(sentence(contract, "a new one", "Pass it to the constructor"))
            self._optimizer._check_params(0, {**group, "params": [param]})
        except InputError as error:
            raise InputError(f"{type(self).__name__}: {error}") from None

    @contextmanager
    def _alone_with(self, params: list[Tensor]) -> Iterator[None]:
        """Hold the locks of several parameters, always taken in the same order."""
        with ExitStack() as stack:
            for key in sorted({id(param) for param in params}):
                stack.enter_context(self._lock_of(key))
            yield

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date that are behind under ``semantics="dense"``."""
        targets = self.param_group["params"] if param is None else [param]
        with self._alone_with(targets):
            self._optimizer.catch_up(param, rows)

    def forget(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of rows, like ``forget`` of the optimizer of the same name."""
        with self._alone_with([param]):
            self._optimizer.forget(param, rows)

    def state_dict(self) -> StateDict:
        """The state dict of the optimizer of the same name."""
        with self._adding, self._alone_with(self.param_group["params"]):
            return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class, of the optimizer of the same name, or of torch's."""
        with self._adding, self._alone_with(self.param_group["params"]):
            self._optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._optimizer = state["optimizer"]
        self._prepare()

    def __repr__(self) -> str:
        return repr(self._optimizer).replace(type(self._optimizer).__name__, type(self).__name__, 1)


# What is to run as it is when torch.compile comes across it.
_uncompiled_step = disable_compiler(FunctionalOptimizer.step)
_uncompiled_step_param = disable_compiler(FunctionalOptimizer.step_param)
_uncompiled_update = disable_compiler(FunctionalOptimizer._update)


def signature_of(cls: type[FunctionalOptimizer]) -> inspect.Signature:
    """What the constructor takes: by position what torch's functional class does, then by name."""
    by_place, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = dict(inspect.signature(cls.optimizer_class, eval_str=True).parameters)
    for key, usual in cls.only_in_torch.items():
        known[key] = inspect.Parameter(key, by_place, default=usual, annotation=type(usual))
    key = "_allow_empty_param_list"
    known[key] = inspect.Parameter(key, by_place, default=False, annotation=bool)
    params = known.pop("params").replace(annotation=Iterable[Tensor])
    placed = [known.pop(key).replace(kind=by_place) for key in (*cls.positional, key)]
    named = [each.replace(kind=by_name) for each in known.values()]
    itself = inspect.Parameter("self", by_place)
    return inspect.Signature([itself, params, *placed, *named], return_annotation=None)
