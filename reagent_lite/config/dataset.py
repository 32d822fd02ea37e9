"""`simulation.dataset`: the shared folder between collectors and learners."""

from collections.abc import Iterator

from reagent_lite.config.section import Count, LocalPath, Section
from reagent_lite.errors import Problem


class DatasetConfig(Section):
    """A folder that collectors write episodes to and learners read; simulation.mode says which this process is."""

    path: LocalPath = ""
    """Folder that all machines see; of its own name, so that several runs may learn from it. Episodes are in `fifo` and
    `protected` below it."""
    policies: LocalPath | None = None
    """Folder where one learner publishes policies and collectors find them; absent: `policies` below path."""
    publish_every_steps: Count = 100
    """Optimizer steps from one published policy to the next; collectors wait once they are two such spans ahead."""
    max_bytes: Count | None = None
    """Size of `fifo` above which its oldest files are removed, by the process with edits; absent: nothing is."""
    edits: bool = False
    """Whether this process removes files; true for one process of a dataset."""

    def rules(self) -> Iterator[Problem]:
        """Yields a missing folder, and edits without a size."""
        if not self.path:
            yield self.wrong("path", "a folder that collectors and learners see")
        if self.edits and self.max_bytes is None:
            yield self.wrong("max_bytes", "a number of bytes while edits is true")
