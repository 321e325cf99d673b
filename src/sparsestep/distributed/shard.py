"""shard: the tables of a model, divided among the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep._torch import ignored_by_ddp, own_parameters
from sparsestep.distributed import ahead
from sparsestep.distributed._handshake import compare_facts
from sparsestep.distributed._table import Order, Reduce, Table, check
from sparsestep.distributed.collectives import Wire, new_group_like
from sparsestep.distributed.exchange import Exchange
from sparsestep.distributed.plan import Placement, Plan, placed
from sparsestep.distributed.requests import Request, request
from sparsestep.engines.finishing import certain
from sparsestep.errors import InputError, message
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.fuse import why_not
from sparsestep.nn.interop import outside_graphs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class _Sharded:
    """What all sharded modules have.

    Attributes:
        looked_up_by: the modules that read the rows which are here; ``optimizer.track`` watches
            these.
    """

    _exchange: Exchange
    looked_up_by: Sequence[nn.Module]
    _width: int  # how many tables a call looks up
    _number: tuple[int, int]  # the same for the module that it is on other ranks

    def _requests(self, *arguments: Any) -> list[Request]:
        """What a call asks for, or an error that says what is wrong with it."""
        raise NotImplementedError

    def _look_up(self, first: Table, *arguments: Any) -> list[Tensor]:
        sent: ahead.Sent | None = None
        error: Exception | None = None
        try:
            sent = ahead.look_up(self, arguments)
        except Exception as raised:  # while it was sent; the other ranks must be told
            error = raised

        def prepare() -> list[Request]:
            if error is not None:
                raise error
            return self._requests(*arguments)

        return self._exchange.look_up(first, prepare, sent)

    def __reduce_ex__(self, protocol: Any) -> Any:
        requirement = "a sharded table cannot be copied or pickled: other ranks hold parts of it"
        remedy = "Copy the model before shard, or use sparsestep.distributed.save"
        raise InputError(f"{requirement}. {remedy}.")


class _ShardedTable(_Sharded):
    _table: Table

    def extra_repr(self) -> str:
        """Torch's, and where the rows are."""
        table = self._table
        where = f", owner={table.owner}" if table.kind == "tables" else ""
        return f"{super().extra_repr()}, sharded={table.kind!r}{where}"  # type: ignore[misc]

    def _requests(self, *arguments: Any) -> list[Request]:
        return [request(self._table, *arguments)]

    @outside_graphs
    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Look up rows, wherever they are; all ranks do so at the same time."""
        return self._look_up(self._table, input, offsets, per_sample_weights)[0]


class _ShardedCollection(_Sharded):
    def _requests(self, *arguments: Any) -> list[Request]:
        collection: Any = self
        split = collection._split(*arguments)
        return [request(table._table, *each) for table, *each in split]

    @outside_graphs
    def forward(self, inputs: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Look up all tables at once; all ranks do so at the same time."""
        collection: Any = self
        first = next(iter(collection.tables._modules.values()))._table
        found = self._look_up(first, inputs, offsets, per_sample_weights)
        names = collection.names
        return found if names is None else dict(zip(names, found, strict=True))


@functools.cache
def _sharded(kind: Any, how: Any) -> Any:
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (how, kind), names)


def _class(module: nn.Module) -> Any:
    return type(module)


def table_of(module: nn.Module) -> Table | None:
    """The table that a module is, if it is sharded."""
    return module._table if isinstance(module, _ShardedTable) else None


def make_sharded(module: Any, table: Table, exchange: Exchange) -> None:
    """Have a table looked up by an exchange."""
    table.take_over(module)
    assert table.local is not None
    vars(module).update(_table=table, _exchange=exchange, looked_up_by=(table.local,))
    vars(module).update(_width=1, _number=(exchange.index, table.index))
    module.__class__ = _sharded(_class(module), _ShardedTable)


def make_collection_sharded(collection: EmbeddingBagCollection, exchange: Exchange) -> None:
    """Have all tables of a collection looked up by one exchange."""
    first = next(iter(collection.tables.children()))
    vars(collection).update(_exchange=exchange, looked_up_by=())
    vars(collection).update(
        _width=len(collection.tables), _number=(exchange.index, -1 - vars(first)["_table"].index)
    )
    collection.__class__ = _sharded(_class(collection), _ShardedCollection)


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, str] = "auto",
    *,
    reduce: Reduce | Mapping[str, Reduce] = "mean",
    order: Order = "fast",
) -> Plan:
    """Shard the tables of a model across the ranks of a process group.

    All ranks call it with the same model and the same arguments. Every ``nn.Embedding``,
    ``nn.EmbeddingBag`` and ``sparsestep.nn.EmbeddingBagCollection`` stays the same object and keeps
    its weight, which then holds only this rank's part. A lookup requests rows from the ranks that
    own them. The gradient is compact, and is exchanged when it is needed: in ``optimizer.step()``
    and in ``sparsestep.clip_grad_norm_``. Every optimizer of this library updates the local part.
    ``DistributedDataParallel`` ignores sharded tables.

    From then on, all ranks do lookups, clipping and steps together, in the same order. A loss may
    leave out a table on some ranks. A rank without data takes part with empty batches; see
    :func:`lockstep`.

    Args:
        model: the model; may be a single table. For tables on the device ``meta``, each rank
            creates only its own rows, so that no rank ever holds a whole table.
        mesh: a one-dimensional mesh of ranks; all ranks by default. Without a process group, this
            process alone.
        plan: ``"tables"``, each table whole on one rank; ``"rows"``, row ``i`` on rank
            ``i % world``; ``"copy"``, whole on every rank; or a dict of these by table name, as in
            ``model.named_modules()``, or its last part. With ``"auto"``, and for tables that the
            dict does not name, it is chosen by size.
        reduce: whether the gradient of a table is the mean over ranks, as in
            ``DistributedDataParallel``, or the sum; for all tables, or by name.
        order: ``"global"`` sums the gradient of a row in the order of ranks and samples, which
            gives the bits of a single process with all batches one after the other. ``"fast"``
            sums on each rank first and sends less; the last digit may differ.

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
    # A rank that stops in the middle of an exchange keeps the others waiting.
    return uninterrupted(partial(_shard_together, model, mesh, plan, reduce, order))


def _shard_together(
    model: nn.Module, mesh: DeviceMesh | None, plan: Any, reduce: Any, order: Any
) -> Plan:
    wire = Wire(_group(mesh))
    error: BaseException | None = None
    sharding: _Sharding | None = None
    facts: dict[str, str] = {}
    try:
        sharding = _Sharding(model, wire, plan, reduce, order)
        facts = sharding.facts()
    except BaseException as raised:
        error = raised
    requirement = "shard: all ranks must shard the same tables with the same arguments"
    compare_facts(wire, facts, requirement, error)
    assert sharding is not None
    sharding.commit()
    return Plan(sharding.placements, wire.world, tables=sharding.tables)


class _Sharding:
    """A model that is about to be sharded: everything that depends on this rank alone is done.

    Attributes:
        placements: one for each table.
        tables: the tables.
    """

    def __init__(self, model: nn.Module, wire: Wire, plan: Any, reduce: Any, order: Any) -> None:
        self._model, self._wire, self._order = model, wire, order
        self._modules = _tables(model)
        placements = [
            Placement(name, *_sizes(module.weight)) for name, module in self._modules.items()
        ]
        self.placements: list[Placement] = placed(placements, wire.world, plan)
        if not isinstance(order, str) or order not in ("fast", "global"):
            raise InputError(message("shard: order must be one of fast, global", repr(order)))
        reduces = _reduces(list(self._modules), reduce)
        self.tables: list[Table] = []
        for where, module in zip(self.placements, self._modules.values(), strict=True):
            options: Any = {"kind": where.kind, "owner": where.owner, "order": order}
            options["reduce"] = reduces[where.name]
            table = Table(where.name, len(self.tables), module, wire, **options)
            check(table, module)
            self.tables.append(table)
        _check_ties(model, self.tables)
        self._shared = self._make_rows()
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            table.build_local(module)
        self._collections = {
            name: each
            for name, each in model.named_modules()
            if isinstance(each, EmbeddingBagCollection)
        }

    def _make_rows(self) -> list[int]:
        """Make this rank's rows; for each table, the first one that has the same weight."""
        first: dict[int, Table] = {}
        shared = []
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            known = first.setdefault(id(module.weight), table)
            shared.append(known.index)
            if known is table:
                table.make_rows(torch.initial_seed() + self._wire.world * table.index)
            else:
                table.weight, table.here = known.weight, known.here
        return shared

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        facts = {"tables": ", ".join(map(repr, self._modules)), "order": self._order}
        for table, module, first in zip(
            self.tables, self._modules.values(), self._shared, strict=True
        ):
            of = f"of {table.name!r}" if table.name else "of the table"
            facts[f"module {of}"] = "EmbeddingBag" if table.is_bag else "Embedding"
            facts[f"shape {of}"] = f"{table.rows} x {table.dim}"
            facts[f"dtype {of}"] = str(table.weight.dtype)
            facts[f"plan {of}"] = _plan_of(table)
            facts[f"reduce {of}"] = table.reduce
            facts[f"weight {of}"] = f"that of {self.tables[first].name!r}"
            for option in _OPTIONS:
                facts[f"{option} {of}"] = str(getattr(module, option, None))
            facts[f"requires_grad {of}"] = str(table.weight.requires_grad)
        for name, each in self._collections.items():
            facts[f"tables of collection {name!r}"] = ", ".join(each.tables._modules)
        return facts

    def commit(self) -> None:
        """Shard the model, on all ranks at once."""
        for table, first in zip(self.tables, self._shared, strict=True):
            if table.kind == "copy" and self._wire.world > 1 and first == table.index:
                dist.broadcast(table.here, group_src=0, group=self._wire.group)
        widths = [len(each.tables) for each in self._collections.values()]
        most = max([len(self.tables), *widths])
        exchange = certain(partial(Exchange, self._wire, self.tables, most))
        for table, module in zip(self.tables, self._modules.values(), strict=True):
            certain(partial(make_sharded, module, table, exchange))
        for collection in self._collections.values():
            certain(partial(make_collection_sharded, collection, exchange))
        certain(partial(_leave_to_us, self._model, self.tables))


_OPTIONS = (
    *("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
    *("mode", "include_last_offset"),
)


def _plan_of(table: Table) -> str:
    """The plan of a table, for comparison across ranks."""
    return f"{table.kind!r} on rank {table.owner}" if table.kind == "tables" else repr(table.kind)


def _group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """A group of its own: its exchanges and DDP's do not wait for each other."""
    if mesh is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        return new_group_like(None)
    if not hasattr(mesh, "get_group"):
        requirement = "shard: mesh must be a torch.distributed.device_mesh.DeviceMesh"
        raise InputError(message(requirement, f"a {type(mesh).__name__}"))
    if mesh.ndim != 1:
        requirement = "shard: mesh must have one dim"
        remedy = "Select one of them: mesh['name']"
        raise InputError(message(requirement, f"a mesh of shape {tuple(mesh.shape)}", remedy))
    return mesh.get_group()


def _tables(model: nn.Module) -> dict[str, Any]:
    """The tables of a model by name, or an error that says which cannot be sharded."""
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
        reason = "it is already sharded" if hasattr(each, "_exchange") else why_not(each)
        if reason is not None:
            requirement = f"shard: {name!r} must be an ordinary table"
            raise InputError(message(requirement, f"a {type(each).__name__}: {reason}"))
    return found


def _sizes(weight: Tensor) -> tuple[int, int, int]:
    rows, dim = weight.shape
    return rows, dim, weight.dtype.itemsize


_REDUCES: tuple[Reduce, ...] = ("mean", "sum")


def _reduces(names: Sequence[str], given: Any) -> dict[str, Reduce]:
    """How each table's gradient is reduced."""
    found: dict[str, Reduce] = dict.fromkeys(names, "mean")
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name, how in by_name.items():
        matching = [each for each in names if name in (each, each.rpartition(".")[2])]
        requirement = "shard: reduce must be mean or sum, for all tables or by table name"
        known = next((each for each in _REDUCES if isinstance(how, str) and each == how), None)
        if known is None:
            got = f"{how!r} for {name!r}" if isinstance(given, Mapping) else repr(how)
            raise InputError(message(requirement, got))
        if len(matching) != 1:
            tables = f"The tables are {', '.join(map(repr, names))}"
            raise InputError(message(requirement, f"a table {name!r}", tables))
        found[matching[0]] = known
    return found


def _check_ties(model: nn.Module, tables: Sequence[Table]) -> None:
    """Refuse weights that others read as well."""
    known: dict[int, Table] = {}
    for table in tables:
        first = known.setdefault(id(table.weight), table)
        if (first.kind, first.owner) != (table.kind, table.owner):
            both = f"{first.name!r} and {table.name!r}"
            requirement = f"shard: {both} share a weight, so their plan must be the same"
            raise InputError(message(requirement, f"{first.kind!r} and {table.kind!r}"))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for param in own_parameters(module).values():
            if param is not None and id(param) in known:
                table_name = known[id(param)].name
                requirement = f"shard: only tables may use the weight of {table_name!r}"
                raise InputError(message(requirement, f"{name!r}, which uses it, too"))


def _leave_to_us(model: nn.Module, tables: Sequence[Table]) -> None:
    """Have DistributedDataParallel ignore what is sharded."""
    weights = {id(table.weight) for table in tables}
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in weights]
    ignored_by_ddp(model, names)
