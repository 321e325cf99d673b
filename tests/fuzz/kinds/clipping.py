"""Clipping of gradients of all kinds together, beside torch's clipping of the dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep import clip_grad_norm_, clip_grad_value_
from tests.fuzz.findings import check_close, check_refusal
from tests.fuzz.surroundings import any_surroundings
from tests.fuzz.world import Say
from tests.generate import garbage
from tests.generate.grads import any_grad, as_dense, compact, coo, is_lazy, strided
from tests.generate.params import REAL, any_param
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.table import same_bits

_ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_ORDERS = [2.0, 2.0, 1.0, float("inf"), -float("inf"), 3.0, 0.5, 0.0]


def _given(chance: Source, say: Say) -> tuple[list[Any], list[Tensor | None]]:
    """Parameters with gradients, and these as dense tensors in float64."""
    params, dense = list[Any](), list[Tensor | None]()
    dtype = chance.weighted(REAL)
    for place in range(chance.integer(1, 3)):
        param, _ = any_param(chance, dtype)
        kinds = (coo, compact, strided)
        drawn = None if chance.one_in(8) else any_grad(chance, param, by_hand=False, kinds=kinds)
        if drawn is not None and isinstance(drawn.grad, Tensor) and is_lazy(drawn.grad):
            drawn = None  # torch itself cannot write it
        say(f"gradient {place} of {tuple(param.shape)}: {drawn.text if drawn else None}")
        param.grad = drawn.grad if drawn else None
        params.append(param)
        dense.append(drawn.dense if drawn else None)
    return params, dense


def clipping(chance: Source, say: Say) -> None:
    params, dense = _given(chance, say)
    held = [(p, d) for p, d in zip(params, dense, strict=True) if d is not None]
    if not held:  # a norm of nothing is torch's, wherever torch makes it
        return
    bound = chance.pick([0.5, 3.0, 1e4])
    around, name = any_surroundings(chance)
    foreach = chance.pick([None, None, False])
    before = [p.detach().clone() for p in params]
    if chance.one_in(3):
        say(f"clip_grad_value_({bound}, foreach={foreach}) {name}")
        with around:
            clip_grad_value_(params, bound, foreach=foreach)
        wanted = [d.clamp(-bound, bound) for _, d in held]
    else:
        order = chance.pick(_ORDERS)
        say(f"clip_grad_norm_({bound}, {order}, foreach={foreach}) {name}")
        if order <= 0 and any(p.grad is not None and not p.grad.numel() for p in params):
            return
        if abs(order) == float("inf") and not all(d.numel() for _, d in held):
            return  # torch has no such norm of nothing
        with around:
            norm = clip_grad_norm_(params, bound, order, foreach=foreach)
        # Dense ones alone are torch's, which takes their norm in their own dtype.
        torchs = all(p.grad.layout is torch.strided for p, _ in held)
        shadows = [nn.Parameter(d.to(p.dtype) if torchs else d.clone()) for p, d in held]
        for shadow, (_, d) in zip(shadows, held, strict=True):
            shadow.grad = d.to(shadow.dtype, copy=True)
        exact = nn.utils.clip_grad_norm_(shadows, bound, order)
        # In torch's dtype: what float16 cannot hold is infinite there. And no better than torch's
        # own arithmetic: an order below one has the largest errors.
        own = torch.linalg.vector_norm(
            torch.cat([d.to(norm.dtype).flatten() for _, d in held]), order
        )
        room = 4 * float((own.double() - exact.double()).abs().nan_to_num(0.0, 0.0))
        _close("norm", norm, exact.to(norm.dtype), params[0].dtype, room=room)
        wanted = [shadow.grad for shadow in shadows]
    for (param, _), want in zip(held, wanted, strict=True):
        _close("gradient", as_dense(param.grad), want, param.dtype, _of_entries(param))
    for param, was in zip(params, before, strict=True):
        if not same_bits(param, was):
            raise FindingError("clipping wrote a parameter", "")


def clipping_and_garbage(chance: Source, say: Say) -> None:
    """Invalid bounds, orders and gradients."""
    params, _ = _given(chance, say)
    grads = [None if p.grad is None else as_dense(p.grad) for p in params]
    arguments: dict[str, Any] = {"parameters": params}
    by_value = chance.one_in(2)
    arguments["clip_value" if by_value else "max_norm"] = chance.pick([1.0, *_THINGS])
    if not by_value and chance.one_in(2):
        arguments["norm_type"] = chance.pick([-1, 0, *_THINGS])
    if chance.one_in(4):
        arguments["parameters"] = chance.pick([None, 3, "x", {}, [None], [3], params[0], iter(())])
    spoilt = None
    if chance.one_in(3):
        spoilt = chance.integer(0, len(params) - 1)
        try:
            bad, text, _ = garbage.indices_outside(chance, params[spoilt])
        except Exception:
            return
        say(f"gradient {spoilt}: {text}")
        params[spoilt].grad = bad
    shown = {k: v for k, v in arguments.items() if k != "parameters" or v is not params}
    say(f"{'clip_grad_value_' if by_value else 'clip_grad_norm_'}({shown})")
    function: Any = clip_grad_value_ if by_value else clip_grad_norm_
    try:
        function(**arguments)
    except Exception as error:
        if not _is_torchs(function, arguments, error):
            check_refusal(error, str(shown))
        for place, (param, was) in enumerate(zip(params, grads, strict=True)):
            if was is None or place == spoilt:
                continue
            if not same_bits(as_dense(param.grad), was):
                raise FindingError("a refusal changed something", "a gradient") from error


def _is_torchs(function: Any, arguments: dict[str, Any], error: Exception) -> bool:
    """Whether torch's own function says the same of dense gradients: then it is their word."""
    theirs: Any = getattr(nn.utils, function.__name__)
    others, given = dict(arguments), arguments["parameters"]
    if isinstance(given, list) and all(isinstance(p, Tensor) for p in given):
        others["parameters"] = [nn.Parameter(torch.ones(p.shape)) for p in given]
        for plain, param in zip(others["parameters"], given, strict=True):
            plain.grad = None if param.grad is None else torch.ones(param.shape)
    try:
        theirs(**others)
    except Exception as their_error:
        return type(their_error) is type(error)
    return False


_THINGS: list[Any] = [None, "x", -1.0, float("nan"), float("inf"), (), {}, 1j, torch.tensor(1.0)]


def _of_entries(param: Any) -> float:
    """How large sums of entries may get: each is rounded for itself, and they may cancel."""
    grad = param.grad
    if not isinstance(grad, Tensor) or not grad.is_sparse or not grad._values().numel():
        return 0.0
    return float(grad._values().double().abs().sum(0).max())


def _close(
    what: str,
    ours: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    entries: float = 0.0,
    room: float = 0.0,
) -> None:
    finite = exact[exact.isfinite()].abs()
    scale = max(1e-3, entries, float(finite.max()) if finite.numel() else 0.0)
    room += _ROOM[dtype] * scale
    check_close("not what torch's clipping gives", what, ours, exact, room)


KINDS: dict[Callable[[Source, Say], None], int] = {clipping: 5, clipping_and_garbage: 3}
