"""Vocabularies in checkpoints: a column for each rank, read back by any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep.distributed._handshake import Doing
from sparsestep.distributed.checkpoint.moving import FRESH, Agree, Layout, Move, Moved, Part, moved
from sparsestep.distributed.checkpoint.stored import (
    Block,
    Stored,
    Wanted,
    block_of,
    column_of,
    in_columns,
)
from sparsestep.distributed.collectives import Wire
from sparsestep.distributed.vocabulary import Vocabulary
from sparsestep.errors import InputError, sentence
from sparsestep.nn.grow import Init, drawn
from sparsestep.nn.vocabulary import saving
from sparsestep.nn.vocabulary.attach import Attached
from sparsestep.nn.vocabulary.id_table import Options, Saved
from sparsestep.nn.vocabulary.vocabulary import Vocabulary as LocalVocabulary
from sparsestep.surroundings import cat, stack

_ROWS = ("ids", "counts", "seen")
_CANDIDATES = ("candidate_ids", "candidate_counts")


class Held:
    """A vocabulary of a model.

    Attributes:
        name: in checkpoints.
        wire: the ranks that share it; this process alone where it is an ordinary one.
        rows: how many it has in all.
        local: what this rank knows.
        keys: what its tensors are called in the state dict of the model.
    """

    def __init__(self, name: str, module: LocalVocabulary | Vocabulary) -> None:
        is_shared = isinstance(module, Vocabulary)
        self.name: str = name
        self.wire: Wire = module._wire if isinstance(module, Vocabulary) else Wire(None)
        self.rows: int = module.rows
        self.local: LocalVocabulary = module.local if isinstance(module, Vocabulary) else module
        prefix = _key(name, "local." if is_shared else "")
        self.keys: set[str] = {prefix + field for field in saving.NAMES}
        self._module = module

    @property
    def attached(self) -> Sequence[Attached]:
        """The tables whose rows it gives away."""
        return self.local._attached

    def layout(self, tables: dict[str, int | None]) -> Layout:
        """How it is stored.

        Args:
            tables: the names of what it gives rows of, with the row that does not count.
        """
        options = self.local._options
        return Layout(self.rows, self.wire.world, options.shared, options.admit, tables)

    def entries(self) -> dict[str, Any]:
        """What this rank stores, by name."""
        local, longest = self.local, -(-self.rows // self.wire.world)
        with local._lock:
            found = saving.write(local._ids.save(), local._now, local._handed_over)
        stored: dict[str, Any] = {}
        for field, tensor in found.items():
            if not tensor.numel():  # nobody counts ids without a row
                continue
            if self.wire.world > 1:
                if field != "numbers" and local.rows < longest:  # ranks store equally many
                    tensor = cat([tensor, tensor.new_zeros(longest - local.rows)])
                tensor = in_columns(self.wire, tensor)
            stored[f"model.{_key(self.name, field)}"] = tensor
        return stored

    def agree(self, error: Exception | None, number: int) -> list[int]:
        """Raise on all ranks where one refuses; the numbers of all."""
        module = self._module
        if not isinstance(module, Vocabulary):
            return alone(error, number)
        counts = torch.full((self.wire.world,), number)
        lines = module._exchange.begin(Doing.LOAD, module._table, counts, error)
        return [room[0] for room in lines.room]

    def check(self, layout: Layout) -> None:
        """Refuse what was stored of another vocabulary."""
        options = self.local._options
        ours = (self.rows, options.shared, options.admit > 1)
        if ours != (layout.rows, layout.shared, layout.admit > 1):
            there = f"rows={layout.rows}, shared={layout.shared}, admit={layout.admit}"
            contract = f"load: the vocabulary {self.name!r} must be that of the checkpoint, {there}"
            got = f"rows={self.rows}, shared={options.shared}, admit={options.admit}"
            raise InputError(sentence(contract, got))


def held_by(model: nn.Module) -> dict[str, Held]:
    """The vocabularies of a model, by name."""
    found: dict[str, Held] = {}
    parts: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Vocabulary):
            parts.add(_key(name, "local"))
        if isinstance(module, LocalVocabulary | Vocabulary) and name not in parts:
            found[name] = Held(name, module)
    return found


def alone(error: Exception | None, number: int) -> list[int]:
    """The agreement of one process."""
    if error is not None:
        raise error
    return [number]


class Restoring:
    """A vocabulary that is read from a checkpoint.

    Attributes:
        name: of the vocabulary.
        entries: what is to be read into; then ``settle`` knows what it was.
        found: what the vocabulary is to become.
        moves: for each table how its rows follow; empty where all rows stay where they are.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        options: Options,
        layout: Layout,
        stored: Mapping[str, Stored],
        agree: Agree,
    ) -> None:
        self.name: str = name
        self._wire, self._options, self._layout, self._agree = wire, options, layout, agree
        self.is_moved: bool = layout.lanes != wire.world
        self._wanted: dict[str, Wanted] = {}
        self._blocks: dict[str, Block] = {}
        self.entries: dict[str, Any] = {}
        for field in saving.NAMES:
            key = f"model.{_key(name, field)}"
            if key in stored:
                lanes = layout.lanes if layout.lanes > 1 else 0
                self.entries[key] = self._target(field, stored[key]._replace(lanes=lanes))
        self.found: tuple[Saved, int, int] | None = None
        self.moves: dict[str, Move] = {}

    def _target(self, field: str, stored: Stored) -> Any:
        if self.is_moved and field != "numbers":
            self._blocks[field] = block_of(self._wire, stored)
            return self._blocks[field].target
        if self.is_moved or self._wire.world == 1:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            self._wanted[field] = Wanted(whole, lambda: whole)
        else:
            self._wanted[field] = column_of(self._wire, stored)
        return self._wanted[field].target

    def settle(
        self,
        weights: Mapping[str, Stored],
        inits: Mapping[str, Init],
        paddings: Mapping[str, int | None],
    ) -> None:
        """Find out who owns what; all ranks do so together, and all raise where one refuses.

        Args:
            weights: the tables whose rows follow.
            inits: how rows of these begin, where it is known.
            paddings: which of their rows do not count.
        """
        error: Exception | None = None
        moved_to = self._moved() if self.is_moved else None
        try:
            self.found = self._as_it_was() if moved_to is None else self._become(moved_to)
            for name, stored in weights.items() if moved_to is not None else ():
                assert moved_to is not None
                init = inits.get(name, nn.init.normal_)
                values = self._fresh(moved_to, stored, init)
                source, world = moved_to.source, self._wire.world
                self.moves[name] = Move(source, world, values, paddings.get(name))
        except Exception as raised:
            error = raised
        self._agree(error, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """What an ordinary vocabulary loads."""
        assert self.found is not None
        found = saving.write(*self.found)
        return {_key(self.name, field): tensor for field, tensor in found.items()}

    def _as_it_was(self) -> tuple[Saved, int, int]:
        room = saving.write(Saved.room(self._options, 0, 0, 0), 0, 0)
        for field, wanted in self._wanted.items():
            room[field] = wanted.finish()[: len(room[field])]
        return saving.read(self._options, room)

    def _become(self, moved_to: Moved) -> tuple[Saved, int, int]:
        handed_over = moved_to.seed + int((moved_to.source == FRESH).sum())
        found = saving.write(moved_to.saved, moved_to.now, handed_over)
        return saving.read(self._options, found)

    def _moved(self) -> Moved:
        numbers = self._wanted["numbers"].finish().view(-1, self._layout.lanes)
        first, rows = self._columns(_ROWS)
        first_candidate, candidates = self._columns(_CANDIDATES)
        part = Part(numbers, first, rows, first_candidate, candidates)
        return moved(self._wire, self._layout, part, self._options, self._agree)

    def _columns(self, fields: Sequence[str]) -> tuple[int, Tensor]:
        """The number of the first row that was read, and what was read of each row."""
        blocks = [self._blocks[field] for field in fields if field in self._blocks]
        if not blocks:
            return 0, torch.empty(0, len(fields), dtype=torch.int64)
        return blocks[0].first, stack([block.rows for block in blocks]).T

    @staticmethod
    def _fresh(moved_to: Moved, stored: Stored, init: Init) -> Tensor:
        count = int((moved_to.source == FRESH).sum())
        rest = stored.shape[2 if stored.is_dealt else 1 :]
        return drawn(torch.empty(count, *rest, dtype=stored.dtype), init, moved_to.seed)


def _key(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
