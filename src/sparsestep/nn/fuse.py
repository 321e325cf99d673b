"""Replace a model's embeddings by fused ones, and create an optimizer for them."""

from __future__ import annotations

import copyreg
import functools
import gc
import logging
import types
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch.optim.optimizer import ParamsT

from sparsestep._torch import own_parameters
from sparsestep.errors import InputError, message, usable, warn
from sparsestep.memory.tensors import is_distributed
from sparsestep.nn.embedding import Embedding, EmbeddingBag
from sparsestep.nn.ngram import NgramEmbedding
from sparsestep.optim.optimizer import RuleOptimizer

Model = TypeVar("Model", bound=torch.nn.Module)
Only: TypeAlias = str | Iterable[str] | Callable[[str, Any], bool] | None

_OURS: dict[type, type[Embedding] | type[EmbeddingBag]] = {
    torch.nn.Embedding: Embedding,
    torch.nn.EmbeddingBag: EmbeddingBag,
}
_TABLES = tuple(_OURS)
_FUSED = (Embedding, EmbeddingBag, NgramEmbedding)
_log = logging.getLogger("sparsestep")


def fuse(model: Model, *, only: Only = None) -> Model:
    """Convert the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules of a model to ours, in place.

    The modules stay the same objects and keep their weights, hooks and options, so existing
    optimizers and references keep working. A subclass of torch's modules keeps its class and its
    methods, too.

    A module with its own ``forward``, or with a weight that is computed from others, is not
    converted; a warning lists these modules, except for those that ``only`` leaves out. Converted
    modules are logged (``logging.getLogger("sparsestep")``, level INFO).

    Args:
        model: the model; may be a single embedding.
        only: the modules to convert: a name as in ``model.named_modules()`` or several names, each
            with everything below it; or a function of name and module that returns a bool.

    Returns:
        The same model.

    Raises:
        InputError: a name in ``only`` is not a module of the model, or a table belongs to a model
            that ``DistributedDataParallel`` has wrapped already; nothing has changed.

    Example:
        >>> import sparsestep
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1))
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> sparsestep.nn.fuse(model)(torch.tensor([[3, 1, 3]])).sum().backward()
        >>> model[0].weight.grad.indexed().values.shape
        torch.Size([1, 16])
        >>> optimizer.step()

        Large tables only:

        >>> model = sparsestep.nn.fuse(model, only=lambda name, table: table.num_embeddings > 100)
    """
    _check_model("fuse", model)
    found = {name: each for name, each in model.named_modules() if isinstance(each, _TABLES)}
    selected = _select(model, found, only)
    unfused = {name: table for name, table in selected.items() if not isinstance(table, _FUSED)}
    reasons = {name: reason_not_fusible(table) for name, table in unfused.items()}
    left = [f"{name or 'the model'} ({reason})" for name, reason in reasons.items() if reason]
    if left:
        warn(UserWarning, f"fuse: these tables keep torch's gradient: {', '.join(left)}.")
    elif not selected:
        why = "the model has no torch.nn.Embedding or torch.nn.EmbeddingBag"
        if found:
            why = f"only={only!r} selects none of the model's tables"
        warn(UserWarning, f"fuse: nothing to do: {why}.")
    new = {name: table for name, table in unfused.items() if reasons[name] is None}
    _check_not_wrapped(new)
    for name, table in new.items():
        fuse_module(table, name)
        _log.info("fused %s, %s", name or "the model", table)
    return model


def _check_model(who: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        requirement = f"{who}: the first argument must be a model, an nn.Module"
        raise InputError(message(requirement, type(model).__name__))


def _check_not_wrapped(tables: dict[str, Any]) -> None:
    """Refuse tables whose gradients ``DistributedDataParallel`` expects to be dense.

    A module does not know its wrapper, so all wrappers are searched.
    """
    dense = {id(table.weight): name for name, table in tables.items() if not table.sparse}
    if not dense or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    wrapper = torch.nn.parallel.DistributedDataParallel
    for found in gc.get_objects():
        if not issubclass(type(found), wrapper):
            continue
        module = getattr(found, "module", None)  # there is none if it could not be made
        for param in module.parameters() if module is not None else ():
            if id(param) in dense:
                requirement = "a model must be fused before DistributedDataParallel wraps it"
                remedy = "Call fuse(model) first; a model that was fused before stays as it is"
                got = f"{dense[id(param)] or 'a table'!r}, which is wrapped"
                raise InputError(f"fuse: {message(requirement, got, remedy)}")


def _select(model: torch.nn.Module, tables: dict[str, Any], only: Only) -> dict[str, Any]:
    if only is None:
        return tables
    if callable(only):
        return {name: table for name, table in tables.items() if only(name, table)}
    # A module that is there under several names may be called by any of them.
    everything = list(model.named_modules(remove_duplicate=False))
    with usable("fuse: only must be a name, a list of names, or a function of name and module"):
        names = [only] if isinstance(only, str) else list(only)
    known = {name for name, _ in everything}
    for name in names:
        if name not in known:
            requirement = "only must contain names of modules, as in model.named_modules()"
            raise InputError(f"fuse: {message(requirement, repr(name))}")
    wanted = {
        id(module)
        for path, module in everything
        if any(name in ("", path) or path.startswith(f"{name}.") for name in names)
    }
    return {name: table for name, table in tables.items() if id(table) in wanted}


def reason_not_fusible(table: Any) -> str | None:
    """Why a table cannot be fused; ``None`` if it can, or is."""
    if isinstance(table, Embedding | EmbeddingBag):
        return None
    if "forward" in vars(table):
        return "its forward was replaced"
    kind = type(table)
    if kind.forward is not _torch_class(kind).forward:
        return f"{kind.__name__} has a forward of its own"
    if "weight" not in own_parameters(table):
        return "its weight is computed from others"
    if is_distributed(table.weight):  # torch has no sparse DTensors
        return "its weight is a DTensor, whose gradient is dense"
    return None


def fuse_module(table: Any, name: str) -> None:
    """Fuse a table in place, for which there is no ``reason_not_fusible``."""
    has_name = hasattr(table, "name")  # a subclass may have one, for purposes of its own
    kind: Any = type(table)
    table.__class__ = _fused(kind)
    table.sparse = True
    if not has_name:
        table.name = name


def _torch_class(kind: type) -> Any:
    return next(table for table in _TABLES if issubclass(kind, table))


@functools.cache
def _fused(kind: type) -> Any:
    """Return a class that inherits from ours and from ``kind``."""
    ours = _OURS[_torch_class(kind)]
    if kind in _OURS:
        return ours

    def reduce(self: Any, protocol: Any) -> Any:
        # This class has no name to be found by when a module is loaded, or copied.
        made = super(fused, self).__reduce_ex__(max(2, protocol))
        if made[0] is copyreg.__newobj__ and made[1][0] is fused:  # type: ignore[attr-defined]
            return (_new, (kind, *made[1][1:]), *made[2:])
        return made

    @functools.wraps(kind.__init__)  # type: ignore[misc]
    def init(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, *args, **options)  # type: ignore[misc]
        self.sparse = True

    def fill(names: dict[str, Any]) -> None:
        copied = ("__module__", "__doc__", "__qualname__", *(["name"] * hasattr(kind, "name")))
        names |= {name: getattr(kind, name) for name in copied}
        names |= {"__reduce_ex__": reduce, "__init__": init}

    fused: Any = types.new_class(kind.__name__, (ours, kind), exec_body=fill)
    return fused


def _new(kind: type, *args: Any) -> Any:
    fused = _fused(kind)
    return fused.__new__(fused, *args)


Options = ParamSpec("Options")
Made = TypeVar("Made", bound=RuleOptimizer)


@overload
def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[Concatenate[ParamsT, Options], Made],
    /,
    *args: Options.args,
    **options: Options.kwargs,
) -> Made: ...
@overload
def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[..., Made],
    /,
    *args: Any,
    params: ParamsT,
    **options: Any,
) -> Made: ...
def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[..., Made],
    /,
    *args: Any,
    **options: Any,
) -> Made:
    """Create an optimizer that trains a model's embeddings at a cost proportional to the batch.

    Results and checkpoints are those of dense training. It does three things: it converts the
    embeddings (:func:`fuse`), gives the optimizer ``semantics="dense"``, and tracks the model, so
    that rows catch up with the steps that they missed before they are read.

    If you want only some of the tables, do these three things yourself.

    Args:
        model: the model. Its embeddings are converted in place.
        optimizer: an optimizer class of this library.
        *args: positional arguments of the class after the parameters.
        params: parameters or param groups, for options of their own; by default all parameters of
            the model.
        **options: options of the class. With ``semantics="masked"``, nothing is tracked.

    Returns:
        The optimizer.

    Raises:
        InputError: the class is not one of this library, or an option is invalid; nothing has
            changed.

    Example:
        >>> import sparsestep
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1))
        >>> optimizer = sparsestep.nn.optimizer_for(model, sparsestep.AdamW, lr=1e-3)
        >>> model(torch.tensor([[3, 1, 3]])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.semantics
        'dense'
    """
    _check_model("optimizer_for", model)
    make: Any = optimizer
    if not isinstance(make, type) or not issubclass(make, RuleOptimizer):
        requirement = "optimizer_for: the second argument must be an optimizer class of sparsestep"
        raise InputError(message(requirement, repr(make)))
    params = options.pop("params", None)
    given = model.parameters() if params is None else params
    made = optimizer(given, *args, **{"semantics": "dense", **options})
    own = set(map(id, model.parameters()))
    if params is not None and own.isdisjoint(map(id, made.params())):
        requirement = "optimizer_for: params must be parameters of the model"
        raise InputError(message(requirement, "none of them"))
    fuse(model)
    if made.semantics == "dense":
        made.track(model)
    return made
