"""A sharded table, and the tables of one ``shard()`` call."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsestep._torch import is_watched
from sparsestep.distributed._handshake import (
    ExchangeKind,
    Facts,
    PeerStatus,
    Status,
    handshake,
    row_bytes,
)
from sparsestep.distributed.collectives import Collectives, Payload, Room
from sparsestep.distributed.placement import MAX_WORLD_SIZE, EmbeddingModule, Placement, table_label
from sparsestep.distributed.wire import Codec, codec_for
from sparsestep.engines.base import certain
from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.formats import HEADER_BYTES
from sparsestep.memory.mapped_file import copy_rows, file_of, has_mapped_memory, open_file
from sparsestep.nn.embedding import Embedding, EmbeddingBag

Reduction: TypeAlias = Literal["mean", "sum"]
SumOrder: TypeAlias = Literal["fast", "global"]
# Maps the gradients of looked-up rows to gradients of the weight.
RowGradFn: TypeAlias = Callable[[Tensor], Sequence[IndexedGrad]]

NUM_COUNTS = 3  # sent to each rank, per table of a lookup or per gradient
_BLOCK_BYTES = 512  # unit of ``st_blocks``
_INT32_ROWS = 1 << 31  # row numbers of smaller shards are sent as int32


class ShardedTable:
    """A table sharded across ranks."""

    def __init__(
        self,
        index: int,
        module: EmbeddingModule,
        placement: Placement,
        collectives: Collectives,
        *,
        reduce: Reduction,
        order: SumOrder,
    ) -> None:
        self.name: str = placement.name
        self.index: int = index  # among the tables that were sharded together
        self.placement: Placement = placement
        self.collectives: Collectives = collectives
        self.reduce: Reduction = reduce
        self.order: SumOrder = order
        self.codec: Codec | None = None  # None: rows are sent unchanged
        self.has_rows: bool = placement.has_rows(collectives.rank)
        # The distance in the table between adjacent local rows.
        self.row_stride: int = placement.row_stride(collectives.world_size)
        self.rows: int = module.num_embeddings
        self.id_dtype: torch.dtype = self._id_dtype()
        self.dim: int = module.embedding_dim
        # This rank's shard. Round-robin shards have equal lengths: the last row may be padding.
        self.weight: Tensor = module.weight
        self.is_bag: bool = isinstance(module, nn.EmbeddingBag)
        self.mode: str = getattr(module, "mode", "sum")
        self.padding_idx: int | None = module.padding_idx
        self.scale_grad_by_freq: bool = bool(module.scale_grad_by_freq)
        self.spec: Any = _shape_only_module(module, self.name)  # of the whole table
        self.local_weight: Tensor = module.weight.detach()  # the shard, before the module has it
        self.local: Embedding | EmbeddingBag | None = None  # looks up rows of the shard
        self.new_file: str | None = None  # path of a file created for the shard
        self._has_max_norm = module.max_norm is not None

    @property
    def merges_ids(self) -> bool:
        """Whether each id of a lookup is requested once."""
        may_merge = self.order == "fast" and self.mode != "max" and not self.scale_grad_by_freq
        return may_merge and self.placement.is_sharded

    def _id_dtype(self) -> torch.dtype:
        max_local_rows = -(-self.rows // self.row_stride)
        return torch.int32 if max_local_rows < _INT32_ROWS else torch.int64

    @property
    def wire_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return self.dim * self.weight.itemsize if self.codec is None else self.placement.wire_bytes

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.weight.dtype if self.codec is None else torch.uint8

    def encode(self, rows: Tensor, *, is_grad: bool = False) -> Tensor:
        """Encode rows for the wire."""
        codec = self.codec
        return rows.contiguous() if codec is None else codec.encode(rows, is_grad=is_grad)

    def decode(self, received: Tensor) -> Tensor:
        """Decode received rows into a flat tensor."""
        return received if self.codec is None else self.codec.decode(received)

    @property
    def is_plain_read(self) -> bool:
        """Whether a lookup is a plain read: no ``max_norm``, no hooks."""
        if self.mode == "max" or self._has_max_norm or self.local is None:
            return False
        return not is_watched(self.local)

    @property
    def local_padding_idx(self) -> int:
        """The local index of the padding row; -1 if there is none on this rank."""
        if self.padding_idx is None:
            return -1
        ranks = self.collectives
        return self.placement.local_row(self.padding_idx, ranks.rank, ranks.world_size)

    def local_shard(self, whole: Tensor) -> Tensor:
        ranks = self.collectives
        return self.placement.local_shard(whole, ranks.rank, ranks.world_size)

    def check_supported(self, module: EmbeddingModule) -> None:
        weight = module.weight
        who = f"shard: {table_label(self.name)}"
        if has_mapped_memory(weight):
            self._check_file(who)
        if type(weight) is not nn.Parameter or weight.device.type not in ("cpu", "meta"):
            requirement = f"{who} must have an ordinary weight on the CPU"
            raise InputError(message(requirement, f"a {type(weight).__name__} on {weight.device}"))
        if weight.is_meta and weakref.getweakrefs(weight):  # its rows could not be put in its place
            requirement = f"{who} is on meta, so it must not be tracked yet"
            remedy = "Call shard first, then optimizer.track or optimizer_for"
            raise InputError(message(requirement, "a tracked weight", remedy))
        placement, ranks = self.placement, self.collectives
        placement.check_supported(module, who, ranks.world_size)
        if placement.is_sharded and ranks.world_size > 1:
            seed = self.index * MAX_WORLD_SIZE + ranks.rank
            self.codec = codec_for(placement.wire, self.dim, weight.dtype, who, seed)

    def _check_file(self, who: str) -> None:
        file = file_of(self.weight)
        if file is None or file.header.used or file.state_files:
            requirement = f"{who} must be the whole table of storage.mapped, without state"
            got = "a part of it" if file is None else "one that an optimizer has trained"
            raise InputError(message(requirement, got, "Shard it before the first step"))
        if not self.placement.is_sharded and self.collectives.world_size > 1:
            requirement = f"{who} is in a file, so its plan must be 'tables' or 'rows'"
            raise InputError(message(requirement, "'copy'"))

    def init_rows(self, seed: int) -> None:
        """Create the local rows, without changing the module.

        A weight on the ``meta`` device is initialized like torch's, but each rank draws only its
        own rows, so that no rank ever holds the whole table.
        """
        if has_mapped_memory(self.weight):
            self._open_local_file()
            return
        self.local_weight = self.local_shard(self.weight.detach())
        if not self.placement.is_sharded and self.collectives.world_size > 1:
            # Rank 0 broadcasts its values to these copies; the weights keep their own until then.
            mine = torch.empty_like(self.local_weight, memory_format=torch.contiguous_format)
            self.local_weight = mine.copy_(self.local_weight)
        if not self.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(seed + self.collectives.rank)
        shape, dtype = self.local_weight.shape, self.local_weight.dtype
        self.local_weight = torch.empty(shape, dtype=dtype).normal_(generator=generator)
        self.weight = nn.Parameter(self.local_weight, self.weight.requires_grad)
        if self.local_padding_idx >= 0:
            self.local_weight[self.local_padding_idx] = 0

    def _open_local_file(self) -> None:
        """Open the file of the whole table, or this rank's own file of round-robin rows."""
        whole, ranks = self.weight.detach(), self.collectives
        file = file_of(whole)
        assert file is not None
        if self.row_stride == 1:
            self.local_weight = whole if self.has_rows else torch.empty(0, self.dim)
            return
        path = f"{file.path}.{ranks.rank}-of-{ranks.world_size}"
        self.new_file = None if os.path.exists(path) else path
        shape = torch.Size([-(-self.rows // ranks.world_size), self.dim])
        local = open_file(path, shape, whole.dtype, state=file.header.state).tensor()
        if self.new_file and os.stat(file.path).st_blocks * _BLOCK_BYTES > HEADER_BYTES:
            copy_rows(whole[ranks.rank :: ranks.world_size], local)
        self.local_weight = local

    def discard(self) -> None:
        """Remove what :meth:`init_rows` has created."""
        if self.new_file:
            with suppress(OSError):
                os.unlink(self.new_file)

    def prefetch(self, rows: Tensor) -> None:
        """Ask the system to start reading local rows, if they are in a file."""
        file = file_of(self.weight)
        if file is not None and len(rows):
            file.prefetch(rows.long().contiguous())

    def build_local(self, module: Any) -> None:
        padding = self.local_padding_idx
        options: dict[str, Any] = {
            "padding_idx": None if padding < 0 else padding,
            "max_norm": module.max_norm,
            "norm_type": module.norm_type,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "_weight": self.local_weight,
        }
        if self.is_bag:
            # Owners return sums. The requester divides: only it knows the bag's length.
            options["mode"] = "max" if self.mode == "max" else "sum"
            options["include_last_offset"] = True
        cls: Any = EmbeddingBag if self.is_bag else Embedding
        local: Embedding | EmbeddingBag = cls(*self.local_weight.shape, **options)
        local.weight = self.weight
        local.name = self.name
        self.local = local

    def fill_meta_weight(self, module: Any) -> None:
        """Move the local rows into a weight on ``meta``: optimizers that hold it keep it."""
        if module.weight.is_meta:
            torch.utils.swap_tensors(module.weight, self.weight)
        assert self.local is not None
        self.weight = self.local.weight = module.weight

    def keep_local_shard(self) -> None:
        self.weight.grad = None
        self.weight.data = self.local_weight

    def set_num_rows(self, rows: int) -> None:
        """Record that the table has grown; the weight already has its new local rows."""
        self.rows, self.local_weight = rows, self.weight.detach()
        self.id_dtype = self._id_dtype()
        self.spec.weight = self.spec.weight[:1, :1].expand(rows, self.dim)

    def lookup(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Tensor:
        """Look up a row per bag in the local module; without ``lengths``, each id is a bag."""
        local: Any = self.local
        if not self.is_bag:
            rows: Tensor = local(ids)
        elif lengths is None:
            weights = None if weights is None else weights.unsqueeze(1)
            rows = local(ids.unsqueeze(1), None, weights)
        else:
            rows = local(ids, offsets_of(lengths), weights)
        return rows

    def catch_up(self, rows: Tensor) -> None:
        """Catch up deferred rows of a replicated table that other ranks have read."""
        assert self.local is not None
        if is_watched(self.local):
            self.lookup(rows, None, None)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets of bags, including the end of the last one."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _shape_only_module(module: EmbeddingModule, name: str) -> Any:
    """Return an object with the options and shape of a table, but no rows."""
    cls = next(base for base in (nn.Embedding, nn.EmbeddingBag) if isinstance(module, base))
    weight = torch.empty(1, dtype=module.weight.dtype)
    return type(cls.__name__, (SimpleNamespace,), {})(
        name=getattr(module, "name", "") or name,
        weight=weight.expand(module.num_embeddings, module.embedding_dim),
        mode=getattr(module, "mode", "sum"),
        include_last_offset=getattr(module, "include_last_offset", False),
        scale_grad_by_freq=module.scale_grad_by_freq,
        padding_idx=module.padding_idx,
    )


@dataclass(eq=False)  # a key of dicts, with weak references
class LookupHandle:
    """The requester's handle of one lookup; the autograd graph keeps it alive."""

    sequence: int  # the same on all ranks
    table: ShardedTable
    num_bags: int
    bags_per_rank: Tensor
    inverse: Tensor | None  # of deduplicated ids
    grad_fn: RowGradFn | None = None  # of a replicated table


class ServedLookup(NamedTuple):
    """A lookup in one table, on the rank that owns the rows."""

    table: ShardedTable
    grad_fn: RowGradFn | None  # None: replicated, each rank has its own
    bags_per_rank: Tensor


_indices = itertools.count()
_num_groups: Counter[str] = Counter()  # by the name of their process group


class TableGroup:
    """The tables of one ``shard()`` call, and which of their lookups may still get a gradient."""

    def __init__(
        self, collectives: Collectives, tables: Sequence[ShardedTable], max_tables: int
    ) -> None:
        self.index: int = next(_indices)  # in the order in which groups were made
        # The same on every rank, even if some have also called shard() with other groups.
        group = collectives.group
        name = "" if group is None else str(group.group_name)
        self.key: tuple[str, int] = (name, _num_groups[name])
        _num_groups[name] += 1
        self.collectives: Collectives = collectives
        self.tables: Sequence[ShardedTable] = tables
        self.num_counts: int = NUM_COUNTS * max_tables  # per rank, at the start of an exchange
        self.sequence: int = 0  # number of lookups so far; the next handle gets it
        # This rank's lookups whose gradient may still come, and the lookups that it has served.
        self.pending: weakref.WeakValueDictionary[int, LookupHandle] = weakref.WeakValueDictionary()
        self.served: dict[int, ServedLookup] = {}
        # Room for the next payload, by the kind of the exchange before it: a training loop repeats
        # its exchanges. Ranks may run different code, but they agree on that kind.
        self._rooms: dict[tuple[int, ...], Room] = {}
        self._last: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()

    def status(self, operation: ExchangeKind, table: ShardedTable | None = None) -> Status:
        index = -1 if table is None else table.index
        return Status(operation, index, self.sequence, min(self.pending, default=self.sequence))

    def new_counts(self) -> Tensor:
        return torch.zeros(self.collectives.world_size, self.num_counts, dtype=torch.int64)

    def handshake(
        self,
        status: Status,
        counts: Tensor | None,
        error: BaseException | None = None,
        facts: Facts | None = None,
        payload: Payload | None = None,
    ) -> PeerStatus:
        """Start an exchange, and drop served lookups that no rank can send a gradient for."""
        counts = certain(self.new_counts) if counts is None else counts
        names = [table.name for table in self.tables]
        room = self._rooms.get(self._last)
        peers = handshake(self.collectives, status, counts, names, error, facts, payload, room)
        has_value = any(peers["value"])
        self._before = self._last
        self._last = (status.operation, status.table, status.num_tables, has_value)
        oldest = min(peers["oldest_pending"])
        for sequence in [each for each in self.served if each < oldest]:
            del self.served[sequence]
        return peers

    def expect(self, outgoing: Tensor, incoming: Tensor, max_bytes: int) -> None:
        """Make room for this many bytes per rank in the next exchange at this place of the loop.

        All ranks call it after the same handshakes, with the same ``max_bytes``.
        """
        size = row_bytes(self.num_counts)
        if (empty := certain(lambda: self.collectives.room(size, max_bytes))) is None:
            self._rooms.pop(self._before, None)
            return
        room = self._rooms.get(self._before, empty)
        self._rooms[self._before] = certain(lambda: room.after(outgoing, incoming))

    def exchange_counts(
        self,
        operation: ExchangeKind,
        table: ShardedTable,
        counts: Tensor | None = None,
        error: BaseException | None = None,
        max_bytes: int = 0,
    ) -> PeerStatus:
        """Start an exchange other than a lookup, with one number for each rank."""
        status, rows = self.status(operation, table), None
        status.max_bytes = max_bytes
        if counts is not None:
            rows = certain(self.new_counts)
            certain(lambda: rows[:, 0].copy_(counts))
        return self.handshake(status, rows, error)
