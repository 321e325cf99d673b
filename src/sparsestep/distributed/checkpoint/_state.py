"""What a checkpoint has of a model and its optimizer, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Peers
from sparsestep.distributed._table import Table
from sparsestep.distributed.checkpoint._manifest import count, pack, unpack
from sparsestep.distributed.checkpoint._reshard import (
    Held,
    Layout,
    Move,
    Restoring,
    Stored,
    Wanted,
    as_stored,
    held_by,
    wanted,
)
from sparsestep.distributed.collectives import Wire
from sparsestep.distributed.shard import table_of
from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import about_to_write, written
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.state import initial


class About(NamedTuple):
    """What the tensors of a checkpoint are.

    Attributes:
        tables: for each sharded table the number of its rows, and of the ranks that they were
            assigned to, or 0.
        groups: the param groups, with names for parameters.
        vocabularies: the layout of each, by name.
        initial: for tables of vocabularies, the initial value of each state.
    """

    tables: dict[str, tuple[int, int]]
    groups: list[dict[str, Any]]
    vocabularies: dict[str, Layout]
    initial: dict[str, dict[str, float]]

    def pack(self) -> dict[str, Any]:
        """Encode as JSON."""
        return {**self._asdict(), "groups": [pack(group) for group in self.groups]}

    @staticmethod
    def unpack(found: Mapping[str, Any]) -> About:
        """Decode; raises if it is nothing that :meth:`pack` has encoded."""
        layouts = {}
        for name, (rows, lanes, shared, admit, tables) in found["vocabularies"].items():
            paddings = {key: None if row is None else count(row) for key, row in tables.items()}
            sizes = count(rows), max(1, count(lanes)), count(shared), count(admit)
            layouts[name] = Layout(*sizes, paddings)
        groups = [unpack(group) for group in found["groups"]]
        for group in groups:
            group["params"] = [str(name) for name in group["params"]]
        return About(
            tables={name: (count(a), count(b)) for name, (a, b) in found["tables"].items()},
            groups=groups,
            vocabularies=layouts,
            initial={
                name: {key: float(value) for key, value in each.items()}
                for name, each in found["initial"].items()
            },
        )


class Contents:
    """A model and its optimizer, by the names of the parameters.

    Attributes:
        model: without ``DistributedDataParallel``.
        params: the optimizer's parameters.
        tables: those of them that are sharded, and other names of these.
        vocabularies: which map ids to rows of tables.
    """

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self.model: nn.Module = model
        self._optimizer = optimizer
        self.vocabularies: dict[str, Held] = held_by(self.model)
        sharded = {
            id(table.weight): table
            for module in self.model.modules()
            if (table := table_of(module)) is not None
        }
        self.tables: dict[str, Table] = {}
        names: dict[int, str] = {}
        self._all_names: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), name)
            self._all_names.setdefault(id(param), []).append(name)
            if id(param) in sharded:
                self.tables[name] = sharded[id(param)]
        self.params: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    requirement = "the parameters of the optimizer must be those of the model"
                    raise InputError(
                        message(requirement, f"another, of shape {tuple(param.shape)}")
                    )
                self.params[names[id(param)]] = param
        self._names = names

    def entries(self, *, copy: bool = False) -> dict[str, Any]:
        """What this rank stores, by name.

        Args:
            copy: with memory of its own.
        """
        self._optimizer.catch_up()
        state = self._optimizer.state
        bool(state)  # makes what is missing: a checkpoint has the state of every parameter
        found: dict[str, Any] = {}
        for name, tensor in self.own().items():
            found[f"model.{name}"] = as_stored(self.tables.get(name), tensor, copy=copy)
        for name, param in self.params.items():
            table = self.tables.get(name)
            if table is None or table.is_here:
                for key, value in state.get(param, {}).items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    found[f"state.{name}.{key}"] = as_stored(table, tensor, copy=copy)
        found = {key: value for key, value in found.items() if value is not None}
        for held in self.vocabularies.values():
            found.update(held.entries())
        return found

    def about(self) -> About:
        """What the entries are."""
        layouts = {
            name: held.layout(self._tables_of(held)) for name, held in self.vocabularies.items()
        }
        return About(self.stored_tables(), self.groups(), layouts, self._initial())

    def own(self) -> dict[str, Tensor]:
        """The state dict of the model, but for its vocabularies."""
        others = {key for held in self.vocabularies.values() for key in held.keys}
        return {key: each for key, each in self.model.state_dict().items() if key not in others}

    def _tables_of(self, held: Held) -> dict[str, int | None]:
        """The tables of a vocabulary by all their names, and the row of each that is padding."""
        found: dict[str, int | None] = {}
        for each in held.attached:
            for name in self._all_names.get(id(each.table.weight), []):
                table = self.tables.get(name)
                found[name] = each.table.padding_idx if table is None else table.padding
        return found

    def _initial(self) -> dict[str, dict[str, float]]:
        """What the state of tables begins with whose rows change hands."""
        given = {name for held in self.vocabularies.values() for name in self._tables_of(held)}
        found: dict[str, dict[str, float]] = {}
        for group in self._optimizer.param_groups:
            rule = self._optimizer.stored_rule_for(group)
            for name in {self._names[id(param)] for param in group["params"]} & given:
                found[name] = {spec.name: initial(spec, group) for spec in rule.state}
        return found

    def restoring(self, layouts: dict[str, Layout], stored: dict[str, Stored]) -> list[Restoring]:
        """The vocabularies, about to be read; raises where a checkpoint does not fit them."""
        found = []
        for name, held in self.vocabularies.items():
            if name not in layouts:
                requirement = "load: the checkpoint must have all vocabularies of the model"
                raise InputError(message(requirement, f"none for {name!r}"))
            layout = layouts[name]
            held.check(layout)
            options = held.local._options
            each = Restoring(name, held.wire, options, layout, stored, held.agree)
            known = self._tables_of(held)
            if each.is_moved and any(id(a.table.weight) not in self._names for a in held.attached):
                requirement = (
                    f"load: the tables of {name!r} must be in the model, since their rows move"
                )
                raise InputError(message(requirement, f"only {', '.join(known) or 'none'}"))
            found.append(each)
        return found

    def settle(
        self, restoring: list[Restoring], layouts: dict[str, Layout], stored: dict[str, Stored]
    ) -> dict[str, Move]:
        """How the rows of tables follow the ids of their vocabularies; all ranks call it."""
        moves: dict[str, Move] = {}
        for each in restoring:
            held = self.vocabularies[each.name]
            paddings = {**layouts[each.name].tables, **self._tables_of(held)}
            inits = {
                name: attached.init
                for attached in held.attached
                for name in self._all_names.get(id(attached.table.weight), [])
            }
            weights = {
                name: stored[f"model.{name}"] for name in paddings if f"model.{name}" in stored
            }
            each.settle(weights, inits, paddings)
            moves.update(each.moves)
        return moves

    def peers(self) -> Peers:
        """The ranks that save and load together: those that share tables, else all."""
        for table in self.tables.values():
            return Peers(table.wire.group)
        is_initialized = dist.is_available() and dist.is_initialized()
        return Peers(dist.group.WORLD if is_initialized else None)

    def stored_tables(self) -> dict[str, tuple[int, int]]:
        """For each sharded table how many rows it has, and among how many ranks they are dealt."""
        return {
            name: (table.rows, table.wire.world if _is_dealt(table) else 0)
            for name, table in self.tables.items()
        }

    def groups(self) -> list[dict[str, Any]]:
        """The param groups with names for parameters, and without masks."""
        return [
            {
                **{key: value for key, value in group.items() if key != "mask"},
                "params": [self._names[id(param)] for param in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def check(self, own: dict[str, Any], stored: dict[str, Stored]) -> None:
        """Refuse a checkpoint that does not fit the model."""
        for name, tensor in own.items():
            each, table = stored.get(f"model.{name}"), self.tables.get(name)
            if each is None:
                requirement = (
                    "load: the checkpoint must have all parameters and buffers of the model"
                )
                raise InputError(message(requirement, f"none for {name!r}"))
            shape = tuple(tensor.shape) if table is None else (table.rows, table.dim)
            there = (each.rows, *each.shape[2:]) if each.is_dealt else tuple(each.shape)
            if shape != there:
                requirement = f"load: {name!r} must have the shape of the checkpoint, {there}"
                raise InputError(message(requirement, shape))

    def loaded_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved param groups, as the optimizer numbers its parameters."""
        mine, theirs = ([group["params"] for group in each] for each in (self.groups(), saved))
        if mine != theirs:
            requirement = "load: the optimizer must have the groups of the checkpoint"
            raise InputError(message(requirement, f"{mine} instead of {theirs}"))
        indices = {name: index for index, name in enumerate(self.params)}
        return [{**group, "params": [indices[n] for n in group["params"]]} for group in saved]

    def take(
        self,
        own: dict[str, Tensor],
        read: dict[str, Tensor],
        groups: list[dict[str, Any]],
        restored: list[Restoring],
    ) -> None:
        """Become what was read, on all ranks or on none; all ranks call it."""
        peers, optimizer = self.peers(), self._optimizer
        wire = next((table.wire for table in self.tables.values()), Wire(None))
        indices = {name: index for index, name in enumerate(self.params)}
        with peers.agreeing():
            state: dict[int, dict[str, Any]] = {}
            for key, tensor in read.items():
                kind, name, entry = parted(key)
                if kind == "state":
                    state.setdefault(indices[name], {})[entry] = tensor
            values = [
                (tensor, read[f"model.{name}"].to(tensor.dtype))
                for name, tensor in own.items()
                if f"model.{name}" in read
            ]
            for tensor, _ in values:
                about_to_write(tensor, (), None)

        def commit() -> None:
            before = optimizer.state, optimizer.param_groups
            error: BaseException | None = None
            try:
                with peers.agreeing():
                    optimizer.load_state_dict({"state": state, "param_groups": groups})
            except BaseException as raised:
                error = raised
            # To agree takes memory: a rank may have run out of it when others got its consent.
            try:
                wire.check(error)
            except BaseException:
                optimizer.state, optimizer.param_groups = before
                raise
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            written(tensor for tensor, _ in values)
            for each in restored:
                assert each.found is not None
                self.vocabularies[each.name].local._become(*each.found)

        # From the moment when a rank agrees, the others count on it.
        uninterrupted(commit)


def _is_dealt(table: Table) -> bool:
    return table.kind == "rows" and table.wire.world > 1


def parted(key: str) -> tuple[str, str, str]:
    """Whether an entry is the model's or of an optimizer's state, whose, and which."""
    kind, _, name = key.partition(".")
    if kind == "model":
        return kind, name, ""
    name, _, entry = name.rpartition(".")
    return kind, name, entry


def targets(
    about: About,
    stored: dict[str, Stored],
    moves: dict[str, Move],
    tables: dict[str, Table],
) -> dict[str, Wanted]:
    """How this rank reads its part of what was stored, by name.

    Args:
        about: what the checkpoint says about itself.
        stored: what is to be read.
        moves: for tables whose rows follow ids, how.
        tables: those that are sharded here.
    """
    found = {}
    for key, each in stored.items():
        kind, name, entry = parted(key)
        table, move = tables.get(name), moves.get(name)
        first = None if kind == "model" else about.initial.get(name, {}).get(entry, 0.0)
        is_moved = move is not None and len(each.shape) > 0
        target = move.wanted(table, each, first) if move and is_moved else wanted(table, each)
        if target is not None:
            found[key] = target
    return found
