"""What a vocabulary knows, as tensors: in checkpoints, in a larger one, merged with another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.nn.vocabulary.id_table import Options, Saved
from sparsestep.surroundings import cat

_TENSORS = Saved._fields[:5]
NAMES: tuple[str, ...] = (*_TENSORS, "numbers")


def write(saved: Saved, now: int, handed_over: int) -> dict[str, Tensor]:
    """What a checkpoint has.

    Args:
        saved: what is known.
        now: the time.
        handed_over: how many rows have changed hands.
    """
    found = {name: getattr(saved, name) for name in _TENSORS}
    numbers = [saved.used, saved.candidates, saved.sightings, now, handed_over]
    return {**found, "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu")}


def read(options: Options, found: Mapping[str, Any]) -> tuple[Saved, int, int]:
    """What ``write`` has written, for a vocabulary with these options.

    Raises:
        InputError: it is for another one, or nothing that ``write`` has written.
    """
    wanted = Saved.room(options, 0, 0, 0)
    shapes = {name: getattr(wanted, name).shape for name in _TENSORS}
    for name, shape in {**shapes, "numbers": torch.Size([5])}.items():
        tensor = found[name]
        is_fit = isinstance(tensor, Tensor) and tensor.shape == shape
        if not is_fit or tensor.dtype != torch.int64:
            got = type(tensor).__name__
            if isinstance(tensor, Tensor):
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            contract = f"{name} must be torch.int64 of shape {tuple(shape)}"
            raise InputError(sentence(contract, got, "Make it with the same rows and admit"))
    used, candidates, sightings, now, handed_over = found["numbers"].tolist()
    ids, counts, seen, few, times = (found[name].to("cpu").contiguous() for name in _TENSORS)
    saved = Saved(ids, counts, seen, few, times, used, candidates, sightings)
    contract = "it must be what state_dict() has written"
    if not (
        options.shared <= used <= options.rows
        and 0 <= candidates <= options.candidates
        and 0 <= now < 2**32
        and min(sightings, handed_over) >= 0
    ):
        raise InputError(sentence(contract, f"numbers {found['numbers'].tolist()}"))
    if any(bool(((each < 0) | (each >= 2**32)).any()) for each in (counts, seen, times)):
        raise InputError(sentence(contract, "counts that are none"))
    known = cat([ids[options.shared : used], few[:candidates]])
    if known.unique().numel() != known.numel():
        raise InputError(sentence(contract, "an id that comes twice"))
    return saved, now, handed_over


def with_room(saved: Saved, options: Options) -> Saved:
    """The same for a vocabulary that has more rows."""
    room = Saved.room(options, saved.used, saved.candidates, saved.sightings)
    for new, old in zip(room[:5], saved[:5], strict=True):
        new[: len(old)] = old
    return room


def merged(saved: Saved, theirs: Saved, options: Options, now: int) -> tuple[Saved, Tensor]:
    """The same with the ids of another vocabulary; also which row each of its rows has here.

    Args:
        saved: what is known.
        theirs: what the other one knows.
        options: of the first.
        now: when ids that are new here count as seen.

    Raises:
        InputError: there are too few free rows.
    """
    first = options.shared
    ids = theirs.ids[first : theirs.used]
    known, order = saved.ids[first : saved.used].sort()
    places = torch.searchsorted(known, ids).clamp_(max=max(0, len(known) - 1))
    is_known = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    rows = torch.zeros(len(ids), dtype=torch.int64, device="cpu")
    if len(known):
        is_known = known[places] == ids
        rows = order[places] + first
    new = int((~is_known).sum())
    if new > options.rows - saved.used:
        contract = f"Vocabulary.merge: there must be {new} free rows"
        raise InputError(sentence(contract, options.rows - saved.used, "Call grow() first"))
    rows[~is_known] = torch.arange(saved.used, saved.used + new, device="cpu")
    saved.ids[rows] = ids
    saved.counts[rows] = (saved.counts[rows] + theirs.counts[first : theirs.used]).clamp_(
        max=2**32 - 1
    )
    saved.seen[rows[~is_known]] = now
    candidates = _without(saved, ids)
    shared = torch.arange(first, device="cpu")
    return candidates._replace(used=saved.used + new), cat([shared, rows])


def _without(saved: Saved, ids: Tensor) -> Saved:
    """The same without candidates that are among these ids."""
    stay = ~torch.isin(saved.candidate_ids, ids)
    stay[saved.candidates :] = False
    count = int(stay.sum())
    pairs = [torch.zeros_like(saved.candidate_ids) for _ in range(2)]
    for new, old in zip(pairs, (saved.candidate_ids, saved.candidate_counts), strict=True):
        new[:count] = old[stay]
    return saved._replace(candidate_ids=pairs[0], candidate_counts=pairs[1], candidates=count)
