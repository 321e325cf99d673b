"""What a vocabulary knows: which ids have rows; merged, exported, saved and loaded."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from sparsestep.errors import InputError, memory_errors, sentence
from sparsestep.locks import fork_safe_lock
from sparsestep.nn.grow import Table, weight_of
from sparsestep.nn.vocabulary import saving
from sparsestep.nn.vocabulary.id_table import Ids, Options, Saved
from sparsestep.nn.vocabulary.native_ids import new_ids


class KnowsIds(nn.Module):
    """A vocabulary as far as its knowledge goes."""

    _not_copied: ClassVar[tuple[str, ...]] = (
        *("_ids", "_lock", "_attached", "_progress", "taken_over"),
    )

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._now = 0  # passes as ids are seen
        self._handed_over = 0  # how many rows have changed hands
        self._prepare()

    def _prepare(self) -> None:
        """What is neither pickled nor copied."""
        self._ids: Ids = new_ids(self._options)
        self._lock = fork_safe_lock()
        self._progress: list[Any] = []

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._options.rows

    @property
    def used(self) -> int:
        """How many rows are in use, the shared ones included."""
        with self._lock:
            return self._ids.used

    def extra_repr(self) -> str:
        """What it was made with."""
        options = self._options
        more = f", shared={options.shared}" if options.shared > 1 else ""
        return f"{options.rows}, admit={options.admit}, evict={options.evict!r}{more}"

    def as_dict(self) -> dict[int, int]:
        """The row of each id that has one of its own."""
        with self._lock:
            saved = self._ids.save()
        first = self._options.shared
        ids = saved.ids[first : saved.used].tolist()
        return dict(zip(ids, range(first, saved.used), strict=True))

    def export(self, table: Table) -> tuple[nn.Embedding, dict[int, int]]:
        """A plain embedding with the rows that are in use, and the row of each id.

        Args:
            table: what this vocabulary gives rows of.

        Returns:
            A copy, ``torch.nn.Embedding``, and a dict; ids that are not in it have row 0 (with
            several shared rows, any of them).

        Example:
            >>> import torch, sparsestep
            >>> vocabulary, table = sparsestep.nn.Vocabulary(1000), torch.nn.Embedding(1000, 4)
            >>> rows = vocabulary(torch.tensor([10**18, -7]))
            >>> vocabulary.export(table)
            (Embedding(3, 4), {1000000000000000000: 1, -7: 2})
        """
        weight = weight_of("Vocabulary.export", table)
        with self._lock:
            found = self.as_dict()
            values = weight.detach()[: self._options.shared + len(found)].clone()
        return nn.Embedding.from_pretrained(values, freeze=False), found

    def merge(self, other: KnowsIds) -> Tensor:
        """Add the ids of another vocabulary; ids that are new here get free rows.

        Counts are added up. No id loses its row, so there must be enough free rows.

        Args:
            other: which stays as it is.

        Returns:
            For each row in use there, the row of its id here; so
            ``table.weight.data[rows] = other_table.weight.data[: len(rows)]`` merges tables.

        Raises:
            InputError: there are too few free rows; nothing has changed.

        Example:
            >>> import torch, sparsestep
            >>> first, second = sparsestep.nn.Vocabulary(10), sparsestep.nn.Vocabulary(10)
            >>> first(torch.tensor([5, 6])), second(torch.tensor([6, 7]))
            (tensor([1, 2]), tensor([1, 2]))
            >>> first.merge(second), first.as_dict()
            (tensor([0, 2, 3]), {5: 1, 6: 2, 7: 3})
        """
        if not isinstance(other, KnowsIds) or other._options.shared != self._options.shared:
            contract = "Vocabulary.merge: it must be another Vocabulary with as many shared rows"
            raise InputError(sentence(contract, other))
        with other._lock, memory_errors():
            theirs = other._ids.save()
        with self._lock, memory_errors():
            merged, rows = self._merged(theirs)
            self._ids = merged
        return rows

    def _merged(self, theirs: Saved) -> tuple[Ids, Tensor]:
        """What there is to know with the ids of another vocabulary, and the rows of these."""
        merged = new_ids(self._options)
        saved, rows = saving.merged(self._ids.save(), theirs, self._options, self._now)
        merged.load(saved, self._now)
        return merged, rows

    # Checkpoints and copies

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {k: v for k, v in vars(self).items() if k not in self._not_copied}
            return {**state, "saved": self._ids.save()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        super().__setstate__(state)
        self._prepare()
        self._ids.load(saved, self._now)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with self._lock:
            found = saving.write(self._ids.save(), self._now, self._handed_over)
        for name, tensor in found.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = saving.NAMES
        missing = [name for name in names if prefix + name not in state_dict]
        missing_keys += [prefix + name for name in missing]
        if missing:
            return
        found = {name: state_dict[prefix + name] for name in names}
        try:
            with memory_errors():
                saved, now, handed_over = saving.read(self._options, found)
        except InputError as error:
            error_msgs.append(f"Vocabulary {prefix.rstrip('.')!r}: {error}")
            return
        self._become(saved, now, handed_over)

    def _become(self, saved: Saved, now: int, handed_over: int) -> None:
        """Replace everything by what ``saving.read`` has found; all of it or, on error, nothing."""
        with self._lock, memory_errors():
            ids = new_ids(self._options)
            ids.load(saved, now)
            self._change(_ids=ids, _now=now, _handed_over=handed_over, _progress=[])

    def _change(self, **attributes: Any) -> None:
        """Set attributes in one step that no signal handler can interrupt."""
        vars(self).update(attributes)
