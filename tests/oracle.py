"""One step in float64, from where an optimizer is; and what must not have changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.grads import Drawn
from tests.table import same_bits

# A few roundings of the arithmetic, which is done in at least float32.
ROUNDINGS = {torch.float64: 1e-14, torch.complex128: 1e-14}
_USUAL_ROUNDINGS = 1e-6


class FindingError(AssertionError):
    """Something that the library must not do; ``kind`` names it in a word or two."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass
class Expected:
    """What a step must come to: the parameter, then its state."""

    names: list[str]
    new: list[Tensor]
    slack: list[Tensor]  # how far they may be off
    held: list[Tensor]  # which elements of each are touched
    old: list[Tensor]  # state that did not exist yet has its initial value


def number(value: Any) -> Any:
    """An option as plain numbers."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(number, value)) if isinstance(value, tuple) else value


def expected(
    cls: type[RuleOptimizer],
    group: dict[str, Any],
    record: dict[str, Any],
    param: Tensor,
    drawn: Drawn,
    mask: Tensor | None,
) -> Expected:
    """The rule applied in float64 to what is held and may move, and nothing else."""
    rule = cls.rule_for(group)
    hyper = {name: number(group[name]) for name in rule.hyperparam_names}
    decay = 0.0 if "weight_decay" in cls.formula_options else number(group.get("weight_decay", 0.0))
    decoupled = cls.always_decoupled or group.get("decoupled_weight_decay", False)
    sign = -1.0 if group.get("maximize") else 1.0
    shrink = 1 - number(group.get("lr", 0.0)) * decay if decoupled else 1.0
    l2 = 0.0 if decoupled else decay
    held = drawn.held
    if mask is not None:
        held = held & mask.reshape(*mask.shape, *[1] * (held.dim() - mask.dim()))
    rows = (param.shape[0] if param.dim() else 1, -1)
    by_rows = _real(held, param.is_complex(), rows)
    kept = [_state(spec, record, group, param, rows) for spec in rule.state]
    step = int(record.get("step", 1 if record else 0)) + 1
    inputs = [_exact(param, rows), _exact(drawn.dense, rows), *kept]

    def new(param: Tensor, grad: Tensor, *kept: Tensor) -> list[Tensor]:
        grad = torch.where(by_rows, sign * grad + l2 * param, 0.0)
        found = rule.apply([param * shrink, *kept], grad, step, hyper)
        return [_constrained(torch.where(by_rows, found[0], param), group), *found[1:]]

    exact = new(*inputs)
    roundings = ROUNDINGS.get(param.dtype, _USUAL_ROUNDINGS)
    slack = _slack(new, inputs, exact, roundings)
    if rule.name.startswith("ftrl") and hyper["lr"]:
        # It divides the difference of two roots by lr: each of them was rounded.
        root = exact[2].abs().sqrt()
        lost = roundings * (root / hyper["lr"] * inputs[0]).abs()
        slack[1] = slack[1] + lost
        slack[0] = slack[0] + lost / ((hyper["beta"] + root) / hyper["lr"] + hyper["l2"]).abs()
    touched_rows = by_rows.any(1, keepdim=True)
    is_constrained = group.get("normalize") or group.get("max_norm") is not None
    moved = touched_rows.expand_as(by_rows) if is_constrained else by_rows
    touched = [moved, *(touched_rows if s.per_row else by_rows for s in rule.state)]
    names = ["param", *(spec.name for spec in rule.state)]
    old = [param.detach().clone()]
    for spec, start in zip(rule.state, kept, strict=True):
        known = record.get(spec.name)
        old.append(start if known is None else known.detach().clone())
    return Expected(names, exact, slack, touched, old)


def _constrained(rows: Tensor, group: dict[str, Any]) -> Tensor:
    norm = rows.square().sum(1, keepdim=True).sqrt()
    if group.get("normalize"):
        return torch.where(norm > 0, rows / norm, rows)
    limit = group.get("max_norm")
    return rows if limit is None else torch.where(norm > limit, rows * (limit / norm), rows)


def _slack(new: Any, inputs: list[Tensor], exact: list[Tensor], roundings: float) -> list[Tensor]:
    """How far off one may be.

    A few roundings of the larger of value and update, and of each input, carried through the
    formula: where terms cancel, no arithmetic of this precision can do better.
    """
    before = [inputs[0], *inputs[2:]]
    slack = [
        roundings * torch.maximum(e.abs(), (e - b).abs())
        for e, b in zip(exact, before, strict=True)
    ]
    for index, value in enumerate(inputs):
        moved = new(*inputs[:index], value * (1 + roundings), *inputs[index + 1 :])
        slack = [s + (m - e).abs() for s, m, e in zip(slack, moved, exact, strict=True)]
    # A state that has become much smaller was computed as a difference of larger numbers, which
    # counts for the update that comes from it.
    update = (exact[0] - before[0]).abs()
    for old, e in zip(before[1:], exact[1:], strict=True):
        lost = torch.where(old.abs() > e.abs(), old.abs() / e.abs(), 0.0).nan_to_num(posinf=0.0)
        slack[0] = slack[0] + roundings * lost * update
    return slack


def _exact(tensor: Tensor, rows: tuple[int, int]) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double().reshape(rows)


def _real(held: Tensor, is_complex: bool, rows: tuple[int, int]) -> Tensor:
    if is_complex:
        held = held.unsqueeze(-1).expand(*held.shape, 2)
    return held.reshape(rows)


def _state(spec: Any, record: Any, group: Any, param: Tensor, rows: tuple[int, int]) -> Tensor:
    known = record.get(spec.name)
    if known is not None:
        return _exact(known, rows)
    value = group[spec.initial] if isinstance(spec.initial, str) else spec.initial
    shape = (rows[0], 1) if spec.per_row else _exact(param, rows).shape
    return torch.full(shape, float(value), dtype=torch.float64)


def compare(
    wanted: Expected, found: list[Tensor], group: dict[str, Any], *, exactly: bool = True
) -> None:
    """Raise a finding where a tensor is not what it must be.

    ``exactly=False``: only that what is not touched kept its bits.
    """
    for name, new, slack, held, old, ours in zip(
        wanted.names, wanted.new, wanted.slack, wanted.held, wanted.old, found, strict=True
    ):
        if not isinstance(ours, Tensor):
            raise FindingError("state is missing", name)
        if ours.layout is not torch.strided:
            raise FindingError("state is not strided", f"{name}: {ours.layout}")
        real = torch.view_as_real(ours.detach()) if ours.is_complex() else ours.detach()
        real = real.reshape(new.shape)
        if exactly:
            _check_close(name, real, new, slack, held, bool(group.get("stochastic_rounding")))
        was = torch.view_as_real(old) if old.is_complex() else old
        was = was.reshape(new.shape).to(real.dtype)
        if not same_bits(real[~held], was[~held]):
            raise FindingError("untouched entries changed", name)


def _check_close(
    name: str, ours: Tensor, exact: Tensor, slack: Tensor, held: Tensor, random: bool
) -> None:
    info = torch.finfo(ours.dtype)
    places = 1.0 if random else 0.5
    stored = exact.abs() * (info.eps * places) + info.smallest_normal * info.eps
    off = (ours.double() - exact).abs()
    room = (slack + stored) * 1.01
    # Of an infinite option it depends on the order of operations whether it gives inf or NaN.
    bad = ~(off <= room) & held & ~room.isnan()
    bad &= ~(exact.isnan() & ours.isnan()) & ~(exact.abs() * 1.01 > info.max)
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise FindingError(
            "wrong numbers",
            f"{name}{list(at)} is {float(ours[at])!r}, right is {float(exact[at])!r} "
            f"within {float(slack[at] + stored[at]):.2g}",
        )
