"""The last steps of an episode as one state: rows are stored once, and gathered with the rows before them.

    previous    row of the step before, -1 at an episode's start
    row 7       ─► rows  5, 6, 7 ─► [1 x₅ | 1 x₆ | 1 x₇]
    row 6       ─► rows -1, 5, 6 ─► [0 0  | 1 x₅ | 1 x₆]       if the episode starts with row 5

A side row, a next state that is no row's state, comes after the last row of which it is the next state.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.source import FeatureColumns
from reagent_lite.data.sampling.spans import refuse_summed
from reagent_lite.feature_ids import stacked_width


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedColumns(FeatureColumns):
    """Columns of the last steps, as `types.SourceSpec.history` has them, of one step's columns in `values`.

    Attributes:
        step: columns of one step.
        previous: [N] row of the step before each, -1 without one.
        history: number of steps.
        absent: value of the columns of a step that does not exist.
    """

    step: FeatureColumns
    previous: Tensor
    history: int
    absent: float = 0.0

    @property
    def widest(self) -> int:
        """Number of columns before or after normalization, whichever is larger."""
        return self.history * (1 + self.step.widest)

    def take(self, index: Tensor) -> Tensor:
        """Returns the columns of the last steps for index [n], [n, width]."""
        rows = [index]
        for _ in range(self.history - 1):
            rows.append(torch.where(rows[-1] < 0, -1, self.previous.index_select(0, rows[-1].clamp(min=0))))
        stacked = torch.stack(rows[::-1], 1)
        exists = (stacked >= 0).unsqueeze(2)
        columns = self.step.take(stacked.clamp(min=0).flatten()).view(*stacked.shape, -1)
        columns = torch.where(exists, columns, self.absent)
        return torch.cat((exists.to(columns.dtype), columns), 2).flatten(1)


def stack_columns_of(copy: TrainingCopy, step: FeatureColumns, history: int, *, absent: float = 0.0) -> FeatureColumns:
    """Returns the columns of the last `history` steps of a copy's states; with 1, those of one step themselves.

    Args:
        copy: the training copy.
        step: columns of its states.
        history: number of steps.
        absent: value of the columns of a step before an episode's start; NaN for raw features.

    Raises:
        DataError: a row spans several steps.
    """
    if history == 1:
        return step
    refuse_summed(copy, f"a state has the last {history} steps (data.history)", "train without data.history")
    return StackedColumns(
        values=step.values,
        width=stacked_width(step.width, history),
        mapped=step.mapped,
        step=step,
        previous=torch.from_numpy(previous_rows(copy)).to(step.values.device),
        history=history,
        absent=absent,
    )


def previous_rows(copy: TrainingCopy) -> NDArray[np.integer[Any]]:
    """Returns [R+E] the row before each state in its episode, -1 at its start and after an end within an mdp_id."""
    rows = len(copy)
    previous: NDArray[np.integer[Any]] = np.full(len(copy.state), -1, np.int32 if len(copy.state) < 2**31 else np.int64)
    cut = (np.asarray(copy.truncated) > 0) & ~np.asarray(copy.follows)
    goes_on = (np.asarray(copy.bootstrap) > 0) & ~cut
    goes_on[:-1] &= copy.episode[1:] == copy.episode[:-1]
    before = np.flatnonzero(goes_on[:-1])
    previous[before + 1] = before
    following: NDArray[np.integer[Any]] = np.asarray(copy.next_index)
    of_side_rows = np.flatnonzero(following >= rows)  # ascending, so that the last row counts
    previous[following[of_side_rows]] = of_side_rows
    return previous
