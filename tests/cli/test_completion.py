from __future__ import annotations

import shutil
import subprocess

import pytest

from sparsestep import cli
from sparsestep.cli.completion import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_and_their_options_are_there(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in script
    for option in ("--steps", "--json", "--ranks", "bash zsh fish"):
        assert option in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["sparsestep", "de"], ["demo"]),
        (["sparsestep", "demo", "--st"], ["--steps"]),
        (["sparsestep", "completion", "z"], ["zsh"]),
        (["sparsestep", "fly", "--"], []),
    ],
)
def test_bash_completes(
    line: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = f"""{capsys.readouterr().out}
COMP_WORDS=({" ".join(line)})
COMP_CWORD={len(line) - 1}
_sparsestep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
