"""RuleOptimizer: a torch optimizer around a rule.

It keeps groups, state and step counts as torch does, checks everything before anything is written,
and hands sparse and masked gradients to an engine, dense ones to torch's own kernel where torch has
one for the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import (
    ParamsT,
    StateDict,
    _get_scalar_dtype,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from sparsestep import checkpoint, engines, masks, options, parameters
from sparsestep import state as states
from sparsestep.backward import StepInBackward
from sparsestep.catch_up import Idling
from sparsestep.contract import Batch, Rule, Settings
from sparsestep.errors import InputError, sentence, usable
from sparsestep.grads import Touched
from sparsestep.groups import Groups
from sparsestep.lagging import rows_of
from sparsestep.signals import uninterrupted
from sparsestep.step import Step
from sparsestep.tracking import Tracking


@contextmanager
def _speaking(who: str) -> Iterator[None]:
    """Put the name of who refuses in front of what is refused."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{who}: {error}") from None


_KINDS = "every option must be of its kind: a number, a pair of numbers, True or False"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _row_numbers(rows: Tensor, count: int) -> Tensor:
    if not isinstance(rows, Tensor) or rows.dtype not in _INTEGERS:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(sentence("rows must be integers, in a tensor", got))
    rows = rows.reshape(-1).long()
    if rows.numel():
        low, high = rows.aminmax()
        if int(low) < 0 or int(high) >= count:
            outside = int(low) if int(low) < 0 else int(high)
            raise InputError(sentence(f"rows to catch up must be in [0, {count})", outside))
    return rows


# At run time the base of our classes is not torch's Optimizer; each of them also derives from it.
# Whoever goes through the subclasses of Optimizer (class_resolver, hence PyKEEN) takes a class that
# is not in the package of its own base for somebody else's. Below a base of ours, our Adam would
# come up as a second Adam.
if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


def _is_turned(tensor: Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()


class RuleOptimizer(_Base):
    """Base of every optimizer here; a subclass names its rule and checks its options.

    It is to be combined with torch's: ``class Adam(RuleOptimizer, Optimizer)``.
    """

    # Whether torch has a kernel for dense gradients under the same formula.
    has_torch_kernel: ClassVar[bool] = False
    # Torch's SparseAdam counts in a Python number, its other classes in a tensor.
    counts_in_tensor: ClassVar[bool] = True
    # Keys of a param group that are there only where somebody sets them.
    extras: ClassVar[tuple[str, ...]] = (
        *("mask", "state_dtype", "stochastic_rounding", "rounding_seed"),
    )
    # Options of other optimizers, and what values of them ask for nothing.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = options.NEUTRAL
    supports_complex: ClassVar[bool] = True
    always_decoupled: ClassVar[bool] = False
    # Options that a user's formula takes itself, though they usually are everybody's.
    own_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        engine: str = "auto",
        semantics: str = "masked",
        **extras: Any,
    ) -> None:
        self._prepare()
        self.engine = engine
        self.semantics = semantics
        unknown = sorted(extras.keys() - set(self.extras))
        if unknown:
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {unknown[0]!r}")
        with _speaking(type(self).__name__):
            engines.check_engine(engine)
            if semantics not in ("masked", "dense"):
                contract = "semantics must be one of masked, dense"
                raise InputError(sentence(contract, repr(semantics)))
            with usable(_KINDS):
                self.check_options(defaults)
                options.check(extras)
        defaults = {**defaults, **options.given(extras)}
        self._option_names = tuple(defaults)
        # What makes the same optimizer again: type(optimizer)(params, **optimizer.defaults).
        super().__init__(params, {**defaults, **self._set_as_a_whole()})
        self._complete_on_demand()

    @property
    def option_names(self) -> frozenset[str]:
        """The keys that every param group has."""
        return frozenset(self._option_names) - frozenset(self.extras)

    def _set_as_a_whole(self) -> dict[str, Any]:
        """What was chosen for the optimizer as a whole, but for the defaults."""
        chosen = {name: getattr(self, name) for name in options.WHOLE}
        return {name: value for name, value in chosen.items() if value != options.WHOLE[name]}

    def _prepare(self) -> None:
        """What is neither pickled nor copied."""
        self._loading: checkpoint.Checkpoint | None = None
        self.rounds = 0  # how often step() or zero_grad() was called
        self.groups = Groups()
        self.idle: dict[int, Idling] = {}  # by id of the parameter
        # By id of the parameter: itself, so that no other comes to have its id, and the addresses
        # of its memory and that of its state, when they were looked at.
        self.known: dict[int, tuple[Any, ...]] = {}
        self._lock = RLock()  # one step at a time, whoever calls

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Refuse values that the rule cannot work with."""

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        raise NotImplementedError

    @classmethod
    def uses_torch(cls, group: dict[str, Any]) -> bool:
        """Whether torch's kernel computes what the group asks for."""
        return (
            cls.has_torch_kernel
            and not options.read(group, "stochastic_rounding")
            and options.read(group, "bias_correction") == "global"
            and (
                "decoupled_weight_decay" not in cls.extras
                or not options.read(group, "decoupled_weight_decay")
            )
        )

    @staticmethod
    def torch_kernel(batch: Batch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        raise NotImplementedError

    # Param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own, as torch's optimizers do."""
        number = len(self.param_groups)
        with _speaking(type(self).__name__):
            if isinstance(param_group, dict):
                if "params" not in param_group:
                    contract = "a param group must have the key 'params'"
                    raise InputError(sentence(contract, ", ".join(map(str, param_group)) or "{}"))
                options.check_keys(param_group, [*self._option_names, *self.extras], self.neutral)
                options.seed_of(param_group)
            super().add_param_group(param_group)
            for name in options.WHOLE:  # torch has put all defaults into the group
                param_group.pop(name, None)
            try:
                with usable(_KINDS):
                    self.check_options(param_group)
                    options.check(param_group)
                self.check_params(number, param_group)
                by_row = self.rule_for(param_group).by_row or self.semantics == "dense"
                if self.semantics == "dense":
                    self.groups.read(self, number, param_group)  # refuses what has no such form
                masks.checked(param_group.get("mask"), param_group["params"], by_row=by_row)
            except Exception:
                self.param_groups.pop()
                raise

    def check_params(self, group: int, options: dict[str, Any]) -> None:
        """Refuse parameters that the optimizer cannot work with."""
        name, params = type(self).__name__, options["params"]
        sparse = [[group, i] for i, param in enumerate(params) if param.layout is not torch.strided]
        if sparse:
            contract = f"{name} requires dense parameter tensors"
            raise InputError(f"Sparse params at indices {sparse}: {contract}")
        imaginary = [[group, i] for i, param in enumerate(params) if param.is_complex()]
        if imaginary and not self.supports_complex:
            contract = f"{name} does not support complex parameters"
            raise InputError(f"Complex params at indices {imaginary}: {contract}")
        if imaginary and options.get("state_dtype") is not None:
            contract = "the state of complex parameters has their dtype: state_dtype must be None"
            raise InputError(sentence(contract, options["state_dtype"]))

    def __repr__(self) -> str:
        who, rest = super().__repr__().split(" (", 1)
        chosen = "".join(f"\n{k}: {v}" for k, v in self._set_as_a_whole().items())
        return f"{who} ({chosen}{rest}"

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient: all of them, or raise and none.

        Args:
            closure: reevaluates the model and returns the loss, which is then returned.
        """
        if torch.compiler.is_compiling():  # the step stays outside graphs
            return _uncompiled_step(self, closure)
        return self._uncompiled_step(closure)

    # Tells torch not to wrap step() once more.
    step.hooked = True  # type: ignore[attr-defined]

    def _uncompiled_step(self, closure: Callable[[], float] | None) -> float | None:
        if self._is_observed():
            given = () if closure is None else (closure,)
            return self._observed_step(*given)
        return self._step(closure)

    def _is_observed(self) -> bool:
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        )

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        self.rounds += 1
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._step_once()
        return loss

    def _step_once(self) -> None:
        step = Step(self)
        for number, group in enumerate(self.param_groups):
            step.plan(number, group)
        if step.repeats:
            uninterrupted(lambda: self._step_with_repeats(step))
        else:
            step.run()

    def _step_with_repeats(self, step: Step) -> None:
        step.run()
        for number, index in step.repeats:
            # A parameter given more than once (torch warns of it) goes on from where it arrived.
            again = Step(self)
            again.plan(number, self.param_groups[number], only=index)
            again.run()

    # Torch's wrapper runs the hooks and marks the step for a profiler. It costs as much as a small
    # step itself, so it is used only where somebody would notice.
    _observed_step = Optimizer.profile_hook_step(_step)

    def settings_of(self, number: int, group: dict[str, Any]) -> Settings:
        """What a param group says about its updates, now."""
        return self.groups.settings_of(self, number, group)

    def look_at(
        self,
        param: Tensor,
        memory: Tensor,
        state: list[Tensor] | None = None,
        gradient: Touched | None = None,
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
        known = self.known.get(id(param))
        before = () if known is None or known[0] is not param else known[1 : 1 + len(tensors)]
        # Whether it is a negative view shows at no address.
        if before == addresses and not any(map(_is_turned, tensors)):
            return
        names = ("a parameter", *("its state" for _ in tensors[1:]))
        for name, tensor in zip(names, tensors, strict=True):
            parameters.check_writable(name, tensor)
        if gradient is None or any(tensor.is_inference() for tensor in tensors):
            return  # what is an inference tensor may be written at some times only
        if known is None:
            states.settle(memory, state, gradient)
            if len(self.known) > sum(len(group["params"]) for group in self.param_groups):
                self.known.clear()  # parameters were taken out of the groups
        self.known[id(param)] = (param, *addresses)

    def new_count(self, group: dict[str, Any], param: Tensor, value: int = 0) -> int | Tensor:
        """A step count as torch's class keeps it."""
        if not self.counts_in_tensor:
            return value
        fused, capturable = group.get("fused"), group.get("capturable")
        device = param.device if fused or capturable else torch.device("cpu")
        return torch.full((), float(value), dtype=_get_scalar_dtype(is_fused=fused), device=device)

    def materialize_state(self) -> None:
        """Make the state of every parameter that has none yet, as a first step would find it.

        Useful where a checkpoint is to be loaded into tensors that exist already. SGD's momentum
        with dampening is left out: it takes a missing buffer for a first step, as torch does.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> optimizer.materialize_state()
            >>> list(optimizer.state[weight])
            ['step', 'sum']
        """
        self._materialize(lambda param: True)

    def _materialize(self, chosen: Callable[[Tensor], bool]) -> None:
        for group in self.param_groups:
            rule = self.rule_for(group)
            for param in group["params"]:
                if self.state.get(param) or not self.begins_with_zeros(group) or not chosen(param):
                    continue
                memory = parameters.memory_of(param)
                made = states.new(rule, memory, group, group.get("state_dtype"), None)
                record = self.new_record(group, rule, param, made)
                if record:
                    self.state[param] = record

    @classmethod
    def begins_with_zeros(cls, group: dict[str, Any]) -> bool:
        """Whether state that was made in advance does as well as none at the first step."""
        return True

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

        What is missing is made first. A step count that is a plain number, SparseAdam's, remains
        each process's own.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
            >>> optimizer = sparsestep.RowwiseAdagrad([weight], lr=0.1)
            >>> optimizer.share_memory()
            >>> optimizer.state[weight]["sum"].is_shared()
            True
        """
        with _speaking(type(self).__name__):
            if self.semantics == "dense":
                contract = "processes cannot share what rows have missed: semantics must be masked"
                raise InputError(sentence(contract, "'dense'"))
            self.materialize_state()
            for group in self.param_groups:
                if self.rule_for(group).state and not all(map(self.state.get, group["params"])):
                    contract = "with dampening a first step makes the state, before it is shared"
                    raise InputError(sentence(contract, "none yet", "Call step() first"))
        tensors = (value for kept in self.state.values() for value in kept.values())
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor.share_memory_()

    def new_record(
        self, group: dict[str, Any], rule: Rule, param: Tensor, tensors: list[Any]
    ) -> dict[str, Any]:
        """A parameter's first state, with a step count of zero; empty where nothing is kept."""
        record: dict[str, Any] = {}
        if rule.counts or group.get("stochastic_rounding"):
            record["step"] = self.new_count(group, param)
        for spec, tensor in zip(rule.state, tensors, strict=True):
            record[spec.name] = parameters.laid_out_like(param, tensor)
        return record

    def step_in_backward(
        self, params: Iterable[Tensor] | None = None, *, backwards: int = 1
    ) -> StepInBackward:
        """Update each parameter the moment its gradient is complete, and free the gradient.

        So there is never more than one gradient in memory. ``step()`` then finds nothing left to do
        and may stay in the loop.

        Args:
            params: which parameters; by default all of this optimizer's.
            backwards: how many backward calls make a step. Accumulating gradients over several
                without saying so is refused.

        Returns:
            A handle; its ``remove()`` undoes it.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(10, 4, sparse=True)
            >>> optimizer = sparsestep.Adam(table.parameters())
            >>> handle = optimizer.step_in_backward()
            >>> table(torch.tensor([2, 7, 2])).sum().backward()
            >>> table.weight.grad is None, int(optimizer.state[table.weight]["step"])
            (True, 1)
            >>> handle.remove()
        """
        with _speaking(type(self).__name__):
            return StepInBackward(self, params, backwards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do."""
        if torch.compiler.is_compiling():
            return _uncompiled_zero_grad(self, set_to_none)
        self.rounds += 1
        super().zero_grad(set_to_none)

    # Dense semantics

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date that ``semantics="dense"`` has left behind.

        Args:
            param: whose rows; all parameters' by default. Under ``semantics="masked"`` no row is
                ever behind, and there is nothing to do.
            rows: which ones, integers of any shape, with repetitions; all by default.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 1))
            >>> optimizer = sparsestep.SGD([weight], lr=1.0, momentum=0.5, semantics="dense")
            >>> for row in (0, 1, 2):
            ...     weight.grad = torch.sparse_coo_tensor(
            ...         [[row]], [[1.0]], (3, 1), check_invariants=True
            ...     )
            ...     optimizer.step()
            >>> weight.flatten().tolist()
            [-1.0, -1.0, -1.0]
            >>> optimizer.catch_up()
            >>> weight.flatten().tolist()
            [-1.75, -1.5, -1.0]
        """
        known = list(checkpoint.all_params(self))
        if param is not None:
            if not any(param is each for each in known):
                contract = "a parameter that is brought up to date must be one of this optimizer's"
                shape = getattr(param, "shape", None)
                got = type(param).__name__ if shape is None else f"another, {tuple(shape)}"
                raise InputError(f"{type(self).__name__}: {sentence(contract, got)}")
            known = [param]
        for each in known:
            idling = self.idle.get(id(each))
            if idling is None:
                continue
            if rows is not None:
                with _speaking(type(self).__name__):
                    rows = _row_numbers(rows, idling.rows)
            self.bring(each, rows)
            idling.announced = True

    def bring(self, param: Tensor, rows: Tensor | None) -> None:
        """``catch_up`` of one parameter, for whoever knows that rows are integers and none outside.

        Args:
            param: whose rows.
            rows: int64 or int32, of one dim; ``None`` for all.
        """
        idling = self.idle.get(id(param))
        if idling is None or idling.owner is not param or not idling.is_behind:
            return
        state = idling.state_in(self.state.get(param))
        if state is None:  # cleared: the parameter begins anew, so nothing was missed
            return
        memory = parameters.memory_of(param)
        real = rows_of(memory, state)
        idling.check(*real)
        idling.notice(memory)
        if rows is None:
            uninterrupted(partial(idling.bring_all, *real, engine=self.engine))
            return
        rows = idling.that_may_move(rows.to(param.device))
        idling.bring(*real, rows, engine=self.engine)

    def track(self, model: torch.nn.Module, *, guard: bool = False) -> Tracking:
        """Bring rows up to date before a model reads them.

        Its ``nn.Embedding`` and ``nn.EmbeddingBag`` modules whose weights this optimizer has bring
        up to date what they look up, as do modules that say what they read by a method
        ``rows_read`` (``sparsestep.nn.EmbeddingBagCollection`` has one). Any other module that
        holds such a weight reads all of it. Everything is current after ``eval()``, and in what
        ``state_dict()``, pickles and copies of the model hold.

        Args:
            model: it must have parameters of this optimizer, whose semantics must be ``"dense"``.
            guard: bring rows up to date whoever reads the tables, in whatever way. Costs a call
                into Python for every operation on them.

        Returns:
            A handle; its ``remove()`` undoes it.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(3, 1, sparse=True)
            >>> optimizer = sparsestep.SGD(table.parameters(), momentum=0.5, semantics="dense")
            >>> handle = optimizer.track(table)
        """
        return Tracking(self, model, guard=guard)

    def state_dict(self) -> StateDict:
        """As torch's: everything is current, so it is an ordinary checkpoint of the dense class."""
        self.catch_up()
        return super().state_dict()

    # Checkpoints and pickles

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of torch's class with the same state.

        The state keeps its own precision (torch would cast it to the parameter's), and is copied.
        Options that the checkpoint does not know keep the values that they have. A checkpoint that
        does not fit is refused, and nothing is changed. Under ``semantics="dense"`` rows are
        brought up to date first, for the parameters themselves are no part of the checkpoint.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping):
            checkpoint.read(self, given, ())  # says what is wrong with it

        def look(_: Optimizer, after_hooks: StateDict) -> None:
            names = self._option_names + self.extras
            self._loading = checkpoint.read(self, after_hooks, names)

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __getstate__(self) -> dict[str, Any]:
        self.catch_up()
        kept = {
            "engine": self.engine,
            "semantics": self.semantics,
            "_option_names": self._option_names,
        }
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch calls this at the end of load_state_dict too, with state and groups alone.
        if "_loading" not in self.__dict__:
            self._prepare()
        loading = self._loading
        if loading is not None:
            self._restore(loading, state)
        super().__setstate__(state)
        self._complete_on_demand()

    def _restore(self, loading: checkpoint.Checkpoint, state: dict[str, Any]) -> None:
        """Put what a checkpoint says into the state that torch has read from it."""
        for param in checkpoint.all_params(self):
            # The parameters are no part of it, so what they have missed is made up for. But where
            # another hand has written them since, they have been loaded already, and stand.
            idling = self.idle.get(id(param))
            if idling is not None and not idling.was_written(param):
                self.bring(param, None)
        self.idle.clear()
        for group, missing in zip(state["param_groups"], loading.missing, strict=True):
            for name, value in missing.items():
                group.setdefault(name, value)
        state["state"].update(loading.state)


# What is to run as it is when torch.compile comes across it. The compiler is not imported before
# it does.
_uncompiled_step = _disable_dynamo(RuleOptimizer._uncompiled_step)
_uncompiled_zero_grad = _disable_dynamo(RuleOptimizer.zero_grad)
