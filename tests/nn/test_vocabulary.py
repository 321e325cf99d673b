"""``sparsestep.nn.Vocabulary``: ids get rows and lose them, and reassigned rows start over."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep._native import ext
from sparsestep.errors import InputError
from sparsestep.nn import Vocabulary
from sparsestep.nn.vocabulary import PreparedLookup
from tests.faults.snapshot import Snapshot, of_optimizer, snapshot
from tests.nn.cases import copies, splitmix64
from tests.table import FEW, Variant, same_bits

np: Any = pytest.importorskip("numpy")

pytestmark = pytest.mark.skipif(ext is None, reason="the extension is not installed")


DECAYING = Variant(sparsestep.AdamW, {"weight_decay": 0.1})


def batch(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


class Loop:
    """A table whose rows a vocabulary gives, and its optimizer."""

    def __init__(
        self, rows: int, variant: Any = None, semantics: str = "masked", **options: Any
    ) -> None:
        self.vocabulary = Vocabulary(rows, **options)
        self.table = sparsestep.nn.Embedding(rows, 3)
        torch.nn.init.constant_(self.table.weight, 0.5)
        variant = variant or Variant(sparsestep.Adam, {})
        self.optimizer = variant(self.table.parameters(), semantics=semantics)
        if semantics == "dense":
            self.optimizer.track(self.table)
        self.vocabulary.attach(self.table, self.optimizer, init=torch.nn.init.ones_)

    def forward(self, *numbers: int) -> Tensor:
        rows = self.vocabulary(batch(*numbers))
        self.table(rows).square().sum().backward()
        return rows

    def step(self, *numbers: int) -> list[int]:
        self.optimizer.zero_grad()
        rows = self.forward(*numbers)
        self.optimizer.step()
        return rows.tolist()


def test_ids_of_any_value_shape_and_dtype_have_rows():
    vocabulary = Vocabulary(10)
    rows = vocabulary(torch.tensor([[2**63 - 1, -(2**63)], [0, 2**63 - 1]]))
    assert rows.tolist() == [[1, 2], [3, 1]]
    assert rows.dtype == torch.int64
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert vocabulary(torch.tensor(0, dtype=dtype)).tolist() == 3
    assert vocabulary(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert vocabulary(torch.arange(12).reshape(3, 4).T[::2]).shape == (2, 3)


def test_ids_without_a_row_share_the_first_ones():
    vocabulary = Vocabulary(9, shared=3, admit=2)
    assert vocabulary(batch(7, 8, 7)).tolist() == [3, splitmix64(8) % 3, 3]
    ids = torch.tensor([2**63 - 1, -(2**63), -1, *range(50, 99)])
    rows = vocabulary.eval()(ids)
    assert rows.tolist() == [splitmix64(each) % 3 for each in ids.tolist()]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_at_once_are_the_same_for_any_number_of_threads(threads: int):
    """``native/tests/test_vocabulary.cpp`` compares random calls with a model."""
    torch.set_num_threads(threads)
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(3)) * 2**40
    vocabulary = Vocabulary(40_000, evict="lru")
    expected = [*range(1, 40_000), *(10_001 * [0])]
    assert vocabulary(ids).tolist() == expected
    assert vocabulary.eval()(ids).tolist() == expected
    vocabulary.train()(ids[:30_000].repeat(2))
    assert vocabulary.state_dict()["counts"].unique().tolist() == [0, 1, 3]
    vocabulary(ids[39_999:])  # those that were seen longest ago give up their rows
    assert vocabulary.taken_over[:9_999].tolist() == [*range(30_001, 40_000)]


def test_ids_are_admitted_when_they_have_been_seen_often_enough():
    """In evaluation nothing is counted."""
    vocabulary = Vocabulary(10, admit=3)
    assert vocabulary(batch(5, 6, 5)).tolist() == [0, 0, 0]
    vocabulary.eval()
    for _ in range(3):
        assert vocabulary(batch(6, 7)).tolist() == [0, 0]
    vocabulary.train()
    assert vocabulary(batch(6, 5)).tolist() == [0, 1]
    assert vocabulary(batch(8, 8, 6, 8)).tolist() == [2, 2, 3, 2]  # all of a call are the same


@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("variant", [*FEW, DECAYING], ids=str)
def test_a_reassigned_row_starts_over(variant: Variant, semantics: str):
    """Table and state are those of a row that was never used; it decays from now on."""
    if semantics == "dense" and variant.rule.idle_update is None:
        return
    loop, new = (Loop(4, variant, semantics, evict="lru") for _ in range(2))
    for numbers in ([1, 2, 3], [1, 2], [1, 3], [1]):
        loop.step(*numbers)
        new.step(1)
    assert loop.step(4) == [2]
    new.optimizer.catch_up()
    with torch.no_grad():
        new.table.weight[2] = 1.0
    new.optimizer.forget(new.table.weight, batch(2))
    assert new.step(4) == [2]
    for optimizer in (loop.optimizer, new.optimizer):
        optimizer.catch_up()
    assert same_bits(loop.table.weight[2].detach(), new.table.weight[2].detach())
    state = loop.optimizer.state[loop.table.weight]
    for name, tensor in new.optimizer.state[new.table.weight].items():
        if name != "step":
            assert same_bits(state[name][2], tensor[2]), name


def test_rows_with_a_gradient_that_is_still_to_be_used_stay():
    """Gradients of several calls reach the ids that they are for."""
    loop = Loop(4, evict="lru")
    loop.step(1, 2, 3)
    loop.optimizer.zero_grad()
    assert loop.forward(1).tolist() == [1]
    assert loop.forward(7).tolist() == [2]  # 2 was seen before the step
    assert loop.forward(8).tolist() == [3]
    assert loop.forward(9).tolist() == [0]  # 1, 7 and 8 were seen since
    loop.optimizer.step()
    assert loop.forward(9).tolist() == [1]


def test_a_step_in_backward_is_a_step_as_well():
    loop = Loop(3, evict="lru")
    loop.optimizer.step_in_backward()
    assert [loop.forward(i).tolist() for i in range(5)] == [[1], [2], [1], [2], [1]]


def test_new_values_do_not_depend_on_other_random_numbers_nor_change_them():
    def run(before: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(before)
        vocabulary, table = Vocabulary(3, evict="lru"), torch.nn.Embedding(3, 4)
        vocabulary.attach(table, sparsestep.SGD(table.parameters(), lr=0.1))
        following = copy.deepcopy(torch.get_rng_state())
        for i in range(4):
            vocabulary(batch(i))
            vocabulary.attached[0].optimizers[0].step()
        assert torch.equal(torch.get_rng_state(), following)
        return table.weight.detach()[1:].clone(), torch.rand(2)

    assert same_bits(run(1)[0], run(2)[0])


def test_several_threads_give_each_id_one_row():
    vocabulary, found = Vocabulary(2000), []

    def work(seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for _ in range(20):
            numbers = torch.randint(0, 1000, (50,), generator=chance)
            found.append((numbers, vocabulary(numbers)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = vocabulary.as_dict()
    assert len(set(known.values())) == len(known)
    for numbers, rows in found:
        assert rows.tolist() == [known[each] for each in numbers.tolist()]


# Checkpoints, copies, merging, exporting, refusals


@pytest.mark.parametrize("evict", [None, "lru", "lfu"])
def test_a_vocabulary_goes_on_from_a_checkpoint(evict: Any):
    generator = torch.Generator().manual_seed(5)
    calls = [torch.randint(0, 40, (11,), generator=generator) for _ in range(60)]
    vocabulary, loaded = (Vocabulary(16, admit=2, evict=evict) for _ in range(2))
    for each in calls[:30]:
        vocabulary(each)
    loaded.load_state_dict(vocabulary.state_dict())
    others = [loaded, *copies(vocabulary)]
    for each in calls[30:]:
        rows = vocabulary(each)
        assert all(torch.equal(other(each), rows) for other in others)
    assert all(other.as_dict() == vocabulary.as_dict() for other in others)


def test_a_checkpoint_is_refused_that_does_not_fit():
    vocabulary = Vocabulary(4, admit=2)
    vocabulary(batch(1, 1, 2, 3, 3))
    saved = vocabulary.state_dict()
    for other in (Vocabulary(5, admit=2), Vocabulary(4)):
        with pytest.raises(RuntimeError, match=r"must be torch\.int64 of shape"):
            other.load_state_dict(saved)
    broken = [
        {**saved, "numbers": torch.tensor([9, 0, 0, 0, 0])},
        {**saved, "ids": saved["ids"].index_fill(0, batch(1, 2), 7)},
        {**saved, "candidate_ids": saved["ids"][1:]},
        {**saved, "counts": saved["counts"] - 9},
        {**saved, "seen": saved["seen"].float()},
        {k: v for k, v in saved.items() if k != "ids"},
    ]
    for each in broken:
        with pytest.raises(RuntimeError):
            vocabulary.load_state_dict(each)
        assert vocabulary.as_dict() == {1: 1, 3: 2}
    vocabulary.load_state_dict(saved)


def test_a_model_with_a_vocabulary_is_saved_and_copied_with_it():
    model = torch.nn.ModuleDict({"ids": Vocabulary(4), "table": torch.nn.Embedding(4, 2)})
    model["ids"].attach(model["table"], sparsestep.Adam(model["table"].parameters()))
    model["ids"](batch(7, 8))
    assert [name for name, _ in model.named_parameters()] == ["table.weight"]
    copied = copy.deepcopy(model)
    assert copied["ids"].attached == []
    copied.load_state_dict(model.state_dict())
    assert copied["ids"](batch(9, 8)).tolist() == [3, 2]


def test_merge_and_export():
    first, second = Vocabulary(6, admit=2), Vocabulary(9)
    first(batch(1, 1, 2, 2, 3))
    second(batch(3, 2, 5))
    rows = first.merge(second)
    assert rows.tolist() == [0, 3, 2, 4]
    assert first.as_dict() == {1: 1, 2: 2, 3: 3, 5: 4}
    assert second.as_dict() == {3: 1, 2: 2, 5: 3}
    table = sparsestep.nn.Embedding(6, 2)
    plain, known = first.export(table)
    assert type(plain) is torch.nn.Embedding
    assert plain.weight.requires_grad
    assert known == first.as_dict()
    assert torch.equal(plain.weight, table.weight[:5])
    second(torch.arange(100, 106))
    before = first.state_dict()
    with pytest.raises(InputError):
        first.merge(second)
    assert all(torch.equal(v, before[k]) for k, v in first.state_dict().items())


# Lookups that fail: nothing has changed. Ctrl-C and failed allocations are in tests/faults


def scene() -> Loop:
    """A full vocabulary and its table, after some steps."""
    torch.manual_seed(1)
    loop = Loop(6, evict="lru")
    for ids in ([1, 2, 3, 1], [3, 4, 5, 5, 2], [1, 3, 6], [2, 3]):
        loop.step(*ids)
    loop.optimizer.zero_grad()
    return loop


def contents(loop: Loop) -> Snapshot:
    """Everything that a lookup may change."""
    vocabulary = loop.vocabulary
    found = {"saved": dict(vocabulary.state_dict()), "ids": vocabulary.as_dict()}
    found |= {"taken over": vocabulary.taken_over, "random": torch.get_rng_state()}
    return snapshot({**found, **of_optimizer(loop.optimizer)})


IDS = torch.tensor([7, 3, 8, 7, 9])


def look_up(loop: Loop) -> Callable[[], object]:
    return partial(loop.vocabulary, IDS)


def failing_init(loop: Loop) -> Callable[[], object]:
    def init(rows: Tensor) -> None:
        torch.nn.init.normal_(rows)
        raise ZeroDivisionError

    loop.vocabulary.attached[0].init = init
    return look_up(loop)


def wrong_state(loop: Loop) -> Callable[[], object]:
    record = loop.optimizer.state[loop.table.weight]
    record["exp_avg"] = record["exp_avg"][:2]
    return look_up(loop)


def another_rank(loop: Loop) -> Callable[[], object]:
    def look_up_and_undo() -> None:
        with loop.vocabulary.lock:
            found = PreparedLookup(loop.vocabulary, IDS, can_undo=True)
            found.write()
            assert contents(loop) != contents(scene())
            found.undo()
        raise InputError("another rank refuses")

    return look_up_and_undo


@pytest.mark.parametrize("fails", [failing_init, wrong_state, another_rank])
def test_a_lookup_that_raises_leaves_nothing(fails: Callable[[Loop], Callable[[], object]]):
    loop = scene()
    before, init = contents(loop), loop.vocabulary.attached[0].init
    state = dict(loop.optimizer.state[loop.table.weight])
    operation = fails(loop)
    with pytest.raises(ZeroDivisionError if fails is failing_init else InputError):
        operation()
    loop.vocabulary.attached[0].init = init
    loop.optimizer.state[loop.table.weight].update(state)
    assert contents(loop) == before
    look_up(loop)()
    done = scene()
    look_up(done)()
    assert contents(loop) == contents(done)


def test_an_init_that_uses_the_vocabulary_is_refused():
    """Its own lookup has happened; the one that it is part of has not."""
    loop = scene()
    loop.vocabulary.attached[0].init = lambda rows: loop.vocabulary(torch.tensor([3]))
    known, weight = loop.vocabulary.as_dict(), loop.table.weight.detach().clone()
    with pytest.raises(InputError, match="init must not use the vocabulary"):
        look_up(loop)()
    assert loop.vocabulary.as_dict() == known
    assert torch.equal(loop.table.weight, weight)


def test_rows_know_the_strings_of_their_ids():
    vocabulary = Vocabulary(4, evict="lru", keep_strings=True)
    rows = vocabulary(["red", "green", "red"])
    assert [vocabulary.strings[row] for row in rows.tolist()] == ["red", "green", "red"]
    vocabulary(np.array(["blue", "pink"]))  # red was seen as late as green, but first
    assert vocabulary.strings == [None, "pink", "green", "blue"]
    other = Vocabulary(4, evict="lru", keep_strings=True)
    other.load_state_dict(vocabulary.state_dict())
    assert other.strings == copy.deepcopy(vocabulary).strings == vocabulary.strings
    vocabulary(torch.tensor([7]))  # an id without a string takes over the row of green
    assert vocabulary.strings == [None, "pink", None, "blue"]
    assert vocabulary.eval()(["blue", "black"]).tolist() == [3, 0]
    other.grow(6)
    assert other.strings == [None, "pink", "green", "blue", None, None]
    more = Vocabulary(3, keep_strings=True)
    more(["blue", "white"])
    assert other.merge(more).tolist() == [0, 3, 4]
    assert other.strings == [None, "pink", "green", "blue", "white", None]
    with pytest.raises(InputError, match="a list of str"):
        other(["gray", 3])
    wrong = {**other.state_dict(), "strings": ["pink"]}
    with pytest.raises(RuntimeError, match="strings must be"):
        other.load_state_dict(wrong)
    assert other.strings == [None, "pink", "green", "blue", "white", None]


@pytest.mark.parametrize("in_collection", [False, True])
def test_a_signal_handler_may_use_the_vocabulary(in_collection: bool):
    """One that saves a checkpoint, say: the lookup that it interrupts is repeated."""
    vocabulary, saved, is_armed = Vocabulary(3, evict="lru"), [], []
    collection = sparsestep.nn.EmbeddingBagCollection(
        {"id": (3, 2)}, vocabularies={"id": vocabulary}
    )

    def init(values: Tensor) -> Tensor:
        if is_armed:
            is_armed.clear()
            signal.raise_signal(signal.SIGUSR1)
        return values.fill_(1.0)

    def look_up(*numbers: int) -> None:
        ids = batch(*numbers)
        collection({"id": ids[:, None]}) if in_collection else vocabulary(ids)

    vocabulary.attach(collection.tables["id"], init=init)
    was = signal.signal(signal.SIGUSR1, lambda *_: saved.append(vocabulary.state_dict()))
    try:
        look_up(5, 6)
        is_armed.append(True)
        look_up(6, 7)
    finally:
        signal.signal(signal.SIGUSR1, was)
    assert saved[0]["ids"].tolist() == [0, 5, 6]
    assert vocabulary.as_dict() == {7: 1, 6: 2}
