"""The page has an answer for every thread that has a test, and the other way around."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "asked.md"


def test_every_thread_of_the_page_has_a_test_and_an_answer():
    row = re.compile(
        r"^\| \[([\w-]+)#(\d+)\]\(https://github\.com/[\w-]+/\1/\w+/\2\) \| .+ \| (.+) \|$", re.M
    )
    answers = {f"{repo}_{n}": answer for repo, n, answer in row.findall(PAGE.read_text())}
    named = {thread.lower().replace("-", "_") for thread in answers}
    tests = [*TESTS.glob("asked/test_*.py"), TESTS / "test_integrations.py"]
    found = {
        thread
        for path in tests
        for thread in re.findall(r"^def test_([a-z_]+_\d{3,})_", path.read_text(), re.M)
    }
    assert named == found
    for thread, answer in answers.items():
        assert answer.startswith(("Yes", "No", "Partly")), thread
        assert "](" in answer, thread
