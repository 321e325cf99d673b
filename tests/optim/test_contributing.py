"""The example of CONTRIBUTING.md is an optimizer: its formula is torch's, and its struct agrees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule, StateSpec

ROOT = Path(__file__).parents[2]
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
