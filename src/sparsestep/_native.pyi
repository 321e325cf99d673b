# The native core, built from native/. See native/bindings.cpp.

from torch import Tensor

class Jobs:
    def __init__(self, instruction_set: int) -> None: ...
    def add(
        self,
        rule: int,
        positions: Tensor | None,
        values: Tensor,
        param: Tensor,
        states: list[Tensor],
        slots: int,
        block: int,
        negate: bool,
        coefficients: tuple[float, ...],
    ) -> bool: ...
    def run(self, threads: int) -> tuple[int, int, int] | None: ...

def limit(work: tuple[float, ...], shares: tuple[int, ...], instruction_set: int) -> None: ...
def rules() -> dict[str, tuple[int, int, int]]: ...
def instruction_sets() -> list[tuple[str, bool]]: ...
def team() -> str: ...
