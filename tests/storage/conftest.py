"""Tables in files go with the tests that made them."""

import gc
from collections.abc import Iterator

import pytest

from sparsestep.memory.mapped_file import mapped_files


@pytest.fixture(autouse=True, scope="module")
def _no_file_stays_open() -> Iterator[None]:
    """Other tests count what a step does where there are no such tables.

    Tests collect garbage to close files. Objects from before are left out of that.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    assert not mapped_files
