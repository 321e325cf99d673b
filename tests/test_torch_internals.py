"""Private names of torch stand in one file, and this torch has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep import _torch as torch_internals

SOURCES = Path(sparsestep.__file__).parent
# A name of torch's that begins with an underscore, in an import or after a dot.
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_)\w+|^\s*from torch[\w.]* import .*\b_(?!_)\w+"
    r"|\._(values|indices|version|parameters|use_count|cdata)\b\(?\)?"
)
OWN = {"self._version", "self._values", "self._indices", "self._parameters"}


def test_this_torch_has_all_of_them():
    assert torch_internals.missing == []


def test_what_is_missing_is_replaced_or_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_internals, "missing", [])
    assert torch_internals._private("torch._C._no_such_name", "do nothing", 7) == 7
    message = r"sparsestep needs torch\._C\._no_such_name to do nothing, and torch .* does not"
    with pytest.raises(ImportError, match=message):
        torch_internals._private("torch._C._no_such_name", "do nothing")
    assert torch_internals.missing == 2 * ["torch._C._no_such_name"]


def test_a_function_is_marked_as_torch_marks_it():
    assert vars(torch_internals.assume_constant_result(lambda: 1)) == vars(
        torch.compiler.assume_constant_result(lambda: 1)
    )


def test_tensors_are_put_together_in_one_place_alone():
    """Under autocast torch's own functions have no rule for float16 on CPUs."""
    joins = re.compile(r"torch\.(cat|stack|hstack|vstack)\(")
    users = [
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if joins.search(path.read_text()) and "cli" not in path.relative_to(SOURCES).parts
    ]
    assert users == ["_torch.py"]


def test_they_stand_nowhere_else():
    found = [
        f"{path.relative_to(SOURCES)}: {match[0]}"
        for path in SOURCES.rglob("*.py")
        if path.name != "_torch.py"
        for line in path.read_text().splitlines()
        for match in PRIVATE.finditer(line)
        if "self" + match[0] not in OWN and "sys.modules" not in line
    ]
    assert found == []
