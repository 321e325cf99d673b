"""sparsestep plan: sizes and bytes, computed."""

from __future__ import annotations

import pytest

from sparsestep import cli


def test_ten_billion_rows_on_a_thousand_ranks(capsys: pytest.CaptureFixture[str]):
    tables = ["user=10000000000x128", "item=1000000x64", "country=200x8"]
    assert cli.main(["plan", "--tables", *tables, "--ranks", "1024", "--network", "25"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in said[1:4]] == ["rows"] * 3
    assert said[5].startswith("most on a rank: 15.0 GB (5.0 GB of tables, 10.0 GB of state)")
    assert said[6].startswith("sent by a rank:")
    assert said[6].endswith("at 25 Gbit/s")
    assert said[7].split(":")[1] == said[6].split(":")[1], "nobody has more than others"


def test_the_owner_of_a_whole_table_sends_rows_to_all(capsys: pytest.CaptureFixture[str]):
    tables = ["user=1000000x128:tables", "item=1000000x128:tables"]
    assert cli.main(["plan", "--tables", *tables, "--ranks", "8", "--batch", "1000"]) == 0
    said = capsys.readouterr().out.splitlines()
    # Rows of one table to seven ranks; ids and gradients for the other.
    assert said[-1] == "by the busiest: 4.1 MB a step, 3.3 ms at 10 Gbit/s"


def test_a_kind_may_be_chosen(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--tables", "user=1000x8:rows", "--ids", "20"]) == 0
    assert "dealt" in capsys.readouterr().out
    for kind in (":columns", ":"):
        with pytest.raises(SystemExit):
            cli.main(["plan", "--tables", f"user=1000x8{kind}"])
        said = f"what follows the size must be one of :tables, :rows, :copy. Got '{kind}'"
        assert said in capsys.readouterr().err


def test_tables_have_names_of_their_own(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--tables", "user=10x8:rows", "user=10x8:copy"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("sparsestep plan: every table must have a name of its own. Got 'us")
    assert not said.out


@pytest.mark.parametrize(
    "table",
    ["user", "user=5", "user=0x4", "=5x4", "user=5xtall", "user=²x4", f"user={10**20}x4"],
)
def test_what_is_no_table_is_refused(table: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--tables", table])
    assert "a table must be NAME=ROWSxDIM" in capsys.readouterr().err
