"""Lookups under torch.compile, torch.export, the transforms of torch.func, and DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: F401, N812  (the name in torch's own forward)

from sparsestep._torch import (
    assume_constant_result,
    compiles_lookups,
    is_exporting,
    is_in_ddp_forward,
    is_tracing,
    is_transforming,
    post_accumulate_grad_hooks,
)
from sparsestep.deferred.tracking import GuardedParameter
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.exchange import source_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def excluded_from_compile(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Exclude a function from torch.compile.

    ``torch.compiler.disable`` would import the compiler, and add half the time of a small lookup to
    every call.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() and not is_exporting():
            return _left_out(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _left_out(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that breaks a graph; with ``fullgraph=True``, torch says why."""
    left_out: Callable[Arguments, Result]
    if compiles_lookups:
        _prepare_left_out(function)
        left_out = function.left_out  # type: ignore[attr-defined]
    else:
        left_out = torch.compiler.disable(function)
    return left_out


@assume_constant_result
def _prepare_left_out(function: Any) -> None:
    if not hasattr(function, "left_out"):
        reason = _REASON.format(function.__qualname__)
        function.left_out = torch.compiler.disable(function, reason=reason)


_REASON = (
    "sparsestep runs {} outside of graphs: a graph has lookups by int64 or int32 ids in a plain "
    "parameter, without max_norm, and with per_sample_weights only for mode='sum'. Without "
    "fullgraph=True, the graph breaks here, or an error says what is wrong"
)


def replaced_in_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have torch.compile trace ``forward_in_graph`` instead of a module's forward, if it can.

    The module's ``fits_graph`` says so, of the same arguments; if not, it is excluded.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() and not is_exporting():
            module: Any = args[0]
            if module.fits_graph(*args[1:], **kwargs):
                found: Result = module.forward_in_graph(*args[1:], **kwargs)
                return found
            return _left_out(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def with_arguments_of(
    theirs: Callable[Arguments, None],
) -> Callable[[Callable[..., None]], Callable[Arguments, None]]:
    """Give a function the signature of another."""
    return functools.wraps(theirs)


def uses_torch_ops(weights: Iterable[Tensor]) -> bool:
    """Whether a lookup is left to torch's own operation, with its ordinary gradient.

    Transforms of torch.func, export and tracing know no other. Meta and fake tensors have no values
    to check. A weight of another class may override the operation.
    """
    if is_transforming() or torch.compiler.is_exporting() or is_tracing():
        return True
    for weight in weights:  # noqa: SIM110  (any() takes a frame for each weight)
        if weight.is_meta or type(weight) not in _PARAMETER_TYPES:
            return True
    return False


_PARAMETER_TYPES = (torch.nn.Parameter, Tensor, GuardedParameter)


def materialize_for_ddp(weights: Iterable[Tensor]) -> None:
    """Materialize the gradients of weights before DDP reduces them, if called in its forward.

    DDP's C++ takes a compact gradient for a dense one. It runs after the hooks of the weight, so a
    hook is enough. It is not removed: activation checkpointing repeats lookups outside the forward.
    """
    if not is_in_ddp_forward():
        return
    for weight in weights:
        if not weight.requires_grad or source_of(weight) is not None:
            continue  # DDP ignores sharded tables
        hooks = post_accumulate_grad_hooks(weight)
        if hooks is None or _materialize_grad not in hooks.values():
            weight.register_post_accumulate_grad_hook(_materialize_grad)


def _materialize_grad(weight: Tensor) -> None:
    grad = weight.grad
    if isinstance(grad, CompactGrad):
        weight.grad = grad.materialize_()
