"""The engine that runs torch's own kernels, for dense gradients under torch's formulas.

Torch's kernels allocate temporaries while they write. On the CPU, a step is atomic even if that
fails: in prepare, the kernel runs on copies of parameters and state, and commit copies the results
back. On other devices, for ``differentiable=True``, and for parameters that share memory, the
kernel runs in commit: if its temporaries do not fit into the memory there, the step is torn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from sparsestep._torch import capturable_devices, check_fused
from sparsestep.engines.base import ParamUpdate, finish
from sparsestep.errors import InputError, is_out_of_memory, message
from sparsestep.memory import tensors as parameters
from sparsestep.rules.options import NUMBERS, SWITCHES, as_float, as_pair

ParamState = dict[str, Any]
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class DenseBatch:
    """Dense gradients of one param group, as lists: what torch's kernels take."""

    group: Mapping[str, Any]
    params: list[Tensor]  # written in place
    grads: list[Tensor]
    state: dict[str, list[Any]]  # tensors by name; None if the kernel creates the tensor
    steps: list[Tensor]  # step counts, which the kernel advances

    @property
    def has_complex(self) -> bool:
        """Whether any parameter is complex."""
        return any(param.is_complex() for param in self.params)


class TorchFusedEngine:
    """Runs torch's kernel on dense gradients, by param group.

    ``new_param_state`` creates the state of a first update. ``state_dtype`` returns the dtype of
    new state, for a parameter and the ``state_dtype`` of its group.
    """

    def __init__(
        self,
        kernel: Callable[[DenseBatch], None],
        new_param_state: Callable[[ParamUpdate], ParamState],
        state_dtype: Callable[[Tensor, torch.dtype | None], torch.dtype],
    ) -> None:
        self._kernel = kernel
        self._new_param_state = new_param_state
        self._state_dtype = state_dtype
        self.claimed: list[ParamUpdate] = []
        self.first_updates: list[ParamUpdate] = []  # of these, the first of their parameter
        self._batches: dict[tuple[Any, ...], list[ParamUpdate]] = {}
        self._direct: list[list[ParamUpdate]] = []  # of these, those whose kernel runs in commit
        self._writes: list[Callable[[], object]] = []  # that copy the results of the others back

    def claim(self, update: ParamUpdate) -> bool:
        """Claim a dense gradient that torch's kernel supports."""
        if not update.settings.has_torch_kernel or not self._fits(update):
            return False
        group, param, counts = update.group, update.param, update.settings.rule.counts_steps
        on_copies = param.is_cpu and type(param) in _PLAIN and not group.get("differentiable")
        is_first = update.param_state is None
        if on_copies and counts and not is_first:
            update.steps_taken()  # raises if that is no number
        # Torch's fused SGD needs all momentum buffers or none. Its other kernels do not, and round
        # half-precision buffers differently if one is missing.
        has_all = counts or not is_first or not group.get("fused")
        self._batches.setdefault((id(group), on_copies, has_all), []).append(update)
        self.claimed.append(update)
        if is_first:
            self.first_updates.append(update)
        return True

    @torch.no_grad()
    def prepare(self) -> None:
        """Create new state, which the commit enters into the optimizer's, and compute on copies."""
        shared = parameters.overlapping(update.param for update in self.claimed)
        for (_, on_copies, _), updates in self._batches.items():
            if on_copies and shared.isdisjoint(id(update.param) for update in updates):
                self._prepare_copies(updates)
                continue
            self._direct.append(updates)
            for update in updates:
                if update.param_state is None:  # for torch, a missing tensor means a first step
                    counts = update.settings.rule.counts_steps
                    update.param_state = self._new_param_state(update) if counts else {}

    def _prepare_copies(self, updates: list[ParamUpdate]) -> None:
        """Run the kernel on copies; a tensor that it creates itself is a result like the others."""
        has_state = []
        for update in updates:
            has_state.append(update.param_state is not None or update.settings.rule.counts_steps)
            if update.param_state is None:
                update.param_state = self._new_param_state(update)
        batch = self._batch(updates)
        state = {
            name: [_copy(t) if has else None for t, has in zip(tensors, has_state, strict=True)]
            for name, tensors in batch.state.items()
        }
        params, steps = list(map(_copy, batch.params)), list(map(_copy, batch.steps))
        self._kernel(replace(batch, params=params, state=state, steps=steps))
        written = chain(batch.params, batch.steps, *batch.state.values())
        results = chain(params, steps, *state.values())
        self._writes += map(partial, repeat(Tensor.copy_), written, results)

    def commit(self) -> None:
        """Write; without autograd."""
        finish(self._writes)
        for updates in self._direct:
            self._run(updates)

    def _batch(self, updates: list[ParamUpdate]) -> DenseBatch:
        """Return the arguments of torch's kernel."""
        rule = updates[0].settings.rule
        names = [spec.name for spec in rule.state]
        param_states = [update.param_state or {} for update in updates]
        memory = [
            {name: parameters.memory_of(r[name]) for name in names if r.get(name) is not None}
            for r in param_states
        ]
        return DenseBatch(
            _coerce_options(updates[0].group),
            [update.param for update in updates],
            [update.indexed.values for update in updates],
            {name: [state.get(name) for state in memory] for name in names},
            [param_state["step"] for param_state in param_states] if rule.counts_steps else [],
        )

    def _run(self, updates: list[ParamUpdate]) -> None:
        """Run torch's kernel on the parameters."""
        batch = self._batch(updates)
        before = {name: list(tensors) for name, tensors in batch.state.items()}
        with torch.set_grad_enabled(bool(updates[0].group.get("differentiable"))):
            self._kernel(batch)
        for name, tensors in batch.state.items():
            for update, old, made in zip(updates, before[name], tensors, strict=True):
                if made is not old:  # created by the kernel
                    assert update.param_state is not None
                    update.param_state[name] = parameters.laid_out_like(update.key, made)

    def _fits(self, update: ParamUpdate) -> bool:
        """Whether the kernel supports the update: all tensors of one dtype, supported options."""
        group, param, grad = update.group, update.param, update.grad
        if not isinstance(grad, _PLAIN) or type(grad) not in _PLAIN:
            return False
        if grad.layout is not torch.strided:
            return False
        if update.state:
            dtypes = {tensor.dtype for tensor in update.state}
        else:  # even without state: torch would compute a half-precision step in half precision
            dtypes = {self._state_dtype(param, update.settings.state_dtype)}
        if dtypes != {param.dtype} or grad.dtype != param.dtype:
            return False
        counts, param_state = update.settings.rule.counts_steps, update.param_state
        if counts and param_state:  # torch's kernels need a float tensor
            step = param_state["step"]
            if not isinstance(step, Tensor) or step.dtype not in (torch.float32, torch.float64):
                return False
        if group.get("fused"):
            # Torch's fused kernels assume the same order of elements, without gaps.
            if not parameters.lie_alike((param, update.indexed.values, *(update.state or ()))):
                return False
            try:
                check_fused(param)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise InputError(str(error)) from None
        _check_supported(group, param)
        return True


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps included: they decide how torch rounds a root."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return new.copy_(tensor)


def _coerce_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Coerce options to the types of torch's kernels: numbers or 0-dim tensors, and bools."""
    keeps_graph = bool(group.get("differentiable"))

    def number(value: Any, *, may_be_tensor: bool = True) -> Any:
        if isinstance(value, Tensor) and (may_be_tensor or keeps_graph):
            return (value if keeps_graph else value.detach()).reshape(())
        return int(value) if isinstance(value, bool) else as_float(value)

    found = dict(group)
    for name in SWITCHES & group.keys():
        found[name] = bool(group[name])
    for name in NUMBERS & group.keys():
        found[name] = number(group[name], may_be_tensor=name == "lr")
    two = as_pair(group.get("betas"))
    if two is not None:
        found["betas"] = tuple(map(number, two))
    return found


def _check_supported(group: Mapping[str, Any], param: Tensor) -> None:
    """Raise the errors of torch's kernel before anything is written."""
    if group.get("differentiable") and param.is_leaf and param.requires_grad:
        requirement = "differentiable=True needs parameters that are not leaves"
        remedy = "Pass clones, or set differentiable=False"
        raise InputError(message(requirement, "a leaf that requires a gradient", remedy))
    if group.get("capturable"):
        devices = capturable_devices()
        if param.device.type not in devices:
            requirement = f"If capturable=True, params and state_steps must be on {devices}"
            raise InputError(message(requirement, param.device))
