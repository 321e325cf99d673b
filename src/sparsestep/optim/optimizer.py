"""RuleOptimizer: a torch optimizer around a rule.

It keeps groups, state and step counts as torch does, checks everything before anything is written,
and hands gradients to an engine. Dense ones go to torch's own kernel if an option asks for it, or
if the core cannot run them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from sparsestep import engines
from sparsestep._process import fork_safe_lock, uninterrupted
from sparsestep._torch import (
    disable_compiler,
    global_hooks,
    optimizer_hooks,
    profiler_enabled,
    profiler_range,
)
from sparsestep.deferred.rows import DeferredRows, as_real_rows, replay_dense_step
from sparsestep.deferred.tracking import Tracking, warn_if_tracked_elsewhere
from sparsestep.engines.base import GroupSettings, finish
from sparsestep.engines.native import CachedPlan, replay_step
from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.errors import InputError, error_prefix, memory_errors, message
from sparsestep.grads import masks
from sparsestep.grads.exchange import GradExchange, grad_sources, sources_of
from sparsestep.memory.mapped_file import (
    RowWrites,
    about_to_write,
    file_of,
    mapped_files,
    store_in_rows,
    written,
)
from sparsestep.memory.tensors import is_distributed, memory_of
from sparsestep.optim import state as states
from sparsestep.optim.explain import (
    Explanation,
    ParamExplanation,
    count_rows,
    explain_density,
    state_bytes,
)
from sparsestep.optim.param_groups import ParamGroup, ParamGroups, options_for_ranks, param_name
from sparsestep.optim.state_dict import LoadedState, masked_state, read_state_dict
from sparsestep.optim.step import Step, StepInBackward, reserve_rows
from sparsestep.rules import options
from sparsestep.rules.derived_idle import derive_idle_update
from sparsestep.rules.int8 import with_int8_state
from sparsestep.rules.rule import Rule

# At run time this is ``object``; every public class lists ``Optimizer`` itself. class_resolver (of
# PyKEEN) collects subclasses of ``Optimizer`` and skips those from another package than their
# base, so with ``Optimizer`` as base here our Adam would be registered as a second "adam".
if TYPE_CHECKING:
    from sparsestep.distributed.grads import ShardedGradSource

    _Base = Optimizer
else:
    _Base = object


def kernel_of(
    function: Callable[..., None], *state: str, tensor_betas: bool = False
) -> Callable[[DenseBatch], None]:
    """Return the ``torch_kernel`` that calls a function of ``torch.optim``, such as its ``adam``.

    The function takes parameters, gradients, lists of state (whose names are ``state``), step
    counts, then options by name; ``tensor_betas`` if betas may be tensors.
    """
    names = list(inspect.signature(function).parameters)[len(state) + 3 :]

    def run(batch: DenseBatch) -> None:
        chosen = {name: batch.group[name] for name in names if name in batch.group}
        if "betas" in batch.group:
            betas = batch.group["betas"]
            chosen["beta1"], chosen["beta2"] = betas if tensor_betas else options.as_floats(betas)
        lists = [batch.state.get(name, []) for name in state]
        function(
            batch.params, batch.grads, *lists, batch.steps, has_complex=batch.has_complex, **chosen
        )

    return run


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
        used_engines: for each parameter, the engine of its latest update, and why not another.
        dense_embeddings: for each parameter, what makes its gradient dense if it is an embedding.
    """

    rule: ClassVar[Rule]
    """The rule, unless options select one: then override ``rule_for``."""
    group_options: ClassVar[tuple[str, ...]] = options.SHARED_GROUP_OPTIONS
    """Optional param-group keys; absent unless set, so checkpoints have exactly torch's keys."""
    no_op_values: ClassVar[Mapping[str, tuple[Any, ...]]] = options.NO_OP_VALUES
    """Options of other optimizers, with the values that have no effect."""
    formula_options: ClassVar[frozenset[str]] = frozenset()
    """Options the formula handles itself, such as a custom rule's own ``weight_decay``."""
    step_is_tensor: ClassVar[bool] = True
    """Whether ``state["step"]`` is a tensor; ``torch.optim.SparseAdam`` keeps an int."""
    foreach_supports_tensor_lr: ClassVar[bool] = True
    """Whether torch's foreach kernel takes tensors for ``lr`` and ``betas``."""
    has_initial_state: ClassVar[bool] = False
    """Whether the state is created with the optimizer, as ``torch.optim.Adagrad`` does."""
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
                raise InputError(message("semantics must be one of masked, dense", repr(semantics)))
            self.check_values({**defaults, **extras})
        defaults = {**defaults, **options.non_default(extras)}
        self.option_names = tuple(defaults)
        # type(optimizer)(params, **optimizer.defaults) recreates the optimizer.
        super().__init__(params, {**defaults, **self._optimizer_options()})
        self._complete_on_demand()
        if self.has_initial_state:
            self.materialize_state()

    def _optimizer_options(self) -> dict[str, Any]:
        """Return the options of the optimizer, not of its groups, that are not the defaults."""
        defaults = options.OPTIMIZER_OPTIONS
        return {
            name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]
        }

    def _init_members(self) -> None:
        """Create the members that are neither pickled nor copied."""
        self._loading: LoadedState | None = None
        self.iterations: int = 0
        self.updates: int = 0
        self.groups: ParamGroups = ParamGroups()
        self.deferred: dict[int, DeferredRows] = {}
        self.used_engines: dict[Tensor, tuple[str, str]] = {}
        self.dense_embeddings: dict[Tensor, str] = {}
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
                self.stored_rule_for(param_group)  # refuses state that int8 cannot hold
                is_dense = self.semantics == "dense"
                if is_dense:  # refuses rules without an idle update
                    settings = self.groups.read(self, group_index, param_group)
                    if settings.rule.idle_update is None:
                        derive_idle_update(settings.rule, 1, settings.hyperparams)
                masks.check_masks(param_group.get("mask"), param_group["params"], defers=is_dense)
                if not is_dense:
                    warn_if_tracked_elsewhere(type(self).__name__, param_group["params"])
            except Exception:
                self.param_groups.pop()
                raise

    def check_params(self, group_index: int, group: ParamGroup) -> None:
        """Refuse parameters that the optimizer cannot work with."""
        name, params = type(self).__name__, group["params"]
        sparse = [
            [group_index, i]
            for i, param in enumerate(params)
            if param.layout is not torch.strided
            or isinstance(param, torch.sparse.SparseSemiStructuredTensor)
        ]
        if sparse:
            requirement = f"{name} requires dense parameter tensors"
            remedy = "Train their values instead: torch.nn.Parameter(weight.values())"
            if params[sparse[0][1]].is_mkldnn:
                remedy = "Train weight.to_dense() instead"
            elif params[sparse[0][1]].layout is torch.strided:
                remedy = "Train the dense weight with mask=, and compress it once it is trained"
            raise InputError(f"Sparse params at indices {sparse}: {requirement}. {remedy}.")
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
        raise InputError(message(requirement, states.describe_other(param)))

    def optimizer_of(self, group: Mapping[str, Any]) -> RuleOptimizer:
        """Return the optimizer whose class a param group has; this one, unless it is mixed."""
        return self

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
        options.check_row_constraint(group)
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
    def elementwise_rule_for(cls, group: dict[str, Any]) -> Rule | None:
        """Return the rule of parameters with dense gradients, if the group selects another."""
        return None

    @classmethod
    def stored_rule_for(
        cls,
        group: dict[str, Any],
        param: Tensor | None = None,
        param_state: Mapping[str, Any] | None = None,
    ) -> Rule:
        """Return the rule of a group, or of a parameter with this state, as it is stored."""
        rule, elementwise = cls.stored_rules_for(group, param)
        if elementwise is None or param is None or not param_state:
            return rule
        return elementwise if states.is_elementwise(rule, param, param_state) else rule

    @classmethod
    def stored_rules_for(
        cls, group: dict[str, Any], param: Tensor | None = None
    ) -> tuple[Rule, Rule | None]:
        """Return both rules of a group with their state as stored, for example in int8.

        Int8 has a scale for each row, so the state of a parameter without rows is float32.
        """
        rule, elementwise = cls.rule_for(group), cls.elementwise_rule_for(group)
        is_int8 = options.get_option(group, "state_dtype") is torch.int8
        if not is_int8 or (param is not None and param.dim() <= 1):
            return rule, elementwise
        return with_int8_state(rule), elementwise and with_int8_state(elementwise)

    @classmethod
    def supports_torch_kernel(cls, group: dict[str, Any]) -> bool:
        """Whether torch's kernel supports the group's options."""
        return (
            cls.has_torch_kernel()
            and not options.get_option(group, "stochastic_rounding")
            and options.get_option(group, "state_dtype") is not torch.int8
            and options.get_option(group, "bias_correction") == "global"
            and options.RowConstraint.of_group(group) is None
            and (
                "decoupled_weight_decay" not in cls.group_options
                or not options.get_option(group, "decoupled_weight_decay")
            )
        )

    @staticmethod
    def torch_kernel(batch: DenseBatch, /) -> None:
        """Run torch's own kernel on dense gradients; see ``kernel_of``."""
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
                can_replay = not is_dense and reserve_rows(self.state, self.param_groups)
                cached_plan = cached_plan if can_replay else None
            if sources:
                # A rank that stops in the middle of an exchange keeps the others waiting.
                uninterrupted(lambda: self._step_together(sources))
            else:
                groups, state, addresses = self.param_groups, self.state, self.store.addresses
                plan, done = cached_plan, False
                while plan is not None and not done:
                    if is_dense:
                        done = replay_dense_step(groups, plan, state, addresses, self.deferred)
                    else:
                        done = replay_step(groups, plan, state, addresses)
                    if not done:
                        updated = self.groups.updated_plan(self, plan)
                        plan = None if updated is plan else updated
                        self._cached_plan = plan or self._cached_plan
                if not done:
                    self._plan_step()
            if mapped_files:
                written(self.params())
            if self.iterations >= self.store.huge_pages.due:
                self.store.huge_pages.move(self.iterations)
        return loss

    def _step_together(self, sources: Sequence[ShardedGradSource]) -> None:
        """Step with tables that ranks share: all ranks prepare, then all commit, or none does."""
        plan: Step | None = None

        def prepare() -> None:
            nonlocal plan
            if plan is not None:
                plan.cancel()
            plan = self._planned()
            plan.prepare()

        exchange = GradExchange(sources, lambda source: options_for_ranks(self, source), prepare)
        error = exchange.error
        if error is None and not exchange.is_agreed:
            try:
                prepare()
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
        plan = Step(self, None if cached_plan is None else cached_plan.traces)
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
        """Apply the deferred updates of rows, under ``semantics="dense"``.

        With ``semantics="masked"`` nothing is deferred, and this does nothing.

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
        if param is not None:
            with error_prefix(type(self).__name__):
                self.group_of(param)
        for each in self.params() if param is None else [param]:
            deferred = self.deferred.get(id(each))
            if rows is not None and (deferred is not None or param is not None):
                with error_prefix(type(self).__name__):
                    rows = states.check_rows("rows to catch up", rows, memory_of(each))
            if deferred is not None:
                self.catch_up_rows(each, rows)
                deferred.caught_up_by_user = True

    def catch_up_rows(self, param: Tensor, rows: Tensor | None) -> None:
        """Catch up valid rows of one parameter, int64 or int32 of one dim; ``None`` for all."""
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
            deferred.catch_up_all(*real, engine=self.engine)
            return
        rows = deferred.movable(rows.to(param.device))
        deferred.catch_up(*real, rows, engine=self.engine)

    def _deferred_rows(self, param: Tensor) -> DeferredRows | None:
        found = self.deferred.get(id(param))
        return found if found is not None and found.param is param else None

    def track(self, model: torch.nn.Module, *, guard: bool = False) -> Tracking:
        """Catch up deferred rows before a model reads them.

        Each ``nn.Embedding`` and ``nn.EmbeddingBag`` of the model then catches up the rows of a
        lookup first. So does a module with a method ``rows_read``, which yields the weight and the
        ids that a call reads (``sparsestep.nn.EmbeddingBagCollection`` has one). Any other module
        that holds a table catches up all rows. Everything is current after ``eval()``, and in the
        model's ``state_dict()``, pickles and copies.

        Some frameworks create the optimizer again before the first step, with all options of a
        param group: ``type(optimizer)(params, **options)``. The new one has the same semantics, and
        tracks the model instead, unless ``semantics`` is passed or the class comes from
        :func:`sparsestep.rule`.

        Args:
            model: a model with parameters of this optimizer, which needs ``semantics="dense"``.
            guard: catch up rows for every torch operation that reads the tables, inside the model
                or not. Costs a Python call per operation.

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
        dampening, where a missing buffer means a first step, as in torch. With
        ``dense="elementwise"`` it creates state per row, which a dense first gradient replaces.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> optimizer.materialize_state()
            >>> list(optimizer.state[weight])
            ['step', 'sum']
        """
        self._materialize(include_frozen=True)

    def _materialize(self, *, include_frozen: bool) -> None:
        for group in self.param_groups:
            if not self.can_materialize_state(group):
                continue
            dtype = group.get("state_dtype")
            for param in group["params"]:
                # The shape of a lazy parameter is not known yet.
                if self.state.get(param) or is_lazy(param):
                    continue
                if not (include_frozen or param.requires_grad):
                    continue
                rule, mask = self.stored_rule_for(group, param), _mask_of(group, param)
                packed = states.packed_layout(rule, mask, param, group, self.engine)
                made = states.new_state(rule, memory_of(param), group, dtype, packed)
                param_state = states.new_param_state(self, group, rule, param, made)
                if param_state:
                    self.store.set_layout(param, packed)
                    self.state[param] = param_state

    def _complete_on_demand(self) -> None:
        """Let torch's checkpoints create missing state."""
        if not isinstance(self.state, states.OptimizerState):
            self.state = states.OptimizerState(self.state, self.complete_state)

    def complete_state(self) -> None:
        """Create missing state of parameters that require a gradient, for a checkpoint."""
        self._materialize(include_frozen=False)
        if len(self.state):  # among others, a parameter that needs no state has an empty one
            for param in self.params():
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
            for group in self.param_groups:
                kept = map(self.state.get, group["params"])
                if self.elementwise_rule_for(group) and any(
                    not each or states.is_unused(each) for each in kept
                ):
                    requirement = (
                        "share_memory: with dense='elementwise', the state must already exist, "
                        "since the first gradient decides its shape"
                    )
                    raise InputError(message(requirement, "no state yet", "Call step() first"))
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

    def forget(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of rows to its initial value.

        This resets moments and sums, and the row's own count (``bias_correction="per_row"``). With
        ``semantics="dense"``, the row catches up first, and then counts as one that never had a
        gradient. The parameter itself and its number of steps do not change. Before the
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
            if rows.numel():
                written([param])

    def prepare_forget(
        self,
        param: Tensor,
        rows: Tensor,
        writes: RowWrites,
        *,
        is_overwritten: bool = False,
    ) -> None:
        """Add the reset of the rows' state to ``writes``: everything that can raise.

        Rows of the parameter that are overwritten as well need not catch up.
        """
        self.group_of(param)  # raises if there is none
        if is_distributed(param):
            requirement = "state of parameters that are sharded across processes cannot be reset"
            raise InputError(message(requirement, "a DTensor"))
        tensors, values = self._resettable_state(param)
        memory = memory_of(param)
        rows = states.check_rows("rows to forget", rows, memory)
        if not is_overwritten:
            self.catch_up_rows(param, rows)
        if not rows.numel():
            return
        if mapped_files:
            about_to_write(param, tensors, rows)
        rule, _, packed = self.stored_state(param)
        rows = elements = rows.to("cpu").contiguous()
        if packed is not None:
            elements = packed.indices() // packed.shape[1:].numel()
            elements = torch.isin(elements, rows).nonzero()[:, 0].contiguous()
        real = as_real_rows(memory, tensors)[1]
        for spec, tensor, value in zip(rule.state, real, values, strict=False):
            fresh = torch.full((1, *tensor.shape[1:]), value, dtype=tensor.dtype, device="cpu")
            writes.add(tensor, rows if spec.per_row else elements, fresh)
        deferred = self._deferred_rows(param)
        if deferred is not None:
            writes.add(*deferred.prepare_reset(rows))

    def _resettable_state(self, param: Tensor) -> tuple[list[Tensor], list[float]]:
        """Return the state tensors of a parameter, writable, and their initial values."""
        group = self.group_of(param)
        memory, (rule, param_state, layout) = memory_of(param), self.stored_state(param)
        if not param_state or not states.is_complete(rule, param_state):
            return [], []
        tensors = states.check_state(rule, memory, param_state, layout)
        self.store.check_writable(param, memory, tensors)
        return tensors, [states.initial_value(spec, group) for spec in rule.state]

    def stored_state(
        self, param: Tensor
    ) -> tuple[Rule, dict[str, Any] | None, masks.PackedMask | None]:
        """Return the rule of a parameter, its state, and the mask that packs the state, if any."""
        param_state = self.state.get(param)
        rule = self.stored_rule_for(self.group_of(param), memory_of(param), param_state)
        return rule, param_state, self.store.layout_of(rule, param, param_state)

    @torch.inference_mode(False)
    def set_mask(
        self, param: Tensor, mask: Tensor | None, *, initial: Mapping[str, float] | None = None
    ) -> None:
        """Replace the mask of one parameter, for sparsity patterns that change during training.

        Entries that stay in the mask keep their state. Entries that it drops lose theirs, and
        entries that are new start from the initial state, as ``forget`` leaves it, or from
        ``initial``. The parameter itself does not change: set dropped weights to zero yourself.
        With ``semantics="dense"``, rows that change catch up first.

        With a mask over elements, the state per element of a contiguous parameter on the CPU is
        packed: a vector of one value for each entry that the mask keeps, in order.
        ``state_dict()`` has torch's form.

        The optimizer keeps a copy of the mask. So does a checkpoint, in the param group.

        Args:
            param: one of this optimizer's parameters.
            mask: a bool tensor over the rows or the elements of the parameter, as in the option
                ``mask``; ``None`` to train all of it. Of a DTensor, the same on all ranks.
            initial: numbers by names of the state, for entries that are new; for state per row, for
                rows without an entry that stays. Without state, before the first step, it has no
                effect.

        Raises:
            InputError: the parameter is not one of this optimizer's; the mask has another shape,
                dtype or device; it is the very tensor that is in use, changed in place; or
                ``initial`` names no state, or state in int8.

        Whatever it raises, also ``MemoryError`` and ``KeyboardInterrupt``: mask and state are the
        old ones or the new ones.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
            >>> mask = torch.tensor([[True, True], [False, False]])
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1, mask=mask)
            >>> weight.grad = torch.ones(2, 2)
            >>> optimizer.step()
            >>> optimizer.state[weight]["sum"].tolist()
            [1.0, 1.0]
            >>> optimizer.set_mask(weight, torch.tensor([[True, False], [True, True]]))
            >>> optimizer.state[weight]["sum"].tolist()
            [1.0, 0.0, 0.0]
        """
        writes = RowWrites()
        with error_prefix(f"{type(self).__name__}: set_mask"), memory_errors(), self._lock:
            calls = [writes.commit, *self._prepare_mask(param, mask, initial, writes)]
            uninterrupted(lambda: finish(calls))

    def _prepare_mask(
        self,
        param: Tensor,
        mask: Tensor | None,
        initial: Mapping[str, float] | None,
        writes: RowWrites,
    ) -> list[Callable[[], object]]:
        group, memory = self.group_of(param), memory_of(param)
        params = group["params"]
        defers = self.semantics == "dense"
        masks.check_masks(group.get("mask"), params, defers=defers)
        whole = param if is_distributed(param) else memory
        masks.check_mask("the mask", mask, whole, defers=defers)
        old = _mask_of(group, param)
        stored, _, layout = self.stored_state(param)
        if mask is not None and mask is old and layout is None:
            requirement = "the mask must be another tensor than the one in use"
            remedy = "Leave that unchanged, and pass a new one"
            raise InputError(message(requirement, "the same tensor", remedy))
        mask = None if mask is None else mask.detach().clone()
        rule = self.stored_rule_for(group, param)
        packed = states.packed_layout(rule, mask, param, group, self.engine)
        calls: list[Callable[[], object]] = []
        values = states.initial_values(stored, group, initial)
        if layout is not None or packed is not None:
            calls = self._prepare_layout(param, layout, packed, old, mask, values, writes)
        else:
            before, after = (m if m is None else masks.local_mask(m, param) for m in (old, mask))
            changed = masks.changed_entries(before, after, memory.shape)
            if changed is not None:
                self._prepare_reset(param, changed, before, after, values, writes)
        known = zip(params, masks.per_param(group.get("mask"), params), strict=True)
        listed = [mask if each is param else its_mask for each, its_mask in known]
        if all(each is None for each in listed):
            return [*calls, partial(group.pop, "mask", None)]
        given = listed[0] if len(listed) == 1 else listed
        return [*calls, partial(group.__setitem__, "mask", given)]

    def _prepare_layout(
        self,
        param: Tensor,
        layout: masks.PackedMask | None,
        packed: masks.PackedMask | None,
        old: Tensor | None,
        new: Tensor | None,
        values: list[float],
        writes: RowWrites,
    ) -> list[Callable[[], object]]:
        """Copy state from one layout to another; what only one mask selects starts over.

        New entries start from ``values``. State per row starts over unless the row has an element
        that both masks keep.
        """
        memory = memory_of(param)
        tensors, defaults = self._resettable_state(param)
        if not tensors:
            return []
        rule, param_state, _ = self.stored_state(param)
        assert param_state is not None
        _check_reset(tensors, values, defaults)
        made = states.replace_layout(rule.state, tensors, values, memory.shape, layout, packed)
        filled, fills = None, values
        if layout is None and old is not None:  # new entries
            assert packed is not None
            filled = ~masks.over_elements(old, memory.shape).reshape(-1)[packed.indices()]
        elif packed is None and new is not None:  # dropped ones
            filled, fills = ~masks.over_elements(new, memory.shape), defaults
        for spec, tensor, value in zip(rule.state, made, fills, strict=True):
            if filled is not None and not spec.per_row:
                tensor.masked_fill_(filled, states.fill_value(tensor.dtype, value))
        if rule.needs_whole_rows:
            before = masks.all_elements(old, memory)
            if layout is not None:
                before = layout.bits()[: memory.numel()].view(memory.shape)
            each = zip(rule.state, tensors, values, defaults, strict=True)
            rows = [(t, value, default) for spec, t, value, default in each if spec.per_row]
            _reset_rows(rows, before, masks.all_elements(new, memory), writes)
        replaced = dict(zip(rule.state_names, made, strict=True))
        return [
            partial(param_state.update, replaced),
            partial(self.store.set_layout, param, packed),
            partial(self.store.drop, param),
        ]

    def _prepare_reset(
        self,
        param: Tensor,
        changed: Tensor,
        old: Tensor | None,
        new: Tensor | None,
        values: list[float],
        writes: RowWrites,
    ) -> None:
        """Add the reset of rows or elements to ``writes``: everything that can raise.

        State per row is reset unless the row has an element that both masks keep.
        """
        tensors, defaults = self._resettable_state(param)
        memory, deferred = memory_of(param), self._deferred_rows(param)
        by_row = changed.shape == memory.shape[:1]
        if by_row:
            before, after = (torch.ones_like(changed) if m is None else m for m in (old, new))
        else:
            before, after = (masks.all_elements(m, memory) for m in (old, new))
            _check_reset(tensors, values, defaults)
        is_new = changed & after
        rows = _any_in_row(changed).nonzero().squeeze(1).to("cpu")
        if by_row:
            self.catch_up_rows(param, rows)
        if not rows.numel():
            return
        if deferred is not None:
            writes.add(*deferred.prepare_reset(rows))
        if mapped_files:
            about_to_write(param, tensors, rows)
        real = as_real_rows(memory, tensors)[1]
        for tensor, value, default in zip(real, values, defaults, strict=False):
            if by_row or tensor.dim() < changed.dim():
                _reset_rows([(tensor, value, default)], before, after, writes)
                continue
            at = rows.to(tensor.device)
            found = tensor[at]
            for reset, number in ((changed, default), (is_new, value)):
                reset = reset if tensor.dim() == changed.dim() else reset.unsqueeze(-1)
                found.masked_fill_(reset[at], number)
            writes.add(tensor, rows, found.contiguous())

    def prepare_grow(self, param: Tensor, rows: int, keep: int) -> Callable[[], None]:
        """Create state for more rows; the first ``keep`` keep theirs. The result commits."""
        group = self.group_of(param)
        if _mask_of(group, param) is not None:
            requirement = (
                "a parameter with a mask cannot grow: the mask does not cover the new rows"
            )
            remedy = "Remove it from the param group, and set a larger one afterwards"
            raise InputError(message(requirement, "a mask", remedy))
        rule, param_state, _ = self.stored_state(param)
        if param_state and states.is_complete(rule, param_state):
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

        def commit() -> None:
            if param_state:
                param_state.update(new)
            self.store.drop(param)
            self._cached_plan = None
            if grow_rows is not None:
                grow_rows()
                self.deferred[id(param)].note_write(memory_of(param))
            else:
                self.deferred.pop(id(param), None)  # its state was cleared: it starts over

        return commit

    # Inspection

    def explain(self, model: nn.Module | None = None) -> Explanation:
        """Show for each parameter which engine ran its latest update, and the size of its state.

        While gradients are there, it also names the tables whose sparse gradient has so many rows
        that a dense one would be faster.

        Args:
            model: a model whose names for parameters to use, if the optimizer was given none.

        Returns:
            A table to print; iterate over it for the figures.

        Example:
            >>> import torch, sparsestep
            >>> table = torch.nn.Embedding(1000, 16, sparse=True)
            >>> optimizer = sparsestep.Adam(table.named_parameters(), engine="reference")
            >>> table(torch.tensor([1, 2])).sum().backward()
            >>> optimizer.step()
            >>> print(optimizer.explain())
            parameter  shape       engine     state      deferred rows
            weight     1,000 x 16  reference  125.0 KiB  0
            weight: you set engine='reference'.
        """
        found = []
        named = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                name = named.get(id(param)) or param_name(group, group_index, index)
                engine, reason = self.used_engines.get(param, (None, ""))
                if engine is not None and not reason:
                    reason = explain_density(param, is_deferred=self.semantics == "dense")
                # A lazy parameter refuses to tell its shape; so far its memory has no elements.
                shape = tuple(memory_of(param).shape if is_lazy(param) else param.shape)
                size = state_bytes(self.state.get(param))
                deferred = self._deferred_rows(param)
                rows = 0 if deferred is None else deferred.num_deferred()
                found.append(ParamExplanation(name, shape, engine, reason, size, rows))
        return Explanation(tuple(found))

    def metrics(self) -> dict[str, int]:
        """Return numbers about the gradients, engines and memory, for a logger.

        Call it after ``step()`` and before ``zero_grad()``: it reads the indices of the gradients,
        never a table or its state. Where gradients are gone, as with ``step_in_backward``, rows
        and entries are 0. Of sharded tables, it counts what this rank has.

        Returns:
            A flat dict, of totals over all parameters:

            - ``rows``: rows of parameters that have a gradient.
            - ``rows_touched``: distinct rows that the gradients have; of a dense one, all that
              its mask selects (with a mask over elements: all).
            - ``entries``: entries of the gradients, in the same sense. A lookup of an id is one.
            - ``duplicates``: entries whose row has an earlier one, ``entries - rows_touched``.
            - ``deferred_rows``: with ``semantics="dense"``, the rows that wait for a catch-up. An
              upper bound; exact if all parameters have had a gradient in the latest step and no
              row has caught up since.
            - ``native_params``, ``torch_params``, ``reference_params``, ``triton_params``:
              parameters by the engine of their latest update.
            - ``param_bytes``, ``state_bytes``: sizes of parameters and of their state.

        Example:
            >>> import torch, sparsestep
            >>> table = torch.nn.Embedding(1000, 16, sparse=True)
            >>> optimizer = sparsestep.Adam(table.parameters())
            >>> table(torch.tensor([1, 2, 1])).sum().backward()
            >>> optimizer.step()
            >>> metrics = optimizer.metrics()
            >>> metrics["entries"], metrics["rows_touched"], metrics["rows"]
            (3, 2, 1000)
        """
        names = ("rows", "rows_touched", "entries", "duplicates", "deferred_rows")
        engine_names = [f"{name}_params" for name in ("native", "torch", "reference", "triton")]
        found = dict.fromkeys((*names, *engine_names, "param_bytes", "state_bytes"), 0)
        seen: set[int] = set()
        for group_index, group in enumerate(self.param_groups):
            selections = None
            if group.get("mask") is not None:
                with error_prefix(f"{type(self).__name__}: param group {group_index}"):
                    settings = self.settings(group_index)
                    selections = self.groups.selections(self, group_index, group, settings)
            for index, param in enumerate(group["params"]):
                if id(param) in seen or is_lazy(param):
                    continue
                seen.add(id(param))
                touched = 0
                if param.grad is not None:
                    counts = count_rows(param, selections[index] if selections else None)
                    touched = counts.touched
                    found["rows"] += counts.rows
                    found["rows_touched"] += touched
                    found["entries"] += counts.entries
                deferred = self._deferred_rows(param)
                if deferred is not None and deferred.has_deferred:
                    movable = deferred.movable_rows
                    rows = deferred.num_rows if movable is None else movable.numel()
                    found["deferred_rows"] += rows - touched
                if param in self.used_engines:
                    found[f"{self.used_engines[param][0]}_params"] += 1
                found["param_bytes"] += memory_of(param).nbytes
                found["state_bytes"] += state_bytes(self.state.get(param))
        found["duplicates"] = found["entries"] - found["rows_touched"]
        return found

    # Checkpoints and pickles

    def state_dict(self, *, packed: bool = False) -> StateDict:
        """Like torch's. All rows catch up first, so it is an ordinary checkpoint.

        With a mask by rows, ``torch.save`` writes the state of the rows that have moved, as sparse
        tensors, if that takes less than half the space. In memory it has all rows.

        Args:
            packed: leave state packed that a mask over elements has packed, one value for each kept
                element. By default it is expanded to the parameter's shape, as torch's class has
                it. ``load_state_dict`` of this class takes both.
        """
        self.catch_up()
        found = super().state_dict()
        masked = {id(own): saved for own, saved in masked_state(self, packed=packed)}
        if masked:
            state = found["state"].items()
            found["state"] = {
                key: masked.get(id(param_state), param_state) for key, param_state in state
            }
        return found

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of torch's class with the same state.

        The state keeps its own precision (torch would cast it to the parameter's), and is copied.
        Options that the checkpoint does not know keep the values that they have. State of elements
        that a mask excludes is not loaded if the state is packed. A checkpoint that does not fit is
        refused, and nothing is changed. Under ``semantics="dense"`` rows catch up first, since
        the parameters themselves are not part of the checkpoint.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping):
            read_state_dict(self, given, ())  # raises

        def look(_: Optimizer, after_hooks: StateDict) -> None:
            names = self.option_names + self.group_options
            self._loading = read_state_dict(self, after_hooks, names)

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def take_over(self, optimizer: Optimizer) -> None:
        """Take the param groups, state and hooks of a torch optimizer with the same parameters.

        Groups and hooks are shared with it: a scheduler of the old one sets our options.
        """
        groups = optimizer.param_groups
        packed = [{**group, "params": list(map(id, group["params"]))} for group in groups]
        state = {id(param): param_state for param, param_state in optimizer.state.items()}
        names = self.option_names + self.group_options
        saved = {"state": state, "param_groups": packed}
        self._loading = read_state_dict(self, saved, names, copy=False)
        new = {"state": {}, "param_groups": list(groups)}
        self.__setstate__({**new, **optimizer_hooks(optimizer)})
        self._loading = None

    def __getstate__(self) -> dict[str, Any]:
        self.catch_up()
        own = {
            "engine": self.engine,
            "semantics": self.semantics,
            "option_names": self.option_names,
            "layouts": self.store.layouts,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch calls this at the end of load_state_dict too, with state and groups alone.
        if "_loading" not in self.__dict__:
            self._init_members()
        loading = self._loading
        if loading is not None:
            self._restore(loading, state)
        self.store.layouts.update(state.pop("layouts", {}))
        defaults = state.get("defaults") or self.defaults
        has_differentiable = "differentiable" in defaults
        super().__setstate__(state)
        if not has_differentiable:  # torch has added it
            self.defaults.pop("differentiable", None)
        self._complete_on_demand()

    def _restore(self, loading: LoadedState, state: dict[str, Any]) -> None:
        """Replace the state that torch has read from a checkpoint by our own reading."""
        for param in self.params():
            # A state_dict has no parameters, so catch up deferred rows first, unless the parameter
            # was written since: then it was loaded already.
            deferred = self.deferred.get(id(param))
            if deferred is not None and not deferred.was_modified(param):
                self.catch_up_rows(param, None)
        self.store.layouts.clear()
        self.deferred.clear()
        for group, missing in zip(state["param_groups"], loading.missing, strict=True):
            for name, value in missing.items():
                group.setdefault(name, value)
        if mapped_files:
            for _, param_state in loading.state:
                store_in_rows(param_state)
        state["state"].update(loading.state)
        state["layouts"] = loading.layouts


# Excluded from torch.compile. The compiler is imported only when it comes across them.
_uncompiled_init = disable_compiler(RuleOptimizer.__init__)
_uncompiled_step = disable_compiler(RuleOptimizer.step)
_uncompiled_zero_grad = disable_compiler(RuleOptimizer.zero_grad)


def _mask_of(group: ParamGroup, param: Tensor) -> Tensor | None:
    """The mask of a parameter of a group."""
    pairs = zip(masks.per_param(group.get("mask"), group["params"]), group["params"], strict=True)
    return next(mask for mask, each in pairs if each is param)


def _check_reset(
    tensors: Sequence[Tensor], values: Sequence[float], defaults: Sequence[float]
) -> None:
    """Refuse to start elements of int8 state from a number: a row of codes has one scale."""
    each = zip(tensors, values, defaults, strict=False)
    if any(tensor.dtype is torch.int8 and any(numbers) for tensor, *numbers in each):
        requirement = "elements whose int8 state does not start at zero cannot be reset"
        raise InputError(message(requirement, list(values), "Use another state_dtype"))


def _any_in_row(elements: Tensor) -> Tensor:
    return elements.reshape(len(elements) if elements.dim() else 1, -1).any(1)


def _reset_rows(
    state: Iterable[tuple[Tensor, float, float]], before: Tensor, after: Tensor, writes: RowWrites
) -> None:
    """Reset the state of rows that change, and in which two masks have no element in common.

    Each tensor comes with its value for rows with new elements, and that for all others.
    """
    reset, gains = ~_any_in_row(before & after), _any_in_row(after & ~before)
    loses = reset & ~gains & _any_in_row(before)
    for tensor, *numbers in state:
        for rows, number in zip((reset & gains, loses), numbers, strict=True):
            fresh = torch.full((1, *tensor.shape[1:]), number, dtype=tensor.dtype, device="cpu")
            writes.add(tensor, rows.nonzero().squeeze(1).to("cpu"), fresh)


def check_model_and_optimizer(who: str, model: Any, optimizer: Any) -> None:
    """Refuse anything but a model and an optimizer of this package."""
    if not isinstance(model, nn.Module):
        raise InputError(message(f"{who}: the model must be an nn.Module", type(model).__name__))
    if not isinstance(optimizer, RuleOptimizer):
        requirement = f"{who}: the optimizer must be one of sparsestep"
        kind = type(optimizer)
        raise InputError(message(requirement, f"{kind.__module__}.{kind.__qualname__}"))
