"""Converters for argparse; each rejects bad values with one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sparsestep.errors import message

Number = TypeVar("Number", int, float)


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    convert: Callable[[str], float],
    default: float,
    help: str,
    metavar: str = "N",
) -> None:
    """Declare an option that is a number; its help ends with the default."""
    shown = "%(default)g" if isinstance(default, float) else "%(default)s"
    text = f"{help} (default: {shown})"
    parser.add_argument(name, type=convert, default=default, metavar=metavar, help=text)


def int_in_range(low: int, high: int) -> Callable[[str], int]:
    """Convert to an integer in ``[low, high]``."""
    return _in_range(int, low, high, f"a whole number from {low} to {high}")


def float_in_range(low: float, high: float) -> Callable[[str], float]:
    """Convert to a number in ``[low, high]``."""
    return _in_range(float, low, high, f"a number from {low:g} to {high:,g}")


def _in_range(
    kind: Callable[[str], Number], low: float, high: float, what: str
) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        with suppress(ValueError):
            number = kind(text)
            if low <= number <= high:
                return number
        raise argparse.ArgumentTypeError(message(f"must be {what}", repr(text)))

    return convert


def output_path(suffix: str) -> Callable[[str], Path]:
    """Convert to a path that a file with this suffix can be written to.

    Writing is tried at once, because minutes of measuring come before it. An existing file keeps
    its contents.
    """

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(message(f"must end in {suffix}", repr(text)))
        existed = path.exists()
        try:
            path.open("ab").close()
            if not existed:
                path.unlink()
        except OSError as error:
            requirement = f"must be a writable file ({error.strerror})"
            raise argparse.ArgumentTypeError(message(requirement, repr(text))) from None
        return path

    return convert
