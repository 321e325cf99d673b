"""Gaussian splats: each step updates the visible ones, and splats are added and removed.

A picture is a sum of Gaussians. Every step renders another window of it, in which few of them are
visible: their gradients are sparse, so splats outside keep their values and their moments, as with
the selective Adam of gsplat. From time to time, faint splats are removed and new ones are put where
the picture is worst. Parameters and state get their new rows by hand, as gsplat's strategies do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

import sparsestep

SIZE, WINDOW = 96, 32
SPLATS, STEPS, EVERY = 300, 400, 80
RATES = {"position": 0.2, "size": 0.02, "color": 0.02}
POINTS = torch.stack(
    torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"), dim=-1
).float()


def picture() -> Tensor:
    """Waves, and a disk in front of them."""
    y, x = POINTS.unbind(-1)
    waves = torch.stack([x / SIZE, (x / 9).sin() / 2 + 0.5, (y / 7).cos() / 2 + 0.5], dim=-1)
    disk = (POINTS - SIZE / 2).square().sum(dim=-1, keepdim=True) < (SIZE / 4) ** 2
    return torch.where(disk, torch.tensor([0.9, 0.2, 0.1]), waves)


def new_splats(positions: Tensor) -> dict[str, Tensor]:
    """Gray splats of a standard size."""
    count = len(positions)
    size = torch.full((count, 1), math.log(3.0))
    return {"position": positions, "size": size, "color": torch.full((count, 3), 0.1)}


def render(splats: Mapping[str, Tensor], points: Tensor) -> Tensor:
    """The sum of all splats at the points of a window."""
    away = (points.reshape(-1, 1, 2) - splats["position"]).square().sum(dim=-1)
    weight = (-away / (2 * splats["size"].exp().square().squeeze(1))).exp()
    return (weight @ splats["color"]).view(*points.shape[:2], 3)


def visible_in(splats: Mapping[str, Tensor], points: Tensor) -> Tensor:
    """Splats that reach into a window."""
    reach = 3 * splats["size"].detach().exp()
    position = splats["position"].detach()
    inside = (position > points[0, 0] - reach) & (position < points[-1, -1] + reach)
    return inside.all(dim=1).nonzero().flatten()


def replace_rows(optimizer: Any, kept: Tensor, new: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Keep some splats with their state, and append others whose state is new."""
    splats: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        (old,) = group["params"]
        name = group["name"]
        splats[name] = nn.Parameter(torch.cat([old.detach()[kept], new[name]]))
        state = optimizer.state.pop(old)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:  # one row per splat
                fresh = value.new_zeros(len(new[name]), *value.shape[1:])
                state[key] = torch.cat([value[kept], fresh])
        optimizer.state[splats[name]] = state
        group["params"] = [splats[name]]
    return splats


def main() -> int:
    """Fit the picture; returns the exit code."""
    torch.manual_seed(0)
    target = picture()
    first = new_splats(torch.rand(SPLATS, 2) * SIZE)
    splats = {name: nn.Parameter(values) for name, values in first.items()}
    groups = [{"params": [splats[name]], "lr": lr, "name": name} for name, lr in RATES.items()]
    optimizer = sparsestep.Adam(groups, bias_correction="per_row")
    same, psnr = True, 0.0
    print(" step  splats  visible  PSNR")
    for step in range(1, STEPS + 1):
        top, left = (int(each) for each in torch.randint(0, SIZE - WINDOW + 1, (2,)))
        window = (slice(top, top + WINDOW), slice(left, left + WINDOW))
        visible = visible_in(splats, POINTS[window])
        rows = {name: embedding(visible, each, sparse=True) for name, each in splats.items()}
        loss = (render(rows, POINTS[window]) - target[window]).square().mean()

        hidden = torch.ones(len(splats["color"]), dtype=torch.bool).index_fill_(0, visible, False)
        before = splats["color"].detach()[hidden]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        same = same and torch.equal(splats["color"][hidden], before)

        if step % EVERY:
            continue
        with torch.no_grad():
            error = (render(splats, POINTS) - target).square().sum(dim=-1)
        psnr = -10 * math.log10(float(error.mean()) / 3)
        print(f"{step:5}  {len(hidden):6}  {len(visible):7}  {psnr:.1f}")
        if step < STEPS:
            kept = splats["color"].detach().abs().amax(dim=1) > 0.05
            worst = torch.multinomial(error.flatten(), 100, replacement=False)
            splats = replace_rows(optimizer, kept, new_splats(POINTS.view(-1, 2)[worst]))
    print(f"invisible splats kept their bits: {same}")
    return 0 if same and psnr > 20 else 1


if __name__ == "__main__":
    sys.exit(main())
