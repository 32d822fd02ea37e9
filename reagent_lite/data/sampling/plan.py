"""The read plan: which rows a rank reads at a step, as a pure function.

    rows of all shards ─► steps of minibatch * minibatches_per_step rows, the last one shorter
                                └► minibatches of nearly equal size ─► of each shard its share of them
    shard ─(seed, epoch, number)─► permutation ─► its share of a minibatch ─► an equal part for each of its ranks

All ranks together read the rows that one process reads, no row comes twice in an epoch, and the position is a step
number. Shards of different sizes end at the same time: at any step every node has read the same share of its shard.
"""

import heapq
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How all ranks read the rows of all shards together.

    Attributes:
        shards: rows of each shard; a single one if every process has all rows.
        minibatch: rows of one minibatch over all ranks.
        epochs: passes over the rows.
        seed: the seed of the row order.
        reads: number of the shard that each rank reads; its length is the world size.
        minibatches_per_step: gradient accumulation.
    """

    shards: tuple[int, ...]
    minibatch: int
    epochs: int
    seed: int = 0
    reads: tuple[int, ...] = (0,)
    minibatches_per_step: int = 1

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(self.shards)

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

    def as_json(self) -> dict[str, Any]:
        """Returns the attributes as JSON has them; equal for equal plans."""
        tree: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return tree

    def permutation(self, epoch: int, shard: int = 0) -> NDArray[np.int32 | np.int64]:
        """Returns the row order of a shard in an epoch, the same for every world size.

        Shards without rows are not counted: the order of the others does not depend on them.
        """
        rows = self.shards[shard]
        number = sum(1 for before in self.shards[:shard] if before)
        order: NDArray[np.int32 | np.int64] = np.arange(rows, dtype=np.int32 if rows < 2**31 else np.int64)
        np.random.default_rng([self.seed, epoch, number]).shuffle(order)
        return order

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of a step over all ranks: fewer than rows_per_step at the end of an epoch."""
        return min(self.rows_per_step, self.rows - self.rows_before(step))

    def rows_before(self, step: int) -> int:
        """Returns the rows that all ranks have read in the epoch of a step before the step."""
        return step % self.steps_per_epoch * self.rows_per_step

    def parts(self, step: int, rank: int) -> list[tuple[int, int]]:
        """Returns the part that a rank reads of each minibatch of a step; some may be empty.

        A part is (start, stop), of the permutation of its shard in the epoch.
        """
        start = self.rows_before(step)
        rows = self.rows_of_step(step)
        count = self.minibatches_per_step
        shard = self.reads[rank]
        edges = [apportion(self.shards, start + rows * i // count)[shard] for i in range(count + 1)]
        before = self.reads[:rank].count(shard)
        readers = self.reads.count(shard)
        return [
            (low + (high - low) * before // readers, low + (high - low) * (before + 1) // readers)
            for low, high in pairwise(edges)
        ]


def apportion(shards: tuple[int, ...], count: int) -> list[int]:
    """Returns how many rows of each shard are among the first `count`, in proportion to the shards' rows.

    Row j of a shard of n rows comes at (j + 1/2) / n of the way; so the numbers sum to `count`, none falls as `count`
    rises, and all shards end together. Integers throughout: every process gets the same. Source: Webster's method.

    Args:
        shards: rows of each.
        count: at most the sum of them.
    """
    if len(shards) == 1:
        return [count]
    total = max(sum(shards), 1)
    num = len(shards)
    # below (count - num / 2) / total of the way there are at least count - num rows, and at most count
    counts = [max((rows * (2 * count - num) + total) // (2 * total), 0) for rows in shards]
    waiting = [(_way(j, rows), shard) for shard, (j, rows) in enumerate(zip(counts, shards, strict=True)) if rows]
    heapq.heapify(waiting)
    for _ in range(count - sum(counts)):
        shard = waiting[0][1]
        counts[shard] += 1
        heapq.heapreplace(waiting, (_way(counts[shard], shards[shard]), shard))
    return counts


def _way(j: int, rows: int) -> int:
    """Returns the position of row j of a shard in its pass, (j + 1/2) / rows, in units of 2^-129."""
    return ((2 * j + 1) << 128) // rows
