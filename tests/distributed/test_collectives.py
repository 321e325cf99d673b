"""How many collectives a loop makes, one after the other: docs/several-machines.md says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sparsestep
from tests.distributed.runs import PLAN, Case, Net, net_batch, said, sharded, trained
from tests.ranks import Rank, ranks
from tests.table import same_bits

PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
COLLECTIVES = ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "all_gather_object")


class Counted:
    """Counts torch's collectives, except for those that nothing waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        for name in COLLECTIVES:
            monkeypatch.setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.number += threading.current_thread() is threading.main_thread()
            return collective(*arguments, **options)

        return counting

    def since(self, before: int) -> int:
        return self.number - before


def documented() -> dict[str, int]:
    """The table of the page."""
    rows = PAGE.read_text().partition("| | collectives | |")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    return {name.replace("`", ""): int(number) for name, number, _ in cells}


STEPS, WARM = 8, 4  # the first steps do not know yet how much is sent


@ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("plan", ["rows", "tables", PLAN])
def test_the_collectives_of_a_loop_are_those_of_the_documentation(
    rank: Rank, plan: Any, prefetch: int
):
    model = Net()
    sparsestep.distributed.shard(model.tables, plan=plan)
    optimizer = sparsestep.Adam(model.tables.parameters(), lr=0.1)
    counted = Counted(rank.monkeypatch)
    loader = [net_batch(0, rank.index) for _ in range(STEPS)]
    seen: list[dict[str, int]] = []
    suffix = ", prefetched" if prefetch else ""
    before = counted.number
    for step, ids in enumerate(sparsestep.distributed.lockstep(loader, prefetch)):
        found = {f"lockstep{suffix}": counted.since(before)}
        before = counted.number
        rows = model.tables(ids)
        found[f"lookup{suffix}"] = counted.since(before)
        before = counted.number
        sum(each.square().sum() for each in rows.values()).backward()
        assert counted.since(before) == 0, "backward is each rank's own"
        if step % 2:
            sparsestep.clip_grad_norm_(model.tables.parameters(), 1.0)
            found["clip_grad_norm_"] = counted.since(before)
            before = counted.number
        optimizer.step()
        found["step() after clipping" if step % 2 else "step()"] = counted.since(before)
        before = counted.number
        optimizer.zero_grad()
        seen.append(found)
    expected = documented()
    for found in seen[WARM:]:
        assert found == {name: expected[name] for name in found}


@ranks(2)
def test_a_rank_that_cannot_compute_its_norm_lets_no_other_wait(rank: Rank):
    """The gradients of all ranks are pending again, and the next call works."""
    model = Net()
    sparsestep.distributed.shard(model.tables, plan="rows")
    sum(each.sum() for each in model.tables(net_batch(0, rank.index)).values()).backward()
    params: list[Any] = list(model.tables.parameters())
    wrong = [*params, "no tensor"] if rank.is_last else params
    text = said(lambda: sparsestep.clip_grad_norm_(wrong, 1.0))
    assert ("a str at" if rank.is_last else "rank 1 rejected its input") in text
    for order in (0, -1.0):
        text = said(lambda order=order: sparsestep.clip_grad_norm_(params, 1.0, order))
        assert "norm_type must be greater than 0" in text
    for order in (2.0, float("inf")):
        norms = rank.gather(sparsestep.clip_grad_norm_(params, 1.0, order))
        assert norms[0] == norms[1] > 0


@ranks(8)
def test_one_rank_of_each_host_exchanges_for_all_of_them(rank: Rank):
    """The same bits as with a connection to every rank, and an error is one on all ranks."""
    cases = [Case("rows"), Case("tables", clip=0.5), Case("copy", order="fast", reduce="mean")]
    expected = [trained(case, rank.index, rank.world) for case in cases]
    for hosts in ("aaaabbbb", "abcabcaa", "aaaaaaaa"):
        rank.monkeypatch.setenv("GROUP_RANK", hosts[rank.index])
        for case, other in zip(cases, expected, strict=True):
            found = trained(case, rank.index, rank.world, topology="hosts")
            assert found.keys() == other.keys()
            for name, value in found.items():
                assert str(value) == str(other[name]) if name == "norms" else True
                if isinstance(value, torch.Tensor):
                    assert same_bits(value, other[name]), (hosts, name)
    rank.monkeypatch.setenv("GROUP_RANK", str(rank.index // 4))
    table = torch.nn.Embedding(9, 2)
    sparsestep.distributed.shard(table, plan="rows", topology="hosts")
    text = said(lambda: table(torch.tensor([1, 99 if rank.is_last else 2])))
    assert ("ids must be in" if rank.is_last else "rank 7, which looks up") in text
    ids = [torch.tensor([rank.index, step]) for step in range(4 - rank.index % 2)]
    for batch in sparsestep.distributed.lockstep(ids, prefetch=1):
        table(batch).sum().backward()
    text = said(lambda: sharded("rows", topology="flat" if rank.is_last else "hosts"))
    assert "topology: hosts on rank 0, flat on rank 7" in text
