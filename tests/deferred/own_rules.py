"""Formulas as users write them, whose dense semantics is derived; and some that have none."""

from __future__ import annotations

import math
from typing import Any

import torch

import sparsestep
from tests.table import Variant


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def adam(param, grad, exp_avg, exp_avg_sq, *, step, lr=0.1, betas=(0.9, 0.99), eps=1e-8):
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad.square()
    mean = exp_avg / (1 - betas[0] ** step)
    square = exp_avg_sq / (1 - betas[1] ** step)
    return param - lr * mean / (square.sqrt() + eps), exp_avg, exp_avg_sq


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def adam_in_place(param, grad, exp_avg, exp_avg_sq, *, step, lr=0.1, decay=0.05):
    """As torch writes it, and with a decay of its own."""
    param.mul_(1 - lr * decay)
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.99).addcmul_(grad, grad, value=0.01)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - 0.99**step)).add_(1e-8)
    return param.addcdiv_(exp_avg, denominator, value=-lr / (1 - 0.9**step)), exp_avg, exp_avg_sq


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def sparse_adam(param, grad, exp_avg, exp_avg_sq, *, step, lr=0.1, eps=0.1):
    """With eps in another place, and one over the denominator."""
    exp_avg = exp_avg + 0.2 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq + 0.1 * (grad * grad - exp_avg_sq)
    size = lr * math.sqrt(1 - 0.9**step) / (1 - 0.8**step)
    return param - size * (1 / (exp_avg_sq.sqrt() + eps)) * exp_avg, exp_avg, exp_avg_sq


@sparsestep.rule(state={"exp_avg": 0.0}, row_state={"square": 0.0})
def adam_by_rows(param, grad, exp_avg, square, *, lr=0.1):
    exp_avg = 0.9 * exp_avg + 0.1 * grad
    square = 0.95 * square + 0.05 * grad.square().mean(1, keepdim=True)
    return param - lr * exp_avg / (square.sqrt() + 1e-3), exp_avg, square


@sparsestep.rule(row_state={"bound": 0.0})
def sm3(param, grad, bound, *, lr=0.1):
    squares = bound + grad.square()
    return param - lr * grad / (squares.sqrt() + 1e-10), squares.amax(dim=1, keepdim=True)


@sparsestep.rule(state={"square": 1.0, "buffer": 0.0})
def rmsprop(param, grad, square, buffer, *, lr=0.1, momentum=0.8):
    """Whose average begins at one, as TensorFlow's does."""
    square = 0.9 * square + 0.1 * grad.square()
    buffer = momentum * buffer + lr * grad / square.sqrt().clamp(min=1e-3)
    return param - buffer, square, buffer


@sparsestep.rule(state={"buffer": 0.0})
def momentum(param, grad, buffer, *, step, lr=0.1, nesterov=True):
    """The first step takes the gradient as it is."""
    buffer = grad.clone() if step == 1 else 0.9 * buffer + 0.5 * grad
    return param - lr * (grad + 0.9 * buffer if nesterov else buffer), buffer


@sparsestep.rule(state={"exp_avg": 0.0})
def lion(param, grad, exp_avg, *, lr=0.1, betas=(0.9, 0.99), decay=0.1):
    direction = (betas[0] * exp_avg + (1 - betas[0]) * grad).sign()
    return param * (1 - lr * decay) - lr * direction, betas[1] * exp_avg + (1 - betas[1]) * grad


@sparsestep.rule(state={"total": 0.0})
def sign_of_total(param, grad, total, *, lr=0.1):
    total = total + grad
    return param - 0.01 * lr * torch.sign(total), total


@sparsestep.rule
def descent(param, grad, *, step, lr=0.1):
    return param - torch.where(grad > 0, lr * grad, lr / step * grad)


_DERIVED: list[tuple[Any, dict[str, Any]]] = [
    (adam, {}),
    (adam, {"eps": 1.0, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (adam, {"betas": (0.99, 0.9)}),  # the series does not converge
    (adam, {"betas": (0.0, 0.9)}),
    (adam, {"betas": (0.5, 0.0), "eps": 0.1}),
    (adam_in_place, {}),
    (sparse_adam, {}),
    (adam_by_rows, {}),
    (sm3, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (rmsprop, {}),
    (rmsprop, {"momentum": 0.0}),
    (momentum, {}),
    (momentum, {"nesterov": False, "maximize": True}),
    (lion, {}),
    (lion, {"betas": (0.9, 0.0)}),
    (lion, {"betas": (0.0, 0.9)}),
    (sign_of_total, {}),
    (descent, {}),
]
DERIVED = [Variant(*each) for each in _DERIVED]


@sparsestep.rule(state={"mean": 0.0})
def coupled(param, grad, mean, *, lr=0.1, decay=0.25):
    mean = 0.5 * mean + grad + decay * param
    return param - lr * mean, mean


@sparsestep.rule(state={"sum": 0.0})
def divides_zero_by_zero(param, grad, sum, *, lr=0.1):
    sum = sum + grad.square()
    return param - lr * grad / sum.sqrt(), sum


@sparsestep.rule(state={"mean": 0.0})
def by_step(param, grad, mean, *, step, lr=0.1):
    rate = step**-0.8
    mean = (1 - rate) * mean + rate * grad
    return param - lr * mean, mean


@sparsestep.rule(state={"mean": 0.5})
def begins_to_move(param, grad, mean, *, lr=0.1):
    mean = 0.9 * mean + 0.1 * grad
    return param - lr * mean, mean


@sparsestep.rule(state={"mean": 0.0})
def grows(param, grad, mean, *, lr=0.1):
    return param - lr * mean, 1.5 * mean + grad


@sparsestep.rule(state={"first": 0.0, "second": 0.0})
def along_two(param, grad, first, second, *, lr=0.1):
    first, second = 0.9 * first + grad, 0.5 * second + grad
    return param - lr * (first + second), first, second


@sparsestep.rule
def looks(param, grad, *, lr=0.1):
    return param - lr * grad if grad.sum() > 0 else param


@sparsestep.rule(compile={"backend": "eager"})
def compiled(param, grad, *, lr=0.1):
    return param - lr * grad


UNDERIVED: list[tuple[Any, str]] = [
    (coupled, r"mean becomes 0.5 \* mean \+ 0.25 \* param"),
    (divides_zero_by_zero, "param has no closed-form update"),
    (by_step, "its state decays differently from step to step"),
    (begins_to_move, r"param becomes param - 0.09 \* mean"),
    (grows, r"mean becomes 1.5 \* mean"),
    (along_two, r"param becomes param - 0.09 \* first - 0.05 \* second"),
    (looks, "takes a sum other than over rows"),
    (compiled, "compile leaves nothing to trace"),
]
