"""Memory that has been used enough is moved into huge pages.

With huge pages, steps on a large table are about a quarter faster. But creating one costs as much
as many steps gain. So a table and its state start in ordinary pages, which exist once they are
touched, and are moved when so many rows were touched that moving them earlier would have paid off:
short training never pays, long training pays at most twice the minimum. One page is moved at a
time, so no step takes much longer than others.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sparsestep.memory.disk import libc
from sparsestep.memory.mapped_file import file_of

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # Linux; the second from 6.1 on

# Bytes moved in the time that touching a row saves. Measured by benchmarks/first_steps.py.
_BYTES_PER_TOUCH = 4

# Tables that would wait longer than this are never moved.
_MOST_ROUNDS = 1 << 20


@dataclass(slots=True, eq=False)  # weak references would compare the tensors
class _Waiting:
    """A tensor that is moved from a round on, and how much of it has been."""

    tensor: weakref.ref[Tensor]
    due: int
    bytes_done: int = 0


class HugePages:
    """The tensors of an optimizer that wait for huge pages; ``due`` is the next round to move."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self.due: float = math.inf

    def add(self, tensor: Tensor, touches: int, round: int) -> None:
        """Move a tensor when it has been used enough, if each step touches so many of its rows."""
        if tensor.nbytes < 2 * _HUGE_PAGE or not tensor.is_cpu or not tensor.is_contiguous():
            return
        if not touches or not _system_has_huge_pages() or file_of(tensor) is not None:
            return
        rounds = tensor.nbytes // (_BYTES_PER_TOUCH * touches)
        if rounds < _MOST_ROUNDS:
            self._waiting.append(_Waiting(weakref.ref(tensor), round + rounds))
            self.due = min(self.due, round + rounds)

    def remove(self, tensor: Tensor) -> None:
        """Forget a tensor that has other memory now."""
        self._waiting = [each for each in self._waiting if each.tensor() is not tensor]
        self.due = min((each.due for each in self._waiting), default=math.inf)

    def move(self, round: int) -> None:
        """Move one page that is due."""
        waiting = next((each for each in self._waiting if each.due <= round), None)
        if waiting is not None and not _move_page(waiting):  # several threads may come here
            self._waiting = [each for each in self._waiting if each is not waiting]
        self.due = min((each.due for each in self._waiting), default=math.inf)

    def move_all(self) -> None:
        """Move everything now, due or not."""
        for waiting in self._waiting:
            while _move_page(waiting):
                pass
        self._waiting.clear()
        self.due = math.inf


def _move_page(waiting: _Waiting) -> bool:
    """Move a tensor's next page, if the system can; returns whether there was one."""
    tensor = waiting.tensor()
    if tensor is None or not tensor.is_contiguous():
        return False
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE + waiting.bytes_done
    if begin + _HUGE_PAGE > tensor.data_ptr() + tensor.nbytes:
        return False
    waiting.bytes_done += _HUGE_PAGE
    advise = libc().madvise
    if advise(begin, _HUGE_PAGE, _MADV_COLLAPSE):  # nothing has been touched there yet
        advise(begin, _HUGE_PAGE, _MADV_HUGEPAGE)
    return True


@functools.cache
def _system_has_huge_pages() -> bool:
    if sys.platform != "linux":
        return False
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in setting
