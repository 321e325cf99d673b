"""shard: the tables of a model, divided among the ranks.

Sharded embeddings are the same objects, with another ``forward``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsestep._native import ext
from sparsestep._process import uninterrupted
from sparsestep._torch import ignored_by_ddp, own_parameters, plain_results
from sparsestep.distributed._handshake import compare_facts
from sparsestep.distributed._hosts import HostCollectives, host_name
from sparsestep.distributed._requests import (
    LookupRequest,
    TableRequests,
    dynamic_request,
    lookup_request,
    lookup_requests,
)
from sparsestep.distributed._table import Reduction, ShardedTable, SumOrder, TableGroup
from sparsestep.distributed.collectives import Caught, Collectives, Topology, new_group
from sparsestep.distributed.grads import ShardedGradSource
from sparsestep.distributed.lockstep import take_prefetched, use_hosts
from sparsestep.distributed.lookup import sharded_lookup
from sparsestep.distributed.placement import ByRow, Placement, table_label
from sparsestep.distributed.plan import Plan, TableSize, by_table, choose_placements
from sparsestep.distributed.vocabulary import share_vocabulary
from sparsestep.distributed.wire import WireFormat, check_wire
from sparsestep.engines.base import certain
from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import has_mapped_memory
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.fuse import reason_not_fusible
from sparsestep.nn.interop import excluded_from_compile
from sparsestep.nn.ngram import NgramEmbedding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Options of modules that must be the same on all ranks.
_OPTIONS = (
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "include_last_offset",
    "orders",
    "heads",
    "combine",
    "seed",
)
_SAME_ARGUMENTS = "shard: all ranks must shard the same tables with the same arguments"


class ShardedModule:
    """Mixin of all sharded modules."""

    sharding: TableGroup  # the tables that were sharded together
    looked_up_by: Sequence[nn.Module] = ()  # the local modules, which ``optimizer.track`` watches
    num_tables: int = 1  # that a call looks up
    call_key: tuple[tuple[str, int], int]  # the same for the same module of other ranks

    def lookup_requests(self, *arguments: Any) -> list[LookupRequest]:
        """The requests of a call; raises if its arguments are invalid."""
        raise NotImplementedError

    def _lookup(self, first: ShardedTable, *arguments: Any) -> list[Tensor]:
        def make_requests() -> TableRequests:
            prefetched = take_prefetched(self, arguments)
            return prefetched or TableRequests(self.lookup_requests(*arguments))

        return sharded_lookup(self.sharding, first, make_requests)

    def __reduce_ex__(self, protocol: Any) -> Any:
        requirement = "a sharded table cannot be copied or pickled: other ranks hold parts of it"
        remedy = "Copy the model before shard, or use sparsestep.distributed.save"
        raise InputError(f"{requirement}. {remedy}.")


class RowsOfRank(Tensor):
    """A shard in a state dict: an ordinary tensor, but ``torch.distributed.checkpoint`` refuses it.

    That would keep the rows of one rank, and load them on all.
    """

    __torch_function__ = plain_results

    def __create_write_items__(self, name: str, tensor: Tensor) -> Any:
        requirement = "torch.distributed.checkpoint must get tensors that are the same on all ranks"
        remedy = "Use sparsestep.distributed.save and load"
        # Not a ValueError: torch replaces those by another.
        raise NotImplementedError(message(requirement, f"a shard in {name!r}", remedy))

    def __create_chunk_list__(self) -> Any:
        self.__create_write_items__("state_dict()", self)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class ShardedEmbedding(ShardedModule):
    """Mixin of sharded tables."""

    sharded_table: ShardedTable

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        table = self.sharded_table
        if table.placement.is_sharded and table.collectives.world_size > 1 and not keep_vars:
            name = prefix + "weight"
            destination[name] = destination[name].as_subclass(RowsOfRank)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):  # the weight would be another's
            requirement = f"a sharded table must keep its weight, {prefix + 'weight'!r}"
            error_msgs.append(message(requirement, "assign=True", "Load without it"))
            return
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, *lists
        )

    def extra_repr(self) -> str:
        """Torch's, and where the rows are."""
        placement = self.sharded_table.placement
        return f"{super().extra_repr()}, {placement.extra_repr()}"  # type: ignore[misc]

    def lookup_requests(self, *arguments: Any) -> list[LookupRequest]:
        """See :class:`ShardedModule`."""
        return [lookup_request(self.sharded_table, *arguments)]

    @excluded_from_compile
    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Look up rows, wherever they are; all ranks do so at the same time."""
        return self._lookup(self.sharded_table, input, offsets, per_sample_weights)[0]


class ShardedNgramEmbedding(ShardedEmbedding):
    """Mixin of sharded tables of n-grams."""

    def lookup_requests(self, *arguments: Any) -> list[LookupRequest]:
        """See :class:`ShardedModule`."""
        module: Any = self
        return [lookup_request(self.sharded_table, *module.bags(*arguments))]

    @excluded_from_compile
    def forward(self, tokens: Any, document_ids: Any = None) -> Tensor:  # type: ignore[override]
        """Look up n-grams, wherever their rows are; all ranks do so at the same time."""
        module: Any = self
        found: Tensor = self._lookup(self.sharded_table, tokens, document_ids)[0]
        return module.by_position(found, tokens)  # type: ignore[no-any-return]


class ShardedCollection(ShardedModule):
    """Mixin of sharded collections."""

    def lookup_requests(self, *arguments: Any) -> list[LookupRequest]:
        """See :class:`ShardedModule`."""
        collection: Any = self
        split = collection.split_inputs(*arguments)
        pairs = list(zip(split, collection.dynamic_tables(), strict=True))
        if all(vocabulary is None for _, (_, vocabulary) in pairs):
            return lookup_requests([(table.sharded_table, *each) for table, *each in split])
        return [
            lookup_request(table.sharded_table, *each)
            if vocabulary is None
            else dynamic_request(table.sharded_table, vocabulary.local, *each)
            for (table, *each), (_, vocabulary) in pairs
        ]

    def translate(self, *arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Nothing: owners look up ids in their vocabularies."""
        return arguments, options

    @excluded_from_compile
    def forward(self, inputs: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Look up all tables at once; all ranks do so at the same time."""
        collection: Any = self
        first = next(iter(collection.tables.children())).sharded_table
        rows = self._lookup(first, inputs, offsets, per_sample_weights)
        names = collection.names
        return rows if names is None else dict(zip(names, rows, strict=True))


@functools.cache
def _sharded_class(cls: Any, mixin: Any) -> Any:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def sharded_table(module: nn.Module) -> ShardedTable | None:
    """The table of a module, if it is sharded."""
    return module.sharded_table if isinstance(module, ShardedEmbedding) else None


def _convert_table(module: Any, table: ShardedTable, group: TableGroup) -> None:
    table.keep_local_shard()
    mixin = ShardedNgramEmbedding if isinstance(module, NgramEmbedding) else ShardedEmbedding
    _convert(module, mixin, group, table.index, looked_up_by=(table.local,), sharded_table=table)


def _convert_collection(collection: Any, group: TableGroup) -> None:
    first = next(iter(collection.tables.children())).sharded_table
    num_tables = len(collection.tables)
    _convert(collection, ShardedCollection, group, -1 - first.index, num_tables=num_tables)


def _convert(module: Any, mixin: Any, group: TableGroup, key: int, **attributes: Any) -> None:
    vars(module).update(sharding=group, call_key=(group.key, key), **attributes)
    cls: Any = type(module)
    module.__class__ = _sharded_class(cls, mixin)


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, str] = "auto",
    *,
    reduce: Reduction | Mapping[str, Reduction] = "mean",
    order: SumOrder = "fast",
    wire: WireFormat | None = None,
    topology: Topology = "flat",
) -> Plan:
    """Shard the tables of a model across the ranks of a process group.

    All ranks call it with the same model and the same arguments. Every ``nn.Embedding``,
    ``nn.EmbeddingBag``, ``sparsestep.nn.NgramEmbedding`` and
    ``sparsestep.nn.EmbeddingBagCollection`` stays the same object and keeps its weight, which then
    holds only this rank's part. A lookup requests rows from the ranks that own them. The gradient
    is compact, and is exchanged when it is needed: in ``optimizer.step()`` and in
    ``sparsestep.clip_grad_norm_``. Every optimizer of this library updates the local part.
    ``DistributedDataParallel`` ignores sharded tables.

    From then on, all ranks do lookups, clipping and steps together, in the same order. A loss may
    leave out a table on some ranks. A rank without data takes part with empty batches; see
    :func:`lockstep`.

    Args:
        model: the model; may be a single table. For tables on the device ``meta``, each rank
            creates only its own rows, so that no rank ever holds a whole table. A table of
            ``storage.mapped`` with ``"rows"`` gives each rank a file of its own next to it, such
            as ``items.0-of-8``, for its rows and their state.
        mesh: a one-dimensional mesh of ranks; all ranks by default. Without a process group, this
            process alone.
        plan: ``"tables"``, each table whole on one rank; ``"rows"``, row ``i`` on rank
            ``i % world_size``; ``"copy"``, whole on every rank; or a dict of these by table name,
            as in ``model.named_modules()``, or its last part. With ``"auto"``, and for tables that
            the dict does not name, it is chosen by size.
        reduce: whether the gradient of a table is the mean over ranks, as in
            ``DistributedDataParallel``, or the sum; for all tables, or by name.
        order: ``"global"`` sums the gradient of a row in the order of ranks and samples, which
            gives the bits of a single process with all batches one after the other. ``"fast"``
            sums on each rank first and sends less; the last digit may differ.
        wire: how rows and gradients of tables that are not copied are sent: unchanged, as
            ``"bf16"``, two bytes per element, or as ``"int8"``, one byte per element and four per
            row. Rows are rounded to the nearest, gradients at random, so that they are right on
            average. Tables and their state stay as they are.
        topology: ``"flat"``, every rank has a connection to every other; or ``"hosts"``, one rank
            of each host exchanges for all of them, with fewer connections and the same results.

    Returns:
        The plan. Print it to see where each table is, and why.

    Raises:
        InputError: a table cannot be sharded, there is no table of a name, or ranks pass different
            tables or arguments. Every rank raises, and nothing has changed on any.

    Example:
        >>> import torch, sparsestep
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1))
        >>> plan = shard(model, plan="rows")  # here with a single process
        >>> plan["0"].kind
        'rows'
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> model(torch.tensor([[3, 1, 3]])).sum().backward()
        >>> optimizer.step()
    """

    def shard_together() -> Plan:
        collectives = _new_collectives(mesh, topology)
        sharding: _Sharding | None = None
        facts: dict[str, str] = {}
        with Caught() as caught:
            sharding = _Sharding(model, collectives, plan, reduce, order, wire)
            facts = sharding.facts()
        try:
            compare_facts(collectives, facts, _SAME_ARGUMENTS, caught.error)
        except BaseException:
            for table in () if sharding is None else sharding.tables:
                table.discard()
            raise
        assert sharding is not None
        sharding.commit()
        return Plan(sharding.placements, collectives.world_size, tables=sharding.tables)

    # A rank that stops in the middle of an exchange keeps the others waiting.
    return uninterrupted(shard_together)


class _Sharding:
    """A model that is about to be sharded: everything that depends on this rank alone is done."""

    def __init__(
        self,
        model: nn.Module,
        collectives: Collectives,
        plan: Any,
        reduce: Any,
        order: Any,
        wire: Any,
    ) -> None:
        if ext is None and collectives.world_size > 1:
            requirement = "shard: several ranks need the compiled extension of sparsestep"
            raise InputError(message(requirement, "an installation without it"))
        self._model, self._collectives, self._order, self._wire = model, collectives, order, wire
        self._modules = _find_tables(model)
        sizes = [
            TableSize(name, each.num_embeddings, each.embedding_dim, each.weight.itemsize)
            for name, each in self._modules.items()
        ]
        check_wire(wire)
        self.placements: list[Placement] = choose_placements(
            sizes, collectives.world_size, plan, wire
        )
        self._collections = {
            name: each
            for name, each in model.named_modules()
            if isinstance(each, EmbeddingBagCollection)
        }
        self._vocabularies = self._find_vocabularies()
        if not isinstance(order, str) or order not in ("fast", "global"):
            raise InputError(message("shard: order must be one of fast, global", repr(order)))
        if wire is not None and order == "global":
            requirement = "shard: order='global' gives the bits of one process: wire must be None"
            raise InputError(message(requirement, repr(wire)))
        reductions = _resolve_reduce(list(self._modules), reduce)
        self.tables: list[ShardedTable] = []
        for placement, module in zip(self.placements, self._modules.values(), strict=True):
            options: Any = {"reduce": reductions[placement.name], "order": order}
            table = ShardedTable(len(self.tables), module, placement, collectives, **options)
            table.check_supported(module)
            self.tables.append(table)
        _check_tied_weights(model, self.tables)
        try:
            self._first_with_weight = self._init_rows()
            for table, module in zip(self.tables, self._modules.values(), strict=True):
                table.build_local(module)
        except BaseException:
            for table in self.tables:
                table.discard()
            raise

    def _find_vocabularies(self) -> dict[Any, list[Any]]:
        """The vocabularies of collections with their tables, which are assigned by rows."""
        found: dict[Any, list[Any]] = {}
        names = list(self._modules)
        modules = list(self._modules.values())
        for table, vocabulary in (
            pair for each in self._collections.values() for pair in each.dynamic_tables()
        ):
            if vocabulary is None:
                continue
            index = next(n for n, each in enumerate(modules) if each is table)
            old, who = self.placements[index], f"shard: {table_label(names[index])}"
            if not isinstance(old, ByRow):
                if old.why == "your plan":
                    requirement = f"{who} has a vocabulary, so its plan must be 'rows'"
                    raise InputError(message(requirement, repr(old.kind)))
                why = "has a vocabulary"
                self.placements[index] = ByRow(old.name, old.rows, old.dim, old.item, why, old.wire)
            if table.padding_idx is not None:
                requirement = f"{who} has a vocabulary, so padding_idx must be None"
                raise InputError(message(requirement, table.padding_idx))
            tables = found.setdefault(vocabulary, [])
            if not any(each is table for each in tables):
                tables.append(table)
        for vocabulary in found:
            if vocabulary.attached or vocabulary.used > vocabulary.options.shared:
                requirement = "shard: a vocabulary must be new, without ids and attached tables"
                remedy = "Shard the model first, then attach tables and load a checkpoint"
                raise InputError(message(requirement, "one that was used", remedy))
            if vocabulary.strings is not None:
                requirement = "shard: a vocabulary must have keep_strings=False: ranks send ids"
                raise InputError(message(requirement, "True", "Use hash_strings"))
            fewest = vocabulary.rows // self._collectives.world_size
            if vocabulary.options.shared > fewest:
                requirement = f"shard: shared must be at most the rows of a rank, {fewest}"
                raise InputError(message(requirement, vocabulary.options.shared))
        return found

    def _init_rows(self) -> list[int]:
        """Make this rank's rows; for each table, the first one that has the same weight."""
        first: dict[int, ShardedTable] = {}
        indices = []
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            same = first.setdefault(id(module.weight), table)
            indices.append(same.index)
            if same is table:
                seed = torch.initial_seed() + self._collectives.world_size * table.index
                table.init_rows(seed)
            else:
                table.weight, table.local_weight = same.weight, same.local_weight
        return indices

    def facts(self) -> dict[str, str]:
        facts = {"tables": ", ".join(map(repr, self._modules)), "order": self._order}
        facts["wire"] = str(self._wire)
        for table, module, first in zip(
            self.tables, self._modules.values(), self._first_with_weight, strict=True
        ):
            of = f"of {table_label(table.name)}"
            facts[f"module {of}"] = "EmbeddingBag" if table.is_bag else "Embedding"
            facts[f"shape {of}"] = f"{table.rows} x {table.dim}"
            facts[f"dtype {of}"] = str(table.weight.dtype)
            facts[f"plan {of}"] = repr(table.placement.kind)
            facts[f"reduce {of}"] = table.reduce
            facts[f"weight {of}"] = f"that of {self.tables[first].name!r}"
            for option in _OPTIONS:
                facts[f"{option} {of}"] = str(getattr(module, option, None))
            facts[f"requires_grad {of}"] = str(table.weight.requires_grad)
            if table.row_stride > 1 and has_mapped_memory(table.weight):
                facts[f"file {of}"] = "new" if table.new_file else "one that exists"
        for name, each in self._collections.items():
            names = ", ".join(key for key, _ in each.tables.named_children())
            facts[f"tables of collection {name!r}"] = names
            for number, (_, vocabulary) in enumerate(each.dynamic_tables()):
                if vocabulary is not None:
                    of = f"of the vocabulary of table {number} in {name!r}"
                    facts[f"options {of}"] = str(vocabulary.options)
                    facts[f"number {of}"] = str(list(self._vocabularies).index(vocabulary))
        return facts

    def commit(self) -> None:
        ranks = self._collectives
        for table, first in zip(self.tables, self._first_with_weight, strict=True):
            is_replicated = not table.placement.is_sharded and ranks.world_size > 1
            if is_replicated and first == table.index:
                dist.broadcast(table.local_weight, group_src=0, group=ranks.group)
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            certain(partial(table.fill_meta_weight, module))
        widths = [len(each.tables) for each in self._collections.values()]
        max_tables = max([len(self.tables), *widths])
        group = certain(partial(ShardedGradSource, ranks, self.tables, max_tables))
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            certain(partial(_convert_table, module, table, group))
        for collection in self._collections.values():
            certain(partial(_convert_collection, collection, group))
        for vocabulary, vocabulary_tables in self._vocabularies.items():
            share_vocabulary(vocabulary, vocabulary_tables)
        certain(partial(_exclude_from_ddp, self._model, self.tables))


def _new_collectives(mesh: DeviceMesh | None, topology: Any) -> Collectives:
    """Those of a mesh, or of a separate group: our exchanges and DDP's do not wait for each other.

    All ranks raise if they pass different topologies, which make different groups.
    """
    error: InputError | None = None
    if not isinstance(topology, str) or topology not in ("flat", "hosts"):
        error = InputError(message("shard: topology must be one of flat, hosts", repr(topology)))
    group = _process_group(mesh)
    if group is None:
        if error is not None:
            raise error
        return Collectives(None)
    if topology == "hosts" and dist.get_world_size(group) < dist.get_world_size():
        requirement = "shard: topology='hosts' is for all ranks"
        error = InputError(message(requirement, "a mesh of some", "Use topology='flat'"))
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, (str(topology), host_name()), group=group)
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(others):
        if other != others[0][0]:
            got = f"topology: {others[0][0]} on rank 0, {other} on rank {rank}"
            raise InputError(message(_SAME_ARGUMENTS, got, "Nothing has changed on any rank"))
    hosts = [host for _, host in others] if topology == "hosts" else []
    if len(others) == dist.get_world_size():  # lockstep is for all ranks
        use_hosts(hosts)
    if hosts:
        return HostCollectives(group, hosts)
    return Collectives(new_group() if mesh is None else group)


def _process_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The group of a mesh, or the default one."""
    if mesh is None:
        is_initialized = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if is_initialized else None
    if not hasattr(mesh, "get_group"):
        requirement = "shard: mesh must be a torch.distributed.device_mesh.DeviceMesh"
        raise InputError(message(requirement, f"a {type(mesh).__name__}"))
    if mesh.ndim != 1:
        requirement = "shard: mesh must have one dim"
        remedy = "Select one of them: mesh['name']"
        raise InputError(message(requirement, f"a mesh of shape {tuple(mesh.shape)}", remedy))
    return mesh.get_group()


def _find_tables(model: nn.Module) -> dict[str, Any]:
    """The tables of a model by name; raises if one cannot be sharded."""
    given: Any = model
    if not isinstance(given, nn.Module):
        requirement = "shard: the first argument must be a model, an nn.Module"
        raise InputError(message(requirement, f"a {type(given).__name__}"))
    found = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    if not found:
        requirement = "shard: the model must contain an nn.Embedding or nn.EmbeddingBag"
        raise InputError(message(requirement, f"a {type(model).__name__} without one"))
    for name, each in found.items():
        reason = None if isinstance(each, NgramEmbedding) else reason_not_fusible(each)
        if isinstance(each, ShardedModule):
            reason = "it is already sharded"
        if reason is not None:
            requirement = f"shard: {table_label(name)} must be an ordinary table"
            raise InputError(message(requirement, f"a {type(each).__name__}: {reason}"))
    return found


def _resolve_reduce(names: Sequence[str], given: Any) -> dict[str, Reduction]:
    found = dict.fromkeys(names, "mean") | by_table(given, names, "shard: reduce")
    for name, how in found.items():
        if not isinstance(how, str) or how not in ("mean", "sum"):
            requirement = "shard: reduce must be mean or sum, for all tables or by table name"
            got = f"{how!r} for {name!r}" if isinstance(given, Mapping) else repr(how)
            raise InputError(message(requirement, got))
    return found


def _check_tied_weights(model: nn.Module, tables: Sequence[ShardedTable]) -> None:
    """Raise if other modules read the weight of a table as well."""
    by_weight: dict[int, ShardedTable] = {}
    for table in tables:
        first = by_weight.setdefault(id(table.weight), table)
        if first.placement.describe() != table.placement.describe():
            both = f"{first.name!r} and {table.name!r}"
            requirement = f"shard: {both} share a weight, so their plan must be the same"
            kinds = f"{first.placement.kind!r} and {table.placement.kind!r}"
            raise InputError(message(requirement, kinds))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for param in own_parameters(module).values():
            if param is not None and id(param) in by_weight:
                table_name = by_weight[id(param)].name
                requirement = f"shard: only tables may use the weight of {table_name!r}"
                raise InputError(message(requirement, f"{name!r}, which uses it, too"))


def _exclude_from_ddp(model: nn.Module, tables: Sequence[ShardedTable]) -> None:
    weights = {id(table.weight) for table in tables}
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in weights]
    ignored_by_ddp(model, names)
