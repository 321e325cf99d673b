"""Every private name of torch that this library uses, with its purpose and its fallback.

The next release of torch may rename any: ``tests/test_torch_internals.py`` says which one.
Without a fallback, importing sparsestep raises an error if torch lacks the name.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.torch_version import TorchVersion

Function = TypeVar("Function", bound=Callable[..., Any])

missing: list[str] = []  # names that were replaced by a fallback
_MISSING = object()


def _private(path: str, use: str, fallback: Any = _MISSING) -> Any:
    """Return a private name of torch, or a fallback; ``use`` is for the error without one."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        missing.append(path)
        if fallback is not _MISSING:
            return fallback
        raise ImportError(
            f"sparsestep needs {path} to {use}, and torch {torch.__version__} does not have it. "
            "Supported: https://sparsestep.readthedocs.io/en/latest/torch-releases.html"
        ) from None


# Optimizers

profiler_enabled: Callable[[], bool] = _private(
    "torch._C._autograd._profiler_enabled",
    "mark steps for a profiler, if there is one",
    lambda: True,  # mark all steps, which costs as much as a small step
)
global_hooks: tuple[Mapping[int, Any], ...] = tuple(
    _private(
        f"torch.optim.optimizer.{name}", "see whether hooks of all optimizers are to be called"
    )
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)
scalar_dtype: Callable[..., torch.dtype] = _private(
    "torch.optim.optimizer._get_scalar_dtype",
    "count steps in the dtype that torch counts in",
    lambda is_fused=None: torch.float32,
)
check_fused: Callable[[Tensor], None] = _private(
    "torch.optim.optimizer._device_dtype_check_for_fused",
    "refuse in time what torch's fused kernels refuse",
)
capturable_devices: Callable[[], list[str]] = _private(
    "torch.optim.optimizer._get_capturable_supported_devices",
    "refuse in time what torch's capturable kernels refuse",
    lambda: ["cuda", "xpu", "hpu"],
)
disable_compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = _private(
    "torch._compile._disable_dynamo",
    "keep a step outside of graphs without importing the compiler",
    torch.compiler.disable,
)

assert_async: Callable[[Tensor, str], None] = _private(
    "torch._assert_async",
    "refuse indices on a GPU where the host is not to wait for it",
    lambda condition, message: None,  # an invalid index still prevents the update, but silently
)

# Subclasses of tensors

without_torch_function: Callable[[], Any] = _private(
    "torch._C.DisableTorchFunctionSubclass",
    "look at a tensor without asking its class",
)
plain_results: Any = _private(
    "torch._C._disabled_torch_function_impl",
    "compute plain tensors from a subclass, as from a Parameter",
)
tree_map_only: Callable[..., Any] = _private(
    "torch.utils._pytree.tree_map_only",
    "find the tensors among the arguments of an operation",
)
rebuild_parameter: Callable[..., nn.Parameter] = _private(
    "torch._utils._rebuild_parameter",
    "pickle a guarded parameter as an ordinary one",
)
_storage_use_count: Callable[[int], int] | None = _private(
    "torch._C._storage_Use_Count",
    "see whether other tensors share memory",
    None,  # unknown, so it is copied
)
graph_task_id: Callable[[], int] = _private(
    "torch._C._current_graph_task_id",
    "see whether a backward is under way",
    lambda: -1,
)
# Calls a function at the end of the backward that is under way.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# Compilers and transforms

is_transforming: Callable[[], bool] = _private(
    "torch._C._are_functorch_transforms_active",
    "leave lookups under vmap and the like to torch",
    lambda: False,
)

is_tracing: Callable[[], bool] = _private(
    "torch.jit.is_tracing", "leave lookups to torch where they are traced", lambda: False
)
dispatch_modes: Callable[[], int] = _private(
    "torch._C._len_torch_dispatch_stack",
    "leave lookups to torch where something watches its operations",
    lambda: 1,  # something may
)


_clear_transforms: Callable[[], Any] = _private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "catch up deferred rows under vmap and the like",
    nullcontext,
)
_disable_modes: Callable[[], Any] = _private(
    "torch.utils._python_dispatch._disable_current_modes",
    "catch up deferred rows while torch.export traces a model",
)
_disable_function_modes: Callable[[], Any] = _private(
    "torch._C.DisableTorchFunction",
    "catch up deferred rows while torch.export traces a model",
)
_is_wrapped: Callable[[Tensor], bool] = _private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "see what vmap and the like have wrapped",
    lambda tensor: False,
)
_unwrap: Callable[[Tensor], Tensor] = _private(
    "torch._C._functorch.get_unwrapped", "read what vmap and the like have wrapped", None
)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Run code as if no transform of torch.func and no tracer were active."""
    with _clear_transforms(), _disable_modes(), _disable_function_modes():
        yield


def unwrapped(tensor: Any) -> Any:
    """The tensor that transforms of torch.func have wrapped; the compiler has its own."""
    if torch.compiler.is_dynamo_compiling():
        return tensor
    while isinstance(tensor, Tensor) and _is_wrapped(tensor):
        tensor = _unwrap(tensor)
    return tensor


def forward_level() -> int:
    """How deeply forward derivatives are nested, from 0; -1 if there are none."""
    return int(getattr(forward_ad, "_current_level", 0))


def assume_constant_result(function: Function) -> Function:
    """Make torch.compile call a function while it traces, and treat the result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler first, which
    takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export traces a call.

    Before torch 2.12, ``torch.compiler.is_exporting()`` is true whenever torch.compile traces it:
    lookups would be compiled, with dense gradients. So the tracer calls this function instead.
    """
    if torch.compiler.is_exporting():
        return True
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return compiler is not None and bool(compiler.InstructionTranslator.current_tx().export)
    except AttributeError:  # nothing is being traced
        return False


if TorchVersion(torch.__version__) >= "2.12":
    is_exporting = torch.compiler.is_exporting

# Whether lookups can be in graphs: functions of modules may be ``assume_constant_result``.
compiles_lookups = TorchVersion(torch.__version__) >= "2.13"

# Kernels

foreach_norm: Callable[..., tuple[Tensor, ...]] = _private(
    "torch._foreach_norm",
    "clip many gradients at once",
    lambda tensors, order: tuple(torch.linalg.vector_norm(t, order) for t in tensors),
)
foreach_mul_: Callable[..., None] = _private("torch._foreach_mul_", "scale many gradients at once")
foreach_unscale_: Callable[[list[Tensor], Tensor, Tensor], None] = _private(
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "unscale compact gradients for a GradScaler",
)
embedding_bag: Callable[..., tuple[Tensor, ...]] = _private(
    "torch._embedding_bag_forward_only",
    "pool rows as torch's EmbeddingBag does",
)


# The gradient of an EmbeddingBag's weights per sample.
embedding_bag_weights_backward: Callable[..., Tensor] = (
    torch.ops.aten._embedding_bag_per_sample_weights_backward
)

# Attributes

# The indices and values of a COO tensor as they are, coalesced or not.
coo_indices: Callable[[Tensor], Tensor] = Tensor._indices
coo_values: Callable[[Tensor], Tensor] = Tensor._values


def uses_of_memory(tensor: Tensor) -> int | None:
    """How many tensors share the memory of this one; ``None`` if unknown."""
    count = _storage_use_count
    return None if count is None else count(tensor.untyped_storage()._cdata)


def uses(tensor: Tensor) -> int | None:
    """How many references the tensor itself has; ``None`` if unknown."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else count()


# Attributes of a tensor that do not depend on its values, by name.
METADATA: dict[str, Any] = {
    name: attribute
    for name, attribute in vars(Tensor.__mro__[1]).items()
    if isinstance(attribute, types.GetSetDescriptorType)
    and name not in ("data", "real", "imag", "T", "H", "mT", "mH")
}
# Whether a tensor is one of autograd's zeros, which take no memory.
is_zerotensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
# Creates a tensor subclass without memory of its own.
make_wrapper_subclass: Any = Tensor._make_wrapper_subclass


def post_accumulate_grad_hooks(param: Tensor) -> Mapping[int, Any] | None:
    """The hooks that run when the gradient of a parameter has been accumulated."""
    hooks: Mapping[int, Any] | None = param._post_accumulate_grad_hooks
    return hooks


def is_in_ddp_forward() -> bool:
    """Whether a ``DistributedDataParallel`` model is running its forward."""
    return DistributedDataParallel._active_ddp_module is not None


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; -1 for an inference tensor, which has no count."""
    return -1 if tensor.is_inference() else tensor._version


def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters of a module, without its submodules."""
    return module._parameters


def is_watched(module: nn.Module) -> bool:
    """Whether a module has forward pre-hooks."""
    return bool(module._forward_pre_hooks)


def call_forward_pre_hooks(module: torch.nn.Module, *args: Any) -> None:
    """Call the hooks that run before a module's forward, for code that reads its weight instead."""
    for key, hook in tuple(module._forward_pre_hooks.items()):
        with_kwargs = key in module._forward_pre_hooks_with_kwargs
        hook(module, args, {}) if with_kwargs else hook(module, args)


# Distributed


_update_averages = AveragedModel.update_parameters
_num_averaging_hooks = 0


def hook_averaged_models(before: Callable[[nn.Module], None]) -> None:
    """Call a function with a model before ``AveragedModel.update_parameters`` reads it.

    Torch has no hook there, so the method is replaced for all averaged models, until each call has
    been undone by ``unhook_averaged_models``. There is one such function at a time.
    """
    global _num_averaging_hooks

    @functools.wraps(_update_averages)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        before(model)
        _update_averages(self, model)

    _num_averaging_hooks += 1
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def unhook_averaged_models() -> None:
    """Undo one call of ``hook_averaged_models``; the last one restores torch's method."""
    global _num_averaging_hooks
    _num_averaging_hooks -= 1
    if not _num_averaging_hooks:
        AveragedModel.update_parameters = _update_averages  # type: ignore[method-assign]


def group_timeout(group: Any) -> timedelta | None:
    """The timeout of a process group's collectives; ``None``, torch's default, if unknown."""
    devices = getattr(group, "_device_types", ())
    for device in sorted(devices, key=lambda each: each.type != "cpu"):  # prefer the CPU's
        with suppress(AttributeError, RuntimeError):
            found: timedelta = group._get_backend(device).options._timeout
            return found
    return None


def ignored_by_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Exclude parameters from DistributedDataParallel, by the attribute that it reads."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = [*before, *names]  # type: ignore[assignment]


def is_called_by_checkpoint() -> bool:
    """Whether ``torch.distributed.checkpoint`` called the function that calls this one.

    Its ``_init_optim_state`` tests ``optimizer.state`` and has no hook to prepare it.
    """
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith("torch.distributed.checkpoint.")


def register_overlapped(theirs: type, ours: type) -> None:
    """Register a class for DDP to use when it overlaps optimizers with backward."""
    with suppress(ImportError):
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap

        optimizer_overlap.register_overlapped(theirs)(ours)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the hooks of an optimizer by attribute: of its steps, of saving and of loading."""
    found = vars(optimizer).items()
    return {k: v for k, v in found if k.startswith("_optimizer_") and k.endswith("_hooks")}


def local_slices(tensor: Any) -> tuple[slice, ...]:
    """Return which part of a DTensor is on this rank, if it is sharded in contiguous pieces."""
    find: Any = _private(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "masks of DTensor parameters",
    )
    sizes, starts = find(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast on a kind of device."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A named range in the trace of a profiler, if there is one."""
    return torch.profiler.record_function(name) if profiler_enabled() else nullcontext()


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` without autocast, which has no rule for float16 on CPUs.

    Example:
        >>> halves = [torch.ones(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
        >>> with torch.autocast("cpu"):
        ...     cat(halves)
        tensor([1., 0.], dtype=torch.float16)
    """
    with without_autocast(tensors[0].device.type):
        return torch.cat(tuple(tensors))


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """The same for ``torch.stack``, along a new first dim."""
    with without_autocast(tensors[0].device.type):
        return torch.stack(tuple(tensors))
