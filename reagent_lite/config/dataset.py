"""`simulation.dataset`: the shared folder between collectors and learners."""

from collections.abc import Iterator
from typing import ClassVar

from reagent_lite.config.section import Count, LocalPath, Section
from reagent_lite.errors import Problem


class DatasetConfig(Section):
    """Folder that collectors write episodes to and learners read; simulation.mode chooses the role of this process."""

    path: LocalPath = ""
    """Folder that all machines see; several runs may learn from it. It has episodes in `fifo` and `protected`."""
    policies: LocalPath | None = None
    """Folder where one learner publishes policies for collectors; absent: `policies` in path."""
    publish_every_steps: Count = 100
    """Optimizer steps between two published policies; collectors wait once they are two such intervals ahead."""
    max_bytes: Count | None = None
    """Size of `fifo` above which the process whose `edits` is true removes the oldest files; absent: no file is
    removed."""
    edits: bool = False
    """Whether this process removes files; set it in one process of a dataset only."""

    required: ClassVar = {"path": ("a folder that collectors and learners see",)}

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for edits without a size."""
        if self.edits and self.max_bytes is None:
            yield self.wrong("max_bytes", "a number of bytes while edits is true")
