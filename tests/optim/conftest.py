"""Tensors are small here, and waking a thread costs more than a step."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass
