"""The identifiers of Python source code: what the demo learns from."""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# What is not the library itself: what was installed beside it, and tests, whose vocabulary is
# mostly names that occur once.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

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


def identifiers(source: str) -> list[str]:
    r"""The identifiers of ``source`` in order; keywords, strings and comments are left out.

    Example:
        >>> identifiers('for name in names:  # each\n    print("a name", name)')
        ['name', 'names', 'print', 'name']
    """
    return [word for word in _TOKEN.findall(source) if word and not keyword.iskeyword(word)]


def standard_library() -> Path:
    """Where the running Python keeps the source of its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read(root: Path) -> list[list[str]]:
    """The identifiers of each Python file under ``root``, in the order of the files' paths.

    Args:
        root: a directory; tests and installed packages below it are left out.
    """
    files = sorted(
        path
        for path in root.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.is_file()
    )
    return [identifiers(path.read_text(encoding="utf-8", errors="replace")) for path in files]


@dataclass(frozen=True)
class Vocabulary:
    """The words that get a vector.

    Attributes:
        words: the most frequent first.
        counts: how often each was seen.
    """

    words: Sequence[str]
    counts: Sequence[int]

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each word."""
        return {word: place for place, word in enumerate(self.words)}


def vocabulary(files: Iterable[Iterable[str]], size: int) -> Vocabulary:
    """The ``size`` most frequent words of ``files``, or all of them if there are fewer.

    Words that are equally frequent keep the order in which they were first seen.

    Example:
        >>> vocabulary([["b", "a"], ["c", "a"]], size=2)
        Vocabulary(words=('a', 'b'), counts=(2, 1))
    """
    counts: Counter[str] = Counter()
    for words in files:
        counts.update(words)
    chosen = counts.most_common(size)
    return Vocabulary(tuple(word for word, _ in chosen), tuple(count for _, count in chosen))
