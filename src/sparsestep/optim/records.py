"""The state of an optimizer's parameters: created, counted, checked before it is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsestep._torch import scalar_dtype
from sparsestep.deferred.rows import RowClock
from sparsestep.errors import InputError, message
from sparsestep.grads import masks
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory import tensors as parameters
from sparsestep.memory.huge_pages import HugePages
from sparsestep.memory.lazy import saved_by_row
from sparsestep.memory.mapped_file import file_of
from sparsestep.optim import state as states
from sparsestep.optim.declaration import Declaration, speaking
from sparsestep.optim.param_groups import Groups
from sparsestep.rules import options
from sparsestep.rules.rule import Rule


class StateKeeper(Declaration):
    """An optimizer as far as its state goes.

    Attributes:
        groups: what its param groups say.
        clocks: under dense semantics, how far the rows of a parameter are; by the parameter's id.
        known: by the parameter's id: itself, so that no other comes to have its id, and the
            addresses of its memory and that of its state, when they were looked at.
        ran: by the parameter's id: itself, the engine of its latest update, and why not another.
        embeddings: by the parameter's id: itself, and whether its dense gradient is zero in most
            rows, as that of an embedding is.
        rounds: how often ``step()`` or ``zero_grad()`` was called.
        updates: how often parameters were updated without ``step()``.
        huge_pages: parameters and state that wait for them.
    """

    state: defaultdict[Tensor, Any]
    _groups: Groups
    deferred: dict[int, RowClock]
    _known: dict[int, tuple[Any, ...]]
    _ran: dict[int, tuple[Tensor, str, str]]
    _embeddings: dict[int, tuple[Tensor, bool]]
    iterations: int
    updates: int
    _huge_pages: HugePages

    def params(self) -> Iterator[Tensor]:
        """Every parameter."""
        for group in self.param_groups:
            yield from group["params"]

    def _look_at(
        self,
        param: Tensor,
        memory: Tensor,
        state: list[Tensor] | None = None,
        gradient: IndexedGrad | None = None,
    ) -> None:
        """Refuse memory that cannot be written, unless it was looked at before.

        Args:
            param: the parameter.
            memory: where its numbers are.
            state: its state tensors, where there are any.
            gradient: the one that it is about to be updated with.
        """
        tensors = (memory, *(state or ()))
        addresses = tuple(map(parameters.address, tensors))
        known = self._known.get(id(param))
        before = () if known is None or known[0] is not param else known[1 : 1 + len(tensors)]
        # Whether it is a negative view shows at no address.
        if before == addresses and not any(map(_is_turned, tensors)):
            return
        names = ("a parameter", *("its state" for _ in tensors[1:]))
        for name, tensor in zip(names, tensors, strict=True):
            parameters.check_writable(name, tensor)
        if gradient is None or any(tensor.is_inference() for tensor in tensors):
            return  # what is an inference tensor may be written at some times only
        if gradient.indices is not None:  # whoever goes over everything needs no huge pages
            for tensor in tensors[len(before) :]:
                self._huge_pages.add(tensor, gradient.indices.numel(), self.iterations)
        count = sum(len(group["params"]) for group in self.param_groups)
        if known is None and len(self._known) > count:
            self._known.clear()  # parameters were taken out of the groups
        self._known[id(param)] = (param, *addresses)

    def _new_count(self, group: dict[str, Any], param: Tensor, value: int = 0) -> int | Tensor:
        """A step count as torch's class keeps it."""
        if not self.step_is_tensor:
            return value
        fused, capturable = group.get("fused"), group.get("capturable")
        device = param.device if fused or capturable else torch.device("cpu")
        return torch.full((), float(value), dtype=scalar_dtype(is_fused=fused), device=device)

    def _new_record(
        self, group: dict[str, Any], rule: Rule, param: Tensor, tensors: list[Any]
    ) -> dict[str, Any]:
        """A parameter's first state, with a step count of zero; empty where nothing is kept."""
        record: dict[str, Any] = {}
        if rule.counts or options.rounds_at_random(group):
            record["step"] = self._new_count(group, param)
        for spec, tensor in zip(rule.state, tensors, strict=True):
            record[spec.name] = parameters.laid_out_like(param, tensor)
        return record

    def materialize_state(self) -> None:
        """Create the state of every parameter that has none yet, as before a first step.

        Use it if a framework loads checkpoints into existing tensors. It skips SGD's momentum with
        dampening, where a missing buffer means a first step, as in torch.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> optimizer.materialize_state()
            >>> list(optimizer.state[weight])
            ['step', 'sum']
        """
        self._materialize(lambda param: True)

    def _materialize(self, is_wanted: Callable[[Tensor], bool]) -> None:
        for group in self.param_groups:
            rule = self.stored_rule_for(group)
            for param in group["params"]:
                if (
                    self.state.get(param)
                    or is_lazy(param)  # nobody knows its shape yet
                    or not self.can_materialize_state(group)
                    or not is_wanted(param)
                ):
                    continue
                memory = parameters.memory_of(param)
                made = states.new(rule, memory, group, group.get("state_dtype"))
                record = self._new_record(group, rule, param, made)
                if record:
                    self.state[param] = record

    def _records_by_row(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """State under a mask by rows: as it is, and as it is written to a file."""
        for group in self.param_groups:
            if group.get("mask") is None:
                continue
            names = [spec.name for spec in self.stored_rule_for(group).state]
            listed = masks.listed(group["mask"], group["params"])
            for param, mask in zip(group["params"], listed, strict=True):
                record = self.state.get(param)
                if record and isinstance(mask, Tensor) and mask.dim() == 1:
                    kept = {n: saved_by_row(record[n]) for n in names if n in record}
                    yield record, {**record, **kept}

    def _complete_on_demand(self) -> None:
        """See to it that state exists when it is asked for."""
        if not isinstance(self.state, states.Records):
            self.state = states.Records(self.state, self._complete_state)

    def _complete_state(self) -> None:
        self._materialize(lambda param: param.requires_grad)
        if len(self.state):  # a parameter that needs no state has an empty one beside others
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]

    def share_memory(self) -> None:
        """Move the state to shared memory, for processes that train one model together.

        Missing state is created first. SparseAdam's step count is a plain number, so each process
        keeps its own.

        Raises:
            InputError: the semantics are ``"dense"``, or state with dampening does not exist yet.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.RowwiseAdagrad([weight], lr=0.1)
            >>> optimizer.share_memory()
            >>> optimizer.state[weight]["sum"].is_shared()
            True
        """
        with speaking(type(self).__name__):
            if self.semantics == "dense":
                requirement = (
                    "share_memory needs semantics='masked': processes cannot catch up rows"
                )
                raise InputError(message(requirement, "semantics='dense'"))
            self.materialize_state()
            for group in self.param_groups:
                if any(map(is_lazy, group["params"])):
                    requirement = "a lazy parameter must be initialized before its state is shared"
                    remedy = "Call the model once first"
                    raise InputError(message(requirement, "an uninitialized one", remedy))
                if self.stored_rule_for(group).state and not all(
                    map(self.state.get, group["params"])
                ):
                    requirement = "share_memory: with dampening, the state must already exist"
                    raise InputError(message(requirement, "no state yet", "Call step() first"))
        tensors = (value for record in self.state.values() for value in record.values())
        for tensor in tensors:
            if (
                isinstance(tensor, Tensor) and file_of(tensor) is None
            ):  # files are shared as they are
                tensor.share_memory_()


def _is_turned(tensor: Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()
