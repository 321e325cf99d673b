"""A model and its optimizer as a checkpoint has them: by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Peers
from sparsestep.distributed._table import ShardedTable
from sparsestep.distributed.checkpoint import _manifest as manifest
from sparsestep.distributed.checkpoint._mapped import MappedLoad
from sparsestep.distributed.checkpoint._reshard import (
    ModelVocabulary,
    ReadTarget,
    RowRemap,
    StoredTensor,
    VocabularyLayout,
    VocabularyReader,
    find_vocabularies,
    read_target,
    to_stored,
)
from sparsestep.distributed.collectives import Caught, Collectives
from sparsestep.distributed.shard import sharded_table
from sparsestep.engines.base import finish
from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import about_to_write, file_of, written
from sparsestep.nn.ngram import NgramEmbedding
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.state import initial_value
from sparsestep.optim.state_dict import unpacked_state


class TensorLayouts(NamedTuple):
    """How the tensors of a checkpoint were laid out."""

    tables: dict[str, tuple[int, int]]  # rows, and ranks that they were assigned to, or 0
    groups: list[dict[str, Any]]  # param groups, with names for parameters
    vocabularies: dict[str, VocabularyLayout]
    initial: dict[str, dict[str, float]]  # state of tables of vocabularies

    def pack(self) -> dict[str, Any]:
        """Encode as JSON."""
        return {**self._asdict(), "groups": [manifest.pack(group) for group in self.groups]}

    def params(self) -> list[str]:
        """The names of all parameters of the optimizer, in their order."""
        return list(dict.fromkeys(name for group in self.groups for name in group["params"]))

    @staticmethod
    def unpack(found: Mapping[str, Any]) -> TensorLayouts:
        """Decode; raises if :meth:`pack` has not encoded it."""
        layouts = {}
        count = manifest.count
        for name, (rows, num_columns, shared, admit, tables) in found["vocabularies"].items():
            paddings = {key: None if row is None else count(row) for key, row in tables.items()}
            sizes = count(rows), max(1, count(num_columns)), count(shared), count(admit)
            layouts[name] = VocabularyLayout(*sizes, paddings)
        groups = [manifest.unpack(group) for group in found["groups"]]
        for group in groups:
            group["params"] = [str(name) for name in group["params"]]
        return TensorLayouts(
            tables={name: (count(a), count(b)) for name, (a, b) in found["tables"].items()},
            groups=groups,
            vocabularies=layouts,
            initial={
                name: {key: float(value) for key, value in each.items()}
                for name, each in found["initial"].items()
            },
        )


def peers_of(model: nn.Module) -> Peers:
    """The ranks that save and load together: those that share tables, else all."""
    for module in model.modules():
        if (table := sharded_table(module)) is not None:
            try:
                return Peers(table.collectives.group)
            except ValueError:
                requirement = "the process group of sharded tables must exist to save or load them"
                raise InputError(message(requirement, "one that was destroyed")) from None
    is_initialized = dist.is_available() and dist.is_initialized()
    return Peers(dist.group.WORLD if is_initialized else None)


class CheckpointState:
    """A model and its optimizer, by the names of the parameters."""

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer, peers: Peers) -> None:
        self.peers: Peers = peers
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self.model: nn.Module = model
        self._optimizer = optimizer
        self.vocabularies: dict[str, ModelVocabulary] = find_vocabularies(self.model)
        sharded = {
            id(table.weight): table
            for module in self.model.modules()
            if (table := sharded_table(module)) is not None
        }
        self.tables: dict[str, ShardedTable] = {}  # the sharded ones, by each of their names
        names: dict[int, str] = {}
        self._all_names: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), name)
            self._all_names.setdefault(id(param), []).append(name)
            if id(param) in sharded:
                self.tables[name] = sharded[id(param)]
        self.params: dict[str, Tensor] = {}  # of the optimizer
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    requirement = "the parameters of the optimizer must be those of the model"
                    raise InputError(
                        message(requirement, f"another, of shape {tuple(param.shape)}")
                    )
                self.params[names[id(param)]] = param
        self._names = names

    def entries(self, *, copy: bool = False, has_files: bool = False) -> dict[str, Any]:
        """The tensors that this rank stores, by key; copied if training continues meanwhile.

        With ``has_files``, those in files are stored otherwise.
        """
        self._optimizer.catch_up()
        self._optimizer.complete_state()
        found: dict[str, Any] = {}
        for name, tensor in self.model_tensors().items():
            if not has_files or file_of(tensor) is None:
                found[f"model.{name}"] = to_stored(self.tables.get(name), tensor, copy=copy)
        for name, param in self.params.items():
            table = self.tables.get(name)
            if table is None or table.has_rows:
                for key, value in (unpacked_state(self._optimizer, param) or {}).items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    if has_files and file_of(tensor) is not None:
                        continue
                    found[f"state.{name}.{key}"] = to_stored(table, tensor, copy=copy)
        found = {key: value for key, value in found.items() if value is not None}
        for vocabulary in self.vocabularies.values():
            found.update(vocabulary.entries())
        return found

    def layouts(self) -> TensorLayouts:
        vocabularies = {
            name: each.layout(self._tables_of(each)) for name, each in self.vocabularies.items()
        }
        tables = {
            name: (table.rows, table.row_stride if table.row_stride > 1 else 0)
            for name, table in self.tables.items()
        }
        return TensorLayouts(tables, self.named_groups(), vocabularies, self._initial_state())

    def model_tensors(self) -> dict[str, Tensor]:
        """The state dict of the model, but for its vocabularies."""
        others = {key for vocabulary in self.vocabularies.values() for key in vocabulary.keys}
        found = self.model.state_dict()
        return {key: each.detach() for key, each in found.items() if key not in others}

    def _tables_of(self, vocabulary: ModelVocabulary) -> dict[str, int | None]:
        """The tables of a vocabulary by all their names, with their padding rows."""
        found: dict[str, int | None] = {}
        for each in vocabulary.local.attached:
            for name in self._all_names.get(id(each.table.weight), []):
                table = self.tables.get(name)
                found[name] = each.table.padding_idx if table is None else table.padding_idx
        return found

    def _initial_state(self) -> dict[str, dict[str, float]]:
        """Initial values of the state of tables whose rows are reused."""
        given = {name for each in self.vocabularies.values() for name in self._tables_of(each)}
        found: dict[str, dict[str, float]] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                name, state = self._names[id(param)], self._optimizer.state.get(param)
                if name in given:
                    rule = self._optimizer.stored_rule_for(group, param, state)
                    found[name] = {spec.name: initial_value(spec, group) for spec in rule.state}
        return found

    def vocabulary_readers(
        self, layouts: dict[str, VocabularyLayout], stored: dict[str, StoredTensor]
    ) -> list[VocabularyReader]:
        """Readers of all vocabularies; raises if the checkpoint does not fit them."""
        found = []
        for name, vocabulary in self.vocabularies.items():
            if name not in layouts:
                requirement = "load: the checkpoint must have all vocabularies of the model"
                raise InputError(message(requirement, f"none for {name!r}"))
            layout, local = layouts[name], vocabulary.local
            vocabulary.check(layout)
            each = VocabularyReader(name, vocabulary.collectives, local.options, layout, stored)
            if each.is_resharded and any(
                id(a.table.weight) not in self._names for a in local.attached
            ):
                requirement = (
                    f"load: the tables of {name!r} must be in the model, since their rows move"
                )
                names = ", ".join(self._tables_of(vocabulary))
                raise InputError(message(requirement, f"only {names or 'none'}"))
            found.append(each)
        return found

    def reassign_rows(
        self,
        readers: list[VocabularyReader],
        layouts: dict[str, VocabularyLayout],
        stored: dict[str, StoredTensor],
    ) -> dict[str, RowRemap]:
        """Assign ids to their new owners, and say how rows of tables follow; all ranks call it."""
        remaps: dict[str, RowRemap] = {}
        for each in readers:
            vocabulary = self.vocabularies[each.name]
            paddings = {**layouts[each.name].tables, **self._tables_of(vocabulary)}
            inits = {
                name: attached.init
                for attached in vocabulary.local.attached
                for name in self._all_names.get(id(attached.table.weight), [])
            }
            keys = {name: f"model.{name}" for name in paddings}
            weights = {name: stored[key] for name, key in keys.items() if key in stored}
            each.reassign(weights, inits, paddings)
            remaps.update(each.remaps)
        return remaps

    def named_groups(self) -> list[dict[str, Any]]:
        """The param groups with names for parameters, and without masks."""
        return [
            {
                **{key: value for key, value in group.items() if key != "mask"},
                "params": [self._names[id(param)] for param in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def check_matches(self, tensors: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
        for name, tensor in tensors.items():
            each, table = stored.get(f"model.{name}"), self.tables.get(name)
            if each is None and name.endswith("_extra_state"):
                continue  # its module may have had none when it was saved
            if each is None:
                requirement = (
                    "load: the checkpoint must have all parameters and buffers of the model"
                )
                raise InputError(message(requirement, f"none for {name!r}"))
            shape = tuple(tensor.shape) if table is None else (table.rows, table.dim)
            there = (each.rows, *each.shape[2:]) if each.has_columns else tuple(each.shape)
            if shape != there:
                requirement = f"load: {name!r} must have the shape of the checkpoint, {there}"
                raise InputError(message(requirement, shape))

    def check_groups(self, saved: list[dict[str, Any]]) -> None:
        groups = self.named_groups(), saved
        mine, theirs = ([group["params"] for group in each] for each in groups)
        if mine != theirs:
            requirement = "load: the optimizer must have the groups of the checkpoint"
            raise InputError(message(requirement, f"{mine} instead of {theirs}"))

    def commit(
        self,
        tensors: dict[str, Tensor],
        read: dict[str, Tensor],
        groups: list[dict[str, Any]],
        readers: list[VocabularyReader],
        files: MappedLoad,
    ) -> None:
        """Replace everything by what was read, on all ranks or on none; all ranks call it."""
        peers, optimizer = self.peers, self._optimizer
        ranks = next((table.collectives for table in self.tables.values()), Collectives(None))
        with peers.agreeing():
            found = optimizer_state_dict(groups, {**read, **files.tensors})
            values = [
                (tensor, read[f"model.{name}"].to(tensor.dtype))
                for name, tensor in tensors.items()
                if f"model.{name}" in read
            ]
            for tensor, _ in values:
                about_to_write(tensor, (), None)
            for name, module in self.model.named_modules():
                state = read.get(".".join(filter(None, ("model", name, "_extra_state"))))
                if isinstance(module, NgramEmbedding) and state is not None:
                    module.set_extra_state(state)  # raises if its rows are those of other n-grams
            restored = [
                self.vocabularies[each.name].local.prepare_restore(*each.found)
                for each in readers
                if each.found is not None
            ]

        def commit_together() -> None:
            before = optimizer.state, optimizer.param_groups, dict(optimizer.store.layouts)
            with Caught() as caught, peers.agreeing():
                files.switch()
                optimizer.load_state_dict(found)
            # Agreeing takes memory: a rank may have run out of it after the others got its consent.
            try:
                ranks.check(caught.error)
            except BaseException:
                optimizer.state, optimizer.param_groups, optimizer.store.layouts = before
                raise
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            written(tensor for tensor, _ in values)
            files.finish()
            finish(restored)

        # Once a rank has agreed, the others rely on it.
        uninterrupted(commit_together)


def optimizer_state_dict(groups: list[dict[str, Any]], read: dict[str, Tensor]) -> dict[str, Any]:
    """State dict of an optimizer, of param groups with names and tensors by key."""
    names = dict.fromkeys(name for group in groups for name in group["params"])
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in read.items():
        kind, name, entry = split_key(key)
        if kind == "state":
            state.setdefault(indices[name], {})[entry] = tensor
    numbered = [{**group, "params": [indices[n] for n in group["params"]]} for group in groups]
    return {"state": state, "param_groups": numbered}


def split_key(key: str) -> tuple[str, str, str]:
    """``"model"`` or ``"state"``, the name of the parameter, and that of the state."""
    kind, _, name = key.partition(".")
    if kind == "model":
        return kind, name, ""
    name, _, entry = name.rpartition(".")
    return kind, name, entry


def read_targets(
    layouts: TensorLayouts,
    stored: dict[str, StoredTensor],
    remaps: dict[str, RowRemap],
    tables: dict[str, ShardedTable],
) -> dict[str, ReadTarget]:
    found = {}
    for key, each in stored.items():
        kind, name, entry = split_key(key)
        table, remap = tables.get(name), remaps.get(name)
        if table is not None and not table.has_rows:
            continue
        if remap is not None and len(each.shape) > 0:
            initial = None if kind == "model" else layouts.initial.get(name, {}).get(entry, 0.0)
            found[key] = remap.read_target(table, each, initial)
        else:
            found[key] = read_target(table, each)
    return found
