from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsestep.cli import display, identifiers, main, picture, skipgram, turns
from sparsestep.cli.identifiers import Vocabulary

# Without the C++ core, the library says that it is slow; what is tested here stays true.
pytestmark = pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")

SOURCE = """
def first(items, append):
    for item in items:
        append(item, len(items))
        json.dump(item, open(path))
"""
TINY = ["demo", "--words", "200", "--steps", "5", "--dim", "8", "--out"]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of three small files."""
    root = tmp_path / "library"
    root.mkdir()
    for number in range(3):
        (root / f"module{number}.py").write_text(f"{SOURCE}\nname_{number} = first\n")
    monkeypatch.setattr(identifiers, "standard_library", lambda: root)
    return root


@pytest.mark.usefixtures("library")
def test_a_tiny_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "picture.png"
    assert main([*TINY, str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert out.stat().st_size > 10_000

    printed, progress = capsys.readouterr()
    assert "3 files" in printed
    assert "5 steps per run or 60 s" in printed
    assert re.search(r"torch\.optim\.SparseAdam +sparsestep\.SparseAdam +ratio", printed)
    assert re.search(r"time per step +\d+\.\d\d ms +\d+\.\d\d ms +\d+\.\dx", printed)
    assert re.search(r"in optimizer\.step\(\) +\d+\.\d\d ms +\d+\.\d\d ms +\d+\.\dx", printed)
    losses = re.search(r"loss at the end +(\d\.\d+) +(\d\.\d+)", printed)
    assert losses is not None
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-3)
    apart = re.search(r"max weight difference +(\S+)", printed)
    assert apart is not None
    assert float(apart[1]) < 1e-5
    assert re.search(r"append +(\w+ *){5}\n", printed)
    assert "startswith" not in printed  # not in these files
    assert f"{out}\n" in printed
    assert "max weight difference" in printed.splitlines()[-1]  # the results are what one sees last

    lines = progress.splitlines()
    assert len(lines) == 2  # one per run, however many steps
    assert all("5/5" in line for line in lines)
    said = [line for line in printed.splitlines() if str(out) not in line]  # that may be anywhere
    assert max(map(len, lines + said)) <= 80


@pytest.mark.usefixtures("library")
def test_the_losses_depend_on_the_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[skipgram.Run] = []
    monkeypatch.setattr(picture, "draw", lambda path, theirs, ours, words: runs.append(ours))
    for seed in "0", "0", "1":
        assert main([*TINY, str(tmp_path / "a.png"), "--seed", seed]) == 0
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses != runs[2].losses


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--words", "9"], "--words: it must be a whole number from 10 to 1000000. Got '9'."),
        (["--steps", "0"], "--steps: it must be a whole number from 1 to 1000000. Got '0'."),
        (["--steps", "many"], "--steps: it must be a whole number from 1 to 1000000. Got 'many'."),
        (["--dim", "1e3"], "--dim: it must be a whole number from 1 to 1024. Got '1e3'."),
        (["--seed", "-1"], "--seed: it must be a whole number from 0 to"),
        (["--out", "a.svg"], "--out: its name must end in .png. Got 'a.svg'."),
        (["--out", "no/such/directory/a.png"], "(No such file or directory). Got 'no/such/"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_a_bad_option_gets_one_sentence(
    options: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *options])
    printed, complaints = capsys.readouterr()
    assert printed == ""
    (line,) = (line for line in complaints.splitlines() if "error:" in line)
    assert complaint in line
    assert list(tmp_path.iterdir()) == []  # looking whether --out can be written left nothing


def test_a_directory_is_no_place_for_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--out", str(tmp_path / "a.png")])
    assert "a file that can be written (Is a directory)" in capsys.readouterr().err


def test_an_earlier_picture_survives_until_there_is_a_new_one(
    library: Path, tmp_path: Path
) -> None:
    for file in library.iterdir():
        file.unlink()
    out = tmp_path / "a.png"
    out.write_bytes(b"earlier")
    with pytest.raises(SystemExit, match="no Python source to learn from in"):
        main([*TINY, str(out)])
    assert out.read_bytes() == b"earlier"


@pytest.mark.usefixtures("library")
def test_a_picture_that_cannot_be_written_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture, "draw", fail)
    with pytest.raises(SystemExit, match=r"cannot write the picture: .*No space left on device"):
        main([*TINY, str(tmp_path / "a.png")])


@pytest.mark.usefixtures("library")
def test_an_interrupt_leaves_the_terminal_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(display.Bars, "update", interrupt)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # has rich take what it writes to for a terminal
    assert main([*TINY, str(tmp_path / "a.png")]) == 130
    shown = capsys.readouterr().err
    hide, restore = "\x1b[?25l", "\x1b[?25h"
    assert hide in shown
    assert shown.rindex(restore) > shown.rindex(hide)
    assert shown.replace(restore, "").endswith("\ninterrupted\n")
    assert "Traceback" not in shown
    assert not (tmp_path / "a.png").exists()


@pytest.mark.usefixtures("library")
def test_after_ctrl_c_there_are_the_results_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(bars: object, name: str, steps: int) -> Callable[[skipgram.Run, float], None]:
        def each_step(run: skipgram.Run, left: float) -> None:
            if name.startswith("torch") and len(run.losses) == 3:
                signal.raise_signal(signal.SIGINT)

        return each_step

    monkeypatch.setattr(display.Bars, "follow", follow)
    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "a.png"
    assert main([*TINY, str(out), "--steps", "1000"]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr().out
    assert re.search(r"\nsteps +50 +50 *\n", printed)
    assert printed.endswith("\nInterrupted after 50 of 1,000 steps.\n")
    assert out.exists()


@pytest.mark.usefixtures("library")
def test_the_time_that_it_may_take_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(step=2.0)
    monkeypatch.setattr(turns, "perf_counter", lambda: next(times))
    out = str(tmp_path / "a.png")
    assert main([*TINY, out, "--steps", "1000", "--seconds", "12"]) == 0
    assert re.search(r"\nsteps +100 +100 *\n", capsys.readouterr().out)


def test_everything_is_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 80 x 24, with two lines of introduction, two bars and the prompt."""
    known = Vocabulary((*display.FAMILIAR, "x" * 12), (1,) * (len(display.FAMILIAR) + 1))
    tables = skipgram.start(len(known.words), 4, seed=0)
    run = skipgram.Run("torch.optim.SparseAdam", [1.0], [1.0], 1.0, tables)
    screen = display.Screen()
    screen.show_neighbours(tables.words, known)
    screen.say("The loss over time: a.png")
    screen.compare(run, run)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) + 4 + 1 <= 24
    assert max(map(len, lines)) <= 80


def test_the_headline_says_which_is_faster() -> None:
    tables = skipgram.start(1, 1, seed=0)
    short, long = (skipgram.Run("x", [1.0], [time], 0.0, tables) for time in (2.0, 5.0))
    assert picture.headline(long, short) == "The same training, 2.5 times faster"
    assert picture.headline(short, long) == "The same training, 2.5 times slower"


def test_smoothing_keeps_constants_and_the_first_value() -> None:
    assert picture.smoothed([2.0] * 5, memory=10) == pytest.approx([2.0] * 5)
    assert picture.smoothed([5.0, 1.0], memory=1) == [5.0, 1.0]


def test_no_familiar_word_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    tables = skipgram.start(2, 4, seed=0)
    display.Screen().show_neighbours(tables.words, Vocabulary(("x", "y"), (1, 1)))
    assert capsys.readouterr().out == ""
