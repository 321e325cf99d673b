from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sparsestep
from sparsestep import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sparsestep {sparsestep.__version__}\n"


@pytest.mark.parametrize("module", ["sparsestep", "sparsestep.cli"])
def test_it_runs_as_a_module(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ignored", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out == f"sparsestep {sparsestep.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"sparsestep {name}" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert f"Example:\n  sparsestep {name} " in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "sparsestep demo" in capsys.readouterr().out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fly"])
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(
    missing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("display", "picture"):  # as if they had not been imported yet
        monkeypatch.delitem(sys.modules, f"sparsestep.cli.{name}", raising=False)
        monkeypatch.delattr(cli, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["demo", "--out", str(tmp_path / "a.png")]) == 1
    printed, complaint = capsys.readouterr()
    assert printed == ""
    assert complaint == (
        f"sparsestep: this command needs {missing}; "
        'install it with pip install "sparsestep[cli]".\n'
    )
    assert cli.main(["info"]) == 0


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: object) -> int:
        raise ModuleNotFoundError("No module named 'colour'", name="colour")

    monkeypatch.setattr(cli.info, "run", run)
    with pytest.raises(ModuleNotFoundError, match="colour"):
        cli.main(["info"])


def test_importing_sparsestep_imports_neither_the_compiler_nor_what_only_commands_need() -> None:
    code = """
import sys, sparsestep, sparsestep.cli
print(sorted({"rich", "matplotlib", "torch._dynamo"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
