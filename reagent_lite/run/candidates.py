"""Which candidates a policy chooses, by their raw features, on the rows that are scored."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.maps import in_order
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.candidates import CandidateTally
from reagent_lite.evaluation.page import EvaluationPage

_CHUNK_VALUES = 1 << 20  # 8 MB of float64, a few times


def candidate_choices(
    page: EvaluationPage, copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], group: Group
) -> dict[str, Any]:
    """Returns CandidateTally's document over the rows of all ranks; every rank calls it.

    Args:
        page: this rank's scored rows.
        copy: where they are from.
        numbers: [N] row numbers in the copy, in the page's order.
        ids: features of candidates, the same on every rank.
        group: the ranks.
    """
    tally = CandidateTally(ids)
    for rows in _chunks(page, len(ids)):
        features = _features(copy, numbers[rows], ids, page.mask.shape[1])
        tally.add(page.rows(torch.arange(rows.start, rows.stop)), torch.from_numpy(features))
    absent = int(group.sum(torch.tensor([copy.counts.get("propensity_absent_rows", 0)])))
    copy.release()
    return tally.document(group, propensities_known=not absent)


def _chunks(page: EvaluationPage, num_features: int) -> Iterator[slice]:
    size = max(_CHUNK_VALUES // max(page.mask.shape[1] * num_features, 1), 1)
    for start in range(0, len(page), size):
        yield slice(start, min(start + size, len(page)))


def _features(
    copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], num_choices: int
) -> NDArray[np.float32]:
    """Returns raw features of the rows' candidates, [n, K, F]; NaN where absent and behind a list's end."""
    lists = np.asarray(copy.actions_list[numbers])
    starts, stops = copy.list_offsets[lists], copy.list_offsets[lists + 1]
    places = starts[:, None] + np.arange(num_choices)
    within = places < stops[:, None]
    features = np.full((len(numbers), num_choices, len(ids)), np.nan, np.float32)
    features[within] = in_order(np.asarray(copy.candidates[places[within]]), copy.action_ids, ids, absent=np.nan)
    return features
