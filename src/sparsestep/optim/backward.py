"""Updates while gradients arrive: one gradient in memory instead of all of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sparsestep.errors import InputError, sentence, usable
from sparsestep.grads.exchange import source_of
from sparsestep.optim.records import StateKeeper
from sparsestep.optim.step import Plan


class StepInBackward:
    """The handle of ``optimizer.step_in_backward()``; ``remove()`` undoes it.

    Until then the parameters hold on to the optimizer, and it to them.
    """

    def __init__(
        self, optimizer: StateKeeper, params: Iterable[Tensor] | None, backwards: int
    ) -> None:
        if not isinstance(backwards, int) or backwards < 1:
            raise InputError(sentence("backwards must be an integer, at least 1", backwards))
        places = {
            id(param): (group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }
        # The gradient of a sharded table is complete when all ranks need it: in step().
        everything = (each for each in optimizer._all_params() if source_of(each) is None)
        with usable("step_in_backward needs a list of parameters"):
            wanted = list(params if params is not None else everything)
        for param in wanted:
            if id(param) not in places:
                contract = "step_in_backward needs parameters of this optimizer"
                got = f"a {type(param).__name__}"
                if isinstance(param, Tensor):
                    got = f"another, of shape {tuple(param.shape)}"
                raise InputError(sentence(contract, got))
            if source_of(param) is not None:
                contract = "step_in_backward needs gradients that are complete after backward"
                remedy = "Leave it to step()"
                raise InputError(sentence(contract, "the weight of a sharded table", remedy))
            if param.grad is not None:
                contract = (
                    "step_in_backward must start without gradients, or backward would add to them"
                )
                raise InputError(sentence(contract, "a gradient", "Call zero_grad() first"))
        self._optimizer = optimizer
        self._backwards = backwards
        self._places = places
        # id -> gradients so far, and in which round: with step() or zero_grad() a new one begins.
        self._seen: dict[int, tuple[int, int]] = {}
        self._began = optimizer._rounds
        self._handles = [
            param.register_post_accumulate_grad_hook(self._arrived)
            for param in wanted
            if param.requires_grad
        ]

    def _arrived(self, param: Tensor) -> None:
        rounds = self._optimizer._rounds
        count, latest = self._seen.get(id(param), (0, rounds))
        if latest != rounds:
            count = 0
        if count == self._backwards:
            # Whoever calls step() or zero_grad() at all calls it between two steps.
            if rounds != self._began:
                param.grad = None
                raise InputError(self._one_too_many())
            count = 0
        self._seen[id(param)] = (count + 1, rounds)
        if count + 1 == self._backwards:
            try:
                self._update(param)
            except BaseException:
                del self._seen[id(param)]
                raise
            finally:
                param.grad = None

    def _one_too_many(self) -> str:
        one = "a second" if self._backwards == 1 else f"one after {self._backwards}"
        return sentence(
            f"{type(self._optimizer).__name__}: step_in_backward frees a gradient as soon as it "
            "is used, so gradients of several backward calls cannot be accumulated",
            f"{one} before step() or zero_grad()",
            "Pass backwards=n to step once in n backward calls",
        )

    def _update(self, param: Tensor) -> None:
        optimizer = self._optimizer
        group_index, index = self._places[id(param)]
        groups = optimizer.param_groups
        step = Plan(optimizer)
        step.skip_groups(groups[:group_index])
        step.add_group(group_index, groups[group_index], only=index)
        step.run()
        optimizer._updates += 1

    def remove(self) -> None:
        """Leave gradients to ``step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
