"""Rows are brought up to date before a model reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sparsestep.optimizer import RuleOptimizer

_INTEGERS = (torch.int64, torch.int32)  # what embeddings take


class Tracking:
    """The handle of ``optimizer.track(model)``; ``remove()`` undoes it.

    A copy of the model is current but not watched: its weights are not this optimizer's.
    """

    def __init__(self, optimizer: RuleOptimizer | None, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._handles: list[Any] = []
        if optimizer is None:
            return
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._watch_as_a_whole(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in known:
                hook = module.register_forward_pre_hook(self._before_reading, with_kwargs=True)
                self._handles.append(hook)
                if module is not model:  # it may be saved and loaded alone
                    self._watch_as_a_whole(module)
            elif hasattr(type(module), "rows_read"):  # it reads several tables by itself
                hook = module.register_forward_pre_hook(self._before_reading_all, with_kwargs=True)
                self._handles.append(hook)

    def _watch_as_a_whole(self, module: nn.Module) -> None:
        # What is loaded stands as it is: what was missed before must not be made up for after.
        self._handles += [
            module.register_state_dict_pre_hook(self._catch_up),
            module.register_load_state_dict_pre_hook(self._catch_up),
        ]

    def _before_reading(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._read(weight, args[0] if args else kwargs.get("input"))

    def _before_reading_all(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for weight, ids in module.rows_read(*args, **kwargs):
            self._read(weight, ids)

    def _read(self, weight: Tensor, ids: Any) -> None:
        # What is no row is left to the module, which says so.
        if (
            self._optimizer is None
            or not isinstance(ids, Tensor)
            or ids.dtype not in _INTEGERS
            or ids.device != weight.device
        ):
            return
        inside = (ids.values() if ids.is_nested else ids).reshape(-1)
        if inside.numel():
            low, high = inside.aminmax()
            if int(low) < 0 or int(high) >= weight.shape[0]:
                return
            self._optimizer.bring(weight, inside)

    def _catch_up(self, module: nn.Module, *_: Any) -> None:
        if self._optimizer is None:
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._optimizer.catch_up(module.weight)
        else:
            self._optimizer.catch_up()

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracking:
        if self._optimizer is not None:
            self._optimizer.catch_up()
            for group in self._optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in memo:  # copied before it was current
                        memo[id(param)].copy_(param)
        return _untracked()

    def __reduce__(self) -> Any:
        if self._optimizer is not None:
            self._optimizer.catch_up()
        return _untracked, ()


def _untracked() -> Tracking:
    return Tracking(None, nn.Module())
