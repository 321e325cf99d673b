"""Param groups, as the steps of an optimizer read them.

You may change any option between two steps, so groups are compared in every step. Usually nothing
has changed, and the settings of the last step are used again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsestep.engines.base import GroupSettings
from sparsestep.engines.native import CachedPlan, StepTraces, native_group
from sparsestep.errors import InputError, message
from sparsestep.grads import masks
from sparsestep.memory.tensors import memory_of
from sparsestep.optim.state import packs_by
from sparsestep.rules import options
from sparsestep.rules.derived_idle import unsupported_message
from sparsestep.rules.rule import Rule

if TYPE_CHECKING:
    from sparsestep.distributed.grads import ShardedGradSource
    from sparsestep.optim.optimizer import RuleOptimizer

ParamGroup = dict[str, Any]
Selections = list[masks.MaskSelection | None]

_IMMUTABLE = (float, int, str, torch.dtype, type(None), Real)


def is_immutable(value: Any) -> bool:
    """Whether it cannot change without being replaced."""
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    return isinstance(value, _IMMUTABLE)


class ParamGroups:
    """An optimizer's param groups, as its steps see them.

    Holds no reference to the optimizer, to avoid a reference cycle.
    """

    def __init__(self) -> None:
        self._settings: dict[int, tuple[tuple[Any, ...], GroupSettings]] = {}
        # The masks of each group, and the parameters that they belong to.
        self._selections: dict[int, tuple[tuple[Tensor, ...], Selections]] = {}

    def settings(
        self, optimizer: RuleOptimizer, group_index: int, group: ParamGroup
    ) -> GroupSettings:
        """Return the settings of a param group, cached until an option changes."""
        values = tuple(group.values())
        known = self._settings.get(group_index)
        if known is not None and len(values) == len(known[0]) and all(map(is_, values, known[0])):
            return known[1]
        settings = self.read(optimizer, group_index, group)
        if group.get("mask") is None:
            self._selections.pop(group_index, None)
        changeable = (v for k, v in group.items() if k not in ("params", "mask", "param_names"))
        if all(map(is_immutable, changeable)):
            self._settings[group_index] = (values, settings)
        return settings

    def cached_plan(self, count: int) -> CachedPlan | None:
        """The plan of a step of the first ``count`` groups; ``None`` if it cannot be replayed."""
        plan = CachedPlan([], [], [], StepTraces())
        for group_index in range(count):
            if group_index not in self._settings:
                return None
            values, settings = self._settings[group_index]
            group = settings.core.get("group")
            if settings.seed is not None:  # random bits differ in every step
                return None
            if settings.rule.traceable_update is not None:
                plan.traced.append((group_index, settings))
            elif group is None:
                return None
            masked = None
            if group_index in self._selections:
                masked = masks.cached_masks(*self._selections[group_index])
                if masked is None:
                    return None
            plan.cached_groups.append((values, group, masked))
            plan.settings.append(settings)
        return plan

    def updated_plan(self, optimizer: RuleOptimizer, plan: CachedPlan) -> CachedPlan | None:
        """The plan under the present learning rates; ``None`` if any other option has changed."""
        groups = optimizer.param_groups
        if plan.traced or len(groups) != len(plan.cached_groups):
            return None
        updated = CachedPlan(list(plan.cached_groups), list(plan.settings), [], StepTraces())
        for index, (group, known) in enumerate(zip(groups, plan.cached_groups, strict=True)):
            values = tuple(group.values())
            same = [*map(is_, values, known[0])]
            if len(values) == len(known[0]) and all(same):
                continue
            settings = _with_lr(optimizer, group, plan.settings[index])
            core = None if settings is None else native_group(settings)
            others = (each for each, key in zip(same, group, strict=False) if key != "lr")
            if settings is None or len(values) != len(known[0]) or not all(others):
                return None
            self._settings[index] = values, settings
            updated.cached_groups[index] = values, core, known[2]
            updated.settings[index] = settings
        is_same = all(map(is_, updated.settings, plan.settings))
        return plan if is_same else updated

    @staticmethod
    def read(optimizer: RuleOptimizer, group_index: int, group: ParamGroup) -> GroupSettings:
        """Read a group without the cache; raises if its formula, kernel or semantics refuse it."""
        optimizer = optimizer.optimizer_of(group)
        optimizer.check_group(group)
        rule, elementwise = optimizer.stored_rules_for(group)
        settings = _read_settings(optimizer, group_index, group, rule)
        if elementwise is not None:
            settings.elementwise = _read_settings(optimizer, group_index, group, elementwise)
        return settings

    def selections(
        self, optimizer: RuleOptimizer, group_index: int, group: ParamGroup, settings: GroupSettings
    ) -> Selections | None:
        """Return the selections of a group's masks; they are reused until a mask changes."""
        given = group.get("mask")
        if given is None:
            return None
        params = group["params"]
        made_for, known = self._selections.get(group_index, ((), []))
        # A list may have other masks now, and the group other parameters.
        same = len(known) == 1 and known[0] is not None and known[0].mask is given
        if not same or not all(map(is_, params, made_for)) or len(params) != len(made_for):
            masks.check_masks(given, params, defers=optimizer.semantics == "dense")
            before = {id(p): selection for p, selection in zip(made_for, known, strict=True)}
            known = [
                None if mask is None else _select(before.get(id(param)), param, mask)
                for param, mask in zip(params, masks.per_param(given, params), strict=True)
            ]
            self._selections[group_index] = (tuple(params), known)
        for param, selection in zip(params, known, strict=True):
            if selection is not None:
                layout = optimizer.store.layouts.get(param)
                packs = layout is not None or not optimizer.state.get(param)
                packs = packs and packs_by(
                    settings.rule, selection.mask, param, group, optimizer.engine
                )
                selection.refresh(packs=packs)
                # A mask set by hand drops no state: it is kept in the parameter's shape.
                is_changed = layout is not None and not layout.same_as(selection.packed)
                if is_changed and optimizer.state.get(param):
                    selection.refresh(packs=False)
        return known


def _read_settings(
    optimizer: RuleOptimizer, group_index: int, group: ParamGroup, rule: Rule
) -> GroupSettings:
    # One-element tensors may be changed in place, so they are read in every step.
    own = optimizer.formula_options
    hyperparams: dict[str, Any] = {}
    for name in rule.hyperparam_names:
        # Some options only the element-wise rule has: the neutral value then.
        value = group[name] if name in group else options.NO_OP_VALUES[name][0]
        if name in own and isinstance(value, Tensor) and value.is_meta:
            requirement = f"{name} must be a number, or a tensor with values in memory"
            raise InputError(message(requirement, "a tensor on meta"))
        hyperparams[name] = value if name in own else options.as_floats(value)
    lr = group.get("lr", 0.0)
    if isinstance(lr, Tensor) and lr.numel() == 1 and "lr" in hyperparams:
        lr = hyperparams["lr"] = options.as_number("lr", lr)
    decay = 0.0
    if "weight_decay" not in own:
        decay = float(options.as_float(group.get("weight_decay", 0.0)))
    decoupled = decay and (
        optimizer.always_decoupled or options.get_option(group, "decoupled_weight_decay")
    )
    # A user's own rule may have an lr of any kind, but not where decoupled decay multiplies by it.
    left = 1 - options.as_number("lr", lr) * decay if decoupled else 1.0
    if optimizer.semantics == "dense":
        _check_dense_semantics(rule, group, coupled=bool(decay and not decoupled), left=left)
    has_torch_kernel = optimizer.supports_torch_kernel(group)
    settings = GroupSettings(
        rule,
        hyperparams,
        -1.0 if group.get("maximize") and "maximize" not in optimizer.formula_options else 1.0,
        0.0 if decoupled else decay,
        left,
        group.get("state_dtype"),
        options.ensure_seed(group),
        bool(options.get_option(group, "stochastic_rounding")),
        partial(describe_param, type(optimizer).__name__, group, group_index),
        has_torch_kernel,
        has_torch_kernel and bool(options.torch_kernel_choice(group)),
        constraint=options.RowConstraint.of_group(group),
    )
    if options.get_option(group, "state_dtype") is torch.int8:
        seed = settings.seed if settings.stochastic_rounding else None
        settings.vectors = replace(settings, rule=optimizer.rule_for(group), seed=seed, core={})
    return settings


def _with_lr(
    optimizer: RuleOptimizer, group: ParamGroup, settings: GroupSettings
) -> GroupSettings | None:
    """Settings under the group's present learning rate; ``None`` if they must be read again."""
    lr, decay = group.get("lr"), group.get("weight_decay", 0.0)
    others = settings.elementwise, settings.vectors, settings.rule.traceable_update
    is_plain = type(lr) is float and 0.0 <= lr < math.inf and isinstance(decay, float | int)
    if not is_plain or any(each is not None for each in others) or optimizer.formula_options:
        return None
    left = 1.0 if settings.coupled_decay else 1 - lr * decay
    if settings.wants_torch_kernel or not left > 0:
        return None
    hyperparams = {**settings.hyperparams, "lr": lr}
    return replace(settings, hyperparams=hyperparams, decay_factor=left, core={})


def _select(before: masks.MaskSelection | None, param: Tensor, mask: Tensor) -> masks.MaskSelection:
    if before is not None and before.mask is mask and before.shape == param.shape:
        return before
    return masks.MaskSelection(masks.local_mask(mask, param), memory_of(param).shape)


def describe_param(who: str, group: ParamGroup, group_index: int, index: int) -> str:
    """Name a parameter in messages, for example ``Adam: param 0 of group 0 (weight)``."""
    place = f"param {index} of group {group_index}"
    name = param_name(group, group_index, index)
    return f"{who}: {place}" if name == place else f"{who}: {place} ({name})"


def param_name(group: ParamGroup, group_index: int, index: int) -> str:
    """Return a parameter's name from ``named_parameters()`` if the group has names."""
    names = group.get("param_names")
    if names and index < len(names):
        return str(names[index])
    return f"param {index} of group {group_index}"


def _check_dense_semantics(rule: Rule, group: ParamGroup, *, coupled: bool, left: float) -> None:
    """Refuse rules and options without a closed form for idle rows."""
    if rule.idle_update is None and options.get_option(group, "bias_correction") == "per_row":
        requirement = (
            "with semantics='dense' every row takes every step: bias_correction must be global"
        )
        raise InputError(message(requirement, "'per_row'"))
    if rule.idle_update is None and rule.has_native_kernel:
        raise InputError(unsupported_message(rule.name))
    if coupled:
        requirement = (
            "semantics='dense' has no closed form for coupled weight decay, whose gradient is "
            "never zero"
        )
        got = f"weight_decay={group['weight_decay']}"
        raise InputError(message(requirement, got, "Use decoupled_weight_decay=True, or AdamW"))
    if not left > 0:
        requirement = "with semantics='dense', lr * weight_decay must be less than 1"
        raise InputError(message(requirement, 1 - left))
    if options.get_option(group, "state_dtype") is torch.int8:
        requirement = "semantics='dense' does not support int8 state"
        raise InputError(message(requirement, "state_dtype=torch.int8"))
    for name in ("stochastic_rounding", "differentiable"):
        if group.get(name):
            raise InputError(message(f"semantics='dense' does not support {name}", f"{name}=True"))


# A mask belongs to the rows of a rank; the others select torch's kernels.
_LOCAL_OPTIONS = {"mask", "foreach", "fused", "capturable", "differentiable"}


def options_for_ranks(optimizer: RuleOptimizer, source: ShardedGradSource) -> dict[str, str]:
    """Describe how an optimizer trains the tables of a source, for comparison across ranks.

    Param groups without such a table do not count: a rank may have parameters of its own.
    """
    facts = {"caller": f"{type(optimizer).__name__}.step()", "semantics": optimizer.semantics}
    named = [list(filter(None, map(source.name_of, g["params"]))) for g in optimizer.param_groups]
    facts["param groups"] = "; ".join(", ".join(names) for names in named if names)
    for group, names in zip(optimizer.param_groups, named, strict=True):
        if not names:
            continue
        whose = names[0] if len(names) == 1 else f"the group of {names[0]}"
        for option in (*optimizer.option_names, *optimizer.group_options):
            if option in group and option not in _LOCAL_OPTIONS:
                facts[f"{option} for {whose}"] = str(_plain(group[option]))
    return facts


def _plain(value: Any) -> Any:
    """Return an option without tensors, whose text depends on dtype and device."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else value
