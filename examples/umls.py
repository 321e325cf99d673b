"""Knowledge-graph completion on UMLS, with torch's optimizers and ours, to the published accuracy.

UMLS says how 135 medical concepts relate, in 6,529 triples such as (virus, causes, disease). A
ComplEx model learns 5,216 of them and ranks all concepts as answers to questions made from the
other ones. The mean reciprocal rank (MRR) and the share of right answers among the first ten
(Hits@10) are filtered: other answers known to be right do not count as wrong.

The data comes with PyKEEN, which is not imported: ``pip install --no-deps pykeen``. Seconds are CPU
time of training on one thread, contestants taking turns. Memory is the peak that weights,
gradients, state and temporaries need, measured in a process of its own (Linux).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

import sparsestep

DIM, NEGATIVES, DROPOUT, LEARNING_RATE = 200, 64, 0.5, 0.01
# ConvE, in the table of its authors' repository (github.com/TimDettmers/ConvE).
PUBLISHED, TOLERANCE = {"MRR": 0.94, "Hits@10": 0.99}, 0.01


# What each optimizer takes a row for that a batch does not look up: "dense", its gradient is zero;
# "masked", it is skipped.
SEMANTICS = {
    "torch.optim.Adam": "dense",
    "sparsestep.Adam": "dense",
    "torch.optim.SparseAdam": "masked",
    "sparsestep.SparseAdam": "masked",
}


def optimizer_for(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Create an optimizer by its name."""
    if name == "torch.optim.Adam":
        return torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    if name == "torch.optim.SparseAdam":  # the model has sparse=True
        return torch.optim.SparseAdam(list(model.parameters()), lr=lr)
    if name == "sparsestep.Adam":
        return sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=lr)
    return sparsestep.nn.optimizer_for(model, sparsestep.SparseAdam, lr=lr, semantics="masked")


class Graph:
    """Triples as numbers. Each occurs twice, since the inverse of a relation is one, too."""

    def __init__(self) -> None:
        parts = {name: read(f"{name}.txt") for name in ("train", "valid", "test")}
        triples = [triple for part in parts.values() for triple in part]
        entities = sorted({name for head, _, tail in triples for name in (head, tail)})
        relations = sorted({relation for _, relation, _ in triples})
        self.entities, self.relations = len(entities), 2 * len(relations)
        entity = {name: number for number, name in enumerate(entities)}
        relation = {name: number for number, name in enumerate(relations)}

        def encode(part: list[list[str]]) -> Tensor:
            found = torch.tensor([[entity[h], relation[r], entity[t]] for h, r, t in part])
            shift = torch.tensor([0, len(relations), 0])
            return torch.cat([found, found.flip(1) + shift])

        self.train, self.valid, self.test = (encode(part) for part in parts.values())
        # known[head, relation, tail]: what training may know, and what evaluation must.
        self.known = torch.zeros(self.entities, self.relations, self.entities, dtype=torch.bool)
        self.known[tuple(self.train.T)] = True
        self.true = self.known.clone()
        self.true[tuple(torch.cat([self.valid, self.test]).T)] = True

    def share(self, triples: Tensor, others: Tensor) -> float:
        """The share of all rows that a batch looks up."""
        entities, relations = torch.cat([triples[:, ::2].flatten(), others]), triples[:, 1]
        used = (torch.bincount(ids).count_nonzero() for ids in (entities, relations))
        return sum(map(int, used)) / (self.entities + self.relations)


def read(name: str) -> list[list[str]]:
    """Read the triples of one of PyKEEN's files."""
    package = importlib.util.find_spec("pykeen")
    if package is None or package.origin is None:
        sys.exit("This example's data comes with PyKEEN: pip install --no-deps pykeen==1.11.1")
    path = Path(package.origin).parent / "datasets" / "umls" / name
    if not path.exists():
        sys.exit(f"PyKEEN has no file {path} here: pip install --no-deps pykeen==1.11.1")
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


class ComplEx(nn.Module):
    """A score for each (head, relation, tail): Re <head * relation, conj(tail)>."""

    def __init__(self, graph: Graph, sparse: bool) -> None:
        super().__init__()
        self.entities = nn.Embedding(graph.entities, 2 * DIM, sparse=sparse)
        self.relations = nn.Embedding(graph.relations, 2 * DIM, sparse=sparse)
        for table in (self.entities, self.relations):
            nn.init.normal_(table.weight, std=0.1)

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        """The vectors that the right tails should match."""
        rows = (self.entities(head), self.relations(relation))
        (a, b), (c, d) = (dropout(each, DROPOUT, self.training).chunk(2, dim=1) for each in rows)
        return torch.cat([a * c - b * d, a * d + b * c], dim=1)

    def forward(self, triples: Tensor, others: Tensor) -> Tensor:
        """Scores of the right tails, then of the random ones, which all triples share."""
        head, relation, tail = triples.T
        query = self.query(head, relation)
        right = (query * self.entities(tail)).sum(dim=1, keepdim=True)
        return torch.cat([right, query @ self.entities(others).T], dim=1)


class Run:
    """A model, its optimizer, and its measurements."""

    def __init__(self, name: str, graph: Graph, lr: float, steps: int) -> None:
        torch.manual_seed(0)
        self.graph = graph
        self.model = ComplEx(graph, sparse=name == "torch.optim.SparseAdam")
        self.optimizer = optimizer_for(name, self.model, lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.01, steps)
        self.seconds = 0.0
        self.curve: list[tuple[float, float]] = []

    def train(self, batches: Sequence[tuple[Tensor, Tensor]], seed: int) -> None:
        """Train on batches of triples and random tails; ``seed`` is for the dropout."""
        torch.manual_seed(seed)
        began = process_time()
        for triples, others in batches:
            scores = self.model(triples, others)
            # Other tails that are right as well are no mistakes.
            right = self.graph.known[triples[:, :1], triples[:, 1:2], others]
            scores[:, 1:].masked_fill_(right, -torch.inf)
            loss = cross_entropy(scores, torch.zeros(len(triples), dtype=torch.long))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
        self.seconds += process_time() - began

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Filtered MRR and Hits@10 of the test triples."""
        self.model.eval()
        head, relation, tail = self.graph.test.T
        everything = self.model.entities(torch.arange(self.graph.entities))
        scores = self.model.query(head, relation) @ everything.T
        self.model.train()
        right = scores.gather(1, tail[:, None])
        scores[self.graph.true[head, relation]] = -torch.inf
        better, equal = (scores > right).sum(dim=1), (scores == right).sum(dim=1)
        rank = 1 + better + equal / 2
        found = {"MRR": (1 / rank).mean().item(), "Hits@10": (rank <= 10).float().mean().item()}
        self.curve.append((self.seconds, found["MRR"]))
        return found


def batches_of(graph: Graph, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of an epoch: triples, and random tails."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(graph.train), generator=generator)
    return [
        (triples, torch.randperm(graph.entities, generator=generator)[:NEGATIVES])
        for triples in torch.split(graph.train[order], size)
    ]


def peak_megabytes(run: Callable[[], Run], batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """How much resident memory grows while a model is made and trained."""

    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    run().train([(batches[0][0][:2], batches[0][1][:2])], seed=0)  # loads the code
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    run().train(batches, seed=0)
    return (kilobytes("VmHWM") - before) / 1024


def measure_memory(name: str, batch: int) -> float | None:
    """Measure it in a process of its own."""
    if sys.platform != "linux":
        return None
    # Freed memory goes back to the system at once, so that only memory in use counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--memory-of", name, "--batch", str(batch)]
    return float(subprocess.check_output(command, env=environment, text=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all of them and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two epochs: takes seconds")
    parser.add_argument("--batch", type=int, default=128, help="triples (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="(default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=SEMANTICS, metavar="NAME", help="optimizers, by name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--memory-of", choices=SEMANTICS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # too little work for more
    graph = Graph()
    epochs = 2 if options.quick else 40
    steps = epochs * -(-len(graph.train) // options.batch)
    names: list[str] = options.only or list(SEMANTICS)
    if options.memory_of:
        batches = batches_of(graph, options.batch, 0)
        print(peak_megabytes(lambda: Run(options.memory_of, graph, options.lr, steps), batches))
        return 0

    print(f"UMLS: {graph.entities} entities, {graph.relations // 2} relations and their inverses,")
    print(f"{len(graph.train) // 2:,} triples to train on, {len(graph.test) // 2} to test.")
    runs = {name: Run(name, graph, options.lr, steps) for name in names}
    found: dict[str, dict[str, float]] = {}
    shares: list[float] = []
    for epoch in range(epochs):
        batches = batches_of(graph, options.batch, epoch)
        shares += [graph.share(*batch) for batch in batches]
        for run in runs.values():
            run.train(batches, epoch)
        if epoch % 4 == 3 or epoch == epochs - 1:
            found = {name: run.evaluate() for name, run in runs.items()}
    share = sum(shares) / len(shares)
    print(f"A batch of {options.batch} triples looks up {100 * share:.0f} % of all rows.\n")

    print(f"{'':24}{'missing =':12}{'MRR':>8}{'Hits@10':>9}{'seconds':>9}{'peak MB':>9}")
    results: list[dict[str, object]] = []
    for name, run in runs.items():
        memory = None if options.quick or options.only else measure_memory(name, options.batch)
        mrr, hits = found[name].values()
        shown = "-" if memory is None else f"{memory:.1f}"
        meaning = "zero" if SEMANTICS[name] == "dense" else "skipped"
        print(f"{name:24}{meaning:12}{mrr:8.3f}{hits:9.3f}{run.seconds:9.1f}{shown:>9}")
        results.append(
            {
                "name": name,
                "semantics": SEMANTICS[name],
                "scores": found[name],
                "seconds": run.seconds,
                "megabytes": memory,
                "curve": run.curve,
            }
        )
    published = "  ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    print(f"\npublished, ConvE: {published}")
    if options.json:
        report = {
            "data": "UMLS",
            "metric": "MRR",
            "higher_is_better": True,
            "published": PUBLISHED,
            "published_by": "ConvE",
            "tolerance": TOLERANCE,
            "lr": options.lr,
            "batch": options.batch,
            "share_of_rows": share,
            "contestants": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    best = {name: max(each[name] for each in found.values()) for name in PUBLISHED}
    missed = [name for name in best if best[name] < PUBLISHED[name] - TOLERANCE]
    if missed and not options.quick:
        print(f"{missed} is more than {TOLERANCE} below the published figure.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
