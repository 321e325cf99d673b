"""The native core as a library: instruction sets, threads, fork, symbols."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import _native
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.masks import PackedMask
from tests.table import VARIANTS, all_same_bits, same_bits

ROOT = Path(__file__).parents[2]


def test_every_rule_and_idle_update_has_its_native_kernel():
    assert _native.ext is not None
    kernels = _native.ext.rules()
    for variant in VARIANTS:
        rule = variant.rule
        _, states, slot_states, options = kernels[rule.name]
        assert [spec.per_row for spec in rule.state] == [False] * states + [True] * slot_states
        group = variant([torch.zeros(1)]).param_groups[0]
        hyper = {name: group[name] for name in rule.hyperparam_names}
        assert rule.has_native_kernel
        assert options == len(rule.pack_hyperparams(hyper))
    assert kernels.keys() == {variant.rule.name for variant in VARIANTS}
    updates = {variant.rule.idle_update.native for variant in VARIANTS if variant.rule.idle_update}
    assert set(_native.ext.idle_updates()) == updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "table"),
    [("native/kernels/kernels.cpp", "kernels_float"), ("benchmarks/native/limit.cpp", "limits")],
)
def test_kernels_share_no_code_between_instruction_sets(source: str, table: str, tmp_path: Path):
    """A weak symbol could be merged by the linker into a copy that needs a wider machine.

    The sources are the same for all of them, so one is enough.
    """
    isa, *flags = ("avx2", "-mavx2") if "avx2" in _native.instruction_sets() else ("baseline",)
    built = tmp_path / "kernels.o"
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    defines = ["-DSPARSESTEP_FEW_KERNELS", "-DSPARSESTEP_TYPE=float", f"-DSPARSESTEP_ISA={isa}"]
    command = [compiler, "-std=c++17", "-O1", *defines, *flags, f"-I{ROOT / 'native'}"]
    subprocess.run([*command, "-c", str(ROOT / source), "-o", str(built)], check=True)
    symbols = subprocess.run(["nm", "-C", str(built)], capture_output=True, text=True, check=True)
    # A line is "address kind name", or "kind name" for what is defined elsewhere.
    found = re.findall(r"^[0-9a-f ]+ ([A-Za-z]) (.+)$", symbols.stdout, re.MULTILINE)
    shared = [name for kind, name in found if kind in "WVuwv"]
    defined = [name for kind, name in found if kind in "TDBR"]
    assert shared == []
    assert defined == [f"sparsestep::{table}_{isa}()"]


def train(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(5000, 32, generator=draw))
    optimizer = sparsestep.SparseAdam([param], lr=0.1, engine="native")
    for _ in range(3):
        rows = torch.randint(0, 5000, (1, 20000), generator=draw)
        values = torch.randn(20000, 32, generator=draw)
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        optimizer.step()
    return param.detach()


def test_several_python_threads_may_step_at_once():
    torch.set_num_threads(2)
    expected = list(map(train, range(4)))
    with ThreadPoolExecutor(4) as pool:
        assert all_same_bits(pool.map(train, range(4)), expected)


def test_a_bad_call_into_the_core_is_refused():
    assert _native.ext is not None
    with pytest.raises(ValueError, match="instruction set"):
        _native.ext.NativeStep(999)
    jobs = _native.ext.NativeStep(0)
    one = torch.zeros(1, 1)
    options = (0.1, 0.1, 0.1, 0.1)
    names = ("exp_avg", "exp_avg_sq")
    whole = IndexedGrad(None, one, 1, 1)
    for rule, state, given, words in (
        (999, names, options, "no such rule"),
        (0, names[:1], options, "wrong number"),
        (0, names, options[:-1], "wrong number"),
    ):
        with pytest.raises(ValueError, match=words):
            _native.ext.NativeGroup(rule, state, True, 1.0, 0.0, 1.0, given)
    group = _native.ext.NativeGroup(0, names, True, 1.0, 0.0, 1.0, options)
    with pytest.raises(ValueError, match="wrong number"):
        jobs.add(group, 1, whole, one, [one], None, None, None, "who", 0)
    with pytest.raises(TypeError):
        jobs.add(group, 1, whole, one, one, None, None, None, "who", 0)
    with pytest.raises(ValueError, match="no such rows"):
        jobs.add(group, 1, whole, one, [one, one], 0, (0, 2, 1), None, "who", 0)
    packed = PackedMask.of(torch.ones(65, 1).bool())
    with pytest.raises(ValueError, match="no such mask"):
        jobs.add(group, 1, whole, one, [one, one], None, None, packed, "who", 0)
    elsewhere = IndexedGrad(None, one.to("meta"), 1, 1)
    for grad, param in ((whole, one.long()), (elsewhere, one)):
        assert not jobs.add(group, 1, grad, param, [one, one], None, None, None, "who", 0)
    assert jobs.prepare(1) is None  # nothing was added
    catch_up, two = _native.ext.CatchUp(), torch.zeros(2, 3)
    rest = None, torch.zeros(2, dtype=torch.int32), 0, 0, 0, 1e-6, 1, 0
    with pytest.raises(ValueError, match="no such idle update"):
        catch_up.run(two, (two,), *rest)
    catch_up.idle_update = _native.ext.idle_updates().index("geometric")
    catch_up.powers, catch_up.buffer = (None,), 1
    with pytest.raises(ValueError, match="no such rule"):
        catch_up.run(two, (two,), *rest)


def colliding_slots(count: int) -> Tensor:
    """Slots side by side in the core's hash tables: see ``mix`` in native/core/dedup.cpp."""
    slots = torch.arange(1 << 23)
    product = slots * (0x9E3779B97F4A7C15 - (1 << 64))
    mixed = product ^ (product >> 29 & 0x7FFFFFFFF)
    return slots[(mixed & 0xFFFFFFFF) >> 22 == 0][:count]


def test_slots_that_are_chosen_to_collide_are_summed_in_order_all_the_same():
    """They are brought together by sorting, where the hash tables would take forever."""
    chosen = colliding_slots(4000)
    assert len(chosen) == 4000
    order = torch.randint(4000, (12_500,), generator=torch.Generator().manual_seed(0))
    indices, slots = chosen[order], int(chosen.max()) + 1
    values = torch.sin(torch.arange(12_500.0))[:, None]
    found, expected = torch.zeros(slots, 1), torch.zeros(slots, 1)
    for param, engine in ((found, "native"), (expected, "reference")):
        sparsestep.functional.sgd_(param, IndexedGrad(indices, values), lr=1.0, engine=engine)
    assert same_bits(found, expected)
    assert int((found != 0).sum()) == len(order.unique())
