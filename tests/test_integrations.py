"""Examples for other packages, each in a process of its own, since those warn a lot."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sparsestep  # noqa: F401
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RECORDED = ROOT / "docs" / "gallery" / "recorded"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # other tests run beside this one
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(EXAMPLES),
}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where packages are not installed; ``make integrations`` installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: make integrations"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run(*arguments: str) -> str:
    """What a program prints, which must succeed; a warning of ours is an error."""
    command = []
    for category in ("StaleWarning", "SlowWarning"):
        command += ["-W", f"error::sparsestep.errors.{category}"]
    return run_python(*command, *arguments, **ENVIRONMENT)


def example(name: str, *arguments: str) -> str:
    """What an example prints."""
    return run(str(EXAMPLES / name), *arguments)


def shown(page: str, word: str) -> str:
    """The program on a page of the site that has a word in it."""
    text = (EXAMPLES.parent / "docs" / "how-to" / page).read_text()
    (found,) = (
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if word in code
    )
    return str(found)


def in_the_gallery(name: str, printed: str) -> bool:
    """Whether the site shows what an example prints, but for its numbers."""
    shown = (RECORDED / f"{name}.txt").read_text()
    number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
    assert re.sub(number, "0", printed) == re.sub(number, "0", shown), (
        f"put what it prints into {RECORDED.name}/{name}.txt and draw it again:\n{printed}"
    )
    return True


@needs("accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_example_learns_and_loads_what_it_saved(precision: str):
    printed = example("with_accelerate.py", precision)
    found = re.search(r"loss (\d\.\d+)", printed)
    assert found is not None
    assert float(found[1]) < 0.4
    assert in_the_gallery("with_accelerate", printed.replace(repr(precision), repr("bf16")))


# What a module with dense semantics arrives at: at once, and resumed after one epoch.
TRACKED = """
import tempfile, torch, sparsestep, with_lightning
from pathlib import Path

class Tracked(with_lightning.Recommender):
    def configure_optimizers(self):
        optimizer = sparsestep.AdamW(self.parameters(), lr=0.02, semantics="dense")
        optimizer.track(self)
        return optimizer

with_lightning.Recommender = Tracked
folder = Path(tempfile.mkdtemp())
options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
whole = with_lightning.train(3, folder, **options)
with_lightning.train(1, folder, **options)
resumed = with_lightning.train(3, folder, resume=folder / "last.ckpt", **options)
torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=1e-4)
"""


@needs("lightning")
def test_the_example_runs_and_goes_on_from_a_checkpoint_with_the_same_weights():
    printed = example("with_lightning.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 6
    assert max(losses) < 0.69  # tossing a coin
    assert printed.endswith("the weights are the same: True\n")
    assert in_the_gallery("with_lightning", printed)


@needs("lightning")
def test_a_module_with_dense_semantics_is_resumed_where_it_was():
    run("-c", TRACKED)


# Two processes of DistributedDataParallel; half of the users are in no batch.
TWO_PROCESSES = """
import tempfile, lightning, sparsestep, with_lightning
from pathlib import Path

class Half(with_lightning.Recommender):
    def __init__(self):
        super().__init__()
        self.users = sparsestep.nn.Embedding(2 * with_lightning.USERS, 16)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, **_):
        sparsestep.clip_grad_norm_(self.parameters(), gradient_clip_val)

with_lightning.Recommender = Half
options = {"strategy": "ddp_fork", "devices": 2, "gradient_clip_val": 0.5}
trained = with_lightning.train(1, Path(tempfile.mkdtemp()), **options)
lightning.seed_everything(0, verbose=False)
changed = (trained.users.weight != Half().users.weight).any(dim=1).nonzero().flatten()
print("changed", len(changed), int(changed.max()))
"""


@needs("lightning")
def test_torchrec_3114_lightning_ddp_leaves_rows_alone_that_are_in_no_batch():
    found = re.search(r"changed (\d+) (\d+)", run("-c", TWO_PROCESSES))
    assert found is not None
    assert 450 < int(found[1]) <= 500
    assert int(found[2]) < 500


# Random walks are pyg-lib's, which is not on PyPI; without it, these few lines walk.
WALKS = """
import torch, torch_geometric.nn.models.node2vec as module

def walk(pointers, targets, starts, length, p, q):
    path = [starts]
    for _ in range(length):
        first, end = pointers[path[-1]], pointers[path[-1] + 1]
        path.append(targets[first + (torch.rand(len(starts)) * (end - first)).long()])
    return torch.stack(path, dim=1)

module.WITH_PYG_LIB = True
torch.ops.pyg.random_walk = walk

import node2vec
assert node2vec.main() == 0
"""


@needs("torch_geometric")
def test_node2vec_finds_the_communities():
    has_walks = importlib.util.find_spec("pyg_lib")
    printed = example("node2vec.py") if has_walks else run("-c", WALKS)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert in_the_gallery("node2vec", printed)


@needs("pykeen")
def test_the_losses_are_those_of_dense_gradients():
    printed = example("knowledge_graph.py")
    found = re.findall(r"loss (\S+) with dense gradients, (\S+) fused", printed)
    assert len(found) == 5
    for dense, fused in found:
        assert float(fused) == pytest.approx(float(dense), rel=1e-4)
    assert in_the_gallery("knowledge_graph", printed)


@needs("pykeen")
def test_the_program_of_the_page_trains_a_model_of_pykeen():
    code = shown("word-and-graph-vectors.md", "pykeen") + "print(losses)"
    losses = [float(each) for each in re.findall(r"\d\.\d+", run("-c", code))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


MADE_AGAIN = """
import warnings, sparsestep, knowledge_graph
from pykeen.training import SLCWATrainingLoop
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always", sparsestep.StaleWarning)
    known = knowledge_graph.triples()
    model = knowledge_graph.ComplEx(triples_factory=known, embedding_dim=4)
    optimizer = sparsestep.nn.optimizer_for(model, sparsestep.Adam)
    loop = SLCWATrainingLoop(model=model, triples_factory=known, optimizer=optimizer)
    loop.train(known, num_epochs=1, batch_size=256, use_tqdm=False)
    assert not any(each.category is sparsestep.StaleWarning for each in said)
    assert loop.optimizer is not optimizer and loop.optimizer.semantics == "dense"
    loop.train(known, num_epochs=1, batch_size=256, use_tqdm=False)
print([str(each.message) for each in said if each.category is sparsestep.StaleWarning])
"""


@needs("pykeen")
def test_an_optimizer_that_pykeen_makes_again_says_what_it_has_lost():
    assert "Adam has semantics='masked'" in run("-c", MADE_AGAIN)


CONSTRAINED = """
import sparsestep, knowledge_graph
from pykeen.models import TransE
knowledge_graph.ComplEx = TransE  # it normalises all rows after each step

def guarded(model):
    optimizer = sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=0.01)
    optimizer.track(model, guard=True)
    return optimizer

dense = knowledge_graph.train(lambda model: sparsestep.Adam(model.parameters(), lr=0.01))
print(max(abs(a - b) for a, b in zip(dense, knowledge_graph.train(guarded))))
"""


@needs("pykeen")
def test_under_the_guard_a_model_may_write_its_tables_after_each_step():
    assert float(run("-c", CONSTRAINED)) < 1e-4


@needs("transformers", "accelerate")
def test_the_trainer_trains_new_rows_and_nothing_else():
    printed = example("new_tokens.py")
    assert "weights that changed: ['transformer.wte.weight', 'lm_head.weight']\n" in printed
    assert f"rows that changed: {list(range(1_000, 1_010))}\n" in printed
    assert in_the_gallery("new_tokens", printed)


# A model and a tokenizer in a folder, from which `from_pretrained("gpt2")` loads them.
PRETRAINED = """
import os, tempfile, tokenizers, transformers
folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("gpt2")
config = transformers.GPT2Config(vocab_size=3, n_positions=8, n_embd=8, n_layer=1, n_head=1)
transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
"""
STEPPED = """
import torch
before = model.transformer.wte.weight.detach().clone()
ids = torch.tensor([[0, 3, 1, 4]])
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
print((model.transformer.wte.weight != before).any(dim=1).nonzero().flatten().tolist())
"""


@needs("transformers", "tokenizers")
def test_the_program_of_the_page_trains_new_rows_of_a_pretrained_model():
    printed = run("-c", PRETRAINED + shown("new-tokens.md", "transformers") + STEPPED)
    assert printed.endswith("[3, 4]\n")


# A small model of Llama with three tokens more, and an adapter of PEFT.
ADAPTER = """
import copy, tempfile, peft, torch, transformers, sparsestep

NEW = [40, 41, 42]

def adapted(**options):
    torch.manual_seed(0)
    small = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings={tied})
    config = transformers.LlamaConfig(vocab_size=40, **small, **heads)
    model = transformers.LlamaForCausalLM(config)
    model.resize_token_embeddings(43)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, adapter)

def train(model, optimizer):
    losses = []
    for step in range(10):
        ids = torch.randint(43, (2, 6), generator=torch.Generator().manual_seed(step))
        ids[:, 0] = NEW[step % 3]
        optimizer.zero_grad()
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()

def moved(model, before):
    found = {{}}
    for name, value in model.state_dict().items():
        if "lora" not in name and not torch.equal(value, before[name]):
            found[name.partition(".model.")[2]] = (value != before[name]).any(1).nonzero()
    return {{name: rows.flatten().tolist() for name, rows in found.items()}}
"""
SAVED = """
for saved in (["embed_tokens", "lm_head"], ["embed_tokens"]):
    model = adapted(modules_to_save=saved)
    before = copy.deepcopy(model.state_dict())
    groups = sparsestep.nn.train_rows(model, NEW)
    chosen = {id(param) for group in groups for param in group["params"]}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    optimizer = sparsestep.AdamW([*groups, {"params": others}], lr=0.05, weight_decay=0.1)
    train(model, optimizer)
    found = moved(model, before)
    assert len(found) == len(saved), found
    assert all("modules_to_save" in name and rows == NEW for name, rows in found.items()), found
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(adapted().unload(), folder)
    ids = torch.tensor([[3, 41, 7, 42]])
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
"""
CHOSEN = """
losses = []
for make in (torch.optim.AdamW, sparsestep.AdamW):
    model = adapted(trainable_token_indices={"embed_tokens": NEW})
    params = [param for param in model.parameters() if param.requires_grad]
    if make is torch.optim.AdamW:
        optimizer = make(params, lr=0.05)
    else:
        optimizer = sparsestep.nn.optimizer_for(model, make, lr=0.05)
    losses.append(train(model, optimizer))
torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
try:
    sparsestep.nn.train_rows(model, NEW)
except sparsestep.InputError as error:
    assert "With trainable_token_indices, PEFT itself trains these rows" in str(error)
else:
    raise AssertionError
assert [p for p in model.parameters() if p.requires_grad] == params
"""


@needs("transformers", "peft")
@pytest.mark.parametrize(
    ("program", "tied"),
    [(SAVED, False), (CHOSEN, False), (CHOSEN, True)],
    ids=["saved", "chosen", "chosen, tied"],
)
def test_new_tokens_of_a_model_with_an_adapter(program: str, tied: bool):
    run("-W", "ignore::UserWarning", "-c", ADAPTER.format(tied=tied) + program)


# One tiny model with random weights: dense AdamW, optimizer_for in one line, and one graph.
ARCHITECTURE = """
import copy, sys, torch, transformers, sparsestep

KIND, OPTIONS, IS_TIED, TABLES = {case}
small = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
config = getattr(transformers, KIND + "Config")(**{{**small, **OPTIONS}})
for name in dir(config):  # which would be random
    if "drop" in name and isinstance(getattr(config, name), float):
        setattr(config, name, 0.0)
config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 0, 1
config.use_cache, config.tie_word_embeddings, config.decoder_start_token_id = False, IS_TIED, 0
heads = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
head = next(name for name in heads if hasattr(transformers, KIND.removesuffix("Text") + name))
torch.manual_seed(0)
model = getattr(transformers, KIND.removesuffix("Text") + head)(config).double()

def batch(step):
    ids = torch.randint(2, 50, (2, 6), generator=torch.Generator().manual_seed(step))
    return dict(input_ids=ids, labels=ids)

runs, weights = [], []
for make in (
    lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda model: sparsestep.nn.optimizer_for(model, sparsestep.AdamW, lr=1e-3),
):
    trained = copy.deepcopy(model).train()
    optimizer, losses = make(trained), []
    for step in range(50):
        optimizer.zero_grad()
        losses.append(trained(**batch(step)).loss)
        losses[-1].backward()
        optimizer.step()
    runs.append(torch.stack(losses).detach())
    weights.append({{name: value.clone() for name, value in trained.state_dict().items()}})
torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-9)  # losses are float32
print("difference", float((runs[0] - runs[1]).abs().max()))
fused = [n for n, m in trained.named_modules() if isinstance(m, sparsestep.nn.Embedding)]
assert [name for name in fused if "bias" not in name] == TABLES, fused
tied = [each.name for each in optimizer.explain(trained) if "tied to" in each.reason]
assert bool(tied) == IS_TIED, tied

def compiled(model):
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    return run(**batch(50)).loss

try:
    compiled(copy.deepcopy(model))
except torch._dynamo.exc.Unsupported:
    print("no graph")
    sys.exit()
expected, loss = trained(**batch(50)).loss, compiled(trained)
torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
loss.backward()
optimizer.step()
print("one graph")
"""

HEADS = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
GEMMA = {
    **HEADS,
    "intermediate_size": [32, 32],
    "vocab_size_per_layer_input": 60,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["full_attention", "sliding_attention"],
    "activation_sparsity_pattern": [0.0, 0.0],
    "sliding_window": 8,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
BERT = [f"bert.embeddings.{kind}_embeddings" for kind in ("position", "token_type")]
ARCHITECTURES: list[tuple[str, dict[str, object], bool, list[str]]] = [
    ("GPT2", {"n_positions": 32}, True, ["transformer.wpe"]),
    ("Llama", HEADS, False, ["model.embed_tokens"]),
    ("Qwen2", HEADS, True, []),
    ("Gemma3nText", GEMMA, True, ["model.embed_tokens_per_layer"]),
    ("Mistral", HEADS, False, ["model.embed_tokens"]),
    ("Bert", {"intermediate_size": 32}, True, BERT),
    ("T5", T5, False, ["shared", "encoder.embed_tokens", "decoder.embed_tokens"]),
    ("Mamba", {"state_size": 4}, False, ["backbone.embeddings"]),
    ("Phi", {"intermediate_size": 32}, False, ["model.embed_tokens"]),
    ("OPT", OPT, False, ["model.decoder.embed_tokens", "model.decoder.embed_positions"]),
]


@needs("transformers")
@pytest.mark.parametrize("case", ARCHITECTURES, ids=lambda case: case[0])
def test_one_line_for_a_model_of_transformers(case: tuple[object, ...]):
    printed = run("-W", "ignore::UserWarning", "-c", ARCHITECTURE.format(case=repr(case)))
    found = re.search(r"difference (\S+)", printed)
    assert found is not None
    assert float(found[1]) < 1e-6
    assert ("one graph" in printed) != (case[0] in NO_GRAPH)


NO_GRAPH = {"GPT2", "OPT"}  # which torch 2.13 does not compile as a whole, whatever its tables


def resolved(cls: type) -> Iterator[type]:
    """What ``class_resolver.utils.get_subclasses`` finds: classes of the package of their base."""
    for below in cls.__subclasses__():
        yield from resolved(below)
        names = (below.__name__, *below.__module__.split("."))
        private = any(name.startswith("_") for name in names)
        if not private and names[1] == cls.__module__.partition(".")[0]:
            yield below


def test_none_of_ours_is_taken_for_one_of_torchs():
    """Libraries that list the subclasses of torch's Optimizer skip ours."""
    found = list(resolved(torch.optim.Optimizer))
    assert not [cls for cls in found if cls.__module__.startswith("sparsestep.")]
    assert sum(cls.__name__ == "Adam" for cls in found) == 1
