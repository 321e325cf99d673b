"""One case: an operation, a fault, and the comparison with undisturbed runs.

Every case runs in a process forked from one that has imported torch. So a crash or a hang is a
finding like any other, and no case sees what another left behind.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch.distributed as dist

from sparsestep.errors import InputError, is_out_of_memory
from tests.faults import ranks
from tests.faults.injectors import AllocationFailures, Injector, Signals
from tests.faults.operations import Operation
from tests.faults.snapshot import Snapshot, difference
from tests.processes import Lost

TIMEOUT = 60.0


class Expected(NamedTuple):
    """Undisturbed runs."""

    before: list[Snapshot]  # without the operation, one for each rank
    after: list[Snapshot]  # with it
    events: int  # of the injector, on the rank that has the fault
    seconds: float = 0.0  # that the operation takes
    left_before: Snapshot = {}  # noqa: RUF012  what the ranks leave without the operation
    left_after: Snapshot = {}  # noqa: RUF012  what they leave with it


class Outcome(NamedTuple):
    """The end of a case.

    Its kind is ``done``, ``undone``, ``finding``, ``aborted`` by a library below torch, or
    ``limit``, where ranks differ as docs/promises.md says.
    """

    kind: str
    detail: str = ""


class FindingError(Exception):
    """Not all, and not nothing."""


def outcome_of(
    make: type[Operation], injector: Injector, nth: int | None, expected: Expected | None
) -> Expected | Outcome:
    """Run a case, or calibrate it if nothing is expected yet; errors are findings."""
    try:
        if nth is None or expected is None:
            return calibrate(make, injector)
        return run_case(make, injector, nth, expected)
    except FindingError as finding:
        return Outcome("finding", str(finding))
    except BaseException as error:
        text = "".join(traceback.format_exception(error)[-6:])
        return Outcome("finding", f"outside of the operation: {text}")


def outcome_of_lost(lost: Lost) -> Outcome:
    if ranks.is_aborted(lost.log):
        return Outcome("aborted")
    return Outcome("finding", f"{lost.kind}\n{lost.log[-1000:]}")


# One process


def calibrate(make: type[Operation], injector: Injector) -> Expected:
    """Run an operation undisturbed, and count its events."""
    if issubclass(make, ranks.RankOperation):
        return _calibrate_ranks(make, injector)
    if injector.kills:
        before, after = _killed(make, lambda run: None), _killed(make, lambda run: run())
        with _prepared(make) as world:
            return Expected([before], [after], injector.count(world.run))
    with _prepared(make) as world:
        before = world.snapshot()
        began = time.perf_counter()
        world.run()
        seconds, after = time.perf_counter() - began, world.snapshot()
    with _prepared(make) as world:
        events = injector.count(world.run)
        _compare(world, after, "two undisturbed runs differ")
    return Expected([before], [after], events, seconds)


def _compare(world: Operation, expected: Snapshot, otherwise: str) -> None:
    paths = difference(world.snapshot(), expected)
    if paths:
        raise FindingError(f"{otherwise}: {paths[:6]}")


def run_case(make: type[Operation], injector: Injector, nth: int, expected: Expected) -> Outcome:
    """Run an operation with a fault at its n-th event."""
    if isinstance(injector, Signals):
        injector.seconds = expected.seconds
    if issubclass(make, ranks.RankOperation):
        return _run_ranks(make, injector, nth, expected)
    (before,), (after,) = expected.before, expected.after
    if injector.kills:
        killed = _killed(make, lambda run: injector.inject(run, nth))
        return _judge(KeyboardInterrupt(), killed, before, after)
    with _prepared(make) as world:
        handlers, files = _handlers(), _open_files()
        error = _inject(injector, world.run, nth)
        found = world.snapshot()
        strict = isinstance(error, MemoryError) and not make.may_raise_late
        outcome = _judge(error, found, before, after, strict)
        if _handlers() != handlers:
            raise FindingError("signal handlers were lost")
        if outcome.kind == "undone":
            del error
            gc.collect()  # frames of the error may hold on to files
            if _open_files() > files:
                raise FindingError("open files were left")
            _run_again(world)
            _compare(world, after, "called again, it gives another result")
        return outcome


def _inject(injector: Injector, run: Callable[[], None], nth: int) -> BaseException | None:
    """The error that the fault led to, if any; others are findings."""
    try:
        injector.inject(run, nth)
    except injector.raises as error:
        return error
    except AssertionError as error:
        raise FindingError(str(error)) from error
    except Exception as error:
        is_memory = is_out_of_memory(error) or getattr(error, "errno", None) == errno.ENOMEM
        if isinstance(injector, AllocationFailures) and is_memory:
            if isinstance(error, InputError):
                raise FindingError(f"a failed allocation is an InputError: {error}") from error
            return MemoryError(str(error))
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        raise FindingError(f"{type(error).__name__}: {str(error)[:300]}\n{where}") from error
    return None


def _judge(
    error: BaseException | None,
    found: Snapshot,
    before: Snapshot,
    after: Snapshot,
    strict: bool = False,
) -> Outcome:
    if found == after and not (error is not None and strict and before != after):
        return Outcome("done")
    if found == before and error is not None:
        return Outcome("undone")
    where = "" if error is None else "".join(traceback.format_tb(error.__traceback__)[-6:])
    if error is None and found == before:
        raise FindingError("it returned, but nothing has changed")
    if found == after:
        raise FindingError(f"it raised {error!r}, but everything has changed\n{where}")
    new, old = difference(found, after), difference(found, before)
    raise FindingError(
        f"torn after {type(error).__name__}: {old[:6]} are not as before, "
        f"{new[:6]} not as after\n{where}"
    )


def _run_again(world: Operation) -> None:
    """In a thread of its own: a lock that was never released is a hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            world.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT / 3)
    if thread.is_alive():
        raise FindingError("called again, it hangs")
    if errors:
        raise FindingError(f"called again, it raises {errors[0]!r}")


def _handlers() -> list[Any]:
    return [signal.getsignal(each) for each in signal.valid_signals()]


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


@contextmanager
def _prepared(make: type[Operation]) -> Iterator[Operation]:
    with TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        yield make(Path(folder)).prepare()


def _killed(make: type[Operation], call: Callable[[Callable[[], None]], None]) -> Snapshot:
    """Run an operation in another process, which may be killed; what the next process finds."""
    with TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        pid = os.fork()
        if pid == 0:
            try:
                call(make(Path(folder)).prepare().run)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if status not in (0, signal.SIGKILL):
            raise FindingError(f"the process that was to be killed ended with status {status}")
        return make(Path(folder)).reopen()


# Several processes


def _calibrate_ranks(make: type[ranks.RankOperation], injector: Injector) -> Expected:
    def nothing(world: ranks.RankOperation) -> Any:
        return world.snapshot()

    def alone(world: ranks.RankOperation) -> Any:
        world.run()
        return world.snapshot()

    def counted(world: ranks.RankOperation) -> Any:
        if world.rank != make.faulty:
            world.run()
            return 0, 0.0
        began = time.perf_counter()
        return injector.count(world.run), time.perf_counter() - began

    before, after = ranks.run(make, nothing), ranks.run(make, alone)
    events, seconds = ranks.run(make, counted).ranks[make.faulty]
    return Expected(before.ranks, after.ranks, events, seconds, before.left, after.left)


def _run_ranks(
    make: type[ranks.RankOperation], injector: Injector, nth: int, expected: Expected
) -> Outcome:
    def disturbed(world: ranks.RankOperation) -> Any:
        error: str | None = None
        started = ranks.collectives_started()
        try:
            if world.rank == make.faulty:
                injector.inject(world.run, nth)
            else:
                world.run()
        except AssertionError as lost:  # a signal
            raise FindingError(str(lost)) from lost
        except (Exception, *injector.raises) as raised:  # its own, the other rank's, a timeout
            error = f"{raised!r} in {traceback.extract_tb(raised.__traceback__)[-1].filename}"
        is_interrupted = "KeyboardInterrupt" in (error or "")
        if is_interrupted and ranks.collectives_started() == started:
            world.run()  # the others still wait in their first call
            error = None
        values = world.snapshot()
        if make.is_repeatable and KeyboardInterrupt in injector.raises and not injector.kills:
            _run_ranks_again(world, error, values, expected)
        return error, values

    try:
        found = ranks.run(make, disturbed)
    except ranks.AbortedError:
        return Outcome("aborted")
    errors = [None if each is None else each[0] for each in found.ranks]

    def judge(error: str | None, values: Snapshot, before: Snapshot, after: Snapshot) -> str | None:
        raised = None if error is None else RuntimeError(error)
        kind = _judge(raised, values, before, after).kind
        return None if before == after else kind

    kinds = [
        None if each is None else judge(*each, before, after)
        for each, before, after in zip(found.ranks, expected.before, expected.after, strict=True)
    ]
    error = next(filter(None, errors), None)
    left = judge(error, found.left, expected.left_before, expected.left_after)
    distinct = {kind for kind in (*kinds, left) if kind is not None}
    if len(distinct) > 1:
        if is_limit_of_hosts(make, errors, kinds):
            return Outcome("limit")
        raise FindingError(f"ranks differ: {kinds}, {left}, errors {errors}")
    return Outcome(min(distinct, default="done"))


def is_limit_of_hosts(
    make: type[ranks.RankOperation], errors: Sequence[str | None], kinds: Sequence[str | None]
) -> bool:
    """Whether ranks differ only as limit 5 of docs/promises.md says.

    Gloo runs out of memory when other hosts have all messages: they commit, and the ranks of the
    faulty one lose contact and have changed nothing.
    """
    size = make.world_size // make.hosts
    first = make.faulty // size * size
    host = range(first, first + size)

    def is_lost(rank: int) -> bool:
        words = ("std::bad_alloc", "distributed_c10d.py") if rank == make.faulty else ("gloo",)
        return kinds[rank] == "undone" and all(each in (errors[rank] or "") for each in words)

    others = (rank for rank in range(make.world_size) if rank not in host)
    return all(map(is_lost, host)) and all(kinds[rank] == "done" for rank in others)


def _run_ranks_again(
    world: ranks.RankOperation, error: str | None, values: Snapshot, expected: Expected
) -> None:
    """Ranks that were interrupted while they met go on, unless they have lost each other."""
    before, after = expected.before[world.rank], expected.after[world.rank]
    if error is not None and "gloo" in error:
        return
    kinds: list[Any] = [(False, False)] * world.world_size
    with suppress(RuntimeError):  # the others wait no more
        dist.all_gather_object(kinds, (error is not None, values == before))
    if any(is_raised for is_raised, _ in kinds) and all(is_undone for _, is_undone in kinds):
        try:
            world.run()
        except Exception as again:
            raise FindingError(f"after {error} it is called again and raises {again!r}") from again
        _compare(world, after, "called again, it gives another result")
