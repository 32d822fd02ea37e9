"""The read plan: which rows a rank reads at a step, as a pure function.

    rows ─(seed, epoch)─► permutation ─► steps of minibatch * minibatches_per_step rows, the last one shorter
                                           └► minibatches of nearly equal size ─► one contiguous part per rank

The union over ranks is what one process reads, no row comes twice in an epoch, and the position is a step number.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """Attributes.

    rows: rows of the data.
    minibatch: rows of one minibatch over all ranks.
    epochs: passes over the rows.
    seed: of the row order.
    shares: relative number of rows each rank reads; its length is the world size.
    minibatches_per_step: gradient accumulation.
    """

    rows: int
    minibatch: int
    epochs: int
    seed: int = 0
    shares: tuple[int, ...] = (1,)
    minibatches_per_step: int = 1

    @property
    def rows_per_step(self) -> int:
        """Rows of a full optimizer step over all ranks."""
        return self.minibatch * self.minibatches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return -(-self.rows // self.rows_per_step)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.epochs * self.steps_per_epoch

    def permutation(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        """Returns the row order of an epoch, the same for every world size."""
        order: NDArray[np.int32 | np.int64] = np.arange(self.rows, dtype=np.int32 if self.rows < 2**31 else np.int64)
        np.random.default_rng([self.seed, epoch]).shuffle(order)
        return order

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of a step over all ranks: fewer than rows_per_step at the end of an epoch."""
        start = step % self.steps_per_epoch * self.rows_per_step
        return min(self.rows_per_step, self.rows - start)

    def parts(self, step: int, rank: int) -> list[tuple[int, int]]:
        """Returns [start, stop) in the epoch's permutation for each minibatch of a step; a part may be empty."""
        start = step % self.steps_per_epoch * self.rows_per_step
        edges = start + np.arange(self.minibatches_per_step + 1) * self.rows_of_step(step) // self.minibatches_per_step
        before, upto, total = sum(self.shares[:rank]), sum(self.shares[: rank + 1]), sum(self.shares)
        return [
            (int(low + (high - low) * before // total), int(low + (high - low) * upto // total))
            for low, high in pairwise(edges)
        ]
