"""Every message that a refusal in one process raises; ``make messages`` writes ``messages.txt``.

A case is a call that must be refused. Its name and its message make a line of the golden file, so
other tests need not repeat what messages say.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sparsestep
from sparsestep import _native, distributed, functional, storage
from sparsestep.distributed.placement import ByRow
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.garbage import BROKEN, Handed, Unusable, ids
from tests.table import sign_sgd

FILE = Path(__file__).with_name("messages.txt")
ACCEPTED = "ACCEPTED"
HEAD = "# What refusals say, written by `make messages`.\n"
Cases = dict[str, Callable[[], object]]
NAN, INF = float("nan"), float("inf")
TWO = torch.tensor([0.1, 0.2])


def collect() -> dict[str, str]:
    """The message of every case, by area and name."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        return {
            f"{area.__name__}: {name}": message_of(case).replace(folder, "<folder>")
            for area in AREAS
            for name, case in area(Path(folder)).items()
        }


def message_of(case: Callable[[], object]) -> str:
    try:
        case()
    except (TypeError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ACCEPTED


def written(messages: dict[str, str]) -> str:
    return HEAD + "".join(f"{name}: {text}\n" for name, text in messages.items())


# Optimizers and gradients to make


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 6)))


def made(cls: Any = sparsestep.AdamW, param: Tensor | None = None, **options: Any) -> Any:
    return cls([table() if param is None else param], lr=0.1, **options)


def param_of(opt: RuleOptimizer) -> Any:
    return opt.param_groups[0]["params"][0]


def coo(*rows: int, width: int = 6) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), width), (4, width))


def stepped(opt: Any, grad: Any = None, steps: int = 1) -> Any:
    for _ in range(steps):
        param_of(opt).grad = coo(1, 3) if grad is None else grad
        opt.step()
    return opt


def after_step(change: Callable[[Any], object], **options: Any) -> Callable[[], object]:
    """A second step, after its optimizer was changed."""

    def case() -> None:
        opt = stepped(made(**options))
        change(opt)
        stepped(opt)

    return case


def with_state(name: str, value: Any, **options: Any) -> Callable[[], object]:
    return after_step(lambda opt: opt.state[param_of(opt)].update({name: value}), **options)


# Options


OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {
        **{"lr": -1, "betas": (0.9, 1.0), "eps": -1e-8, "weight_decay": -0.1, "amsgrad": "yes"},
        **{"maximize": 2, "foreach": "yes", "fused": 0.5, "capturable": TWO, "engine": "quantum"},
        **{"semantics": "sparse", "bias_correction": "row", "state_dtype": torch.int32},
        **{"stochastic_rounding": 1, "rounding_seed": "7", "mask": "all", "differentiable": None},
        "decoupled_weight_decay": False,
    },
    "Adagrad": {"lr_decay": -1.0, "initial_accumulator_value": -1.0},
    "RMSprop": {"alpha": -0.5, "momentum": INF},
    "SGD": {"dampening": NAN, "nesterov": True},
    "Ftrl": {"beta": -1.0, "l1": -1.0, "l2": -1.0},
    "SparseAdam": {"eps": 0},
    "Lion": {"betas": (-0.1, 0.9)},
}
VALUES: list[tuple[str, Any]] = [
    *(("lr", value) for value in ("1e-3", "0.1", "fast", None, INF, TWO, torch.tensor(1j))),
    *(("betas", value) for value in (0.9, ("0.9", 0.99), (0.9, torch.tensor(0.9)))),
    *(("state_dtype", value) for value in ("int8", "half", "text")),
    ("eps", "2.5E8"),
]


def options(_: Path) -> Cases:
    cases: Cases = {
        f"{cls}({name}={value!r})": lambda c=cls, o={name: value}: getattr(sparsestep, c)(
            [table()], **o
        )
        for cls, wrong in OPTIONS.items()
        for name, value in wrong.items()
    }
    for name, value in VALUES:
        cases[f"AdamW({name}={value!r})"] = lambda o={name: value}: sparsestep.AdamW([table()], **o)
    sgd, adam = sparsestep.SGD, sparsestep.Adam
    groups = {
        "no params": {"lr": 0.1},
        "no dict at all": {},
        "an option of another class": {"params": [table()], "momentum": 0.9},
        "an option of the optimizer": {"params": [table()], "engine": "native"},
        "a misspelled option": {"params": [table()], "weight_deacy": 0.1},
        "a sparse parameter": {"params": [table().detach().to_sparse()]},
        "a wrong option": {"params": [table()], "lr": -1},
    }
    for name, group in groups.items():
        cases[f"a group with {name}"] = lambda g=group: made().add_param_group(g)
    return {
        **cases,
        "fused and foreach": lambda: adam([table()], fused=True, foreach=True),
        "fused and differentiable": lambda: adam([table()], fused=True, differentiable=True),
        "foreach and a tensor": lambda: adam([table()], lr=torch.tensor(0.1), foreach=True),
        "a complex parameter": lambda: made(sparsestep.SparseAdam, torch.ones(4) * 1j),
        "a state_dtype of complex parameters": lambda: made(
            adam, torch.ones(4) * 1j, state_dtype=torch.float32
        ),
        "an unknown option": lambda: made(sign_sgd, amsgrad=True),
        "an instruction set": lambda: _native.use_instruction_set("sse"),
        "an option that is gone": after_step(lambda opt: opt.param_groups[0].pop("betas")),
        "an option changed later": after_step(lambda opt: opt.param_groups[0].update(lr="x")),
        "a misspelled option put in later": after_step(
            lambda opt: opt.param_groups[0].update(bettas=1)
        ),
        "differentiable and a leaf": lambda: stepped(
            made(adam, differentiable=True), torch.ones(4, 6)
        ),
        "differentiable and sparse": lambda: stepped(made(adam, differentiable=True)),
        "int8 state of FTRL": lambda: stepped(made(sparsestep.Ftrl, state_dtype=torch.int8)),
        "the native engine and odd strides": lambda: stepped(
            made(sgd, nn.Parameter(torch.ones(2, 6, 4).transpose(1, 2)), engine="native"),
            torch.ones(2, 4, 6).to_sparse(1),
        ),
        **{f"dense semantics and {name}": case for name, case in dense_options().items()},
    }


def dense_options() -> Cases:
    adam, radam = sparsestep.Adam, sparsestep.RAdam

    def dense(cls: Any, **options: Any) -> Callable[[], object]:
        return lambda: made(cls, semantics="dense", **options)

    @sparsestep.rule(state={"seen": 0.0})
    def growing(param, grad, seen, *, lr):
        return param - lr * grad, seen + 1

    @sparsestep.rule
    def drifting(param, grad, *, lr):
        return param - lr * grad.sign() - 0.1

    return {
        "coupled decay": dense(adam, weight_decay=0.1),
        "a rule without closed form": dense(radam),
        "counts per row": dense(adam, bias_correction="per_row"),
        "a decay of one": dense(sparsestep.AdamW, weight_decay=10.0),
        "int8": dense(adam, state_dtype=torch.int8),
        "stochastic rounding": dense(adam, stochastic_rounding=True),
        "differentiable": dense(adam, differentiable=True),
        "a user's rule whose state grows": lambda: stepped(made(growing, semantics="dense")),
        "a user's rule that drifts": lambda: stepped(made(drifting, semantics="dense")),
    }


def rules(_: Path) -> Cases:
    def unnamed(param, grad, sum, *, lr):
        return param, sum

    def masked(param, grad, *, lr, mask=None):
        return param

    def any_option(param, grad, **options):
        return param

    def returning(result: Callable[[Tensor], Any]) -> Callable[[], object]:
        @sparsestep.rule(state={"sum": 0.0})
        def wrong(param, grad, sum, *, lr):
            return result(param)

        return lambda: stepped(made(wrong))

    def needs(param, grad, *, lr, decay):
        return param

    rule = sparsestep.rule
    return {
        "state that is not named": lambda: rule(unnamed),
        "names without values": lambda: rule(unnamed, state=["sum"]),
        "a tensor as first value": lambda: rule(unnamed, row_state={"sum": TWO}),
        "step as state": lambda: rule(unnamed, state={"step": 0.0}),
        "no function": lambda: rule({"sum": 0.0}),
        "no signature": lambda: rule(torch.add),
        "any option": lambda: rule(any_option),
        "an option of every optimizer": lambda: rule(masked),
        "compile": lambda: rule(unnamed, state={"sum": 0.0}, compile="inductor"),
        "an option that is missing": lambda: made(rule(needs)),
        "too few results": returning(lambda param: param),
        "a result of another shape": returning(lambda param: (param, param[:1])),
        "a result that is a number": returning(lambda param: (param, 0.0)),
        "a result that is none": returning(lambda param: None),
        "a complex result": returning(lambda param: (param * 1j, param)),
    }


# Steps


def gradients(_: Path) -> Cases:
    cases: Cases = {
        name: lambda m=make: functional.sgd_(torch.zeros(4, 6), m())
        for name, make in BROKEN.items()
        if not name.startswith("no tensor: ") or name in ("no tensor: str", "no tensor: ndarray")
    }
    half = torch.ones(2, dtype=torch.bool)
    return {
        **cases,
        "of a named parameter": lambda: named_step(),
        "none": lambda: functional.sgd_(torch.zeros(4, 6), None),
        "a mask that is too short": lambda: functional.sgd_(torch.zeros(4, 6), coo(1), mask=half),
        "a mask that is no tensor": lambda: made(mask="rows"),
        "a mask of numbers": lambda: made(mask=torch.ones(4)),
        "too many masks": lambda: made(mask=[None, None]),
        "a mask of elements, counts per row": lambda: made(
            mask=torch.ones(4, 6) > 0, bias_correction="per_row"
        ),
    }


def named_step() -> None:
    bag = nn.Embedding(4, 6, sparse=True)
    opt = sparsestep.Adam(bag.named_parameters())
    bag.weight.grad = coo(9)
    opt.step()


def steps(_: Path) -> Cases:
    def resized(opt: Any) -> None:
        param_of(opt).grad = None
        param_of(opt).data = torch.zeros(4, 3)

    def backwards(opt: Any, count: int) -> None:
        opt.step_in_backward()
        for _ in range(count):
            param_of(opt).sum().backward()
        opt.step()
        for _ in range(count + 1):
            param_of(opt).sum().backward()

    return {
        "state without a tensor": after_step(lambda opt: opt.state[param_of(opt)].pop("exp_avg")),
        "state of another shape": with_state("exp_avg", torch.zeros(4, 3)),
        "state of integers": with_state("exp_avg", torch.zeros(4, 6).long()),
        "sparse state": with_state("exp_avg", torch.zeros(4, 6).to_sparse()),
        "complex state": with_state("exp_avg", torch.zeros(4, 6) * 1j),
        "state that shares memory": with_state("exp_avg", torch.zeros(1).expand(4, 6)),
        "no count": with_state("step", None),
        "a count that is a word": with_state("step", "two"),
        "several counts": with_state("step", torch.ones(2)),
        "a negative count": with_state("step", -3),
        "an inference tensor as count": with_state("step", inference(torch.ones(()))),
        "real state of a complex parameter": lambda: complex_step(),
        "a parameter of another shape": lambda: stepped_with(resized, coo(1, width=3)),
        "a deferred parameter of another shape": lambda: stepped_with(
            resized, coo(1, width=3), semantics="dense"
        ),
        "a parameter of integers": lambda: stepped(
            made(sparsestep.SGD, torch.ones(4, 6).long()), torch.ones(4, 6).long()
        ),
        "a parameter that shares memory": lambda: stepped(
            made(sparsestep.SGD, torch.ones(1, 6).expand(4, 6))
        ),
        "a parameter that is an inference tensor": lambda: stepped(
            made(sparsestep.SGD, inference(torch.ones(4, 6)))
        ),
        "a negative view": lambda: stepped(
            made(sparsestep.SGD, torch._neg_view(torch.ones(4, 6))), coo(1)
        ),
        "step_in_backward(backwards=0)": lambda: made().step_in_backward(backwards=0),
        "step_in_backward of another's": lambda: made().step_in_backward([table()]),
        "step_in_backward of a word": lambda: made().step_in_backward(["x"]),
        "step_in_backward with gradients": lambda: with_grad().step_in_backward(),
        "one backward too many": lambda: backwards(made(), 1),
        "catch_up of another's": lambda: made().catch_up(table()),
        "catch_up of rows outside": lambda: deferred(lambda opt, p: opt.catch_up(p, ids(4))),
        "catch_up of float rows": lambda: deferred(lambda opt, p: opt.catch_up(p, TWO)),
        "forget of another's": lambda: made().forget(table(), ids(1)),
        "forget of rows outside": lambda: deferred(lambda opt, p: opt.forget(p, ids(-1))),
        "share_memory of dense semantics": lambda: made(semantics="dense").share_memory(),
        "share_memory without state": lambda: made(
            sparsestep.SGD, momentum=0.9, dampening=0.5
        ).share_memory(),
        "share_memory of a lazy parameter": lambda: made(
            sparsestep.SGD, nn.UninitializedParameter(), momentum=0.9
        ).share_memory(),
        "track without dense semantics": lambda: made().track(nn.Embedding(4, 6)),
        "track of no model": lambda: made(semantics="dense").track("model"),
        "track of another model": lambda: made(semantics="dense").track(nn.Embedding(4, 6)),
    }


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def complex_step() -> None:
    opt = made(param=torch.ones(4, 6) * 1j)
    stepped(opt, torch.ones(4, 6) * 1j)
    opt.state[param_of(opt)]["exp_avg"] = torch.zeros(4, 6)
    stepped(opt, (torch.ones(4, 6) * 1j).to_sparse(1))


def with_grad() -> Any:
    opt = made()
    param_of(opt).grad = torch.ones(4, 6)
    return opt


def stepped_with(change: Callable[[Any], object], grad: Tensor, **options: Any) -> None:
    opt = stepped(made(**options))
    change(opt)
    stepped(opt, grad)


def deferred(use: Callable[[Any, Any], object]) -> None:
    opt = stepped(made(semantics="dense"))
    use(opt, param_of(opt))


def functions(_: Path) -> Cases:
    def adam(param: Any, *state: Any, **options: Any) -> None:
        functional.adam_(param, coo(1), *state, **{"step": 1, **options})

    def call(param: Any = None, **options: Any) -> Callable[[], object]:
        param = torch.zeros(4, 6) if param is None else param
        return lambda: adam(param, torch.zeros(4, 6), torch.zeros(4, 6), **options)

    by_hand = sparsestep.FunctionalAdam
    zeros = torch.zeros(4, 6)
    lists: list[Any] = [zeros]
    return {
        **{f"step={step}": call(step=step) for step in (0, 1.5, NAN, "x", 1 << 63, TWO)},
        "an option": call(lr=-1.0),
        "an engine": call(engine="quantum"),
        "no tensor": call("x"),
        "a sparse parameter": call(coo(1)),
        "a parameter of integers": call(zeros.long()),
        "a complex parameter": lambda: functional.sparse_adam_(
            zeros * 1j, coo(1), zeros, zeros, step=1
        ),
        "a parameter without memory": call(Unusable(zeros)),
        "a seed": call(seed=TWO),
        "Nesterov without momentum": lambda: functional.sgd_(zeros, coo(1), nesterov=True),
        "momentum without a buffer": lambda: functional.sgd_(zeros, coo(1), momentum=0.9),
        "RMSprop's momentum without a buffer": lambda: functional.rmsprop_(
            zeros, coo(1), zeros, step=1, momentum=0.9
        ),
        "too many options by position": lambda: by_hand([zeros], *range(20)),
        "an option twice": lambda: by_hand([zeros], 0.1, lr=0.1),
        "an option of torch's class": lambda: sparsestep.FunctionalAdagrad(
            [zeros], coalesce_grad=False
        ),
        "no parameters": lambda: by_hand([]),
        "too few gradients": lambda: by_hand(lists).step([]),
        "a new parameter that is none": lambda: by_hand(lists).step_param("x", zeros),
        "a new parameter with a mask": lambda: by_hand(lists, mask=ids(1, 0, 1, 0) > 0).step_param(
            torch.ones(4, 6), zeros
        ),
    }


# Checkpoints of an optimizer


def loading(_: Path) -> Cases:
    saved = stepped(made()).state_dict()

    def put(*path: Any, **options: Any) -> Callable[[], object]:
        """Load a checkpoint in which the last of ``path`` is at the rest of it, and step."""
        bad: Any = copy.deepcopy(saved)
        at: Any = bad
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]

        def case() -> None:
            opt = made(**options)
            opt.load_state_dict(bad)
            stepped(opt)

        return case

    state, group = saved["state"][0], saved["param_groups"][0]
    return {
        "no dict": lambda: made().load_state_dict([1]),
        "an empty dict": lambda: made().load_state_dict({}),
        "a model's": lambda: made().load_state_dict(nn.Linear(1, 1).state_dict()),
        "state that is a list": put("state", []),
        "groups that are a dict": put("param_groups", {}),
        "a group without params": put("param_groups", 0, {"lr": 0.1}),
        "a group that is a list": put("param_groups", 0, []),
        "two groups": put("param_groups", [group, group]),
        "state of a param that is a tensor": put("state", 0, torch.ones(4, 6)),
        "state without an average": put("state", 0, {"step": state["step"]}),
        "an average that is a list": put("state", 0, "exp_avg", [1.0]),
        "an average of another shape": put("state", 0, "exp_avg", torch.ones(6, 4)),
        "an average of integers": put("state", 0, "exp_avg", torch.ones(4, 6).long()),
        "no count": put("state", 0, {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg"]}),
        "a count that is a word": put("state", 0, "step", "three"),
        "a count that is nan": put("state", 0, "step", NAN),
        "several counts": put("state", 0, "step", torch.ones(2)),
        "more steps than rows count": put("state", 0, "step", 2.0**40, semantics="dense"),
        "a wrong option": put("param_groups", 0, "lr", "fast"),
        "an option of another class": put("param_groups", 0, "momentum", 0.9),
        "SGD's": lambda: made().load_state_dict(sparsestep.SGD([table()]).state_dict()),
    }


# Clipping and tables


def clipping(_: Path) -> Cases:
    norm, value = sparsestep.clip_grad_norm_, sparsestep.clip_grad_value_

    def clip(grad: Tensor, *bound: Any, by: Any = norm, **options: Any) -> Callable[[], object]:
        param = Handed(torch.ones(4, 6), requires_grad=False)
        param.grad = grad
        return lambda: by([param], *bound, **options)

    return {
        "no parameters": lambda: norm(3, 1.0),
        "a parameter that is a word": lambda: value([table(), "x"], 1.0),
        "CSR": clip(torch.ones(4, 6).to_sparse_csr(), 1.0),
        "integers": clip(coo(1).long(), 1.0),
        "a bound below 0": clip(coo(1), -1.0, by=value),
        "complex values": clip(coo(1) * 1j, 1.0, by=value),
        "an infinite norm": clip(coo(1) * INF, 1.0, error_if_nonfinite=True),
        "a bound of a compact gradient": lambda: compact().clamp_(min=0.5),
    }


def compact() -> Tensor:
    bag = sparsestep.nn.EmbeddingBag(4, 6)
    bag(ids(1, 2).view(1, 2)).sum().backward()
    return bag.weight.grad


def lookups(_: Path) -> Cases:
    bag, rows = sparsestep.nn.EmbeddingBag(4, 6, mode="sum"), sparsestep.nn.Embedding(4, 6)
    flat = ids(1, 2, 3)
    nested = torch.nested.nested_tensor([ids(1), ids(2)], layout=torch.jagged)
    one = torch.ones(3)
    means = sparsestep.nn.EmbeddingBag(4, 6, mode="mean")
    frequent = sparsestep.nn.EmbeddingBag(4, 6, mode="sum", scale_grad_by_freq=True)
    frequent.mode = "max"
    unknown = sparsestep.nn.EmbeddingBag(4, 6)
    unknown.mode = "median"
    collection = sparsestep.nn.EmbeddingBagCollection
    fused = collection({"a": (4, 6)})
    both = flat.view(3, 1)
    return {
        "an id outside": lambda: rows(ids(1, 4)),
        "a negative id": lambda: rows(ids(1, -1)),
        "float ids": lambda: rows(TWO),
        "sparse ids": lambda: rows(ids(1, 2).to_sparse()),
        "ids elsewhere": lambda: rows(ids(1).to("meta")),
        "an id outside a bag": lambda: bag(flat + 2, ids(0)),
        "no offsets": lambda: bag(flat),
        "float offsets": lambda: bag(flat, torch.zeros(1)),
        "offsets elsewhere": lambda: bag(flat, ids(0).to("meta")),
        "empty offsets": lambda: bag(flat, ids()),
        "offsets that fall": lambda: bag(flat, ids(0, 2, 1)),
        "offsets that begin late": lambda: bag(flat, ids(1)),
        "offsets beyond the end": lambda: bag(flat, ids(0, 9)),
        "offsets of 2-D ids": lambda: bag(flat.view(1, 3), ids(0)),
        "3-D ids": lambda: bag(flat.view(1, 1, 3)),
        "weights of means": lambda: means(flat, ids(0), per_sample_weights=one),
        "weights of another dtype": lambda: bag(flat, ids(0), per_sample_weights=flat),
        "weights of another shape": lambda: bag(flat, ids(0), per_sample_weights=one[:2]),
        "weights elsewhere": lambda: bag(flat, ids(0), per_sample_weights=one.to("meta")),
        "nested ids with plain weights": lambda: bag(nested, per_sample_weights=one[:2]),
        "an unknown mode": lambda: unknown(flat, ids(0)),
        "frequencies of maxima": lambda: frequent(flat, ids(0)),
        "double backward": lambda: compact().requires_grad_().square(),
        "a collection with a dotted name": lambda: collection({"a.b": (4, 6)}),
        "a collection of words": lambda: collection({"a": "x"}),
        "a collection of sizes that are none": lambda: collection({"a": (4,)}),
        "a lookup that is no dict": lambda: fused(flat),
        "a lookup of another table": lambda: fused({"b": flat.view(1, 3)}),
        "a lookup of too many": lambda: fused([both, both]),
        "a lookup with offsets": lambda: fused(both, ids(0)),
        "fuse of no model": lambda: sparsestep.nn.fuse("model"),
        "fuse of another module": lambda: sparsestep.nn.fuse(nn.Sequential(rows), only=["1"]),
        "optimizer_for no model": lambda: sparsestep.nn.optimizer_for("model", sparsestep.SGD),
        "optimizer_for torch's": lambda: sparsestep.nn.optimizer_for(bag, torch.optim.Adam),
        **{f"grow: {name}": case for name, case in growing().items()},
    }


def growing() -> Cases:
    def grow(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: sparsestep.nn.grow(*args, **options)

    def tables() -> tuple[Any, Any]:
        found = sparsestep.nn.Embedding(4, 6)
        return found, found.weight

    rows, weight = tables()
    shared, _ = tables()
    shared.share_memory()
    used, its_weight = tables()
    its_weight.grad = torch.ones(4, 6)
    masked = sparsestep.SGD([weight], mask=torch.ones(4) > 0)
    sharing = sparsestep.SGD([weight], momentum=0.9)
    sharing.share_memory()
    computed = parametrizations.weight_norm(nn.Embedding(4, 6))
    return {
        "no table": grow(nn.Linear(2, 2), 5),
        "no module": grow("table", 5),
        "fewer rows": grow(rows, 3),
        "rows that are a word": grow(rows, "5"),
        "init that is none": grow(rows, 5, init=0.0),
        "with a gradient": grow(used, 5),
        "in shared memory": grow(shared, 5),
        "torch's optimizer": grow(rows, 5, torch.optim.SGD([weight])),
        "another optimizer": grow(rows, 5, made()),
        "under a mask": grow(rows, 5, masked),
        "with state in shared memory": grow(rows, 5, sharing),
        "a computed weight": grow(computed, 5),
        "a sharded table": lambda: sparsestep.nn.grow(sharded()[0], 9),
    }


def vocabularies(_: Path) -> Cases:
    vocabulary, hashed = sparsestep.nn.Vocabulary, sparsestep.nn.hash_strings
    full, other = vocabulary(3), vocabulary(9)
    full(ids(5, 6))
    other(ids(7, 8, 9))
    saved = full.state_dict()

    def load(name: str, value: Tensor) -> Callable[[], object]:
        return lambda: vocabulary(3).load_state_dict({**saved, name: value})

    return {
        **{
            f"Vocabulary({name}={value!r})": lambda o={name: value}: vocabulary(**{"rows": 4, **o})
            for name, value in [("rows", 0), ("admit", True), ("shared", 9), ("evict", "fifo")]
        },
        "float ids": lambda: full(TWO),
        "ids in a list": lambda: full([1, 2]),
        "sparse ids": lambda: full(ids(1, 2).to_sparse()),
        "ids on meta": lambda: full(ids(1).to("meta")),
        "load into more rows": lambda: vocabulary(5).load_state_dict(saved),
        "load ids of floats": load("ids", saved["ids"].float()),
        "load an id twice": load("ids", saved["ids"] * 0),
        "load negative counts": load("counts", saved["counts"] - 9),
        "load wrong numbers": load("numbers", saved["numbers"] + 99),
        "merge of a dict": lambda: full.merge({}),
        "merge of too many": lambda: full.merge(other),
        "merge with other shared rows": lambda: full.merge(vocabulary(3, shared=2)),
        "attach of a small table": lambda: full.attach(nn.Embedding(2, 6)),
        "attach with padding": lambda: full.attach(nn.Embedding(4, 6, padding_idx=1)),
        "strings that are one": lambda: hashed("abc"),
        "strings that are a number": lambda: hashed(3),
        "strings with a number": lambda: hashed(["a", 3]),
        "strings without UTF-8": lambda: hashed(["\udc80"]),
    }


# Files


def files(folder: Path) -> Cases:
    good, other, plain = folder / "good", folder / "other", folder / "plain"
    weight = storage.mapped(good, (4, 6))
    storage.mapped(other, (4, 6), optimizer=sparsestep.Adam)
    plain.write_bytes(b"no table")

    def mapped(path: Path = folder / "new", shape: Any = (4, 6), *args: Any, **options: Any) -> Any:
        return lambda: storage.mapped(path, shape, *args, **options)

    def damaged(change: Callable[[bytes], bytes]) -> Callable[[], object]:
        def case() -> None:
            path = folder / "damaged"
            path.write_bytes(change(good.read_bytes()))
            storage.mapped(path, (4, 6))

        return case

    def header(**changed: Any) -> Callable[[], object]:
        def change(page: bytes) -> bytes:
            version, text, rest = page.split(b"\n", 2)
            return b"\n".join([version, json.dumps({**json.loads(text), **changed}).encode(), rest])

        return damaged(change)

    def version(digits: bytes) -> Callable[[], object]:
        return damaged(lambda page: page.replace(b"2\n", digits + b"\n", 1))

    return {
        "a dtype that is a word": mapped(dtype="float32"),
        "no shape": mapped(shape=()),
        "an empty shape": mapped(shape=(0, 6)),
        "integers to train": mapped(dtype=torch.int64, optimizer=sparsestep.SGD),
        "no optimizer": mapped(optimizer="SGD"),
        "torch's optimizer": mapped(optimizer=torch.optim.SGD),
        "a shape of very many dims": mapped(shape=[1] * 2000),
        "another shape": mapped(good, (4, 5)),
        "another optimizer": mapped(other, optimizer=sparsestep.RowwiseAdagrad),
        "another file": mapped(plain),
        "a newer format": version(b"9"),
        "an older format": version(b"1"),
        "a format that is no number": version(b"x"),
        "a header of another dtype": header(dtype="float"),
        "a header with a negative size": header(shape=[4, -6]),
        "a header without a shape": header(shape=[]),
        "a header with a shape that is none": header(shape="4 x 6"),
        "a header of a huge shape": header(shape=[2**40, 2**40]),
        "a header with another key": header(length=4),
        "a shorter file": damaged(lambda page: page[:-1]),
        "a header with a blank": damaged(lambda page: page.replace(b"{", b" {", 1)),
        "a header with a key twice": damaged(lambda page: page.replace(b"{", b'{"shape": 1, ', 1)),
        "grow": lambda: sparsestep.nn.grow(nn.Embedding(4, 6, _weight=weight), 5),
        "prefetch of no table": lambda: storage.prefetch("table", ids(1)),
        "prefetch of a number": lambda: storage.prefetch(torch.tensor(1.0), ids(1)),
        "prefetch of float rows": lambda: storage.prefetch(weight, TWO),
        "prefetch of rows outside": lambda: storage.prefetch(weight, ids(4)),
        "prefetching nothing ahead": lambda: storage.prefetching([], {}, ahead=0),
        "len of a generator": lambda: len(storage.prefetching(iter(()), {weight: len})),
    }


def after(saved: Path, pattern: str, change: Callable[[Path], object], load: Any) -> Any:
    """Load a copy of a checkpoint, one file of which was changed."""

    def case() -> None:
        copied = saved.with_name("copy")
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(saved, copied)
        change(next(copied.glob(pattern)))
        load(copied)

    return case


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    target = path.rename(path.with_name("target"))
    path.symlink_to(target)


def checkpoints(folder: Path) -> Cases:
    saved = folder / "saved"
    model = nn.Embedding(4, 6, _weight=storage.mapped(folder / "table", (4, 6)))
    model.register_buffer("mean", torch.zeros(2))
    opt = stepped(sparsestep.SGD(model.parameters(), momentum=0.9))
    storage.save(saved, model, opt)
    storage.save(saved, model, stepped(opt))
    save, load = storage.save, storage.load

    def damaged(pattern: str, change: Callable[[Path], object]) -> Callable[[], object]:
        return after(saved, pattern, change, lambda path: load(path, model, opt))

    def manifest(*path: Any) -> Callable[[], object]:
        """The last of ``path`` is at the rest of it."""

        def change(file: Path) -> None:
            found = at = json.loads(file.read_text())
            for key in path[:-2]:
                at = at[key]
            at[path[-2]] = path[-1]
            file.write_text(json.dumps(found))

        return damaged("manifest.json", change)

    def changed_buffer() -> None:
        model.mean = torch.zeros(3)
        try:
            load(saved, model, opt)
        finally:
            model.mean = torch.zeros(2)

    return {
        "save of no model": lambda: save(saved, "model", opt),
        "save with torch's optimizer": lambda: save(saved, model, torch.optim.SGD([table()])),
        "save of an extra object": lambda: save(saved, model, opt, extra=object()),
        "no checkpoint": lambda: load(folder, model, opt),
        "another table": lambda: load(saved, nn.Embedding(4, 6), made(sparsestep.SGD)),
        "another buffer": changed_buffer,
        "a manifest without version": manifest("version", None),
        "a newer manifest": manifest("version", 99),
        "a manifest with another id": manifest("id", "x"),
        "a manifest with another key": manifest("note", 1),
        "a manifest with another number": manifest("number", 77),
        "a manifest with tables that are none": manifest("tables", 3),
        "a manifest with a path outside": manifest("rest", "file", "rest-../x"),
        "a manifest with a file twice": manifest("tables", 1, "base", "file", "base-000001.0"),
        "a manifest with a table without rows": manifest("tables", 0, "layout", "shape", []),
        "a manifest with a name that is none": manifest("tables", 0, "layout", "name", ""),
        "a manifest with longer rows": manifest("tables", 0, "layout", "row_bytes", 25),
        "a manifest with other state": manifest("tables", 0, "layout", "inside", {"a": "b"}),
        "a manifest with a shorter base": manifest("tables", 0, "base", "bytes", 1),
        "a manifest with a shorter journal": manifest("journals", 0, "file", "bytes", 1),
        "a manifest that is a list": damaged("manifest.json", lambda path: path.write_text("[]")),
        "a manifest of other bytes": damaged("manifest.json", lambda p: p.write_bytes(b"\xff")),
        "a flipped byte in a base": damaged("base-*", flip),
        "a flipped byte in a journal": damaged("rows-*", flip),
        "a flipped byte in the rest": damaged("rest-*", flip),
        "a missing file": damaged("base-*", Path.unlink),
        "a shorter file": damaged("rows-*", cut),
        "a link": damaged("rest-*", link),
    }


# Ranks, of which there is one


def tables(**options: Any) -> nn.Module:
    return nn.Sequential(sparsestep.nn.EmbeddingBag(8, 4, **options), nn.Linear(4, 1))


def sharded(**options: Any) -> Any:
    model = tables()
    distributed.shard(model, **options)
    return model


def sharding(folder: Path) -> Cases:
    def shard(model: Any = None, **options: Any) -> Callable[[], object]:
        return lambda: distributed.shard(tables() if model is None else model, **options)

    def plan(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: distributed.Plan(*args, **options)

    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    mapped = nn.Embedding(4, 6, _weight=storage.mapped(folder / "sharded", (4, 6)))
    return {
        "no model": shard("model"),
        "no tables": shard(nn.Linear(1, 1)),
        "a sharded table": lambda: distributed.shard(sharded()),
        "a mesh that is none": shard(mesh="mesh"),
        "an order": shard(order="slow"),
        "a plan that is a word": shard(plan="row"),
        "a plan that is a number": shard(plan=3),
        "a plan of another table": shard(plan={"x": "rows"}),
        "a plan of another kind": shard(plan={"0": "columns"}),
        "a reduction": shard(reduce="max"),
        "a reduction of another table": shard(reduce={"x": "sum"}),
        "rows of maxima": shard(tables(mode="max"), plan="rows"),
        "a weight that others use": shard(tied),
        "a table in a file": shard(mapped),
        "a copy": lambda: copy.deepcopy(sharded()),
        "a Plan of words": plan(["rows"], 2),
        "a Plan for no ranks": plan([], 0),
        "a Plan for lengths that are none": plan([], 2, lengths="long"),
        "a placement without a name": lambda: ByRow(3, 4, 6, 4),
        "a placement without rows": lambda: ByRow("a", -1, 6, 4),
        "lockstep without a loader": lambda: distributed.lockstep(3),
        "lockstep with prefetch=2": lambda: distributed.lockstep([], prefetch=2),
        **{f"vocabulary: {name}": case for name, case in shared_vocabularies().items()},
        **{f"checkpoint: {name}": case for name, case in shared_checkpoints(folder).items()},
    }


def shared_vocabularies() -> Cases:
    rows, others = sharded(plan="rows")[0], sharded(plan="rows")[0]
    padded = tables(padding_idx=1)
    distributed.shard(padded, plan="rows")
    vocabulary = distributed.Vocabulary
    known = vocabulary(rows)
    return {
        "no table": lambda: vocabulary("table"),
        "a whole table": lambda: vocabulary(nn.Embedding(4, 6)),
        "too many shared rows": lambda: vocabulary(others, shared=9),
        "padding": lambda: vocabulary(padded[0]),
        "a table of another model": lambda: known.attach(others),
        "grow to fewer rows": lambda: known.grow(3),
        "merge of a dict": lambda: known.merge({}),
        "a copy": lambda: copy.deepcopy(known),
    }


def shared_checkpoints(folder: Path) -> Cases:
    saved, model = folder / "ranks", sharded()
    opt = sparsestep.SGD(model.parameters())
    distributed.save(saved, model, opt)
    save, load = distributed.save, distributed.load
    larger = nn.Sequential(sparsestep.nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    deeper = nn.Sequential(*tables(), nn.Linear(1, 1))

    def into(other: nn.Module, groups: int = 1) -> Callable[[], object]:
        params = list(other.parameters())
        each = [{"params": params[n::groups]} for n in range(groups)]
        return lambda: load(saved, other, sparsestep.SGD(each))

    def damaged(pattern: str, change: Callable[[Path], object]) -> Callable[[], object]:
        return after(saved, pattern, change, lambda path: load(path, model, opt))

    return {
        "save to no path": lambda: save(3, model, opt),
        "save to a null path": lambda: save("a\0b", model, opt),
        "save of no model": lambda: save(saved, "model", opt),
        "load of none": lambda: load(folder, model, opt),
        "load into another optimizer": lambda: load(saved, model, made()),
        "load into a larger table": into(larger),
        "load into a deeper model": into(deeper),
        "load into other groups": into(tables(), groups=2),
        "load without a file": damaged("*.distcp", Path.unlink),
        "load of a flipped byte": damaged("*.distcp", flip),
        "load of another manifest": damaged("sparsestep.json", lambda p: p.write_text("{}")),
    }


AREAS = [
    options,
    rules,
    gradients,
    steps,
    functions,
    loading,
    clipping,
    lookups,
    vocabularies,
    files,
    checkpoints,
    sharding,
]

if __name__ == "__main__":
    FILE.write_text(written(collect()))
