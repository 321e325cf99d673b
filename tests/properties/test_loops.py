"""The matrix of training loops: every way to write a loop, for every kind of optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.testing._internal.common_optimizers import optim_db

import sparsestep
from sparsestep.grads.compact import CompactGrad
from tests.loops import LOOPS, SAME, Loop, Model, Training, changed, copied, plain, scheduled
from tests.nn.cases import plain as written_out
from tests.subject import Snapshot, Subject
from tests.table import FEW, Variant, same_bits, sm3_by_rows
from tests.torch_versions import steps_sequential_schedulers

pytestmark = pytest.mark.usefixtures("one_thread")
SUBJECTS = [
    Variant(sparsestep.SparseAdam, {}),
    Variant(sparsestep.SGD, {"momentum": 0.9}),
    Variant(sparsestep.RowwiseAdagrad, {}),
    Variant(sparsestep.AdamW, {"semantics": "dense"}),
]
each_of_a_few = pytest.mark.parametrize("variant", SUBJECTS, ids=str)
each_kind = pytest.mark.parametrize("kinds", [sparsestep.nn, nn], ids=["ours", "torch's"])


@each_kind
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("variant", [*SUBJECTS, Variant(sm3_by_rows, {})], ids=str)
def test_loops_that_come_to_the_same(variant: Variant, engine: str, kinds: Any):
    def run(loop: Loop) -> Training:
        return Training.of(Model(kinds, several=True), variant, engine=engine).run(loop)

    dense = "semantics" in variant.options
    wanted = {loop: run(loop) for loop in set(SAME.values())}
    for loop, same in SAME.items():
        if dense and loop is copied:
            continue  # a copy is not tracked
        ours = run(loop)
        close = dense and ours.close_to(wanted[same], 1e-5, 1e-6)
        assert close or ours.same_as(wanted[same]), loop.__name__


@each_of_a_few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_modules_have_the_bits_of_torchs(variant: Variant, dtype: torch.dtype):
    for name, loop in LOOPS.items():
        if name in ("accumulated", "in_three_backwards"):
            continue  # torch sums some duplicates before others
        ours = Training.of(Model(sparsestep.nn, dtype), variant).run(loop)
        assert ours.same_as(Training.of(Model(nn, dtype), variant).run(loop)), name


@each_kind
def test_dense_semantics_come_to_training_with_dense_gradients(kinds: Any):
    for name, loop in LOOPS.items():
        if name == "zeroed":
            continue  # a dense gradient of zeros is one, an emptied sparse one is none
        model = Model(kinds, torch.float64, several=True)
        dense = Model(nn, torch.float64, sparse=False, several=True)
        ours = Training.of(model, sparsestep.AdamW, semantics="dense").run(loop)
        assert ours.close_to(Training.of(dense, sparsestep.AdamW).run(loop)), name


@each_of_a_few
def test_compact_gradients_have_the_bits_of_gradients_written_out(variant: Variant):
    """Where gradients are added up, they are as if one were written after the other."""

    def write_out(params: Any) -> None:
        for param in params:
            if isinstance(param.grad, CompactGrad):
                param.grad = written_out(param.grad)

    ours = Training.of(Model(sparsestep.nn, several=True), variant).run(plain)
    theirs = Training.of(Model(sparsestep.nn, several=True), variant).run(changed(write_out))
    assert ours.same_as(theirs)


def test_gradients_stay_compact():
    for loop in ("plain", "zeroed", "accumulated", "clip_norm", "divide", "hooked"):
        training = Training.of(Model(sparsestep.nn, several=True), sparsestep.Adam).run(LOOPS[loop])
        for name, param in training.model.named_parameters():
            if not name.startswith("out"):
                assert isinstance(param.grad, CompactGrad), loop
                assert not param.grad.is_materialized, loop


@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
@pytest.mark.parametrize("loop", ["plain", "zeroed", "hooked", "scheduled"])
def test_torchs_optimizers(name: str, loop: str):
    """Ours has their numbers, and they have the same bits with our modules."""
    runs = []
    for kinds, module in ((nn, torch.optim), (sparsestep.nn, torch.optim), (nn, sparsestep)):
        model = Model(kinds)
        del model.out
        model.out = nn.Identity()
        runs.append(Training.of(model, getattr(module, name)).run(LOOPS[loop]))
    theirs, with_our_modules, ours = runs
    assert with_our_modules.same_as(theirs)
    assert ours.close_to(theirs, 1e-5, 1e-6)


def sequential(opt: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(opt, 0.25, total_iters=5), SCHEDULERS[0][0](opt)]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[3])


SCHEDULERS: list[list[Any]] = [
    [lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)],
    [lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3)],
    [lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20)],
    [lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1)],
    [sequential],
    [lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=4)],
    # Torch's own database of inputs.
    *next(info.scheduler_inputs for info in optim_db if info.optim_cls is torch.optim.SGD),
]


@steps_sequential_schedulers
@pytest.mark.parametrize("makers", SCHEDULERS)
def test_schedulers_drive_our_class_as_they_drive_torchs(makers: list[Any]):
    """The same options and parameters in the end, also where rows catch up later."""

    def run(cls: Any, *, sparse: bool = False, **options: Any) -> Training:
        model = Model(nn, torch.float64, sparse=sparse)
        return Training.of(model, cls, **options).run(scheduled(*makers), 12)

    for name, options in (("AdamW", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9})):
        theirs, ours = run(getattr(torch.optim, name), **options), getattr(sparsestep, name)
        exact = run(ours, foreach=False, **options)
        deferred = run(ours, sparse=True, semantics="dense", **options)
        assert exact.same_as(theirs)
        assert deferred.close_to(theirs, 1e-9, 1e-9)
        every = [each.optimizer.param_groups for each in (theirs, exact, deferred)]
        for group, *same in zip(*every, strict=True):
            own = group.keys() - {"params", "foreach"}
            assert all(each[key] == group[key] for each in same for key in own)


# Named examples


@pytest.mark.parametrize("variant", FEW, ids=str)
def test_a_table_that_the_batch_did_not_use_is_left_alone(variant: Variant):
    """Its gradient is None, hence no step of it is counted; what is emptied moves nothing."""
    training = Training.of(Model(), variant)
    weight = training.model.sums.weight
    before = weight.detach().clone()
    training.backward(3)
    training.optimizer.step()
    assert same_bits(weight.detach(), before)
    assert int(training.optimizer.state.get(weight, {}).get("step", 0)) == 0
    training.run(plain, 1)
    before = [param.detach().clone() for param in training.model.parameters()]
    training.optimizer.zero_grad(set_to_none=False)
    training.optimizer.step()
    for param, old in zip(training.model.parameters(), before, strict=True):
        assert not param.grad.is_sparse or same_bits(param.detach(), old)


@pytest.mark.parametrize("where", ["rows", "out"])
def test_a_scaler_finds_an_overflow_in_either_kind_of_gradient(where: str):
    training = Training.of(Model(), sparsestep.Adam).run(plain, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training.optimizer.zero_grad()
    scaler.scale(training.model(2)).backward()
    grad = getattr(training.model, where).weight.grad
    (grad._values() if grad.is_sparse else grad)[0, 0] = torch.nan
    before = Snapshot(Subject(training.optimizer))
    scaler.step(training.optimizer)
    before.check()
