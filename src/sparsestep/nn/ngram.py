"""NgramEmbedding: a table whose rows are found by hashing the last tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsestep._native import ext
from sparsestep._torch import cat, dispatch_modes, stack
from sparsestep.errors import InputError, RangeError, message
from sparsestep.memory.tensors import INDEX_DTYPES
from sparsestep.nn.graph import embed_in_graph, fit_graph
from sparsestep.nn.interop import excluded_from_compile, replaced_in_graphs, uses_torch_ops
from sparsestep.nn.lookup import bag_lookup, check_strided, describe, embed, lookup_error


class NgramEmbedding(nn.EmbeddingBag):
    """An embedding of n-grams: rows of a table, found by hashing the last tokens.

    For each order ``n`` and each head, the tokens ``t - n + 1`` to ``t`` are hashed to one row.
    With ``heads``, an n-gram has several rows, so that two n-grams hardly ever share all of them.
    A position with fewer than ``n`` tokens up to it, counted from the start of its document, has no
    row of that order: it contributes zeros, and no gradient.

    The gradient of the weight is compact, as that of :class:`EmbeddingBag`, and a step costs what
    the batch uses, whatever the size of the table. The weight may be of any kind: a tensor from
    :func:`sparsestep.storage.mapped`, shared memory, half precision.

    The hash is the same on all machines, and stays the same in later versions. In 64-bit
    arithmetic, where ``mix`` is the finalizer of splitmix64::

        h = mix(mix(mix(seed) ^ n) ^ head)
        for token in tokens t - n + 1 to t:
            h = mix((h ^ token) + 0x9E3779B97F4A7C15)
        row = (h >> 1) % num_embeddings

    Args:
        num_embeddings: number of rows, shared by all orders and heads.
        embedding_dim: length of a row.
        orders: how many tokens an n-gram has; one order or several.
        heads: how many rows each n-gram has.
        combine: ``"sum"`` adds up the rows of a position; ``"cat"`` concatenates them, order by
            order and, within an order, head by head.
        seed: another seed gives another hash.
        weight: the table, ``[num_embeddings, embedding_dim]``, used without a copy. By default it
            is drawn from a normal distribution, as that of ``nn.Embedding``.

    Attributes:
        weight: the table.
        name: the name of the table in error messages.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import sparsestep
        >>> memory = sparsestep.nn.NgramEmbedding(100_000, 16, orders=(2, 3), combine="cat")
        >>> tokens = torch.tensor([[5, 7, 7, 2, 5, 7]])
        >>> memory(tokens).shape
        torch.Size([1, 6, 32])
        >>> memory.rows(tokens[:, :3])  # 5 7, then 7 7 and 5 7 7
        tensor([27109, 33239, 73401])
        >>> optimizer = sparsestep.RowwiseAdam(memory.parameters(), betas=(0.0, 0.999))
        >>> memory(tokens).square().sum().backward()
        >>> optimizer.step()
    """

    name = ""
    graph_anchor = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        orders: Sequence[int] = (2, 3),
        heads: int = 1,
        combine: Literal["sum", "cat"] = "sum",
        seed: int = 0,
        weight: Tensor | None = None,
    ) -> None:
        _check_integer("num_embeddings", num_embeddings, 1)
        _check_integer("embedding_dim", embedding_dim, 1)
        _check_integer("heads", heads, 1)
        _check_integer("seed", seed, 0)
        if not isinstance(orders, Sequence) or not orders:
            raise _error("orders must be a list of one or more integers", repr(orders))
        for order in orders:
            _check_integer("each of orders", order, 1)
        if len(set(orders)) < len(orders):
            raise _error("orders must be different", orders)
        if combine not in ("sum", "cat"):
            raise _error("combine must be one of sum, cat", repr(combine))
        if weight is not None:
            _check_weight(weight, (num_embeddings, embedding_dim))
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode="sum",
            sparse=True,
            _weight=weight,
            include_last_offset=True,
        )
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        self.orders: tuple[int, ...] = tuple(orders)
        self.heads = heads
        self.combine = combine
        self.seed = seed

    def extra_repr(self) -> str:
        """Sizes and options."""
        sizes = f"{self.num_embeddings}, {self.embedding_dim}, orders={self.orders}"
        return f"{sizes}, heads={self.heads}, combine={self.combine!r}, seed={self.seed}"

    def get_extra_state(self) -> Tensor:
        """Seed, heads and orders: they decide which n-grams the rows belong to."""
        numbers = [self.seed, self.heads, *sorted(self.orders)]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse weights of other n-grams."""
        own, found = map(_describe_ngrams, (self.get_extra_state(), state))
        if own != found:
            requirement = f"a weight that is loaded must have been saved with {own}"
            raise lookup_error(self, requirement, found)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        # Earlier checkpoints have no extra state.
        state = state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        try:
            self.set_extra_state(state)
        except InputError as error:
            arguments[-1].append(str(error))  # the weight is not loaded
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @replaced_in_graphs
    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Look up the n-grams that end at each position.

        Args:
            tokens: ``[batch, time]``, int64 or int32, at least 0.
            document_ids: for packed sequences, integers of the same shape; no n-gram reaches across
                a change of id.

        Returns:
            ``[batch, time, features]``, where ``features`` is ``embedding_dim``; with
            ``combine="cat"``, times the number of orders and heads.

        Raises:
            InputError: tokens or document ids are invalid; nothing has changed.
        """
        if uses_torch_ops([self.weight]):
            return self._embed_with_torch(tokens, document_ids)
        found = embed([bag_lookup(self, *self.bags(tokens, document_ids))])[0]
        return self.by_position(found, tokens)

    def fits_graph(self, tokens: Tensor, document_ids: Tensor | None = None) -> bool:
        """Whether a graph of torch.compile can have this lookup."""
        self._check_inputs(tokens, document_ids)
        return fit_graph([bag_lookup(self, tokens)])

    def forward_in_graph(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Look up as operations of a graph."""
        anchor: Any = self.graph_anchor
        rows = len(self.orders) * self.heads
        counts = rows, self._bags_per_position
        bags = torch.ops.sparsestep.hash_ngrams(anchor.key, tokens, document_ids, *counts)
        found = embed_in_graph([bag_lookup(self, *bags)], has_filler=True)[0]
        return self.by_position(found, tokens)

    @excluded_from_compile
    def rows(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The rows that a call with these arguments reads, one for each n-gram and head.

        Pass them to :func:`sparsestep.storage.prefetch` to read the rows of the next batch from a
        mapped table in the meantime.

        Args:
            tokens: as for ``forward``.
            document_ids: as for ``forward``.

        Returns:
            int64, one-dimensional: position by position, in each order by order, then head by head.

        Raises:
            InputError: tokens or document ids are invalid.
        """
        return self.bags(tokens, document_ids)[0]

    def rows_read(
        self, tokens: Tensor, document_ids: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The weight and :meth:`rows`; ``optimizer.track(model)`` calls it."""
        yield self.weight, self.rows(tokens, document_ids)

    def collisions(
        self, tokens: Tensor, document_ids: Tensor | None = None
    ) -> dict[str, int | float]:
        """Count how many n-grams of a batch share a row.

        Args:
            tokens: as for ``forward``.
            document_ids: as for ``forward``.

        Returns:
            ``ngrams``, the number of distinct n-grams, of all orders; ``rows``, the number of
            distinct rows that they have; ``collision_rate``, the fraction of these n-grams, each
            counted once per head, that share a row with another. Expect about
            ``1 - exp(-ngrams * heads / num_embeddings)``.

        Raises:
            InputError: tokens or document ids are invalid.

        Example:
            >>> memory = NgramEmbedding(1000, 1, orders=[2])
            >>> memory.collisions(torch.arange(100).view(1, 100))
            {'ngrams': 99, 'rows': 96, 'collision_rate': 0.06060606060606061}
        """
        self._check_inputs(tokens, document_ids)
        self._check_values(tokens)
        length = _length_in_document(tokens, document_ids)
        ngrams, rows = 0, [torch.empty(0, dtype=torch.int64, device=tokens.device)]
        for order in self.orders:
            columns = [column[length >= order] for column in _columns(tokens, order)]
            distinct = stack(columns).unique(dim=1) if len(columns[0]) else columns
            ngrams += len(distinct[0])
            rows += (self._row(list(distinct), order, head) for head in range(self.heads))
        _, counts = cat(rows).unique(return_counts=True)
        shared = int(counts[counts > 1].sum())
        rate = shared / (ngrams * self.heads) if ngrams else 0.0
        return {"ngrams": ngrams, "rows": len(counts), "collision_rate": rate}

    @property
    def _bags_per_position(self) -> int:
        return len(self.orders) * self.heads if self.combine == "cat" else 1

    def by_position(self, bags: Tensor, tokens: Tensor) -> Tensor:
        """The vectors of :meth:`bags` in the shape of the output."""
        return bags.reshape(*tokens.shape, self._bags_per_position * self.embedding_dim)

    def bags(self, tokens: Tensor, document_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rows of all bags, and where each bag starts and the last ends."""
        self._check_inputs(tokens, document_ids)
        if ext is not None and not dispatch_modes():
            found = ext.hash_ngrams(
                tokens.contiguous(),
                None if document_ids is None else document_ids.contiguous(),
                self.orders,
                self.heads,
                self.seed,
                self.weight,
                self.num_embeddings,
                self.combine == "cat",
                torch.get_num_threads(),
            )
            if found is not None:
                return found
        self._check_values(tokens)
        rows, is_present = self._hash(tokens, document_ids)
        rows_per_bag = len(self.orders) * self.heads // self._bags_per_position
        sizes = is_present.reshape(-1, rows_per_bag).sum(1)
        return rows[is_present], functional.pad(sizes.cumsum(0), (1, 0))

    def _embed_with_torch(self, tokens: Tensor, document_ids: Tensor | None) -> Tensor:
        """Look up in torch operations whose shapes do not depend on values."""
        self._check_inputs(tokens, document_ids)
        rows, is_present = self._hash(tokens, document_ids)
        found = functional.embedding(rows, self.weight)
        found = torch.where(is_present.unsqueeze(-1), found, 0)
        return found.sum(2) if self.combine == "sum" else found.flatten(2)

    def _hash(self, tokens: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The row of each position, order and head, and whether it has one: in one dim."""
        length = _length_in_document(tokens, document_ids)
        rows, is_present = [], []
        for order in self.orders:
            columns = _columns(tokens, order)
            for head in range(self.heads):
                rows.append(self._row(columns, order, head))
                is_present.append(length >= order)
        return stack(rows).movedim(0, -1), stack(is_present).movedim(0, -1)

    def _row(self, tokens: list[Tensor], order: int, head: int) -> Tensor:
        """The row of each n-gram, whose tokens are given from the oldest to the newest."""
        hashed = torch.tensor(self.seed, device=tokens[0].device)
        for number in (0, order, head):
            hashed = _splitmix(hashed ^ number)
        for token in tokens:
            hashed = _splitmix((hashed ^ token.long()) + _signed(0x9E3779B97F4A7C15))
        return _shift(hashed, 1) % self.num_embeddings

    def _check_inputs(self, tokens: Any, document_ids: Any) -> None:
        """Refuse what is wrong whatever the values."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in INDEX_DTYPES:
            raise lookup_error(self, "tokens must be an int64 or int32 tensor", describe(tokens))
        device = self.weight.device
        check_strided(self, "tokens", tokens)
        if tokens.dim() != 2:
            raise lookup_error(self, "tokens must have shape [batch, time]", tuple(tokens.shape))
        if tokens.device != device:
            requirement = f"tokens must be on the table's device, {device}"
            raise lookup_error(self, requirement, tokens.device)
        if document_ids is None:
            return
        if not isinstance(document_ids, Tensor) or document_ids.dtype not in INDEX_DTYPES:
            requirement = "document_ids must be an int64 or int32 tensor"
            raise lookup_error(self, requirement, describe(document_ids))
        check_strided(self, "document_ids", document_ids)
        if document_ids.shape != tokens.shape or document_ids.device != device:
            requirement = f"document_ids must have the shape of the tokens, {tuple(tokens.shape)}"
            got = f"{tuple(document_ids.shape)} on {document_ids.device}"
            raise lookup_error(self, f"{requirement}, and their device", got)

    def _check_values(self, tokens: Tensor) -> None:
        negative = tokens < 0
        if bool(negative.any()):
            position = tuple(negative.nonzero()[0].tolist())
            got = f"{int(tokens[position])} at position {position}"
            remedy = "Give padding a token of its own"
            raise lookup_error(self, "tokens must be at least 0", got, remedy, RangeError)


def _describe_ngrams(state: Any) -> str:
    if not isinstance(state, Tensor) or state.dim() != 1 or len(state) < 2:
        return describe(state)
    seed, heads, *orders = state.tolist()
    return f"seed={seed}, heads={heads} and orders={orders}"


def _columns(tokens: Tensor, order: int) -> list[Tensor]:
    """For each position, the tokens of the n-gram that ends there; zeros before the first."""
    time = tokens.shape[1]
    return [functional.pad(tokens, (back, 0))[:, :time] for back in reversed(range(order))]


def _length_in_document(tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    """The number of tokens of a document up to each position."""
    time = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if document_ids is None or not tokens.shape[1]:
        return time + 1
    is_first = functional.pad(document_ids.diff(dim=1) != 0, (1, 0), value=True)
    return time - torch.where(is_first, time, 0).cummax(1).values + 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift unsigned integers to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise _error(f"{name} must be an integer in [{least}, 2**63)", repr(value))


def _check_weight(weight: Any, shape: tuple[int, int]) -> None:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise _error("weight must be a tensor of floating-point numbers", describe(weight))
    if weight.layout is not torch.strided:
        raise _error("weight must be a strided tensor", weight.layout)
    if tuple(weight.shape) != shape:
        requirement = f"weight must have shape (num_embeddings, embedding_dim), {shape}"
        raise _error(requirement, tuple(weight.shape))


def _error(requirement: str, got: object) -> InputError:
    return InputError(f"NgramEmbedding: {message(requirement, got)}")
