"""The whole JSON of `workflows.shard`: an input, how many machines share it, and where their parts go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.config.section import LocalPath, Number, Positive, Section, Seed
from reagent_lite.errors import Problem


class ShardConfig(Section):
    """`python -m workflows.shard`: gives each machine a part of the rows, or all of them in an order of its own."""

    training_data_path: DataPath = ""
    """A timeline's folder, or any file or folder of rows in a format that training reads, or a list of several logs."""
    columns: LogColumns = {}
    shards_path: str = ""
    """Folder that all machines see, or URL of a bucket (s3://, gs://, abfs://); older shards there are replaced."""
    local_path: LocalPath = ""
    """Folder on this machine's own disk that becomes the fetched shard; training reads it from there."""
    layout: Literal["shards", "replicas"] = "shards"
    """shards: each machine gets its own whole episodes; replicas: each gets all of them, in an order of its own."""
    seed: Seed = 0
    """Draws which episodes go where, or the order of each copy."""
    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Machines, as in the training config."""
    node_index: Number | None = None
    """Fetch the shard of this machine; absent: make the shards of all machines, and fetch none."""
    wait_seconds: Positive = 3600.0
    """How long the other machines wait until machine 0 has made the shards."""

    def rules(self) -> Iterator[Problem]:
        """Yields missing paths, paths that are in each other's way, and a number without a machine."""
        for key in ("training_data_path", "shards_path"):
            if not getattr(self, key):
                yield self.wrong(key, "a path")
        if self.node_index is not None:
            if not self.local_path:
                yield self.wrong("local_path", "a folder on this machine's disk, with node_index")
            if self.node_index >= self.num_nodes:
                yield self.wrong("node_index", f"0 to {self.num_nodes - 1}, as num_nodes is {self.num_nodes}")
        yield from self._overlapping_paths()

    def _overlapping_paths(self) -> Iterator[Problem]:
        paths = [("training_data_path", log) for log in logs_of(self.training_data_path)]
        paths += [("shards_path", self.shards_path), ("local_path", self.local_path)]
        given = [(key, path, _resolved(path)) for key, path in paths if path]
        for number, (key, path, resolved) in enumerate(given):
            for other, _, earlier in given[:number]:
                if key == other:  # logs that are read as one
                    continue
                if resolved == earlier:
                    yield Problem(key, f"another path than {other}", repr(path))
                elif isinstance(resolved, Path) and isinstance(earlier, Path) and resolved.is_relative_to(earlier):
                    yield Problem(key, f"a path outside {other}", f"{path!r}, which is inside {earlier}")


def _resolved(path: str) -> Path | str:
    """Returns where a local path leads, links followed, or a URL as it is."""
    local = path.removeprefix("file://")
    return path.rstrip("/") if "://" in local else Path(local).expanduser().resolve()
