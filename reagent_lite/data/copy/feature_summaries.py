"""Summaries of a training copy's features, to which normalization is fitted if no file gives it.

states, or candidates as often as rows list them ─► slices of rows ─► ColumnSummary, in threads ─► merged in order
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.summary import ACTION, ColumnSummary, Merge
from reagent_lite.data.formats.blocks import num_threads
from reagent_lite.data.rows.hashes import row_hashes
from reagent_lite.data.rows.levels import SIDE_OF, texts_of
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.id_values import IdFeature

_BLOCK_BYTES = 8 << 20


def summarize_copy(
    copy: TrainingCopy,
    column: str,
    settings: NormParams,
    seed: int,
    id_features: Mapping[IdFeature, bool] = {},
) -> ColumnSummary:
    """Returns the summary of a column over all rows; of rows with an mdp_id, `summarize_log` draws the same sample.

    Args:
        copy: the copy of one machine; it may have no rows.
        column: "state_features" or "action".
        settings: size of the sample, and limit of distinct values.
        seed: the seed of the sample.
        id_features: features of ids, and whether the ids of each are counted.
    """
    texts = texts_of(copy.levels[SIDE_OF[column]])
    threads = num_threads()

    def part(start: int) -> ColumnSummary:
        rows = slice(start, min(start + step, len(copy)))
        hashes = row_hashes(copy.episode_hash[copy.episode[rows]], copy.sequence[rows], seed)
        matrix = FeatureMatrix(copy.state_ids, copy.state[rows])
        if column == ACTION:
            listed, candidates = _index_candidates(copy, rows)
            hashes = hashes[listed]
            matrix = FeatureMatrix(copy.action_ids, copy.candidates[candidates])
        return ColumnSummary.of(matrix, hashes, settings.max_unique_enum_values, texts, id_features)

    values_per_row = len(copy.state_ids)
    if column == ACTION:
        values_per_row = len(copy.action_ids) * len(copy.candidates) // max(len(copy.list_offsets) - 1, 1)
    step = max(_BLOCK_BYTES // (4 * max(values_per_row, 1)), 1)
    merge = Merge(settings.num_samples, settings.max_unique_enum_values)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(copy), step * threads):
            for summary in pool.map(part, range(first, min(first + step * threads, len(copy)), step)):
                merge.add(summary)
            copy.release()
    return merge.summary()


def _index_candidates(copy: TrainingCopy, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Returns (index in `rows`, row of `candidates`) of every candidate that these rows list.

    The copy stores equal lists once, so that `candidates` alone does not have the frequency of a candidate.
    """
    lists = np.asarray(copy.actions_list[rows])
    starts = copy.list_offsets[lists]
    counts = copy.list_offsets[lists + 1] - starts
    listed = np.repeat(np.arange(len(lists)), counts)
    return listed, np.arange(len(listed)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
