"""The engine that runs torch's own kernels, for dense gradients under torch's formulas.

Torch's kernels allocate temporaries. On the CPU, a step is atomic even if that fails:

- A few small parameters are copied in prepare. The kernel runs before anything else is written; if
  it fails, the copies are restored.
- For all others, the kernel is recorded in prepare and replayed in commit, where nothing of the
  size of a parameter is allocated (``replay``).

On other devices, and for ``differentiable=True``, the kernel runs in commit: if its temporaries do
not fit into the memory there, the step is torn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sparsestep._torch import capturable_devices, check_fused
from sparsestep.engines.base import ParamUpdate, finish
from sparsestep.engines.replay import (
    PIECE,
    CannotReplayError,
    Recording,
    Replay,
    largest_piece,
    pieces,
)
from sparsestep.errors import InputError, is_out_of_memory, message
from sparsestep.memory import tensors as parameters
from sparsestep.rules.options import NUMBERS, SWITCHES, as_float, as_pair

ParamState = dict[str, Any]
_PLAIN = (Tensor, torch.nn.Parameter)
# Up to this many parameters and elements in total, copies are cheaper than a recording.
_FEW_PARAMS, _FEW_ELEMENTS = 16, 1 << 15


@dataclass(slots=True)
class DenseBatch:
    """Dense gradients of one param group, as lists: what torch's kernels take."""

    group: Mapping[str, Any]
    params: list[Tensor]  # written in place
    grads: list[Tensor]
    state: dict[str, list[Any]]  # tensors by name; None if the kernel creates the tensor
    steps: list[Tensor]  # step counts, which the kernel advances
    # Whether this is the first step and ``state`` is already allocated, with any values; only for
    # rules that do not count steps.
    is_first: bool = False

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
        self._direct: dict[tuple[Any, ...], list[ParamUpdate]] = {}  # run in commit
        self._replayed: dict[tuple[Any, ...], list[ParamUpdate]] = {}
        self._prepared: list[tuple[Replay, list[list[Any]]]] = []  # with their environments
        self._counts: list[Callable[[], object]] = []
        self._small: list[DenseBatch] = []
        self._written: list[Tensor] = []  # by the kernels of ``begin``
        self._copies: list[Tensor] = []

    def claim(self, update: ParamUpdate) -> bool:
        """Claim a dense gradient that torch's kernel supports."""
        if not update.settings.has_torch_kernel or not self._fits(update):
            return False
        group, param, counts = update.group, update.param, update.settings.rule.counts_steps
        is_first = update.param_state is None and not counts
        if param.is_cpu and type(param) in _PLAIN and not group.get("differentiable"):
            count = update.param_state["step"] if update.param_state and counts else None
            step = None if count is None else (count.item(), count.dtype)
            if step is not None and not step[0] >= 0:
                update.steps_taken()  # raises
            kind = id(group), is_first, param.dtype, param.dim() > 0, step
            self._replayed.setdefault(kind, []).append(update)
        else:
            # Torch's fused SGD needs all momentum buffers or none. Its other kernels do not, and
            # round half-precision buffers differently if one is missing.
            self._direct.setdefault((id(group), is_first and group.get("fused")), []).append(update)
        self.claimed.append(update)
        if update.param_state is None:
            self.first_updates.append(update)
        return True

    def prepare(self) -> None:
        """Create new state, which the commit enters into the optimizer's, and record kernels."""
        with torch.no_grad():
            for kind, updates in self._replayed.items():
                for update in updates:
                    if update.param_state is None:
                        update.param_state = self._new_param_state(update)
                elements = sum(update.param.numel() for update in updates)
                are_few = len(updates) <= _FEW_PARAMS and elements <= _FEW_ELEMENTS
                try:
                    if updates[0].settings.rule.counts_steps and are_few:
                        self._prepare_copies(updates)
                    else:
                        self._prepare_replay(updates, is_first=kind[1])
                except CannotReplayError:
                    self._direct[kind] = updates
        for updates in self._direct.values():
            for update in updates:
                if update.param_state is None:  # for torch, a missing tensor means a first step
                    counts = update.settings.rule.counts_steps
                    update.param_state = self._new_param_state(update) if counts else {}

    def begin(self) -> None:
        """Start writing; raises and has changed nothing, or succeeds. Without autograd."""
        try:
            for batch in self._small:
                self._kernel(batch)
        except BaseException:
            finish((self._restore,))
            raise

    def _restore(self) -> None:
        for tensor, copy in zip(self._written, self._copies, strict=True):
            tensor.copy_(copy)

    def commit(self) -> None:
        """Write the rest; without autograd."""
        for replay, environments in self._prepared:
            replay.run(environments)
            replay.release()
        finish(self._counts)
        for updates in self._direct.values():
            self._run(updates)

    def _prepare_copies(self, updates: list[ParamUpdate]) -> None:
        """Copy the tensors that the kernel will write."""
        batch = self._batch(updates)
        written = list(chain(batch.params, batch.steps, *batch.state.values()))
        self._copies += map(_copy, written)
        self._written += written
        self._small.append(batch)

    def _prepare_replay(self, updates: list[ParamUpdate], *, is_first: bool) -> None:
        """Record the kernel for parameters of one group with equal step counts."""
        settings, param = updates[0].settings, updates[0].param
        rule = settings.rule
        names = [spec.name for spec in rule.state]
        param_states = [update.param_state or {} for update in updates]
        steps = [_copy(param_states[0]["step"])] if rule.counts_steps else []
        key = Replay, is_first, param.dtype, param.dim() > 0
        replay: Replay | None = settings.core.get(key)
        if replay is None:
            first = torch.ones((1,) if param.dim() else (), dtype=param.dtype, device="cpu")
            inputs = [first, *(first.clone() for _ in range(1 + len(names)))]
            state = {name: [tensor] for name, tensor in zip(names, inputs[2:], strict=True)}
            options = _coerce_options(updates[0].group)
            with Recording(inputs) as recording:
                self._kernel(DenseBatch(options, inputs[:1], inputs[1:2], state, steps, is_first))
            replay = Replay(recording)
            if not rule.counts_steps:  # the kernel is the same in every step
                settings.core[key] = replay
        most = PIECE * torch.get_num_threads()
        replay.reserve(max(largest_piece(update.param, most) for update in updates))
        environments: list[list[Any]] = []
        for update, param_state in zip(updates, param_states, strict=True):
            tensors = [parameters.memory_of(param_state[name]) for name in names]
            parts = pieces([update.param, update.indexed.values, *tensors], most)
            environments += map(replay.environment, parts)
        self._prepared.append((replay, environments))
        if rule.counts_steps:
            counts = [param_state["step"] for param_state in param_states]
            self._counts.append(partial(_set_counts, counts, *steps))

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
    """Copy with ``copy_``, which allocates when it is first called: so not in the commit."""
    return torch.empty_like(tensor).copy_(tensor)


def _set_counts(counts: list[Tensor], step: Tensor) -> None:
    for count in counts:
        count.copy_(step)


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
