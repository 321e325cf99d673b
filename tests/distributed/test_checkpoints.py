"""What some ranks save, other numbers of ranks load; a failure on one rank is raised on all."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep._torch import group_timeout
from sparsestep.distributed import checkpoint
from sparsestep.distributed._handshake import Peers
from sparsestep.distributed.checkpoint._files import _Files, _Summed
from sparsestep.distributed.checkpoint._manifest import ShardManifest
from sparsestep.distributed.checkpoint._state import TensorLayouts
from tests.distributed.runs import (
    STEPS,
    Batch,
    Case,
    Results,
    Tables,
    batch_of,
    collected,
    joined,
    put_together,
    said,
)
from tests.ranks import Rank, on_ranks, ranks
from tests.table import EVERYTHING, same_bits

HALF, REST = range(2), range(2, STEPS)
GLOBAL = 3  # batches of each step, whatever the number of ranks
ALL = {
    "rows": Case("rows"),
    "tables": Case("tables", make=sparsestep.SparseAdam),
    "copy": Case("copy", make=sparsestep.RowwiseAdagrad),
    "dense": Case("rows", semantics="dense", make=sparsestep.AdamW),
    "per row": Case("rows", make=sparsestep.RowwiseAdam, options=(("bias_correction", "per_row"),)),
}
CASES = ALL if EVERYTHING else {name: ALL[name] for name in ("rows", "tables")}
# What a checkpoint of each is loaded into as well.
OTHER = {"rows": "tables", "tables": "rows", "copy": "rows", "dense": "copy", "per row": "rows"}


def share_of(step: int, rank: int, world: int) -> Batch:
    """A rank's part of the step's batches; the whole is the same for all numbers of ranks."""
    batches = [batch_of(step, number, 4) for number in range(GLOBAL)]
    per = -(-GLOBAL // world)
    mine = batches[rank * per : (rank + 1) * per]
    return joined(mine) if mine else batch_of(step, 0, 0)


def go_on(case: Case, model: Tables, opt: Any, steps: range, rank: int = 0, world: int = 1) -> Any:
    norms = [case.step(model, opt, share_of(step, rank, world)) for step in steps]
    return collected(model, opt, norms)


def begin(case: Case, kind: str, mesh: Any = None) -> tuple[Tables, Any]:
    model = Tables(case.dtype)
    if kind != "plain":
        sparsestep.distributed.shard(model, mesh, kind, reduce=case.reduce, order=case.order)
    else:
        sparsestep.nn.fuse(model)
    return model, case.optimizer(model)


def save_half(folder: Path, rank: int, world: int, mesh: Any = None) -> None:
    """Train for half of the steps and save."""
    for name, case in CASES.items():
        model, opt = begin(case, case.kind, mesh)
        go_on(case, model, opt, HALF, rank, world)
        if name == "rows":  # training goes on while it is saved, and must not be seen
            saving = sparsestep.distributed.async_save(folder / f"{name}-{world}", model, opt)
            go_on(case, model, opt, REST, rank, world)
            saving.result()
        else:
            sparsestep.distributed.save(folder / f"{name}-{world}", model, opt)


def load_half(folder: Path, rank: int, world: int, mesh: Any = None) -> dict[Any, Results]:
    """Load what each number of ranks has saved, in two ways, and train to the end."""
    found = {}
    for (name, case), saved_by in itertools.product(CASES.items(), (1, 2, 3)):
        for kind in (case.kind, OTHER[name]):
            model, opt = begin(case, kind, mesh)
            sparsestep.distributed.load(folder / f"{name}-{saved_by}", model, opt)
            found[name, kind, saved_by, world] = go_on(case, model, opt, REST, rank, world)
    return found


def save_and_load(rank: int, world: int, folder: Path) -> dict[Any, Results]:
    """The first two of three ranks save, all load and save, the first two load."""
    two = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    if rank < 2:
        save_half(folder, rank, 2, two)
    torch.distributed.barrier()
    save_half(folder, rank, 3)
    found = load_half(folder, rank, 3)
    if rank < 2:
        found.update(load_half(folder, rank, 2, two))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Results]]:
    """One process saves, two ranks, and three; each loads what the others have saved."""
    folder = tmp_path_factory.mktemp("saved")
    save_half(folder, 0, 1)
    results = on_ranks(3, save_and_load, folder)
    found = load_half(folder, 0, 1)
    for key in results[0]:
        found[key] = put_together([each[key] for each in results if key in each], key[1])
    return folder, found


def assert_bits(ours: Results, theirs: Results) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key != "norms":
            mine, its = torch.as_tensor(ours[key]), torch.as_tensor(value)
            assert same_bits(mine.float(), its.float()), key


@pytest.mark.xdist_group(__name__)
@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_from_a_checkpoint_of_any_number_of_ranks(runs: Any, name: str):
    """Into the same kind and into another, as if there had been one process all the time."""
    folder, trained = runs
    case = CASES[name]
    model, opt = begin(case, "plain")
    half = go_on(case, model, opt, HALF)
    whole = go_on(case, model, opt, REST)
    keys = itertools.product((name,), (case.kind, OTHER[name]), (1, 2, 3), (1, 2, 3))
    for key in keys:
        assert_bits(trained[key], whole)
    for world in (1, 2, 3):  # a checkpoint becomes an ordinary one
        found = sparsestep.distributed.consolidate(folder / f"{name}-{world}")
        plain = Tables()
        plain.load_state_dict(found["model"])
        other = case.make(plain.parameters(), lr=1.0, semantics=case.semantics)
        other.load_state_dict(found["optimizer"])
        assert other.param_groups[0]["lr"] == 0.1
        assert_bits(go_on(case, plain, other, range(0)), half)
    if case.make is sparsestep.SparseAdam:
        theirs = torch.optim.SparseAdam(list(Tables().parameters()))
        theirs.load_state_dict(found["optimizer"])


def test_a_plain_model_saves_what_a_sharded_one_loads(tmp_path: Path):
    case = CASES["rows"]
    model, opt = begin(case, "plain")
    go_on(case, model, opt, HALF)
    sparsestep.distributed.save(tmp_path / "plain", model, opt)
    other, again = begin(case, "rows")
    sparsestep.distributed.load(tmp_path / "plain", other, again)
    assert_bits(go_on(case, other, again, REST), go_on(case, model, opt, REST))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path):
    def refused(model: nn.Module, opt: Any) -> str:
        before = [param.detach().clone() for param in model.parameters()]
        message = said(lambda: sparsestep.distributed.load(tmp_path / "saved", model, opt))
        assert all(map(torch.equal, before, model.parameters()))
        return message

    table = nn.Embedding(5, 2)
    sparsestep.distributed.save(tmp_path / "saved", table, sparsestep.Adam(table.parameters()))
    larger = nn.Embedding(6, 2)
    assert "'weight' must have the shape" in refused(larger, sparsestep.Adam(larger.parameters()))
    net = nn.Sequential(nn.Embedding(5, 2))
    assert "none for '0.weight'" in refused(net, sparsestep.Adam(net.parameters()))
    other = nn.Embedding(5, 2)
    unknown: list[Tensor] = [nn.Parameter(torch.zeros(3))]
    assert "must be those of the model" in refused(other, sparsestep.Adam(unknown))
    assert "must be one of sparsestep" in refused(other, torch.optim.Adam(other.parameters()))
    for function in (sparsestep.distributed.save, sparsestep.distributed.async_save):
        with pytest.raises(sparsestep.InputError, match=r"must be an nn\.Module\. Got Adam"):
            function(tmp_path / "swapped", sparsestep.Adam(other.parameters()), other)


# Failures on one rank


class Training:
    """A sharded model and its optimizer."""

    def __init__(self, steps: int, rank: Rank) -> None:
        self.case = Case("rows")
        self.model = Tables()
        sparsestep.distributed.shard(self.model, plan="rows")
        self.optimizer = self.case.optimizer(self.model)
        for step in range(steps):
            self.step(step, rank)

    def step(self, step: int, rank: Rank) -> None:
        self.case.step(self.model, self.optimizer, batch_of(step, rank.index, 4))

    def save(self, path: Path) -> None:
        sparsestep.distributed.save(path, self.model, self.optimizer)

    def async_save(self, path: Path) -> None:
        sparsestep.distributed.async_save(path, self.model, self.optimizer).result()

    def load(self, path: Path) -> None:
        sparsestep.distributed.load(path, self.model, self.optimizer)

    def snapshot(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {**self.model.state_dict()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found.update({(index, key): value for key, value in state.items()})
        return {key: torch.as_tensor(value).tolist() for key, value in found.items()}


def assert_all_raise(rank: Rank, where: int, patch: tuple[Any, str], error: Any, work: Any) -> None:
    """One rank has the error, the others raise one of its kind that names the rank."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    if rank.index == where:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(*patch, fail)
            with pytest.raises(type(error)) as raised:
                work()
        assert raised.type is type(error)
    else:
        kind = sparsestep.InputError if isinstance(error, KeyboardInterrupt) else type(error)
        with pytest.raises(kind, match=f"rank {where}: ") as raised:
            work()
        assert raised.type is kind
    rank.barrier()


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@ranks(2)
def test_ranks_that_do_not_share_a_disk(rank: Rank):
    training, own = Training(1, rank), rank.folder / f"disk{rank.index}"
    for save in (training.save, training.async_save):
        message = said(lambda save=save: save(own))
        assert "must be on a disk that all ranks share" in message
        assert names_in(own) == []
    training.save(rank.folder / "shared")
    message = said(lambda: training.load(own if rank.index else rank.folder / "shared"))
    assert "no file sparsestep.json" in message
    assert rank.index or message.startswith("rank 1: ")


FULL = OSError(errno.ENOSPC, "No space left on device")
SAVES: dict[str, tuple[int, tuple[Any, str], BaseException]] = {
    "disk full on 1": (1, (_Summed, "write"), FULL),
    "disk full on 0": (0, (_Summed, "write"), FULL),
    "disk full at the end": (0, (ShardManifest, "encode"), FULL),
    "interrupted": (1, (_Files, "create_stream"), KeyboardInterrupt()),
    "out of memory": (1, (_Files, "create_stream"), MemoryError("none")),
    "out of memory before": (1, (TensorLayouts, "pack"), MemoryError("none")),
}


@ranks(2)
@pytest.mark.parametrize("method", ["save", "async_save"])
def test_a_save_that_fails_on_one_rank_leaves_the_earlier_checkpoint(rank: Rank, method: str):
    earlier, later, path = Training(1, rank), Training(2, rank), rank.folder / "checkpoint"
    earlier.save(path)
    before = names_in(path)
    for where, patch, error in SAVES.values():
        assert_all_raise(rank, where, patch, error, lambda: getattr(later, method)(path))
    assert names_in(path) == before
    other = Training(0, rank)
    other.load(path)
    assert other.snapshot() == earlier.snapshot()
    # A later checkpoint in the same folder
    later.async_save(path)
    other.load(path)
    assert other.snapshot() == later.snapshot()
    assert len(names_in(path)) == 4  # two parts and two files that say what they are


@ranks(2)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(rank: Rank):
    earlier, later, path = Training(1, rank), Training(2, rank), rank.folder / "checkpoint"
    earlier.save(path)
    expected = later.snapshot()
    load = (torch, "load")
    state_dict = (sparsestep.Adam, "load_state_dict")
    for patch, error in (
        (load, KeyboardInterrupt()),
        (load, MemoryError("none")),
        (load, OSError(errno.EIO, "Input/output error")),
        (state_dict, MemoryError("none")),
    ):
        assert_all_raise(rank, 1, patch, error, lambda: later.load(path))
        assert later.snapshot() == expected
    damaged = path / "__1_0.distcp"
    raw = damaged.read_bytes()
    for content in (raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:], None):
        rank.barrier()
        if rank.index == 0:
            damaged.unlink()
            if content is not None:
                damaged.write_bytes(content)
        rank.barrier()
        assert damaged.name in said(lambda: later.load(path))
        assert later.snapshot() == expected


@ranks(2)
def test_a_rank_without_memory_for_the_last_agreement_takes_back_its_consent(rank: Rank):
    earlier, later, path = Training(1, rank), Training(2, rank), rank.folder / "checkpoint"
    earlier.save(path)
    expected = later.snapshot()
    gather, load_state_dict, loaded = Peers.gather, sparsestep.Adam.load_state_dict, []

    def load(self: Any, *args: Any) -> None:
        load_state_dict(self, *args)
        loaded.append(self)

    def gather_and_fail(self: Peers, mine: Any) -> Any:
        found = gather(self, mine)
        if loaded:
            raise MemoryError("none")
        return found

    with pytest.MonkeyPatch.context() as patches:
        if rank.index == 1:
            patches.setattr(sparsestep.Adam, "load_state_dict", load)
            patches.setattr(Peers, "gather", gather_and_fail)
        kind, text = (MemoryError, "none") if rank.index else (sparsestep.InputError, "rank 1 ran")
        with pytest.raises(kind, match=text):
            later.load(path)
    assert later.snapshot() == expected
    rank.barrier()


@ranks(2)
def test_the_group_that_saves_in_the_background_has_the_timeout_of_the_user(rank: Rank):
    training, write, groups = Training(1, rank), checkpoint._dcp_save, []

    def watching(content: Any, folder: Path, peers: Any) -> None:
        groups.append((peers.group, group_timeout(peers.group)))
        write(content, folder, peers)

    rank.monkeypatch.setattr(checkpoint, "_dcp_save", watching)
    training.async_save(rank.folder / "checkpoint")
    ((group, timeout),) = groups
    assert group is not torch.distributed.group.WORLD
    assert timeout == group_timeout(torch.distributed.group.WORLD)
    training.step(5, rank)  # ranks still agree
