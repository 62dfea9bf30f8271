"""Page tables of the running sequences, as the host sees them, and what of them the device has not seen yet."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.page_layout import PageLayout

Int32 = npt.NDArray[np.int32]


class PageTables:
    """One array per sequence kind, int32 `[tables, max_num_seqs, width]`: the ids of the pages of each slot.

    For a kind that grows with tokens, column `c` holds the page of tokens `c * page_tokens` and up; `width` covers
    `max_model_len` tokens. For a constant kind `width` is 1. Entries of 0 point to the scratch page.
    """

    def __init__(self, layout: PageLayout, max_num_seqs: int, max_model_len: int) -> None:
        self.arrays: dict[str, Int32] = {}
        self._lengths: dict[str, npt.NDArray[np.int64]] = {}
        self._changed: dict[str, list[npt.NDArray[np.int64]]] = {}
        self._table_starts: dict[str, npt.NDArray[np.int64]] = {}
        for placed in layout.sequence_kinds:
            tokens = placed.kind.page_tokens
            width = -(-max_model_len // tokens) if tokens else 1
            name = placed.kind.name
            self.arrays[name] = np.zeros((placed.tables, max_num_seqs, width), np.int32)
            self._lengths[name] = np.zeros(max_num_seqs, np.int64)
            self._changed[name] = []
            self._table_starts[name] = np.arange(placed.tables) * (max_num_seqs * width)

    def lengths(self, kind: str) -> npt.NDArray[np.int64]:
        """Columns in use of each slot, `[max_num_seqs]`; not to be written to."""
        return self._lengths[kind]

    def append(self, slot: int, units: Mapping[str, npt.NDArray[np.integer]]) -> None:
        """Add new units of a slot, by kind: whole columns one after another, in each one unit per table.

        Raises ValueError, with nothing changed, for a part of a column or for more columns than the table has.
        """
        for name, ids in units.items():
            tables, _, width = self.arrays[name].shape
            length = int(self._lengths[name][slot])
            if len(ids) % tables:
                raise ValueError(f"{len(ids)} units of {name!r} are no whole columns of {tables} tables")
            if length + len(ids) // tables > width:
                raise ValueError(
                    f"slot {slot} has {length} columns of {name!r} and gets {len(ids) // tables} more, its table has room "
                    f"for {width}: raise max_model_len"
                )
        for name, ids in units.items():
            if len(ids):
                start = int(self._lengths[name][slot])
                end = start + len(ids) // len(self.arrays[name])
                self._lengths[name][slot] = end
                self._write(name, slot, start, end, np.reshape(ids, (end - start, -1)).T)

    def clear(self, slot: int) -> None:
        """Point the rows of a slot to the scratch page again."""
        for name, lengths in self._lengths.items():
            if lengths[slot]:
                self._write(name, slot, 0, int(lengths[slot]), 0)
                lengths[slot] = 0

    def take_updates(self) -> dict[str, tuple[Int32, Int32]]:
        """What changed since the last call: for each kind the (table, slot, column) `[U, 3]` and the ids `[U]` there.

        No entry comes twice, so that they may be scattered in any order; all are copies, which later edits never reach.
        Kinds without changes are left out.
        """
        updates = {}
        for name, changed in self._changed.items():
            if changed:
                flat = changed[0] if len(changed) == 1 else np.unique(np.concatenate(changed))
                array = self.arrays[name]
                index = np.stack(np.unravel_index(flat, array.shape), 1).astype(np.int32)
                updates[name] = index, array.reshape(-1)[flat]
                changed.clear()
        return updates

    def _write(self, name: str, slot: int, start: int, end: int, ids: npt.ArrayLike) -> None:
        array = self.arrays[name]
        array[:, slot, start:end] = ids
        width = array.shape[2]
        first = self._table_starts[name] + (slot * width + start)
        if end - start > 1:
            first = (first[:, None] + np.arange(end - start)).reshape(-1)
        self._changed[name].append(first)
