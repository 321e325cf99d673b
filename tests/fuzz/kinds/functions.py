"""``sparsestep.functional``: a parameter, a gradient and the state, all of them the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsestep
from tests import oracle
from tests.fuzz.findings import check_refusal, is_taken
from tests.fuzz.surroundings import any_surroundings
from tests.fuzz.world import Say
from tests.generate import garbage
from tests.generate.grads import any_grad
from tests.generate.params import any_dtype, any_mask, any_options, any_param
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.table import FUNCTIONS, same_bits

# The names of state that are keyword arguments where a function takes several kinds.
_NOT_TAKEN = {
    *("foreach", "fused", "amsgrad", "centered", "state_dtype", "stochastic_rounding"),
    *("bias_correction", "initial_accumulator_value", "capturable", "differentiable"),
}


class Call:
    """One function with everything that it takes."""

    def __init__(self, chance: Source, say: Say) -> None:
        self.chance, self.say = chance, say
        self.cls = chance.pick(list(FUNCTIONS))
        self.function = FUNCTIONS[self.cls]
        dtype = any_dtype(chance, self.cls)
        options = any_options(chance, self.cls)
        for name in ("bias_correction", "state_dtype", "stochastic_rounding", "fused", "foreach"):
            options.pop(name, None)
        # Only for what the group's options come to.
        self.group = self.cls([torch.zeros(1)], **options).param_groups[0]
        self.rule = self.cls.rule_for(self.group)
        param, text = any_param(chance, dtype)
        self.param = param.detach()
        say(f"{self.function.__name__}: param {text}")
        self.mask = None
        if self.param.dim() and chance.one_in(4):
            self.mask = any_mask(chance, self.param, by_row=self.rule.needs_whole_rows)
        self.state = {spec.name: self._state(spec) for spec in self.rule.state}
        self.steps = chance.pick([0, 0, 9])  # RAdam begins with a formula of its own
        self.over = False

    def _state(self, spec: Any) -> Tensor:
        initial = self.group.get(spec.initial, spec.initial)
        shape = self.param.shape[:1] if spec.per_row else self.param.shape
        dtype = torch.float64 if self.param.dtype == torch.float64 else torch.float32
        if self.param.is_complex():
            dtype = self.param.dtype.to_real() if spec.per_row else self.param.dtype
        return torch.full(shape, float(initial), dtype=dtype)

    def keywords(self) -> dict[str, Any]:
        taken = {k: v for k, v in self.group.items() if k not in _NOT_TAKEN and k != "params"}
        if "decoupled_weight_decay" in taken and self.cls is sparsestep.AdamW:
            del taken["decoupled_weight_decay"]
        if self.cls is sparsestep.SGD and not self.rule.state:
            for name in ("momentum", "dampening", "nesterov"):
                taken.pop(name, None)
        return {**taken, **self.state, "mask": self.mask, "step": self.steps + 1}

    def snapshot(self) -> list[Tensor]:
        return [self.param.clone(), *(tensor.clone() for tensor in self.state.values())]

    def check_unchanged(self, before: list[Tensor]) -> None:
        for name, now, was in zip(
            ["param", *self.state], [self.param, *self.state.values()], before, strict=True
        ):
            if isinstance(now, Tensor) and not same_bits(now, was):
                raise FindingError("a refusal changed something", name)

    def valid(self) -> None:
        drawn = any_grad(self.chance, self.param, by_hand=True)
        around, name = any_surroundings(self.chance)
        engine = self.chance.pick(["auto", "auto", "native", "reference"])
        self.say(f"step {self.steps + 1}: {drawn.text}; {engine} {name}")
        record = {**self.state, "step": self.steps}
        wanted = None
        if self.param.numel():
            wanted = oracle.expected(self.cls, self.group, record, self.param, drawn, self.mask)
        before = self.snapshot()
        call = partial(self.function, self.param, drawn.grad, engine=engine, **self.keywords())
        with around:
            taken = is_taken(call, partial(self.check_unchanged, before))
        if not taken:
            return
        self.steps += 1
        if wanted is not None:
            oracle.compare(wanted, [self.param, *self.state.values()], self.group)

    def invalid(self) -> None:
        """One argument is garbage; where it is accepted, nothing more can be said."""
        grad: Any = any_grad(self.chance, self.param, by_hand=True).grad
        keywords, must = self.keywords(), False
        if self.chance.one_in(2):
            grad, text, must = garbage.any_garbage(self.chance, self.param)
        else:
            name = self.chance.pick(list(keywords))
            keywords[name] = value = self.chance.pick(_things(self.param))
            text = f"{name} = {type(value).__name__} {getattr(value, 'shape', value)}"
        self.say(text)
        before = self.snapshot()
        try:
            self.function(self.param, grad, **keywords)
        except Exception as error:
            check_refusal(error, text)
            self.check_unchanged(before)
            return
        if must:
            raise FindingError(f"accepted: {text}", "it should have been refused")
        self.over = True


def _things(param: Tensor) -> list[Any]:
    shape = param.shape
    return [
        *("x", None, -1.0, float("nan"), float("inf"), (), (0.9,), {}, object(), 2.5, 0, -1, 1j),
        *(torch.zeros(*shape, 2), torch.zeros(shape, dtype=torch.int64), torch.zeros(0)),
        *(torch.zeros(shape).to_sparse_coo(), torch.zeros(shape, device="meta")),
        *(torch.zeros(()).expand(shape), garbage.Wrapper(torch.zeros(shape)), param),
    ]


def functions(chance: Source, say: Say) -> None:
    call = Call(chance, say)
    for _ in range(chance.integer(1, 4)):
        call.valid()


def functions_and_garbage(chance: Source, say: Say) -> None:
    call = Call(chance, say)
    for _ in range(chance.integer(1, 4)):
        chance.pick([call.invalid, call.invalid, call.valid])()
        if call.over:
            return


KINDS: dict[Callable[[Source, Say], None], int] = {functions: 6, functions_and_garbage: 6}
