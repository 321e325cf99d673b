"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


CLICKS = loaded("clicks")


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *options]
    # One thread: other tests run beside this one, and teams that wait for each other take long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["--float32"], marks=pytest.mark.slow)],
    ids=["float64", "float32"],
)
def test_one_optimizer_trains_like_two(options: list[str]):
    done = run("one_optimizer.py", "--steps", "40", *options)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", done.stdout, re.MULTILINE)
    assert [int(steps[0][0]), int(steps[-1][0])] == [1, 40]
    for _, ours, theirs in steps:
        assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    ours, theirs = re.findall(r"^  (?:one|two) optimizer.* (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    assert float(ours) < 0.67  # it has learned something: tossing a coin has 0.69


def test_the_recommender_learns_and_agrees_with_plain_torch():
    done = run("recommender.py", "--quick", "--steps", "60")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # lines alone, where there is no terminal
    lines = re.findall(
        r"^ +(\d+) +(0\.\d+) +(0\.\d+) +[\d,]+ +(0\.\d+) +(0\.\d+) +[\d,]+$",
        done.stdout,
        re.MULTILINE,
    )
    assert int(lines[-1][0]) == 60
    for _, ours, our_auc, theirs, their_auc in lines:
        assert float(ours) == pytest.approx(float(theirs), abs=2e-3)
        assert float(our_auc) == pytest.approx(float(their_auc), abs=2e-3)
    assert float(lines[0][2]) < 0.6 < 0.65 < float(lines[-1][2])
    best = re.search(r"best possible AUC.*: (0\.\d+)", done.stdout)
    assert best is not None
    assert float(lines[-1][2]) < float(best[1])
    speeds = re.search(r"^samples per second +([\d,]+) +([\d,]+) +(\d+\.\d)x$", done.stdout, re.M)
    assert speeds is not None


@hypothesis.given(scores=st.lists(st.integers(-3, 3), min_size=2, max_size=12), data=st.data())
def test_the_auc_is_the_share_of_pairs_in_the_right_order(scores: list[int], data: st.DataObject):
    size = len(scores)
    clicks = data.draw(
        st.lists(st.integers(0, 1), min_size=size, max_size=size).filter(
            lambda c: 0 < sum(c) < size
        )
    )
    pairs = [
        (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2
        for i in range(size)
        for j in range(size)
        if clicks[i] > clicks[j]
    ]
    found = CLICKS.auc(torch.tensor(scores).float(), torch.tensor(clicks).float())
    assert found == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_the_auc_of_many_scores_is_exact():
    """Their ranks add up to more than float32 can count."""
    size = 2**13
    scores, clicks = torch.arange(2 * size), torch.arange(2 * size) % 2
    # Each click has all non-clicks up to its own below it.
    assert CLICKS.auc(scores, clicks) == sum(range(1, size + 1)) / size**2


def test_clicks_are_the_same_for_a_seed_and_within_the_tables():
    log, again, other = (CLICKS.Clicks(seed, 1_000) for seed in (3, 3, 4))
    first = log.batch(64)
    for size in (64, 33):
        batch, same = first if size == 64 else log.batch(size), again.batch(size)
        for mine, its, rows, length in zip(
            batch.ids, same.ids, log.rows, CLICKS.LENGTHS, strict=True
        ):
            assert mine.shape == (size, length)
            assert torch.equal(mine, its)
            assert int(mine.min()) >= 0
            assert int(mine.max()) < rows
        assert torch.equal(batch.numbers, same.numbers)
        assert torch.equal(batch.clicks, same.clicks)
    assert not torch.equal(first.ids[0], other.batch(64).ids[0])


def test_averages_of_weights_see_current_rows():
    done = run("averages.py")
    assert done.returncode == 0, done.stdout + done.stderr
    apart = re.findall(r"(?:EMA|SWA) (\S+e-\d+)", done.stdout)
    assert len(apart) == 2
    assert all(0 < float(each) < 1e-4 for each in apart)


@pytest.mark.slow
def test_the_distributed_recommender_learns_and_goes_on_with_other_numbers_of_ranks(tmp_path: Path):
    pytest.importorskip("torch.distributed.run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = [str(EXAMPLES / "distributed_recommender.py"), "--rows", "2000", "--batch", "256"]
    found = []
    for steps, start in (("20", [*torchrun, "--nproc-per-node", "2"]), ("40", [])):
        arguments = [*start, *script, "--steps", steps, "--checkpoint", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        found += re.findall(r"^step +(\d+)   AUC (0\.\d+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [4, 8, 12, 16, 20, 24, 32, 40]
    assert float(found[0][1]) < 0.6 < 0.65 < float(found[-1][1])


@pytest.mark.slow
def test_a_stream_of_clicks_is_learned_with_a_tenth_of_the_rows(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "month.svg"
    done = run("streaming.py", "--quick", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    means = dict(re.findall(r"^(vocabulary|hashed|unlimited) +(0\.\d{4})$", done.stdout, re.M))
    found = {name: float(value) for name, value in means.items()}
    assert found["vocabulary"] > found["unlimited"] - 0.003
    assert found["vocabulary"] > found["hashed"] + 0.03
    last = re.search(r"^ 30 .* ([\d,]+), ([\d,]+), ([\d,]+)$", done.stdout, re.M)
    assert last is not None
    few, same, many = (int(each.replace(",", "")) for each in last.groups())
    assert few == same < many / 9
    assert "rows in use" in picture.read_text()
