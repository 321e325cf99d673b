"""Lookups as operations of the graphs that ``torch.compile`` makes.

No graph can hold a compact gradient, so the gradient of a weight bypasses the graph. The backward
of the operation ``sparsestep::embed`` is an operation as well: it puts ids and gradient rows into
the inbox of the table, and returns a zero for the table's *anchor*, a tensor of one element that
was computed from the weight. Behind the graph, autograd asks the anchor for the gradient of the
weight, which takes the parts from the inbox. From there on, hooks, accumulation and DDP work as in
eager mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from sparsestep._torch import (
    assume_constant_result,
    at_end_of_backward,
    compiles_lookups,
    graph_task_id,
    is_transforming,
)
from sparsestep.deferred.tracking import catch_up_tracked
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.tensors import INDEX_DTYPES
from sparsestep.nn.interop import materialize_for_ddp
from sparsestep.nn.lookup import (
    MAX,
    MEAN,
    ROWS,
    SUM,
    Lookup,
    LookupResult,
    first_derivative,
    look_up_checked,
    per_sample_weights_grad,
    weight_grad,
)


class _Parts(list[IndexedGrad]):
    """The parts of a gradient that one backward has computed so far."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape


class _Inbox:
    """Passes parts of a gradient from the operations of a graph to autograd."""

    def __init__(self, table: nn.Module) -> None:
        self.table = ref(table)
        self._parts: WeakValueDictionary[int, _Parts] = WeakValueDictionary()  # by backward

    def put(self, part: IndexedGrad, shape: torch.Size) -> None:
        """Add a part of the gradient that the current backward computes."""
        backward = graph_task_id()
        parts = self._parts.get(backward)
        if parts is None:
            parts = self._parts[backward] = _Parts(shape)
            at_end_of_backward(parts.clear)  # torch holds them until then, also if it fails
        parts.append(part)

    def take(self) -> CompactGrad | None:
        """Return the gradient that the current backward has computed."""
        parts = self._parts.pop(graph_task_id(), None)
        return CompactGrad.of(parts, parts.shape, parts[0].values) if parts else None


class _Link(torch.autograd.Function):
    """The anchor as a function of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, key: Tensor, inbox: _Inbox) -> Tensor:
        ctx.inbox = inbox
        return key.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.inbox.take(), None, None


_by_key: WeakValueDictionary[int, Any] = WeakValueDictionary()  # inboxes and vocabularies
_keys = itertools.count()


def _new_key(thing: Any) -> Tensor:
    """Return a tensor of one element, by which an operation finds a thing."""
    number = next(_keys)
    _by_key[number] = thing
    with torch.inference_mode(False):
        return torch.tensor([float(number)], dtype=torch.float64, device="cpu")


class Anchor:
    """Connects the operations of a graph with a table and its weight.

    The module owns it; the weight must not, since the anchor refers to the weight. Copies of a
    module have none.

    Attributes:
        weight: the weight that it was made for.
        key: a tensor of one element, by which operations find the inbox.
        link: the same, computed from the weight; None if the weight gets no gradient.
    """

    def __init__(self, table: nn.Module, weight: nn.Parameter) -> None:
        self.weight = weight
        self.made_for = _made_for(weight)
        self._inbox = inbox = _Inbox(table)
        self.key = _new_key(inbox)
        with torch.inference_mode(False), torch.enable_grad():
            self.link = _Link.apply(weight, self.key, inbox) if weight.requires_grad else None

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _made_for(weight: Tensor) -> Any:
    """Metadata that autograd keeps; if it changes, the weight needs another anchor."""
    return weight.shape, weight.dtype, weight.device, weight.requires_grad


@assume_constant_result
def _prepare_anchor(table: Any) -> None:
    """Give a table an anchor for its weight. Called by the compiler when it traces a lookup."""
    weight, anchor = table.weight, table.graph_anchor
    if anchor is not None and anchor.weight is weight and anchor.made_for == _made_for(weight):
        return
    table.graph_anchor = None  # autograd forgets what it knew about the weight
    if type(weight) is nn.Parameter and not weight.is_inference() and not weight.is_meta:
        table.graph_anchor = Anchor(table, weight)


@assume_constant_result
def _prepare_key(vocabulary: Any) -> None:
    """Give a vocabulary a key, by which an operation finds it. Called by the compiler."""
    if vocabulary.graph_key is None:
        vocabulary.graph_key = _new_key(vocabulary)


def rows_in_graph(vocabulary: Any, ids: Tensor) -> Tensor:
    """Look up the row of each id, as an operation."""
    _prepare_key(vocabulary)
    found: Tensor = torch.ops.sparsestep.find_rows(vocabulary.graph_key, ids, _call_number())
    return found


@assume_constant_result
def can_be_traced() -> bool:
    """Whether a graph can have operations of this library."""
    return compiles_lookups and not is_transforming()


@assume_constant_result
def _call_number() -> int:
    """Return a new number, so that the compiler does not merge calls with equal arguments."""
    return next(_call_numbers)


_call_numbers = itertools.count()


def fit_graph(lookups: Sequence[Lookup]) -> bool:
    """Whether lookups can be an operation of a graph. If not, eager code runs or raises."""
    return can_be_traced() and all(_fits(lookup) for lookup in lookups)


def _fits(lookup: Lookup) -> bool:
    weight, ids, offsets, _, weights, mode, *_ = lookup
    table = lookup.table
    _prepare_anchor(table)
    if table.graph_anchor is None or table.graph_anchor.weight is not weight:
        return False
    if mode < 0 or table.max_norm is not None or (mode == MAX and table.scale_grad_by_freq):
        return False
    if not _is_index(ids, weight):
        return False
    if mode == ROWS:
        return True
    if weights is not None and not (
        mode == SUM
        and isinstance(weights, Tensor)
        and not weights.is_nested
        and weights.dtype == weight.dtype
        and weights.shape == ids.shape
        and weights.device == weight.device
    ):
        return False
    if offsets is None:
        return bool(ids.dim() == 2)
    return bool(ids.dim() == 1 and _is_index(offsets, weight) and offsets.dim() == 1)


def _is_index(ids: Any, weight: Tensor) -> bool:
    return (
        isinstance(ids, Tensor)
        and not ids.is_nested
        and ids.layout is torch.strided
        and ids.dtype in INDEX_DTYPES
        and ids.device == weight.device
    )


def embed_in_graph(lookups: Sequence[Lookup], *, has_filler: bool = False) -> list[Tensor]:
    """Look up all tables, as an operation. ``has_filler``: there are more ids than in the bags."""
    options: list[int] = []
    for lookup in lookups:
        option = _Options(
            lookup.mode,
            lookup.padding_idx,
            lookup.include_last_offset,
            lookup.table.scale_grad_by_freq,
            lookup.needs_grad,
            lookup.offsets is not None,
            lookup.per_sample_weights is not None,
            has_filler,
        )
        options += map(int, option)
    anchors = [lookup.table.graph_anchor for lookup in lookups]
    found: list[Tensor] = torch.ops.sparsestep.embed(
        [lookup.weight for lookup in lookups],
        [a.link if x.needs_grad else a.key for a, x in zip(anchors, lookups, strict=True)],
        [lookup.ids for lookup in lookups],
        [lookup.offsets for lookup in lookups if lookup.offsets is not None],
        [x.per_sample_weights for x in lookups if x.per_sample_weights is not None],
        options,
        _call_number(),
    )
    return found[: len(lookups)]


class _Options(NamedTuple):
    """The options of one lookup, integers in the operation."""

    mode: int
    padding_idx: int
    include_last_offset: int
    scale_grad_by_freq: int
    needs_grad: int
    has_offsets: int
    has_factors: int  # per_sample_weights
    has_filler: int

    @property
    def num_extras(self) -> int:
        """The number of tensors that backward needs besides the arguments."""
        if not self.needs_grad:
            return 0
        return 2 if self.mode == MAX else int(self.mode == MEAN and self.padding_idx >= 0)

    @classmethod
    def unpack(cls, flat: Iterable[int]) -> Iterator[_Options]:
        """The options of each lookup."""
        return map(cls._make, zip(*[iter(flat)] * len(cls._fields), strict=True))


def _by_lookup(
    weights: Any, anchors: Any, ids: Any, offsets: Any, factors: Any, options: Any, _: int
) -> Iterator[tuple[Any, ...]]:
    """The arguments of each lookup; not all have offsets and per_sample_weights."""
    starts, factors = iter(offsets), iter(factors)
    for weight, anchor, each, option in zip(
        weights, anchors, ids, _Options.unpack(options), strict=True
    ):
        start = next(starts) if option.has_offsets else None
        yield weight, anchor, each, start, next(factors) if option.has_factors else None, option


def _lookup(
    weight: Any, ids: Any, offsets: Any, per_sample_weights: Any, options: _Options, table: Any
) -> Lookup:
    if options.has_filler:
        ids = ids[: int(offsets[-1])]
    return Lookup(
        weight,
        ids,
        offsets,
        bool(options.include_last_offset),
        per_sample_weights,
        options.mode,
        options.padding_idx,
        options.num_extras > 0,
        table,
    )


def _embed(*call: Any) -> list[Tensor]:
    lookups, options = [], []
    for weight, anchor, ids, offsets, factors, option in _by_lookup(*call):
        table: Any = _by_key[int(anchor)].table()
        lookup = _lookup(weight.detach(), ids, offsets, factors, option, table)
        catch_up_tracked(table.weight, lookup.ids)
        if option.needs_grad:
            materialize_for_ddp([table.weight])
        lookups.append(lookup)
        options.append(option)
    results = look_up_checked(lookups)
    extras: list[Tensor] = []
    for result, option in zip(results, options, strict=True):
        kept = (result.bag_sizes, result.max_index)[: option.num_extras]
        extras += [tensor.long() for tensor in kept if tensor is not None]
    return [*[result.output for result in results], *extras]


def _fake_embed(*call: Any) -> list[Tensor]:
    outputs, extras = [], []
    for weight, _, ids, offsets, _, option in _by_lookup(*call):
        dim = weight.shape[1]
        if option.mode == ROWS:
            outputs.append(weight.new_empty((*ids.shape, dim)))
            continue
        bags = ids.shape[0] if offsets is None else offsets.shape[0] - option.include_last_offset
        outputs.append(weight.new_empty((bags, dim)))
        shapes = [(bags,), (bags, dim)][: option.num_extras]
        extras += [weight.new_empty(shape, dtype=torch.int64) for shape in shapes]
    return [*outputs, *extras]


def _embed_backward(*arguments: Any) -> list[Tensor]:
    """Put the gradients of weights into inboxes; return those of anchors and per_sample_weights.

    Those of outputs are None if there are none; weights, if per_sample_weights need no gradient.
    """
    *call, extras, grads, num_rows = arguments
    found, left = [], list(extras)
    for grad, rows, each in zip(grads, num_rows, _by_lookup(*call), strict=True):
        weight, anchor, ids, offsets, factors, option = each
        kept: list[Any] = [left.pop(0) for _ in range(option.num_extras)]
        if grad is None:
            continue
        lookup = _lookup(weight, ids, offsets, factors, option, option)
        if option.needs_grad:
            if lookup.mode != MEAN:  # the graph may use the memory again
                values = grad.clone(memory_format=torch.contiguous_format)
            else:
                values = grad
            sizes, max_index, *_ = *kept, None, None
            result = LookupResult(values, None, None, max_index, sizes)
            shape = torch.Size((rows, grad.shape[-1]))
            _by_key[int(anchor)].put(weight_grad(shape, lookup, result, values), shape)
            found.append(torch.zeros_like(anchor))
        if weight is not None:
            found.append(per_sample_weights_grad(lookup, grad))
    return found


def _fake_embed_backward(*arguments: Any) -> list[Tensor]:
    *call, _, grads, _ = arguments
    found = []
    for grad, each in zip(grads, _by_lookup(*call), strict=True):
        weight, anchor, _, _, factors, option = each
        if grad is not None and option.needs_grad:
            found.append(torch.empty_like(anchor))
        if grad is not None and weight is not None:
            found.append(torch.empty_like(factors, memory_format=torch.contiguous_format))
    return found


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, *tensors, options, call_number = inputs
    ctx.set_materialize_grads(False)
    ctx.options = options, call_number
    ctx.num_rows = [len(weight) for weight in weights]
    used = [
        weight if factors is not None and factors.requires_grad else None
        for weight, _, _, _, factors, _ in _by_lookup(*inputs)
    ]
    ctx.sizes = [len(each) for each in inputs[:5]]
    ctx.save_for_backward(*used, *itertools.chain(*tensors), *output[len(weights) :])


def _autograd(ctx: Any, grads: list[Tensor | None]) -> Any:
    count, tensors = len(ctx.num_rows), iter(ctx.saved_tensors)
    saved = [list(itertools.islice(tensors, size)) for size in ctx.sizes]
    grads, extras = grads[:count], list(tensors)
    found = iter(
        torch.ops.sparsestep.embed_backward(*saved, *ctx.options, extras, grads, ctx.num_rows)
    )
    of_anchors: list[Tensor | None] = []
    of_factors: list[Tensor | None] = []
    for grad, weight, option in zip(grads, saved[0], _Options.unpack(ctx.options[0]), strict=True):
        of_anchors.append(next(found) if grad is not None and option.needs_grad else None)
        if option.has_factors:
            of_factors.append(next(found) if grad is not None and weight is not None else None)
    none = [None] * count
    return none, of_anchors, none, [None] * ctx.sizes[3], of_factors, None, None


def _hash_ngrams(
    anchor: Tensor, tokens: Tensor, document_ids: Tensor | None, rows: int, bags: int
) -> tuple[Tensor, Tensor]:
    """The rows of all n-grams, padded to the largest possible number, and the bags' offsets."""
    table: Any = _by_key[int(anchor)].table()
    found, offsets = table.bags(tokens, document_ids)
    ids = torch.zeros(tokens.numel() * rows, dtype=torch.int64, device=tokens.device)
    ids[: len(found)] = found
    return ids, offsets


def _fake_hash_ngrams(
    anchor: Tensor, tokens: Tensor, document_ids: Tensor | None, rows: int, bags: int
) -> tuple[Tensor, Tensor]:
    count = tokens.numel()
    return (
        tokens.new_empty((count * rows,), dtype=torch.int64),
        tokens.new_empty((count * bags + 1,), dtype=torch.int64),
    )


_LISTS = (
    "[] weights, Tensor[] anchors, Tensor[] ids, Tensor[] offsets, Tensor[] per_sample_weights, "
    "int[] options, int call_number"
)
_SCHEMAS = {
    "embed": f"(Tensor{_LISTS}) -> Tensor[]",
    "embed_backward": f"(Tensor?{_LISTS}, Tensor[] extras, Tensor?[] grads, SymInt[] num_rows) "
    "-> Tensor[]",
    "hash_ngrams": "(Tensor anchor, Tensor tokens, Tensor? document_ids, int rows, int bags) "
    "-> (Tensor, Tensor)",
    "find_rows": "(Tensor key, Tensor ids, int call_number) -> Tensor",
}
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "embed": (_embed, _fake_embed),
    "embed_backward": (_embed_backward, _fake_embed_backward),
    "hash_ngrams": (_hash_ngrams, _fake_hash_ngrams),
    "find_rows": (
        lambda key, ids, _: _by_key[int(key)](ids),
        lambda key, ids, _: ids.new_empty(ids.shape, dtype=torch.int64),
    ),
}
# ``torch.library.custom_op`` would double the time of a small lookup.
_library = torch.library.Library("sparsestep", "FRAGMENT")
for _name, (_kernel, _fake) in _KERNELS.items():
    _library.define(f"{_name}{_SCHEMAS[_name]}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparsestep::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "sparsestep::embed", _autograd, setup_context=_save_for_backward, lib=_library
)
