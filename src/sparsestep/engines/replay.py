"""Torch's optimizer kernels, without their allocations.

A kernel of ``torch.optim`` creates temporaries while it writes parameters and state, and counts
steps. If an allocation fails in between, the step is torn. So the kernel itself runs on tensors of
one element only. The operations that it performs there are recorded, then replayed on the real
tensors, one by one, with temporaries in buffers that were allocated before. Operations are the same
and so are the bits; large tensors are processed in pieces that fit into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsestep.memory.parameters import lie_alike

# Elements of a piece, per thread: a multiple of the grain by which torch splits work over threads.
PIECE = 1 << 17
_FOREACH = "_foreach_"
# Read numbers, on which the kernel's next operations may depend.
_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__"}


class CannotReplayError(Exception):
    """The kernel looks at the numbers themselves."""


class Slot(NamedTuple):
    """A tensor of a recording, by number: an input or a result."""

    number: int


class Operation(NamedTuple):
    """An operation of a recording.

    Attributes:
        function: what to call.
        args: its arguments, with a ``Slot`` for each tensor that is replaced.
        kwargs: its keyword arguments, likewise.
        result: the slot of the tensor that it creates; ``None`` if it works in place.
        is_view: whether the result lies in the memory of an argument.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None
    is_view: bool


class Recording(TorchFunctionMode):
    """While it is active: the operations on some tensors, and on what is computed from them.

    Everything else, like counting steps, is just done: its results are constants.

    Args:
        inputs: tensors of one element, of shape ``()`` or ``(1,)``.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.inputs: int = len(inputs)
        self.tensors: list[Tensor] = list(inputs)  # by slot; kept, so that no id comes twice
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
        if name.startswith(_FOREACH):
            with self:
                return _one_by_one(name.removeprefix(_FOREACH), *args, **kwargs)
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
        self.operations.append(Operation(func, symbolic, by_name, slot, is_view))
        return result

    def _symbolic(self, value: Any) -> Any:
        """The same with slots for tensors; the very same if there are none."""
        if isinstance(value, Tensor):
            index = self._slots.get(id(value))
            return value if index is None else Slot(index)
        if type(value) is dict:
            replaced: Any = {key: self._symbolic(each) for key, each in value.items()}
            return replaced if any(replaced[key] is not value[key] for key in value) else value
        if type(value) in (tuple, list):
            each_replaced = [self._symbolic(each) for each in value]
            if all(map(_is, each_replaced, value)):
                return value
            return tuple(each_replaced) if type(value) is tuple else each_replaced
        return value


def _one_by_one(name: str, *args: Any, **kwargs: Any) -> list[Tensor]:
    """What ``torch._foreach_<name>`` does on a CPU: the operation on one tensor after the other."""
    found = []
    for index in range(len(next(arg for arg in args if isinstance(arg, tuple | list)))):
        first, *others = (arg[index] if isinstance(arg, tuple | list) else arg for arg in args)
        if name.startswith("addc") and len(others) == 3:
            found.append(getattr(first, name)(*others[:2], value=others[2]))
        elif name == "maximum_":
            found.append(torch.maximum(first, *others, out=first))
        elif isinstance(first, Tensor):
            found.append(getattr(first, name)(*others, **kwargs))
        else:
            found.append(getattr(torch, name)(first, *others, **kwargs))
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is(one: object, other: object) -> bool:
    return one is other


class Replay:
    """Makes the calls that repeat a recording on other tensors.

    Args:
        recording: a finished one.
        largest: the most elements that a tensor has that it will be repeated on.
    """

    def __init__(self, recording: Recording, largest: int) -> None:
        self._operations = recording.operations
        self._slots = len(recording.tensors)
        self._inputs = recording.inputs
        dims = recording.tensors[0].dim()
        self._shapes = [tuple(tensor.shape[dims:]) for tensor in recording.tensors]
        self._buffers: dict[int, Tensor] = {}  # by slot
        self._views: dict[tuple[Any, ...], dict[int, Tensor]] = {}  # by shape and strides
        free: dict[tuple[Any, ...], list[Tensor]] = {}
        last_use = _last_uses(recording)
        for number, operation in enumerate(self._operations):
            slot = operation.result
            if slot is not None and not operation.is_view:
                kind = recording.tensors[slot].dtype, self._shapes[slot]
                unused = free.get(kind)
                self._buffers[slot] = unused.pop() if unused else _buffer(largest, *kind)
            for slot in last_use.get(number, ()):
                kind = recording.tensors[slot].dtype, self._shapes[slot]
                free.setdefault(kind, []).append(self._buffers[slot])

    def _view(self, slot: int, like: Tensor) -> Tensor:
        """A buffer in the shape and the memory format of what torch would allocate."""
        buffer, tail = self._buffers[slot][: like.numel()], self._shapes[slot]
        if tail or like.is_contiguous():
            return buffer.view((*like.shape, *tail))
        return buffer.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def calls(self, inputs: Sequence[Tensor]) -> Iterator[Callable[[], object]]:
        """One for each operation, in order: it raises and has done nothing, or does all of it."""
        like = inputs[0]
        views = self._views.get((like.shape, like.stride()))
        if views is None:
            views = {slot: self._view(slot, like) for slot in self._buffers}
            self._views[like.shape, like.stride()] = views
        tensors: list[Any] = [*inputs, *[None] * (self._slots - self._inputs)]
        for slot, view in views.items():
            tensors[slot] = view
        for function, args, kwargs, result, is_view in self._operations:
            args = _concrete(args, tensors)
            if kwargs:
                kwargs = {name: _concrete(value, tensors) for name, value in kwargs.items()}
            if result is None:
                yield partial(function, *args, **kwargs)
            elif is_view:
                tensors[result] = function(*args, **kwargs)
            else:
                yield _into(function, args, kwargs, tensors[result])


def _concrete(value: Any, tensors: list[Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return tensors[value[0]]
    if kind is tuple:
        return tuple([_concrete(each, tensors) for each in value])
    return [_concrete(each, tensors) for each in value] if kind is list else value


def _buffer(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty((count, *shape), dtype=dtype, device="cpu")


def _last_uses(recording: Recording) -> dict[int, list[int]]:
    """For each operation, by number, the temporaries that no later one reads."""
    latest: dict[int, int] = {}
    roots: dict[int, int] = {}
    for number, operation in enumerate(recording.operations):
        used = [roots.get(slot, slot) for slot in _slots_in((operation.args, operation.kwargs))]
        if operation.result is not None:
            if operation.is_view:
                roots[operation.result] = used[0]
            else:
                used.append(operation.result)
        latest.update(dict.fromkeys(used, number))
    found: dict[int, list[int]] = {}
    for slot, number in latest.items():
        if slot >= recording.inputs:
            found.setdefault(number, []).append(slot)
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
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Callable[[], object]:
    """A call that has an operation write its result into ``out``."""
    name = function.__name__
    if name == "clone":
        return partial(out.copy_, args[0])
    found = getattr(torch, {"__truediv__": "div"}.get(name, name), None)
    if found is None:  # no operation of torch's kernels today
        raise CannotReplayError(name)
    return partial(found, *args, **kwargs, out=out)


def pieces(tensors: Sequence[Tensor], most: int) -> Iterator[Sequence[Tensor]]:
    """The same part of each of some tensors of one shape, part by part.

    Args:
        tensors: of the same shape.
        most: elements of a part, unless a single row has more.

    Example:
        >>> table = torch.arange(6).view(3, 2)
        >>> [[part.tolist() for part in parts] for parts in pieces([table, -table], 4)]
        [[[0, 1, 2, 3], [0, -1, -2, -3]], [[4, 5], [-4, -5]]]
    """
    first = tensors[0]
    count = first.numel()
    if all(tensor.is_contiguous() for tensor in tensors):
        if 0 < count <= most:
            yield tensors
            return
        tensors = [tensor.view(-1) for tensor in tensors]
        length = most
    elif lie_alike(tensors):
        tensors = [t.as_strided((count,), (1,), t.storage_offset()) for t in tensors]
        length = most
    else:
        length = max(1, most * len(first) // max(1, count))
    if count:
        yield from zip(*(tensor.split(length) for tensor in tensors), strict=True)


def largest_piece(tensor: Tensor, most: int) -> int:
    """At least as many elements as any of a tensor's pieces has."""
    count = tensor.numel()
    return count if count <= most else max(most, count // max(1, len(tensor)))
