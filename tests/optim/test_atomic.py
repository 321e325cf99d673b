"""A step that raises changes nothing: no param, no state tensor, no step count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import (
    STATEFUL,
    Variant,
    each_engine,
    each_optimizer,
    each_stateful,
    running_on,
    snapshot,
    unchanged,
)

SHAPE = (6, 3)


def coo(indices: list, values: Tensor, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=False)


class Handed(torch.nn.Parameter):
    """A param whose gradient is whatever it was handed: torch itself refuses some bad ones."""

    handed: Tensor | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self.handed

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.handed = value


class TwoRowsOfValues:
    """Stands for a COO tensor that has lost all but two rows of its values."""

    def __init__(self, coo: Tensor) -> None:
        self.coo = coo

    @property
    def __class__(self) -> type:
        return Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coo, name)

    def _values(self) -> Tensor:
        return self.coo._values()[:2]


def unfitting_values(param: Any) -> None:
    param.grad = TwoRowsOfValues(coo([[0, 1, 2]], torch.ones(3, 3)))


def resized(param: Tensor) -> None:
    param.grad = coo([[0, 1]], torch.ones(2, 3))
    param.data = torch.zeros(4, 3)


def replaced_with_its_gradient(param: Tensor) -> None:
    """Param and gradient agree, but the state is of another shape."""
    param.grad = None
    param.data = torch.zeros(4, 3)
    param.grad = coo([[0, 1]], torch.ones(2, 3), (4, 3))


def integer(param: Tensor) -> None:
    param.grad = None
    param.data = torch.zeros(SHAPE, dtype=torch.int64)
    param.grad = coo([[0, 1]], torch.ones(2, 3, dtype=torch.int64))


def meta(param: Tensor) -> None:
    param.grad = torch.empty(SHAPE, device="meta")


def meta_coo(param: Tensor) -> None:
    param.grad = coo([[0, 1]], torch.ones(2, 3)).to("meta")


def imaginary(param: Tensor) -> None:
    param.grad = coo([[0, 1]], torch.ones(2, 3, dtype=torch.complex64))


def of_another_shape(param: Tensor) -> None:
    param.grad = coo([[0, 1]], torch.ones(2, 4), (6, 4))


def compressed(param: Tensor) -> None:
    starts, columns = torch.tensor([0, 2, 1, 3, 3, 3, 3]), torch.tensor([0, 1, 2])
    param.grad = torch.sparse_csr_tensor(
        starts, columns, torch.ones(3), SHAPE, check_invariants=False
    )


def expanded(param: Tensor) -> None:
    param.grad = None
    param.data = torch.zeros(1, 3).expand(SHAPE)
    param.grad = coo([[0, 1]], torch.ones(2, 3))


def masked(param: Tensor) -> None:
    param.grad = torch.masked.masked_tensor(torch.ones(6, 4), torch.ones(6, 4) > 0)


# What is done to the last param, and what the message must say.
BAD = {
    "index too large": (
        lambda p: setattr(p, "grad", coo([[0, 6]], torch.ones(2, 3))),
        r"must be in \[0, 6\). Got 6",
    ),
    "index negative": (
        lambda p: setattr(p, "grad", coo([[-1, 2]], torch.ones(2, 3))),
        r"must be in \[0, 6\). Got -1",
    ),
    "index 2**62": (
        lambda p: setattr(p, "grad", coo([[2**62, 2]], torch.ones(2, 3))),
        "Got 4611686018427387904",
    ),
    "second index out of its dim, though the flat position exists": (
        lambda p: setattr(p, "grad", coo([[1, 0], [-1, 3]], torch.ones(2))),
        r"dim 1 must be in \[0, 3\). Got -1",
    ),
    "second index 2**62": (
        lambda p: setattr(p, "grad", coo([[1, 0], [0, 2**62]], torch.ones(2))),
        r"dim 1 must be in \[0, 3\). Got 4611686018427387904",
    ),
    "values that do not fit their indices": (unfitting_values, "need values of shape"),
    "param resized after backward": (resized, r"parameter's shape, \(4, 3\). Got \(6, 3\)"),
    "param replaced by one of another shape": (replaced_with_its_gradient, "the state '"),
    "integers": (integer, "real float dtype. Got torch.int64"),
    "complex gradient": (imaginary, "must have a compatible dtype. Got torch.complex64"),
    "gradient of another shape": (of_another_shape, r"shape, \(6, 3\). Got \(6, 4\)"),
    "compressed gradient that is broken": (compressed, "must increase from 0 to the number"),
    "meta COO gradient": (meta_coo, "parameter's device, cpu. Got meta"),
    "meta gradient": (meta, "parameter's device, cpu. Got meta"),
    "elements that share memory": (expanded, "memory of its own"),
    "MaskedTensor of another shape": (masked, r"shape, \(6, 3\). Got \(6, 4\)"),
}


@each_stateful
@each_engine
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bad_input_in_the_last_param(variant: Variant, engine: str, bad: str, first_step: bool):
    if first_step and bad == "param replaced by one of another shape":
        # Without state there is nothing that the new shape could contradict.
        first_step = False
    spoil, message = BAD[bad]
    params = [Handed(torch.randn(SHAPE), requires_grad=False) for _ in range(4)]
    with running_on(engine) as name:
        opt = variant([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], engine=name)
        if not first_step:
            for param in params:
                param.grad = coo([[1, 1, 4]], torch.randn(3, 3))
            opt.step()
        for param in params:
            param.grad = coo([[5, 1]], torch.randn(2, 3))
        spoil(params[-1])
        before = snapshot(opt)
        versions = [param._version for param in params]
        with pytest.raises(InputError, match=message) as raised:
            opt.step()
    assert str(raised.value).startswith(f"{variant.cls.__name__}: param 1 of group 1: ")
    assert unchanged(opt, before)
    assert [param._version for param in params] == versions


@each_optimizer
def test_messages_name_the_param(optimizer: type[RuleOptimizer]):
    table = torch.nn.Embedding(6, 3, sparse=True)
    opt = optimizer(table.named_parameters())
    table.weight.grad = coo([[9]], torch.ones(1, 3))
    with pytest.raises(InputError, match=r"param 0 of group 0 \(weight\): "):
        opt.step()


@each_optimizer
@each_engine
def test_bad_input_is_both_a_value_error_and_a_runtime_error(
    optimizer: type[RuleOptimizer], engine: str
):
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    with running_on(engine) as name:
        opt = optimizer([param], engine=name)
        param.grad = coo([[7]], torch.ones(1, 3))
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind):
                opt.step()


# SGD takes a missing buffer for a first step, as torch does.
@pytest.mark.parametrize("variant", [v for v in STATEFUL if v.rule.counts], ids=str)
def test_a_state_that_lost_a_tensor(variant: Variant):
    params = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)]
    opt = variant(params)
    for param in params:
        param.grad = torch.ones(SHAPE)
    opt.step()
    name = variant.rule.state[0].name
    del opt.state[params[1]][name]
    before = snapshot(opt)
    with pytest.raises(InputError, match=f"must have a tensor '{name}'"):
        opt.step()
    assert unchanged(opt, before)


@each_optimizer
def test_a_closure_that_raises(optimizer: type[RuleOptimizer]):
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    opt = optimizer([param])
    before = snapshot(opt)

    def closure() -> float:
        param.grad = torch.ones(SHAPE)
        raise ArithmeticError("the loss could not be computed")

    with pytest.raises(ArithmeticError):
        opt.step(closure)
    assert unchanged(opt, before)
