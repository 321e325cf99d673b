"""Ctrl-C during a step: all of it was done, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from sparsestep.engines.signals import uninterrupted

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
        clock = opt._clocks[id(table)]
        assert int(clock.last.max()) == clock.history.now, "a row runs ahead"
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
