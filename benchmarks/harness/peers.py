"""Other libraries, where they are installed. They are never a dependency."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.workload import LEARNING_RATE, Unavailable, Workload, fill

_SHARED_MEMORY = Path("/dev/shm")

_numbers = itertools.count()


def imported(name: str) -> ModuleType:
    """A module of another library; raises ``Unavailable`` where it cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: built for another release of torch
        missing = getattr(error, "name", None) or ""
        absent = isinstance(error, ModuleNotFoundError) and name.startswith(missing.split(".")[0])
        reason = "" if absent else f" so that it loads ({error})"
        raise Unavailable(f"not installed{reason}") from None


class _Peer(Contestant, ABC):
    """Tries one step while it is made: what does not work here must not end the whole run."""

    def __init__(self, workload: Workload) -> None:
        try:
            self.make(workload)
            self.before(0)
            self.step()
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(f"does not run here ({error})") from error

    @abstractmethod
    def make(self, workload: Workload) -> None:
        """Make tables and optimizer."""


class FbgemmAdagrad(_Peer):
    """FBGEMM's embedding tables with Adagrad; FBGEMM has no Adam on the CPU.

    It updates inside backward, so backward is what is timed: of bags of one id each, whose sum is
    the row itself, so that the gradient of the output is the gradient's values.
    """

    name = "FBGEMM Adagrad"

    def make(self, workload: Workload) -> None:
        """One module for all tables."""
        training = imported("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = imported("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = imported("fbgemm_gpu.split_embedding_configs")
        workload.reserve(2)
        case = workload.case
        place, device = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        self._tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dim, place, device)] * case.tables,
            optimizer=configs.EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=1e-10,  # torch's
            pooling_mode=common.PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        for table in self._tables.split_embedding_weights():
            fill(table.detach())
        # Bags of one: the first table's, then the second table's, and so on.
        self._offsets = torch.arange(case.tables * case.lookups + 1)
        self._sets: list[tuple[Tensor, Tensor]] = []
        for gradients in workload.sets:
            positions = torch.cat([gradient.positions for gradient in gradients])
            values = [gradient.values for gradient in gradients]
            self._sets.append((positions, values[0] if len(values) == 1 else torch.cat(values, 1)))

    def before(self, set_index: int) -> None:
        """Forward."""
        positions, self._gradient = self._sets[set_index]
        self._output = self._tables(positions, self._offsets)

    def step(self) -> None:
        """Backward, which updates."""
        self._output.backward(self._gradient)


class DglSparseAdam(_Peer):
    """DGL's optimizer for node embeddings.

    It takes the mean of a row's duplicates where the others take the sum, and counts the steps of
    each row; the work is the same.
    """

    name = "DGL SparseAdam"

    def make(self, workload: Workload) -> None:
        """One embedding per table, one optimizer."""
        os.environ.setdefault("DGLBACKEND", "pytorch")  # else it writes a file into the home
        embeddings, optimizers = imported("dgl.nn"), imported("dgl.optim")
        workload.reserve(3)
        case = workload.case
        # It keeps its tables there, and a process that writes past the end is killed.
        if _SHARED_MEMORY.exists() and case.table_bytes > shutil.disk_usage(_SHARED_MEMORY).free:
            raise Unavailable(f"too little space in {_SHARED_MEMORY}")
        self._embeddings = [
            embeddings.NodeEmbedding(
                case.rows,
                case.dim,
                f"sparsestep_bench_{os.getpid()}_{next(_numbers)}",
                init_func=fill,
            )
            for _ in range(case.tables)
        ]
        self._optimizer = optimizers.SparseAdam(self._embeddings, lr=LEARNING_RATE)
        self._sets = workload.sets

    def before(self, set_index: int) -> None:
        """Forward and backward."""
        self._optimizer.zero_grad()
        for embedding, gradient in zip(self._embeddings, self._sets[set_index], strict=True):
            embedding(gradient.positions).backward(gradient.values)

    def step(self) -> None:
        """One step of the optimizer."""
        self._optimizer.step()
