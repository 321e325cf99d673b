"""Skip-gram word vectors with negative sampling, trained under a stopwatch.

A word's vector learns to tell the words that stand near it from words drawn at random. Each step
looks up a few thousand rows of two large tables, which is what makes the gradients sparse. The
words are the identifiers of Python source code.

References:
    Mikolov et al., `Distributed Representations of Words and Phrases and their Compositionality
    <https://arxiv.org/abs/1310.4546>`_, 2013.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from torch.optim import Optimizer

BATCH = 1024  # pairs per step
NEGATIVES = 5  # words drawn at random per pair
WINDOW = 2  # code is terse: words further apart have little to do with each other
LEARNING_RATE = 0.01

_NOISE_POWER = 0.75  # draws rare words more often than they occur, as word2vec does
_NOISE_TABLE = 1 << 20

# Rarer words have a vector, but hardly a meaning.
_FREQUENT = 1500

# Installed packages, and tests, whose names mostly occur once.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

# The standard library's tokenizer finds the same, about ten times slower. Comments and strings
# come first, so that what they contain is consumed before it can be taken for an identifier.
_TOKEN = re.compile(
    r"""
      \#[^\n]*
    | [bfrtu]{0,2} (?: \"{3} (?: [^"\\] | \\. | "(?!"") )* \"{3}
                     | '{3}  (?: [^'\\] | \\. | '(?!'') )* '{3} )
      # From 3.12 on, an f-string's fields may hold the quote that the string itself began with.
    | (?: [ft]r? | r[ft] ) (?: " (?: [^"\\\n{] | \\. | \{\{ | FIELD )* "
                             | ' (?: [^'\\\n{] | \\. | \{\{ | FIELD )* ' )
    | [bfrtu]{0,2} (?: " (?: [^"\\\n] | \\. )* " | ' (?: [^'\\\n] | \\. )* ' )
      # The boundary keeps the x of 0x10 out.
    | \b ( [^\W\d] \w* )
    """.replace("FIELD", r"\{(?!\{) (?: [^{}\n] | \{[^{}\n]*\} )* \}"),
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def find_identifiers(source: str) -> list[str]:
    """The identifiers of ``source`` in order; keywords, strings and comments are left out."""
    return [word for word in _TOKEN.findall(source) if word and not keyword.iskeyword(word)]


def stdlib_path() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path) -> list[list[str]]:
    """The identifiers of each Python file under ``root``, except for tests and packages."""
    files = sorted(
        path
        for path in root.rglob("*.py")
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.is_file()
    )
    return [find_identifiers(path.read_text(encoding="utf-8", errors="replace")) for path in files]


@dataclass(frozen=True)
class WordCounts:
    """The words that get a vector, the most frequent first, and how often each was seen."""

    words: Sequence[str]
    counts: Sequence[int]

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}


def count_words(files: Iterable[Iterable[str]], size: int) -> WordCounts:
    """The ``size`` most frequent words of ``files``, or all if there are fewer."""
    counts: Counter[str] = Counter()
    for words in files:
        counts.update(words)
    chosen = counts.most_common(size)
    return WordCounts(tuple(word for word, _ in chosen), tuple(count for _, count in chosen))


class SkipgramBatch(NamedTuple):
    """Words, and for each of them candidates: first one that stood near it, then random ones."""

    words: Tensor
    candidates: Tensor


def cooccurring_pairs(files: Iterable[Iterable[str]], known: WordCounts) -> Tensor:
    """Every pair of words at most ``WINDOW`` known words apart in one file, both ways round.

    Example:
        >>> cooccurring_pairs([["a", "rare", "b"], ["b"]], WordCounts(("a", "b"), (1, 2)))
        tensor([[0, 1],
                [1, 0]])
    """
    index = known.index
    found = [torch.empty(2, 0, dtype=torch.int64)]
    for words in files:
        rows = torch.tensor([index[word] for word in words if word in index], dtype=torch.int64)
        for distance in range(1, WINDOW + 1):
            pair = torch.stack([rows[:-distance], rows[distance:]])
            found += [pair, pair.flip(0)]
    return torch.cat(found, dim=1)


@dataclass(frozen=True)
class SkipgramDataset:
    """Random batches, the same ones every time they are iterated over."""

    pairs: Tensor  # int64 ``[2, n]``, words that stand near each other
    counts: Sequence[int]  # how often each word was seen
    steps: int  # number of batches
    seed: int
    noise: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Drawing from a table of words, each repeated in proportion to its share, is many times
        # faster than torch.multinomial, which sums up the shares for every batch.
        shares = torch.tensor(self.counts, dtype=torch.float64).pow(_NOISE_POWER).cumsum(0)
        middles = (torch.arange(_NOISE_TABLE, dtype=torch.float64) + 0.5) / _NOISE_TABLE
        object.__setattr__(self, "noise", torch.searchsorted(shares / shares[-1], middles))

    def __iter__(self) -> Iterator[SkipgramBatch]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            drawn = torch.randint(self.pairs.shape[1], (BATCH,), generator=generator)
            noise = torch.randint(_NOISE_TABLE, (BATCH, NEGATIVES), generator=generator)
            words, near = self.pairs[:, drawn]
            yield SkipgramBatch(words, torch.cat([near[:, None], self.noise[noise]], dim=1))


class SkipgramTables(NamedTuple):
    """The weights of the two tables: a word's own vector, and its vector as a candidate."""

    words: Tensor
    candidates: Tensor


def initial_tables(words: int, dim: int, seed: int) -> SkipgramTables:
    """The weights that training starts from."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.rand(words, dim, generator=generator).sub_(0.5).div_(dim)
    return SkipgramTables(vectors, torch.zeros(words, dim))


@dataclass
class TrainingRun:
    """The measurements of one training run."""

    name: str
    losses: list[float]  # of every step
    seconds: list[float]  # likewise: drawing the batch, forward, backward and update
    optimizer_seconds: float  # of these, in all calls of ``optimizer.step()``
    tables: SkipgramTables

    @property
    def final_loss(self) -> float:
        """The mean of the last hundred losses, since that of one batch is noisy."""
        last = self.losses[-100:]
        return sum(last) / len(last)


def train_steps(
    name: str,
    optimizer_class: Callable[..., Optimizer],
    weights: SkipgramTables,
    batches: Iterable[SkipgramBatch],
    clock: Callable[[], float] = perf_counter,
) -> Iterator[TrainingRun]:
    """Train copies of both tables; yields the run after each step, and does not time the caller."""
    words, candidates = (
        Embedding.from_pretrained(table.clone(), freeze=False, sparse=True) for table in weights
    )
    optimizer = optimizer_class([words.weight, candidates.weight], lr=LEARNING_RATE)
    trained = SkipgramTables(words.weight.detach(), candidates.weight.detach())
    run = TrainingRun(name, [], [], 0.0, trained)
    began = clock()
    for batch in batches:
        scores = (candidates(batch.candidates) @ words(batch.words).unsqueeze(2)).squeeze(2)
        truth = torch.zeros_like(scores)
        truth[:, 0] = 1
        loss = binary_cross_entropy_with_logits(scores, truth, reduction="sum") / len(scores)
        optimizer.zero_grad()
        loss.backward()
        before = clock()
        optimizer.step()
        run.optimizer_seconds += clock() - before
        run.losses.append(loss.item())
        run.seconds.append(clock() - began)
        yield run
        began = clock()


def train(
    name: str,
    optimizer_class: Callable[..., Optimizer],
    weights: SkipgramTables,
    batches: Iterable[SkipgramBatch],
) -> TrainingRun:
    """Train on all batches."""
    *_, run = train_steps(name, optimizer_class, weights, batches)
    return run


def max_difference(one: SkipgramTables, other: SkipgramTables) -> float:
    """The largest difference between two weights at the same index."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def nearest_neighbors(vectors: Tensor, known: WordCounts, word: str, count: int) -> list[str]:
    """The words with the highest cosine similarity to ``word``, among the frequent ones.

    The mean vector is subtracted first: it says how frequent a word is, not what it means.

    Example:
        >>> vectors = torch.tensor([[3.0, 0.1], [3.0, -0.1], [-3.0, 0.1], [-3.0, -0.1]])
        >>> nearest_neighbors(vectors, WordCounts("abcd", (1, 1, 1, 1)), "a", count=1)
        ['b']
    """
    common = vectors[:_FREQUENT].mean(dim=0)
    directions = normalize(vectors - common, dim=1)
    row = known.index[word]
    closeness = directions[:_FREQUENT] @ directions[row]
    if row < len(closeness):
        closeness[row] = -torch.inf
    count = min(count, len(known.words) - 1)
    return [known.words[i] for i in closeness.topk(count).indices.tolist()]
