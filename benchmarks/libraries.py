"""Whole iterations of models from other libraries: PyKEEN, PyTorch Geometric, DeepCTR and gensim.

Each program is the library's own model and loss. Contestants have the same weights and the same
batches: torch's optimizer; ours on the model as it is ("ours"); ours as our documentation has it
("fused"). Programs whose library is not installed are left out. ``make integrations`` installs
PyKEEN and PyTorch Geometric;
``pip install --no-deps deepctr-torch==0.3.0 gensim==4.4.0 smart_open`` the others.

DeepFM's penalty is replaced by one on the rows of the batch ("fused"), or by decoupled weight decay
of the tables ("decay"). gensim draws its pairs in the iteration, ours are given.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import sparsestep
from benchmarks.harness.contestants import import_peer
from benchmarks.harness.race import add_rounds, medians
from benchmarks.harness.workload import SETS, Unavailable
from sparsestep.nn.functional import embedding_dot, embedding_l2

LR, EPS = 1e-3, 1e-15
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Training:
    """A model in training: one iteration is a step of the race."""

    model: Any
    optimizer: Optimizer
    loss: Loss
    batches: Sequence[Any]
    after: Callable[[], None] = lambda: None
    batch: Any = None

    def before(self, number: int, /) -> None:
        """Take the batch of a set."""
        self.batch = self.batches[number]

    def step(self) -> None:
        """Forward, backward and update."""
        self.optimizer.zero_grad()
        self.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.after()


# PyKEEN: knowledge graphs

ENTITIES, RELATIONS, TRIPLES, NEGATIVES = 200_000, 500, 1_024, 8


def triples(seed: int) -> tuple[Tensor, Tensor]:
    """True triples, and each of them with other tails."""
    generator = torch.Generator().manual_seed(seed)
    columns = [
        torch.randint(0, n, (TRIPLES, 1), generator=generator) for n in (ENTITIES, RELATIONS)
    ]
    tails = torch.randint(0, ENTITIES, (TRIPLES, NEGATIVES + 1), generator=generator)
    each = torch.stack([*(column.expand_as(tails) for column in columns), tails], dim=-1)
    return each[:, 0], each[:, 1:].reshape(-1, 3)


def ranking_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Hinge loss of true triples against the others."""
    true, wrong = (model.score_hrt(each) for each in batch)
    return functional.relu(1 + wrong.view(TRIPLES, -1) - true).mean()


def knowledge_graph(name: str) -> Iterator[tuple[str, Training]]:
    """A model that normalizes all entities after each step, trained by Adam on every row."""
    models, triples_module = map(import_peer, ("pykeen.models", "pykeen.triples"))
    known = triples_module.CoreTriplesFactory.create(
        torch.tensor([[0, 0, 1]]), num_entities=ENTITIES, num_relations=RELATIONS
    )
    model = getattr(models, name)(triples_factory=known, embedding_dim=64, random_seed=0)
    train = partial(Training, loss=ranking_loss, batches=[triples(seed) for seed in range(SETS)])
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=LR)
    yield "torch", train(theirs, optimizer, after=theirs.post_parameter_update)
    guarded = copy.deepcopy(model)
    ours = sparsestep.nn.optimizer_for(guarded, sparsestep.Adam, lr=LR)
    ours.track(guarded, guard=True)
    yield "guarded", train(guarded, ours, after=guarded.post_parameter_update)
    # The optimizer normalizes the rows that it updates, instead of PyKEEN all of them.
    entities = model.entity_representations[0]
    entities.constrainer = None
    (table,) = entities.parameters()
    others = [param for param in model.parameters() if param is not table]
    groups: list[dict[str, Any]] = [{"params": [table], "normalize": True}, {"params": others}]
    ours = sparsestep.nn.optimizer_for(model, sparsestep.Adam, params=groups, lr=LR)
    yield "fused", train(model, ours)


# PyTorch Geometric: walks on graphs

NODES, DIM, WALKS, LENGTH = 400_000, 128, 4_096, 7


def walks(seed: int) -> tuple[Tensor, Tensor]:
    """Walks, and as many that no graph has."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, NODES, (2, WALKS, LENGTH), generator=generator)
    return both[0], both[1]


def walk_scores(model: Any, walk: Tensor) -> Tensor:
    """Dot products of the first node of a walk with the others."""
    return embedding_dot(model.embedding, walk[:, 0], model.embedding, walk[:, 1:])


def walk_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of Node2Vec and MetaPath2Vec, without rows in memory."""
    true, wrong = (walk_scores(model, walk) for walk in batch)
    negative = -torch.log(1 - torch.sigmoid(wrong) + EPS).mean()
    return negative - torch.log(torch.sigmoid(true) + EPS).mean()


def random_walks(name: str) -> Iterator[tuple[str, Training]]:
    """A model of PyTorch Geometric, with its loss, and with ``embedding_dot``."""
    geometric = import_peer("torch_geometric.nn")
    edges = ("node", "to", "node")
    model = geometric.MetaPath2Vec(
        {edges: torch.tensor([[0], [1]])},
        embedding_dim=DIM,
        metapath=[edges],
        walk_length=LENGTH,
        context_size=LENGTH,
        num_nodes_dict={"node": NODES - 1},
        sparse=True,
    )
    # Node2Vec has the same table and loss, but a constructor that asks for a package of walks.
    loss = getattr(geometric, name).loss
    model.EPS = EPS
    train = partial(Training, batches=[walks(seed) for seed in range(SETS)])
    library_loss = lambda model, batch: loss(model, *batch)  # noqa: E731
    for title, make in (("torch", torch.optim.SparseAdam), ("ours", sparsestep.SparseAdam)):
        twin = copy.deepcopy(model)
        yield title, train(twin, make(twin.parameters(), lr=LR), loss=library_loss)
    twin = sparsestep.nn.fuse(copy.deepcopy(model))
    yield "fused", train(twin, sparsestep.SparseAdam(twin.parameters(), lr=LR), loss=library_loss)
    twin = sparsestep.nn.fuse(model)
    yield "dot", train(twin, sparsestep.SparseAdam(twin.parameters(), lr=LR), loss=walk_loss)


# DeepCTR: clicks

FIELDS, VALUES, EXAMPLES = 26, 20_000, 1_024


def clicks(seed: int) -> tuple[Tensor, Tensor]:
    """Ids of each field, and whether there was a click."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VALUES, (EXAMPLES, FIELDS), generator=generator)
    return ids.float(), torch.rand(EXAMPLES, 1, generator=generator).round()


def click_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """DeepCTR's loss, with its L2 penalty on all tables."""
    penalty: Tensor = model.get_regularization_loss().sum()
    return penalty + functional.binary_cross_entropy(model(batch[0]), batch[1])


def plain_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss without a penalty."""
    return functional.binary_cross_entropy(model(batch[0]), batch[1])


def penalized_rows_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss with a penalty on the rows that the batch looks up."""
    loss, ids = plain_loss(model, batch), batch[0].long()
    for tables in (model.embedding_dict, model.linear_model.embedding_dict):
        for field, table in enumerate(tables.values()):
            loss = loss + 1e-5 * embedding_l2(table, ids[:, field])
    return loss


def click_model() -> Iterator[tuple[str, Training]]:
    """DeepFM with its default penalty."""
    inputs, models = map(import_peer, ("deepctr_torch.inputs", "deepctr_torch.models"))

    def model(penalty: float, sparse: bool) -> nn.Module:
        fields = [inputs.SparseFeat(f"field {n}", VALUES, embedding_dim=16) for n in range(FIELDS)]
        made: nn.Module = models.DeepFM(
            fields, fields, l2_reg_linear=penalty, l2_reg_embedding=penalty
        )
        for table in made.modules():
            if isinstance(table, nn.Embedding):
                table.sparse = sparse
        return made

    train = partial(Training, batches=[clicks(seed) for seed in range(SETS)])
    theirs, ours, rows = model(1e-5, False), model(1e-5, False), model(0, True)
    dense = torch.optim.Adam(theirs.parameters(), lr=LR)
    yield "torch", train(theirs, dense, loss=click_loss)
    yield "ours", train(ours, sparsestep.Adam(ours.parameters(), lr=LR), loss=click_loss)
    optimizer = sparsestep.nn.optimizer_for(rows, sparsestep.Adam, lr=LR)
    yield "fused", train(rows, optimizer, loss=penalized_rows_loss)
    decayed = model(0, True)
    weights = [each.weight for each in decayed.modules() if isinstance(each, nn.Embedding)]
    others = [param for param in decayed.parameters() if all(param is not w for w in weights)]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 1e-5}, {"params": others}]
    decaying = sparsestep.nn.optimizer_for(
        decayed, sparsestep.AdamW, params=groups, lr=LR, weight_decay=0
    )
    yield "decay", train(decayed, decaying, loss=plain_loss)


# gensim: word vectors

WORDS, WINDOW, SENTENCES, LENGTH_OF_SENTENCE = 100_000, 5, 10, 1_000
DRAWN = 5  # words for each pair, as if they were near


def sentences(seed: int) -> Tensor:
    """Words, of which few are frequent."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(SENTENCES, LENGTH_OF_SENTENCE, generator=generator, dtype=torch.float64)
    return (WORDS**uniform).long() - 1


def pairs(words: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The words of all pairs that gensim trains, each with a word near it, then others."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.randint(1, WINDOW + 1, words.shape, generator=generator)
    near = [n for n in range(-WINDOW, WINDOW + 1) if n]
    index = torch.arange(LENGTH_OF_SENTENCE)
    found = []
    for n in near:
        inside = (index + n >= 0) & (index + n < LENGTH_OF_SENTENCE) & (reach >= abs(n))
        found.append(torch.stack([words[inside], words.roll(-n, dims=1)[inside]], dim=1))
    both = torch.cat(found)[torch.randperm(sum(map(len, found)), generator=generator)]
    others = words.flatten()[torch.randint(words.numel(), (len(both), DRAWN), generator=generator)]
    return both[:, 0], torch.cat([both[:, 1:], others], dim=1)


class WordVectors(nn.Module):
    """Skip-gram with words that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.center: nn.Embedding = nn.Embedding(WORDS, 100, sparse=True)
        self.context: nn.Embedding = nn.Embedding(WORDS, 100, sparse=True)
        nn.init.zeros_(self.context.weight)


def skip_gram(scores: Tensor) -> Tensor:
    """The loss: the first column is near, the others are not."""
    near, others = scores[:, 0], scores[:, 1:]
    return -functional.logsigmoid(near).sum() - functional.logsigmoid(-others).sum()


def materialized_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """With a row in memory for each word of a pair."""
    center, context = model.center(batch[0]), model.context(batch[1])
    return skip_gram((center.unsqueeze(1) * context).sum(-1))


def dot_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """With dot products in memory, and no rows."""
    return skip_gram(embedding_dot(model.center, batch[0], model.context, batch[1]))


class Gensim:
    """gensim's word2vec: one iteration is a call of ``train``, which draws the pairs as well."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        word2vec = import_peer("gensim.models").Word2Vec
        self._sentences = [[list(map(str, each)) for each in batch.tolist()] for batch in batches]
        self._model = word2vec(
            vector_size=100,
            window=WINDOW,
            negative=DRAWN,
            sg=1,
            sample=0,
            min_count=1,
            workers=torch.get_num_threads(),
            batch_words=LENGTH_OF_SENTENCE,
        )
        self._model.build_vocab([[str(word) for word in range(WORDS)]])

    def before(self, number: int, /) -> None:
        """Take the sentences of a set."""
        self._batch = self._sentences[number]

    def step(self) -> None:
        """Train on them once."""
        self._model.train(self._batch, total_examples=SENTENCES, epochs=1)


def word_vectors() -> Iterator[tuple[str, Any]]:
    """Plain gradient descent, as gensim has it."""
    words = [sentences(seed) for seed in range(SETS)]
    train = partial(Training, batches=[pairs(each, seed) for seed, each in enumerate(words)])
    model = WordVectors()
    for title, make, loss in (
        ("torch", torch.optim.SGD, materialized_loss),
        ("ours", sparsestep.SGD, materialized_loss),
        ("fused", sparsestep.SGD, materialized_loss),
        ("dot", sparsestep.SGD, dot_loss),
    ):
        twin = copy.deepcopy(model)
        if title in ("fused", "dot"):
            sparsestep.nn.fuse(twin)
        yield title, train(twin, make(twin.parameters(), lr=0.025), loss=loss)
    yield "gensim", Gensim(words)


PROGRAMS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "TransE": partial(knowledge_graph, "TransE"),
    "DistMult": partial(knowledge_graph, "DistMult"),
    "Node2Vec": partial(random_walks, "Node2Vec"),
    "MetaPath2Vec": partial(random_walks, "MetaPath2Vec"),
    "DeepFM": click_model,
    "word2vec": word_vectors,
}
# Words of an iteration, of programs that read words.
NUM_WORDS = {"word2vec": SENTENCES * LENGTH_OF_SENTENCE}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROGRAMS, nargs="+", default=list(PROGRAMS))
    add_rounds(parser, 24)
    given = parser.parse_args(arguments)
    for name in given.only:
        torch.manual_seed(0)
        try:
            contestants = dict(PROGRAMS[name]())
        except Unavailable as error:
            print(f"{name:<14} {error}")
            continue
        times = dict(
            zip(contestants, medians(list(contestants.values()), given.rounds), strict=True)
        )
        listed = ", ".join(
            f"{title} {time:.1f}" + (f" ({times['torch'] / time:.2f}x)" if title != "torch" else "")
            for title, time in times.items()
        )
        print(f"{name:<14} {listed} ms", flush=True)
        if name in NUM_WORDS:
            speeds = (f"{title} {NUM_WORDS[name] / time:,.0f}" for title, time in times.items())
            print(f"{'':<14} thousands of words per second: {', '.join(speeds)}", flush=True)


if __name__ == "__main__":
    main()
