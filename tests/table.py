"""The table that the property tests run over, and how results are compared.

An optimizer that is registered in ``sparsestep.optim.OPTIMIZERS`` is in the table, with its default
options and with those of ``OPTIONS``. An engine is the reference engine or the native one with each
instruction set that this machine has. ``EVERY`` also has rules that a user might write.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import _native, functional
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.state_dict import unpacked_state
from sparsestep.rules.rule import Rule

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INSTRUCTION_SETS = [name for name, available in _native.instruction_sets().items() if available]
# The widest alone, unless everything is to be tested: that all have the same bits is a property of
# its own (tests/properties). With "triton" it is that engine alone, in Triton's interpreter.
WANTED = os.environ.get("SPARSESTEP_TESTS")
EVERYTHING = WANTED == "all"
ENGINES = ["reference", *(INSTRUCTION_SETS if EVERYTHING else INSTRUCTION_SETS[-1:])]
if WANTED == "triton":
    ENGINES = ["triton"]
needs_triton = pytest.mark.skipif(
    WANTED not in ("triton", "all") or find_spec("triton") is None,
    reason="make gpu-check installs Triton and runs this",
)

# Options that select another formula or another treatment of it; every rule is to be selected.
OPTIONS: dict[type[RuleOptimizer], list[dict[str, Any]]] = {
    sparsestep.SparseAdam: [{"bias_correction": "per_row"}],
    sparsestep.Adam: [
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"bias_correction": "per_row"},
        {"amsgrad": True, "bias_correction": "per_row"},
    ],
    sparsestep.NAdam: [{"betas": (0.5, 0.75), "momentum_decay": 0.5, "weight_decay": 0.1}],
    sparsestep.RAdam: [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    sparsestep.Adagrad: [
        {"lr_decay": 0.5, "initial_accumulator_value": 0.25, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    sparsestep.RowwiseAdagrad: [{"weight_decay": 0.1}],
    sparsestep.RowwiseAdam: [
        {"bias_correction": "per_row", "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"betas": (0.0, 0.9)},
        {"betas": (0.0, 0.9), "bias_correction": "per_row", "weight_decay": 0.1},
    ],
    sparsestep.SGD: [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    sparsestep.RMSprop: [
        {"momentum": 0.9},
        {"centered": True, "eps": 0.5},
        {"centered": True, "momentum": 0.9, "eps": 0.5},
    ],
    sparsestep.Lion: [{"weight_decay": 0.1}],
    sparsestep.Ftrl: [{"l1": 0.5, "l2": 0.25, "initial_accumulator_value": 0.25}],
}


@dataclass(frozen=True)
class Variant:
    """An optimizer class with options; called like the class."""

    cls: type[RuleOptimizer]
    options: dict[str, Any]

    def __call__(self, params: Any, **more: Any) -> RuleOptimizer:
        if more.get("engine") == "native" and not self.has_twin:
            more["engine"] = "auto"
        return self.cls(params, **{**self.options, **more})

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def rule(self) -> Rule:
        return self.cls.rule_for(self([torch.zeros(1)]).param_groups[0])

    @cached_property
    def has_twin(self) -> bool:
        return self.rule.has_native_kernel


VARIANTS = [Variant(cls, options) for cls in OPTIMIZERS for options in [{}, *OPTIONS.get(cls, [])]]

# Coupled weight decay by default.
PARAMETERS = {cls: inspect.signature(cls).parameters for cls in OPTIMIZERS}
WITH_COUPLED_DECAY = [
    cls
    for cls, options in PARAMETERS.items()
    if "decoupled_weight_decay" in options and not options["decoupled_weight_decay"].default
]

# The optimizers that have dense semantics.
WITH_DENSE = [cls for cls in OPTIMIZERS if Variant(cls, {}).rule.idle_update is not None]

# The function of each optimizer has the name of its file: sparse_adam_ for SparseAdam.
FUNCTIONS: dict[type[RuleOptimizer], Callable[..., None]] = {
    cls: getattr(functional, cls.__module__.rpartition(".")[2] + "_") for cls in OPTIMIZERS
}

STATEFUL = [Variant(cls, {"momentum": 0.9} if cls is sparsestep.SGD else {}) for cls in OPTIMIZERS]


# Torch's SparseAdam takes no dense gradients.
COUNTERPARTS = [
    (ours, getattr(torch.optim, ours.__name__))
    for ours in OPTIMIZERS
    if hasattr(torch.optim, ours.__name__) and ours is not sparsestep.SparseAdam
]
each_counterpart = pytest.mark.parametrize(
    ("ours", "theirs"), COUNTERPARTS, ids=[ours.__name__ for ours, _ in COUNTERPARTS]
)


def saved_state(opt: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """A parameter's state as a checkpoint has it: with what torch keeps and we compute."""
    params = [each for group in opt.param_groups for each in group["params"]]
    (index,) = (i for i, each in enumerate(params) if each is param)
    return opt.state_dict()["state"].get(index, {})


@sparsestep.rule(state={"momentum_buffer": 0.0})
def sign_sgd(param, grad, momentum_buffer, *, lr=0.1, momentum=0.5):
    """A step of the length lr, along the sign of the momentum."""
    momentum_buffer = momentum * momentum_buffer + grad
    return param - lr * momentum_buffer.sign(), momentum_buffer


@sparsestep.rule(row_state={"accumulator": 0.0})
def sm3_by_rows(param, grad, accumulator, *, lr=0.1, eps=1e-10):
    """SM3 with rows as its only cover: one number for each row bounds the squares in it."""
    bound = accumulator + grad.square()
    return param - lr * grad / (bound.sqrt() + eps), bound.amax(dim=1, keepdim=True)


# They have no native kernel, so the native engine is "auto" for them.
USER_RULES = [
    Variant(sign_sgd, {}),
    Variant(sign_sgd, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sm3_by_rows, {}),
    Variant(sm3_by_rows, {"weight_decay": 0.1}),
]
EVERY = [*VARIANTS, *USER_RULES]
PLAIN = [Variant(cls, {}) for cls in (*OPTIMIZERS, sign_sgd, sm3_by_rows)]
# No state, state per element, state per row, and a user's: where the rule itself does not matter.
FEW = [v for v in PLAIN if v.cls.__name__ in ("SGD", "Adam", "RowwiseAdagrad", "sm3_by_rows")]

each_stateful = pytest.mark.parametrize("variant", STATEFUL, ids=lambda v: v.cls.__name__)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
each_variant = pytest.mark.parametrize("variant", EVERY, ids=str)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def on_each_engine(variants: list[Variant]) -> pytest.MarkDecorator:
    """Every variant with every engine that makes a difference to it."""
    runs = [
        (v, e) for e in ENGINES for v in variants if v.has_twin or e in (ENGINES[0], ENGINES[-1])
    ]
    ids = [f"{engine}-{variant}" for variant, engine in runs]
    return pytest.mark.parametrize(("variant", "engine"), runs, ids=ids)


dtypes = st.sampled_from(DTYPES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@contextmanager
def running_on(engine: str) -> Iterator[str]:
    """The ``engine=`` argument for an engine of the table, with its instruction set in use."""
    if engine in ("reference", "triton"):
        yield engine
        return
    before = _native.instruction_set()
    assert before is not None
    _native.use_instruction_set(engine)
    try:
        yield "native"
    finally:
        _native.use_instruction_set(before)


def through_a_file(saved: Any, *, weights_only: bool = True) -> Any:
    """What ``torch.load`` makes of what ``torch.save`` has written."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def randn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state_of(opt: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """The state of a parameter in its shape, also if a mask has packed it."""
    found = unpacked_state(opt, param) if isinstance(opt, RuleOptimizer) else opt.state.get(param)
    return dict(found or {})


def state_tensors(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All state tensors in the order of the params, then of the names."""
    return [
        value
        for group in opt.param_groups
        for param in group["params"]
        for _, value in sorted(state_of(opt, param).items())
        if isinstance(value, Tensor)
    ]


def steps_of(opt: torch.optim.Optimizer, param: Tensor) -> int | None:
    """A param's step count; ``None`` where its optimizer keeps none."""
    count = opt.state.get(param, {}).get("step")
    return None if count is None else int(count)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the last bit: NaN equals NaN of the same bits, 0.0 does not equal -0.0."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(_bits(ours), _bits(theirs))


def all_same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """As many tensors, one at least, each of the same bits."""
    ours, theirs = list(ours), list(theirs)
    return 0 < len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.contiguous().view(integers)
