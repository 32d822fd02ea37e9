"""The whole JSON of `workflows.shard`: an input, the number of machines, and the folder of one machine's part."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import LocalPath, Number, Section, Seed
from reagent_lite.errors import Problem


class ShardConfig(Section):
    """`python -m workflows.shard`: writes one machine's part of the rows, or all rows in an order of its own."""

    data_path: DataPath = ""
    """Folder of a timeline, another file or folder of rows in a format that training reads, or a list of several logs:
    on every machine the same files, such as those of a share or a bucket (s3://, gs://, abfs://)."""
    columns: LogColumns = {}
    output_path: LocalPath = ""
    """Folder on this machine's disk for its rows, which training reads; older ones there are replaced."""
    layout: Literal["shards", "replicas"] = "shards"
    """shards: each machine gets different whole episodes; replicas: each machine gets all episodes, in a different
    order."""
    seed: Seed = 0
    """Seed of the division of episodes, or of the order of each copy; the same on every machine."""
    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of machines, as in the training config."""
    node_index: Number | None = None
    """Number of this machine, from 0; a single machine needs none."""

    required: ClassVar = {"data_path": ("a path",), "output_path": ("a folder on this machine's disk",)}
    renamed: ClassVar = {"training_data_path": "data_path", "local_path": "output_path"}

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem if node_index is missing or too large."""
        if (self.node_index is None and self.num_nodes > 1) or (self.node_index or 0) >= self.num_nodes:
            yield self.wrong("node_index", f"this machine's number, 0 to {self.num_nodes - 1}")
