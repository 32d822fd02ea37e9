"""Episodes in a folder that any number of processes share: files that appear by rename, ordered without clocks.

 fifo/0000000042-0001613-3f9c21d07a4e.parquet   number, steps, writer; written by collectors, the oldest are removed
 protected/<any name>.parquet                   such as a log of workflows.simulate; read first, never removed

A file's number is one more than the largest number that its writer sees (Lamport, 1978): a file comes after all files
that its writer knew of, even if the clocks of the machines differ. Files hold transitions as workflows.dqn reads them,
and their metadata says where the episodes come from. Each agent has its own episode, see `name_episode`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reagent_lite.console import logger
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import DataError, Problem
from reagent_lite.folder_identity import FolderIdentity, names_in
from reagent_lite.types import Image
from reagent_lite.whole_files import sweep

if TYPE_CHECKING:  # learners without a dataset do not need the extra `data`
    import pyarrow as pa

    from reagent_lite.data.rows.reading import Rows

FIFO = "fifo"
PROTECTED = "protected"
_SUFFIX: Final = ".parquet"
_NAME = re.compile(r"(\d{10})-(\d{7,})-([0-9a-f]{12})\.parquet")
_EPISODE = re.compile(r"([^-]+-\d+-\d+)(?:-(\d{1,9}))?")
_METADATA: Final = b"reagent_lite"


def stamp_origin(table: pa.Table, origin: Mapping[str, Any]) -> pa.Table:
    """Returns the rows with `origin`, a description of where they come from, as metadata."""
    return table.replace_schema_metadata({_METADATA: json.dumps(origin)})


def compare_facts(where: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each key of `wanted` whose value in `got` differs or is missing."""
    return [
        Problem(
            f"{where}, {key}",
            _text(value),
            _text(got.get(key)),
            "Use the same environment, network and release of reagent-lite, or another folder",
        )
        for key, value in wanted.items()
        if got.get(key) != value
    ]


def _text(value: Any) -> str:
    return "nothing" if value is None else f"{json.dumps(value):.200}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EpisodeFile:
    """A file of the folder, described by its name; files are ordered by number, then by name.

    Attributes:
        number: number of the file; 0 for protected files.
        name: name relative to the folder.
        steps: number of environment steps; 0 for protected files, whose names do not have it.
    """

    number: int = 0
    name: str
    steps: int = 0


class EpisodeFolder:
    """A shared folder of episodes.

    Args:
        path: the folder; `run.roles.published_policies.shared_folders` makes its fifo.

    Attributes:
        path: the folder.
        fifo: the subfolder that collectors write to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fifo = path / FIFO
        self._identity: FolderIdentity | None = None  # of fifo, since it was first used
        self._largest = 0  # number of the newest file that this process wrote
        self._failed = 0  # number of a file whose writing failed; 0 if none
        self._warned = ""

    def require(self) -> FolderIdentity:
        """Returns the identity of fifo, which must exist: with its share unmounted, all files would seem removed.

        Raises:
            OSError: fifo does not exist, or is no longer the same folder.
        """
        if self._identity is None:
            self._identity = FolderIdentity.mark(self.fifo)
        self._identity.require()
        return self._identity

    def files(self) -> list[EpisodeFile]:
        """Returns the files in order: protected ones by name, then those of fifo by number.

        Raises:
            OSError: fifo cannot be listed, or is no longer the same folder.
        """
        written = [match for match in map(_NAME.fullmatch, self.require().names()) if match]
        given = [name for name in names_in(self.path / PROTECTED) if name.endswith(_SUFFIX) and name[0] not in "._"]
        return sorted(
            [
                *(EpisodeFile(name=f"{PROTECTED}/{name}") for name in given),
                *(
                    EpisodeFile(number=int(match[1]), name=f"{FIFO}/{match[0]}", steps=int(match[2]))
                    for match in written
                ),
            ]
        )

    def unread(self, through: int) -> int:
        """Returns the environment steps of fifo's files with numbers above `through`."""
        return sum(file.steps for file in self.files() if file.number > through)

    def add(self, table: pa.Table, origin: Mapping[str, Any], writer: str) -> str:
        """Writes whole episodes as the newest file of fifo and returns its name; the file appears whole or not at all.

        After an error call it again with the same rows: they get the same name, and replace the file if it was written
        after all.

        Args:
            table: rows of `episode_rows` as transitions.
            origin: description of where the rows come from.
            writer: 12 hexadecimal digits that no other process has.

        Raises:
            DataError: the file cannot be written, or the share is not mounted; caused by the OSError.
        """
        from reagent_lite.data.writing.table_writers import table_writer

        with disk_errors(str(self.fifo), "a folder that can be written"):
            number = self._failed or max([self._largest, *(file.number for file in self.files())]) + 1
            self._failed = number
            steps = environment_steps([table.column("mdp_id")])
            name = f"{number:010d}-{steps:07d}-{writer}{_SUFFIX}"
            with table_writer(self.fifo / name, within=self.require()) as file:
                file.write(stamp_origin(table, origin))
            self._largest = number
            self._failed = 0
        return name

    def origin(self, name: str) -> tuple[dict[str, Any], int]:
        """Returns where a file's episodes come from, and their environment steps; reads its metadata and one column.

        Raises:
            DataError: the file is gone or damaged, or has no origin in its metadata.
        """
        from reagent_lite.data.formats.arrow import opened_parquet

        file = self._input(name)
        with opened_parquet(file) as parquet:
            text = (parquet.schema_arrow.metadata or {}).get(_METADATA)
            origin = json.loads(text) if text else None
            if not isinstance(origin, dict):
                todo = "Files are those of collectors, and of workflows.simulate with format transitions"
                raise DataError(Problem(file.path, "metadata that names its environment", "none", todo))
            return origin, environment_steps(
                ids for part in parquet.iter_batches(columns=["mdp_id"]) for ids in part.columns
            )

    def rows(self, name: str, actions: tuple[str, ...], image: Image | None = None) -> Iterator[Rows]:
        """Yields the checked rows of a file, whole episodes one after the other.

        Args:
            name: the name of the file.
            actions: names of discrete actions; () for candidates with features.
            image: shape of states that are images.

        Raises:
            DataError: the file is gone or damaged, or rows break a rule.
        """
        from reagent_lite.data.formats.format_table import read_blocks
        from reagent_lite.data.rows.reading import read_rows
        from reagent_lite.data.rows.row_rules import RowRules

        rules = RowRules(actions=actions or None)
        file = replace(self._input(name), image=image)
        for rows in read_blocks((file,), partial(read_rows, rules=rules)):
            rows.faults.require_none()
            yield rows

    def keep_below(self, most: int) -> None:
        """Removes the oldest files of fifo while it has more than `most` bytes; only one process may call this.

        The newest file stays. Half-written files of killed writers are removed a day later. Warns once for each reason
        why files cannot be removed.
        """
        try:
            paths = [self.path / file.name for file in self.files() if file.number]
            sizes = [path.stat().st_size for path in paths]
        except OSError:  # the folder is away: nothing to do here; its readers wait for it
            return
        total = sum(sizes)
        try:
            for path, size in list(zip(paths, sizes, strict=True))[:-1]:
                if total <= most:
                    break
                path.unlink(missing_ok=True)
                total -= size
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._warned:
                logger.warning(f"{self.fifo} has {total:,} bytes, max_bytes is {most:,}: files stay there: {reason}")
            self._warned = reason
        sweep(self.fifo.glob(".*.tmp"))

    def _input(self, name: str) -> InputFile:
        return list_input(str(self.path / name), (_SUFFIX,))[0]


def name_episode(log: str, env: int, number: int, agent: int | None) -> str:
    """Returns the name of an episode of an agent; `agent` is None if the environment has only one.

    Args:
        log: prefix that no other log has.
        env: number of the environment.
        number: number of the environment's episode.
        agent: number of the agent, or None.
    """
    return f"{log}-{env}-{number}" if agent is None else f"{log}-{env}-{number}-{agent}"


def game_and_agent(name: str) -> tuple[str, int]:
    """Returns the name of an environment's episode, and the agent's number, of an episode from `name_episode`."""
    match = _EPISODE.fullmatch(name)
    return (name, 0) if match is None else (match[1], int(match[2] or 0))


def environment_steps(names: Iterable[pa.Array]) -> int:
    """Returns the environment steps of rows, given the names of their episodes [rows].

    An environment's episode has as many steps as its agent with the most rows.
    """
    rows = Counter[str]()
    steps = dict[str, int]()
    for part in names:
        rows.update({entry["values"]: entry["counts"] for entry in part.drop_null().value_counts().to_pylist()})
    for name, count in rows.items():
        env_episode, _ = game_and_agent(name)
        steps[env_episode] = max(steps.get(env_episode, 0), count)
    return sum(steps.values())
