"""Examples as Jupyter notebooks: a cell writes the program, another one runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def notebook(command: list[str], printed: str) -> dict[str, Any]:
    """Return an example, with its arguments and what it prints, in Jupyter's format 4.

    The packages that its docstring names are installed. ``%run`` runs it as a program, so its names
    can be used in further cells.
    """
    name = command[0]
    source = (EXAMPLES / name).read_text()
    about = ast.get_docstring(ast.parse(source)) or ""
    needed = ["sparsestep", *re.findall(r"``pip install ([^`]+)``", about)]
    output = {"output_type": "stream", "name": "stdout", "text": printed}
    return {
        "nbformat": 4,
        "nbformat_minor": 4,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": about},
            _code("\n".join(f"%pip install {each}" for each in needed)),
            _code(f"%%writefile {name}\n{source}"),
            {**_code(f"%run {' '.join(command)}"), "outputs": [output]},
        ],
    }


def _code(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "metadata": {},
        "source": source,
        "execution_count": None,
        "outputs": [],
    }
