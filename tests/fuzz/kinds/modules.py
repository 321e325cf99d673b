"""``sparsestep.nn`` beside torch's modules: the same outputs, gradients and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from tests.fuzz.findings import check_close, check_refusal
from tests.fuzz.world import Say
from tests.generate.grads import as_dense
from tests.generate.source import Source
from tests.oracle import FindingError

_ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_OPTIMIZERS = ["SGD", "Adam", "AdamW", "SparseAdam", "Adagrad", "RowwiseAdagrad", "Lion"]


class Pair:
    """A module of ours and torch's, with the same weight."""

    def __init__(self, chance: Source, say: Say) -> None:
        self.chance, self.say = chance, say
        self.rows, self.columns = chance.pick([(7, 3), (1, 1), (20, 5), (6, 16)])
        self.dtype = chance.pick([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        self.bags = chance.one_in(2)
        options: dict[str, Any] = {"dtype": self.dtype}
        if chance.one_in(3):
            options["padding_idx"] = chance.pick([0, self.rows - 1, -1])
        if chance.one_in(5):
            options["max_norm"] = 0.5
        if self.bags:
            options["mode"] = chance.pick(["sum", "mean", "max"])
            options["include_last_offset"] = chance.one_in(3)
        if not self.bags and chance.one_in(4):  # of bags, torch divides by other numbers
            options["scale_grad_by_freq"] = True
        self.options = options
        ours, theirs = (
            (sparsestep.nn.EmbeddingBag, nn.EmbeddingBag)
            if self.bags
            else (sparsestep.nn.Embedding, nn.Embedding)
        )
        self.ours: Any = ours(self.rows, self.columns, **options)
        self.theirs: Any = theirs(self.rows, self.columns, **options)
        if chance.one_in(4):
            self.ours = sparsestep.nn.fuse(copy.deepcopy(self.theirs))
        self.theirs.load_state_dict(self.ours.state_dict())
        say(f"{ours.__name__}({self.rows}, {self.columns}, {options})")
        name = chance.pick(_OPTIMIZERS)
        self.optimizer = getattr(sparsestep, name)(self.ours.parameters(), lr=0.125)
        self.other = getattr(sparsestep, name)(self.theirs.parameters(), lr=0.125)
        self.name = name

    def arguments(self) -> dict[str, Any]:
        chance = self.chance
        integers = chance.pick([torch.int64, torch.int64, torch.int32])
        if not self.bags:
            shape = chance.pick([(0,), (1,), (9,), (4, 3), (2, 0), (2, 3, 2), ()])
            ids = torch.randint(self.rows, shape, generator=chance.generator)
            return {"input": ids.to(integers)}
        found: dict[str, Any] = {}
        if chance.one_in(2):
            shape = (chance.integer(0, 4), chance.pick([1, 2, 4]))
            if self.options["include_last_offset"] and not shape[0]:
                shape = (1, shape[1])
        else:
            sizes = [chance.integer(0, 4) for _ in range(chance.integer(1, 5))]
            ends = torch.tensor([0, *sizes]).cumsum(0)
            last = self.options["include_last_offset"]
            found["offsets"] = (ends if last else ends[:-1]).to(integers)
            shape = (sum(sizes),)
        ids = torch.randint(self.rows, shape, generator=chance.generator)
        found["input"] = ids.to(integers)
        if self.options["mode"] == "sum" and chance.one_in(3):
            found["per_sample_weights"] = chance.numbers(shape, self.dtype)
        return found

    def train(self) -> None:
        """A lookup, its gradient, perhaps clipped, and a step of both."""
        given = self.arguments()
        self.say(f"forward and backward {_shown(given)}")
        ours, theirs = self.ours(**given), self.theirs(**given)
        self.close("output", ours, theirs)
        pushed = self.chance.numbers(ours.shape, ours.dtype)
        times = self.chance.pick([1, 1, 2])
        for table in (self.ours, self.theirs):
            table.weight.grad = None
            for _ in range(times):
                table(**given).backward(pushed)
        grad, right = self.ours.weight.grad, self.theirs.weight.grad
        self.close("gradient", as_dense(grad), right)
        if self.chance.one_in(3):
            self.clip(right)
        self.step(given)

    def clip(self, right: Tensor) -> None:
        bound = self.chance.pick([0.5, 100.0])
        order = self.chance.pick([2.0, 1.0, float("inf"), 3.0])
        by_value = self.chance.one_in(2)
        self.say(f"clip to {bound}, {'by value' if by_value else f'norm {order}'}")
        if by_value:
            sparsestep.clip_grad_value_(self.ours.parameters(), bound)
            nn.utils.clip_grad_value_(self.theirs.parameters(), bound)
        else:
            norm = sparsestep.clip_grad_norm_(self.ours.parameters(), bound, order)
            exact = torch.linalg.vector_norm(right.double(), order)
            self.close("norm", norm, exact)
            nn.utils.clip_grad_norm_(self.theirs.parameters(), bound, order)
        self.close("clipped", as_dense(self.ours.weight.grad), right)

    def step(self, given: dict[str, Any]) -> None:
        """What a dense gradient does to rows that it holds zeros for is not compared."""
        self.say(f"{self.name}.step()")
        before = self.ours.weight.detach().clone()
        held = torch.zeros(self.rows, dtype=torch.bool)
        held[given["input"].flatten().long()] = True
        if self.ours.padding_idx is not None:
            held[self.ours.padding_idx] = False
        sparse = self.theirs.weight.grad.to_sparse(1)
        self.theirs.weight.grad = sparse
        self.optimizer.step()
        self.other.step()
        if not torch.equal(self.ours.weight[~held], before[~held]):
            raise FindingError("untouched entries changed", "rows that were not looked up")
        # From here on from the same numbers, and without what a stored zero does.
        with torch.no_grad():
            self.theirs.weight.copy_(self.ours.weight)
        self.other = copy.deepcopy(self.other)
        self.other = getattr(sparsestep, self.name)(self.theirs.parameters(), lr=0.125)

    def copy(self) -> None:
        self.say("pickle or deepcopy")
        self.ours.weight.grad = None
        how = self.chance.pick([copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
        self.ours = how(self.ours)
        self.optimizer = getattr(sparsestep, self.name)(self.ours.parameters(), lr=0.125)

    def garbage(self) -> None:
        """One thing about a lookup is wrong."""
        given = self.arguments()
        name = self.chance.pick(list(given))
        ids = given["input"]
        if name == "input" and ids.numel() and self.chance.one_in(2):
            bad = ids.clone().flatten()
            outside = [-1, self.rows, 2**31 - 1]
            bad[self.chance.integer(0, len(bad) - 1)] = self.chance.pick(outside)
            given["input"] = bad.reshape(ids.shape)
            must = True
        else:
            given[name] = self.chance.pick(_THINGS)
            must = False
        text = f"{name} = {_shown(given)[name]}"
        self.say(text)
        before = self.ours.weight.detach().clone()
        try:
            self.ours(**given)
        except Exception as error:
            check_refusal(error, text)
        else:
            if must:
                raise FindingError("accepted: ids outside of the table", text)
            return
        if not torch.equal(self.ours.weight, before):
            raise FindingError("a refusal changed something", "weight")

    def close(self, what: str, ours: Tensor, exact: Tensor) -> None:
        room = _ROOM[self.dtype] * max(1.0, float(exact.abs().max()) if exact.numel() else 1.0)
        check_close("not what torch's module gives", what, ours, exact, room)


_THINGS: list[Any] = [
    *(None, "x", 3, [1, 2], {}, torch.zeros(2), torch.zeros(2, 2, 2, dtype=torch.int64)),
    *(torch.zeros(2, dtype=torch.int64, device="meta"), torch.tensor([5, 0, 2])),
    *(torch.eye(2, dtype=torch.int64).to_sparse_coo(), torch.tensor([-1]), torch.tensor(2.5)),
    *(torch.zeros(2, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), torch.tensor([2**40])),
]


def _shown(given: dict[str, Any]) -> dict[str, Any]:
    def text(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "meta" or value.layout is not torch.strided:
            return f"{value.layout} on {value.device}"
        return f"{value.dtype} {value.tolist()}"

    return {name: text(value) for name, value in given.items()}


def modules(chance: Source, say: Say) -> None:
    pair = Pair(chance, say)
    for _ in range(chance.integer(1, 3)):
        pair.train()
        if chance.one_in(5):
            pair.copy()


def modules_and_garbage(chance: Source, say: Say) -> None:
    pair = Pair(chance, say)
    for _ in range(chance.integer(1, 4)):
        chance.pick([pair.garbage, pair.garbage, pair.train])()


KINDS: dict[Callable[[Source, Say], None], int] = {modules: 6, modules_and_garbage: 4}
