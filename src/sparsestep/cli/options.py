"""Converters for argparse; each rejects bad values with one sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from sparsestep.errors import message


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

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            requirement = f"it must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(message(requirement, repr(text)))
        return number

    return convert


def float_in_range(low: float, high: float) -> Callable[[str], float]:
    """Convert to a number in ``[low, high]``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            requirement = f"it must be a number from {low:g} to {high:,g}"
            raise argparse.ArgumentTypeError(message(requirement, repr(text)))
        return value

    return convert


def output_path(suffix: str) -> Callable[[str], Path]:
    """Convert to a path that a file with this suffix can be written to.

    Writing is tried at once, because minutes of measuring come before it. An existing file keeps
    its contents.
    """

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(message(f"its name must end in {suffix}", repr(text)))
        existed = path.exists()
        try:
            path.open("ab").close()
            if not existed:
                path.unlink()
        except OSError as error:
            requirement = f"it must be a file that can be written ({error.strerror})"
            raise argparse.ArgumentTypeError(message(requirement, repr(text))) from None
        return path

    return convert
