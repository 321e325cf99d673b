"""Sparse layers whose pattern changes during training: SET and RigL with ``optimizer.set_mask``.

The data come from a linear map with 5 % nonzero weights. Three students keep 10 % of theirs: in a
pattern that is random and fixed, in one where small weights make room for random ones (SET, Mocanu
et al. 2018), and in one where they make room for those with the largest gradients (RigL, Evci et
al. 2020). Dropped weights lose their moments; new ones start from zero.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import sparsestep

INPUTS, OUTPUTS, KEPT = 128, 64, 0.1
STEPS, EVERY, SHARE = 1_000, 50, 0.3  # a pattern changes this often, by this share at first


def largest(values: Tensor, count: int, among: Tensor) -> Tensor:
    """A mask of the ``count`` largest values among those that a mask selects."""
    found = values.masked_fill(~among, -torch.inf).flatten().topk(count).indices
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    return mask.index_fill_(0, found, value=True).view_as(values)


def new_mask(method: str, weight: Tensor, mask: Tensor, share: float) -> Tensor:
    """Drop the smallest weights of a mask, and grow as many."""
    count = int(mask.sum())
    dropped = int(share * count)
    kept = largest(weight.detach().abs(), count - dropped, among=mask)
    scores = torch.rand(weight.shape)  # SET
    if method == "RigL":
        assert weight.grad is not None
        scores = weight.grad.abs()  # dense: also of weights that are not trained
    return kept | largest(scores, dropped, among=~mask)


def train(method: str) -> float:
    """The last loss of a student; every batch is new."""
    torch.manual_seed(0)
    teacher = torch.randn(OUTPUTS, INPUTS) * (torch.rand(OUTPUTS, INPUTS) < KEPT / 2)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    mask = largest(torch.rand(layer.weight.shape), int(KEPT * teacher.numel()), teacher == teacher)
    with torch.no_grad():
        layer.weight *= mask
    optimizer = sparsestep.Adam([layer.weight], lr=0.02, mask=mask)
    loss = torch.tensor(0.0)
    for step in range(STEPS):
        inputs = torch.randn(64, INPUTS)
        loss = (layer(inputs) - inputs @ teacher.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if method != "fixed" and step % EVERY == EVERY - 1 and step < 0.75 * STEPS:
            mask = new_mask(method, layer.weight, mask, SHARE * (1 - step / STEPS))
            with torch.no_grad():
                layer.weight *= mask
            optimizer.set_mask(layer.weight, mask)
        else:
            optimizer.step()
    assert int((layer.weight != 0).sum()) <= int(KEPT * teacher.numel())
    return float(loss.detach())


def main() -> int:
    """Train the three students; returns the exit code."""
    losses = {method: train(method) for method in ("fixed", "SET", "RigL")}
    for method, loss in losses.items():
        print(f"{method:5}  loss {loss:.4f}")
    return 0 if losses["RigL"] < losses["SET"] < losses["fixed"] else 1


if __name__ == "__main__":
    sys.exit(main())
