"""Ctrl-C during a step: all of it was done, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
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
from sparsestep._process import uninterrupted
from tests.faults.injectors import Lines
from tests.table import same_bits

# A thread sends Ctrl-C while steps are running, over and over. Each time the number of steps that
# the values have had must be the number that was counted.
PROGRAM = """
import os, signal, sys, threading, torch, sparsestep
torch.set_num_threads(2)
semantics, engine, kind = sys.argv[1:]
table = torch.nn.Parameter(torch.zeros(6_000, 32))
layer = torch.nn.Parameter(torch.zeros(3, 2))
options = {"momentum": 1.0} if semantics == "dense" else {}
opt = sparsestep.SGD([table, layer], lr=1.0, semantics=semantics, engine=engine, **options)
if kind == "adagrad":  # counts
    opt = sparsestep.Adagrad([table, layer], lr=1.0, engine=engine)
rows = torch.arange(4_000)[None]
table.grad = torch.sparse_coo_tensor(
    rows, torch.ones(4_000, 32), table.shape, check_invariants=False
)
layer.grad = torch.ones(3, 2)
opt.step()
go, stop = threading.Event(), threading.Event()

def interrupt():
    while not stop.is_set():
        if go.wait(0.1) and not stop.is_set():
            go.clear()
            os.kill(os.getpid(), signal.SIGINT)

thread = threading.Thread(target=interrupt, daemon=True)
thread.start()
caught = 0
for _ in range(25):
    try:
        go.set()
        for _ in range(50):
            opt.step()
    except KeyboardInterrupt:
        caught += 1
    go.clear()
    values = table.detach()[:4_000]
    assert bool((values == values[0, 0]).all()), "a part of the table has moved"
    assert float(layer.detach()[0, 0]) == float(values[0, 0]), (layer[0, 0], values[0, 0])
    if kind == "adagrad":
        count, total = opt.state[table]["step"], opt.state[table]["sum"][0, 0]
        assert float(count) == float(total), (count, total)
        assert float(opt.state[layer]["step"]) == float(opt.state[layer]["sum"][0, 0])
    if semantics == "dense":
        clock = opt.deferred[id(table)]
        assert int(clock.last_step.max()) == clock.history.now, "a row runs ahead"
stop.set()
thread.join()
print(caught)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="sends signals as POSIX systems have them")
@pytest.mark.parametrize(
    ("semantics", "engine", "kind"),
    [
        ("masked", "auto", "adagrad"),
        pytest.param("masked", "reference", "adagrad", marks=pytest.mark.slow),
        ("dense", "auto", "sgd"),
    ],
)
def test_ctrl_c_leaves_whole_steps(semantics: str, engine: str, kind: str):
    command = [sys.executable, "-c", PROGRAM, semantics, engine, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no signal was caught"


def test_ctrl_c_at_any_line_leaves_a_whole_step():
    def step(nth: int | None) -> tuple[int, list[Tensor]]:
        table, layer = torch.nn.Parameter(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(3))
        optimizer = sparsestep.Adagrad([table, layer], engine="reference")
        table.grad = torch.ones(4, 2).to_sparse(1)
        layer.grad = torch.ones(3).to_sparse()
        optimizer.step()
        lines, count = Lines(), 0
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
    for nth in range(count):
        _, found = step(nth)
        assert all(map(same_bits, found, before)) or all(map(same_bits, found, after)), nth


def test_every_handler_waits_and_is_given_back():
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("handled"))

    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        heard.append("worked")

    try:
        uninterrupted(work)
        assert heard == ["worked", "handled"]
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["worked", "handled", "handled"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_are_given_back_when_the_work_raises():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_have_no_handlers_to_hold_back():
    done: list[str] = []
    thread = threading.Thread(target=uninterrupted, args=(lambda: done.append("work"),))
    thread.start()
    thread.join()
    assert done == ["work"]


# Handlers that raise


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


def send(*signals: signal.Signals, then: type[Exception] | None = None) -> Callable[[], None]:
    def work() -> None:
        for signum in signals:
            signal.raise_signal(signum)
        if then is not None:
            raise then

    return work


POSIX = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")


@POSIX
@pytest.mark.parametrize("then", [None, ZeroDivisionError])
@pytest.mark.parametrize(
    "order",
    [
        (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2),
        (signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1),
    ]
    if hasattr(signal, "SIGUSR1")
    else [],
)
def test_every_signal_is_handled_although_handlers_and_the_work_raise(
    heard: list[str], order: tuple[signal.Signals, ...], then: type[Exception] | None
):
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as raised:
        uninterrupted(send(*order, then=then))
    assert heard == [signum.name for signum in order]
    assert handlers() == before
    if then is not None:
        assert isinstance(raised.value.__context__, then)


@POSIX
def test_the_error_of_the_work_propagates_if_no_handler_raises(heard: list[str]):
    with pytest.raises(ZeroDivisionError):
        uninterrupted(send(signal.SIGUSR2, then=ZeroDivisionError))
    assert heard == ["SIGUSR2"]


@POSIX
def test_nested_work_defers_signals_to_the_outermost(heard: list[str]):
    def outer() -> None:
        uninterrupted(send(signal.SIGUSR1))
        assert heard == []

    before = handlers()
    with pytest.raises(HandlerError):
        uninterrupted(outer)
    assert heard == ["SIGUSR1"]
    assert handlers() == before


@POSIX
@pytest.mark.parametrize("extra", [(), (signal.SIGUSR1,)] if hasattr(signal, "SIGUSR1") else [])
def test_a_signal_at_any_line_leaves_all_handlers_and_all_or_no_work(
    heard: list[str], extra: tuple[signal.Signals, ...]
):
    """Ctrl-C at every line of the module in turn, also while the handler of another raises."""
    module = sys.modules[uninterrupted.__module__].__file__
    before, sent = handlers(), 0
    for nth in range(1, 1000):
        done: list[str] = []
        count = 0

        def work(done: list[str] = done) -> None:
            done.append("first")
            for signum in extra:
                signal.raise_signal(signum)
            done.append("last")

        def trace(frame: FrameType, event: str, arg: object, nth: int = nth) -> Any:
            nonlocal count
            if frame.f_code.co_filename == module and event == "line":
                count += 1
                if count == nth:
                    signal.raise_signal(signal.SIGINT)
            return trace

        heard.clear()
        sys.settrace(trace)
        try:
            uninterrupted(work)
        except (KeyboardInterrupt, HandlerError):
            pass
        finally:
            sys.settrace(None)
        assert handlers() == before, nth
        assert done in ([], ["first", "last"]), nth
        if count < nth:
            break
        sent += 1
        assert heard.count("SIGINT") == 1, nth
        if extra and done:
            assert "SIGUSR1" in heard, nth
    assert sent > 20
