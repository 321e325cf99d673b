"""Torch's optimizer kernels, without their allocations.

A kernel of ``torch.optim`` creates temporaries while it writes parameters and state, and counts
steps. If an allocation fails in between, the step is torn. So the kernel itself runs on tensors of
one element only. The operations that it performs there are recorded, then replayed on the real
tensors, one by one, with temporaries in buffers that were allocated before. Operations are the same
and so are the bits; large tensors are processed in pieces, so that the buffers stay small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsestep.engines.base import finish_steps
from sparsestep.memory.tensors import lie_alike

# Elements of a piece, per thread: enough to hide Python's overhead.
PIECE = 1 << 20
# Functions that read values, on which the kernel's next operations may depend.
_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__"}


class CannotReplayError(Exception):
    """The kernel reads values, or has an operation that cannot be replayed."""


class Slot(NamedTuple):
    """An input or a result of a recording, by its number."""

    number: int


class KernelCall(NamedTuple):
    """An operation of a recording."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # with a ``Slot`` for each tensor that is replaced, as in ``kwargs``
    kwargs: dict[str, Any]
    result: int | None  # the slot of the tensor that it creates; None if it works in place
    is_view: bool  # whether the result is a view of an argument


class Recording(TorchFunctionMode):
    """Records the operations on some tensors, and on results computed from them.

    Other operations, like counting steps, are executed: their results are constants. Inputs have
    one element, and the shape ``()`` or ``(1,)``.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[KernelCall] = []
        self.inputs: int = len(inputs)
        self.tensors: list[Tensor] = list(inputs)  # by slot; kept alive, so that ids are unique
        self._slots = {id(tensor): index for index, tensor in enumerate(inputs)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        symbolic, by_name = self._symbolic(args), self._symbolic(kwargs)
        if symbolic is args and by_name is kwargs:
            return func(*args, **kwargs)
        inner = getattr(func, "__wrapped__", None)
        if inner is not None:  # of several operations, written in Python
            with self:
                return inner(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and not name.endswith("_"):  # as in place, on copies
            if not isinstance(args[0], tuple | list):
                raise CannotReplayError(name)
            with self:
                copies = [tensor.clone() for tensor in args[0]]
                getattr(torch, f"{name}_")(copies, *args[1:], **kwargs)
                return copies
        if name in _READS:
            raise CannotReplayError(name)
        result = func(*args, **kwargs)
        is_tensor = isinstance(result, Tensor)
        if not is_tensor and (name.endswith("__") or not name.endswith("_")):
            if isinstance(result, tuple | list) and any(isinstance(t, Tensor) for t in result):
                raise CannotReplayError(name)
            return result  # a property
        slot, is_view = None, False
        if is_tensor and id(result) not in self._slots:
            slot, is_view = len(self.tensors), _memory(result) in map(_memory, self.tensors)
            self._slots[id(result)] = slot
            self.tensors.append(result)
        self.operations.append(KernelCall(func, symbolic, by_name, slot, is_view))
        return result

    def _symbolic(self, value: Any) -> Any:
        """Replace tensors by slots; returns the value itself if there are none."""
        if isinstance(value, Tensor):
            index = self._slots.get(id(value))
            return value if index is None else Slot(index)
        if type(value) is dict:
            replaced: Any = {key: self._symbolic(each) for key, each in value.items()}
            return replaced if any(replaced[key] is not value[key] for key in value) else value
        if type(value) in (tuple, list):
            each_replaced = [self._symbolic(each) for each in value]
            if all(map(is_, each_replaced, value)):
                return value
            return tuple(each_replaced) if type(value) is tuple else each_replaced
        return value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Replay:
    """Replays a recording on other tensors.

    An *environment* is the list of all tensors of one replay by slot, followed by the functions and
    constants of all operations. An operation is compiled to a function of an environment.
    """

    def __init__(self, recording: Recording) -> None:
        dims = recording.tensors[0].dim()
        self._inputs = recording.inputs
        self._kinds = [(t.dtype, tuple(t.shape[dims:])) for t in recording.tensors]
        self._constants: list[Any] = []
        self._views: list[tuple[int, Callable[[list[Any]], Any]]] = []
        self._steps: list[Callable[[list[Any]], object]] = []
        for function, args, kwargs, result, is_view in recording.operations:
            if result is not None and is_view:
                self._views.append((result, self._compiled(function, args, kwargs)))
            elif result is None:
                self._steps.append(self._compiled(function, args, kwargs))
            else:
                self._steps.append(self._compiled(*_into(function, args, kwargs, Slot(result))))
        self._shares = _shared_buffers(recording, self._kinds)
        self._buffers: list[Tensor] = []
        self._endings: dict[Any, list[Any]] = {}  # of environments, by shape and strides

    def _compiled(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [self._source(arg) for arg in args]
        given += [f"{name}={self._source(value)}" for name, value in kwargs.items()]
        return _function(f"{self._source(function)}({', '.join(given)})")

    def _source(self, value: Any) -> str:
        """Python for a value, as found in an environment ``e``."""
        if type(value) is Slot:
            return f"e[{value.number}]"
        if type(value) is list:
            return f"[{', '.join(map(self._source, value))}]"
        self._constants.append(value)
        return f"e[{len(self._kinds) + len(self._constants) - 1}]"

    def reserve(self, largest: int) -> None:
        """Allocate all temporaries, for inputs of up to ``largest`` elements."""
        if self._shares:
            self.release()
            count = 1 + max(self._shares.values())
            kinds = {buffer: self._kinds[slot] for slot, buffer in self._shares.items()}
            self._buffers = [
                torch.empty((largest, *shape), dtype=dtype, device="cpu")
                for dtype, shape in (kinds[number] for number in range(count))
            ]

    def release(self) -> None:
        """Free the temporaries."""
        if self._shares:
            self._buffers = []
            self._endings = {}

    def environment(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return the environment of a replay on these tensors; call ``reserve`` first."""
        like = inputs[0]
        ending = self._endings.get((like.shape, like.stride()))
        if ending is None:
            slots = range(self._inputs, len(self._kinds))
            ending = [self._view(slot, like) for slot in slots] + self._constants
            self._endings[like.shape, like.stride()] = ending
        found = [*inputs, *ending]
        for slot, view in self._views:
            found[slot] = view(found)
        return found

    def _view(self, slot: int, like: Tensor) -> Tensor | None:
        """A buffer in the shape and memory format that torch would allocate."""
        if slot not in self._shares:
            return None  # a view of another
        buffer, tail = self._buffers[self._shares[slot]][: like.numel()], self._kinds[slot][1]
        if tail or like.is_contiguous():
            return buffer.view((*like.shape, *tail))
        return buffer.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def run(self, environments: Sequence[list[Any]]) -> None:
        """Replay in each environment; an operation that raises, before it writes, is repeated."""
        finish_steps(environments, self._steps)


@functools.lru_cache(maxsize=1024)
def _function(source: str) -> Callable[[list[Any]], Any]:
    found: Callable[[list[Any]], Any] = eval(f"lambda e: {source}")
    return found


def _shared_buffers(recording: Recording, kinds: list[Any]) -> dict[int, int]:
    """Assign a buffer to each temporary; those that are never in use together share one."""
    last_use: dict[int, int] = {}  # of each input and temporary, by the operation's number
    roots: dict[int, int] = {}  # of views
    for number, operation in enumerate(recording.operations):
        used = [roots.get(slot, slot) for slot in _slots_in((operation.args, operation.kwargs))]
        if operation.is_view and operation.result is not None:
            roots[operation.result] = used[0]
        elif operation.result is not None:
            used.append(operation.result)
        last_use.update(dict.fromkeys(used, number))
    found: dict[int, int] = {}
    free: dict[Any, list[int]] = {}
    for number, operation in enumerate(recording.operations):
        slot = operation.result
        if slot is not None and not operation.is_view:
            unused = free.get(kinds[slot])
            found[slot] = unused.pop() if unused else 1 + max(found.values(), default=-1)
        for each, buffer in found.items():
            if last_use[each] == number:
                free.setdefault(kinds[each], []).append(buffer)
    return found


def _slots_in(value: Any) -> Iterator[int]:
    if type(value) is Slot:
        yield value.number
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _slots_in(each)
    elif isinstance(value, dict):
        yield from _slots_in(list(value.values()))


def _into(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Slot
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the variant of an operation that writes its result into ``out``."""
    name = function.__name__
    if name == "clone":
        return Tensor.copy_, (out, args[0]), {}
    found = getattr(torch, {"__truediv__": "div"}.get(name, name), None)
    if found is None:  # no operation of torch's kernels today
        raise CannotReplayError(name)
    return found, args, {**kwargs, "out": out}


def pieces(tensors: Sequence[Tensor], most: int) -> Iterator[Sequence[Tensor]]:
    """Split tensors of one shape alike into parts of at most so many elements, or single rows."""
    first = tensors[0]
    count = first.numel()
    if not count:
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        if count <= most:
            yield tensors
            return
        tensors = [tensor.view(-1) for tensor in tensors]
        length = most
    elif lie_alike(tensors):
        tensors = [t.as_strided((count,), (1,), t.storage_offset()) for t in tensors]
        length = most
    else:
        length = max(1, most * len(first) // count)
    yield from zip(*(tensor.split(length) for tensor in tensors), strict=True)


def largest_piece(tensor: Tensor, most: int) -> int:
    """Return an upper bound of the elements of a tensor's pieces."""
    count = tensor.numel()
    return count if count <= most else max(most, count // max(1, len(tensor)))
