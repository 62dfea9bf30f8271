"""Page tables of the running sequences, as the host sees them, and what of them the device has not seen yet."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rimuru_jax.host.page_layout import PageLayout

Int32 = npt.NDArray[np.int32]
Ids = npt.NDArray[np.integer]


class PageTables:
    """One array per sequence kind, int32 `[tables, max_num_seqs, width]`: the ids of the pages of each slot.

    For a kind that grows with tokens, column `c` holds the page of tokens `c * page_tokens` and up; `width` covers
    `max_model_len` tokens. For a constant kind `width` is 1. Entries of 0 point to the scratch page.
    """

    def __init__(self, layout: PageLayout, max_num_seqs: int, max_model_len: int) -> None:
        self.arrays: dict[str, Int32] = {}
        self._lengths: dict[str, npt.NDArray[np.int64]] = {}
        self._changed: dict[str, list[npt.NDArray[np.int64]]] = {}
        self._table_starts: dict[str, npt.NDArray[np.int64]] = {}  # [tables, 1]
        for placed in layout.sequence_kinds:
            tokens = placed.kind.page_tokens
            width = -(-max_model_len // tokens) if tokens else 1
            name = placed.kind.name
            self.arrays[name] = np.zeros((placed.tables, max_num_seqs, width), np.int32)
            self._lengths[name] = np.zeros(max_num_seqs, np.int64)
            self._changed[name] = []
            self._table_starts[name] = np.arange(placed.tables)[:, None] * (max_num_seqs * width)

    def lengths(self, kind: str) -> npt.NDArray[np.int64]:
        """Columns in use of each slot, `[max_num_seqs]`; not to be written to."""
        return self._lengths[kind]

    def append(self, slot: int, units: Mapping[str, Ids]) -> None:
        """Add new units of a slot, by kind: whole columns one after another, in each one unit per table.

        Raises ValueError, with nothing changed, for a part of a column or for more columns than the table has.
        """
        self.append_each([slot], [units])

    def append_each(self, slots: Sequence[int], units: Sequence[Mapping[str, Ids]]) -> None:
        """`append` for several different slots at once, at less cost."""
        added: dict[str, list[tuple[int, int, int, Ids]]] = {}  # by kind: slot, first column, end, ids
        for slot, by_kind in zip(slots, units, strict=True):
            for name, ids in by_kind.items():
                tables, _, width = self.arrays[name].shape
                start = int(self._lengths[name][slot])
                columns, rest = divmod(len(ids), tables)
                if rest:
                    raise ValueError(f"{len(ids)} units of {name!r} are no whole columns of {tables} tables")
                if start + columns > width:
                    raise ValueError(
                        f"slot {slot} has {start} columns of {name!r} and gets {columns} more, its table has room for "
                        f"{width}: raise max_model_len"
                    )
                if columns:
                    added.setdefault(name, []).append((slot, start, start + columns, ids))
        for name, parts in added.items():
            ids = parts[0][3] if len(parts) == 1 else np.concatenate([ids for *_, ids in parts])
            self._write(name, [part[:3] for part in parts], np.reshape(ids, (-1, len(self.arrays[name]))).T)
            self._lengths[name][[slot for slot, *_ in parts]] = [end for _, _, end, _ in parts]

    def clear(self, slot: int) -> None:
        """Point the rows of a slot to the scratch page again."""
        for name, lengths in self._lengths.items():
            if lengths[slot]:
                self._write(name, [(slot, 0, int(lengths[slot]))], 0)
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

    def _write(self, name: str, spans: Sequence[tuple[int, int, int]], ids: npt.ArrayLike) -> None:
        """Set columns (slot, first, end) to ids `[tables, columns in all]`."""
        array = self.arrays[name]
        width = array.shape[2]
        columns = [slot * width + column for slot, start, end in spans for column in range(start, end)]
        where = self._table_starts[name] + np.array(columns)
        array.reshape(-1)[where] = ids
        self._changed[name].append(where.reshape(-1))
