"""Where the commands print to."""

from __future__ import annotations

from rich.console import Console


class Streams:
    """Results go to stdout, progress to stderr: a pipe or a file gets the results alone."""

    def __init__(self) -> None:
        self._results = Console(highlight=False)
        self._progress = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Print a line, which is not broken: a path in it can be copied."""
        self._results.print(text, markup=False, soft_wrap=True)
