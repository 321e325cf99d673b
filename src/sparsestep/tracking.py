"""Rows are brought up to date before a model reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from sparsestep.optimizer import RuleOptimizer


class Tracking:
    """The handle of ``optimizer.track(model)``; ``remove()`` undoes it."""

    def __init__(self, optimizer: RuleOptimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._handles: list[Any] = [model.register_state_dict_pre_hook(self._before_saving)]
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in known:
                self._handles.append(
                    module.register_forward_pre_hook(self._before_reading, with_kwargs=True)
                )

    def _before_reading(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        ids = args[0] if args else kwargs.get("input")
        if isinstance(ids, Tensor):
            weight = module.weight
            assert isinstance(weight, Tensor)
            # What is no row is left to the module, which says so.
            inside = ids.reshape(-1)
            if inside.numel():
                low, high = inside.aminmax()
                if int(low) < 0 or int(high) >= len(weight):
                    return
                self._optimizer.catch_up(weight, inside)

    def _before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._optimizer.catch_up()

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
