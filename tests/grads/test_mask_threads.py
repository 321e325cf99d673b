"""A mask that is looked at by several threads at once."""

from __future__ import annotations

import threading

import torch

from sparsestep.grads.masks import MaskSelection


def test_a_selection_is_whole_before_it_counts_as_up_to_date():
    """Finding the slots of a large mask lets other threads run in between."""
    mask = torch.zeros(1 << 22, dtype=torch.bool)
    mask[::2] = True
    for _ in range(5):
        selection = MaskSelection(mask, mask.shape)
        found: list[int] = []

        def look(selection: MaskSelection = selection, found: list[int] = found) -> None:
            found.append(len(selection.refresh().indices))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1 << 21] * 4
