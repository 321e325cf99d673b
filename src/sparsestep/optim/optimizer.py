"""RuleOptimizer: a torch optimizer around a rule.

It keeps groups, state and step counts as torch does, checks everything before anything is written,
and hands sparse and masked gradients to an engine, dense ones to torch's own kernel where torch has
one for the formula.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from sparsestep import engines
from sparsestep._process import fork_safe_lock, uninterrupted
from sparsestep._torch import disable_compiler, global_hooks, profiler_enabled, profiler_range
from sparsestep.deferred.rows import DeferredRows, as_real_rows, replay_dense_step
from sparsestep.deferred.tracking import Tracking, warn_if_tracked_elsewhere
from sparsestep.engines.base import GroupSettings
from sparsestep.engines.native import CachedPlan, replay_step
from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.errors import InputError, error_prefix, memory_errors, message
from sparsestep.grads import masks
from sparsestep.grads.exchange import GradExchange, GradSource, grad_sources, sources_of
from sparsestep.memory.mapped_file import RowWrites, about_to_write, file_of, mapped_files, written
from sparsestep.memory.mapped_state import settle
from sparsestep.memory.tensors import is_distributed, memory_of
from sparsestep.optim import state as states
from sparsestep.optim.explain import Explanation, explain_param
from sparsestep.optim.param_groups import ParamGroup, ParamGroups, options_for_ranks, param_name
from sparsestep.optim.state_dict import LoadedState, read_state_dict, saved_by_rows
from sparsestep.optim.step import Step, StepInBackward, reserve_unmasked
from sparsestep.rules import options
from sparsestep.rules._derive_idle import derive_idle_update
from sparsestep.rules.int8 import with_int8_state
from sparsestep.rules.rule import Rule

# At run time this is ``object``; every public class lists ``Optimizer`` itself. class_resolver (of
# PyKEEN) collects subclasses of ``Optimizer`` and skips those from another package than their
# base, so with ``Optimizer`` as base here our Adam would be registered as a second "adam".
if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


def run_torch_kernel(
    function: Callable[..., None], batch: DenseBatch, *state: str, tensor_betas: bool = False
) -> None:
    """Call a function of ``torch.optim``, such as its ``adam``, on dense gradients.

    Args:
        function: takes parameters, gradients, lists of state, step counts, then options by name.
        batch: the dense gradients.
        state: the names of the state, in the function's order.
        tensor_betas: whether the function takes betas that are tensors.
    """
    names = _argument_names(function)[len(state) + 3 :]
    chosen = {name: batch.group[name] for name in names if name in batch.group}
    if "betas" in batch.group:
        betas = batch.group["betas"]
        chosen["beta1"], chosen["beta2"] = betas if tensor_betas else options.as_floats(betas)
    lists = [batch.state.get(name, []) for name in state]
    function(
        batch.params, batch.grads, *lists, batch.steps, has_complex=batch.has_complex, **chosen
    )


@lru_cache
def _argument_names(function: Callable[..., None]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class RuleOptimizer(_Base):
    """Base of every optimizer: a ``torch.optim.Optimizer`` that runs a rule.

    Combine it with torch's class: ``class Adam(RuleOptimizer, Optimizer)``. A subclass declares its
    rule and options; everything else is shared.

    Attributes:
        engine: the engine that was selected.
        semantics: the meaning of entries that a gradient does not have.
        option_names: the options that every param group has.
        iterations: the number of calls of ``step`` and ``zero_grad``.
        updates: the number of updates without ``step``.
        groups: the param groups as the last step read them.
        store: the memory of parameters and state.
        deferred: with ``semantics="dense"``, the rows of each parameter, by its id.
        used_engines: by a parameter's id: the parameter, the engine of its latest update, and why
            not another.
        dense_embeddings: by a parameter's id: the parameter, and whether its dense gradient is zero
            in most rows.
    """

    rule: ClassVar[Rule]
    """The rule, unless options select one: then override ``rule_for``."""
    group_options: ClassVar[tuple[str, ...]] = (
        "mask",
        "state_dtype",
        "stochastic_rounding",
        "rounding_seed",
    )
    """Optional param-group keys; absent unless set, so checkpoints have exactly torch's keys."""
    no_op_values: ClassVar[Mapping[str, tuple[Any, ...]]] = options.NO_OP_VALUES
    """Options of other optimizers, with the values that have no effect."""
    formula_options: ClassVar[frozenset[str]] = frozenset()
    """Options the formula handles itself, such as a custom rule's own ``weight_decay``."""
    step_is_tensor: ClassVar[bool] = True
    """Whether ``state["step"]`` is a tensor; ``torch.optim.SparseAdam`` keeps an int."""
    foreach_supports_tensor_lr: ClassVar[bool] = True
    """Whether torch's foreach kernel takes tensors for ``lr`` and ``betas``."""
    supports_complex: ClassVar[bool] = True
    always_decoupled: ClassVar[bool] = False

    state: defaultdict[Tensor, Any]
    engine: str
    semantics: str
    option_names: tuple[str, ...]

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        engine: str = "auto",
        semantics: str = "masked",
        **extras: Any,
    ) -> None:
        if torch.compiler.is_compiling():
            _uncompiled_init(self, params, defaults, engine=engine, semantics=semantics, **extras)
            return
        self._init_members()
        self.engine = engine
        self.semantics = semantics
        unknown = sorted(extras.keys() - set(self.group_options))
        if unknown:
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {unknown[0]!r}")
        with error_prefix(type(self).__name__):
            engines.check_engine(engine)
            if semantics not in ("masked", "dense"):
                requirement = "semantics must be one of masked, dense"
                raise InputError(message(requirement, repr(semantics)))
            self.check_values({**defaults, **extras})
        defaults = {**defaults, **options.non_default(extras)}
        self.option_names = tuple(defaults)
        # type(optimizer)(params, **optimizer.defaults) recreates the optimizer.
        super().__init__(params, {**defaults, **self._optimizer_options()})
        self._complete_on_demand()

    def _optimizer_options(self) -> dict[str, Any]:
        """Return the options of the optimizer, not of its groups, that are not the defaults."""
        defaults = options.OPTIMIZER_OPTIONS
        return {
            name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]
        }

    def _init_members(self) -> None:
        """Create what is neither pickled nor copied."""
        self._loading: LoadedState | None = None
        self.iterations: int = 0  # how often step() or zero_grad() was called
        self.updates: int = 0  # how often parameters were updated without step()
        self.groups: ParamGroups = ParamGroups()
        self.deferred: dict[int, DeferredRows] = {}
        self.used_engines: dict[int, tuple[Tensor, str, str]] = {}
        self.dense_embeddings: dict[int, tuple[Tensor, bool]] = {}
        self.store: states.StateStore = states.StateStore()
        self._cached_plan: CachedPlan | None = None  # of a step that may be replayed
        self._lock = fork_safe_lock()  # one step at a time

    # Param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own, as torch's optimizers do."""
        group_index = len(self.param_groups)
        with error_prefix(f"{type(self).__name__}: param group {group_index}"):
            if isinstance(param_group, dict):
                if "params" not in param_group:
                    requirement = "a param group must have the key 'params'"
                    raise InputError(message(requirement, ", ".join(map(str, param_group)) or "{}"))
                self._check_keys(param_group)
                options.check_options(param_group, self.formula_options)
                options.ensure_seed(param_group)
            super().add_param_group(param_group)
            for name in options.OPTIMIZER_OPTIONS:  # torch has put all defaults into the group
                param_group.pop(name, None)
            try:
                self.check_values(param_group)
                self.check_params(group_index, param_group)
                rule, is_dense = self.stored_rule_for(param_group), self.semantics == "dense"
                if is_dense:  # what has no such form is refused
                    settings = self.groups.read(self, group_index, param_group)
                    if settings.rule.idle_update is None:
                        derive_idle_update(settings.rule, 1, settings.hyperparams)
                by_row = rule.needs_whole_rows or is_dense
                masks.check_masks(param_group.get("mask"), param_group["params"], by_row=by_row)
                if not is_dense:
                    warn_if_tracked_elsewhere(type(self).__name__, param_group["params"])
            except Exception:
                self.param_groups.pop()
                raise

    def check_params(self, group_index: int, group: ParamGroup) -> None:
        """Refuse parameters that the optimizer cannot work with."""
        name, params = type(self).__name__, group["params"]
        sparse = [
            [group_index, i] for i, param in enumerate(params) if param.layout is not torch.strided
        ]
        if sparse:
            requirement = f"{name} requires dense parameter tensors"
            raise InputError(f"Sparse params at indices {sparse}: {requirement}")
        imaginary = [[group_index, i] for i, param in enumerate(params) if param.is_complex()]
        if imaginary and not self.supports_complex:
            requirement = f"{name} does not support complex parameters"
            raise InputError(f"Complex params at indices {imaginary}: {requirement}")
        if imaginary and group.get("state_dtype") is not None:
            requirement = (
                "the state of complex parameters has their dtype: state_dtype must be None"
            )
            raise InputError(message(requirement, group["state_dtype"]))

    def params(self) -> Iterator[Tensor]:
        """Iterate over all parameters of all groups."""
        for group in self.param_groups:
            yield from group["params"]

    def group_of(self, param: Tensor) -> dict[str, Any]:
        """Return the group that contains ``param``; raise if there is none."""
        for group in self.param_groups:
            if any(param is each for each in group["params"]):
                found: dict[str, Any] = group
                return found
        requirement = "the parameter must be one of this optimizer's"
        got = states.describe_other(param)
        raise InputError(message(requirement, got))

    def settings(self, group_index: int) -> GroupSettings:
        """Return the validated options of a param group, as engines see them."""
        return self.groups.settings(self, group_index, self.param_groups[group_index])

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse a param group with an unknown, missing or invalid option."""
        self._check_keys(group)
        missing = set(self.option_names) - set(self.group_options) - group.keys()
        if missing:
            got = f"no {', '.join(sorted(missing))}"
            raise InputError(message("it must have every option", got))
        self.check_values(group)

    def _check_keys(self, group: ParamGroup) -> None:
        known = [*self.option_names, *self.group_options]
        options.check_group_keys(group, known, self.no_op_values)

    @classmethod
    def check_values(cls, group: dict[str, Any]) -> None:
        """Refuse options of the wrong kind, out of range, or in a wrong combination."""
        options.check_options(group, cls.formula_options)
        if cls.has_torch_kernel():
            options.check_torch_kernel_options(group, takes_tensors=cls.foreach_supports_tensor_lr)
        cls.check_options(group)

    @classmethod
    def check_options(cls, group: dict[str, Any]) -> None:
        """Raise ``InputError`` if options are valid alone, but not together or for this class."""

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """Return the rule that a param group's options select."""
        return cls.rule

    @classmethod
    def stored_rule_for(cls, group: dict[str, Any]) -> Rule:
        """Return ``rule_for(group)`` with its state as stored, for example in int8."""
        rule = cls.rule_for(group)
        is_int8 = options.get_option(group, "state_dtype") is torch.int8
        return with_int8_state(rule) if is_int8 else rule

    @classmethod
    def uses_torch_kernel(cls, group: dict[str, Any]) -> bool:
        """Whether torch's kernel supports the group's options."""
        return (
            cls.has_torch_kernel()
            and not options.get_option(group, "stochastic_rounding")
            and options.get_option(group, "state_dtype") is not torch.int8
            and options.get_option(group, "bias_correction") == "global"
            and (
                "decoupled_weight_decay" not in cls.group_options
                or not options.get_option(group, "decoupled_weight_decay")
            )
        )

    @staticmethod
    def torch_kernel(batch: DenseBatch, /) -> None:
        """Run torch's own kernel on dense gradients; see ``run_torch_kernel``."""
        raise NotImplementedError

    @classmethod
    def has_torch_kernel(cls) -> bool:
        """Whether torch has a kernel for dense gradients under the same formula."""
        return cls.torch_kernel is not RuleOptimizer.torch_kernel

    @classmethod
    def can_materialize_state(cls, group: dict[str, Any]) -> bool:
        """Whether zero-initialized state gives the same first step as missing state."""
        return True

    def __repr__(self) -> str:
        who, rest = super().__repr__().split(" (", 1)
        settings = "".join(f"\n{k}: {v}" for k, v in self._optimizer_options().items())
        return f"{who} ({settings}{rest}"

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, or raise and update none.

        Args:
            closure: a function that evaluates the model again and returns the loss.

        Returns:
            The loss, if you pass a closure.
        """
        if torch.compiler.is_compiling():  # the step stays outside graphs
            result: float | None = _uncompiled_step(self, closure)
            return result
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or global_hooks[0]
            or global_hooks[1]
            or profiler_enabled()
        ):
            return self._observed_step(*() if closure is None else (closure,))
        return self._step(closure)

    # Tells torch not to wrap step() once more.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        self.iterations += 1
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            sources = sources_of(self.params()) if grad_sources else ()
            cached_plan = self._cached_plan if self.engine in ("auto", "native") else None
            is_dense = self.semantics == "dense"
            if cached_plan is not None and mapped_files and not sources:
                can_replay = not is_dense and reserve_unmasked(self.state, self.param_groups)
                cached_plan = cached_plan if can_replay else None
            if sources:
                # A rank that stops in the middle of an exchange keeps the others waiting.
                uninterrupted(lambda: self._step_together(sources))
            else:
                plan, store = cached_plan, self.store
                if plan is None or not (
                    replay_dense_step(
                        self.param_groups, plan, self.state, store.addresses, self.deferred
                    )
                    if is_dense
                    else replay_step(self.param_groups, plan, self.state, store.addresses)
                ):
                    self._plan_step()
            if mapped_files:
                written(self.params())
            if self.iterations >= self.store.huge_pages.due:
                self.store.huge_pages.move(self.iterations)
        return loss

    def _step_together(self, sources: Sequence[GradSource]) -> None:
        """Step with tables that ranks share: all ranks prepare, then all commit, or none does."""
        exchange = GradExchange(sources, lambda source: options_for_ranks(self, source))
        plan: Step | None = None
        error = exchange.error
        if error is None:
            try:
                plan = self._planned()
                plan.prepare()
            except BaseException as raised:
                error = raised
        try:
            exchange.agree(error)
        except BaseException:
            if plan is not None:
                plan.cancel()
            raise
        assert plan is not None
        plan.commit()
        plan.run_duplicates()

    def _planned(self) -> Step:
        cached_plan, self._cached_plan = self._cached_plan, None
        plan = Step(self, cached_plan.unused_traces if cached_plan is not None else ())
        with profiler_range("sparsestep: plan"):
            for group_index, group in enumerate(self.param_groups):
                plan.add_group(group_index, group)
        return plan

    def _plan_step(self) -> None:
        plan = self._planned()
        if plan.duplicates:
            uninterrupted(plan.run_with_duplicates)
            return
        cached_plan = None
        if plan.can_replay:
            cached_plan = self.groups.cached_plan(len(self.param_groups))
            if cached_plan is not None and cached_plan.traced and self.semantics == "dense":
                cached_plan = None  # an idle update of a custom rule is derived in every step
        plan.run()
        self._cached_plan = cached_plan

    # Torch's wrapper runs the hooks and marks the step for a profiler. It costs as much as a small
    # step, so it is used only if hooks or a profiler are active.
    _observed_step = Optimizer.profile_hook_step(_step)

    def step_in_backward(
        self, params: Iterable[Tensor] | None = None, *, backwards: int = 1
    ) -> StepInBackward:
        """Update each parameter as soon as its gradient is complete, and free the gradient.

        So there is never more than one gradient in memory. You may leave ``step()`` in the loop; it
        has nothing left to do.

        Args:
            params: the parameters; by default all of this optimizer's except for sharded tables,
                whose gradients are exchanged in ``step()``.
            backwards: the number of backward calls per step, if you accumulate gradients.

        Returns:
            A handle; call its ``remove()`` to undo it.

        Raises:
            InputError: a parameter is not one of this optimizer's, or already has a gradient.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(10, 4, sparse=True)
            >>> optimizer = sparsestep.Adam(table.parameters())
            >>> handle = optimizer.step_in_backward()
            >>> table(torch.tensor([2, 7, 2])).sum().backward()
            >>> table.weight.grad is None, int(optimizer.state[table.weight]["step"])
            (True, 1)
            >>> handle.remove()
        """
        with error_prefix(type(self).__name__):
            return StepInBackward(self, params, backwards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do."""
        if torch.compiler.is_compiling():
            _uncompiled_zero_grad(self, set_to_none)
            return
        self.iterations += 1
        super().zero_grad(set_to_none)

    # Deferred rows

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date that are behind under ``semantics="dense"``.

        With ``semantics="masked"`` no row is ever behind, and this does nothing.

        Args:
            param: one parameter of this optimizer; all parameters by default.
            rows: an integer tensor of row numbers, of any shape; all rows by default.

        Raises:
            InputError: the parameter is not one of this optimizer's, or a row is out of range.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 1))
            >>> optimizer = sparsestep.SGD([weight], lr=1.0, momentum=0.5, semantics="dense")
            >>> for row in (0, 1, 2):
            ...     weight.grad = torch.sparse_coo_tensor(
            ...         [[row]], [[1.0]], (3, 1), check_invariants=True
            ...     )
            ...     optimizer.step()
            >>> weight.flatten().tolist()
            [-1.0, -1.0, -1.0]
            >>> optimizer.catch_up()
            >>> weight.flatten().tolist()
            [-1.75, -1.5, -1.0]
        """
        known = list(self.params())
        if param is not None:
            if not any(param is each for each in known):
                requirement = "catch_up needs a parameter of this optimizer"
                got = states.describe_other(param)
                raise InputError(f"{type(self).__name__}: {message(requirement, got)}")
            known = [param]
        for each in known:
            deferred = self.deferred.get(id(each))
            if rows is not None and (deferred is not None or param is not None):
                memory = memory_of(each)
                with error_prefix(type(self).__name__):
                    rows = states.check_rows("rows to catch up", rows, memory)
            if deferred is None:
                continue
            self.catch_up_rows(each, rows)
            deferred.caught_up_by_user = True

    def catch_up_rows(self, param: Tensor, rows: Tensor | None) -> None:
        """Catch up rows of one parameter that are known to be valid.

        Args:
            param: the parameter.
            rows: row indices, int64 or int32 of one dim; ``None`` for all.
        """
        deferred = self._deferred_rows(param)
        if deferred is None or not deferred.has_deferred:
            return
        state = deferred.state_tensors(self.state.get(param))
        if state is None:  # cleared: the parameter starts over, so nothing was missed
            return
        memory = memory_of(param)
        real = as_real_rows(memory, state)
        deferred.check(*real)
        deferred.warn_if_modified(memory)
        if rows is None:
            uninterrupted(partial(deferred.catch_up_all, *real, engine=self.engine))
            return
        rows = deferred.movable(rows.to(param.device))
        deferred.catch_up(*real, rows, engine=self.engine)

    def _deferred_rows(self, param: Tensor) -> DeferredRows | None:
        found = self.deferred.get(id(param))
        return found if found is not None and found.param is param else None

    def track(self, model: torch.nn.Module, *, guard: bool = False) -> Tracking:
        """Bring rows up to date before a model reads them.

        Each ``nn.Embedding`` and ``nn.EmbeddingBag`` of the model then brings the rows of a lookup
        up to date first. So does a module with a method ``rows_read``, which yields what a call
        reads (``sparsestep.nn.EmbeddingBagCollection`` has one). For any other module that holds a
        table, all rows are brought up to date. Everything is current after ``eval()``, and in the
        model's ``state_dict()``, pickles and copies.

        Args:
            model: a model with parameters of this optimizer, which needs ``semantics="dense"``.
            guard: bring rows up to date for every torch operation that reads the tables, inside the
                model or not. Costs a Python call per operation.

        Returns:
            A handle; call its ``remove()`` to stop tracking.

        Raises:
            InputError: the semantics are ``"masked"``, or the model has none of the parameters.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(3, 1, sparse=True)
            >>> optimizer = sparsestep.SGD(table.parameters(), momentum=0.5, semantics="dense")
            >>> handle = optimizer.track(table)
        """
        return Tracking(self, model, guard=guard)

    # State

    def materialize_state(self) -> None:
        """Create the state of every parameter that has none yet, as before a first step.

        Use it if a framework loads checkpoints into existing tensors. It skips SGD's momentum with
        dampening, where a missing buffer means a first step, as in torch.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> optimizer.materialize_state()
            >>> list(optimizer.state[weight])
            ['step', 'sum']
        """
        self._materialize(lambda param: True)

    def _materialize(self, is_wanted: Callable[[Tensor], bool]) -> None:
        for group in self.param_groups:
            rule = self.stored_rule_for(group)
            for param in group["params"]:
                if (
                    self.state.get(param)
                    or is_lazy(param)  # its shape is not known yet
                    or not self.can_materialize_state(group)
                    or not is_wanted(param)
                ):
                    continue
                memory = memory_of(param)
                made = states.new_state(rule, memory, group, group.get("state_dtype"))
                param_state = states.new_param_state(
                    group, rule, param, made, step_is_tensor=self.step_is_tensor
                )
                if param_state:
                    self.state[param] = param_state

    def _complete_on_demand(self) -> None:
        """Have torch's checkpoints find state for every parameter."""
        if not isinstance(self.state, states.Records):
            self.state = states.Records(self.state, self.complete_state)

    def complete_state(self) -> None:
        """Create missing state of parameters that require a gradient, for a checkpoint."""
        self._materialize(lambda param: param.requires_grad)
        if len(self.state):  # a parameter that needs no state has an empty one beside others
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]

    def share_memory(self) -> None:
        """Move the state to shared memory, for processes that train one model together.

        Missing state is created first. SparseAdam's step count is a plain number, so each process
        keeps its own.

        Raises:
            InputError: the semantics are ``"dense"``, or state with dampening does not exist yet.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.RowwiseAdagrad([weight], lr=0.1)
            >>> optimizer.share_memory()
            >>> optimizer.state[weight]["sum"].is_shared()
            True
        """
        with error_prefix(type(self).__name__):
            if self.semantics == "dense":
                requirement = (
                    "share_memory needs semantics='masked': processes cannot catch up rows"
                )
                raise InputError(message(requirement, "semantics='dense'"))
            self.materialize_state()
            for group in self.param_groups:
                if any(map(is_lazy, group["params"])):
                    requirement = "a lazy parameter must be initialized before its state is shared"
                    remedy = "Call the model once first"
                    raise InputError(message(requirement, "an uninitialized one", remedy))
                if self.stored_rule_for(group).state and not all(
                    map(self.state.get, group["params"])
                ):
                    requirement = "share_memory: with dampening, the state must already exist"
                    raise InputError(message(requirement, "no state yet", "Call step() first"))
        for param_state in self.state.values():
            for value in param_state.values():
                if isinstance(value, Tensor) and file_of(value) is None:  # files are shared anyway
                    value.share_memory_()

    def move_to_huge_pages(self) -> None:
        """Move parameters and state to huge pages now, which a long training gets in time."""
        self.store.huge_pages.move_all()

    def forget(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of rows to what it is before the first step.

        This resets moments and sums, and the row's own count (``bias_correction="per_row"``). With
        ``semantics="dense"``, the row is brought up to date first, and then counts as one that
        never had a gradient. The parameter itself and its number of steps do not change. Before the
        first step, this does nothing.

        Args:
            param: one of this optimizer's parameters.
            rows: an integer tensor of row numbers, of any shape; may have duplicates.

        Raises:
            InputError: a row is out of range, or the state does not match the parameter.

        Whatever it raises, also ``MemoryError`` and ``KeyboardInterrupt``: all rows have been reset
        or none.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 1))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> weight.grad = torch.ones(3, 1)
            >>> optimizer.step()
            >>> optimizer.forget(weight, torch.tensor([0, 2]))
            >>> optimizer.state[weight]["sum"].flatten().tolist()
            [0.0, 1.0, 0.0]
        """
        writes = RowWrites()
        with error_prefix(type(self).__name__), memory_errors(), self._lock:
            self.prepare_forget(param, rows, writes)
            uninterrupted(writes.commit)

    def prepare_forget(
        self, param: Tensor, rows: Tensor, writes: RowWrites, *, is_overwritten: bool = False
    ) -> None:
        """Add the state of rows to what ``writes`` resets; everything that can raise.

        Args:
            param: one of this optimizer's parameters.
            rows: which ones.
            writes: commits the reset.
            is_overwritten: the rows of the parameter are overwritten as well, so that steps they
                have missed do not matter.
        """
        group = self.group_of(param)
        memory = memory_of(param)
        if is_distributed(param):
            requirement = "forget does not support parameters that are sharded across processes"
            raise InputError(message(requirement, "a DTensor"))
        rows = states.check_rows("rows to forget", rows, memory)
        param_state, rule = self.state.get(param), self.stored_rule_for(group)
        tensors: list[Tensor] = []
        # A missing tensor means a first step.
        if param_state and all(param_state.get(spec.name) is not None for spec in rule.state):
            tensors = states.check_state(rule, memory, param_state)
            self.store.check_writable(param, memory, tensors)
        values = [states.initial_value(spec, group) for spec in rule.state[: len(tensors)]]
        if not is_overwritten:
            self.catch_up_rows(param, rows)
        if not rows.numel():
            return
        if mapped_files:
            about_to_write(param, tensors, rows)
        rows = rows.to("cpu").contiguous()
        for tensor, value in zip(as_real_rows(memory, tensors)[1], values, strict=True):
            fresh = torch.full((1, *tensor.shape[1:]), value, dtype=tensor.dtype, device="cpu")
            writes.add(tensor, rows, fresh)
        deferred = self._deferred_rows(param)
        if deferred is not None:
            writes.add(*deferred.prepare_reset(rows))

    def prepare_grow(self, param: Tensor, rows: int, keep: int) -> Callable[[], None]:
        """Create the state of a parameter for more rows; everything that can raise.

        Args:
            param: a parameter of this optimizer, which has not grown yet.
            rows: the new number of rows.
            keep: the number of rows that keep their state.

        Returns:
            The commit, to be called once the parameter has grown. It cannot fail.
        """
        group = self.group_of(param)
        if group.get("mask") is not None:
            listed = masks.per_param(group["mask"], group["params"])
            pairs = zip(listed, group["params"], strict=True)
            if any(mask is not None and each is param for mask, each in pairs):
                requirement = (
                    "a parameter with a mask cannot grow: the mask does not cover the new rows"
                )
                remedy = "Remove it from the param group, and set a larger one afterwards"
                raise InputError(message(requirement, "a mask", remedy))
        param_state, rule = self.state.get(param), self.stored_rule_for(group)
        if param_state and all(param_state.get(spec.name) is not None for spec in rule.state):
            states.check_state(rule, memory_of(param), param_state)
        self.catch_up_rows(param, None)
        initial = {spec.name: states.initial_value(spec, group) for spec in rule.state}
        new = {
            name: states.grow_tensor(name, value, keep, rows, initial.get(name, 0.0))
            for name, value in (param_state or {}).items()
            if isinstance(value, Tensor) and value.dim() and len(value) == len(param)
        }
        deferred, grow_rows = self._deferred_rows(param), None
        if deferred is not None and deferred.state_tensors(param_state) is not None:
            grow_rows = deferred.prepare_growth(rows)
        return partial(self._commit_growth, param, param_state, new, grow_rows)

    def _commit_growth(
        self,
        param: Tensor,
        param_state: dict[str, Any] | None,
        new: dict[str, Tensor],
        grow_rows: Callable[[], None] | None,
    ) -> None:
        if param_state:
            param_state.update(new)
        self.store.drop(param)
        self._cached_plan = None
        if grow_rows is not None:
            grow_rows()
            self.deferred[id(param)].note_write(memory_of(param))
        else:
            self.deferred.pop(id(param), None)  # its state was cleared: it starts over

    # Inspection

    def explain(self) -> Explanation:
        """Show for each parameter which engine ran its latest update, and the size of its state.

        Returns:
            A table to print; iterate over it for the figures.

        Example:
            >>> import torch, sparsestep
            >>> table = torch.nn.Embedding(1000, 16, sparse=True)
            >>> optimizer = sparsestep.Adam(table.named_parameters(), engine="reference")
            >>> table(torch.tensor([1, 2])).sum().backward()
            >>> optimizer.step()
            >>> print(optimizer.explain())
            parameter  shape       engine     state      rows behind
            weight     1,000 x 16  reference  125.0 KiB  0
            weight: you set engine='reference'.
        """
        found = []
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                name = param_name(group, group_index, index)
                deferred = self._deferred_rows(param)
                behind = 0 if deferred is None else deferred.num_deferred()
                used = self.used_engines.get(id(param))
                found.append(explain_param(name, param, self.state.get(param), used, behind))
        return Explanation(tuple(found))

    # Checkpoints and pickles

    def state_dict(self) -> StateDict:
        """Like torch's. All rows are brought up to date first, so it is an ordinary checkpoint.

        With a mask by rows, ``torch.save`` writes the state of the rows that have moved, as sparse
        tensors, if that takes less than half the space. In memory it has all rows.
        """
        self.catch_up()
        found = super().state_dict()
        by_row = {id(param_state): kept for param_state, kept in saved_by_rows(self)}
        if by_row:
            state = found["state"].items()
            found["state"] = {
                key: by_row.get(id(param_state), param_state) for key, param_state in state
            }
        return found

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of torch's class with the same state.

        The state keeps its own precision (torch would cast it to the parameter's), and is copied.
        Options that the checkpoint does not know keep the values that they have. A checkpoint that
        does not fit is refused, and nothing is changed. Under ``semantics="dense"`` rows are
        brought up to date first, for the parameters themselves are no part of the checkpoint.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping):
            read_state_dict(self, given, ())  # says what is wrong with it

        def look(_: Optimizer, after_hooks: StateDict) -> None:
            names = self.option_names + self.group_options
            self._loading = read_state_dict(self, after_hooks, names)

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __getstate__(self) -> dict[str, Any]:
        self.catch_up()
        own = {
            "engine": self.engine,
            "semantics": self.semantics,
            "option_names": self.option_names,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch calls this at the end of load_state_dict too, with state and groups alone.
        if "_loading" not in self.__dict__:
            self._init_members()
        loading = self._loading
        if loading is not None:
            self._restore(loading, state)
        super().__setstate__(state)
        self._complete_on_demand()

    def _restore(self, loading: LoadedState, state: dict[str, Any]) -> None:
        """Replace the state that torch has read from a checkpoint by our own reading."""
        for param in self.params():
            # A state_dict has no parameters, so catch up deferred rows first, unless the parameter
            # was written since: then it was loaded already.
            deferred = self.deferred.get(id(param))
            if deferred is not None and not deferred.was_modified(param):
                self.catch_up_rows(param, None)
        self.deferred.clear()
        for group, missing in zip(state["param_groups"], loading.missing, strict=True):
            for name, value in missing.items():
                group.setdefault(name, value)
        if mapped_files:
            for _, param_state in loading.state:
                settle(param_state)
        state["state"].update(loading.state)


# Excluded from torch.compile. The compiler is imported only when it comes across them.
_uncompiled_init = disable_compiler(RuleOptimizer.__init__)
_uncompiled_step = disable_compiler(RuleOptimizer.step)
_uncompiled_zero_grad = disable_compiler(RuleOptimizer.zero_grad)


def check_model_and_optimizer(who: str, model: Any, optimizer: Any) -> None:
    """Refuse anything else, and the two in the wrong order.

    Example:
        >>> try:
        ...     check_model_and_optimizer("save", "model", None)
        ... except InputError as error:
        ...     print(error)
        save: the model must be an nn.Module. Got str.
    """
    if not isinstance(model, nn.Module):
        requirement = f"{who}: the model must be an nn.Module"
        raise InputError(message(requirement, type(model).__name__))
    if not isinstance(optimizer, RuleOptimizer):
        requirement = f"{who}: the optimizer must be one of sparsestep"
        kind = type(optimizer)
        raise InputError(message(requirement, f"{kind.__module__}.{kind.__qualname__}"))
