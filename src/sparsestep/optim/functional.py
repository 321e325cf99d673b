"""Functional optimizers: gradients are passed to ``step``, from any number of threads.

They keep the state, like optimizers, but never read ``param.grad``: you pass the gradients. Updates
of the same parameter wait for each other, and none is lost; different parameters are updated in
parallel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from operator import index, methodcaller
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import StateDict

from sparsestep import engines
from sparsestep._process import fork_safe_lock
from sparsestep._torch import disable_compiler
from sparsestep.engines.base import GroupSettings, ParamUpdate
from sparsestep.engines.native import CachedPlan, apply_standard, replay_step
from sparsestep.errors import InputError, counted, error_prefix, message
from sparsestep.grads import masks
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import Gradient, indexed_grad, to_row_slots
from sparsestep.memory.mapped_file import mapped_files
from sparsestep.memory.mapped_file import written as note_written
from sparsestep.memory.tensors import COMPLEX_DTYPES, FLOAT_DTYPES, check_writable
from sparsestep.optim import state as states
from sparsestep.optim._signatures import with_args
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.param_groups import is_immutable
from sparsestep.optim.step import Step, engine_views, reserve_checked, to_local
from sparsestep.rules import options
from sparsestep.rules.rule import Rule, rules_by_key

if TYPE_CHECKING:
    from sparsestep._C import _NativeGroup as NativeGroup

_SCHEMA = (
    "(str who, str rule, Tensor(a!) param, Tensor(b!)[] state, "
    "Tensor? indices, Tensor values, SymInt? num_slots, SymInt? slot_size, Tensor? value_index, "
    "Tensor? scale, Tensor? element_mask, SymInt step, Tensor? step_tensor, str names, "
    "float[] numbers, Tensor[] tensors, "
    "bool maximize, float weight_decay, bool decoupled_weight_decay, Tensor? mask, str engine, "
    "SymInt? seed) -> ()"
)

# The keywords of ``apply_``, in the order of the operation.
_OP_KEYWORDS: tuple[str, ...] = (
    "maximize",
    "weight_decay",
    "decoupled_weight_decay",
    "mask",
    "engine",
    "seed",
)


def _is_graph_safe(grad: Gradient) -> bool:
    """Whether a graph can hold a gradient; no graph holds a sparse tensor."""
    if isinstance(grad, IndexedGrad):
        return True
    return type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided


def _call_op(
    who: str,
    rule: Rule,
    param: Tensor,
    grad: Gradient,
    state: Sequence[Tensor | None],
    step: int | Tensor,
    hyperparams: dict[str, Any],
    **keywords: Any,
) -> None:
    """``apply_`` as the operation that a graph has."""
    gradient = grad if isinstance(grad, IndexedGrad) else IndexedGrad(None, grad)
    is_tensor = isinstance(step, Tensor)
    names, numbers, tensors = _flatten(hyperparams)
    torch.ops.sparsestep.apply_(
        *(who, rule.key, param, [tensor for tensor in state if tensor is not None]),
        *gradient,
        *((0, step) if is_tensor else (step, None)),
        *(names, numbers, tensors),
        *[keywords[name] for name in _OP_KEYWORDS],
    )


def _flatten(hyperparams: dict[str, Any]) -> tuple[str, list[float], list[Tensor]]:
    """Options as a graph can have them: ``"lr=tensor betas=2"``, numbers, tensors."""
    names: list[str] = []
    numbers: list[float] = []
    tensors: list[Tensor] = []
    for name, value in hyperparams.items():
        if isinstance(value, Tensor):
            names.append(f"{name}=tensor")
            tensors.append(value)
        elif type(value) in (tuple, list):  # a test that older compilers support
            names.append(f"{name}={len(value)}")
            numbers += [float(each) for each in value]
        else:
            names.append(f"{name}=1")
            numbers.append(float(value))
    return " ".join(names), numbers, tensors


def _unflatten(names: str, numbers: Sequence[float], tensors: Sequence[Tensor]) -> dict[str, Any]:
    left, others = iter(numbers), iter(tensors)
    hyperparams: dict[str, Any] = {}
    for each in names.split():
        name, kind = each.split("=")
        if kind in ("tensor", "1"):
            hyperparams[name] = next(others if kind == "tensor" else left)
        else:
            hyperparams[name] = tuple(islice(left, int(kind)))
    return hyperparams


def _run_op(who: str, rule: str, param: Tensor, state: list[Tensor], *rest: Any) -> None:
    gradient, (step, step_tensor, *packed) = IndexedGrad(*rest[:7]), rest[7:12]
    keywords = dict(zip(_OP_KEYWORDS, rest[12:], strict=True))
    step = step if step_tensor is None else step_tensor
    apply_(who, rules_by_key[rule], param, gradient, state, step, _unflatten(*packed), **keywords)


_operation = torch.library.custom_op(
    "sparsestep::apply_", _run_op, mutates_args=("param", "state"), schema=_SCHEMA
)
_operation.register_fake(lambda *arguments: None)


class FunctionOptions(TypedDict, total=False):
    """The keyword arguments that every function passes on to ``apply_``."""

    maximize: bool
    mask: Tensor | None
    engine: options.EngineName
    seed: int | None


def check_keywords(who: str, shared: Mapping[str, object]) -> None:
    """Refuse keyword arguments of ``apply_`` that a function without weight decay options lacks."""
    for name in shared:
        if name not in FunctionOptions.__annotations__:
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}")


class WeightDecay(TypedDict, total=False):
    """Both kinds of weight decay."""

    weight_decay: float
    decoupled_weight_decay: bool


class DecayOptions(FunctionOptions, WeightDecay, total=False):
    """The keyword arguments of a function with both kinds of weight decay."""


def apply_(
    who: str,
    rule: Rule,
    param: Tensor,
    grad: Gradient,
    state: Sequence[Tensor | None],
    step: int | Tensor,
    hyperparams: dict[str, Any],
    *,
    maximize: bool = False,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Tensor | None = None,
    engine: options.EngineName = "auto",
    seed: int | None = None,
) -> None:
    """Run any rule once over one parameter; the other functions of this module call it.

    Args:
        who: what error messages call the caller.
        rule: the rule.
        param: the parameter.
        grad: its gradient, in any layout.
        state: the state tensors, in the rule's order.
        step: the number of this update, counted from 1.
        hyperparams: the options of the rule's formula.
        maximize: maximize the objective instead of minimizing it.
        weight_decay: strength of the weight decay.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        mask: a bool tensor that selects the rows or elements to update.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; same results.
        seed: turns on stochastic rounding of half-precision tensors; use a new one for each step.

    Raises:
        InputError: an argument is invalid; nothing has changed.
    """
    if torch.compiler.is_compiling():
        run = _call_op if _is_graph_safe(grad) else _uncompiled
        kept = (maximize, weight_decay, decoupled_weight_decay, mask, engine, seed)
        keywords: dict[str, Any] = dict(zip(_OP_KEYWORDS, kept, strict=True))
        run(who, rule, param, grad, state, step, hyperparams, **keywords)
        return
    key: tuple[Any, ...] | None = None
    if mask is None and seed is None and not mapped_files:
        given = (engine, maximize, weight_decay, decoupled_weight_decay, *hyperparams.values())
        key = (rule.key, *hyperparams, *given, *map(type, given))
        if _apply_cached(key, param, grad, state, step):
            return
    try:
        engines.check_engine(engine)
        checked_step = _read_step(step)
        switches = {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        options.check_options({**hyperparams, "weight_decay": weight_decay, **switches})
        hyperparams = {name: options.as_floats(value) for name, value in hyperparams.items()}
        decay = float(options.as_float(weight_decay))
        shrink = 1 - hyperparams.get("lr", 0.0) * decay if decoupled_weight_decay else 1.0
        sign = -1.0 if maximize else 1.0
        seed = None if seed is None else _read_seed(seed)
        _check_param(param)
        owner = param
        param, grad = to_local(param, grad, by_row=rule.needs_whole_rows)
        check_writable("a parameter", param)
        gradient = indexed_grad(param, grad, row_slots=rule.needs_whole_rows)
        tensors = _check_state(rule, param, state)
        if mask is not None:
            masks.check_mask("mask", mask, param)
            selection = masks.MaskSelection(mask, param.shape).refresh()
            by_row = rule.needs_whole_rows
            gradient = masks.apply_mask(gradient, selection, param.numel(), by_row=by_row)
            gradient = to_row_slots(param, gradient) if by_row and param.dim() > 1 else gradient
    except InputError as error:
        raise type(error)(f"{who}: {error}") from None
    l2 = 0.0 if decoupled_weight_decay else decay
    settings = GroupSettings(
        rule, hyperparams, sign, l2, shrink, None, seed, seed is not None, lambda _: who
    )
    reserve_checked(param, tensors, gradient)
    written, gradient = engine_views(param.detach(), tensors, gradient)
    update = ParamUpdate(settings, {}, 0, owner, param, grad, gradient)
    update.targets, update.step, update.seed = written, checked_step, seed
    engines.run_updates([update], engine)
    tensors = [tensor for tensor in (owner, *state) if tensor is not None]
    if tensors:
        increment_version(tensors)  # they are the caller's own, who may have autograd watch them
    note_written([owner])
    group = settings.core.get("group")
    if key is not None and group is not None and all(map(is_immutable, given)):
        if len(_cached_groups) >= _MAX_CACHED:
            _cached_groups.clear()
        _cached_groups[key] = rule, group


# The core's view of rule and options that passed all checks. The rule is kept, and with it its key.
_cached_groups: dict[tuple[Any, ...], tuple[Rule, NativeGroup]] = {}
_MAX_CACHED = 256


def _apply_cached(
    key: tuple[Any, ...],
    param: Tensor,
    grad: Gradient,
    state: Sequence[Tensor | None],
    step: int | Tensor,
) -> bool:
    try:
        found = _cached_groups.get(key)
    except TypeError:  # a list is no key
        return False
    return found is not None and apply_standard(found[1], param, grad, list(state), step)


def _read_step(step: int | Tensor) -> int:
    requirement = "step must be the number of this update, counted from 1"
    if isinstance(step, Tensor) and step.numel() != 1:
        raise InputError(message(requirement, f"a tensor of shape {tuple(step.shape)}"))
    options.as_number("step", step)
    value = options.as_float(step)
    if not 1 <= value < _TOO_MANY or value % 1:
        raise InputError(message(requirement, value))
    return int(value)


def _read_seed(seed: Any) -> int:
    try:
        return index(seed) & 0xFFFFFFFFFFFFFFFF  # both engines look at 64 bits
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            message("seed must be an integer or None", options.format_value(seed))
        ) from None


_TOO_MANY = 1 << 63  # steps for the core to count


def _check_param(param: Tensor) -> None:
    if not isinstance(param, Tensor):
        raise InputError(message("the parameter must be a tensor", type(param).__name__))
    if param.layout is not torch.strided:
        raise InputError(message("the parameter must be a strided tensor", param.layout))
    if param.dtype not in FLOAT_DTYPES and param.dtype not in COMPLEX_DTYPES:
        raise InputError(message("a parameter must have a real float dtype", param.dtype))


def _check_state(rule: Rule, param: Tensor, state: Sequence[Tensor | None]) -> list[Tensor]:
    names = rule.state_names
    if len(state) != len(names):
        requirement = f"these options need the state {', '.join(names)}"
        raise InputError(message(requirement, f"{len(state)} tensors"))
    tensors = states.check_state(rule, param, dict(zip(names, state, strict=True)))
    for spec, tensor in zip(rule.state, tensors, strict=True):
        check_writable(f"the state {spec.name!r}", tensor)
    return tensors


_uncompiled = disable_compiler(apply_)


P = ParamSpec("P")
Constructor = Callable[..., None]


def signature_from(
    optimizer: Callable[P, RuleOptimizer],
) -> Callable[[Constructor], Callable[Concatenate[Any, P], None]]:
    """Complete a constructor that type checkers see with the arguments of an optimizer class."""

    def construct(self: FunctionalOptimizer, *args: Any, **options: Any) -> None:
        FunctionalOptimizer.__init__(self, *args, **options)

    return lambda declared: wraps(declared)(construct)  # type: ignore[return-value]


_DOCSTRING = """
Args:
    params: the parameters.

Example:
    >>> import torch, sparsestep
    >>> weight = torch.ones(3, 2)
    >>> optimizer = sparsestep.Functional{name}([weight], lr=0.1)
    >>> optimizer.step([sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))])
    >>> (weight != 1).any(dim=1).tolist()
    [False, True, False]
"""


class FunctionalOptimizer:
    """Base of the functional optimizers; a subclass names the optimizer that does the work.

    Example:
        >>> import torch, sparsestep
        >>> weight = torch.zeros(5, 2)
        >>> optimizer = sparsestep.FunctionalSGD([weight], lr=0.5)
        >>> optimizer.step([sparsestep.IndexedGrad(torch.tensor([3]), torch.ones(1, 2))])
        >>> optimizer.step_param(weight, torch.eye(5, 2).to_sparse_coo())
        >>> weight.tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """

    optimizer_class: ClassVar[type[RuleOptimizer]]
    positional: ClassVar[Sequence[str]] = ("lr",)
    torch_only: ClassVar[Mapping[str, Any]] = {}
    registry: ClassVar[dict[type[RuleOptimizer], type[FunctionalOptimizer]]] = {}

    def __init_subclass__(
        cls,
        optimizer: type[RuleOptimizer] | None = None,
        positional: str = "",
        torch_only: Mapping[str, Any] | None = None,
    ) -> None:
        """Complete the docstring and signature of a class, and register it.

        Args:
            optimizer: the optimizer class that does the work; ``None`` for a subclass of yours.
            positional: options that torch's functional class takes by position, in its order; by
                default those that the optimizer class takes.
            torch_only: options that only torch's class has, with the values that mean the same.
        """
        if optimizer is None:
            return
        _, *options = inspect.signature(optimizer).parameters.values()
        by_place = [each.name for each in options if each.kind is each.POSITIONAL_OR_KEYWORD]
        cls.optimizer_class, cls.positional = optimizer, positional.split() or by_place
        cls.torch_only = torch_only or {}
        vars(cls)["__init__"].__signature__ = signature_of(cls)  # for help() and Sphinx
        doc = f"{inspect.cleandoc(cls.__doc__ or '')}\n{_DOCSTRING.format(name=optimizer.__name__)}"
        cls.__doc__ = with_args(doc, inspect.signature(cls).parameters, optimizer)
        cls.registry[optimizer] = cls

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
        for key, default in self.torch_only.items():
            value = options.pop(key, default)
            if value != default:
                requirement = (
                    f"{name}: {key} is an option of torch's class only and must be {default}"
                )
                raise InputError(message(requirement, value, "Leave it out"))
        may_be_empty = options.pop("_allow_empty_param_list", False)
        params = list(params)
        if not params and not may_be_empty:
            raise InputError(f"{name}: optimizer got an empty parameter list.")
        self.optimizer: RuleOptimizer = self.optimizer_class([{"params": params}], **options)
        self._prepare()

    def _prepare(self) -> None:
        self._adding_lock = fork_safe_lock()  # acquired before that of any parameter
        self._locks: dict[int, RLock] = {}
        self._indices: dict[int, int] = {}
        self._cached_plan: CachedPlan | None = None

    @property
    def param_group(self) -> dict[str, Any]:
        """The parameters and the options, which you may change between steps."""
        return self.optimizer.param_groups[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that were passed to the constructor."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        """The state of each parameter, under torch's names."""
        return self.optimizer.state

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
        with self._adding_lock:  # or a new one might be removed again
            params = list(self.param_group["params"])
        try:
            gradients = list(gradients)
        except TypeError:
            requirement = f"{type(self).__name__}: step needs a list of gradients"
            raise InputError(message(requirement, f"a {type(gradients).__name__}")) from None
        if len(params) != len(gradients):
            raise InputError(
                f"{type(self).__name__}: expected {counted(len(params), 'gradient')}, got "
                f"{len(gradients)}. Pass None for a parameter without a gradient."
            )
        targets = [param for param, grad in zip(params, gradients, strict=True) if grad is not None]
        with self._lock_of(id(targets[0])) if len(targets) == 1 else self._holding_locks(targets):
            if not self._replay(0, gradients):
                step = Step(self.optimizer)
                step.add_group(0, self.param_group, grads=gradients)
                self._run(step)
                for _, index in step.duplicates:  # a parameter that was given more than once
                    self._update(index, gradients[index])
            self.optimizer.iterations += 1
            if self.optimizer.iterations >= self.optimizer.store.huge_pages.due:
                self.optimizer.store.huge_pages.move(self.optimizer.iterations)

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
        while not self._step_known(param, grad) and not self._add_param(param, grad):
            pass  # another thread has added it meanwhile

    def _step_known(self, param: Tensor, grad: Gradient | None) -> bool:
        with self._lock_of(id(param)):
            index = self._index_of(param)
            if index is not None and grad is not None:
                self._update(index, grad)
            return index is not None

    def _index_of(self, param: Tensor) -> int | None:
        """Its index in the group, which other threads may change."""
        params = self.param_group["params"]
        index = self._indices.get(id(param))
        if index is not None and (params[index : index + 1] or [None])[0] is param:
            return index
        found = next((i for i, known in enumerate(params) if known is param), None)
        if found is not None:
            self._indices[id(param)] = found
        return found

    def _lock_of(self, key: int) -> RLock:
        return self._locks.get(key) or self._locks.setdefault(key, fork_safe_lock())

    def _update(self, index: int, grad: Gradient | None) -> None:
        if torch.compiler.is_compiling():  # it may look here without having looked at step_param
            _uncompiled_update(self, index, grad)
            return
        if not self._replay(index, [grad]):
            step = Step(self.optimizer)
            step.add_group(0, self.param_group, only=index, grads=[grad])
            self._run(step)

    def _run(self, step: Step) -> None:
        plan = None
        if step.is_native_only and not step.duplicates and self.optimizer.semantics == "masked":
            plan = self.optimizer.groups.cached_plan(1)
        step.run()
        # A formula is traced in every step; threads would share the traces.
        self._cached_plan = None if plan is None or plan.traced else plan
        self.optimizer.updates += 1

    def _replay(self, first: int, grads: list[Gradient | None]) -> bool:
        """Repeat a step in one call of the core; false, and nothing done, if it declines."""
        plan, optimizer = self._cached_plan, self.optimizer
        if (
            plan is None
            or mapped_files
            or optimizer.engine not in ("auto", "native")
            or not replay_step(
                optimizer.param_groups,
                plan,
                optimizer.state,
                optimizer.store.addresses,
                grads,
                first,
            )
        ):
            return False
        optimizer.updates += 1
        return True

    def _add_param(self, param: Tensor, grad: Gradient | None) -> bool:
        """Add a parameter, with its first step; false if another thread has added it meanwhile."""
        with self._adding_lock, self._lock_of(id(param)):
            if self._index_of(param) is not None:
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
            except Exception:  # undo, before another thread can have its lock
                del params[index:]
                if names is not None:
                    del names[index:]
                self.optimizer.store.drop(param)
                self.optimizer.deferred.pop(id(param), None)
                raise
            return True

    def _check_new(self, param: Any, group: dict[str, Any]) -> None:
        with error_prefix(type(self).__name__):
            if not isinstance(param, Tensor):
                raise InputError(message("a parameter must be a tensor", type(param).__name__))
            if group.get("mask") is not None:
                requirement = "with a mask, all parameters must be known from the start"
                raise InputError(message(requirement, "a new one", "Pass it to the constructor"))
            self.optimizer.check_params(0, {**group, "params": [param]})

    @contextmanager
    def _holding_locks(self, params: list[Tensor]) -> Iterator[None]:
        """Hold the locks of several parameters, always acquired in the same order."""
        locks = [self._lock_of(key) for key in sorted({id(param) for param in params})]
        held: list[RLock] = []
        # A signal handler may raise between any two bytecodes. So locks are acquired and noted, and
        # later released, inside single calls of C functions; a second release finds none left.
        releases = map(methodcaller("release"), held)
        try:
            held.extend(filter(methodcaller("acquire"), locks))
            yield
        finally:
            try:
                any(releases)
            finally:
                any(releases)

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Apply the deferred updates of rows, under ``semantics="dense"``."""
        targets = self.param_group["params"] if param is None else [param]
        with self._holding_locks(targets):
            self.optimizer.catch_up(param, rows)

    def forget(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of rows, like ``forget`` of the optimizer of the same name."""
        with self._holding_locks([param]):
            self.optimizer.forget(param, rows)

    def state_dict(self) -> StateDict:
        """The state dict of the optimizer of the same name."""
        with self._adding_lock, self._holding_locks(self.param_group["params"]):
            return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class, of the optimizer of the same name, or of torch's."""
        with self._adding_lock, self._holding_locks(self.param_group["params"]):
            self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self._prepare()

    def __repr__(self) -> str:
        return repr(self.optimizer).replace(type(self.optimizer).__name__, type(self).__name__, 1)


# Excluded from torch.compile.
_uncompiled_step = disable_compiler(FunctionalOptimizer.step)
_uncompiled_step_param = disable_compiler(FunctionalOptimizer.step_param)
_uncompiled_update = disable_compiler(FunctionalOptimizer._update)  # noqa: SLF001


def signature_of(cls: type[FunctionalOptimizer]) -> inspect.Signature:
    """The signature of the constructor: options by position, then the others by name."""
    by_place, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = dict(inspect.signature(cls.optimizer_class, eval_str=True).parameters)
    for key, default in cls.torch_only.items():
        known[key] = inspect.Parameter(key, by_place, default=default, annotation=type(default))
    key = "_allow_empty_param_list"
    known[key] = inspect.Parameter(key, by_place, default=False, annotation=bool)
    params = known.pop("params").replace(annotation=Iterable[Tensor])
    placed = [known.pop(key).replace(kind=by_place) for key in (*cls.positional, key)]
    named = [each.replace(kind=by_name) for each in known.values()]
    itself = inspect.Parameter("self", by_place)
    return inspect.Signature([itself, params, *placed, *named], return_annotation=None)
