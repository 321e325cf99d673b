# The benchmark's limit, built from benchmarks/native/. See benchmarks/native/module.cpp.

def run(
    rule: int,
    order: tuple[int, ...],
    tensors: tuple[int, ...],
    dim: int,
    options: tuple[float, ...],
    step: float,
    shares: tuple[int, ...],
    instruction_set: int,
) -> None: ...
def look_up(
    tensors: tuple[int, ...],
    dim: int,
    per_bag: int,
    bags: int,
    threads: int,
    instruction_set: int,
) -> None: ...
def rules() -> list[str]: ...
def instruction_sets() -> list[str]: ...
