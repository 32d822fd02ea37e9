"""The whole JSON of `workflows.shard`: an input, the number of machines, and the folders of their parts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.config.section import LocalPath, Number, Positive, Section, Seed
from reagent_lite.errors import Problem


class ShardConfig(Section):
    """`python -m workflows.shard`: gives each machine a part of the rows, or all rows in a different order."""

    training_data_path: DataPath = ""
    """Folder of a timeline, another file or folder of rows in a format that training reads, or a list of several
    logs."""
    columns: LogColumns = {}
    shards_path: str = ""
    """Folder that all machines see, or URL of a bucket (s3://, gs://, abfs://); older shards there are replaced."""
    local_path: LocalPath = ""
    """Folder on this machine's disk for the fetched shard; training reads it from there."""
    layout: Literal["shards", "replicas"] = "shards"
    """shards: each machine gets different whole episodes; replicas: each machine gets all episodes, in a different
    order."""
    seed: Seed = 0
    """Seed of the division of episodes, or of the order of each copy."""
    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of machines, as in the training config."""
    node_index: Number | None = None
    """Number of this machine, whose shard is fetched; absent: make the shards of all machines, and fetch none."""
    wait_seconds: Positive = 3600.0
    """Seconds that the other machines wait for the shards of machine 0."""

    required: ClassVar = {"training_data_path": ("a path",), "shards_path": ("a path",)}

    def rules(self) -> Iterator[Problem]:
        """Yields overlapping paths, and a node_index that is too large or lacks a local_path."""
        if self.node_index is not None:
            if not self.local_path:
                yield self.wrong("local_path", "a folder on this machine's disk, with node_index")
            if self.node_index >= self.num_nodes:
                yield self.wrong("node_index", f"0 to {self.num_nodes - 1}, as num_nodes is {self.num_nodes}")
        yield from self._overlapping_paths()

    def _overlapping_paths(self) -> Iterator[Problem]:
        paths = [("training_data_path", log) for log in logs_of(self.training_data_path)]
        paths += [("shards_path", self.shards_path), ("local_path", self.local_path)]
        given = [(key, path, _resolve_links(path)) for key, path in paths if path]
        for number, (key, path, resolved) in enumerate(given):
            for other, _, earlier in given[:number]:
                if key == other:  # logs that are read as one
                    continue
                if resolved == earlier:
                    yield Problem(key, f"another path than {other}", repr(path))
                elif isinstance(resolved, Path) and isinstance(earlier, Path) and resolved.is_relative_to(earlier):
                    yield Problem(key, f"a path outside {other}", f"{path!r}, which is inside {earlier}")


def _resolve_links(path: str) -> Path | str:
    """Returns a local path with links resolved, or a URL unchanged."""
    local = path.removeprefix("file://")
    return path.rstrip("/") if "://" in local else Path(local).expanduser().resolve()
