"""What a new optimizer has to be added to, and CONTRIBUTING.md, which says so with an example."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparsestep
from sparsestep import functional, optim
from sparsestep._native import ext
from sparsestep.optim.mixed import MixedOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule, StateSpec
from tests.optim.test_formulas import PUBLISHED
from tests.torch_versions import needs_tensors_that_the_core_reads

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def defined() -> list[type[RuleOptimizer]]:
    """Every optimizer class in a file of ``optim/``."""
    found = []
    for each in pkgutil.iter_modules(optim.__path__, "sparsestep.optim."):
        classes = vars(importlib.import_module(each.name)).values()
        found += [
            cls
            for cls in classes
            if inspect.isclass(cls)
            and cls.__module__ == each.name
            and RuleOptimizer in cls.__bases__
            and cls is not MixedOptimizer  # it has no rule of its own
            and torch.optim.Optimizer in cls.__bases__
        ]
    return found


@pytest.mark.parametrize("cls", defined(), ids=lambda cls: cls.__name__)
def test_an_optimizer_is_everywhere(cls: type[RuleOptimizer]):
    name, file = cls.__name__, cls.__module__.rpartition(".")[2]
    page = f"docs/optimizers/{file}.md"
    missing = {
        f"add {name} to OPTIMIZERS in optim/__init__.py": cls in optim.OPTIMIZERS,
        f"import {name} in sparsestep/__init__.py, and add it to __all__": (
            name in sparsestep.__all__
        ),
        f"import Functional{name} in sparsestep/__init__.py, and add it to __all__": (
            f"Functional{name}" in sparsestep.__all__
        ),
        f"import {file}_ in functional.py, and add it to __all__": (
            f"{file}_" in functional.__all__
        ),
        f"write {page}": (ROOT / page).exists(),
        f"name {name} in README.md": bool(re.search(rf"\b{name}\b", README)),
        f"transcribe the formula of {name} in tests/optim/test_formulas.py": (
            hasattr(torch.optim, name) or name in dict(PUBLISHED)
        ),
    }
    assert all(missing.values()), [what for what, is_done in missing.items() if not is_done]


# CONTRIBUTING.md


TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMPILER = shutil.which("c++")

# One element, three steps; values in and out as hexadecimal floats.
PROGRAM = """
#include <cstdio>
#include "rules/math.h"
namespace sparsestep {{ namespace {{ {struct} }} }}
int main() {{
    const double options[] = {{0.125, 0.75, 0.5, 0.25}};
    const double grads[] = {{1.5, -0.5, 0.0625}};
    double param = 1, exp_avg = 0, exp_inf = 0;
    for (int step = 1; step <= 3; ++step)
        sparsestep::Adamax<double>(options, step)(param, grads[step - 1], exp_avg, exp_inf);
    std::printf("%a %a %a", param, exp_avg, exp_inf);
}}
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    names = {"torch": torch, "Rule": Rule, "StateSpec": StateSpec, "RuleOptimizer": RuleOptimizer}
    exec(compile(block("python"), "CONTRIBUTING.md", "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")
def test_the_example_is_torchs_adamax(example: SimpleNamespace):
    params = [torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) for _ in range(3)]
    ours, theirs = example.Adamax(params[:2]), torch.optim.Adamax(params[2:])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        grad = torch.randn(4, 2, dtype=torch.float64, generator=generator)
        grad[2:] = 0
        params[0].grad = params[2].grad = grad
        params[1].grad = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), grad[:2], (4, 2))
        ours.step()
        theirs.step()
    torch.testing.assert_close(params[0], params[2])
    torch.testing.assert_close(params[1][:2], params[2][:2])
    assert torch.equal(params[1][2:], torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_struct_computes_what_the_formula_does(example: SimpleNamespace, tmp_path: Path):
    source, program = tmp_path / "adamax.cpp", tmp_path / "adamax"
    source.write_text(PROGRAM.format(struct=block("cpp")))
    command = [str(COMPILER), "-std=c++17", "-ffp-contract=off", "-I", str(ROOT / "native")]
    subprocess.run([*command, str(source), "-o", str(program)], check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60)
    found = [float.fromhex(value) for value in done.stdout.split()]
    values = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 0.0, 0.0)]
    hyperparams = {"lr": 0.125, "betas": (0.75, 0.5), "eps": 0.25}
    for step, grad in enumerate((1.5, -0.5, 0.0625), start=1):
        grad = torch.tensor(grad, dtype=torch.float64)
        values = example.update(values[0], grad, *values[1:], step=step, **hyperparams)
    assert found == [float(value) for value in values]


def test_the_struct_has_every_member_that_the_core_reads():
    def members(text: str) -> set[str]:
        lines = re.findall(r"static constexpr \w+(?: \w+\*)? (.*);", text)
        return {name for line in lines for name in re.findall(r"(\w+) =", line)}

    assert members(block("cpp")) == members((ROOT / "native" / "rules" / "lion.h").read_text())


def test_the_page_is_short_and_its_paths_exist():
    assert len(TEXT.splitlines()) <= 120
    paths = re.findall(r"`((?:native|tests|docs|benchmarks|src|examples)/[\w./]*)`", TEXT)
    missing = [path for path in paths if not (ROOT / path).exists() and "adamax" not in path]
    assert not missing


@needs_tensors_that_the_core_reads
@pytest.mark.skipif(ext is None, reason="the walk through the core")
@pytest.mark.parametrize(("figure", "most"), [("bag", 30), ("dense", 30), ("functional", 4)])
def test_the_walk_of_a_step(figure: str, most: int):
    """How many Python functions a warm step goes through."""
    assert int(runpy.run_path(str(ROOT / "packaging" / "house.py"))[f"frames_{figure}"]()) <= most
