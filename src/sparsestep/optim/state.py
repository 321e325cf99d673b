"""The state tensors of a parameter: created, checked, loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import is_called_by_checkpoint, scalar_dtype
from sparsestep.errors import InputError, message
from sparsestep.grads.exchange import source_of
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.masks import PackedMask
from sparsestep.memory import lazy as pages
from sparsestep.memory import mapped_file
from sparsestep.memory import tensors as parameters
from sparsestep.memory.huge_pages import HugePages
from sparsestep.memory.mapped_file import file_of
from sparsestep.memory.tensors import COMPLEX_DTYPES, FLOAT_DTYPES, INTEGER_DTYPES, memory_of
from sparsestep.rules.options import RowConstraint, as_float, uses_random_rounding
from sparsestep.rules.rule import Rule, StateSpec, fits_float32

if TYPE_CHECKING:
    from sparsestep.optim.optimizer import RuleOptimizer

_COUNTS = {*FLOAT_DTYPES, *INTEGER_DTYPES}


class OptimizerState(defaultdict[Tensor, Any]):
    """An optimizer's state by parameter; torch's checkpoints find it complete.

    ``torch.distributed.checkpoint`` tests whether there is any. If not, it runs a step of zero
    gradients, as large as the tables; if some parameters have none, what it saves cannot be loaded.
    Other callers, PyKEEN for one, test whether there was a step, and get that answer.
    """

    def __init__(self, state: Mapping[Tensor, Any], complete: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._complete = WeakMethod(complete)  # creates missing state

    def __bool__(self) -> bool:
        complete = self._complete() if is_called_by_checkpoint() else None
        if complete is not None:
            complete()
        return len(self) > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    copy = __copy__


def packs_by(
    rule: Rule, mask: Tensor, param: Tensor, group: Mapping[str, Any], engine: str
) -> bool:
    """Whether a mask packs the state per element of a parameter: one value for each kept one.

    State per row is never packed. State in files and on other devices, of sharded tables, of
    parameters that are not contiguous, of complex rows, and of rows with a constraint keeps the
    parameter's shape. So does int8 state that does not start at zero, since single elements cannot
    be reset, and state of ``dense="elementwise"``, whose shape tells which formula it belongs to.
    Triton's kernels use one index for parameter and state.
    """
    return (
        mask.dim() > 1
        and engine != "triton"
        and not (
            rule.needs_whole_rows and (param.is_complex() or all(s.per_row for s in rule.state))
        )
        and not any(s.dtype is torch.int8 and initial_value(s, group) for s in rule.state)
        and group.get("dense") != "elementwise"
        and RowConstraint.of_group(group) is None
        and param.is_cpu
        and not parameters.is_distributed(param)
        and param.is_contiguous()
        and file_of(param) is None
        and source_of(param) is None
    )


def packed_layout(
    rule: Rule, mask: Tensor | None, param: Tensor, group: Mapping[str, Any], engine: str
) -> PackedMask | None:
    """Return the layout of new state under a mask; ``None`` for that of the parameter."""
    packs = mask is not None and packs_by(rule, mask, param, group, engine)
    return PackedMask.of(mask) if mask is not None and packs else None


def state_shape(spec: StateSpec, param: Tensor, packed: PackedMask | None = None) -> torch.Size:
    """Return the shape of a state tensor: the parameter's, its rows, or its kept elements."""
    if spec.per_row:
        return param.shape[:1]
    if packed is not None and packed.shape == param.shape:
        return torch.Size([packed.kept])
    return param.shape


def relayout(
    state: Sequence[StateSpec],
    tensors: list[Tensor],
    values: list[float],
    shape: torch.Size,
    old: PackedMask | None,
    new: PackedMask | None,
) -> list[Tensor]:
    """Copy state per element into another layout; ``None`` is that of a parameter of this shape.

    Elements that the old layout lacks get the initial value of their state, from ``values``. State
    per row is returned unchanged.

    Example:
        >>> masks = torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])
        >>> old, new = map(PackedMask.of, masks)
        >>> specs, state = [StateSpec("sum")], [torch.tensor([1.0, 2.0])]
        >>> relayout(specs, state, [0.5], torch.Size([1, 3]), old, new)
        [tensor([2.0000, 0.5000])]
        >>> relayout(specs, state, [0.5], torch.Size([1, 3]), old, None)
        [tensor([[1.0000, 2.0000, 0.5000]])]
    """
    found, numel = list(tensors), shape.numel()
    shape = shape if new is None else torch.Size([new.kept])
    pairs = []
    for index, (spec, tensor, value) in enumerate(zip(state, tensors, values, strict=True)):
        if spec.per_row:
            continue
        parameters.check_writable("the state", tensor)
        dtype = tensor.dtype
        found[index] = pages.full(shape, fill_value(dtype, value), dtype, tensor.device)
        if numel:
            pairs.append((tensor.detach().reshape(-1).contiguous(), found[index]))
    if ext is not None and pairs and all(tensor.is_cpu for tensor, _ in pairs):
        sized = [(tensor, into, tensor.element_size()) for tensor, into in pairs]
        ext.repack(old, new, numel, sized, torch.get_num_threads())
        return found
    everything = torch.ones(numel, dtype=torch.bool)
    before, after = (m.bits()[:numel] if m is not None else everything for m in (old, new))
    stays, to = after[before], before[after]
    for tensor, into in pairs:
        into.view(-1)[to.to(tensor.device)] = tensor[stays.to(tensor.device)]
    return found


def state_dtype_for(
    spec: StateSpec, param: Tensor, state_dtype: torch.dtype | None = None
) -> torch.dtype:
    """Return the dtype of a state tensor: ``state_dtype``, else the parameter's, at least float32.

    Running averages in half precision stall: an average of 0.25 in bfloat16 no longer moves when a
    thousandth of the new value is added to it.
    """
    if spec.dtype is not None:
        return spec.dtype
    if param.dtype in COMPLEX_DTYPES:
        return param.real.dtype if spec.per_row else param.dtype
    if state_dtype is not None and state_dtype is not torch.int8:  # which the spec would say
        return state_dtype
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def replace_layout(
    state: Sequence[StateSpec],
    tensors: list[Tensor],
    values: list[float],
    shape: torch.Size,
    old: PackedMask | None,
    new: PackedMask | None,
) -> list[Tensor]:
    """Return the state of a parameter in another layout, as its replacement."""
    if any(tensor.is_shared() for tensor in tensors):
        requirement = "a mask over elements must not change once the state is in shared memory"
        raise InputError(message(requirement, "state that other processes may have"))
    return relayout(state, tensors, values, shape, old, new)


@torch.inference_mode(False)
def new_state(
    rule: Rule,
    param: Tensor,
    options: Mapping[str, Any],
    state_dtype: torch.dtype | None,
    packed: PackedMask | None = None,
) -> list[Tensor]:
    """State for a parameter's first step."""
    made = []
    for spec in rule.state:
        dtype = state_dtype_for(spec, param, state_dtype)
        shape = state_shape(spec, param, packed)
        value = fill_value(dtype, initial_value(spec, options))
        tensor = mapped_file.new_state(param, spec.name, shape, value, dtype)
        if tensor is None and not spec.per_row and not param.is_contiguous():
            # Elements in the parameter's own order, as torch does it.
            tensor = torch.full_like(param, value, dtype=dtype, requires_grad=False)
        made.append(pages.full(shape, value, dtype, param.device) if tensor is None else tensor)
    return made


def initial_values(
    rule: Rule, options: Mapping[str, Any], given: Mapping[str, float] | None = None
) -> list[float]:
    """Return the initial value of each state tensor; ``given`` has others, by name."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not given.keys() <= set(rule.state_names):
        names = ", ".join(rule.state_names) or "none"
        raise InputError(message(f"initial must be a dict by names of the state ({names})", given))
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value or not fits_float32(value):
            requirement = f"initial[{name!r}] must be a number that float32 can hold"
            raise InputError(message(requirement, repr(value)))
    coded = [spec.name for spec in rule.state if spec.dtype is torch.int8 and given.get(spec.name)]
    if coded:
        requirement = "initial must not have state in int8, which has a scale for each row"
        raise InputError(message(requirement, coded[0], "Use another state_dtype"))
    return [float(given.get(spec.name, initial_value(spec, options))) for spec in rule.state]


def initial_value(spec: StateSpec, options: Mapping[str, Any]) -> float:
    """Return the initial value of a state's elements; of both parts of complex ones."""
    value = options[spec.initial] if isinstance(spec.initial, str) else spec.initial
    value = float(as_float(value))
    return value if spec.encode_initial is None else spec.encode_initial(value)


def fill_value(dtype: torch.dtype, value: float) -> complex:
    """Return an initial value in a dtype; both parts of a complex number have it."""
    return complex(value, value) if dtype in COMPLEX_DTYPES and value else value


def is_complete(rule: Rule, param_state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has every tensor of the rule."""
    return all(param_state.get(spec.name) is not None for spec in rule.state)


def is_elementwise(rule: Rule, param: Tensor, param_state: Mapping[str, Any]) -> bool:
    """Whether the state that a rule keeps per row has one value per element instead.

    In a parameter of one dim, rows are elements: its state is that of rows, unless it is complex.
    """
    name = next(spec.name for spec in rule.state if spec.per_row)
    tensor = param_state.get(name)
    if not isinstance(tensor, Tensor):
        return False
    if param.is_complex():
        return tensor.is_complex()
    return param.dim() > 1 and tensor.shape == param.shape


def is_unused(param_state: Mapping[str, Any]) -> bool:
    """Whether a state was created in advance, and no step has used it."""
    count = param_state.get("step")
    if isinstance(count, Tensor):
        return count.numel() == 1 and not count.item()
    return isinstance(count, int | float) and not count


def check_state(
    rule: Rule, param: Tensor, state: Mapping[str, Any], packed: PackedMask | None = None
) -> list[Tensor]:
    """The rule's tensors from a parameter's state; raises if they do not fit the parameter."""
    tensors = []
    on_cpu = param.is_cpu
    for spec in rule.state:
        tensor = state.get(spec.name)
        if not isinstance(tensor, Tensor):
            requirement = f"the state must have a tensor {spec.name!r}"
            remedy = "Set back the option that needs it, or make a new optimizer"
            got = type(tensor).__name__ if spec.name in state else ", ".join(map(str, state))
            raise InputError(message(requirement, got, remedy))
        tensor = memory_of(tensor)
        same_device = (on_cpu and tensor.is_cpu) or tensor.device == param.device
        wanted = state_shape(spec, param, packed)
        if tensor.shape != wanted or not same_device:
            raise InputError(
                message(
                    f"the state {spec.name!r} must have shape {tuple(wanted)} and be on "
                    f"{param.device}, like the parameter",
                    f"{tuple(tensor.shape)} on {tensor.device}",
                    "Was the parameter replaced? Make a new optimizer for it",
                )
            )
        if param.is_complex() and tensor.is_complex() == spec.per_row:
            # Real state would be half as large as what is written.
            wanted_dtype = state_dtype_for(spec, param)
            requirement = (
                f"the state {spec.name!r} of a {param.dtype} parameter must be {wanted_dtype}"
            )
            raise InputError(message(requirement, tensor.dtype))
        coded = tensor.dtype is torch.int8 or spec.dtype is torch.int8
        is_float = tensor.dtype in FLOAT_DTYPES or tensor.dtype == param.dtype
        if tensor.dtype != spec.dtype if coded else not is_float:
            kind = "dtype torch.int8" if spec.dtype is torch.int8 else "a real float dtype"
            raise InputError(message(f"the state {spec.name!r} must have {kind}", tensor.dtype))
        if tensor.layout is not torch.strided:
            requirement = f"the state {spec.name!r} must be a strided tensor"
            raise InputError(message(requirement, tensor.layout, "Load it with load_state_dict"))
        tensors.append(tensor)
    return tensors


def check_step(rule: Rule, state: Mapping[str, Any]) -> None:
    """Refuse a state without a valid step count, if the rule needs one."""
    count = state.get("step")
    if isinstance(count, int | float) or (count is None and not rule.counts_steps):
        return
    if not isinstance(count, Tensor):
        requirement = "the state must have 'step', the number of steps taken"
        got = ", ".join(map(str, state)) if count is None else f"a {type(count).__name__}"
        raise InputError(message(requirement, got, "To start over, clear the parameter's state"))
    if count.numel() != 1 or count.layout is not torch.strided or count.dtype not in _COUNTS:
        requirement = "the state 'step' must be a number or a one-element tensor"
        raise InputError(message(requirement, f"{count.dtype} of shape {tuple(count.shape)}"))
    if count.is_inference() and not torch.is_inference_mode_enabled():
        requirement = "outside torch.inference_mode(), 'step' must not be an inference tensor"
        raise InputError(message(requirement, "an inference tensor", "Use a clone of it"))


@torch.inference_mode(False)
def new_step(
    optimizer: RuleOptimizer, group: Mapping[str, Any], param: Tensor, value: int = 0
) -> int | Tensor:
    """Return a step count as torch's class keeps it."""
    if not optimizer.step_is_tensor:
        return value
    fused, capturable = group.get("fused"), group.get("capturable")
    device = param.device if fused or capturable else torch.device("cpu")
    return torch.full((), float(value), dtype=scalar_dtype(is_fused=fused), device=device)


def new_param_state(
    optimizer: RuleOptimizer,
    group: Mapping[str, Any],
    rule: Rule,
    param: Tensor,
    tensors: list[Tensor],
) -> dict[str, Any]:
    """Return a parameter's first state, with a step count of zero; empty if there is none."""
    param_state: dict[str, Any] = {}
    if rule.counts_steps or uses_random_rounding(group):
        param_state["step"] = new_step(optimizer, group, param)
    for spec, tensor in zip(rule.state, tensors, strict=True):
        param_state[spec.name] = parameters.laid_out_like(param, tensor)
    return param_state


def grow_tensor(name: str, tensor: Tensor, keep: int, rows: int, value: float) -> Tensor:
    """Return a state tensor with more rows; those after the first ``keep`` have ``value``."""
    if tensor.is_cpu and tensor.is_shared():
        requirement = f"the state {name!r} of a parameter that grows must not be in shared memory"
        raise InputError(message(requirement, "one that other processes may have"))
    shape, dtype = torch.Size([rows, *tensor.shape[1:]]), tensor.dtype
    new_state = pages.full(shape, fill_value(dtype, value), dtype, tensor.device)
    new_state[:keep] = tensor.detach()[:keep]
    return new_state


class StateStore:
    """The memory of an optimizer's parameters and their state."""

    def __init__(self) -> None:
        # By ``id(param)``: the parameter (kept alive so the id stays unique) and the data pointers
        # that passed the write check. The core reads and compares them.
        self.addresses: dict[int, tuple[Any, ...]] = {}
        self.layouts: dict[Tensor, PackedMask] = {}  # the mask whose kept elements a state has
        self.huge_pages: HugePages = HugePages()  # tensors that wait for huge pages

    def check_writable(
        self,
        param: Tensor,
        memory: Tensor,
        state: list[Tensor] | None = None,
        gradient: IndexedGrad | None = None,
        *,
        num_params: int = 0,
        iteration: int = 0,
    ) -> None:
        """Refuse memory that cannot be written; skips memory that passed before.

        With the checked gradient of an update, the result is cached.
        """
        tensors = (memory, *(state or ()))
        addresses = tuple(map(parameters.address, tensors))
        known = self.addresses.get(id(param))
        before = () if known is None or known[0] is not param else known[1 : 1 + len(tensors)]
        # The address does not tell a negative view from its base, nor empty tensors apart.
        is_known = before == addresses and 0 not in addresses
        if is_known and not any(t.is_neg() or t.is_conj() for t in tensors):
            return
        names = ("a parameter", *("its state" for _ in tensors[1:]))
        for name, tensor in zip(names, tensors, strict=True):
            parameters.check_writable(name, tensor)
        if gradient is None or any(tensor.is_inference() for tensor in tensors):
            return  # inference tensors are writable only in inference mode
        if gradient.indices is not None:  # dense sweeps don't benefit from huge pages
            for tensor in tensors[len(before) :]:
                self.huge_pages.add(tensor, gradient.indices.numel(), iteration)
        if known is None and len(self.addresses) > num_params:
            self.addresses.clear()  # parameters were removed from the groups
        self.addresses[id(param)] = (param, *addresses)

    def layout_of(
        self, rule: Rule, param: Tensor, param_state: Mapping[str, Any] | None
    ) -> PackedMask | None:
        """Return the layout of a parameter's state; ``None`` if that has the parameter's shape."""
        found = self.layouts.get(param)
        if found is None or not param_state:
            return None
        kept = [param_state.get(spec.name) for spec in rule.state if not spec.per_row]
        has_shape = (isinstance(t, Tensor) and t.shape == (found.kept,) for t in kept)
        return found if kept and all(has_shape) else None

    def set_layout(self, param: Tensor, packed: PackedMask | None) -> None:
        """Note that a parameter has state in this layout."""
        if packed is None:
            self.layouts.pop(param, None)
        else:
            self.layouts[param] = packed

    def drop(self, param: Tensor) -> None:
        """Forget the memory of a parameter that gets other memory."""
        self.addresses.pop(id(param), None)
        self.huge_pages.remove(param)


def check_rows(name: str, rows: Tensor, param: Tensor) -> Tensor:
    """Return row indices of a parameter as int64 of one dim; raise if they are none."""
    if not isinstance(rows, Tensor) or rows.dtype not in INTEGER_DTYPES:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(message("rows must be an integer tensor", got))
    if rows.layout is not torch.strided or rows.is_nested:
        raise InputError(message("rows must be a strided tensor", rows.layout))
    rows, count = rows.reshape(-1).long(), len(param) if param.dim() else 1
    outside = parameters.out_of_range(rows, count)
    if outside is not None:
        raise InputError(message(f"{name} must be in [0, {count})", outside))
    return rows


def describe_other(param: Any) -> str:
    """Describe what was passed instead of a parameter of the optimizer."""
    shape = getattr(param, "shape", None)
    return type(param).__name__ if shape is None else f"another, of shape {tuple(shape)}"
