"""What refusals say: ``messages.txt`` has calls and their messages, ``make messages`` writes these.

A line with ``>>>`` is a call that must be refused. Its section is a function here, whose local
names it may use. To add a case, add such a line. Other tests need not repeat what messages say.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sparsestep
from sparsestep import _native, distributed, functional, storage
from sparsestep.distributed.placement import ByRow
from tests.generate.garbage import Handed, Unusable, broken, ids
from tests.table import sign_sgd

FILE = Path(__file__).with_name("messages.txt")
SECTION = re.compile(r"^\[(\w+)\]$")
PROMPT = ">>> "
ACCEPTED = "ACCEPTED"
Names = dict[str, Any]


def updated() -> str:
    """The file, with what the calls in it raise now."""
    lines: list[str] = []
    names: Names = {}
    here = ", ".join(name for name, has in _native.instruction_sets().items() if has)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for line in FILE.read_text().splitlines():
            section = SECTION.match(line)
            if section:
                names = {**COMMON, **SECTIONS[section[1]](Path(folder))}
            if section or not line or line.startswith("#"):
                lines.append(line)
            elif line.startswith(PROMPT):
                said = message_of(line.removeprefix(PROMPT), names)
                said = said.replace(folder, "<folder>").replace(here, "<instruction sets>")
                lines += [line, said]
    return "\n".join(lines) + "\n"


def message_of(call: str, names: Names) -> str:
    try:
        eval(call, names)
    except (TypeError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ACCEPTED


def public(module: Any) -> Names:
    return {name: getattr(module, name) for name in module.__all__}


# Optimizers and gradients to make


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 6)))


def made(cls: Any = sparsestep.AdamW, param: Tensor | None = None, **options: Any) -> Any:
    return cls([table() if param is None else param], **{"lr": 0.1, **options})


def param_of(opt: Any) -> Any:
    return opt.param_groups[0]["params"][0]


def state_of(opt: Any) -> Any:
    return opt.state[param_of(opt)]


def coo(*rows: int, width: int = 6) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), width), (4, width))


def stepped(opt: Any, grad: Any = None) -> Any:
    param_of(opt).grad = coo(1, 3) if grad is None else grad
    opt.step()
    return opt


# What several sections use.
COMMON: Names = {
    **public(sparsestep),
    **{"sparsestep": sparsestep, "torch": torch, "torch_nn": nn, "copy": copy},
    **{"table": table, "made": made, "stepped": stepped, "coo": coo, "ids": ids},
    **{"floats": torch.tensor([0.1, 0.2]), "inf": float("inf"), "nan": float("nan")},
    "zeros": torch.zeros(4, 6),
    "ones": torch.ones(4, 6),
}


def options(_: Path) -> Names:
    def group(**options: Any) -> None:
        made().add_param_group(options)

    def changed(**options: Any) -> None:
        """A step with options that were changed after another."""
        opt = stepped(made())
        opt.param_groups[0].update(options)
        stepped(opt)

    def without(name: str) -> None:
        opt = stepped(made())
        del opt.param_groups[0][name]
        stepped(opt)

    def make(name: str) -> Callable[..., Any]:
        cls = getattr(sparsestep, name)
        return lambda **options: cls([table()], **options)

    @sparsestep.rule(state={"seen": 0.0})
    def growing(param, grad, seen, *, lr):
        return param - lr * grad, seen + 1

    @sparsestep.rule
    def drifting(param, grad, *, lr):
        return param - lr * grad.sign() - 0.1

    def dense(cls: Any, **options: Any) -> None:
        stepped(made(cls, semantics="dense", **options))

    ours, instructions = sparsestep, _native.use_instruction_set
    permuted = torch.ones(2, 6, 4).transpose(1, 2)
    names = ("Adam", "AdamW", "Adagrad", "RMSprop", "SGD", "Ftrl", "SparseAdam", "Lion")
    return {**locals(), "sign_sgd": sign_sgd, **{name: make(name) for name in names}}


def rules(_: Path) -> Names:
    def unnamed(param, grad, sum, *, lr):
        return param, sum

    def masked(param, grad, *, lr, mask=None):
        return param

    def any_option(param, grad, **options):
        return param

    def needs(param, grad, *, lr, decay):
        return param

    class Named:
        __name__ = "named"

        def __repr__(self) -> str:
            return self.__name__

        def __call__(self, param: Tensor, grad: Tensor) -> Tensor:
            return param

    def returning(result: Callable[[Tensor], Any]) -> None:
        @sparsestep.rule(state={"sum": 0.0})
        def wrong(param, grad, sum, *, lr):
            return result(param)

        stepped(made(wrong))

    return locals()


def gradients(_: Path) -> Names:
    grads = broken(torch.zeros(4, 6))

    def give(name: str) -> None:
        functional.sgd_(torch.zeros(4, 6), grads[name])

    def named() -> None:
        rows = nn.Embedding(4, 6, sparse=True)
        opt = sparsestep.Adam(rows.named_parameters())
        rows.weight.grad = coo(9)
        opt.step()

    rows, unreadable = torch.ones(4, dtype=torch.bool), Unusable(torch.ones(4, dtype=torch.bool))
    return locals()


def steps(_: Path) -> Names:
    def with_state(**state: Any) -> None:
        """A step with state that was replaced after another."""
        opt = stepped(made())
        state_of(opt).update(state)
        stepped(opt)

    def resized(**options: Any) -> None:
        opt = stepped(made(**options))
        param_of(opt).grad = None
        param_of(opt).data = torch.zeros(4, 3)
        stepped(opt, coo(1, width=3))

    def step_complex(state: Tensor) -> None:
        opt = made(param=torch.ones(4, 6) * 1j)
        stepped(opt, torch.ones(4, 6) * 1j)
        state_of(opt)["exp_avg"] = state
        stepped(opt, (torch.ones(4, 6) * 1j).to_sparse(1))

    def with_grad() -> Any:
        opt = made()
        param_of(opt).grad = torch.ones(4, 6)
        return opt

    def set_mask(new: Any, /, initial: Any = None, **options: Any) -> None:
        opt = made(**options)
        opt.set_mask(param_of(opt), new, initial=initial)

    def metrics_with(**options: Any) -> None:
        opt = made()
        opt.param_groups[0].update(options)
        opt.metrics()

    def step_twice_in_backward() -> None:
        opt = made()
        opt.step_in_backward()
        param_of(opt).sum().backward()
        opt.step()
        for _ in range(2):
            param_of(opt).sum().backward()

    def step(param: Tensor, grad: Tensor | None = None) -> None:
        stepped(sparsestep.SGD([param]), grad)

    def inference(tensor: Tensor) -> Tensor:
        with torch.inference_mode():
            return tensor.clone()

    deferred = stepped(made(semantics="dense"))
    param, rows, lazy = param_of(deferred), nn.Embedding(4, 6), nn.UninitializedParameter()
    mask = torch.ones(4, dtype=torch.bool)
    return locals()


def functions(_: Path) -> Names:
    def adam(param: Any = None, **options: Any) -> None:
        param = torch.zeros(4, 6) if param is None else param
        state = torch.zeros(4, 6), torch.zeros(4, 6)
        functional.adam_(param, coo(1), *state, **{"step": 1, **options})

    without_memory = Unusable
    return {**public(functional), **locals()}


def loading(_: Path) -> Names:
    saved = stepped(made()).state_dict()

    def load(*path: Any, **options: Any) -> None:
        """Load a checkpoint that has the last of ``path`` at the rest of it, and step."""
        bad = copy.deepcopy(saved)
        put(bad, *path)
        opt = made(**options)
        opt.load_state_dict(bad)
        stepped(opt)

    state, group = saved["state"][0], saved["param_groups"][0]
    return locals()


def put(found: Any, *path: Any) -> None:
    """Replace what is at a path by the last of it."""
    for key in path[:-2]:
        found = found[key]
    found[path[-2]] = path[-1]


def compact() -> Tensor:
    bag = sparsestep.nn.EmbeddingBag(4, 6)
    bag(ids(1, 2).view(1, 2)).sum().backward()
    return bag.weight.grad


def clipping(_: Path) -> Names:
    def given(grad: Tensor) -> list[Any]:
        param = Handed(torch.ones(4, 6), requires_grad=False)
        param.grad = grad
        return [param]

    return {"compact": compact, **locals()}


def lookups(_: Path) -> Names:
    def bag(mode: str, **options: Any) -> Any:
        found = sparsestep.nn.EmbeddingBag(4, 6, **options)
        found.mode = mode
        return found

    def used(rows: nn.Embedding) -> nn.Embedding:
        rows.weight.grad = torch.ones(4, 6)
        return rows

    def embedding() -> Any:
        return sparsestep.nn.Embedding(4, 6)

    rows = embedding()
    sharing = sparsestep.SGD(rows.parameters(), momentum=0.9)
    sharing.share_memory()
    sums, flat = bag("sum"), ids(1, 2, 3)
    nested = torch.nested.nested_tensor([ids(1), ids(2)], layout=torch.jagged)
    nested_strided = torch.nested.nested_tensor([ids(1), ids(2)])
    masked = sparsestep.SGD(rows.parameters(), mask=torch.ones(4) > 0)
    computed = parametrizations.weight_norm(nn.Embedding(4, 6))
    collection = sparsestep.nn.EmbeddingBagCollection({"a": (4, 6)})
    ngrams = sparsestep.nn.NgramEmbedding(4, 6)
    l2 = sparsestep.nn.functional.embedding_l2
    two = nn.ModuleDict({"words": nn.Embedding(4, 6), "positions": nn.Embedding(4, 6)})
    return {**public(sparsestep.nn), "compact": compact, "sharded": sharded, **locals()}


def vocabularies(_: Path) -> Names:
    full, other = sparsestep.nn.Vocabulary(3), sparsestep.nn.Vocabulary(9)
    full(ids(5, 6))
    other(ids(7, 8, 9))
    saved = dict(full.state_dict())

    def load(**changed: Tensor) -> None:
        sparsestep.nn.Vocabulary(3).load_state_dict({**saved, **changed})

    return {**public(sparsestep.nn), **locals()}


# Files


def files(folder: Path) -> Names:
    good, other, plain = folder / "good", folder / "other", folder / "plain"
    weight = storage.mapped(good, (4, 6))
    storage.mapped(other, (4, 6), optimizer=sparsestep.Adam)
    plain.write_bytes(b"no table")

    def mapped(path: Path = folder / "new", shape: Any = (4, 6), **options: Any) -> None:
        storage.mapped(path, shape, **options)

    def replaced(old: bytes, new: bytes) -> None:
        path = folder / "damaged"
        path.write_bytes(good.read_bytes().replace(old, new, 1))
        storage.mapped(path, (4, 6))

    def header(**changed: Any) -> None:
        text = good.read_bytes().split(b"\n", 2)[1]
        replaced(text, json.dumps({**json.loads(text), **changed}).encode())

    return {**public(storage), **locals()}


def after(saved: Path, pattern: str, change: Callable[[Path], object]) -> Path:
    """A copy of a checkpoint, one file of which was changed."""
    copied = saved.with_name("copy")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(saved, copied)
    change(next(copied.glob(pattern)))
    return copied


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("target")))


DAMAGES: Names = {"flip": flip, "cut": cut, "link": link, "remove": Path.unlink}


def checkpoints(folder: Path) -> Names:
    saved = folder / "saved"
    model = nn.Embedding(4, 6, _weight=storage.mapped(folder / "table", (4, 6)))
    model.register_buffer("mean", torch.zeros(2))
    opt = stepped(sparsestep.SGD(model.parameters(), momentum=0.9))
    storage.save(saved, model, opt)
    storage.save(saved, model, stepped(opt))

    def load(path: Path = saved, into: nn.Module = model, by: Any = opt) -> None:
        storage.load(path, into, by)

    def damaged(pattern: str, change: Callable[[Path], object]) -> None:
        load(after(saved, pattern, change))

    def manifest(*path: Any) -> None:
        def change(file: Path) -> None:
            found = json.loads(file.read_text())
            put(found, *path)
            file.write_text(json.dumps(found))

        damaged("manifest.json", change)

    def text(data: bytes) -> None:
        damaged("manifest.json", lambda file: file.write_bytes(data))

    def load_with_buffer(buffer: Tensor) -> None:
        before, model.mean = model.mean, buffer
        try:
            load()
        finally:
            model.mean = before

    return {"save": storage.save, **DAMAGES, **locals()}


# Ranks, of which there is one


def tables(**options: Any) -> nn.Module:
    return nn.Sequential(sparsestep.nn.EmbeddingBag(8, 4, **options), nn.Linear(4, 1))


def sharded(**options: Any) -> Any:
    model = tables()
    distributed.shard(model, **options)
    return model


def dynamic(
    *, padding_idx: int | None = None, looked_up: bool = False, keep_strings: bool = False
) -> nn.Module:
    ids = sparsestep.nn.Vocabulary(4, keep_strings=keep_strings)
    if looked_up:
        ids(torch.tensor([7]))
    return sparsestep.nn.EmbeddingBagCollection(
        {"a": (4, 6)}, padding_idx=padding_idx, vocabularies={"a": ids}
    )


def sharding(folder: Path) -> Names:
    def shard(model: Any = None, **options: Any) -> None:
        distributed.shard(tables() if model is None else model, **options)

    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    with torch.device("meta"):
        tracked = tables()
    sparsestep.Adam(tracked.parameters(), semantics="dense").track(tracked)
    padded = tables(padding_idx=1)
    distributed.shard(padded, plan="rows")
    plan = distributed.shard(tables(), plan="rows")
    rows, others = sharded(plan="rows")[0], sharded(plan="rows")[0]
    known, padded = distributed.Vocabulary(rows), padded[0]
    mapped = nn.Embedding(3, 6, _weight=storage.mapped(folder / "sharded", (4, 6))[1:])
    helpers = {"tables": tables, "sharded": sharded, "dynamic": dynamic, "ByRow": ByRow}
    return {**public(distributed), **helpers, **locals()}


def shards(folder: Path) -> Names:
    saved, model = folder / "ranks", sharded()
    opt = sparsestep.SGD(model.parameters())
    distributed.save(saved, model, opt)

    def load(path: Path = saved, into: nn.Module = model, by: Any = opt) -> None:
        distributed.load(path, into, by)

    def into(model: nn.Module, groups: int = 1) -> None:
        params = list(model.parameters())
        load(into=model, by=sparsestep.SGD([{"params": params[n::groups]} for n in range(groups)]))

    def damaged(pattern: str, change: Callable[[Path], object]) -> None:
        load(after(saved, pattern, change))

    larger = nn.Sequential(sparsestep.nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    return {"save": distributed.save, "tables": tables, **DAMAGES, **locals()}


SECTIONS: dict[str, Callable[[Path], Names]] = {
    section.__name__: section
    for section in (
        *(options, rules, gradients, steps, functions, loading, clipping, lookups),
        *(vocabularies, files, checkpoints, sharding, shards),
    )
}


if __name__ == "__main__":
    FILE.write_text(updated())
