"""Settings that every test shares."""

import gc
import os
import signal
from importlib.util import find_spec

import hypothesis
import pytest

# Several workers share the cores: a team of threads that spins while it waits keeps the others from
# working. OpenMP looks at this when torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from sparsestep import _native, errors

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("all", derandomize=True, deadline=None, max_examples=100)
found = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # and not made smaller
hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("ci"), phases=found)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
everything = os.environ.get("SPARSESTEP_TESTS") == "all"
profile = os.environ.get("SPARSESTEP_HYPOTHESIS", "all" if everything else "ci")
hypothesis.settings.load_profile(profile)

# Kernels for GPUs run on the CPU here: Triton looks at this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("triton") is None:  # make gpu-check installs it
    collect_ignore = [
        "src/sparsestep/engines/triton/kernels.py",
        "tests/engines/triton_compile.py",
    ]

# Tests make broken tensors on purpose; torch asks to be told so explicitly.
torch.sparse.check_sparse_tensor_invariants.disable()

# A job in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to ``make test ALL=1``."""
    if everything:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def pytest_collection_finish() -> None:
    """Modules and tests stay: collections of garbage need not go through them."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _unaffected_by_other_tests():
    """Random numbers are the same in any order of tests, and so is what is said once."""
    torch.manual_seed(0)
    errors._warned.clear()


@pytest.fixture
def one_thread(_unchanged_settings):
    """For small tensors: waking a thread costs more than a step."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _unchanged_settings():
    """Restore the thread count, the instruction set, the default dtype and the grad mode."""
    threads, isa = torch.get_num_threads(), _native.instruction_set()
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)  # an interrupt inside torch's no_grad may leave it off
    torch.set_num_threads(threads)
    if isa is not None:
        _native.use_instruction_set(isa)
