"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch import Tensor, nn

from sparsestep.distributed.checkpoint._manifest import Manifest
from sparsestep.distributed.checkpoint._reshard import Restoring, alone
from sparsestep.distributed.checkpoint._state import About, Contents, parted, targets
from sparsestep.distributed.checkpoint.moving import Move
from sparsestep.distributed.checkpoint.stored import Stored
from sparsestep.distributed.collectives import Wire
from sparsestep.distributed.peers import Peers
from sparsestep.distributed.writing import (
    Checkpoint,
    Content,
    StrPath,
    folder_of,
    write,
    write_in_background,
)
from sparsestep.nn.vocabulary.id_table import Options
from sparsestep.optim.arguments import check_model_and_optimizer
from sparsestep.optim.optimizer import RuleOptimizer


def save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Save a model and its optimizer; all ranks call it.

    This is ``torch.distributed.checkpoint`` underneath: a folder, to which each rank writes what
    it has. Any number of ranks loads it, one process too; and a model that was not sharded may be
    saved and loaded by one that is.

    Atomic: if it raises, it raises on all ranks, and an earlier checkpoint in the folder is intact.

    Args:
        path: a folder on a disk that all ranks share.
        model: sharded or not; within ``DistributedDataParallel`` or not. Its vocabularies are saved
            with it.
        optimizer: of its parameters. Options in its param groups must be numbers, strings, dtypes,
            tensors or ``None``, or lists, tuples and dicts of these.

    Raises:
        InputError: ranks do not share the disk, or an option is of another kind.
        OSError: on all ranks, if a rank cannot write.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> plan = sparsestep.distributed.shard(model, plan="rows")
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     save(path, model, optimizer)
        ...     load(path, model, optimizer)
        ...     found = consolidate(path)
        >>> tuple(found["model"]["weight"].shape), list(found["optimizer"]["state"][0])
        ((10, 4), ['step', 'exp_avg', 'exp_avg_sq'])
        >>> nn.EmbeddingBag(10, 4).load_state_dict(found["model"])
        <All keys matched successfully>
    """
    check_model_and_optimizer("save", model, optimizer)
    folder, what = folder_of("save", path), Contents(model, optimizer)
    peers = what.peers()
    with peers.agreeing():
        content = Content(what.entries(), what.about().pack())
    write(content, folder, peers)


def async_save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> Future[None]:
    """Save in the background, while training goes on; all ranks call it.

    Everything is copied first: that takes as much memory as the checkpoint has, and what is saved
    is of this moment, whatever the next steps do. The ranks write it by a process group of its own.
    Do not save to the same folder again before it has finished. If only some of the processes share
    the tables, it is written before this returns.

    Args:
        path: a folder on a disk that all ranks share.
        model: as for :func:`save`.
        optimizer: of its parameters.

    Returns:
        A future, whose ``result()`` waits until this rank has written its part, and raises what
        went wrong. A process that ends waits for it, too.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saving = async_save(path, model, optimizer)
        ...     # train on
        ...     saving.result()
        ...     load(path, model, optimizer)
    """
    check_model_and_optimizer("async_save", model, optimizer)
    folder, what = folder_of("async_save", path), Contents(model, optimizer)
    peers = what.peers()
    with peers.agreeing():
        content = Content(what.entries(copy=True), what.about().pack())
    return write_in_background(content, folder, peers)


def load(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Load what :func:`save` has saved, with any number of ranks; all ranks call it.

    Where a vocabulary is loaded by another number of ranks, ids get new owners, and rows of its
    tables move with them, values and state. Owners that have too few rows give up the ids that they
    would evict first.

    All files are verified first: size and checksum. Loading executes no code from them.

    Args:
        path: the folder.
        model: with the same tables; sharded in whatever way, or not.
        optimizer: of its parameters, in the same groups. Its options become those of the
            checkpoint, but for masks.

    Raises:
        InputError: on all ranks, if the checkpoint does not fit, a file is missing or damaged, or
            a vocabulary with ``evict=None`` has too few rows on a rank; nothing has changed.

    Example:
        >>> import tempfile, torch, sparsestep
        >>> def new(vocabulary, table):
        ...     optimizer = sparsestep.Adam(table.parameters())
        ...     vocabulary.attach(table, optimizer)
        ...     return nn.ModuleDict({"ids": vocabulary, "table": table}), optimizer
        >>> model, optimizer = new(sparsestep.nn.Vocabulary(100), nn.Embedding(100, 4))
        >>> rows = model["ids"](torch.tensor([10**18, -7]))
        >>> table = nn.Embedding(100, 4)
        >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
        >>> sharded, other = new(sparsestep.distributed.Vocabulary(table), table)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     save(path, model, optimizer)
        ...     load(path, sharded, other)
        >>> sharded["ids"].as_dict()
        {1000000000000000000: 1, -7: 2}
    """
    check_model_and_optimizer("load", model, optimizer)
    folder, what = folder_of("load", path), Contents(model, optimizer)
    peers = what.peers()
    checkpoint = Checkpoint.open(folder, peers)
    with peers.agreeing(), checkpoint.refusing():
        about = About.unpack(checkpoint.manifest.about)
        stored = _stored(checkpoint.manifest, about)
        own, layouts = what.own(), about.vocabularies
        what.check(own, stored)
        groups = what.loaded_groups(about.groups)
        ids = what.restoring(layouts, stored)
    with checkpoint.refusing():
        for vocabulary in ids:
            checkpoint.read(vocabulary.entries)
        moves = what.settle(ids, layouts, stored)
    with peers.agreeing(), checkpoint.refusing():
        chosen = {}
        for key, each in stored.items():
            kind, name, _ = parted(key)
            if name in (own if kind == "model" else what.params):
                chosen[key] = each
        wanted = targets(about, chosen, moves, what.tables)
    with checkpoint.refusing():
        checkpoint.read({key: found.target for key, found in wanted.items()})
        read = {key: found.finish() for key, found in wanted.items()}
        what.take(own, read, groups, ids)


def consolidate(path: StrPath) -> dict[str, Any]:
    """A checkpoint as an ordinary dict, read by one process.

    Args:
        path: the folder that :func:`save` wrote. It is verified as by :func:`load`.

    Returns:
        ``"model"``, which the model loads as it was before ``shard``, with an ordinary
        ``sparsestep.nn.Vocabulary`` where it had one that ranks share; and ``"optimizer"``, which
        this library's optimizers load, and torch's of the same name.
    """
    checkpoint = Checkpoint.open(folder_of("consolidate", path), Peers(None))
    with checkpoint.refusing():
        return _consolidated(checkpoint)


def _consolidated(checkpoint: Checkpoint) -> dict[str, Any]:
    about = About.unpack(checkpoint.manifest.about)
    stored = _stored(checkpoint.manifest, about)
    ids, moves = list[Restoring](), dict[str, Move]()
    for name, layout in about.vocabularies.items():
        options = Options(layout.rows, layout.shared, layout.admit, None)
        each = Restoring(name, Wire(None), options, layout, stored, alone)
        checkpoint.read(each.entries)
        each.settle({name: stored[f"model.{name}"] for name in layout.tables}, {}, layout.tables)
        moves.update(each.moves)
        ids.append(each)
    known = {key for each in ids for key in each.entries}
    others = {key: each for key, each in stored.items() if key not in known}
    wanted = targets(about, others, moves, {})
    checkpoint.read({key: each.target for key, each in wanted.items()})
    groups, indices = [], dict[str, int]()
    for group in about.groups:
        for name in group["params"]:
            indices.setdefault(name, len(indices))
        groups.append({**group, "params": [indices[name] for name in group["params"]]})
    found: dict[str, Any] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for key, target in wanted.items():
        kind, name, entry = parted(key)
        if kind == "model":
            found[name] = target.finish()
        else:
            state.setdefault(indices[name], {})[entry] = target.finish()
    for each in ids:
        found.update(each.state_dict())
    return {"model": found, "optimizer": {"state": state, "param_groups": groups}}


def _stored(manifest: Manifest, about: About) -> dict[str, Stored]:
    """The tensors of a checkpoint."""
    found = {}
    for key, each in manifest.entries.items():
        rows, lanes = about.tables.get(parted(key)[1], (0, 0))
        found[key] = Stored(each.shape, each.dtype, rows, lanes)
    return found
