"""The order of a copy's rows: by episode and sequence_number if the log has both, else as in the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.copy.spool import Indices, parts_of
from reagent_lite.data.formats.schema import to_numpy
from reagent_lite.data.logs import NUMBERED
from reagent_lite.data.rows.hashes import mix, name_hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The copy's order: by (mdp_id, sequence_number) if the log has both, else as in the files.

    Attributes:
        rows: [R] number of each row in the order of the files.
        episode: [R] int32, index among the distinct mdp_ids; the numbers after these are for rows without mdp_id.
        sequence: [R] int64, sequence_number, or the row's number if the log has none.
        mdp_ids: the mdp_ids of all blocks, in which an id may come several times.
        distinct: index in `mdp_ids` of each distinct id, in ascending order of the ids.
        alone: numbers of the rows without mdp_id, each of which is an episode of its own.
        duplicates: number of rows that share (mdp_id, sequence_number) with the row before.
    """

    rows: Indices
    episode: NDArray[np.int32]
    sequence: NDArray[np.int64]
    mdp_ids: pa.Array
    distinct: Indices
    alone: Indices
    duplicates: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes; each row without mdp_id is one."""
        return len(self.distinct) + len(self.alone)

    def names(self) -> Iterator[pa.Array]:
        """Yields the distinct mdp_ids, ascending, some at a time."""
        for part in parts_of(len(self.distinct)):
            yield self.mdp_ids.take(pa.array(self.distinct[part]))

    def without_duplicates(self) -> Order:
        """Returns the order of the first rows of each (mdp_id, sequence_number)."""
        first = np.ones(len(self.rows), bool)
        named = self.episode < len(self.distinct)
        same = (self.episode[1:] == self.episode[:-1]) & (self.sequence[1:] == self.sequence[:-1])
        first[1:] = ~(same & named[1:])
        return replace(
            self, rows=self.rows[first], episode=self.episode[first], sequence=self.sequence[first], duplicates=0
        )

    def pairs_in_several_logs(self) -> int:
        """Returns how many pairs of mdp_id and sequence_number are in several logs, whose mdp_ids are numbered."""
        names = [pc.replace_substring_regex(names, NUMBERED, "", max_replacements=1) for names in self.names()]
        if not names:
            return 0
        code = to_numpy(pa.chunked_array(names).combine_chunks().dictionary_encode().indices).astype(np.int64)
        shared = np.append(np.bincount(code)[code] > 1, False)
        rows = np.flatnonzero(shared[np.minimum(self.episode, len(code))])
        episode = self.episode[rows]
        pairs = np.unique(np.stack((code[episode], self.sequence[rows], episode), axis=1), axis=0)
        same = np.append(False, (pairs[1:, :2] == pairs[:-1, :2]).all(axis=1))
        return int((same[1:] & ~same[:-1]).sum())

    def episode_hashes(self) -> NDArray[np.uint64]:
        """Returns [episodes] hashes of the mdp_ids (BLAKE2b, 8 bytes, little endian), the same on every machine."""
        named = [name_hashes(names.to_pylist()) for names in self.names()]
        alone = (mix(self.alone[part].astype(np.uint64)) for part in parts_of(len(self.alone)))
        return np.concatenate([np.empty(0, np.uint64), *named, *alone])


def index_type(count: int) -> type[np.integer[Any]]:
    """Returns the type for the numbers below `count`."""
    return np.int32 if count < 2**31 else np.int64


def take(values: NDArray[Any], rows: Indices) -> NDArray[Any]:
    """Returns values[rows]; unlike numpy's, it does not need eight more bytes for each row."""
    result = np.empty(len(rows), values.dtype)
    for part in parts_of(len(rows)):
        result[part] = values[rows[part]]
    return result


def find_order(slots: NDArray[np.int64], mdp_ids: pa.Array, sequence: NDArray[np.int64] | None) -> Order:
    """Sorts by (mdp_id, sequence_number) if the log has both; rows that are equal in both keep their order.

    Args:
        slots: [R] index of the row's mdp_id in `mdp_ids`, -1 without one.
        mdp_ids: strings; an id may come several times.
        sequence: [R] sequence numbers, or None if the log has none.
    """
    rank, distinct = _dense_ranks(mdp_ids)
    kind = index_type(len(slots))
    alone = np.flatnonzero(slots < 0).astype(kind)
    episode = np.empty(len(slots), np.int32)
    for part in parts_of(len(slots)):
        episode[part] = rank[slots[part]] if len(rank) else 0
    episode[alone] = np.arange(len(distinct), len(distinct) + len(alone))
    del rank
    if sequence is None or len(alone) == len(slots):
        rows = np.arange(len(slots), dtype=kind)
        sequence = np.arange(len(slots)) if sequence is None else sequence
        duplicates = 0
    else:
        rows = np.lexsort((sequence, episode)).astype(kind)
        episode = take(episode, rows)
        sequence = take(sequence, rows)
        duplicates = int(((episode[1:] == episode[:-1]) & (sequence[1:] == sequence[:-1])).sum())
    return Order(
        rows=rows,
        episode=episode,
        sequence=sequence,
        mdp_ids=mdp_ids,
        distinct=distinct,
        alone=alone,
        duplicates=duplicates,
    )


def _dense_ranks(texts: pa.Array) -> tuple[NDArray[np.int32], Indices]:
    """Returns [n] the rank of each text among the distinct ones, and the index of each distinct one, ascending."""
    rank = np.empty(len(texts), np.int32)
    kind = index_type(len(texts))
    distinct = [np.empty(0, kind)]
    order = pc.sort_indices(texts)
    number = 0
    before = None
    for part in parts_of(len(texts)):
        indices = order[part]
        names = texts.take(indices)
        is_new = np.append(names[0].as_py() != before, to_numpy(pc.not_equal(names[1:], names[:-1]))).astype(bool)
        positions = to_numpy(indices).astype(np.int64)
        rank[positions] = number + np.cumsum(is_new) - 1
        distinct.append(positions[is_new].astype(kind))
        number += int(is_new.sum())
        before = names[-1].as_py()
    return rank, np.concatenate(distinct)
