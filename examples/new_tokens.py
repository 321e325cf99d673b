"""The Trainer of Transformers trains the rows of new tokens, and nothing else.

A small GPT-2 with random weights gets ten tokens more. ``train_rows`` makes a param group of its
tied embedding, with a mask of the rows to train; weight decay and momentum do not move the others.
The memory of the state is taken as rows are written, so that of the other rows costs next to
nothing. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sparsestep

TOKENS, ADDED = 1_000, 10


class Sentences(Dataset[dict[str, Tensor]]):
    """Old and new tokens in turns; a new one is always followed by the same old one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        new = torch.randint(0, ADDED, (8,), generator=generator)
        ids = torch.stack([TOKENS + new, 7 * new], dim=1).flatten()
        return {"input_ids": ids, "labels": ids}


def main() -> int:
    """Train, and compare all weights with those before; returns the exit code."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.resize_token_embeddings(TOKENS + ADDED)
    model.requires_grad_(False)

    new_tokens = range(TOKENS, TOKENS + ADDED)
    optimizer = sparsestep.AdamW(sparsestep.nn.train_rows(model, new_tokens), lr=0.02)

    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=10,
            max_grad_norm=1.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=20,
        )
        trainer = Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, None))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f}, in the end {losses[-1]:.3f}")

    after = model.state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    name = "transformer.wte.weight"
    changed = (after[name] != before[name]).any(dim=1).nonzero().flatten().tolist()
    print(f"weights that changed: {moved}")
    print(f"rows that changed: {changed}")
    return 0 if changed == list(new_tokens) and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
