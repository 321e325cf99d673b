"""Options: what constructors and param groups take, and what re-creates an optimizer."""

import inspect
import re
from typing import Any, get_args, get_type_hints

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules import options
from tests.rules.tables import rows, table, train
from tests.table import WITH_DENSE, Variant, each_optimizer, each_variant, same_bits

# What the constructors take


@each_optimizer
def test_every_keyword_is_written_out(optimizer: type[RuleOptimizer]):
    arguments = inspect.signature(optimizer).parameters
    assert {each.kind for each in arguments.values()} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    for name in (*options.OPTIMIZER_OPTIONS, *optimizer.group_options):
        assert arguments[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (
            arguments[name].default == {**options.OPTIMIZER_OPTIONS, **options.GROUP_DEFAULTS}[name]
        )
    kinds = get_type_hints(optimizer.__init__)
    assert get_args(kinds["engine"]) == ("auto", "native", "reference", "triton")
    assert get_args(kinds["semantics"]) == ("masked", "dense")
    # All of them given, with their defaults: no group has more keys for it.
    given = {
        name: arguments[name].default
        for name in (*options.OPTIMIZER_OPTIONS, *optimizer.group_options)
    }
    assert optimizer([table()], **given).defaults == optimizer([table()]).defaults
    name = re.escape("__init__() got an unexpected keyword argument 'laerning_rate'")
    with pytest.raises(TypeError, match=name):
        optimizer([table()], laerning_rate=0.1)


@each_optimizer
def test_what_all_have_is_described_in_the_same_words(optimizer: type[RuleOptimizer]):
    for name in (*options.OPTIMIZER_OPTIONS, *RuleOptimizer.group_options):
        line = rf"^ *{name}: .*$"
        ours, adams = (
            re.search(line, str(cls.__doc__), re.MULTILINE) for cls in (optimizer, sparsestep.Adam)
        )
        assert ours
        assert adams
        assert ours[0] == adams[0]


# Keys of a param group

MISSPELT = {
    "masks": "mask",
    "maks": "mask",
    "bias_corection": "bias_correction",
    "weigth_decay": "weight_decay",
    "weight-decay": "weight_decay",
    "Weight_Decay": "weight_decay",
    "weightdecay": "weight_decay",
    "momemtum": "momentum",
    "beta_s": "betas",
    "esp": "eps",
    "LR": "lr",
    "ams_grad": "amsgrad",
    "state_type": "state_dtype",
    "stochastic_roundng": "stochastic_rounding",
    "roundingseed": "rounding_seed",
    "semantic": "semantics",
    "engines": "engine",
}


@each_optimizer
def test_a_misspelt_option_is_refused_with_the_right_name(optimizer: type[RuleOptimizer]):
    opt = optimizer([table()])
    for key, name in MISSPELT.items():
        group = {"params": [table()], key: None}
        message = rf"unknown key '{key}'; did you mean '{name}'\?"
        with pytest.raises(InputError, match=f"^{optimizer.__name__}: param group 0: {message}"):
            optimizer([group])
        with pytest.raises(InputError, match=f"^{optimizer.__name__}: param group 1: {message}"):
            opt.add_param_group(group)
    assert len(opt.param_groups) == 1


# Of torch's schedulers, of well-known libraries, and of nobody in particular.
NOTES = [
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_lr",
    "swa_lr",
    "max_momentum",
    "base_momentum",
    "lr_scale",
    "lr_mult",
    "layer_decay",
    "weight_decay_scale",
    "wd_mult",
    "name",
    "names",
    "group_name",
    "layer",
    "layer_id",
    "task",
    "tag",
    "step",
    "fix_step",
    "frozen",
    "kind",
    "dtype",
    "scale",
    "order",
    "param_group_id",
    "no_decay",
]


@each_optimizer
def test_notes_of_ones_own_are_kept(optimizer: type[RuleOptimizer]):
    own: dict[Any, Any] = {**dict.fromkeys(NOTES, "mine"), 7: "not even a string"}
    opt = optimizer([{"params": [table()], **own}])
    assert own.items() <= opt.param_groups[0].items()


@pytest.mark.parametrize("key", ["engine", "semantics"])
@each_optimizer
def test_what_belongs_to_the_whole_optimizer_is_no_key_of_a_group(optimizer, key: str):
    with pytest.raises(InputError, match=f"{key} is an option of the whole optimizer, .* Pass"):
        optimizer([{"params": [table()], key: options.OPTIMIZER_OPTIONS[key]}])


@each_optimizer
def test_values_that_ask_for_nothing_are_accepted(optimizer: type[RuleOptimizer]):
    known = {*optimizer([table()]).defaults, *optimizer.group_options}
    foreign = [name for name in optimizer.no_op_values if name not in known]
    for name in foreign:
        for value in optimizer.no_op_values[name]:
            param, other = table(), table()
            with_key = optimizer([{"params": [param], name: value}])
            assert same_bits(train(with_key, param), train(optimizer([other]), other)), name
        asking = {"bias_correction": "per_row", "decoupled_weight_decay": not value}
        for value in (asking.get(name, 0.5), torch.tensor(0.0), [0]):
            with pytest.raises(InputError, match=f"may only set .*Got {name}"):
                optimizer([{"params": [table()], name: value}])


# What re-creates an optimizer

SETTINGS: list[dict[str, Any]] = [
    {},
    {"semantics": "dense"},
    {"engine": "reference"},
    {"mask": torch.arange(6) < 5},
    {"state_dtype": torch.float64},
    {"maximize": True, "stochastic_rounding": True},
    {"stochastic_rounding": True, "rounding_seed": 7, "engine": "reference"},
]


def may_be_dense(variant: Variant) -> bool:
    coupled = {"weight_decay"} <= variant.options.keys() and not variant.options.get(
        "decoupled_weight_decay", variant.cls.always_decoupled
    )
    return variant.rule.idle_update is not None and not coupled


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize("more", SETTINGS, ids=lambda m: "-".join(m) or "none")
@each_variant
def test_an_optimizer_is_re_created_from_its_defaults(variant: Variant, more: dict[str, Any]):
    if more.get("semantics") == "dense" and not may_be_dense(variant):
        pytest.skip("has no dense semantics")
    torch.manual_seed(1)
    dtype = torch.bfloat16 if "stochastic_rounding" in more else torch.float32
    param, other = table(dtype), table(dtype)
    opt = variant([param], lr=0.5, **more)
    torch.manual_seed(2)  # the seed of rounding is part of it
    again = type(opt)([other], **opt.defaults)
    assert repr(again) == repr(opt)
    assert (again.engine, again.semantics) == (opt.engine, opt.semantics)
    for name in more:
        assert f"{name}: " in repr(opt)
    assert same_bits(train(again, other), train(opt, param))


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize("functional", [f for f in FUNCTIONAL if f.optimizer_class in WITH_DENSE])
def test_a_functional_optimizer_too(functional: Any):
    param, other = table(), table()
    opt = functional([param], lr=0.5, semantics="dense", engine="reference")
    again = functional([other], **opt.defaults)
    assert repr(again) == repr(opt)
    assert "semantics: dense" in repr(opt)
    for each, one in ((opt, param), (again, other)):
        for step in range(3):
            each.step_param(one, rows(step, 5))
        each.catch_up()
    assert same_bits(param.detach(), other.detach())


@pytest.mark.parametrize("optimizer", WITH_DENSE)
def test_a_checkpoint_has_none_of_what_belongs_to_the_whole_optimizer(optimizer):
    plain = optimizer([table()])
    opt = optimizer([table()], engine="reference", semantics="dense")
    opt.add_param_group({"params": [table()]})
    for group in opt.state_dict()["param_groups"]:
        assert group.keys() == plain.state_dict()["param_groups"][0].keys()


def test_adamw_stays_adamw():
    with pytest.raises(InputError, match="decoupled_weight_decay must be True"):
        sparsestep.AdamW([table()], decoupled_weight_decay=False)


@pytest.mark.parametrize("seed", [0.5, True, "7"])
def test_a_seed_is_an_integer(seed: Any):
    with pytest.raises(InputError, match="rounding_seed must be an integer or None"):
        sparsestep.SGD([table()], stochastic_rounding=True, rounding_seed=seed)


def test_no_seed_is_torchs():
    torch.manual_seed(7)
    for given in ({}, {"rounding_seed": None}):
        opt = sparsestep.SGD([table(torch.bfloat16)], stochastic_rounding=True, **given)
        opt.add_param_group({"params": [table()], "stochastic_rounding": True, **given})
        opt.add_param_group({"params": [table()]})
        opt.param_groups[2].update(stochastic_rounding=True, **given)
        for group in opt.param_groups:
            group["params"][0].grad = torch.zeros_like(group["params"][0])
        opt.step()
        assert [group["rounding_seed"] for group in opt.param_groups] == [7, 7, 7]
