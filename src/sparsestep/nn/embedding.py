"""Embedding and EmbeddingBag: torch's, with a compact gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsestep.nn.graph import embed_in_graph, fit_graph
from sparsestep.nn.interop import replaced_in_graphs, with_arguments_of
from sparsestep.nn.lookup import bag_lookup, embed, row_lookup


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` whose gradient is never larger than that of its output.

    It has the arguments and results of torch's module. Ids are checked before anything is read or
    changed, and an error names the out-of-range id and its position. The gradient of the weight is
    always sparse. The optimizers of this library use the ids and the gradient of the output
    directly; other code that reads the gradient's values gets an ordinary COO tensor.

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        padding_idx: a row that gets no gradient and starts as zeros.
        max_norm: the largest norm of a row; longer rows are rescaled when they are looked up.
        norm_type: the order of that norm.
        scale_grad_by_freq: divide the gradient of an id by its number of occurrences in the call.
        sparse: has no effect; the gradient is always sparse.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Attributes:
        name: the name of the table in error messages.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.Embedding(1000, 2, padding_idx=0)
        >>> table(torch.tensor([[3, 0], [3, 5]])).sum().backward()
        >>> table.weight.grad
        tensor(indices=tensor([[3, 3, 5]]),
               values=tensor([[1., 1.],
                              [1., 1.],
                              [1., 1.]]),
               size=(1000, 2), nnz=3, layout=torch.sparse_coo)
        >>> try:
        ...     table(torch.tensor([[3, 1000]]))
        ... except sparsestep.InputError as error:
        ...     print(str(error).split(" Map")[0])
        Embedding (1000 x 2): ids must be in [0, 1000). Got 1000 at position (0, 1).
    """

    name = ""  # without a type: torch.jit.script takes annotations for its own
    graph_anchor = None

    @with_arguments_of(torch.nn.Embedding.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sparse = True

    def extra_repr(self) -> str:
        """Describe the options, as torch does; ``fused`` tells it from torch's module."""
        return ", ".join(filter(None, (super().extra_repr(), "fused=True")))

    @replaced_in_graphs
    def forward(self, input: Tensor) -> Tensor:
        """Look up rows.

        Args:
            input: ids of any shape, int64 or int32.

        Returns:
            A row for each id: the shape of the ids, then that of a row.

        Raises:
            InputError: an id is out of range; nothing has changed.
        """
        return embed([row_lookup(self, input)])[0]

    def fits_graph(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a graph of torch.compile can have this lookup."""
        return fit_graph([row_lookup(self, *args, **kwargs)])

    def forward_in_graph(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up as an operation of a graph."""
        return embed_in_graph([row_lookup(self, *args, **kwargs)])[0]


class EmbeddingBag(torch.nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` whose gradient has one row for each bag, not for each id.

    It has the arguments and results of torch's module. Ids and offsets are checked before anything
    is read or changed, and an error names the wrong one and its position. The gradient of the
    weight is sparse in every mode. The optimizers of this library use the ids and the gradient of
    the output directly; other code that reads the gradient's values gets an ordinary COO tensor.

    With ``mode="max"``, the gradient holds single elements, the maximum of each bag, so an
    optimizer with ``semantics="masked"`` updates only these.

    ``scale_grad_by_freq`` divides the gradient of an id by the number of times that it occurs in
    the call. (Torch 2.13 on the CPU divides by the count of another id if counts differ.)

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        max_norm: the largest norm of a row; longer rows are rescaled when they are looked up.
        norm_type: the order of that norm.
        scale_grad_by_freq: divide the gradient of an id by its number of occurrences in the call.
        mode: how the rows of a bag are combined: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: has no effect; the gradient is always sparse.
        include_last_offset: whether the last offset is the end of the last bag.
        padding_idx: an id that is ignored; its row gets no gradient and starts as zeros.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Attributes:
        name: the name of the table in error messages.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.EmbeddingBag(1000, 16, mode="mean")
        >>> optimizer = sparsestep.Adam(table.parameters())
        >>> ids, offsets = torch.tensor([5, 2, 5, 7]), torch.tensor([0, 0, 3])
        >>> table(ids, offsets).sum().backward()
        >>> optimizer.step()
    """

    name = ""  # without a type: torch.jit.script takes annotations for its own
    graph_anchor = None

    @with_arguments_of(torch.nn.EmbeddingBag.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sparse = True

    def extra_repr(self) -> str:
        """Describe the options, as torch does; ``fused`` tells it from torch's module."""
        return ", ".join(filter(None, (super().extra_repr(), "fused=True")))

    @replaced_in_graphs
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up rows and reduce each bag of them to one.

        Args:
            input: ids, int64 or int32: 2-D with a bag in each row, or 1-D with ``offsets``.
            offsets: where each bag begins; with ``include_last_offset`` also where the last ends.
            per_sample_weights: a factor for each id, for ``mode="sum"``.

        Returns:
            A row for each bag; zeros for an empty one.

        Raises:
            InputError: an id is no row of the table, or the bags are not well-formed; nothing has
                changed.
        """
        return embed([bag_lookup(self, input, offsets, per_sample_weights)])[0]

    def fits_graph(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a graph of torch.compile can have this lookup."""
        return fit_graph([bag_lookup(self, *args, **kwargs)])

    def forward_in_graph(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up as an operation of a graph."""
        return embed_in_graph([bag_lookup(self, *args, **kwargs)])[0]


# What torch.jit.script compiles, with the globals of ``interop``.
Embedding.forward.__wrapped__ = torch.nn.Embedding.forward  # type: ignore[attr-defined]
EmbeddingBag.forward.__wrapped__ = torch.nn.EmbeddingBag.forward  # type: ignore[attr-defined]
