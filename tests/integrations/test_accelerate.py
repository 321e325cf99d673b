from __future__ import annotations

import re

import pytest

from tests.integrations.running import example, in_the_gallery, needs

pytestmark = needs("accelerate")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_example_learns_and_loads_what_it_saved(precision: str):
    printed = example("with_accelerate.py", precision)
    found = re.search(r"loss (\d\.\d+)", printed)
    assert found is not None
    assert float(found[1]) < 0.4
    assert in_the_gallery("with_accelerate", printed.replace(repr(precision), repr("bf16")))
