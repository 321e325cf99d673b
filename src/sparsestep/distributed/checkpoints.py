"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

from concurrent.futures import Future
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsestep.distributed.modules import table_of
from sparsestep.distributed.stored import Stored, as_stored, in_order, wanted
from sparsestep.distributed.table import Table
from sparsestep.distributed.vocabulary import Vocabulary
from sparsestep.distributed.writing import Path, read, write, write_in_background
from sparsestep.errors import InputError, sentence
from sparsestep.optimizer.base import RuleOptimizer

_ABOUT = "about"


def save(path: Path, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Save a model and its optimizer; all ranks call it.

    This is ``torch.distributed.checkpoint`` underneath: a folder, to which each rank writes what
    it has. Any number of ranks loads it, one process too; and a model that was not sharded may be
    saved and loaded by one that is.

    Args:
        path: a folder that all ranks see.
        model: sharded or not; within ``DistributedDataParallel`` or not.
        optimizer: of its parameters.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> plan = sparsestep.distributed.shard(model, plan="rows")
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     save(path, model, optimizer)
        ...     load(path, model, optimizer)
        ...     found = consolidate(path)
        >>> tuple(found["model"]["weight"].shape), list(found["optimizer"]["state"][0])
        ((10, 4), ['step', 'exp_avg', 'exp_avg_sq'])
        >>> nn.EmbeddingBag(10, 4).load_state_dict(found["model"])
        <All keys matched successfully>
    """
    what = _Model(model, optimizer)
    write(what.entries(), path, **what.processes())


def async_save(path: Path, model: nn.Module, optimizer: RuleOptimizer) -> Future[None]:
    """Save in the background, while training goes on; all ranks call it.

    Everything is copied first: that takes as much memory as the checkpoint has, and what is saved
    is of this moment, whatever the next steps do. The ranks write it by a process group of its own.
    A checkpoint that was not written to its end cannot be loaded, so use another folder for each.
    Where tables are shared by some of the processes, it is written before this returns.

    Args:
        path: a folder that all ranks see.
        model: as for :func:`save`.
        optimizer: of its parameters.

    Returns:
        A future, whose ``result()`` waits until this rank has written its part, and raises what
        went wrong. A process that ends waits for it, too.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saving = async_save(path, model, optimizer)
        ...     # train on
        ...     saving.result()
        ...     load(path, model, optimizer)
    """
    what = _Model(model, optimizer)
    return write_in_background(what.entries(copy=True), path, **what.processes())


def load(path: Path, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Load what :func:`save` has saved, with any number of ranks; all ranks call it.

    Args:
        path: the folder.
        model: with the same tables; sharded in whatever way, or not.
        optimizer: of its parameters, in the same groups. Its options become those of the
            checkpoint, but for masks.

    Raises:
        InputError: the checkpoint does not fit; nothing was changed.
    """
    what = _Model(model, optimizer)
    about, stored = _about(path), _stored(path)
    own = what.model.state_dict()
    what.check(own, stored)
    groups = what.loaded_groups(about.groups)
    targets = {}
    for key, each in stored.items():
        kind, name, _ = _parted(key)
        if name in (own if kind == "model" else what.params):
            found = wanted(what.tables.get(name), each)
            if found is not None:
                targets[key] = found
    entries = {key: found.target for key, found in targets.items()}
    read(entries, path, **what.processes())
    what.take(own, {key: found.finish() for key, found in targets.items()}, groups)


def consolidate(path: Path) -> dict[str, Any]:
    """A checkpoint as an ordinary dict, read by one process.

    Args:
        path: the folder that :func:`save` wrote.

    Returns:
        ``"model"``, which the model loads as it was before ``shard``, and ``"optimizer"``, which
        this library's optimizers load, and torch's of the same name.
    """
    about, stored = _about(path), _stored(path)
    entries = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in stored.items()}
    read(entries, path, no_dist=True)
    groups, indices = [], dict[str, int]()
    for group in about.groups:
        for name in group["params"]:
            indices.setdefault(name, len(indices))
        groups.append({**group, "params": [indices[name] for name in group["params"]]})
    found: dict[str, Any] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in entries.items():
        kind, name, entry = _parted(key)
        if kind == "model":
            found[name] = in_order(tensor, stored[key])
        else:
            state.setdefault(indices[name], {})[entry] = in_order(tensor, stored[key])
    return {"model": found, "optimizer": {"state": state, "param_groups": groups}}


class _About(NamedTuple):
    """What a checkpoint says about itself; a dict would be taken for a part of the state dict.

    Attributes:
        tables: for each sharded table how many rows it has, and among how many ranks they are
            dealt.
        groups: the param groups, with names for parameters.
    """

    tables: dict[str, tuple[int, int]]
    groups: list[dict[str, Any]]


class _Model:
    """A model and its optimizer, by the names of the parameters.

    Attributes:
        model: without ``DistributedDataParallel``.
        params: the optimizer's parameters.
        tables: those of them that are sharded, and other names of these.
    """

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer = optimizer
        for name, module in self.model.named_modules():
            if isinstance(module, Vocabulary):
                contract = "a model must not contain a vocabulary that ranks share to be saved"
                remedy = "Keep it outside, and save the state_dict() of each rank by itself"
                raise InputError(sentence(contract, repr(name), remedy))
        sharded = {
            id(table.weight): table
            for module in self.model.modules()
            if (table := table_of(module)) is not None
        }
        self.tables: dict[str, Table] = {}
        names: dict[int, str] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), name)
            if id(param) in sharded:
                self.tables[name] = sharded[id(param)]
        self.params: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    contract = "the parameters of the optimizer must be those of the model"
                    raise InputError(sentence(contract, f"another, of shape {tuple(param.shape)}"))
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
        for name, tensor in self.model.state_dict().items():
            found[f"model.{name}"] = as_stored(self.tables.get(name), tensor, copy=copy)
        for name, param in self.params.items():
            table = self.tables.get(name)
            if table is None or table.is_here:
                for key, value in state.get(param, {}).items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    found[f"state.{name}.{key}"] = as_stored(table, tensor, copy=copy)
        found = {key: value for key, value in found.items() if value is not None}
        groups = deepcopy(self.groups()) if copy else self.groups()
        found[_ABOUT] = tuple(_About(self.stored_tables(), groups))
        return found

    def processes(self) -> dict[str, Any]:
        """Which processes save and load together."""
        for table in self.tables.values():
            if table.wire.group is None:
                return {"no_dist": True}
            return {"process_group": table.wire.group}
        return {} if torch.distributed.is_initialized() else {"no_dist": True}

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
                contract = "load: the checkpoint must have all parameters and buffers of the model"
                raise InputError(sentence(contract, f"none for {name!r}"))
            shape = tuple(tensor.shape) if table is None else (table.rows, table.dim)
            there = (each.rows, *each.shape[2:]) if each.is_dealt else tuple(each.shape)
            if shape != there:
                contract = f"load: {name!r} must have the shape of the checkpoint, {there}"
                raise InputError(sentence(contract, shape))

    def loaded_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved param groups, as the optimizer numbers its parameters."""
        mine, theirs = ([group["params"] for group in each] for each in (self.groups(), saved))
        if mine != theirs:
            contract = "load: the optimizer must have the groups of the checkpoint"
            raise InputError(sentence(contract, f"{mine} instead of {theirs}"))
        indices = {name: index for index, name in enumerate(self.params)}
        return [{**group, "params": [indices[n] for n in group["params"]]} for group in saved]

    def take(
        self, own: dict[str, Tensor], read: dict[str, Tensor], groups: list[dict[str, Any]]
    ) -> None:
        """Become what was read. The optimizer first, for it may still refuse."""
        indices = {name: index for index, name in enumerate(self.params)}
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in read.items():
            kind, name, entry = _parted(key)
            if kind == "state":
                state.setdefault(indices[name], {})[entry] = tensor
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        with torch.no_grad():
            for name, tensor in own.items():
                if f"model.{name}" in read:
                    tensor.copy_(read[f"model.{name}"])


def _is_dealt(table: Table) -> bool:
    return table.kind == "rows" and table.wire.world > 1


def _parted(key: str) -> tuple[str, str, str]:
    """Whether an entry is the model's or of an optimizer's state, whose, and which."""
    kind, _, name = key.partition(".")
    if kind == "model":
        return kind, name, ""
    name, _, entry = name.rpartition(".")
    return kind, name, entry


def _about(path: Path) -> _About:
    """What a checkpoint says about itself."""
    found: dict[str, Any] = {_ABOUT: ()}
    read(found, path, no_dist=True)
    return _About(*found[_ABOUT])


def _stored(path: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tables = _about(path).tables
    found = {}
    for key, each in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata):
            rows, lanes = tables.get(_parted(key)[1], (0, 0))
            found[key] = Stored(each.size, each.properties.dtype, rows, lanes)
    return found
