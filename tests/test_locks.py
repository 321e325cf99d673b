"""A process that is forked while other threads hold locks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparsestep import _process as locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# One thread steps in a loop; the main thread forks. Each child checks that it sees whole steps, and
# steps itself. A child that hangs is ended by its own alarm.
STEPS = """
import os, signal, sys, threading, torch, sparsestep
torch.set_num_threads(2)
kind = sys.argv[1]
table = torch.nn.Parameter(torch.zeros(20_000, 16))
rows = torch.arange(20_000)[None]
grad = torch.sparse_coo_tensor(rows, torch.ones(20_000, 16), table.shape, check_invariants=False)
vocabulary = sparsestep.nn.Vocabulary(2_000, evict="lru")
if kind == "functional":
    opt = sparsestep.FunctionalSGD([table], lr=1.0)
    step = lambda: opt.step([grad])
elif kind == "vocabulary":
    base = iter(range(0, 10**9, 1_000))
    step = lambda: vocabulary(torch.arange(1_000) + next(base))
else:
    opt = sparsestep.SGD([table], lr=1.0, engine=kind)
    table.grad = grad
    step = opt.step
step()
stop = threading.Event()

def loop():
    while not stop.is_set():
        step()

thread = threading.Thread(target=loop, daemon=True)
thread.start()
results = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        if kind == "reference":  # torch's own team of threads does not survive a fork
            torch.set_num_threads(1)
        step()
        torch.set_num_threads(1)
        values = table.detach()
        whole = bool((values == values[0, 0]).all())
        if kind == "vocabulary":
            known = vocabulary.as_dict()
            whole = len(set(known.values())) == len(known) == vocabulary.used - 1
        os._exit(0 if whole else 1)
    results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
thread.join()
print(results)
"""


@pytest.mark.parametrize("kind", ["native", "reference", "functional", "vocabulary"])
def test_a_child_forked_during_a_step_sees_whole_steps_and_can_step(kind: str):
    command = [sys.executable, "-c", STEPS, kind, "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(12 * [0]), done.stderr


# The main thread holds one lock itself; another thread never releases the second one.
STUCK = """
import os, signal, threading
from sparsestep import _process as locks
locks._PATIENCE = 0.2
mine, stuck, free = (locks.fork_safe_lock() for _ in range(3))
held, done = threading.Event(), threading.Event()

def hold():
    with stuck:
        held.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
with mine:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with mine, stuck, free:
            pass
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert not stuck.acquire(blocking=False)
done.set()
with mine, stuck, free:
    print(status)
"""


def test_a_lock_that_is_never_released_is_free_in_the_child():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


def test_locks_are_forgotten_with_their_owners():
    before = len(locks._locks)
    lock = locks.fork_safe_lock()
    assert len(locks._locks) == before + 1
    del lock
    assert len(locks._locks) == before
