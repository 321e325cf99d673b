"""A sharded table: which of its rows are where, and the ordinary module that looks them up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sparsestep._torch import is_watched
from sparsestep.distributed.collectives import Wire
from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import has_mapped_memory
from sparsestep.nn.bag import EmbeddingBag
from sparsestep.nn.embedding import Embedding

Kind: TypeAlias = Literal["tables", "rows", "copy"]
Reduce: TypeAlias = Literal["mean", "sum"]
Order: TypeAlias = Literal["fast", "global"]
Module: TypeAlias = nn.Embedding | nn.EmbeddingBag

_SMALL_ROWS = 1 << 31  # fewer rows than that are sent as int32


class Table:
    """A table of which each rank has a part.

    Attributes:
        name: what the plan and messages call it.
        index: its number among the tables that were sharded together.
        kind: ``"tables"``, ``"rows"`` or ``"copy"``.
        owner: the rank that has it, for ``"tables"``.
        rows: how many it has in all.
        dim: how long a row is.
        weight: the part that is here. Of ``"rows"`` every rank has equally many: where they do not
            divide, the last one of some ranks is no row of the table.
        local: the ordinary module that looks up rows of that part.
        whole: what checks of ids look at; it has the shape of the whole and no memory.
    """

    def __init__(
        self,
        name: str,
        index: int,
        module: Module,
        wire: Wire,
        *,
        kind: Kind,
        owner: int,
        reduce: Reduce,
        order: Order,
    ) -> None:
        self.name: str = name
        self.index: int = index
        self.wire: Wire = wire
        self.kind: Kind = kind
        self.owner: int = owner
        self.reduce: Reduce = reduce
        self.order: Order = order
        self.rows: int = module.num_embeddings
        self.dim: int = module.embedding_dim
        self.weight: Tensor = module.weight
        self.is_bag: bool = isinstance(module, nn.EmbeddingBag)
        self.mode: str = getattr(module, "mode", "sum")
        self.padding: int | None = module.padding_idx
        self.by_frequency: bool = bool(module.scale_grad_by_freq)
        self.whole: Any = _whole(module, name)
        self.here: Tensor = module.weight.detach()
        self.local: Embedding | EmbeddingBag | None = None
        self._is_simple: bool = self.mode != "max" and module.max_norm is None

    @property
    def is_here(self) -> bool:
        """Whether this rank has rows of it."""
        return self.kind != "tables" or self.owner == self.wire.rank

    @property
    def id_dtype(self) -> torch.dtype:
        """What ids are sent as."""
        count = -(-self.rows // self.wire.world) if self.kind == "rows" else self.rows
        return torch.int32 if count < _SMALL_ROWS else torch.int64

    @property
    def row_bytes(self) -> int:
        """What a row has on the wire."""
        return self.dim * self.weight.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether to look up rows is to read them: no norm to see to, nobody who watches."""
        return self._is_simple and self.local is not None and not is_watched(self.local)

    @property
    def padding_here(self) -> int:
        """The number here of the row that does not count; -1 where there is none."""
        padding = self.padding
        if padding is None or not self.is_here:
            return -1
        if self.kind != "rows":
            return padding
        return padding // self.wire.world if self._has(padding) else -1

    def make_rows(self, seed: int) -> None:
        """Make the rows that are here, without changing the module.

        A weight on the device ``meta`` has none: they are drawn as torch draws them, but each rank
        draws its own, so no rank ever has the whole of a table.
        """
        self.here = part_here(self, self.weight.detach())
        if self.kind == "copy" and self.wire.world > 1:
            # Rank 0 sends its values; until all ranks have them, the weight keeps its own.
            self.here = torch.empty_like(self.here, memory_format=torch.contiguous_format).copy_(
                self.here
            )
        if not self.weight.is_meta:
            return
        draw = torch.Generator().manual_seed(seed + self.wire.rank)
        self.here = torch.empty(self.here.shape, dtype=self.here.dtype).normal_(generator=draw)
        self.weight = nn.Parameter(self.here, self.weight.requires_grad)
        if self.padding_here >= 0:
            self.here[self.padding_here] = 0

    def _has(self, row: int) -> bool:
        return row % self.wire.world == self.wire.rank

    def build_local(self, module: Any) -> None:
        """Make the module that looks up rows of the part that is here."""
        options: dict[str, Any] = {
            "padding_idx": None if self.padding_here < 0 else self.padding_here,
            "max_norm": module.max_norm,
            "norm_type": module.norm_type,
            "scale_grad_by_freq": self.by_frequency,
            "_weight": self.here,
        }
        if self.is_bag:
            # A mean is a sum here, of which who asks makes the mean: it has the whole bag.
            options["mode"] = "max" if self.mode == "max" else "sum"
            options["include_last_offset"] = True
        rows, dim = self.here.shape
        made: Any = EmbeddingBag if self.is_bag else Embedding
        self.local = made(rows, dim, **options)
        assert self.local is not None
        self.local.weight = self.weight
        self.local.name = self.name

    def take_over(self, module: Any) -> None:
        """Keep only the part that is here."""
        self.weight.grad = None
        self.weight.data = self.here
        if module.weight is not self.weight:
            module.weight = self.weight

    def grow(self, rows: int) -> None:
        """Say that there are more rows; the weight has those that are here already."""
        self.rows, self.here = rows, self.weight.detach()
        self.whole.weight = self.whole.weight[:1, :1].expand(rows, self.dim)

    def look_up(self, ids: Tensor, lengths: Tensor | None, factors: Tensor | None) -> Tensor:
        """A row for each bag, by the module that has the rows.

        Args:
            ids: numbers of rows here.
            lengths: how many ids each bag has; ``None``: one each.
            factors: one for each id.
        """
        assert self.local is not None
        found: Tensor
        if isinstance(self.local, Embedding):
            found = self.local(ids)
        elif lengths is None:
            weights = None if factors is None else factors.unsqueeze(1)
            found = self.local(ids.unsqueeze(1), None, weights)
        else:
            starts = torch.zeros(len(lengths) + 1, dtype=ids.dtype)
            torch.cumsum(lengths, 0, out=starts[1:])
            found = self.local(ids, starts, factors)
        return found

    def bring_up_to_date(self, rows: Tensor) -> None:
        """Have rows of a copy current that others have read, as ``optimizer.track`` does it."""
        assert self.local is not None
        if is_watched(self.local):
            self.look_up(rows, None, None)


def part_here(table: Table, whole: Tensor) -> Tensor:
    """The part of a tensor with a row for each of a table's that belongs to this rank.

    Of ``"rows"``, row ``i`` lies on rank ``i % world``, as number ``i // world``.
    """
    world, rank = table.wire.world, table.wire.rank
    if table.kind == "copy":
        return whole
    if table.kind == "tables":
        return whole if table.owner == rank else whole.new_empty(0, *whole.shape[1:])
    count = -(-len(whole) // world)
    here = whole.new_zeros(count, *whole.shape[1:])
    dealt = whole[rank::world]
    here[: len(dealt)] = dealt
    return here


def check(table: Table, module: Any) -> None:
    """Refuse what cannot be sharded."""
    weight = module.weight
    who = f"shard: {table.name!r}" if table.name else "shard: the table"
    if has_mapped_memory(weight):
        requirement = f"{who} must be in memory"
        remedy = "Load it into memory (weight.detach().clone()), or train it in one process"
        raise InputError(message(requirement, "a table in a file (storage.mapped)", remedy))
    if type(weight) is not nn.Parameter or weight.device.type not in ("cpu", "meta"):
        requirement = f"{who} must have an ordinary weight on the CPU"
        raise InputError(message(requirement, f"a {type(weight).__name__} on {weight.device}"))
    if table.kind == "copy" and module.max_norm is not None and table.wire.world > 1:
        requirement = (
            f"{who} has max_norm, which modifies rows during the lookup: it cannot be copied"
        )
        raise InputError(message(requirement, "'copy'", "Choose 'tables' or 'rows' for it"))
    if table.kind == "copy" and table.by_frequency and table.wire.world > 1:
        requirement = f"{who} has scale_grad_by_freq, which needs the ids of all ranks in one place"
        raise InputError(message(requirement, "'copy'", "Choose 'tables' or 'rows' for it"))
    if table.kind == "rows" and table.mode == "max":
        requirement = f"{who} has mode='max', for which a bag's rows must be on one rank"
        remedy = "Choose 'tables' or 'copy' for it"
        raise InputError(message(requirement, "'rows'", remedy))


def _whole(module: Module, name: str) -> Any:
    """What has a table's options and shape, but no rows."""
    kind = next(base for base in (nn.Embedding, nn.EmbeddingBag) if isinstance(module, base))
    stand_in = type(kind.__name__, (SimpleNamespace,), {})
    weight = torch.empty(1, dtype=module.weight.dtype)
    return stand_in(
        name=getattr(module, "name", "") or name,
        weight=weight.expand(module.num_embeddings, module.embedding_dim),
        mode=getattr(module, "mode", "sum"),
        include_last_offset=getattr(module, "include_last_offset", False),
        scale_grad_by_freq=module.scale_grad_by_freq,
        padding_idx=module.padding_idx,
    )
