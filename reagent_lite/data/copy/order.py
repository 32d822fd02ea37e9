"""The order of a copy's rows: by episode and sequence_number if the log has both, else as in the files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.schema import to_numpy
from reagent_lite.data.rows.hashes import mix, name_hashes

_NAMES_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The copy's order: by (mdp_id, sequence_number) if the log has both, else as in the files.

    Attributes:
        rows: [R] int64, number of each row in the order of the files.
        episode: [R] int32, index in `mdp_ids`; the numbers after these are for rows without mdp_id.
        sequence: [R] int64, sequence_number, or the row's number if the log has none.
        mdp_ids: the distinct ids, ascending.
        alone: numbers of the rows without mdp_id, each of which is an episode of its own.
        duplicates: number of rows that share (mdp_id, sequence_number) with the row before.
    """

    rows: NDArray[np.int64]
    episode: NDArray[np.int32]
    sequence: NDArray[np.int64]
    mdp_ids: pa.Array
    alone: NDArray[np.int64]
    duplicates: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes; each row without mdp_id is one."""
        return len(self.mdp_ids) + len(self.alone)

    def episode_hashes(self) -> NDArray[np.uint64]:
        """Returns [episodes] hashes of the mdp_ids (BLAKE2b, 8 bytes, little endian), the same on every machine."""
        starts = range(0, len(self.mdp_ids), _NAMES_AT_ONCE)
        names = chain.from_iterable(self.mdp_ids.slice(start, _NAMES_AT_ONCE).to_pylist() for start in starts)
        return np.concatenate((name_hashes(names), mix(self.alone.astype(np.uint64))))


def find_order(slots: NDArray[np.int64], mdp_ids: list[pa.Array], sequence: NDArray[np.int64] | None) -> Order:
    """Sorts by (mdp_id, sequence_number) if the log has both; rows that are equal in both keep their order.

    Args:
        slots: [R] index of the row's mdp_id in the concatenated `mdp_ids`, -1 without one.
        mdp_ids: the mdp_ids of each block.
        sequence: [R] sequence numbers, or None if the log has none.
    """
    ids = pa.chunked_array(mdp_ids, pa.string())
    distinct = ids.unique().sort()
    rank = to_numpy(pc.rank(ids, "ascending", tiebreaker="dense")).astype(np.int32) - 1
    alone = slots < 0
    numbers = np.flatnonzero(alone)
    episode = np.empty(len(slots), np.int32)
    episode[~alone] = rank[slots[~alone]]
    episode[alone] = np.arange(len(distinct), len(distinct) + len(numbers))
    rows = np.arange(len(slots))
    duplicates = 0
    if sequence is None:
        sequence = rows
    elif len(numbers) < len(slots):
        rows = np.lexsort((sequence, episode))
        episode = episode[rows]
        sequence = sequence[rows]
        duplicates = int(((np.diff(episode) == 0) & (np.diff(sequence) == 0)).sum())
    return Order(rows=rows, episode=episode, sequence=sequence, mdp_ids=distinct, alone=numbers, duplicates=duplicates)
