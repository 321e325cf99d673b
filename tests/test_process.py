"""Signals, forks and interpreters: all of a step was done, or nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import _process
from sparsestep._process import uninterrupted
from tests.faults.injectors import Lines
from tests.processes import run_python
from tests.table import INSTRUCTION_SETS, all_same_bits, same_bits

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and forks as POSIX has")


# Signals


def test_ctrl_c_at_any_line_leaves_a_whole_step():
    def step(nth: int | None) -> tuple[int, list[Tensor]]:
        table, layer = torch.nn.Parameter(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(3))
        optimizer = sparsestep.Adagrad([table, layer], engine="reference")
        table.grad = torch.ones(4, 2).to_sparse(1)
        layer.grad = torch.ones(3).to_sparse()
        optimizer.step()
        lines, count = Lines(os.path.dirname(sparsestep.__file__)), 0
        if nth is None:
            count = lines.count(optimizer.step)
        else:
            with suppress(KeyboardInterrupt):
                lines.inject(optimizer.step, nth)
        state = [each for param in (table, layer) for each in optimizer.state[param].values()]
        return count, [table.detach(), layer.detach(), *state]

    step(None)  # what is imported late is imported here
    count, after = step(None)
    _, before = step(0)
    assert not any(map(same_bits, before, after))
    for nth in range(0, count, 3):
        _, found = step(nth)
        assert all_same_bits(found, before) or all_same_bits(found, after), nth


class HandlerError(Exception):
    """What a handler raises."""


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Names of the signals whose handlers have run; those of SIGUSR1 and SIGINT raise."""
    names: list[str] = []

    def handler(error: type[BaseException] | None) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, frame: FrameType | None) -> None:
            names.append(signal.Signals(signum).name)
            if error is not None:
                raise error

        return handle

    errors = {signal.SIGUSR1: HandlerError, signal.SIGINT: KeyboardInterrupt, signal.SIGUSR2: None}
    before = {signum: signal.signal(signum, handler(error)) for signum, error in errors.items()}
    yield names
    for signum, old in before.items():
        signal.signal(signum, old)


def handlers() -> dict[int, Any]:
    return {signum: signal.getsignal(signum) for signum in signal.valid_signals()}


def send(*names: str, then: type[Exception] | None = None) -> Callable[[], None]:
    def work() -> None:
        for name in names:
            signal.raise_signal(signal.Signals[name])
        if then is not None:
            raise then

    return work


@POSIX
@pytest.mark.parametrize("then", [None, ZeroDivisionError])
@pytest.mark.parametrize(
    "order", [("SIGUSR1", "SIGINT", "SIGUSR2"), ("SIGINT", "SIGUSR2", "SIGUSR1")]
)
def test_every_signal_is_handled_although_handlers_and_the_work_raise(
    heard: list[str], order: tuple[str, ...], then: type[Exception] | None
):
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as raised:
        uninterrupted(send(*order, then=then))
    assert heard == list(order)
    assert handlers() == before
    if then is not None:
        assert isinstance(raised.value.__context__, then)


@POSIX
def test_the_error_of_the_work_propagates_if_no_handler_raises(heard: list[str]):
    before = handlers()
    with pytest.raises(ZeroDivisionError):
        uninterrupted(send("SIGUSR2", then=ZeroDivisionError))
    assert heard == ["SIGUSR2"]
    assert handlers() == before


@POSIX
def test_nested_work_defers_signals_to_the_outermost(heard: list[str]):
    def outer() -> None:
        uninterrupted(send("SIGUSR1"))
        assert heard == []

    before = handlers()
    with pytest.raises(HandlerError):
        uninterrupted(outer)
    assert heard == ["SIGUSR1"]
    assert handlers() == before


def test_other_threads_have_no_handlers_to_hold_back():
    done: list[str] = []
    thread = threading.Thread(target=uninterrupted, args=(lambda: done.append("work"),))
    thread.start()
    thread.join()
    assert done == ["work"]


@POSIX
@pytest.mark.parametrize("extra", [(), ("SIGUSR1",)])
def test_a_signal_at_any_line_leaves_all_handlers_and_all_or_no_work(
    heard: list[str], extra: tuple[str, ...]
):
    """Ctrl-C at every line of the module in turn, also while the handler of another raises."""
    before, done = handlers(), []

    def work() -> None:
        done.append("first")
        send(*extra)()
        done.append("last")

    lines = Lines(_process.__file__)
    with suppress(HandlerError):
        uninterrupted(work)  # what is imported late is imported here
    count = 1000
    for nth in range(count):
        heard.clear()
        done.clear()
        with suppress(KeyboardInterrupt, HandlerError):
            lines.inject(lambda: uninterrupted(work), nth)
        assert handlers() == before, nth
        assert done in ([], ["first", "last"]), nth
        if "SIGINT" not in heard:  # there are no more lines
            break
        assert heard.count("SIGINT") == 1, nth
        if extra and done:
            assert "SIGUSR1" in heard, nth
    assert 20 < nth < count - 1


# Forks

# One thread steps in a loop; the main thread forks. Each child checks that it sees whole steps, and
# steps itself. A child that hangs is ended by its own alarm. At last a child is forked while one
# thread holds a lock that it never releases.
FORKED = """
import os, signal, threading, torch, sparsestep
from sparsestep import _native, _process as locks

def exit_code_of_a_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def results(kind):
    torch.set_num_threads(2)
    table = torch.nn.Parameter(torch.zeros(20_000, 16))
    rows = torch.arange(20_000)[None]
    grad = torch.sparse_coo_tensor(rows, torch.ones(20_000, 16), table.shape)
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

    def work():
        if kind == "reference":  # torch's own team of threads does not survive a fork
            torch.set_num_threads(1)
        step()
        torch.set_num_threads(1)
        if kind == "vocabulary":
            known = vocabulary.as_dict()
            return len(set(known.values())) == len(known) == vocabulary.used - 1
        values = table.detach()
        return bool((values == values[0, 0]).all())

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    found = [exit_code_of_a_child(work) for _ in range(4)]
    stop.set()
    thread.join()
    return found

for kind in ("native", "functional", "vocabulary", "reference"):
    print(kind, sum(map(abs, results(kind))))

locks._PATIENCE = 0.2
mine, stuck, free = (locks.fork_safe_lock() for _ in range(3))
held, done = threading.Event(), threading.Event()

def hold():
    with stuck:
        held.set()
        done.wait()

def take_all():
    with mine, stuck, free:
        return True

threading.Thread(target=hold, daemon=True).start()
held.wait()
with mine:
    status = exit_code_of_a_child(take_all)
assert not stuck.acquire(blocking=False)
done.set()
take_all()
print("stuck", status)
print("instruction set", _native.instruction_set())
"""


@POSIX
def test_a_child_forked_during_a_step_sees_whole_steps_and_can_step():
    """The environment forces an instruction set, too."""
    expected = ["native 0", "functional 0", "vocabulary 0", "reference 0", "stuck 0"]
    printed = run_python("-c", FORKED, SPARSESTEP_ISA=INSTRUCTION_SETS[0]).splitlines()
    assert printed == [*expected, f"instruction set {INSTRUCTION_SETS[0]}"]


def test_locks_are_forgotten_with_their_owners():
    before = len(_process._locks)
    lock = _process.fork_safe_lock()
    assert len(_process._locks) == before + 1
    del lock
    assert len(_process._locks) == before


# Interpreters

# Importing torch in a subinterpreter hangs, raises SystemError or crashes the process.
SUBINTERPRETER = '''
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters

PROGRAM = """
import sys
try:
    import {}
except ImportError as error:
    print(error.name, "must be imported in the main interpreter" in str(error))
    print("torch" in sys.modules, flush=True)
"""
interpreters.run_string(interpreters.create(), PROGRAM.format("sparsestep"))
import sparsestep
interpreters.run_string(interpreters.create(), PROGRAM.format("sparsestep._C"))
'''


def test_subinterpreters_are_refused_before_torch_is_imported():
    pytest.importorskip("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    assert run_python("-c", SUBINTERPRETER).split() == ["sparsestep", "True", "False"] * 2


# Without the modules and functions that only POSIX systems have; in a child, also without the core.
ON_WINDOWS = """
import mmap, os, sys, torch, torch._dynamo, torch.distributed.checkpoint, warnings

if os.fork():
    os.wait()
else:
    sys.modules["sparsestep._C"] = None

for name in ("fcntl", "grp", "posix", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, prefixes in {
    os: ("SEEK_", "getuid", "posix_", "register_at_fork", "sched_", "statvfs", "sysconf"),
    mmap: ("MADV_", "MAP_", "PROT_"),
}.items():
    for name in [name for name in vars(module) if name.startswith(prefixes)]:
        if name not in ("SEEK_SET", "SEEK_CUR", "SEEK_END"):
            delattr(module, name)

import sparsestep
import sparsestep.cli

table = sparsestep.nn.Embedding(1 << 17, 8)
optimizer = sparsestep.SparseAdam(table.parameters())
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        table(torch.tensor([1, 70000, 1])).sum().backward()
        optimizer.step()
print(int((optimizer.state[table.weight]["exp_avg"] != 0).sum()))
for each in said:
    print(each.category.__name__, each.filename, "without its C++ core" in str(each.message))
try:
    sparsestep.SparseAdam(table.parameters(), engine="native")
    print("native")
except ValueError as error:
    print("needs the C++ core" in str(error))
"""


@POSIX
def test_import_and_step_need_nothing_that_windows_lacks_nor_the_core():
    """That steps are slow without the core is said once."""
    without_core = ["16", "SlowWarning <string> True", "True"]
    assert run_python("-c", ON_WINDOWS).splitlines() == [*without_core, "16", "native"]
