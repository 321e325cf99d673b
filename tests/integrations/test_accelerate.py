from __future__ import annotations

import re

import pytest

from tests.integrations.running import example, needs

pytestmark = needs("accelerate")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_example_learns_and_loads_what_it_saved(precision: str):
    found = re.search(r"loss (\d\.\d+)", example("with_accelerate.py", precision))
    assert found is not None
    assert float(found[1]) < 0.4
