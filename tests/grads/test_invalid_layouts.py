"""Gradients that are broken, in each layout: refused in one sentence, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.masked import masked_tensor

import sparsestep
from sparsestep import IndexedGrad, functional
from sparsestep.errors import InputError
from sparsestep.grads.layouts import touched
from tests.grads.layout_runs import MARKS, each_kind, randn
from tests.table import running_on, same_bits

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]


def broken(
    starts: list[Any],
    others: list[Any],
    values: Tensor,
    layout: torch.layout = torch.sparse_csr,
    shape: tuple[int, ...] = (4, 6),
) -> Callable[[], Tensor]:
    return lambda: torch.sparse_compressed_tensor(
        torch.tensor(starts), torch.tensor(others), values, shape, layout=layout
    )


def by_hand_with(*args: Any, **kwargs: Any) -> Callable[[], IndexedGrad]:
    return lambda: IndexedGrad(*args, **kwargs)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


ONES = torch.ones(2, 6)
CSR, CSC, BSR, BSC = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
# For a parameter of 4 x 6: a gradient, and what the message must say.
BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "position too large": (by_hand_with(ids(0, 4), ONES), r"must be in \[0, 4\). Got 4"),
    "position negative": (by_hand_with(ids(0, -1), ONES), r"must be in \[0, 4\). Got -1"),
    "position 2**62": (by_hand_with(ids(0, 2**62), ONES), r"\[0, 4\). Got 4611686018427387904"),
    "position 2**62 of slots that are cut": (
        by_hand_with(ids(0, 2**62), torch.ones(2, 8), 3, 8),
        r"\[0, 3\). Got 4611686018427387904",
    ),
    "position of an element": (
        by_hand_with(ids(0, 24), torch.ones(2), 24, 1),
        r"must be in \[0, 24\). Got 24",
    ),
    "source too large": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(0, 2)),
        r"source must hold row numbers of values, in \[0, 2\). Got 2",
    ),
    "source negative": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(-1, 0)),
        r"source must hold row numbers of values, in \[0, 2\). Got -1",
    ),
    "source too short": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(0)),
        "2 positions need as many entries in source. Got 1",
    ),
    "source without positions": (
        by_hand_with(None, torch.ones(4, 6), source=ids(0)),
        "source must be None if positions is None",
    ),
    "scale too short": (
        by_hand_with(ids(0, 1), ONES, scale=torch.ones(1)),
        "2 positions need as many entries in scale. Got 1",
    ),
    "scale of integers": (
        by_hand_with(ids(0, 1), ONES, scale=ids(1, 1)),
        "the scale of an IndexedGrad must be of a float dtype. Got torch.int64",
    ),
    "scale without positions": (
        by_hand_with(None, torch.ones(4, 6), scale=torch.ones(4)),
        "scale must be None if positions is None",
    ),
    "scale that is no tensor": (
        by_hand_with(ids(0, 1), ONES, scale=2.0),
        "the scale of an IndexedGrad must be a strided tensor. Got float",
    ),
    "more positions than values": (
        by_hand_with(ids(0, 1, 2), ONES),
        r"3 positions need as many rows of 6 values. Got values of shape \(2, 6\)",
    ),
    "fewer positions than values": (
        by_hand_with(ids(0), ONES),
        r"1 positions need as many rows of 6 values. Got values of shape \(2, 6\)",
    ),
    "values of half a row": (
        by_hand_with(ids(0, 1), torch.ones(2, 3)),
        "2 positions need as many rows of 6 values",
    ),
    "values of half a row with a source": (
        by_hand_with(ids(0, 1), torch.ones(5), 4, 6, ids(0, 0)),
        "the values must be rows of 6",
    ),
    "dense values of another shape": (
        by_hand_with(None, torch.ones(6, 4)),
        r"without positions the values must have shape \(4, 6\). Got \(6, 4\)",
    ),
    "slots x block": (
        by_hand_with(ids(0, 1), ONES, 5, 6),
        "slots x block must be the parameter's 24 elements. Got 5 x 6",
    ),
    "slots without block": (by_hand_with(ids(0, 1), ONES, 4), "24 elements. Got 4 x 0"),
    "negative slots": (by_hand_with(ids(0, 1), ONES, -4, -6), "24 elements. Got -4 x -6"),
    "slots that are no whole number": (by_hand_with(ids(0), ONES, 4.0, 6), "Got 4.0 x 6"),
    "float positions": (
        by_hand_with(torch.tensor([0.0, 1.0]), ONES),
        "positions of an IndexedGrad must be int64 or int32. Got torch.float32",
    ),
    "bool positions": (
        by_hand_with(torch.tensor([True, False]), ONES),
        "positions of an IndexedGrad must be int64 or int32. Got torch.bool",
    ),
    "float source": (
        by_hand_with(ids(0, 1), ONES, 4, 6, torch.tensor([0.0, 1.0])),
        "source of an IndexedGrad must be int64 or int32. Got torch.float32",
    ),
    "list of positions": (
        by_hand_with([0, 1], ONES),
        "positions of an IndexedGrad must be a strided tensor. Got list",
    ),
    "sparse values": (
        by_hand_with(ids(0, 1), ONES.to_sparse_coo()),
        "values of an IndexedGrad must be a strided tensor. Got layout torch.sparse_coo",
    ),
    "no values": (
        by_hand_with(ids(0, 1), None),
        "values of an IndexedGrad must be a strided tensor. Got NoneType",
    ),
    "integer values": (by_hand_with(ids(0, 1), ONES.long()), "compatible dtype. Got torch.int64"),
    "complex values": (by_hand_with(ids(0, 1), ONES * 1j), "compatible dtype. Got torch.complex64"),
    "values elsewhere": (by_hand_with(ids(0, 1), ONES.to("meta")), "must be on cpu. Got meta"),
    "held": (
        by_hand_with(ids(0, 1), ONES, held=ONES > 0),
        "held is internal",
    ),
    "held without positions": (
        by_hand_with(None, torch.ones(4, 6), held=torch.ones(4, 6) > 0),
        "held is internal",
    ),
    "crow that falls": (
        broken([0, 2, 1, 3, 3], [0, 1, 2], torch.ones(3)),
        r"must increase from 0 to the number of entries, 3. Got \[0, 2, 1, 3, 3\]",
    ),
    "crow that begins late": (
        broken([1, 1, 2, 2, 2], [0, 1], torch.ones(2)),
        "must increase from 0",
    ),
    "crow that ends early": (
        broken([0, 0, 1, 1, 1], [0, 1], torch.ones(2)),
        "must increase from 0",
    ),
    "ccol that falls": (
        broken([0, 2, 1, 3, 3, 3, 3], [0, 1, 2], torch.ones(3), CSC),
        "must increase from 0",
    ),
    "crow too short": (broken([0, 1, 2], [0, 1], torch.ones(2)), r"must fit its shape, \(4, 6\)"),
    "crow too long": (broken([0] * 5 + [1, 2], [0, 1], torch.ones(2)), "must fit its shape"),
    "no crow": (broken([], [0], torch.ones(1)), "must fit its shape"),
    "crow of floats": (broken([0.0, 1, 1, 1, 1], [0], torch.ones(1)), "torch.float32 indices"),
    "crow of a batch": (broken([[0, 1, 1, 1, 1]], [[0]], torch.ones(1, 1)), "must fit its shape"),
    "fewer values than columns": (
        broken([0, 1, 2, 2, 2], [0, 1], torch.ones(1)),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(1,\)",
    ),
    "more values than columns": (
        broken([0, 1, 2, 2, 2], [0, 1], torch.ones(3)),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(3,\)",
    ),
    "column too large": (
        broken([0, 1, 2, 2, 2], [0, 6], torch.ones(2)),
        r"indices of dim 1 must be in \[0, 6\). Got 6",
    ),
    "column negative": (
        broken([0, 1, 2, 2, 2], [0, -1], torch.ones(2)),
        r"indices of dim 1 must be in \[0, 6\). Got -1",
    ),
    "row too large": (
        broken([0, 1, 2, 2, 2, 2, 2], [0, 4], torch.ones(2), CSC),
        r"indices of dim 0 must be in \[0, 4\). Got 4",
    ),
    "column of blocks too large": (
        broken([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSR),
        r"indices of dim 1 must be in \[0, 2\). Got 2",
    ),
    "row of blocks too large": (
        broken([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSC),
        r"indices of dim 0 must be in \[0, 2\). Got 2",
    ),
    "blocks that do not divide the shape": (
        broken([0, 1], [0], torch.ones(1, 3, 4), BSR),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(1, 3, 4\)",
    ),
    "blocks without elements": (broken([0, 0], [], torch.ones(0, 0, 0), BSR), "must fit its shape"),
    "values that are no blocks": (broken([0, 1, 1], [0], torch.ones(1), BSR), "must fit its shape"),
    "COO index out of its dim": (
        lambda: torch.sparse_coo_tensor([[1, 0], [-1, 3]], torch.ones(2), (4, 6)),
        r"indices of dim 1 must be in \[0, 6\). Got -1",
    ),
    "COO row out of its dim": (
        lambda: torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 6), (4, 6)),
        r"indices of dim 0 must be in \[0, 4\). Got 4",
    ),
    "CSR of another shape": (
        broken([0, 1, 2], [0, 1], torch.ones(2), shape=(2, 6)),
        r"the parameter's shape, \(4, 6\). Got \(2, 6\)",
    ),
    "strided of another shape": (lambda: torch.ones(6, 4), r"shape, \(4, 6\). Got \(6, 4\)"),
    "CSR of integers": (
        broken([0, 1, 1, 1, 1], [0], torch.ones(1, dtype=torch.int64)),
        "compatible dtype. Got torch.int64",
    ),
    "MaskedTensor of another shape": (
        lambda: masked_tensor(torch.ones(6, 4), torch.ones(6, 4) > 0),
        r"the parameter's shape, \(4, 6\). Got \(6, 4\)",
    ),
    "MaskedTensor of integers": (
        lambda: masked_tensor(torch.ones(4, 6).long(), torch.ones(4, 6) > 0),
        "compatible dtype. Got torch.int64",
    ),
    "a layout that nobody knows": (
        lambda: torch.ones(4, 6).to_mkldnn(),
        "must be a strided, COO, CSR, CSC, BSR or BSC tensor, a MaskedTensor or an IndexedGrad",
    ),
}


@pytest.mark.parametrize("bad", BROKEN)
@each_kind
def test_what_is_broken_is_refused_in_one_sentence_and_changes_nothing(bad: str, engine: str):
    make, message = BROKEN[bad]
    param, mean, square, sums = randn((4, 6)), randn((4, 6), 1), randn((4, 6), 2), randn((4,), 3)
    tensors = [param, mean, square, sums]
    before = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    with running_on(engine) as name:
        opt = sparsestep.FunctionalAdam([param], engine=name)
        rowwise = sparsestep.FunctionalRowwiseAdagrad([param], engine=name)
        calls: dict[str, Callable[[Any], None]] = {
            "adam_: ": lambda g: functional.adam_(param, g, mean, square, step=1, engine=name),
            "rowwise_adagrad_: ": lambda g: functional.rowwise_adagrad_(
                param, g, sums, engine=name
            ),
            "Adam: param 0 of group 0: ": lambda g: opt.step([g]),
            "RowwiseAdagrad: param 0 of group 0: ": lambda g: rowwise.step_param(param, g),
        }
        for who, call in calls.items():
            with pytest.raises(InputError, match=message) as raised:
                call(make())
            text = str(raised.value)
            assert text.startswith(who)
            assert text.endswith(".")
            assert "\n" not in text
    assert all(map(same_bits, tensors, before))
    assert [tensor._version for tensor in tensors] == versions
    assert len(opt.state) == 0
    assert not rowwise.state


def test_a_parameter_of_another_kind_refuses_values_of_this_one():
    for dtype, values in ((torch.complex64, ONES), (torch.float32, ONES * 1j)):
        with pytest.raises(InputError, match="must have a compatible dtype"):
            touched(torch.zeros(4, 6, dtype=dtype), IndexedGrad(ids(0, 1), values))
