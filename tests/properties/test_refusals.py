"""Invalid input is refused with one sentence, through every entry point, and nothing changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.fuzz.findings import check_refusal
from tests.generate.cases import each_case
from tests.generate.garbage import VALUES, Handed, Wrapper, any_garbage, bad_state, broken, ids
from tests.generate.grads import any_grad
from tests.generate.params import any_param
from tests.generate.source import DrawnSource
from tests.properties.marks import QUIET
from tests.subject import Subject, by_hand, by_hand_class, refused
from tests.table import (
    FEW,
    FUNCTIONS,
    PLAIN,
    STATEFUL,
    WITH_DENSE,
    Variant,
    on_each_engine,
    randn,
    running_on,
    same_bits,
)

pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of experimental tensors
]
SHAPE = (4, 6)


@cache
def all_broken() -> dict[str, Any]:
    return broken(torch.zeros(SHAPE))


def coo(rows: list[int], shape: tuple[int, ...] = SHAPE) -> Tensor:
    values = randn((len(rows), *shape[1:]), len(rows))
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape)


# Entry points: an optimizer, and how the gradient of its last parameter reaches it.

Way = tuple[Any, Callable[[Any], Any]]


def steps(variant: Variant, engine: str, *, later: int = 0, **options: Any) -> Way:
    params: list[Any] = [Handed(randn(SHAPE), requires_grad=False) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    opt = variant(groups, engine=engine, **options)
    for _ in range(later):
        for param in params:
            param.grad = coo([1, 1, 3])
        opt.step()

    def step(grad: Any) -> None:
        for param in params[:-1]:
            param.grad = coo([2, 0])
        params[-1].grad = grad
        opt.step()

    return opt, step


def masked(variant: Variant, engine: str) -> Way:
    opt, step = steps(variant, engine, later=1)
    for group in opt.param_groups:
        group["mask"] = [torch.tensor([True, False, True, True]) for _ in group["params"]]
    return opt, step


def deferred(variant: Variant, engine: str) -> Way:
    return steps(variant, engine, later=2, semantics="dense")


def functional_step(variant: Variant, engine: str) -> Way:
    subject = by_hand(variant, engine, randn(SHAPE))
    return subject.front, lambda grad: subject.front.step([grad])


def step_param(variant: Variant, engine: str) -> Way:
    """Of a parameter that the optimizer has not seen before."""
    front = by_hand(variant, engine, randn(SHAPE)).front
    return front, lambda grad: front.step_param(randn(SHAPE), grad)


ENTRIES: dict[str, Callable[[Variant, str], Way]] = {
    "first step": steps,
    "replayed step": lambda variant, engine: steps(variant, engine, later=3),
    "masked step": masked,
    "dense semantics": deferred,
    "functional step": functional_step,
    "step_param": step_param,
}
each_entry = pytest.mark.parametrize("entry", ENTRIES)


@each_entry
@on_each_engine(FEW)
def test_broken_gradients(variant: Variant, engine: str, entry: str):
    """Gradients of all sorts in the last parameter, one after the other; then a valid one."""
    if entry == "dense semantics" and variant.cls not in WITH_DENSE:
        return
    with running_on(engine) as name:
        opt, give = ENTRIES[entry](variant, name)
        for kind, grad in all_broken().items():
            with refused(opt, note=kind):
                give(grad)
        give(coo([1, 3]))


def released(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(4)
    return tensor


def inference_tensor(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def bad_tensors(good: Tensor) -> dict[str, Any]:
    """What a function may not write."""
    return {
        **bad_state(good),
        "None": None,
        "without memory": released(good.clone()),
        "inference tensor": inference_tensor(good),
        "negative view": torch._neg_view(good.clone()),
    }


@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("engine", ["reference", "native"])
def test_functions(cls: type[RuleOptimizer], engine: str):
    """The message begins with the function. A call like two before is run by the core itself."""
    function = FUNCTIONS[cls]
    takes = inspect.signature(function).parameters
    variant = Variant(cls, {"momentum": 0.9} if cls is sparsestep.SGD else {})
    options = {**variant.options, "engine": engine, "step": 1}
    options = {name: value for name, value in options.items() if name in takes}
    tensors = {"param": randn(SHAPE), **fresh_state(variant, randn(SHAPE))}
    given = {**tensors, "grad": coo([1]), **options}

    def assert_refused(note: str, **wrong: Any) -> None:
        if engine == "native":
            function(**given)
            function(**given)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with pytest.raises(InputError) as raised:
            function(**{**given, **wrong})
        text = str(raised.value)
        assert text.startswith(f"{function.__name__}: "), (note, text)
        assert "\n" not in text, note
        assert all(same_bits(tensors[name], old) for name, old in before.items()), note

    for kind, grad in all_broken().items():
        assert_refused(kind, grad=grad)
    mask = torch.tensor([True, False, True, True])
    assert_refused("index under a mask", grad=coo([1, 4]), mask=mask)
    assert_refused("no gradient", grad=None)
    for name in (list(tensors)[-1], "param"):
        for kind, bad in bad_tensors(tensors[name]).items():
            assert_refused(f"{name}: {kind}", **{name: bad})
    for kind, wrong in BAD_OPTIONS.items():
        if wrong.keys() <= takes.keys():
            assert_refused(kind, **wrong)


def fresh_state(variant: Variant, param: Tensor) -> dict[str, Tensor]:
    opt = variant([param.clone()])
    opt.materialize_state()
    for record in opt.state.values():
        return {spec.name: record[spec.name] for spec in variant.rule.state}
    wide = torch.promote_types(param.dtype, torch.float32)
    return {spec.name: torch.zeros_like(param, dtype=wide) for spec in variant.rule.state}  # SGD's


ROWS = torch.ones(4, dtype=torch.bool)
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "step 0": {"step": 0},
    "step -1": {"step": torch.tensor(-1.0)},
    "step 1.5": {"step": 1.5},
    "step nan": {"step": torch.tensor(float("nan"))},
    "step 2**63": {"step": 1 << 63},
    "two steps": {"step": torch.tensor([1, 2])},
    "mask of numbers": {"mask": ROWS.float()},
    "mask of another length": {"mask": ROWS[1:]},
    "list of masks": {"mask": [ROWS]},
    "seed": {"seed": torch.ones(2)},
}


# Parameters and state


def replace(param: Any, data: Tensor, grad: Tensor) -> None:
    param.grad = None
    param.data = data
    param.grad = grad


SPOILED: dict[str, Callable[[Any], None]] = {
    "resized after backward": lambda p: setattr(p, "data", torch.zeros(3, 6)),
    "of another shape than its state": lambda p: replace(p, torch.zeros(3, 6), coo([1], (3, 6))),
    "integers": lambda p: replace(p, torch.zeros(SHAPE).long(), torch.ones(SHAPE).long()),
    "elements that share memory": lambda p: replace(p, torch.zeros(1, 6).expand(SHAPE), coo([1])),
}


@on_each_engine([variant for variant in FEW if variant.cls is not sparsestep.SGD])
def test_a_parameter_that_does_not_fit_any_more(variant: Variant, engine: str):
    for kind, spoil in SPOILED.items():
        with running_on(engine) as name:
            opt, _ = steps(variant, name, later=2)
            last = opt.param_groups[1]["params"][-1]
            last.grad = coo([1, 3])
            spoil(last)
            with refused(opt, note=kind):
                opt.step()


# SGD takes a missing buffer for a first step, as torch does.
@on_each_engine([variant for variant in STATEFUL if variant.cls is not sparsestep.SGD])
def test_state_that_does_not_fit_any_more(variant: Variant, engine: str):
    with running_on(engine) as name:
        opt, give = steps(variant, name, later=2)
        record = opt.state[opt.param_groups[1]["params"][-1]]
        for key in [spec.name for spec in variant.rule.state]:
            good = record[key]
            for kind, bad in bad_state(good).items():
                record[key] = bad
                with refused(opt, note=f"{key}: {kind}"):
                    give(coo([1]))
            record[key] = good
        del record[key]
        with refused(opt):
            give(coo([1]))
        record[key] = good
        give(coo([1]))


def bad_masks() -> dict[str, Any]:
    return {
        "too short": torch.ones(3, dtype=torch.bool),
        "too long": torch.ones(5, dtype=torch.bool),
        "of columns": torch.ones(6, dtype=torch.bool),
        "a column": torch.ones(4, 1, dtype=torch.bool),
        "a number": torch.tensor(True),
        "of floats": torch.ones(4),
        "of bytes": torch.ones(4, dtype=torch.uint8),
        "of indices": torch.arange(4),
        "elsewhere": torch.ones(4, dtype=torch.bool, device="meta"),
        "a list of too many": [ROWS, None],
        "an empty list": [],
        "a list of lists": [[True] * 4],
        "a dict": {"rows": ROWS},
    }


@on_each_engine(FEW)
def test_masks_that_do_not_fit(variant: Variant, engine: str):
    """When an optimizer is made, when a group is added, and later: options are the user's."""
    masks = bad_masks()
    param = torch.nn.Parameter(randn(SHAPE))
    with running_on(engine) as name:
        opt = variant([torch.zeros(2)], engine=name)
        for kind, mask in masks.items():
            with pytest.raises(InputError):
                variant([{"params": [torch.zeros(SHAPE)], "mask": mask}])
            with refused(opt, note=kind):
                opt.add_param_group({"params": [param], "mask": mask})
        opt.add_param_group({"params": [param], "mask": ROWS})  # the parameter is still free
        for grad in (torch.ones(SHAPE), coo([1, 3])):
            param.grad = grad
            opt.param_groups[1]["mask"] = ROWS
            opt.step()
            for kind, mask in masks.items():
                opt.param_groups[1]["mask"] = mask
                with refused(opt, note=kind):
                    opt.step()


# Any garbage


@st.composite
def garbage(draw: st.DrawFn) -> tuple[Tensor, Any, str, bool, Any]:
    chance = DrawnSource(draw)
    param, _ = any_param(chance, torch.float32)
    bad, text, must = any_garbage(chance, param)
    return param.detach(), bad, text, must, any_grad(chance, param, by_hand=True)


@pytest.mark.parametrize("variant", PLAIN, ids=str)
@each_case(case=garbage())
def test_any_garbage_is_refused_or_used(variant: Variant, case: tuple[Any, ...]):
    start, bad, text, must, good = case
    params = [start.clone(), start.clone()]
    subject = Subject(by_hand_class(variant.cls)(params, **variant.options, lr=0.1))
    subject.give_grads([good.grad, bad])
    if must:
        with refused(subject.front, note=text):
            subject.step()
        return
    try:
        subject.step()
    except InputError:
        assert same_bits(params[0], start)


# Any argument that makes no sense: it is refused, or used


def check_refused_or_used(
    call: Callable[[], Any], written: list[Tensor], note: str, torchs: type | None = None
) -> None:
    """``torchs`` is the error that torch's own function raises: then its words are right, too."""
    before = [tensor.detach().clone() for tensor in written]
    try:
        call()
    except Exception as error:
        if type(error) is not torchs:
            check_refusal(error, note)
        assert all(map(same_bits, written, before)), note


def error_of(call: Callable[[], Any]) -> type[BaseException] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
def test_arguments_of_functions(cls: type[RuleOptimizer]):
    function, variant = FUNCTIONS[cls], Variant(cls, {})
    known: Any = function.__kwdefaults__
    for name, value in product(known, VALUES):
        tensors = {"param": randn(SHAPE), **fresh_state(variant, randn(SHAPE))}
        given = {**known, **tensors, "grad": coo([1]), "step": 1, name: value}
        note = f"{function.__name__}: {name} = {value!r}"
        check_refused_or_used(partial(function, **given), list(tensors.values()), note)


THINGS: list[Any] = [
    *(None, "x", 3, [1, 2], {}, torch.zeros(2), torch.zeros(2, 2, 2, dtype=torch.int64)),
    *(torch.zeros(2, dtype=torch.int64, device="meta"), ids(5, 0, 2), ids(-1), ids(2**40)),
    *(torch.eye(2, dtype=torch.int64).to_sparse_coo(), torch.tensor(2.5), ids(), ids(1) > 0),
]


@pytest.mark.parametrize("last", [False, True])
def test_arguments_of_lookups(last: bool):
    bag = sparsestep.nn.EmbeddingBag(7, 3, mode="sum", include_last_offset=last)
    rows, offsets = ids(1, 2, 6), ids(0, 1, 3)[: 2 + last]
    for table, given in (
        (bag, {"input": rows, "offsets": offsets, "per_sample_weights": torch.ones(3)}),
        (sparsestep.nn.Embedding(7, 3), {"input": rows}),
    ):
        for name, value in product(given, THINGS):
            call = partial(table, **{**given, name: value})
            check_refused_or_used(call, [table.weight], f"{name} = {value!r}")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("clip_grad_norm_", ["max_norm", "norm_type"]), ("clip_grad_value_", ["clip_value"])],
)
def test_arguments_of_clipping(name: str, numbers: list[str]):
    no_params: list[Any] = [None, 3, "x", {}, [None], [3], iter(())]
    wrong = [*product(["parameters"], no_params), *product(numbers, [*VALUES, torch.tensor(1.0)])]
    for key, value in wrong:
        dense, sparse = (torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))
        dense.grad, sparse.grad = torch.ones(SHAPE), coo([1, 1])
        given = {"parameters": [dense], numbers[0]: 0.5, key: value}
        torchs = error_of(partial(getattr(torch.nn.utils, name), **given))
        given = {"parameters": [dense, sparse], numbers[0]: 0.5, key: value}
        call, values = partial(getattr(sparsestep, name), **given), [sparse.grad._values()]
        check_refused_or_used(call, values, f"{key} = {value!r}", torchs)


def wrong_params() -> dict[str, Any]:
    leaf = torch.nn.Parameter(torch.ones(2, 2))
    return {
        "None": None,
        "a number": 3,
        "a string": "x",
        "nothing": [],
        "an empty dict": {},
        "[None]": [None],
        "a list in a list": [[leaf]],
        "a tensor": leaf,
        "a dict": {"params": leaf},
        "a set": {leaf},
        "an empty group": [{}],
        "a group without params": [{"lr": 1}],
        "a group of None": [{"params": None}],
        "no leaf": [leaf * 2],
        "a sparse one": [leaf.detach().to_sparse_coo()],
        "integers": [torch.zeros(2, dtype=torch.int64)],
        "bools": [torch.zeros(2, dtype=torch.bool)],
        "meta": [torch.zeros(2, device="meta")],
        "a wrapper": [Wrapper(torch.zeros(2, 2))],
        "expanded": [torch.zeros(()).expand(3)],
        "twice in two groups": [{"params": [leaf]}, {"params": [leaf]}],
        "some with names": [("a", leaf), leaf],
        "one name twice": [("a", leaf), ("a", torch.zeros(2))],
    }


@pytest.mark.parametrize("variant", PLAIN, ids=str)
def test_arguments_of_constructors(variant: Variant):
    for make in (variant.cls, by_hand_class(variant.cls)):
        for kind, params in wrong_params().items():
            check_refused_or_used(partial(make, params), [], f"params = {kind}")
        names = inspect.signature(variant.cls).parameters.keys() - {"params"}
        for name, value in product([*sorted(names), "unknown_keyword"], VALUES):
            call = partial(make, [torch.zeros(2)], **{name: value})
            check_refused_or_used(call, [], f"{name} = {value!r}")


# Others


def test_bad_input_is_both_a_value_error_and_a_runtime_error():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, RuntimeError)


def test_a_closure_that_raises():
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    opt = sparsestep.Adam([param])

    def closure() -> float:
        param.grad = torch.ones(SHAPE)
        raise ArithmeticError("the loss could not be computed")

    with refused(opt, error=ArithmeticError):
        opt.step(closure)


def test_every_dtype_is_used_or_refused():
    dtypes = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    reals = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    rows, starts = torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1])
    makers: list[Callable[[torch.dtype], Any]] = [
        lambda d: torch.zeros(SHAPE, dtype=d),
        lambda d: torch.sparse_coo_tensor(rows[None], torch.zeros(1, 6, dtype=d), SHAPE),
        lambda d: torch.sparse_csr_tensor(starts, rows, torch.zeros(1, dtype=d), SHAPE),
        lambda d: sparsestep.IndexedGrad(rows, torch.zeros(1, 6, dtype=d)),
        lambda d: sparsestep.IndexedGrad(None, torch.zeros(SHAPE, dtype=d)),
    ]
    for own in (torch.float32, torch.complex64):
        opt = sparsestep.FunctionalAdam([torch.zeros(SHAPE, dtype=own)])
        for dtype in dtypes:
            for make in makers:
                try:
                    grad = make(dtype)
                except (RuntimeError, NotImplementedError):
                    continue  # torch has no such tensor
                if dtype in reals if own is torch.float32 else dtype is own:
                    opt.step([grad])
                else:
                    with refused(opt, note=str(dtype)):
                        opt.step([grad])
