"""Work in forked processes, where a crash and a hang are results like any other; a tally of it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_IDLE_LOOKS = 3


def run_python(*arguments: str, **variables: str) -> str:
    """What Python prints in another process, which must succeed."""
    command, environment = [sys.executable, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Lost:
    """A process has ended without a result, or had to be ended."""

    kind: str  # "crash, exit code -6" or "hang, more than 20 s"
    log: str  # all that it has written


class _Process:
    """A process that works on one key after the other."""

    def __init__(self, keys: list[Any], work: Callable[[Any], Any]) -> None:
        self.keys = keys
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        self.mailbox, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(keys, work, theirs, self.log.fileno())
        theirs.close()
        self._begin()

    def _begin(self) -> None:
        self._began, self._used, self._idle_looks = time.monotonic(), _cpu_seconds(self.pid), 0

    def results(self, timeout: float) -> Iterator[tuple[Any, Any]]:
        """What has come; of a key that nothing will come of, why."""
        gone = ""
        try:
            while self.mailbox.poll():
                result = pickle.loads(self.mailbox.recv_bytes())
                self._begin()
                yield self.keys.pop(0), result
        except (EOFError, OSError):
            gone = f"crash, exit code {self._exit_code()}"
        if not gone and self._is_hanging(timeout):
            gone = f"hang, more than {timeout:g} s"
            self.end()
        if gone and self.keys:
            with self.log:
                self.log.seek(0)
                text = self.log.read().decode(errors="replace")
            yield self.keys.pop(0), Lost(gone, text)

    def _is_hanging(self, seconds: float) -> bool:
        """Whether it has computed for so long, or waits and will for ever.

        On a busy machine work may take long without doing much; that is no finding.
        """
        if time.monotonic() - self._began <= seconds:
            return False
        used = _cpu_seconds(self.pid)
        if used is None or self._used is None or used - self._used > seconds:
            return True
        self._idle_looks = 0 if _is_running(self.pid) else self._idle_looks + 1
        return self._idle_looks >= _IDLE_LOOKS

    def end(self) -> None:
        """End it with all that it has started."""
        if not self.is_over:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(self.pid, signal.SIGKILL)
            self._exit_code()

    def _exit_code(self) -> int:
        self.mailbox.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def is_over(self) -> bool:
        return self.mailbox.closed


def _serve(keys: list[Any], work: Callable[[Any], Any], mailbox: Connection, log: int) -> None:
    try:
        gc.freeze()  # what there is stays
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for key in keys:
            mailbox.send_bytes(pickle.dumps(work(key)))  # torch would send tensors by themselves
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def _fields(stat: Path) -> list[str]:
    """What Linux tells of a process or thread, from its state on."""
    return stat.read_text().rpartition(")")[2].split()


def _cpu_seconds(pid: int) -> float | None:
    """What a process has computed so far; ``None`` where the system does not tell."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_running(pid: int) -> bool:
    """Whether any of its threads is running, or would be if it had a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if _fields(stat)[0] == "R":
                return True
        except OSError:
            continue  # that thread has ended
    return False


def run(
    batches: Iterator[list[Any]], work: Callable[[Any], Any], workers: int, timeout: float
) -> Iterator[tuple[Any, Any]]:
    """Every key with its result or a ``Lost``, in whatever order they come.

    Args:
        batches: keys that one process works on, one after the other. Another goes on after a crash.
        work: called with each key, in a process forked from this one.
        workers: how many processes at a time.
        timeout: after so many seconds a process is taken to hang.
    """
    team: list[_Process] = []
    try:
        while True:
            while len(team) < workers and (batch := next(batches, None)):
                team.append(_Process(batch, work))
            if not team:
                return
            wait([each.mailbox for each in team], timeout=min(1.0, timeout))
            for place, each in enumerate(team):
                yield from each.results(timeout)
                if each.is_over and each.keys:
                    team[place] = _Process(each.keys, work)
            team = [each for each in team if not each.is_over]
    finally:
        for each in team:
            each.end()


class Tally:
    """Cases by kind, and findings by what they are."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.findings: dict[tuple[str, str], list[Any]] = defaultdict(list)
        self._start = self._shown = time.monotonic()

    def add(self, kind: str, key: Any, finding: str = "", detail: str = "") -> None:
        """Count a case; a new finding is printed at once, and now and then how many there are."""
        self.kinds[kind] += 1
        if finding:
            same = self.findings[kind, re.sub(r"\d{3,}", "…", finding)]
            same.append(key)
            if len(same) == 1:
                print(f"FOUND in {kind} at {key}: {finding}: {detail}", flush=True)
        if time.monotonic() - self._shown > 10:
            self._shown = time.monotonic()
            print(self.head(), flush=True)

    @property
    def cases(self) -> int:
        return sum(self.kinds.values())

    def head(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        count = sum(map(len, self.findings.values()))
        rate = f"{self.cases / seconds:.0f} a second"
        return f"{self.cases} cases, {count} findings in {seconds:.0f} s, {rate}"

    def report(self) -> str:
        """Every finding once, with how often it came and where."""
        lines = [f"  {kind:44}{n:10,}" for kind, n in sorted(self.kinds.items())]
        for (kind, what), keys in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(keys):5} x {kind}: {what}, at {', '.join(map(str, keys[:5]))}")
        return "\n".join([*lines, self.head()])
