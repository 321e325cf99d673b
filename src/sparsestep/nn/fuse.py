"""Replace a model's embeddings by fused ones, and create an optimizer for them."""

from __future__ import annotations

import copyreg
import dis
import functools
import gc
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch.optim.optimizer import ParamsT

from sparsestep._torch import own_parameters
from sparsestep.deferred.tracking import catch_up_tracked
from sparsestep.errors import InputError, message, usable, warn
from sparsestep.memory.tensors import is_distributed
from sparsestep.nn.embedding import Embedding, EmbeddingBag
from sparsestep.nn.ngram import NgramEmbedding
from sparsestep.optim.mixed import MixedOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import OPTIMIZER_OPTIONS

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
    optimizers and references keep working. Subclasses of torch's modules are converted, too, and
    keep their methods. If they have a ``forward``, it has to read the table by
    ``super().forward(ids)`` alone, as those of Transformers' scaled embeddings do. Other modules,
    and those with a weight that is computed from others, are not converted; a warning lists them,
    except for those that ``only`` leaves out. Converted modules are logged
    (``logging.getLogger("sparsestep")``, level INFO).

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
    reasons = {name: _reason_not_converted(table) for name, table in unfused.items()}
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
    # A module may have several names.
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
    """Why other modules cannot do the lookups of a table; ``None`` if they can."""
    if _has_own_forward(type(table)):
        return f"{type(table).__name__} has a forward of its own"
    return _reason_not_converted(table)


def _reason_not_converted(table: Any) -> str | None:
    """Why a table cannot be fused; ``None`` if it can, or is."""
    if isinstance(table, Embedding | EmbeddingBag):
        return None
    if "forward" in vars(table):
        return "its forward was replaced"
    kind = type(table)
    if _has_own_forward(kind) and not _looks_up_by_super(kind):
        return f"{kind.__name__} has a forward of its own"
    if "weight" not in own_parameters(table):
        return "its weight is computed from others"
    if is_distributed(table.weight):  # torch has no sparse DTensors
        return "its weight is a DTensor, whose gradient is dense"
    return None


def _has_own_forward(kind: Any) -> bool:
    theirs = _torch_class(kind)
    return kind.forward not in (theirs.forward, _OURS[theirs].forward)


def _looks_up_by_super(kind: type) -> bool:
    """Whether a class reads its table by ``super().forward(ids)`` and in no other way."""
    end = kind.__mro__.index(_torch_class(kind))
    forwards = [vars(each)["forward"] for each in kind.__mro__[:end] if "forward" in vars(each)]
    return all(map(_calls_super_forward, forwards))


def _calls_super_forward(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    names = [each.argval for each in dis.get_instructions(code)]
    used = [after for name, after in itertools.pairwise(names) if name == "weight"]
    return all(after in ("dtype", "device") for after in used)


class _CatchesUp:
    """Base of fused modules with a forward of their own, whose arguments may be no ids.

    The lookup catches up deferred rows, since ``optimizer.track`` cannot.
    """

    catches_up = True
    weight: Any

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # an operation of a graph does it
            catch_up_tracked(self.weight, input)
        return super().forward(input, *args, **kwargs)  # type: ignore[misc]


def fuse_module(table: Any, name: str) -> None:
    """Fuse a table in place, for which there is no ``reason_not_fusible``."""
    has_name = hasattr(table, "name")  # a subclass may have one, for purposes of its own
    kind: Any = type(table)
    table.__class__ = _fused(kind)
    if table.weight.requires_grad:  # PEFT looks up frozen tables itself, and computes their weight
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
        # Pickle cannot find this class by its name.
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

    bases = (kind, _CatchesUp, ours) if _has_own_forward(kind) else (ours, kind)
    fused: Any = types.new_class(kind.__name__, bases, exec_body=fill)
    return fused


def _new(kind: type, *args: Any) -> Any:
    fused = _fused(kind)
    return fused.__new__(fused, *args)


Options = ParamSpec("Options")
Made = TypeVar("Made", bound=RuleOptimizer)
TableOptimizer: TypeAlias = type[RuleOptimizer] | functools.partial[Any] | Mapping[str, Any]


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
@overload
def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[..., RuleOptimizer],
    /,
    *args: Any,
    tables: TableOptimizer,
    params: ParamsT | None = None,
    **options: Any,
) -> RuleOptimizer: ...
def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[..., Made],
    /,
    *args: Any,
    **options: Any,
) -> RuleOptimizer:
    """Create an optimizer that trains a model's embeddings at a cost proportional to the batch.

    Results and checkpoints are those of dense training. It does three things: it converts the
    embeddings (:func:`fuse`), gives the optimizer ``semantics="dense"``, and tracks the model, so
    that rows catch up with the steps that they missed before they are read.

    An embedding whose weight is also that of another module, such as a tied output head, has a
    dense gradient. It is not converted, and counts as a layer; ``optimizer.explain()`` says so.

    If you want only some of the tables, do these three things yourself.

    Args:
        model: the model. Its embeddings are converted in place.
        optimizer: an optimizer class of this library.
        *args: positional arguments of the class after the parameters.
        params: parameters or param groups, for options of their own; by default all parameters of
            the model.
        tables: another optimizer for the tables: a class, ``functools.partial(cls, **options)``, or
            a dict of options for the same class. These options are the defaults for tables; those
            of a param group in ``params`` override them. By default tables are trained as layers.
        **options: options of the class. With ``semantics="masked"``, nothing is tracked.

    Returns:
        The optimizer. With another class for ``tables`` it is one object as well: each param group
        has a key ``"optimizer"``, the name of its class.

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

        Tables with 4 bytes of state per row, and no weight decay for biases:

        >>> from functools import partial
        >>> rowwise = partial(sparsestep.RowwiseAdam, lr=1e-2, betas=(0.0, 0.999))
        >>> weights = [p for p in model.parameters() if p.dim() > 1]
        >>> others = [p for p in model.parameters() if p.dim() < 2]
        >>> groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        >>> optimizer = sparsestep.nn.optimizer_for(
        ...     model, sparsestep.AdamW, lr=1e-3, params=groups, tables=rowwise
        ... )
        >>> [(group["optimizer"], group["weight_decay"]) for group in optimizer.param_groups]
        [('AdamW', 0.01), ('RowwiseAdam', 0), ('AdamW', 0.0)]
    """
    _check_model("optimizer_for", model)
    make: Any = optimizer
    if not isinstance(make, type) or not issubclass(make, RuleOptimizer):
        requirement = "optimizer_for: the second argument must be an optimizer class of sparsestep"
        raise InputError(message(requirement, repr(make)))
    params, tables = options.pop("params", None), options.pop("tables", None)
    given = model.parameters() if params is None else params
    if not isinstance(given, torch.Tensor):  # which the class refuses
        given = list(given)
    chosen = [set(group) if isinstance(group, dict) else set() for group in given]
    options = {"semantics": "dense", **options}
    made: RuleOptimizer = optimizer(given, *args, **options)
    own = set(map(id, model.parameters()))
    if params is not None and own.isdisjoint(map(id, made.params())):
        requirement = "optimizer_for: params must be parameters of the model"
        raise InputError(message(requirement, "none of them"))
    tied = _tied_tables(model)
    untied = {id(t.weight) for t in model.modules() if isinstance(t, _TABLES)} - tied.keys()
    if tables is not None:
        groups = [
            part
            for group, names in zip(made.param_groups, chosen, strict=False)
            for part in _split(group, names, untied)
        ]
        made = _with_tables(make, args, options, made, tables, groups)
    if untied or not tied:
        fuse(model, only=lambda _, table: id(table.weight) not in tied)
    for weight, name in tied.values():
        reason = f"tied to {name}: dense gradient, every row is updated."
        made.dense_embeddings[weight] = reason
    if made.semantics == "dense":
        made.track(model)
    return made


def _tied_tables(model: torch.nn.Module) -> dict[int, tuple[torch.Tensor, str]]:
    """The weights of tables that are also those of other modules, by id, with a module's name."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, _TABLES)}
    return {
        id(param): (param, name or "the model")
        for name, module in model.named_modules()
        if not isinstance(module, _TABLES)
        for param in own_parameters(module).values()
        if param is not None and id(param) in tables
    }


def _with_tables(
    make: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    layers: RuleOptimizer,
    tables: Any,
    groups: Sequence[tuple[bool, dict[str, Any]]],
) -> RuleOptimizer:
    """Return an optimizer of these param groups, with other options for those of tables."""
    kind, own, rest = (make, tables, ()) if isinstance(tables, Mapping) else (tables, {}, ())
    if isinstance(tables, functools.partial):
        kind, own, rest = tables.func, tables.keywords, tables.args
    if not isinstance(kind, type) or not issubclass(kind, RuleOptimizer) or rest:
        requirement = (
            "optimizer_for: tables must be an optimizer class of sparsestep, functools.partial of "
            "one with keyword arguments, or a dict of options"
        )
        raise InputError(message(requirement, repr(tables)))
    if not any(is_table for is_table, _ in groups):
        warn(
            UserWarning, "optimizer_for: tables= has no effect: no table with a weight of its own."
        )
        return layers
    if kind is make:
        split = [{**(own if is_table else {}), **group} for is_table, group in groups]
        made: RuleOptimizer = make(split, *args, **options)
        return made
    shared = {name: getattr(layers, name) for name in OPTIMIZER_OPTIONS}
    for name in shared.keys() & own.keys():
        requirement = f"optimizer_for: {name} is an option of the whole optimizer, not of tables"
        raise InputError(message(requirement, repr(own[name]), f"Pass {name} to optimizer_for"))
    of_tables = kind(
        [p for is_table, g in groups if is_table for p in g["params"]], **own, **shared
    )
    names = {True: kind.__name__, False: make.__name__}
    named = [{"optimizer": names[is_table], **group} for is_table, group in groups]
    return MixedOptimizer(named, [layers, of_tables], **shared)


def _split(
    group: dict[str, Any], chosen: set[str], weights: set[int]
) -> Iterator[tuple[bool, dict[str, Any]]]:
    """The layers and the tables of a param group, with its lists and the options set for it."""
    kept = {name: group[name] for name in group if name in chosen | {"params", "param_names"}}
    lists = {name for name, value in kept.items() if name in _LISTS and isinstance(value, list)}
    for is_table in (False, True):
        places = [n for n, p in enumerate(group["params"]) if (id(p) in weights) == is_table]
        if places:
            part = {k: [v[n] for n in places] if k in lists else v for k, v in kept.items()}
            yield is_table, part


_LISTS = ("params", "param_names", "mask")
