"""Skip-gram word vectors with negative sampling, trained under a stopwatch.

A word's vector learns to tell the words that stand near it from words drawn at random. Each step
looks up a few thousand rows of two large tables, which is what makes the gradients sparse.

References:
    Mikolov et al., `Distributed Representations of Words and Phrases and their Compositionality
    <https://arxiv.org/abs/1310.4546>`_, 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from torch.optim import Optimizer

from sparsestep.cli.identifiers import Vocabulary

BATCH = 1024  # pairs per step
NEGATIVES = 5  # words drawn at random per pair
WINDOW = 2  # code is terse: what stands further away has little to do with a word
LEARNING_RATE = 0.01

_NOISE_POWER = 0.75  # draws rare words more often than they occur, as word2vec does
_NOISE_TABLE = 1 << 20

# A word that was seen a handful of times has a vector, but hardly a meaning.
_KNOWN_WELL = 1500


class Batch(NamedTuple):
    """Words, and for each of them candidates: first one that stood near it, then random ones."""

    words: Tensor
    candidates: Tensor


def pairs(files: Iterable[Iterable[str]], known: Vocabulary, window: int = WINDOW) -> Tensor:
    """Every pair of words at most ``window`` known words apart in one file, both ways round.

    Example:
        >>> pairs([["a", "rare", "b"], ["b"]], Vocabulary(("a", "b"), (1, 2)))
        tensor([[0, 1],
                [1, 0]])
    """
    index = known.index
    found = [torch.empty(2, 0, dtype=torch.int64)]
    for words in files:
        places = torch.tensor([index[word] for word in words if word in index], dtype=torch.int64)
        for distance in range(1, window + 1):
            ahead = torch.stack([places[:-distance], places[distance:]])
            found += [ahead, ahead.flip(0)]
    return torch.cat(found, dim=1)


@dataclass(frozen=True)
class Batches:
    """Random batches, the same ones every time they are iterated over.

    Attributes:
        pairs: int64 ``[2, n]``, words that stand near each other.
        counts: how often each word was seen.
        steps: how many batches there are.
        seed: what they are drawn from.
    """

    pairs: Tensor
    counts: Sequence[int]
    steps: int
    seed: int
    noise: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Drawing from a table in which each word has its share of places is many times faster
        # than torch.multinomial, which sums up the shares anew for every batch.
        shares = torch.tensor(self.counts, dtype=torch.float64).pow(_NOISE_POWER).cumsum(0)
        middles = (torch.arange(_NOISE_TABLE, dtype=torch.float64) + 0.5) / _NOISE_TABLE
        object.__setattr__(self, "noise", torch.searchsorted(shares / shares[-1], middles))

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            drawn = torch.randint(self.pairs.shape[1], (BATCH,), generator=generator)
            places = torch.randint(_NOISE_TABLE, (BATCH, NEGATIVES), generator=generator)
            words, near = self.pairs[:, drawn]
            yield Batch(words, torch.cat([near[:, None], self.noise[places]], dim=1))


class Tables(NamedTuple):
    """The weights of the two tables: a word's own vector, and its vector as a candidate."""

    words: Tensor
    candidates: Tensor


def start(words: int, dim: int, seed: int) -> Tables:
    """The weights that training starts from."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.rand(words, dim, generator=generator).sub_(0.5).div_(dim)
    return Tables(vectors, torch.zeros(words, dim))


@dataclass
class Run:
    """What one training run measured.

    Attributes:
        name: of the optimizer.
        losses: of every step.
        seconds: of every step: drawing the batch, forward, backward and update.
        optimizer_seconds: of these, what all calls of ``optimizer.step()`` took together.
        tables: the trained weights.
    """

    name: str
    losses: list[float]
    seconds: list[float]
    optimizer_seconds: float
    tables: Tables

    @property
    def final_loss(self) -> float:
        """The mean of the last hundred losses, since that of one batch is noisy."""
        last = self.losses[-100:]
        return sum(last) / len(last)


def training(
    name: str,
    optimizer_class: Callable[..., Optimizer],
    weights: Tables,
    batches: Iterable[Batch],
) -> Iterator[Run]:
    """Train both tables from ``weights`` on, which are left as they are.

    Args:
        name: of the optimizer, for people.
        optimizer_class: takes parameters and ``lr``.
        weights: where to start.
        batches: one per step.

    Yields:
        The run, always the same, after each step; the clock stands still until the next one.
    """
    words, candidates = (
        Embedding.from_pretrained(table.clone(), freeze=False, sparse=True) for table in weights
    )
    optimizer = optimizer_class([words.weight, candidates.weight], lr=LEARNING_RATE)
    trained = Tables(words.weight.detach(), candidates.weight.detach())
    run = Run(name, [], [], 0.0, trained)
    began = perf_counter()
    for batch in batches:
        scores = (candidates(batch.candidates) @ words(batch.words).unsqueeze(2)).squeeze(2)
        truth = torch.zeros_like(scores)
        truth[:, 0] = 1
        loss = binary_cross_entropy_with_logits(scores, truth, reduction="sum") / len(scores)
        optimizer.zero_grad()
        loss.backward()
        before = perf_counter()
        optimizer.step()
        run.optimizer_seconds += perf_counter() - before
        run.losses.append(loss.item())
        run.seconds.append(perf_counter() - began)
        yield run
        began = perf_counter()


def train(
    name: str,
    optimizer_class: Callable[..., Optimizer],
    weights: Tables,
    batches: Iterable[Batch],
    each_step: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Train on all batches; ``each_step`` is called between steps, off the clock."""
    for run in training(name, optimizer_class, weights, batches):
        each_step(run)
    return run


def difference(one: Tables, other: Tables) -> float:
    """The largest distance between two weights of the same place."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def neighbours(vectors: Tensor, known: Vocabulary, word: str, count: int) -> list[str]:
    """The words whose vectors point most nearly where that of ``word`` points (cosine).

    Only frequent words are candidates. The vectors' common direction is taken out first, because it
    says how frequent a word is, and nothing about its meaning.

    Example:
        >>> vectors = torch.tensor([[3.0, 0.1], [3.0, -0.1], [-3.0, 0.1], [-3.0, -0.1]])
        >>> neighbours(vectors, Vocabulary("abcd", (1, 1, 1, 1)), "a", count=1)
        ['b']
    """
    common = vectors[:_KNOWN_WELL].mean(dim=0)
    directions = normalize(vectors - common, dim=1)
    place = known.index[word]
    closeness = directions[:_KNOWN_WELL] @ directions[place]
    if place < len(closeness):
        closeness[place] = -torch.inf
    count = min(count, len(known.words) - 1)
    return [known.words[i] for i in closeness.topk(count).indices.tolist()]
