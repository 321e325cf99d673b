"""What torch has no hooks for: ``model.eval()``, pickles and copies of a module, averages."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

CatchUp = Callable[[nn.Module], None]


class Watch:
    """Stands in for two methods of a module that holds a table; copies of it have their own.

    Python and torch look both of them up on the module itself before they look at its class.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module keeps the watch
        self._before: list[CatchUp] = []
        self._own = {"train": self._train, "__getstate__": self._state}
        self._others = {name: vars(module)[name] for name in self._own if name in vars(module)}

    @classmethod
    def of(cls, module: nn.Module) -> Watch | None:
        """That of a module, if it has one."""
        found = getattr(vars(module).get("train"), "__self__", None)
        return found if isinstance(found, cls) else None

    @classmethod
    def add(cls, module: nn.Module, catch_up: CatchUp) -> Callable[[], None]:
        """Have something called before all of a module is read; returns what undoes it."""
        watch = cls.of(module)
        if watch is None:
            watch = cls(module)
            vars(module).update(watch._own)
        watch._before.append(catch_up)
        return functools.partial(watch._remove, catch_up)

    def _remove(self, catch_up: CatchUp) -> None:
        self._before.remove(catch_up)
        module = self._module()
        if module is not None and not self._before:
            for name in self._own:
                vars(module).pop(name, None)
            vars(module).update(self._others)

    def catch_up(self) -> nn.Module:
        """Bring what the module holds up to date."""
        module = self._module()
        assert module is not None
        for before in self._before:
            before(module)
        return module

    def _train(self, mode: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None
        if not mode:
            self.catch_up()
        train = self._others.get("train", functools.partial(type(module).train, module))
        result: nn.Module = train(mode)
        return result

    def _state(self) -> Any:
        """What is pickled or copied: current, and without the watch."""
        module = self.catch_up()
        own = getattr(type(module), "__getstate__", lambda module: vars(module))
        state = self._others.get("__getstate__", functools.partial(own, module))()
        if not isinstance(state, dict):
            return state
        return {**{k: v for k, v in state.items() if k not in self._own}, **self._others}


def follow_averages() -> None:
    """Have ``AveragedModel`` read current rows: it reads parameters without asking the model."""
    update = AveragedModel.update_parameters
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        for module in model.modules():
            watch = Watch.of(module)
            if watch is not None:
                watch.catch_up()
        update(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
