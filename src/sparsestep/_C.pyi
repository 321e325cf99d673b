# The native core, built from native/. See native/python/bindings.cpp.

from collections.abc import Sequence
from typing import Any, Protocol, overload

from torch import Tensor

from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.masks import PackedMask, SelectedSlots

class _Program:
    def __init__(
        self,
        states: int,
        slot_states: int,
        numbers: int,
        phases: tuple[tuple[bytes, bytes], ...],
        row_results: bytes,
    ) -> None: ...

class _NativeGroup:
    @overload
    def __init__(
        self,
        rule: int,
        names: tuple[str, ...],
        counts: bool,
        sign: float,
        coupled_decay: float,
        decay_factor: float,
        options: tuple[float, ...],
        stochastic_rounding: bool = False,
        signs: tuple[bool, ...] = (),
        takes_dense: bool = True,
        constraint: tuple[float, float] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        program: _Program,
        names: tuple[str, ...],
        step: int,
        sign: float,
        coupled_decay: float,
        decay_factor: float,
        numbers: tuple[float, ...],
        stochastic_rounding: bool,
        constraint: tuple[float, float] | None = None,
    ) -> None: ...

class _NativeStep:
    def __init__(self, instruction_set: int) -> None: ...
    def add(
        self,
        group: _NativeGroup,
        step: int,
        grad: IndexedGrad,
        param: Tensor,
        states: list[Tensor],
        seed: int | None,
        row_stride: tuple[int, int, int] | None,
        packed: PackedMask | None,
        owner: object,
        index: int,
    ) -> bool: ...
    def try_claim(
        self,
        group: _NativeGroup,
        owner: object,
        params: list[Tensor],
        state: dict[Tensor, Any],
        addresses: dict[int, tuple[Any, ...]],
        seen: set[int],
        selections: list[SelectedSlots | PackedMask | None] | None,
        grads: Sequence[Tensor | IndexedGrad | None] | None,
        first: int,
        claimed: list[tuple[int, Tensor | tuple[IndexedGrad, ...] | None]] | None,
    ) -> list[int]: ...
    def prepare_dense_replay(
        self,
        groups: list[dict[str, Any]],
        cached_plan: list[tuple[tuple[Any, ...], _NativeGroup | None, list[Any] | None]],
        state: dict[Tensor, Any],
        addresses: dict[int, tuple[Any, ...]],
        threads: int,
        deferred: list[tuple[Tensor, Tensor | None, int, int]],
    ) -> bool: ...
    def prepare(self, threads: int) -> tuple[Any, int, int, int] | None: ...
    def commit(self) -> None: ...

class CatchUp:
    idle_update: int
    states_per_row: int
    powers: tuple[Tensor | None, ...]
    buffer: int
    square: int
    buffer_decay: float
    square_decay: float
    eps: float
    converges: bool
    horizon: int
    inverse_decay: Tensor
    sizes: Tensor
    roots: Tensor
    centers: Tensor
    sums: Tensor
    options: tuple[float, ...]
    constraint: tuple[float, float] | None
    single_steps: int
    def __init__(self) -> None: ...
    def run(
        self,
        param: Tensor,
        state: tuple[Tensor, ...],
        rows: Tensor | None,
        last: Tensor,
        now: int,
        base: int,
        max_error: float,
        threads: int,
        instruction_set: int,
    ) -> tuple[int, int] | None: ...

class _Vocabulary:
    def find(self, ids: Tensor, rows: Tensor, threads: int) -> int: ...
    def claim(
        self, ids: Tensor, rows: Tensor, now: int, taken: Tensor, threads: int
    ) -> tuple[int, int, int]: ...
    def is_pending(self, claim: int) -> bool: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def sizes(self) -> tuple[int, int, int]: ...
    def save(
        self,
        ids: Tensor,
        counts: Tensor,
        seen: Tensor,
        candidate_ids: Tensor,
        candidate_counts: Tensor,
    ) -> None: ...
    def load(
        self,
        ids: Tensor,
        counts: Tensor,
        seen: Tensor,
        candidate_ids: Tensor,
        candidate_counts: Tensor,
        used: int,
        candidates: int,
        sightings: int,
        now: int,
    ) -> bool: ...
    def bytes(self) -> int: ...

class RowWrites:
    def __init__(self) -> None: ...
    def add(self, tensor: Tensor, rows: Tensor, values: Tensor) -> bool: ...
    def commit(self) -> None: ...

class Core(Protocol):
    """The module, as others see it; at run time there is no such class."""

    Program: type[_Program]
    NativeGroup: type[_NativeGroup]
    NativeStep: type[_NativeStep]
    def replay_step(
        self,
        instruction_set: int,
        groups: list[dict[str, Any]],
        cached_plan: list[tuple[tuple[Any, ...], _NativeGroup | None, list[Any] | None]],
        state: dict[Tensor, Any],
        addresses: dict[int, tuple[Any, ...]],
        threads: int,
        grads: Sequence[Tensor | IndexedGrad | None] | None = None,
        first: int = 0,
    ) -> bool: ...
    def pack_mask(self, mask: Tensor, words: Tensor, ranks: Tensor) -> int: ...
    def repack(
        self,
        old: PackedMask | None,
        new: PackedMask | None,
        numel: int,
        pairs: list[tuple[Tensor, Tensor, int]],
        threads: int,
    ) -> None: ...
    def apply_standard(
        self,
        instruction_set: int,
        group: _NativeGroup,
        param: Tensor,
        grad: Tensor | IndexedGrad,
        state: list[Tensor | None],
        step: int | Tensor,
        threads: int,
    ) -> bool: ...
    def set_compact_class(self, type: type) -> None: ...
    def add_step(
        self,
        sums: Tensor,
        centers: Tensor,
        buffer_powers: Tensor,
        root_powers: Tensor,
        step: int,
        move: float,
        root: float,
    ) -> None: ...
    CatchUp: type[CatchUp]
    RowWrites: type[RowWrites]
    def slots_of(
        self,
        starts: Tensor,
        others: Tensor,
        block_rows: int,
        row_slots: int,
        indices: Tensor,
        value_index: Tensor | None,
        threads: int,
    ) -> bool: ...
    def norms(
        self,
        parts: tuple[IndexedGrad, ...],
        order: int,
        norms: Tensor,
        threads: int,
        instruction_set: int,
    ) -> tuple[int | None] | None: ...
    def split_by_owner(
        self,
        ids: Tensor,
        starts: Tensor | None,
        world: int,
        rows: Tensor,
        order: Tensor | None,
        bags: Tensor | None,
        lengths: Tensor | None,
        counts: Tensor,
    ) -> None: ...
    def pack_messages(
        self, sections: list[Tensor | None], sizes: Tensor, own: int, begins: Tensor, buffer: Tensor
    ) -> None: ...
    def unpack_messages(
        self,
        buffer: Tensor,
        sizes: Tensor,
        own: int,
        begins: Tensor,
        sections: list[Tensor | None],
        own_sections: list[Tensor | None],
        own_sizes: Tensor,
    ) -> None: ...
    def copy_pieces(
        self, source: Tensor, target: Tensor, sources: Tensor, targets: Tensor, sizes: Tensor
    ) -> None: ...
    def request_rows(
        self, tables: list[tuple[Tensor, int, int]], world: int, counts: Tensor
    ) -> list[tuple[Tensor, Tensor]] | None: ...
    def sum_rows(self, tables: list[tuple[Tensor, Tensor, Tensor]]) -> bool: ...
    def encode_rows(
        self, format: int, values: Tensor, dim: int, seed: int | None, codes: Tensor
    ) -> None: ...
    def decode_rows(self, format: int, codes: Tensor, dim: int, values: Tensor) -> None: ...
    def unique(self, ids: Tensor, rows: int, unique: Tensor, which: Tensor) -> int: ...
    def hash_strings(self, strings: Sequence[object], ids: Tensor, threads: int) -> int: ...
    def hash_arrow(
        self,
        offsets: object,
        is_large: bool,
        data: object,
        first: int,
        ids: Tensor,
        threads: int,
    ) -> int: ...
    def lazy_zeros(self, bytes: int) -> Tensor: ...
    def reserve_rows(
        self,
        rows: Tensor,
        count: int,
        row_bytes: int,
        offset: int,
        page_bytes: int,
        file: int,
        known: Tensor,
        threads: int,
    ) -> int: ...
    def prefetch_rows(
        self,
        rows: Tensor,
        count: int,
        row_bytes: int,
        offset: int,
        page_bytes: int,
        memory: int,
        known: Tensor,
    ) -> int: ...
    def mark_rows(self, rows: Tensor, marks: Tensor) -> None: ...
    def look_up(
        self, tables: Sequence[tuple[Any, ...]], threads: int, instruction_set: int
    ) -> list[tuple[Any, ...]] | None: ...
    def hash_ngrams(
        self,
        tokens: Tensor,
        documents: Tensor | None,
        orders: tuple[int, ...],
        heads: int,
        seed: int,
        weight: Tensor,
        rows: int,
        is_split: bool,
        threads: int,
    ) -> tuple[Tensor, Tensor] | None: ...
    def vocabulary(
        self,
        rows: int,
        shared: int,
        admit: int,
        candidates: int,
        eviction: int,
        fades_after: int,
        keys: tuple[int, int],
    ) -> _Vocabulary: ...
    def rules(self) -> dict[str, tuple[int, int, int, int]]: ...
    def idle_updates(self) -> list[str]: ...
    dtypes: tuple[str, ...]
    def instruction_sets(self) -> list[tuple[str, bool]]: ...
    def thread_source(self) -> str: ...
