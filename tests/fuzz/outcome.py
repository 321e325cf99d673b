"""How a case ended: what processes tell each other, those without torch too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        seed: of the case.
        kind: of the case.
        finding: what was found, in a word or two; empty if nothing.
        detail: the same with numbers.
        steps: the program, as far as it got.
    """

    seed: int
    kind: str
    finding: str = ""
    detail: str = ""
    steps: tuple[str, ...] = ()
