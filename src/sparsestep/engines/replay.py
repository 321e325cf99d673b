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
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsestep.engines.finishing import failed
from sparsestep.memory.parameters import lie_alike

# Elements of a piece, per thread: a multiple of the grain by which torch splits work over threads.
PIECE = 1 << 17
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
        if name.startswith("_foreach_") and not name.endswith("_"):
            with self:
                return _in_place(name, *args, **kwargs)
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
            if all(map(is_, each_replaced, value)):
                return value
            return tuple(each_replaced) if type(value) is tuple else each_replaced
        return value


def _in_place(name: str, tensors: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """A foreach function, as copies on which its in-place variant works."""
    if not isinstance(tensors, tuple | list):
        raise CannotReplayError(name)
    copies = [tensor.clone() for tensor in tensors]
    getattr(torch, f"{name}_")(copies, *args, **kwargs)
    return copies


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Replay:
    """Repeats a recording on other tensors.

    An *environment* is a list of all tensors of one repetition by slot, followed by the constants
    of all operations, so that arguments are picked from it by number.

    Args:
        recording: a finished one.
        largest: the most elements that a tensor has that it will be repeated on.
    """

    def __init__(self, recording: Recording, largest: int) -> None:
        self._inputs = recording.inputs
        dims = recording.tensors[0].dim()
        self._shapes = [tuple(tensor.shape[dims:]) for tensor in recording.tensors]
        self._buffers = self._reserved(recording, largest)
        self._constants: list[Any] = []
        self._views = [op for op in recording.operations if op.is_view]
        self._steps = [self._step(op) for op in recording.operations if not op.is_view]
        self._endings: dict[Any, list[Any]] = {}  # of environments, by shape and strides

    def _reserved(self, recording: Recording, largest: int) -> dict[int, Tensor]:
        """A buffer for each temporary, by slot; those that are never in use together share one."""
        found: dict[int, Tensor] = {}
        free: dict[tuple[Any, ...], list[Tensor]] = {}
        last_use = _last_uses(recording)
        for number, operation in enumerate(recording.operations):
            slot = operation.result
            if slot is not None and not operation.is_view:
                kind = recording.tensors[slot].dtype, self._shapes[slot]
                unused = free.get(kind)
                found[slot] = unused.pop() if unused else _buffer(largest, *kind)
            for slot in last_use.get(number, ()):
                kind = recording.tensors[slot].dtype, self._shapes[slot]
                free.setdefault(kind, []).append(found[slot])
        return found

    def _step(self, operation: Operation) -> Step:
        function, args, kwargs, result, _ = operation
        if result is not None:  # have it write into a buffer
            function, args, kwargs = _into(function, args, kwargs, Slot(result))
        out = kwargs.get("out")
        fixed = {name: value for name, value in kwargs.items() if value is not out}
        if list(_slots_in(fixed)) or any(
            isinstance(arg, tuple | list) for arg in args if type(arg) is not Slot
        ):
            return Step(partial(_call, function, args, kwargs), itemgetter(slice(None)), {}, None)
        return Step(function, self._picked(args), fixed, None if out is None else out.number)

    def _picked(self, values: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
        """Picks arguments from an environment."""
        numbers = []
        for value in values:
            if type(value) is Slot:
                numbers.append(value.number)
            else:
                numbers.append(len(self._shapes) + len(self._constants))
                self._constants.append(value)
        if len(numbers) < 2:  # where an itemgetter returns no tuple
            return partial(_pick, numbers)
        return itemgetter(*numbers)

    def environment(self, inputs: Sequence[Tensor]) -> list[Any]:
        """All that a repetition on these tensors needs."""
        like = inputs[0]
        ending = self._endings.get((like.shape, like.stride()))
        if ending is None:
            slots = range(self._inputs, len(self._shapes))
            ending = [self._view(slot, like) for slot in slots] + self._constants
            self._endings[like.shape, like.stride()] = ending
        found = [*inputs, *ending]
        for function, args, kwargs, result, _ in self._views:
            assert result is not None
            found[result] = function(*_concrete(args, found), **_concrete(kwargs, found))
        return found

    def _view(self, slot: int, like: Tensor) -> Tensor | None:
        """A buffer in the shape and the memory format of what torch would allocate."""
        if slot not in self._buffers:
            return None  # a view of another
        buffer, tail = self._buffers[slot][: like.numel()], self._shapes[slot]
        if tail or like.is_contiguous():
            return buffer.view((*like.shape, *tail))
        return buffer.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def run(self, environments: Sequence[list[Any]]) -> None:
        """Repeat it in each environment; completes even if memory runs out (see ``finish``).

        An operation either raises before it writes, or is complete. One that raises is repeated.
        """
        remaining, steps = iter(environments), self._steps
        left: Iterator[Step] = iter(())
        environment: list[Any] = []
        step, failures = None, 0
        while True:
            try:
                if step is None:
                    step = next(left, None)
                    if step is None:
                        left = iter(steps)
                        environment = next(remaining, _END)
                        if environment is _END:
                            return
                        continue
                function, args, kwargs, out = step
                if out is None:
                    function(*args(environment), **kwargs)
                else:
                    function(*args(environment), **kwargs, out=environment[out])
                step = None
            except (MemoryError, RuntimeError):
                failures = failed(failures)


class Step(NamedTuple):
    """An operation that picks its arguments from an environment.

    Attributes:
        function: what to call.
        args: picks the arguments.
        kwargs: keyword arguments that are constants.
        out: the number of the tensor to write to, if that is a keyword argument.
    """

    function: Callable[..., Any]
    args: Callable[[list[Any]], Any]
    kwargs: dict[str, Any]
    out: int | None


_END: list[Any] = []


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *environment: Any
) -> None:
    """An operation whose arguments are lists of tensors, like those of torch's fused kernels."""
    function(*_concrete(args, environment), **_concrete(kwargs, environment))


def _pick(numbers: list[int], environment: list[Any]) -> list[Any]:
    return [environment[number] for number in numbers]


def _concrete(value: Any, environment: Sequence[Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return environment[value[0]]
    if kind is dict:
        return {name: _concrete(each, environment) for name, each in value.items()}
    if kind is tuple:
        return tuple([_concrete(each, environment) for each in value])
    return [_concrete(each, environment) for each in value] if kind is list else value


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
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Slot
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The operation that writes the same result into ``out``."""
    name = function.__name__
    if name == "clone":
        return Tensor.copy_, (out, args[0]), {}
    found = getattr(torch, {"__truediv__": "div"}.get(name, name), None)
    if found is None:  # no operation of torch's kernels today
        raise CannotReplayError(name)
    return found, args, {**kwargs, "out": out}


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
