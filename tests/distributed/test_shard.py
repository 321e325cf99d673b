"""Sharded tables, trained by several processes, are those of one process with all batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.table import same_bits

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.pair import Results, run_ranks
from tests.distributed.shard_cases import Case, in_one_process, on_ranks, put_together
from tests.distributed.shard_runs import QUICK, SWEEP


def assert_alike(case: Case, ours: Results, theirs: Results) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key == "norms":
            wanted = [float(norm) for norm in value if norm is not None]
            got = [float(norm) for norm in ours[key] if norm is not None]
            assert got == pytest.approx(wanted, rel=1e-5)
        elif not isinstance(value, torch.Tensor) or not value.dim():
            assert ours[key] == value, key
        elif case.order == "global" and case.clip is None:
            assert same_bits(ours[key], value), key
        else:
            tolerance = 2e-2 if case.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", QUICK)
def test_ranks_train_as_one_process_does(found: list[Results], name: str):
    case = QUICK[name]
    whole = put_together([each[name] for each in found], case.kind)
    assert_alike(case, whole, in_one_process(case, len(found)))


@pytest.fixture(scope="module", params=[2, 3, 4])
def swept(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp(f"sweep{request.param}")
    return run_ranks("tests.distributed.shard_sweep", folder, request.param)


@pytest.mark.slow
def test_every_rule_trains_as_in_one_process(swept: list[Results]):
    for name, case in SWEEP.items():
        whole = put_together([each[name] for each in swept], case.kind)
        try:
            assert_alike(case, whole, in_one_process(case, len(swept)))
        except AssertionError as error:
            raise AssertionError(f"{name} with {len(swept)} ranks: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_one_rank_is_one_process(name: str):
    case = SWEEP[name]
    assert_alike(case, on_ranks(case, 0, 1)[0], in_one_process(case, 1))
