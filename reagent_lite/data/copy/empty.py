"""The training copy of a machine that has no rows where others have some: every array is there, and empty."""

from pathlib import Path

import numpy as np

from reagent_lite.data.copy.training_copy import TrainingCopy


def empty_training_copy(actions: tuple[str, ...] | None) -> TrainingCopy:
    """Returns a copy without rows, features and metrics, in memory only.

    Args:
        actions: names of discrete actions in output order; None for parametric ones.
    """
    choices = len(actions or ())
    matrix, mask = np.zeros((0, 0), np.float32), np.zeros((0, choices), np.uint8)
    real, whole = np.zeros(0, np.float32), np.zeros(0, np.int32)
    return TrainingCopy(
        folder=Path(),
        build=Path(),
        files=(),
        action_names=actions or (),
        state_ids=(),
        action_ids=(),
        metric_names=(),
        state=matrix,
        next_index=whole,
        follows=np.zeros(0, np.bool_),
        action=whole,
        next_action=whole,
        reward=real,
        time_diff=real,
        step=np.zeros(0, np.uint8),
        propensity=real,
        bootstrap=real,
        truncated=np.zeros(0, np.uint8),
        mask=mask,
        next_mask=mask,
        list_offsets=np.zeros(1, np.int64),
        candidates=matrix,
        actions_list=whole,
        next_list=whole,
        metrics=matrix,
        episode=whole,
        episode_hash=np.zeros(0, np.uint64),
        sequence=np.zeros(0, np.int64),
        origin_file=whole,
        origin_line=np.zeros(0, np.int64),
        counts={},
        notes=(),
    )
