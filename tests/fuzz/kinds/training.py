"""Programs on an optimizer, or on one with gradients by hand; masked semantics."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.operations import OPERATIONS
from tests.fuzz.spoiling import spoil
from tests.fuzz.world import Say, World
from tests.generate.source import Source


def _program(chance: Source, say: Say, *, by_hand: bool, invalid: bool) -> None:
    world = World(chance, say, by_hand=by_hand)
    world.build()
    for _ in range(chance.integer(1, 6)):
        if invalid and chance.one_in(2):
            spoil(world)
        else:
            chance.weighted(OPERATIONS)(world)
        if world.over:
            return
    if invalid:
        spoil(world)


def optimizer(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=False, invalid=False)


def optimizer_and_garbage(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=False, invalid=True)


def by_hand(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=True, invalid=False)


def by_hand_and_garbage(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=True, invalid=True)


KINDS: dict[Callable[[Source, Say], None], int] = {
    optimizer: 10,
    optimizer_and_garbage: 10,
    by_hand: 8,
    by_hand_and_garbage: 10,
}
