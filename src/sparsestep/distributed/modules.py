"""Embeddings whose lookups are exchanges: the same objects, with another ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from sparsestep.distributed import ahead
from sparsestep.distributed._table import Table
from sparsestep.distributed.exchange import Exchange
from sparsestep.distributed.requests import Request, request
from sparsestep.errors import InputError
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.interop import outside_graphs


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
        contract = "a sharded table cannot be copied or pickled: other ranks hold parts of it"
        remedy = "Copy the model before shard, or use sparsestep.distributed.save"
        raise InputError(f"{contract}. {remedy}.")


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
