"""RuleOptimizer: a torch optimizer around a rule.

It keeps groups, state and step counts as torch does, checks everything before anything is written,
and hands sparse and masked gradients to an engine, dense ones to torch's own kernel where torch has
one for the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    ParamsT,
    StateDict,
)

from sparsestep import engines
from sparsestep._process import fork_safe_lock, uninterrupted
from sparsestep._torch import disable_compiler, global_hooks, labelled, profiler_enabled
from sparsestep.deferred.rows import RowClock
from sparsestep.deferred.tracking import warn_of_another
from sparsestep.engines.base import Settings
from sparsestep.engines.native import Before, step_again
from sparsestep.errors import InputError, message
from sparsestep.grads import masks
from sparsestep.grads.exchange import GradExchange, Source, elsewhere, sources_of
from sparsestep.memory.huge_pages import HugePages
from sparsestep.memory.mapped_file import mapped_files, written
from sparsestep.memory.mapped_state import settle
from sparsestep.optim import state_dict as checkpoint
from sparsestep.optim.declaration import speaking
from sparsestep.optim.explain import Explains
from sparsestep.optim.param_groups import Groups
from sparsestep.optim.shared_options import facts_for
from sparsestep.optim.step import Plan, StepInBackward, announce_unmasked
from sparsestep.rules import options
from sparsestep.rules import options as checks
from sparsestep.rules._derive_idle import motion_of


class RuleOptimizer(Explains):
    """Base of every optimizer here; a subclass names its rule and checks its options.

    It is to be combined with torch's: ``class Adam(RuleOptimizer, Optimizer)``.
    """

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
        self._prepare()
        self.engine = engine
        self.semantics = semantics
        unknown = sorted(extras.keys() - set(self.group_options))
        if unknown:
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {unknown[0]!r}")
        with speaking(type(self).__name__):
            engines.check_engine(engine)
            if semantics not in ("masked", "dense"):
                requirement = "semantics must be one of masked, dense"
                raise InputError(message(requirement, repr(semantics)))
            self.check_values({**defaults, **extras})
        defaults = {**defaults, **options.given(extras)}
        self.option_names = tuple(defaults)
        # What makes the same optimizer again: type(optimizer)(params, **optimizer.defaults).
        super().__init__(params, {**defaults, **self._set_as_a_whole()})
        self._complete_on_demand()

    def _set_as_a_whole(self) -> dict[str, Any]:
        """What was chosen for the optimizer as a whole, but for the defaults."""
        whole = {name: getattr(self, name) for name in options.WHOLE}
        return {name: value for name, value in whole.items() if value != options.WHOLE[name]}

    def _prepare(self) -> None:
        """What is neither pickled nor copied."""
        self._loading: checkpoint.Checkpoint | None = None
        self.iterations: int = 0  # how often step() or zero_grad() was called
        self.updates: int = 0  # how often parameters were updated without step()
        self._groups: Groups = Groups()
        self.deferred: dict[int, RowClock] = {}
        self._known: dict[int, tuple[Any, ...]] = {}
        self._ran: dict[int, tuple[Tensor, str, str]] = {}
        self._embeddings: dict[int, tuple[Tensor, bool]] = {}
        self._huge_pages: HugePages = HugePages()
        self._before: Before | None = None  # what groups said, where a step may be done again
        self._lock = fork_safe_lock()  # one step at a time

    # Param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own, as torch's optimizers do."""
        group_index = len(self.param_groups)
        with speaking(f"{type(self).__name__}: param group {group_index}"):
            if isinstance(param_group, dict):
                if "params" not in param_group:
                    requirement = "a param group must have the key 'params'"
                    raise InputError(message(requirement, ", ".join(map(str, param_group)) or "{}"))
                options.check_keys(
                    param_group, [*self.option_names, *self.group_options], self.no_op_values
                )
                checks.check(param_group, self.formula_options)
                options.seed_of(param_group)
            super().add_param_group(param_group)
            for name in options.WHOLE:  # torch has put all defaults into the group
                param_group.pop(name, None)
            try:
                self.check_values(param_group)
                self._check_params(group_index, param_group)
                by_row = self.stored_rule_for(param_group).by_row or self.semantics == "dense"
                if self.semantics == "dense":  # what has no such form is refused
                    settings = self._groups.read(self, group_index, param_group)
                    if settings.rule.motion is None:
                        motion_of(settings.rule, 1, settings.hyper)
                masks.checked(param_group.get("mask"), param_group["params"], by_row=by_row)
                if self.semantics == "masked":
                    warn_of_another(type(self).__name__, param_group["params"])
            except Exception:
                self.param_groups.pop()
                raise

    def _check_params(self, group: int, options: dict[str, Any]) -> None:
        """Refuse parameters that the optimizer cannot work with."""
        name, params = type(self).__name__, options["params"]
        sparse = [[group, i] for i, param in enumerate(params) if param.layout is not torch.strided]
        if sparse:
            requirement = f"{name} requires dense parameter tensors"
            raise InputError(f"Sparse params at indices {sparse}: {requirement}")
        imaginary = [[group, i] for i, param in enumerate(params) if param.is_complex()]
        if imaginary and not self.supports_complex:
            requirement = f"{name} does not support complex parameters"
            raise InputError(f"Complex params at indices {imaginary}: {requirement}")
        if imaginary and options.get("state_dtype") is not None:
            requirement = (
                "the state of complex parameters has their dtype: state_dtype must be None"
            )
            raise InputError(message(requirement, options["state_dtype"]))

    def __repr__(self) -> str:
        who, rest = super().__repr__().split(" (", 1)
        settings = "".join(f"\n{k}: {v}" for k, v in self._set_as_a_whole().items())
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
            sources = sources_of(self.params()) if elsewhere else ()
            before = self._before if self.engine in ("auto", "native") else None
            if before is not None and mapped_files and not sources:
                before = before if announce_unmasked(self.state, self.param_groups) else None
            if sources:
                # A rank that stops in the middle of an exchange keeps the others waiting.
                uninterrupted(lambda: self._step_together(sources))
            elif before is None or not step_again(
                self.param_groups, before, self.state, self._known
            ):
                self._plan_step()
            if mapped_files:
                written(self.params())
            if self.iterations >= self._huge_pages.due:
                self._huge_pages.move(self.iterations)
        return loss

    def _step_together(self, sources: Sequence[Source]) -> None:
        """Step with tables that ranks share: all ranks prepare, then all commit, or none does."""
        exchange = GradExchange(sources, lambda source: facts_for(self, source))
        plan: Plan | None = None
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
        self._run_repeats(plan)

    def _planned(self) -> Plan:
        before, self._before = self._before, None
        plan = Plan(self, before.made if before is not None else ())
        with labelled("sparsestep: plan"):
            for group_index, group in enumerate(self.param_groups):
                plan.add_group(group_index, group)
        return plan

    def _plan_step(self) -> None:
        plan = self._planned()
        if plan.repeats:
            uninterrupted(lambda: self._run_with_repeats(plan))
            return
        before = None
        if plan.is_all_claimed and self.semantics == "masked":
            before = self._groups.as_they_were(len(self.param_groups))
        plan.run()
        self._before = before

    def _run_with_repeats(self, plan: Plan) -> None:
        plan.run()
        self._run_repeats(plan)

    def _run_repeats(self, plan: Plan) -> None:
        for group_index, index in plan.repeats:
            # A parameter given more than once (torch warns of it) goes on from where it arrived.
            another = Plan(self)
            another.add_group(group_index, self.param_groups[group_index], only=index)
            another.run()

    # Torch's wrapper runs the hooks and marks the step for a profiler. It costs as much as a small
    # step itself, so it is used only where somebody would notice.
    _observed_step = Optimizer.profile_hook_step(_step)

    def settings(self, group_index: int) -> Settings:
        """Return the validated options of a param group, as engines see them."""
        return self._groups.settings_of(self, group_index, self.param_groups[group_index])

    def move_to_huge_pages(self) -> None:
        """Move parameters and state to huge pages now, which a long training gets in time."""
        self._huge_pages.move_all()

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
        with speaking(type(self).__name__):
            return StepInBackward(self, params, backwards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do."""
        if torch.compiler.is_compiling():
            _uncompiled_zero_grad(self, set_to_none)
            return
        self.iterations += 1
        super().zero_grad(set_to_none)

    # Checkpoints and pickles

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of torch's class with the same state.

        The state keeps its own precision (torch would cast it to the parameter's), and is copied.
        Options that the checkpoint does not know keep the values that they have. A checkpoint that
        does not fit is refused, and nothing is changed. Under ``semantics="dense"`` rows are
        brought up to date first, for the parameters themselves are no part of the checkpoint.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping):
            checkpoint.read(self, given, ())  # says what is wrong with it

        def look(_: Optimizer, after_hooks: StateDict) -> None:
            names = self.option_names + self.group_options
            self._loading = checkpoint.read(self, after_hooks, names)

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
            self._prepare()
        loading = self._loading
        if loading is not None:
            self._restore(loading, state)
        super().__setstate__(state)
        self._complete_on_demand()

    def _restore(self, loading: checkpoint.Checkpoint, state: dict[str, Any]) -> None:
        """Put what a checkpoint says into the state that torch has read from it."""
        for param in self.params():
            # The parameters are no part of it, so what they have missed is made up for. But where
            # another hand has written them since, they have been loaded already, and stand.
            clock = self.deferred.get(id(param))
            if clock is not None and not clock.was_written(param):
                self.catch_up_rows(param, None)
        self.deferred.clear()
        for group, missing in zip(state["param_groups"], loading.missing, strict=True):
            for name, value in missing.items():
                group.setdefault(name, value)
        if mapped_files:
            for _, record in loading.state:
                settle(record)
        state["state"].update(loading.state)


# What is to run as it is when torch.compile comes across it. The compiler is not imported before
# it does.
_uncompiled_init = disable_compiler(RuleOptimizer.__init__)
_uncompiled_step = disable_compiler(RuleOptimizer.step)
_uncompiled_zero_grad = disable_compiler(RuleOptimizer.zero_grad)
