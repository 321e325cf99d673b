"""The harness: what is measured, who takes part, how contestants take turns, what is kept."""

from pathlib import Path

# `make bench` builds the module `_limit` there.
__path__.append(str(Path(__file__).parents[2] / "build" / "bench"))
