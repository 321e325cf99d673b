"""RuleOptimizer: a torch optimizer around one rule.

It keeps groups, state and step counts as torch does, checks everything before anything is written,
and hands the updates to an engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import (
    ParamsT,
    StateDict,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from sparsestep import engines
from sparsestep import state as states
from sparsestep.contract import Rule, Update
from sparsestep.errors import InputError, sentence
from sparsestep.grads import touched

# Options that some optimizer has. A group that sets one which this optimizer does not have is
# refused; other keys are the user's own notes, as with torch.
_OPTIONS = frozenset(
    {
        *("amsgrad", "bias_correction", "capturable", "dampening", "decoupled_weight_decay"),
        *("differentiable", "engine", "foreach", "fused", "initial_accumulator_value", "lr_decay"),
        *("mask", "momentum", "nesterov", "semantics", "state_dtype", "stochastic_rounding"),
        "weight_decay",
    }
)


@contextmanager
def _speaking(who: str) -> Iterator[None]:
    """Put the name of who refuses in front of what is refused."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{who}: {error}") from None


class RuleOptimizer(Optimizer):
    """Base of every optimizer here; a subclass names its rule and checks its options."""

    rule: ClassVar[Rule]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, engine: str) -> None:
        self._loading: StateDict | None = None
        self.engine = engine
        with _speaking(type(self).__name__):
            engines.check_engine(engine)
            self.check_options(defaults)
        super().__init__(params, defaults)

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Refuse values that the rule cannot work with."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own, as torch's optimizers do."""
        number = len(self.param_groups)
        with _speaking(type(self).__name__):
            if isinstance(param_group, dict):
                self._check_keys(param_group)
            super().add_param_group(param_group)
            try:
                self.check_options(param_group)
                self._check_params(number, param_group["params"])
            except Exception:
                self.param_groups.pop()
                raise

    def _check_keys(self, group: dict[str, Any]) -> None:
        unknown = sorted((_OPTIONS & group.keys()) - self.defaults.keys())
        if unknown:
            contract = f"a param group may set {', '.join(self.defaults)}"
            raise InputError(sentence(contract, ", ".join(unknown)))

    def _check_params(self, group: int, params: list[Tensor]) -> None:
        name = type(self).__name__
        sparse = [[group, i] for i, param in enumerate(params) if param.layout is not torch.strided]
        if sparse:
            contract = f"{name} requires dense parameter tensors"
            raise InputError(f"Sparse params at indices {sparse}: {contract}")
        imaginary = [[group, i] for i, param in enumerate(params) if param.is_complex()]
        if imaginary:
            contract = f"{name} does not support complex parameters"
            raise InputError(f"Complex params at indices {imaginary}: {contract}")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient: all of them, or raise and none.

        Args:
            closure: reevaluates the model and returns the loss, which is then returned.
        """
        if self._is_observed():
            given = () if closure is None else (closure,)
            return self._observed_step(*given)
        return self._step(closure)

    # Tells torch not to wrap step() once more.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_observed(self) -> bool:
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        )

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates, repeats = self._plan()
        self._run(updates)
        for update in repeats:
            self._run([update])
        return loss

    # Torch's wrapper runs the hooks and marks the step for a profiler. It costs as much as a small
    # step itself, so it is used only where somebody would notice.
    _observed_step = Optimizer.profile_hook_step(_step)

    def _plan(self) -> tuple[list[Update], list[Update]]:
        """Everything that this step will do, checked.

        The second list is for parameters that stand in a group more than once (torch warns of it):
        their further updates start from where the one before arrived.
        """
        updates: dict[int, Update] = {}  # by id: a tensor's own hash is a call into Python
        repeats: list[Update] = []
        names = self.rule.hyperparameters
        for number, group in enumerate(self.param_groups):
            hyper = {name: group[name] for name in names}
            if isinstance(hyper["lr"], Tensor):
                hyper["lr"] = hyper["lr"].item()
            maximize = group["maximize"]
            for index, param in enumerate(group["params"]):
                grad = param.grad
                if grad is None:
                    continue
                first = updates.get(id(param))
                if first is not None:
                    earlier = sum(again.param is param for again in repeats)
                    repeats.append(replace(first, step=first.step + earlier + 1))
                    continue
                who = partial(self._who, number, index)
                try:
                    update = self._update(param, grad, hyper, maximize, who)
                except InputError as error:
                    raise InputError(f"{who()}: {error}") from None
                updates[id(param)] = update
        return list(updates.values()), repeats

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        hyper: dict[str, Any],
        maximize: bool,
        who: Callable[[], str],
    ) -> Update:
        if param.dtype not in states.FLOATS:
            raise InputError(sentence("a parameter must be of a real float dtype", param.dtype))
        gradient = touched(param, grad)
        kept = self.state.get(param)
        if kept:
            tensors, done = states.checked(self.rule, param, kept), int(kept["step"])
        else:
            kept = None
            tensors, done = states.new(self.rule, param, gradient), 0
        return Update(self.rule, param, gradient, tensors, done + 1, hyper, maximize, who, kept)

    def _who(self, group: int, index: int) -> str:
        names = self.param_groups[group].get("param_names")
        name = f" ({names[index]})" if names else ""
        return f"{type(self).__name__}: param {index} of group {group}{name}"

    def _run(self, updates: list[Update]) -> None:
        engines.run(updates, self.engine)
        for update in updates:
            kept = update.kept
            if kept is None:  # the first step: only now does the parameter have a state
                kept = self.state[update.param]
                kept["step"] = 0
                for spec, tensor in zip(self.rule.state, update.state, strict=True):
                    kept[spec.name] = tensor
            kept["step"] = update.step

    # Checkpoints and pickles

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of torch's class with the same state.

        The state keeps its own precision (torch would cast it to the parameter's), and is copied.
        Options that the checkpoint does not know get this optimizer's defaults.
        """

        def capture(_: Optimizer, after_hooks: StateDict) -> None:
            self._loading = after_hooks

        handle = self.register_load_state_dict_pre_hook(capture)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": self.engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch calls this at the end of load_state_dict too, with state and groups alone.
        self.__dict__.setdefault("_loading", None)
        super().__setstate__(state)
        # Torch adds to the defaults here; a group gets only what the constructor knows.
        known = inspect.signature(type(self)).parameters.keys() & self.defaults.keys()
        for group in self.param_groups:
            for name in known:
                group.setdefault(name, self.defaults[name])
        if self._loading is not None:
            self._restore_precision(self._loading)

    def _restore_precision(self, saved: StateDict) -> None:
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(ids, params, strict=True):
            if saved_id in saved["state"]:
                self.state[param] = states.loaded(self.rule, param, saved["state"][saved_id])
