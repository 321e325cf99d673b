"""Figures about the code base, each with the command that computes it (``make house``).

``python packaging/house.py`` prints all of them, ``python packaging/house.py NAME`` one that needs
Python: the lines of the table name them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparsestep"
WORDS = "whoever|nobody|somebody|anybody|anew"

SELF = "python packaging/house.py"
FIGURES = {
    "lines of src/**/*.py (without .pyi)": "find src -name '*.py' | xargs cat | wc -l",
    "files of src/**/*.py": "find src -name '*.py' | wc -l",
    "lines of tests/**/*.py": "find tests -name '*.py' | xargs cat | wc -l",
    "test cases": (
        "python -m pytest --collect-only -q -W ignore | awk -F': ' '{n += $2} END {print n}'"
    ),
    "folders of the package": "ls -d src/sparsestep/*/__init__.py | wc -l",
    "classes below torch.optim.Optimizer": f"{SELF} class-chain",
    "class names defined more than once": f"{SELF} duplicate-classes",
    "comparisons of .kind of placements": f"{SELF} kind-comparisons",
    "private accesses (SLF001, without _torch.py)": (
        "ruff check --isolated --select SLF001 --exclude _torch.py --output-format concise src "
        "| grep -c SLF001"
    ),
    f"the words {WORDS.replace('|', ', ')}": (
        "grep -rniwE --include=*.py --include=*.pyi --include=*.h --include=*.cpp --include=*.md "
        f"'{WORDS}' src native docs | wc -l"
    ),
    "lines of CONTRIBUTING.md": "wc -l < CONTRIBUTING.md",
    "Python frames, fused bag: forward, backward, step": f"{SELF} frames-bag",
    "Python frames, step with dense semantics": f"{SELF} frames-dense",
    "Python frames, functional call": f"{SELF} frames-functional",
}


def _trees(folder: Path = PACKAGE) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def class_chain() -> str:
    """The longest list of classes between an optimizer and ``torch.optim.Optimizer``."""
    import torch

    import sparsestep

    chains = [
        value.__mro__[: value.__mro__.index(torch.optim.Optimizer)]
        for value in vars(sparsestep).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    longest = max(chains, key=len)
    return f"{len(longest)} ({', '.join(each.__name__ for each in longest)})"


def duplicate_classes() -> str:
    """Names of classes with several definitions in the package."""
    names = Counter(
        node.name
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    found = sorted(name for name, count in names.items() if count > 1)
    return f"{len(found)} ({', '.join(found)})" if found else "0"


def kind_comparisons() -> str:
    """Comparisons with ``x.kind`` in ``distributed/``, apart from plan.py and placement.py."""
    inside = outside = 0
    for path, tree in _trees(PACKAGE / "distributed"):
        for node in ast.walk(tree):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides):
                if path.name in ("plan.py", "placement.py"):
                    inside += 1
                else:
                    outside += 1
    return f"{outside} (and {inside} in plan.py and placement.py)"


def _count_frames(work: Callable[[], object]) -> str:
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE))

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return str(calls)


def frames_bag() -> str:
    """Functions of the package in one iteration of a fused embedding bag."""
    import torch

    import sparsestep

    bag = sparsestep.nn.EmbeddingBag(10, 4, mode="sum")
    optimizer = sparsestep.Adam(bag.parameters())
    ids = torch.tensor([[1, 5], [1, 7]])

    def iterate() -> None:
        bag(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        iterate()
    return _count_frames(iterate)


def frames_dense() -> str:
    """Functions of the package in a step with ``semantics="dense"``."""
    import torch

    import sparsestep

    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = sparsestep.Adam(table.parameters(), semantics="dense")
    optimizer.track(table)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.tensor([1, 5, 1, 7])).sum().backward()
        frames = _count_frames(optimizer.step)
    return frames


def frames_functional() -> str:
    """Functions of the package in a call of ``functional.sgd_``."""
    import torch

    import sparsestep

    weight, buffer = torch.zeros(10, 4), torch.zeros(10, 4)
    grad = sparsestep.IndexedGrad(torch.tensor([1, 5, 1, 7]), torch.ones(4, 4))

    def call() -> None:
        sparsestep.functional.sgd_(weight, grad, buffer, lr=0.1, momentum=0.9)

    call()
    return _count_frames(call)


COMPUTED = {
    function.__name__.replace("_", "-"): function
    for function in (
        class_chain,
        duplicate_classes,
        kind_comparisons,
        frames_bag,
        frames_dense,
        frames_functional,
    )
}


def main() -> None:
    """Print the table, or one figure."""
    if sys.argv[1:]:
        print(COMPUTED[sys.argv[1]]())
        return
    python = Path(sys.executable).parent
    print("| figure | value | command |\n| --- | --- | --- |")
    for name, command in FIGURES.items():
        done = subprocess.run(
            ["bash", "-c", f'PATH="{python}:$PATH"; {command}'],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        shown = command.replace("|", "\\|")
        print(
            f"| {name} | {done.stdout.strip() or done.stderr.strip()[-80:]} | `{shown}` |",
            flush=True,
        )


if __name__ == "__main__":
    main()
