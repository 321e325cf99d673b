"""Loading a checkpoint: everything is checked before anything is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads import masks
from sparsestep.memory.lazy import saved_by_row, strided
from sparsestep.memory.mapped_file import copy_state
from sparsestep.memory.tensors import COMPLEX_DTYPES, FLOAT_DTYPES
from sparsestep.optim import state as states
from sparsestep.optim.param_groups import ParamGroup, describe_param
from sparsestep.rules.int8 import convert_saved
from sparsestep.rules.rule import Rule, StateSpec

if TYPE_CHECKING:
    from sparsestep.optim.optimizer import RuleOptimizer


class LoadedState(NamedTuple):
    """A checkpoint, read and checked."""

    missing: list[ParamGroup]  # for each param group, options that the checkpoint does not know
    state: list[tuple[Tensor, dict[str, Any]]]  # copied, in the dtype that it has here
    layouts: dict[Tensor, masks.PackedMask]  # of parameters whose state is packed


def read_state_dict(
    optimizer: RuleOptimizer, saved: Any, names: tuple[str, ...], *, copy: bool = True
) -> LoadedState | None:
    """Read the state dict of this class or of torch's; changes nothing.

    Options in ``names`` keep their value if the checkpoint does not know them. Returns ``None`` if
    the numbers of groups or parameters differ, for torch to refuse. Without ``copy``, tensors
    that already fit are not copied.
    """
    who = type(optimizer).__name__
    with error_prefix(who):
        _check_structure(saved)
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes = [[len(group["params"]) for group in each] for each in (groups, saved_groups)]
    if sizes[0] != sizes[1]:
        return None
    found = LoadedState([], [], {})
    for group_index, (group, new) in enumerate(zip(groups, saved_groups, strict=True)):
        missing = {name: group[name] for name in names if name in group and name not in new}
        known = {**missing, **new, "params": group["params"]}
        found.missing.append(missing)
        with error_prefix(f"{who}: group {group_index} of the checkpoint"):
            _check_group(optimizer, group_index, known)
            _check_class(optimizer, optimizer.rule_for(known), new)
        listed = masks.per_param(known.get("mask"), group["params"])
        for index, (param, key) in enumerate(zip(group["params"], new["params"], strict=True)):
            if key not in saved["state"]:
                continue
            with error_prefix(describe_param(who, group, group_index, index)):
                param_state, packed = _read_param_state(
                    optimizer, known, param, saved["state"][key], listed[index], copy=copy
                )
            if packed is not None:
                found.layouts[param] = packed
            if param_state.get("step") is not None:
                count = int(param_state["step"])
                param_state["step"] = states.new_step(optimizer, known, param, count)
            found.state.append((param, param_state))
    return found


def _check_structure(saved: Any) -> None:
    requirement = "a checkpoint must be a dict with the keys 'state' and 'param_groups'"
    if not isinstance(saved, Mapping):
        raise InputError(message(requirement, f"a {type(saved).__name__}"))
    if not {"state", "param_groups"} <= saved.keys():
        got = f"the keys {', '.join(map(repr, saved))}" if saved else "an empty dict"
        remedy = "Pass what state_dict() of the optimizer returned"
        raise InputError(message(requirement, got, remedy))
    if not isinstance(saved["state"], Mapping):
        requirement = "'state' of a checkpoint must be a dict"
        raise InputError(message(requirement, f"a {type(saved['state']).__name__}"))
    groups = saved["param_groups"]
    if not isinstance(groups, list | tuple):
        requirement = "'param_groups' of a checkpoint must be a list"
        raise InputError(message(requirement, f"a {type(groups).__name__}"))
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            requirement = f"group {index} of the checkpoint must be a dict with a list 'params'"
            keys = f"the keys {', '.join(map(repr, group))}" if isinstance(group, Mapping) else ""
            raise InputError(message(requirement, keys or f"a {type(group).__name__}"))


def _check_class(optimizer: RuleOptimizer, rule: Rule, saved: ParamGroup) -> None:
    """Refuse a group of another optimizer class.

    A missing option alone is no sign of it: torch's classes got new options over time. Options of
    other classes are none either: torch's SparseAdam loads what torch's Adam has saved.
    """
    known = {*optimizer.option_names, *optimizer.group_options}
    foreign = sorted(optimizer.no_op_values.keys() & saved.keys() - known)
    missing = [name for name in rule.hyperparam_names if name not in saved]
    if foreign and missing:
        requirement = f"its options must be those of {type(optimizer).__name__}, with "
        remedy = "Load it into the optimizer class that saved it"
        raise InputError(message(requirement + ", ".join(missing), ", ".join(foreign), remedy))


def _check_group(optimizer: RuleOptimizer, group_index: int, group: ParamGroup) -> None:
    """Refuse options that the constructor would refuse."""
    optimizer.check_group(group)
    is_dense = optimizer.semantics == "dense"
    if is_dense:  # refuses options without a closed form
        optimizer.groups.read(optimizer, group_index, dict(group))
    masks.check_masks(group.get("mask"), group["params"], defers=is_dense)


def _read_param_state(
    optimizer: RuleOptimizer,
    group: ParamGroup,
    param: Tensor,
    saved: Any,
    mask: Tensor | None,
    *,
    copy: bool,
) -> tuple[dict[str, Any], masks.PackedMask | None]:
    if not isinstance(saved, Mapping):
        raise InputError(message("its state must be a dict", type(saved).__name__))
    if not saved:
        return {}, None
    rule = optimizer.stored_rule_for(group, param, saved)
    packed = None
    if mask is not None and mask.dim() > 1:
        packed = masks.PackedMask.of(mask.cpu())
    packs = mask is not None and states.packs_by(rule, mask, param, group, optimizer.engine)
    wanted = packed if packs else None
    given, saved = saved if copy else {}, _to_strided(param, saved)

    for spec in rule.state:
        value = saved.get(spec.name)
        if _is_packed(value, spec) and (value.dtype is torch.int8) != (spec.dtype is torch.int8):
            # Int8 has a scale for each row of the parameter.
            saved[spec.name] = _relayout(spec, value, group, param, packed, None)
    saved = convert_saved(rule, saved)
    replaced = optimizer.state.get(param) or {}
    for spec in rule.state:
        name, value = spec.name, saved.get(spec.name)
        if value is None and not rule.counts_steps:
            continue  # for torch's SGD, a missing buffer means a first step
        layout = packed if _is_packed(value, spec) else None
        _check_tensor(spec, param, value, saved, layout)
        value = _relayout(spec, value, group, param, layout, wanted)
        # Not in the parameter's dtype, as with torch: float32 moments would lose their bits.
        dtype = states.state_dtype_for(spec, param, group.get("state_dtype"))
        copied = copy_state(param, name, value, dtype, replaced.get(name))
        if copied is None:
            copied = value.detach().to(param.device, dtype, copy=value is given.get(name))
        saved[name] = copied
    if rule.counts_steps or saved.get("step") is not None:
        _check_step(saved)
    return saved, wanted


def _is_packed(value: Any, spec: StateSpec) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1 and not spec.per_row


def _relayout(
    spec: StateSpec,
    value: Any,
    group: ParamGroup,
    param: Tensor,
    old: masks.PackedMask | None,
    new: masks.PackedMask | None,
) -> Any:
    if old is new or spec.per_row or (old is not None and value.shape != (old.kept,)):
        return value  # what does not fit is refused later
    initial = [states.initial_value(spec, group)]
    value = value.clone() if value.is_inference() else value
    return states.relayout([spec], [value], initial, param.shape, old, new)[0]


def _to_strided(param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved state without sparse tensors, as torch's SGD and masks by rows may have saved it."""
    shapes = (param.shape, param.shape[:1])  # any other is refused later
    return {
        name: strided(f"its state {name!r}", value)
        if isinstance(value, Tensor) and value.shape in shapes
        else value
        for name, value in saved.items()
    }


def _check_tensor(
    spec: StateSpec,
    param: Tensor,
    value: Any,
    saved: Mapping[str, Any],
    packed: masks.PackedMask | None,
) -> None:
    if not isinstance(value, Tensor):
        held = f"{value!r}" if spec.name in saved else f"one with {', '.join(map(str, saved))}"
        raise InputError(message(f"its state must have a tensor {spec.name!r}", held))
    if value.is_meta and not param.is_meta:
        requirement = f"its state {spec.name!r} must have values"
        raise InputError(message(requirement, "a tensor on the meta device"))
    wanted = states.state_shape(spec, param, packed)
    if value.shape != wanted:
        requirement = f"its state {spec.name!r} must have shape {tuple(wanted)}, like the parameter"
        raise InputError(message(requirement, tuple(value.shape)))
    real = value.dtype in FLOAT_DTYPES or value.dtype == spec.dtype
    if not real and not (param.is_complex() and value.dtype in COMPLEX_DTYPES):
        kind = "float" if not param.is_complex() else "float or complex"
        raise InputError(message(f"its state {spec.name!r} must be {kind}", value.dtype))


def _check_step(saved: Mapping[str, Any]) -> None:
    count = saved.get("step")
    requirement = "its state must have 'step', the number of steps taken"
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_complex() or count.is_meta:
            raise InputError(
                message(requirement, f"a tensor of shape {tuple(count.shape)} on {count.device}")
            )
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, int | float):
        got = f"{count!r}" if "step" in saved else f"one with {', '.join(map(str, saved))}"
        raise InputError(message(requirement, got))
    if not 0 <= count < 1 << 53:
        raise InputError(message(requirement, count))


def unpacked_state(optimizer: RuleOptimizer, param: Tensor) -> Mapping[str, Any] | None:
    """Return the state of a parameter in its shape: if it is packed, a copy."""
    if param not in optimizer.store.layouts:
        found: dict[str, Any] | None = optimizer.state.get(param)
        return found
    group = optimizer.group_of(param)
    optimizer.check_group(group)
    rule, param_state, packed = optimizer.stored_state(param)
    if not param_state or packed is None:
        return param_state
    specs = [spec for spec in rule.state if not spec.per_row]
    tensors = [param_state[spec.name] for spec in specs]
    values = [states.initial_value(spec, group) for spec in specs]
    dense = states.relayout(specs, tensors, values, packed.shape, packed, None)
    return {**param_state, **{spec.name: new for spec, new in zip(specs, dense, strict=True)}}


def masked_state(
    optimizer: RuleOptimizer, *, packed: bool
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield the state of parameters with a mask, and its form in a checkpoint."""
    for group in optimizer.param_groups:
        listed = masks.per_param(group.get("mask"), group["params"])
        for param, mask in zip(group["params"], listed, strict=True):
            param_state = optimizer.state.get(param)
            if not param_state:
                continue
            layout = optimizer.store.layouts.get(param)
            if layout is not None:
                # A mask that was changed by hand may differ from the layout of the state.
                is_current = mask is not None and layout.same_as(masks.PackedMask.of(mask))
                if not (packed and is_current):
                    yield param_state, unpacked_state(optimizer, param) or {}
            elif isinstance(mask, Tensor) and mask.dim() == 1:
                rule = optimizer.stored_rule_for(group, param, param_state)
                saved = {
                    n: saved_by_row(param_state[n]) for n in rule.state_names if n in param_state
                }
                yield param_state, {**param_state, **saved}
