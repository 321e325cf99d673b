from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep import core
from sparsestep.cli import info, main

KEYS = [
    *("sparsestep", "python", "platform", "torch", "engine"),
    *("instruction_set", "instruction_sets", "SPARSESTEP_ISA", "threads", "threads_of"),
    *("cpu", "huge_pages"),
]


def test_info_prints_a_line_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == KEYS
    values = dict(line.split(":", 1) for line in lines)
    assert values["sparsestep"].strip() == sparsestep.__version__
    assert values["torch"].strip() == torch.__version__
    assert values["python"].strip().startswith(platform.python_version())
    assert values["threads"].strip() == str(torch.get_num_threads())
    # Aligned: every value starts in the same column.
    assert len({len(line) - len(line.partition(":")[2].lstrip()) for line in lines}) == 1


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values) == KEYS
    assert values == info.facts()


@pytest.mark.skipif(core.core is None, reason="installed without the C++ core")
def test_the_native_core_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSESTEP_ISA", raising=False)
    values = info.facts()
    assert values["engine"] == "native"
    assert values["instruction_set"] == core.instruction_set()
    assert isinstance(values["instruction_sets"], list)
    assert values["instruction_set"] in values["instruction_sets"]
    assert values["threads_of"]
    assert values["SPARSESTEP_ISA"] is None
    monkeypatch.setenv("SPARSESTEP_ISA", "baseline")
    assert info.facts()["SPARSESTEP_ISA"] == "baseline"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_works_without_the_core(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core, "core", None)
    assert main(["info", *options]) == 0
    assert "reference (the C++ core is missing" in capsys.readouterr().out
    values = info.facts()
    assert values["instruction_set"] is None
    assert values["instruction_sets"] == []
    assert values["threads_of"] is None


def test_why_the_core_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "core", None)
    monkeypatch.setattr(core, "why_missing", "GLIBC_2.99 not found")
    assert info.engine() == "reference (the C++ core is missing: GLIBC_2.99 not found)"


def test_an_instruction_set_that_is_not_here_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "isa", core._InUse())
    monkeypatch.setenv("SPARSESTEP_ISA", "mmx")
    assert "Got 'mmx'" in info.lines(info.facts())


def test_cpu_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "cpuinfo"
    source.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Quick CPU: 3 GHz\n")
    assert info.cpu_model(source) == "Quick CPU: 3 GHz"
    source.write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert info.cpu_model(source) == "aarch64"
    assert info.cpu_model(tmp_path / "missing") == "aarch64"


def test_huge_pages(tmp_path: Path) -> None:
    source = tmp_path / "enabled"
    source.write_text("always [madvise] never\n")
    assert info.huge_pages(source) == "madvise"
    assert info.huge_pages(tmp_path / "missing") == "unknown"
