"""The limit of lookups: what the machine needs at the least."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import limit

pytestmark = pytest.mark.skipif(limit.limit_module is None, reason="it is in C++")


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_lookups_limit_sums_the_rows_of_bags(dim: int, threads: int) -> None:
    assert limit.limit_module is not None
    table, ids = torch.randn(50, dim), torch.randint(50, (7, 5))
    sums = torch.empty(7, dim)
    found = limit.addresses(ids, table, sums)
    limit.limit_module.look_up(found, dim, 5, 7, threads, 0)
    torch.testing.assert_close(sums, torch.nn.functional.embedding_bag(ids, table, mode="sum"))
