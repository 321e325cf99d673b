"""EmbeddingBagCollection: many tables, one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.types import Device

from sparsestep.errors import InputError, memory_errors, message
from sparsestep.nn.embedding import EmbeddingBag
from sparsestep.nn.fuse import fuse_module, reason_not_fusible
from sparsestep.nn.graph import embed_in_graph, fit_graph
from sparsestep.nn.grow import AnyOptimizer, Init
from sparsestep.nn.interop import excluded_from_compile, replaced_in_graphs
from sparsestep.nn.lookup import Lookup, bag_lookup, embed
from sparsestep.nn.vocabulary import (
    PreparedLookup,
    Vocabulary,
    do_lookups,
    flat_ids,
    prepare_lookups,
)

Sizes = tuple[int, int]
Tables = Sequence[Sizes | torch.nn.EmbeddingBag] | Mapping[str, Sizes | torch.nn.EmbeddingBag]
Each = Sequence[Tensor | None] | Mapping[str, Tensor | None] | Tensor | None
Outputs = list[Tensor] | dict[str, Tensor]


class EmbeddingBagCollection(torch.nn.Module):
    """Tables of different sizes that are looked up together.

    Each table is an ``EmbeddingBag``, typically one per feature of a recommender. One call looks up
    all of them. All ids are checked before the first row is read, and an error names the table.

    The tables are in ``tables``, so the state dict has the keys ``tables.0.weight`` or, with names,
    ``tables.country.weight``. You can also use them one by one. The collection does not call their
    ``forward``, so hooks on a single table do not run.

    Args:
        tables: for each table ``(num_embeddings, embedding_dim)``, or a ``torch.nn.EmbeddingBag``
            whose weight and options are used; in a list, or in a dict with the tables' names.
        mode: ``"sum"``, ``"mean"`` or ``"max"``. This and the following arguments apply to tables
            that are given by size, and mean the same as for ``EmbeddingBag``.
        max_norm: the largest norm of a row; longer rows are rescaled when they are looked up.
        norm_type: the order of that norm.
        scale_grad_by_freq: divide the gradient of an id by its number of occurrences in the call.
        sparse: has no effect; the gradient is always sparse.
        include_last_offset: whether the last offset is the end of the last bag.
        padding_idx: an id that is ignored; its row gets no gradient and starts as zeros.
        device: the device of the weights.
        dtype: the dtype of the weights.
        vocabularies: for tables whose ids may be any integers, a :class:`Vocabulary` by the name
            of the table, or its number in a list. A call looks up ids in all vocabularies, then
            rows in all tables. Tables may share a vocabulary.

    Example:
        Two features with one id each, and a list of bought items:

        >>> import sparsestep
        >>> model = EmbeddingBagCollection(
        ...     {"country": (200, 8), "device": (50, 4), "bought": (10_000, 16)}, mode="sum"
        ... )
        >>> optimizer = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.1)
        >>> found = model(
        ...     {
        ...         "country": torch.tensor([[44], [49], [44]]),
        ...         "device": torch.tensor([[2], [2], [0]]),
        ...         "bought": torch.tensor([812, 77, 9_031]),
        ...     },
        ...     offsets={"bought": torch.tensor([0, 2, 2])},  # the second bag is empty
        ... )
        >>> {name: tuple(rows.shape) for name, rows in found.items()}
        {'country': (3, 8), 'device': (3, 4), 'bought': (3, 16)}
        >>> sum(rows.square().sum() for rows in found.values()).backward()
        >>> optimizer.step()

        A click log has one id for each feature, a column of the batch:

        >>> model = EmbeddingBagCollection([(200, 8), (50, 4)])
        >>> [tuple(rows.shape) for rows in model(torch.tensor([[44, 2], [49, 2], [44, 0]]))]
        [(3, 8), (3, 4)]

        Ids that never stop coming:

        >>> vocabulary = sparsestep.nn.Vocabulary(1000, evict="lru")
        >>> model = EmbeddingBagCollection({"user": (1000, 8)}, vocabularies={"user": vocabulary})
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> model.attach(optimizer)
        >>> found = model({"user": torch.tensor([[10**18], [-7]])})
        >>> vocabulary.as_dict()
        {1000000000000000000: 1, -7: 2}
    """

    def __init__(
        self,
        tables: Tables,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        vocabularies: Mapping[str, Vocabulary] | Mapping[int, Vocabulary] | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "mode": mode,
            "max_norm": max_norm,
            "norm_type": norm_type,
            "scale_grad_by_freq": scale_grad_by_freq,
            "sparse": sparse,
            "include_last_offset": include_last_offset,
            "padding_idx": padding_idx,
            "device": device,
            "dtype": dtype,
        }
        self.names: list[str] | None = None
        if isinstance(tables, Mapping):
            self.names = [_checked_name(name) for name in tables]
            tables = list(tables.values())
        elif not isinstance(tables, Iterable):
            raise _error("tables must be a list or a dict", type(tables).__name__)
        made = [
            _table(place if self.names is None else self.names[place], each, options)
            for place, each in enumerate(tables)
        ]
        self.tables: torch.nn.ModuleList | torch.nn.ModuleDict = (
            torch.nn.ModuleList(made)
            if self.names is None
            else torch.nn.ModuleDict(dict(zip(self.names, made, strict=True)))
        )
        if vocabularies:
            self.vocabularies = torch.nn.ModuleDict(self._checked_vocabularies(vocabularies))
            # Before other hooks, which then see rows.
            self.register_forward_pre_hook(_translate, with_kwargs=True)

    def _checked_vocabularies(self, given: Any) -> dict[str, torch.nn.Module]:
        """Vocabularies by the names of their tables."""
        tables = dict(self._named_tables())
        found: dict[str, torch.nn.Module] = {}
        for key, vocabulary in given.items():
            table: Any = tables.get(str(key))
            if table is None:
                raise _error("vocabularies must have the tables' names as keys", repr(key))
            if not isinstance(vocabulary, Vocabulary) or vocabulary.rows > table.num_embeddings:
                requirement = f"the vocabulary of {str(key)!r} must be a Vocabulary with at most"
                got = getattr(vocabulary, "rows", f"a {type(vocabulary).__name__}")
                raise _error(f"{requirement} {table.num_embeddings} rows", got)
            found[str(key)] = vocabulary
        return found

    def dynamic_tables(self) -> list[tuple[EmbeddingBag, Any]]:
        """Each table with its vocabulary, or ``None``."""
        known: Any = getattr(self, "vocabularies", {})
        return [
            (table, known[name] if name in known else None)  # noqa: SIM401  (no dict)
            for name, table in self._named_tables()
        ]

    def _named_tables(self) -> list[tuple[str, EmbeddingBag]]:
        """Each table with its name; one table may have several names."""
        tables: Any = self.tables
        if isinstance(self.tables, torch.nn.ModuleDict):
            tables = self.tables.values()
        names = self.names or map(str, range(len(tables)))
        return list(zip(names, tables, strict=True))

    def attach(self, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
        """Reset rows of the tables that go to other ids: see ``Vocabulary.attach``.

        Args:
            optimizers: those of this library that train the tables.
            init: fills a tensor of new rows in place; by default from a normal distribution.
        """
        for table, vocabulary in self.dynamic_tables():
            if vocabulary is not None:
                vocabulary.attach(table, *optimizers, init=init)

    @excluded_from_compile
    def translate(
        self, inputs: Each, offsets: Each = None, per_sample_weights: Each = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with rows in place of ids."""
        split = self.split_inputs(inputs, offsets, per_sample_weights)
        vocabularies = [vocabulary for _, vocabulary in self.dynamic_tables()]
        rows: list[Any] = [ids for _, ids, _, _ in split]
        places = [n for n, each in enumerate(vocabularies) if each is not None]
        with memory_errors(), ExitStack() as locks:
            flat = [flat_ids(rows[n]) for n in places]
            for each in dict.fromkeys(vocabularies[n] for n in places):
                locks.enter_context(each.lock)

            def prepare() -> tuple[list[Tensor], list[PreparedLookup]]:
                found, prepared = prepare_lookups([vocabularies[n] for n in places], flat)
                shaped = [
                    each.view(rows[n].shape).to(rows[n].device)
                    for n, each in zip(places, found, strict=True)
                ]
                return shaped, prepared

            for n, each in zip(places, do_lookups(prepare), strict=True):
                rows[n] = each
        begins, weights = ([each[n] for each in split] for n in (2, 3))
        return (rows, begins, weights), {}

    @replaced_in_graphs
    def forward(
        self, inputs: Each, offsets: Each = None, per_sample_weights: Each = None
    ) -> Outputs:
        """Look up all tables.

        Args:
            inputs: ids for each table, 2-D with a bag in each row or 1-D with offsets, in a list or
                a dict like the tables; or one tensor for all tables, ``[batch, tables]`` with one
                id or ``[batch, tables, k]`` with a bag of ``k`` ids for each; or TorchRec's
                ``KeyedJaggedTensor``, which has offsets and weights of its own. Its keys are the
                names of the tables, in any order, or one for each table of a list.
            offsets: for tables with 1-D ids, the start of each bag: a list with ``None`` for the
                other tables, a dict, or a tensor ``[tables, batch]``.
            per_sample_weights: a factor for each id, for tables with mode ``"sum"``: a list or a
                dict as for ``offsets``; if ``inputs`` is one tensor, a tensor of the same shape.

        Returns:
            A row for each bag of each table: a list, or a dict if the tables have names.

        Raises:
            InputError: the ids or offsets of a table are invalid; nothing has changed.
        """
        return self._name_outputs(embed(self._lookups(inputs, offsets, per_sample_weights)))

    def fits_graph(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a graph of torch.compile can have these lookups."""
        return fit_graph(self._lookups(*args, **kwargs))

    def forward_in_graph(self, *args: Any, **kwargs: Any) -> Outputs:
        """Look up all tables as one operation of a graph."""
        return self._name_outputs(embed_in_graph(self._lookups(*args, **kwargs)))

    def _lookups(
        self, inputs: Any, offsets: Any = None, per_sample_weights: Any = None
    ) -> list[Lookup]:
        split = self.split_inputs(inputs, offsets, per_sample_weights)
        return [bag_lookup(*each) for each in split]

    def _name_outputs(self, found: list[Tensor]) -> Outputs:
        return found if self.names is None else dict(zip(self.names, found, strict=True))

    def rows_read(
        self, inputs: Each, offsets: Each = None, per_sample_weights: Each = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """The rows that a call with these arguments reads: a weight and ids for each table.

        ``optimizer.track(model)`` calls this method on every module that has it.

        Example:
            >>> model = EmbeddingBagCollection([(200, 8), (50, 4)])
            >>> for weight, ids in model.rows_read(torch.tensor([[44, 2], [49, 2]])):
            ...     print(tuple(weight.shape), ids.flatten().tolist())
            (200, 8) [44, 49]
            (50, 4) [2, 2]
        """
        for table, ids, _, _ in self.split_inputs(inputs, offsets, per_sample_weights):
            yield table.weight, ids

    def split_inputs(
        self, inputs: Any, offsets: Any, factors: Any
    ) -> list[tuple[EmbeddingBag, Any, Any, Any]]:
        """The table, ids, offsets and factors of each lookup."""
        tables = [table for _, table in self._named_tables()]
        if is_keyed_jagged(inputs):
            inputs, offsets, factors = self._from_jagged(inputs, offsets, factors)
        if isinstance(inputs, Tensor) and not inputs.is_nested:
            begins = [None] * len(self.tables)
            if offsets is not None:
                requirement = "ids in one tensor are bags of equal length: offsets must be None"
                raise _error(requirement, "offsets")
            ids = self._split_columns("inputs", inputs)
            weights = (
                begins if factors is None else self._split_columns("per_sample_weights", factors)
            )
        else:
            ids = self._list_by_table("inputs", inputs, optional=False)
            if isinstance(offsets, Tensor) and offsets.dim() == 2:
                offsets = list(offsets)
            begins = self._list_by_table("offsets", offsets, optional=True)
            weights = self._list_by_table("per_sample_weights", factors, optional=True)
        return list(zip(tables, ids, begins, weights, strict=True))

    def _from_jagged(self, inputs: Any, offsets: Any, factors: Any) -> tuple[Any, Any, Any]:
        """The ids, offsets and weights of a ``KeyedJaggedTensor``, in lists."""
        if offsets is not None or factors is not None:
            requirement = "a KeyedJaggedTensor has its own: offsets and per_sample_weights must be"
            raise _error(f"{requirement} None", "others")
        by_key = inputs.to_dict()
        # Like TorchRec's collections, leave out features without a table.
        known = {key: by_key[key] for key in self.names or by_key if key in by_key}
        parts = self._list_by_table(
            "inputs", known if self.names else list(known.values()), optional=False
        )
        begins = []
        for table, part in zip(self.tables.children(), parts, strict=True):
            ends = part.offsets().to(part.values().dtype)
            begins.append(ends if table.include_last_offset else ends[:-1])
        return [each.values() for each in parts], begins, [each.weights_or_none() for each in parts]

    def _split_columns(self, name: str, tensor: Any) -> list[Any]:
        """One tensor for all tables, table by table."""
        count = len(self.tables)
        if not isinstance(tensor, Tensor) or tensor.dim() not in (2, 3) or tensor.shape[1] != count:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            requirement = f"{name} in one tensor must be [batch, {count}] or [batch, {count}, k]"
            raise _error(requirement, got)
        if tensor.dim() == 2:
            tensor = tensor.unsqueeze(2)
        return list(tensor.movedim(1, 0).contiguous())

    def _list_by_table(self, name: str, given: Any, *, optional: bool) -> list[Any]:
        """The argument of each table, in their order."""
        count = len(self.tables)
        if given is None and optional:
            return [None] * count
        if self.names is not None and isinstance(given, Mapping):
            known = set(self.names)
            unknown = [key for key in given if key not in known]
            missing = [] if optional else [key for key in self.names if key not in given]
            if unknown or missing:
                got = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}"
                raise _error(f"{name} must have the tables' names as keys", got)
            return [given.get(key) for key in self.names]
        if not isinstance(given, list | tuple) or len(given) != count:
            kinds = "a list" if self.names is None else "a list or a dict"
            got = type(given).__name__
            if isinstance(given, list | tuple):
                got = f"{len(given)} of them"
            raise _error(f"{name} must be {kinds} with one for each of {count} tables", got)
        return list(given)


def _translate(collection: Any, arguments: Any, options: Any) -> Any:
    return collection.translate(*arguments, **options)


def is_keyed_jagged(batch: object) -> bool:
    """Whether it is TorchRec's ``KeyedJaggedTensor``, or acts like one."""
    return hasattr(batch, "to_dict") and hasattr(batch, "offset_per_key")


def _checked_name(name: object) -> str:
    taken = isinstance(name, str) and hasattr(torch.nn.ModuleDict, name)
    if not isinstance(name, str) or not name or "." in name or taken:
        requirement = (
            "a table's name must be a string without dots that is not an attribute of nn.ModuleDict"
        )
        raise _error(requirement, repr(name))
    return name


def _table(place: str | int, given: Any, options: dict[str, Any]) -> EmbeddingBag:
    table = given
    if isinstance(given, Sequence) and len(given) == 2:
        table = EmbeddingBag(*given, **options)
    reason = reason_not_fusible(table) if isinstance(table, torch.nn.EmbeddingBag) else None
    if reason is not None or not isinstance(table, torch.nn.EmbeddingBag):
        requirement = f"table {place!r} must be (num_embeddings, embedding_dim) or an EmbeddingBag"
        got = given if isinstance(given, Sequence) else f"a {type(given).__name__}"
        raise _error(requirement, f"{got}: {reason}" if reason else got)
    if not isinstance(table, EmbeddingBag):
        fuse_module(table, str(place))
    named = cast(EmbeddingBag, table)
    if not named.name:
        named.name = str(place)
    return named


def _error(requirement: str, got: object) -> InputError:
    return InputError(f"EmbeddingBagCollection: {message(requirement, got)}")
