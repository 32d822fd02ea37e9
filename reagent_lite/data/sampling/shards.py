"""Which process reads which part of the data: its machine's shard, or a single shard if all machines have all rows.

layout shards    node 0: ranks 0, 1 ─► shard 0     node 1: ranks 2, 3 ─► shard 1
layout split     the same; each machine has chosen its shard from all rows
layout replicas  node 0: ranks 0, 1 ─► shard 0     node 1: ranks 2, 3 ─► shard 0, which is on both
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.data import DataConfig
from reagent_lite.data.copy.copy_summaries import COPY_SUMMARY, Agreement, CopySummary, agree
from reagent_lite.distributed.group import Group

Integer = TypeVar("Integer", bound=np.integer[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The division of rows among processes. A single machine has one shard.

    Attributes:
        group: all processes.
        layout: data.layout.
        nodes: machine of each rank.
        of_rank: number of the shard each rank reads.
    """

    group: Group
    layout: str
    nodes: tuple[int, ...]
    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, settings: DataConfig, group: Group) -> "Shards":
        """Returns the shards of a group by the config's layout; every rank calls it."""
        nodes = group.all_gather(group.node)
        replicas = settings.layout == "replicas"
        return cls(group=group, layout=settings.layout, nodes=nodes, of_rank=(0,) * len(nodes) if replicas else nodes)

    @classmethod
    def alone(cls, group: Group) -> "Shards":
        """Returns the one shard of a group of one process."""
        return cls(group=group, layout="shards", nodes=(0,), of_rank=(0,))

    @property
    def own(self) -> int:
        """Number of this process's shard."""
        return self.of_rank[self.group.rank]

    @property
    def several(self) -> bool:
        """Whether machines hold different rows."""
        return max(self.of_rank) > 0

    @property
    def readers(self) -> tuple[int, ...]:
        """Ranks that share this process's shard."""
        return tuple(rank for rank, shard in enumerate(self.of_rank) if shard == self.own)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first reader of its shard."""
        return self.group.rank == self.readers[0]

    @property
    def first_readers(self) -> tuple[int, ...]:
        """First rank of each shard."""
        return tuple(self.of_rank.index(shard) for shard in range(max(self.of_rank) + 1))

    def agree(self, summary: CopySummary, path: str, *, repeats: bool) -> Agreement:
        """Returns the description of the data at `path` on all machines together; every rank calls it.

        Args:
            summary: summary of this machine's data.
            path: the same on all machines.
            repeats: see `copy_summaries.agree`.

        Raises:
            DataError: on every rank alike, see `agreement.agree`.
        """
        summaries = [
            COPY_SUMMARY.validate_json(text)
            for text in self.group.gather_text(COPY_SUMMARY.dump_json(summary).decode())
        ]
        by_node = [summaries[self.nodes.index(node)] for node in sorted(set(self.nodes))]
        return agree(by_node, path=path, layout=self.layout, repeats=repeats)

    def counts(self, number: int) -> tuple[int, ...]:
        """Returns the number that the first reader of each shard passes; every rank calls it."""
        numbers = self.group.all_gather(number)
        return tuple(numbers[reader] for reader in self.first_readers)

    def part(self, numbers: NDArray[Integer]) -> NDArray[Integer]:
        """Returns this process's part of numbers that all readers of its shard have."""
        parts: list[NDArray[Integer]] = np.array_split(numbers, len(self.readers))
        return parts[self.readers.index(self.group.rank)]
