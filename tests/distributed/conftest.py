"""Processes are started once for all tests that look at what they found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pair import Results, run_ranks


@pytest.fixture(scope="session", params=[2, 3])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each of several ranks found that share tables."""
    folder = tmp_path_factory.mktemp(f"shard{request.param}")
    return run_ranks("tests.distributed.shard_worker", folder, request.param)
