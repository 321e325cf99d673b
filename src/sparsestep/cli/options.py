"""Converters for the options of the command line: each refuses bad values with one sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from sparsestep.errors import sentence


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A converter for argparse that refuses what is not a whole number in ``[low, high]``.

    Example:
        >>> whole_number(1, 10)("7")
        7
    """

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            contract = f"it must be a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(sentence(contract, repr(text)))
        return number

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """A converter for argparse that refuses what is not a number in ``[low, high]``.

    Example:
        >>> number(1, 10)("2.5")
        2.5
    """

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            contract = f"it must be a number from {low:g} to {high:,g}"
            raise argparse.ArgumentTypeError(sentence(contract, repr(text)))
        return value

    return convert


def output_path(suffix: str) -> Callable[[str], Path]:
    """A converter for argparse that refuses a path that such a file cannot be written to.

    Minutes of measuring come before the file, so writing is tried at once. An existing file keeps
    its contents until then.
    """

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(sentence(f"its name must end in {suffix}", repr(text)))
        existed = path.exists()
        try:
            path.open("ab").close()
            if not existed:
                path.unlink()
        except OSError as error:
            contract = f"it must be a file that can be written ({error.strerror})"
            raise argparse.ArgumentTypeError(sentence(contract, repr(text))) from None
        return path

    return convert
