"""Lookups, growth, resets and loading that fail: nothing has changed. Ctrl-C is in tests/faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparsestep
from sparsestep.errors import InputError
from sparsestep.nn import Vocabulary, grow

pytestmark = pytest.mark.usefixtures("needs_extension")


class Scene:
    """A full vocabulary and its table, after some steps."""

    def __init__(self, semantics: str = "masked", engine: str = "auto", **options: Any) -> None:
        torch.manual_seed(1)
        self.vocabulary = Vocabulary(6, **{"evict": "lru", **options})
        self.table = sparsestep.nn.Embedding(6, 3)
        self.optimizer = sparsestep.Adam(
            self.table.parameters(), lr=0.1, semantics=semantics, engine=engine
        )
        if semantics == "dense":
            self.optimizer.track(self.table)
        self.vocabulary.attach(self.table, self.optimizer)
        for ids in ([1, 2, 3, 1], [3, 4, 5, 5, 2], [1, 3, 6], [2, 3]):
            self.step(*ids)
        self.optimizer.zero_grad()

    def step(self, *ids: int) -> None:
        self.optimizer.zero_grad()
        self.table(self.vocabulary(torch.tensor(ids))).square().sum().backward()
        self.optimizer.step()

    def contents(self) -> list[Any]:
        """Everything that an operation may change, with deferred rows caught up."""
        found: list[Any] = [torch.get_rng_state(), self.table.num_embeddings, self.vocabulary.rows]
        found += [self.vocabulary.taken_over, self.vocabulary.as_dict()]
        found += [tensor.clone() for tensor in self.vocabulary.state_dict().values()]
        self.optimizer.catch_up()
        found.append(self.table.weight.detach().clone())
        record = self.optimizer.state[self.table.weight]
        found += [record[name].clone() for name in sorted(record)]
        clock = self.optimizer.deferred.get(id(self.table.weight))
        if clock is not None:
            found += [clock.num_rows, clock.never_updated.clone(), clock.last_step.clone()]
        return found


def same(left: list[Any], right: list[Any]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)

    return len(left) == len(right) and all(map(equal, left, right))


IDS = torch.tensor([7, 3, 8, 7, 9])


def known(*ids: int, **options: Any) -> Vocabulary:
    vocabulary = Vocabulary(6, **options)
    vocabulary(torch.tensor(ids))
    return vocabulary


def look_up(scene: Scene) -> Callable[[], object]:
    return partial(scene.vocabulary, IDS)


def forget(scene: Scene) -> Callable[[], object]:
    return partial(scene.optimizer.forget, scene.table.weight, torch.tensor([1, 4, 1]))


# Each prepares an operation, and returns it.
OPERATIONS: dict[str, tuple[Callable[[Scene], Callable[[], object]], dict[str, Any]]] = {
    "lru": (look_up, {}),
    "lfu": (look_up, {"evict": "lfu"}),
    "admit": (look_up, {"admit": 2}),
    "dense": (look_up, {"semantics": "dense"}),
    "reference": (look_up, {"semantics": "dense", "engine": "reference"}),
    "forget": (forget, {"semantics": "dense"}),
    "grow": (lambda scene: partial(scene.vocabulary.grow, 9), {"semantics": "dense"}),
    "grow-table": (lambda scene: partial(grow, scene.table, 9, scene.optimizer), {}),
    "load": (
        lambda scene: partial(
            scene.vocabulary.load_state_dict, known(11, 12, 11, evict="lru").state_dict()
        ),
        {},
    ),
    "merge": (lambda scene: partial(scene.vocabulary.merge, known(3, 1, 3)), {}),
}


class FailingAllocation(TorchDispatchMode):
    """The n-th operation of torch runs out of memory."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth, self.count = nth, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.nth:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"reference"}))
def test_running_out_of_memory_is_a_memory_error_and_leaves_nothing(name: str):
    """But for the reference engine's own commit, which is made of torch's operations."""
    prepare, options = OPERATIONS[name]
    before, failures = Scene(**options).contents(), 0
    for nth in range(1, 1000):
        scene = Scene(**options)
        operation = prepare(scene)
        try:
            with FailingAllocation(nth):
                operation()
        except MemoryError:
            failures += 1
            assert same(scene.contents(), before), f"torn by operation {nth}"
            continue
        break
    assert failures >= 2


def test_what_init_raises_leaves_nothing():
    scene = Scene()
    before, working = scene.contents(), scene.vocabulary.attached[0].init

    def init(rows: Tensor) -> None:
        torch.nn.init.normal_(rows)
        raise ZeroDivisionError

    scene.vocabulary.attached[0].init = init
    with pytest.raises(ZeroDivisionError):
        look_up(scene)()
    assert same(scene.contents(), before)
    scene.vocabulary.attached[0].init = working
    look_up(scene)()
    done = Scene()
    look_up(done)()
    assert same(scene.contents(), done.contents())


def test_an_init_that_uses_the_vocabulary_is_refused():
    scene = Scene()
    scene.vocabulary.attached[0].init = lambda rows: scene.vocabulary(torch.tensor([3]))
    known, weight = scene.vocabulary.as_dict(), scene.table.weight.detach().clone()
    with pytest.raises(InputError, match="init must not use the vocabulary"):
        look_up(scene)()
    assert scene.vocabulary.as_dict() == known
    assert torch.equal(scene.table.weight, weight)


def test_a_lookup_that_other_ranks_refuse_leaves_nothing():
    scene = Scene()
    before = scene.contents()

    def agree(error: Exception | None) -> None:
        assert error is None
        raise InputError("another rank refuses")

    with pytest.raises(InputError, match="another rank"):
        scene.vocabulary.assign_rows(torch.tensor([7, 8]), agree)
    assert same(scene.contents(), before)
