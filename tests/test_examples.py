"""The examples run, and show what they say they show."""

from __future__ import annotations

import bz2
import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.processes import run_python
from tests.torch_versions import needs_means_over_gloo

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


Run = Callable[..., str]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> Callable[..., str]:
    """Run an example as a program; what it prints, and what it exits with if that is no success."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            if end.code:
                return str(end.code)
        return capsys.readouterr().out

    return run


def test_one_optimizer_trains_like_two(run: Run):
    printed = run("one_optimizer.py", "--steps", "40")
    steps = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", printed, re.MULTILINE)
    assert [int(steps[0][0]), int(steps[-1][0])] == [1, 40]
    for _, ours, theirs in steps:
        assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    ours, theirs = re.findall(r"^  (?:one|two) optimizer.* (\d\.\d+)$", printed, re.MULTILINE)
    assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    assert float(ours) < 0.67  # it has learned something: tossing a coin has 0.69


def test_the_recommender_learns_and_agrees_with_plain_torch(run: Run):
    printed = run("recommender.py", "--quick", "--steps", "60")
    assert "\x1b" not in printed  # lines alone, where there is no terminal
    lines = re.findall(
        r"^ +(\d+) +(0\.\d+) +(0\.\d+) +[\d,]+ +(0\.\d+) +(0\.\d+) +[\d,]+$",
        printed,
        re.MULTILINE,
    )
    assert int(lines[-1][0]) == 60
    for _, ours, our_auc, theirs, their_auc in lines:
        assert float(ours) == pytest.approx(float(theirs), abs=2e-3)
        assert float(our_auc) == pytest.approx(float(their_auc), abs=2e-3)
    assert float(lines[0][2]) < 0.6 < 0.65 < float(lines[-1][2])
    best = re.search(r"best possible AUC.*: (0\.\d+)", printed)
    assert best is not None
    assert float(lines[-1][2]) < float(best[1])
    speeds = re.search(r"^samples per second +([\d,]+) +([\d,]+) +(\d+\.\d)x$", printed, re.M)
    assert speeds is not None


def test_the_auc_is_the_share_of_pairs_in_the_right_order():
    """Exactly so: ranks of many scores add up to more than float32 can count."""
    auc, size = loaded("recommender").auc, 2**13
    assert auc(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])) == 0.75
    scores, clicks = torch.arange(2 * size), torch.arange(2 * size) % 2
    # Each click has all non-clicks up to its own below it.
    assert auc(scores, clicks) == sum(range(1, size + 1)) / size**2


def test_averages_of_weights_see_current_rows(run: Run):
    printed = run("averages.py")
    apart = re.findall(r"(?:EMA|SWA) (\S+e-\d+)", printed)
    assert len(apart) == 2
    assert all(0 < float(each) < 1e-4 for each in apart)


@pytest.mark.slow
def test_the_distributed_recommender_learns_and_goes_on_with_other_numbers_of_ranks(tmp_path: Path):
    pytest.importorskip("torch.distributed.run")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = [str(EXAMPLES / "distributed_recommender.py"), "--rows", "2000", "--batch", "256"]
    found = []
    for steps, start in (("20", [*torchrun, "--nproc-per-node", "2"]), ("40", [])):
        arguments = [*start, *script, "--steps", steps, "--checkpoint", str(tmp_path)]
        printed = run_python(*arguments, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        found += re.findall(r"^step +(\d+)   AUC (0\.\d+)", printed, re.MULTILINE)
    assert [int(step) for step, _ in found] == [4, 8, 12, 16, 20, 24, 32, 40]
    assert float(found[0][1]) < 0.6 < 0.65 < float(found[-1][1])


@pytest.mark.slow
def test_a_stream_of_clicks_is_learned_with_a_tenth_of_the_rows(run: Run, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "month.svg"
    printed = run("streaming.py", "--quick", "--picture", str(picture))
    means = dict(re.findall(r"^(vocabulary|hashed|unlimited) +(0\.\d{4})$", printed, re.M))
    found = {name: float(value) for name, value in means.items()}
    assert found["vocabulary"] > found["unlimited"] - 0.003
    assert found["vocabulary"] > found["hashed"] + 0.03
    last = re.search(r"^ 30 .* ([\d,]+), ([\d,]+), ([\d,]+)$", printed, re.M)
    assert last is not None
    few, same, many = (int(each.replace(",", "")) for each in last.groups())
    assert few == same < many / 9
    assert "rows in use" in picture.read_text()


def tiny_data(folder: Path) -> None:
    """Files with the names and formats that the examples on real data read, but small."""
    people = [
        f"{user}\t{movie}\t{1 + (user + movie) % 5}"
        for user in range(1, 60)
        for movie in range(1, 20)
    ]
    triples = [f"e{i}\tplus {step}\te{(i + step) % 40}" for i in range(40) for step in (1, 2, 3)]
    text = " ".join(f"{{{{cite|x}}}} [[king|queen]] man of war {i % 7}" for i in range(400))
    files = {
        "recbole/dataset_example/ml-100k/ml-100k.inter": "\n".join(["header", *people]),
        "pykeen/datasets/umls/train.txt": "\n".join(triples[:100]),
        "pykeen/datasets/umls/valid.txt": "\n".join(triples[100:110]),
        "pykeen/datasets/umls/test.txt": "\n".join(triples[110:]),
        "gensim/test/test_data/wordsim353.tsv": "# pairs\nQueen\tman\t5\nman\twar\t2\nof\twar\t1",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        (folder / name.partition("/")[0] / "__init__.py").write_text("raise ImportError")
    page = f"<page><text>{text}</text></page>\n" * 9
    (folder / "gensim/test/test_data" / WORDS.ARTICLES).write_bytes(bz2.compress(page.encode()))


WORDS = loaded("word_vectors")


EACH_DATA = pytest.mark.parametrize(
    ("name", "package"),
    [("umls", "pykeen"), ("movielens", "recbole"), ("word_vectors", "gensim")],
)


@EACH_DATA
def test_on_real_data_ours_has_the_accuracy_of_torch(
    name: str, package: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_data(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of processes that measure memory
    run(f"{name}.py", "--quick", "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    scores = {each["name"]: each["scores"] for each in found["contestants"]}
    assert scores["sparsestep.Adam"] == pytest.approx(scores["torch.optim.Adam"], abs=2e-3)
    masked = scores["torch.optim.SparseAdam"]
    assert scores["sparsestep.SparseAdam"] == pytest.approx(masked, abs=2e-3)
    assert masked != scores["torch.optim.Adam"]


@EACH_DATA
def test_without_its_data_an_example_says_what_to_install(name: str, package: str, run: Run):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    assert f"pip install --no-deps {package}==" in run(f"{name}.py", "--quick")


def test_the_plain_text_of_an_article_and_the_ranks_of_equal_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_data(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert WORDS.articles()[0][:5] == ["queen", "man", "of", "war", "queen"]
    assert WORDS.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_the_board_notices_what_has_become_worse_and_the_page_shows_the_results():
    board = pytest.importorskip("benchmarks.board")
    if not board.RESULTS.exists():
        pytest.skip("make board has not been run")
    results = json.loads(board.RESULTS.read_text())["results"]
    assert board.written(board.PAGE.read_text(), results) == board.PAGE.read_text()
    for result in results:
        assert board.regressions(result, result) == []
        ours = next(each for each in result["contestants"] if board.is_ours(each))
        seconds, scores = ours["seconds"], dict(ours["scores"])
        slower = {**ours, "seconds": 2 * seconds}
        others = [each for each in result["contestants"] if each is not ours]
        (said,) = board.regressions({**result, "contestants": [slower, *others]}, result)
        assert "in the last results" in said
        sign = -1 if result["higher_is_better"] else 1
        scores[result["metric"]] += sign * 0.4
        worse = {**result, "contestants": [{**ours, "scores": scores}, *others]}
        (apart,) = board.regressions(worse, result)
        assert f"from {board.twin(result, ours)['name']}" in apart
        published = {name: value - sign * 0.4 for name, value in result["published"].items()}
        missed = board.regressions({**result, "published": published}, result)
        assert len(missed) == len(published)
        assert all("published" in each for each in missed)


@pytest.mark.usefixtures("one_thread")
def test_patterns_that_change_learn_more_than_a_fixed_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example = loaded("dynamic_sparsity")
    monkeypatch.setattr(example, "STEPS", 300)
    assert example.main() == 0
    printed = capsys.readouterr().out
    fixed, _, rigl = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed))
    assert rigl < 0.2 * fixed


def test_a_memory_of_ngrams_learns_what_is_not_in_its_text(run: Run):
    printed = run("ngram_memory.py", "--steps", "16", "--rows", "5000", "--sizes", "1000")
    lines = re.findall(r"^ +([\d,]+) +(\d\.\d+) +[\d.]+ s +(\d\.\d+) +[\d.]+ s$", printed, re.M)
    assert len(lines) == 9
    assert lines[0][1] == lines[0][2]  # both start the same
    assert float(lines[-1][2]) < float(lines[-1][1]) < float(lines[0][1])
    learned, held_out = (bytes(part.tolist()) for part in loaded("ngram_memory").load())
    known = {learned[at : at + 80] for at in range(len(learned) - 80)}
    windows = [held_out[at : at + 80] for at in range(len(held_out) - 80)]
    assert sum(window in known for window in windows) < 0.02 * len(windows)


@needs_means_over_gloo
@pytest.mark.parametrize(("layers", "table"), [("DDP", "shared"), ("FSDP2", "sharded")])
def test_a_memory_beside_layers_on_ranks(layers: str, table: str):
    script = [str(EXAMPLES / "ngram_ranks.py"), "--layers", layers, "--table", table]
    printed = run_python(*script, "--steps", "12", "--rows", "5000")
    first, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed))
    assert last < first - 1
    moved = re.search(r"([\d,]+) of 5,000 rows have moved", printed)
    assert (moved is not None) == (table == "shared")
    assert moved is None or int(moved[1].replace(",", "")) > 1_000
