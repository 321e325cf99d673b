"""torch.distributed.checkpoint: state exists when it is asked for, without a step."""

import copy
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import EVERY, Variant, each_optimizer, same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning"),
]

# Dampening takes a missing buffer for a first step; torch makes one by a step of zeros, here too.
WITHOUT_DAMPENING = [v for v in EVERY if not v.options.get("dampening")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Embedding(6, 4, sparse=True)
        self.unused = nn.Embedding(5, 4, sparse=True)
        self.layer = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def train(model: Model, opt: RuleOptimizer, steps: range, table: str = "used") -> None:
    for step in steps:
        opt.zero_grad()
        rows = getattr(model, table)(torch.tensor([step % 5, 1, 1]))
        model.layer(rows).square().sum().backward()
        opt.step()


def through_a_file(
    path: Path, model: Model, opt: RuleOptimizer, other: Model, fresh: RuleOptimizer, flat: bool
) -> None:
    """Save the one, load the other."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    both = get_state_dict(model, opt, options=options)
    checkpoint.save(dict(zip(("model", "optim"), both, strict=True)), checkpoint_id=path)
    template = dict(
        zip(("model", "optim"), get_state_dict(other, fresh, options=options), strict=True)
    )
    checkpoint.load(template, checkpoint_id=path)
    set_state_dict(
        *(other, fresh),
        model_state_dict=template["model"],
        optim_state_dict=template["optim"],
        options=options,
    )


def tensors_of(model: Model, opt: RuleOptimizer) -> dict[str, Any]:
    """But for what is frozen, whose state torch does not load."""
    found: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, param in list(found.items()):
        for key, value in opt.state.get(param, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


def assert_alike(one: tuple[Model, RuleOptimizer], other: tuple[Model, RuleOptimizer]) -> None:
    ours, theirs = tensors_of(*one), tensors_of(*other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert same_bits(ours[name].detach(), theirs[name].detach()), name


@pytest.mark.parametrize(("steps", "flat"), [(0, True), (3, False)], ids=["0-flat", "3-nested"])
@pytest.mark.parametrize("variant", WITHOUT_DAMPENING, ids=str)
def test_the_loaded_optimizer_goes_on(variant: Variant, steps: int, flat: bool, tmp_path: Path):
    """Before its first step, or with a table that no step has touched yet."""
    pairs = []
    for _ in range(3):
        model = Model()
        pairs.append((model, variant(model.parameters(), lr=0.1)))
    (model, opt), (other, fresh), (never, unsaved) = pairs
    train(model, opt, range(steps))
    train(never, unsaved, range(steps))
    through_a_file(tmp_path / "checkpoint", model, opt, other, fresh, flat)
    assert_alike((other, fresh), (model, opt))
    for each in pairs:
        train(*each, range(steps, steps + 2))
        train(*each, range(steps, steps + 2), table="unused")
    assert_alike((other, fresh), (model, opt))
    assert_alike((never, unsaved), (model, opt))


@each_optimizer
def test_nothing_counts_before_the_first_step(optimizer: type[RuleOptimizer]):
    model = Model()
    opt = optimizer(model.parameters())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    found = get_optimizer_state_dict(model, opt)
    for kept in found["state"].values():
        assert not kept.get("step", 0)
    for name, param in model.named_parameters():
        assert same_bits(param.detach(), before[name])


def test_with_dense_semantics_and_groups_that_keep_nothing(tmp_path: Path):
    pairs = []
    for _ in range(2):
        model = Model()
        groups = [
            {"params": model.used.parameters(), "momentum": 0.9},
            {"params": [*model.unused.parameters(), *model.layer.parameters(), model.frozen]},
        ]
        pairs.append((model, sparsestep.SGD(groups, lr=0.1, semantics="dense")))
    train(*pairs[0], range(3))
    through_a_file(tmp_path / "checkpoint", *pairs[0], *pairs[1], flat=False)
    for model, opt in pairs:
        train(model, opt, range(3, 6))
        opt.catch_up()
    assert_alike(*pairs)


# What is asked for


def test_state_that_a_checkpoint_asks_for_is_made():
    model = Model()
    opt = sparsestep.Adam(model.parameters())
    assert len(opt.state) == 0
    assert opt.state_dict()["state"] == {}, "a plain checkpoint is torch's"
    assert not opt.state, "others ask whether there was a step, as PyKEEN does"
    assert len(opt.state) == 0
    _init_optim_state(opt)
    assert opt.state
    assert not opt.state[model.frozen]
    assert opt.state[model.unused.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    stateless = sparsestep.SGD(model.parameters())
    assert not stateless.state
    assert len(stateless.state) == 0


def test_copies_of_the_state_are_plain_and_those_of_the_optimizer_are_not():
    model = Model()
    opt = sparsestep.Adam(model.parameters())
    train(model, opt, range(1))
    for plain in (copy.copy(opt.state), opt.state.copy(), pickle.loads(pickle.dumps(opt.state))):
        assert type(plain) is defaultdict
        assert len(plain) == 3
        assert plain[model.frozen] == {}
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        _init_optim_state(other)
        assert len(other.state) == 5
    opt.load_state_dict(opt.state_dict())
    assert len(opt.state) == 3
    _init_optim_state(opt)
    assert len(opt.state) == 5
