"""The log of workflows.serve as an input: decisions that are in no file yet, and logs of earlier versions.

    LOG/20261128T030507000000-5f3a9c01-1-1500.parquet   decisions 1 to 1500 of log 5f3a9c01
        20261123T000000000000-5f3a9c01.parquet          some decisions; earlier versions wrote those with a reward first
        .waiting.json                                   decisions in no file yet
        .rollout.jsonl                                  shares, stops and promotions of two policies that share the log

A file whose decisions were chosen by whether they had a reward has another mean reward than all decisions. Files that
name their first and last decision have all between them.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.input_files import damage_reported, local_path, read_bytes
from reagent_lite.errors import DataError, Problem, join_names, pluralize, raise_any
from reagent_lite.folder_identity import names_in

WAITING = ".waiting.json"
"""File in the folder of a log with its `WaitingDecisions`."""
ROLLOUT_EVENTS = ".rollout.jsonl"
"""File in the folder of a log with the events of its rollouts, one a line."""
_NAME = re.compile(r"[0-9]{8}T[0-9]{12}-([0-9a-f]{8})(?:-([0-9]+)-([0-9]+))?\.parquet")
_NUMBER = re.compile(r"[0-9a-f]{8}-([0-9]{1,18})(?:-.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDecisions:
    """The decisions of a log that are in no file yet.

    Attributes:
        decisions: their number.
        since: time of the oldest one; "" if there is none.
        reward_seconds: seconds that each waits for its reward.
    """

    decisions: int
    since: str
    reward_seconds: float

    def json(self) -> bytes:
        """Returns the content of the file WAITING."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        waiting = pluralize(self.decisions, "decision waits", "decisions wait")
        return f"{waiting} for rewards (since {self.since}, {self.reward_seconds:g} s each) and in no file yet"


def waiting_in(path: str) -> WaitingDecisions | None:
    """Returns the decisions of a log that are in no file yet; None if there are none, or the path is no served log."""
    try:
        note = WaitingDecisions(**json.loads(read_bytes(f"{local_path(path).rstrip('/')}/{WAITING}")))
    except (OSError, ImportError, ValueError, TypeError):
        return None
    return note if note.decisions else None


def newest_in(folder: Path, log: str) -> int:
    """Returns the largest number of a decision in the names of a log's files; 0 if there is none."""
    matches = map(_NAME.fullmatch, names_in(folder))
    return max((int(match[3]) for match in matches if match and match[1] == log and match[3]), default=0)


def require_all_decisions(files: Iterable[InputFile]) -> None:
    """Checks that served logs have each decision once, and were not chosen by the outcomes of their decisions.

    Raises:
        DataError: decisions are missing between the first and the last one of a log that an earlier version wrote; a
            file of a log and a copy of it.
    """
    logs: dict[tuple[str, str], list[InputFile]] = defaultdict(list)
    names: dict[str, InputFile] = {}
    copies: list[Problem] = []
    for file in files:
        if match := _NAME.fullmatch(file.name):
            logs[os.path.dirname(file.path), match[1]].append(file)
            first = names.setdefault(file.name, file)
            if first is not file:
                todo = "Give one of the folders: the other is its copy"
                copies.append(Problem(file.path, "each decision once", f"those of {first.path} again", todo))
    raise_any(copies[:1])
    raise_any([problem for key, of_log in logs.items() for problem in _missing(*key, tuple(of_log))])


@functools.lru_cache(8)
def _missing(folder: str, log: str, files: tuple[InputFile, ...]) -> tuple[Problem, ...]:
    """Returns a problem if a log lacks decisions; files of this version alone are not read."""
    ranges = [(int(match[2]), int(match[3])) for file in files if (match := _NAME.fullmatch(file.name)) and match[2]]
    unknown = [file for file in files if _NAME.fullmatch(file.name)[2] is None]  # type: ignore[index]
    if not unknown:
        return ()
    parts = [*map(_numbers, unknown), *(np.arange(first, last + 1) for first, last in ranges)]
    numbers = np.unique(np.concatenate(parts))
    if not len(numbers):
        return ()
    decisions = int(numbers[-1] - numbers[0]) + 1
    missing = decisions - len(numbers)
    if not missing:
        return ()
    expected = f"all {decisions:,} decisions from the first to the last of log {log}"
    got = (
        f"{missing:,} missing: an earlier version wrote decisions with a reward before others, which biases all values"
    )
    todo = (
        "Serve with this folder again: when reward_seconds have passed, all decisions are written. "
        f"If the database of the log is lost, leave out {join_names(file.name for file in unknown)}"
    )
    return (Problem(folder, expected, got, todo),)


def _numbers(file: InputFile) -> NDArray[np.int64]:
    """Returns the numbers of the decisions in a file; none if it is not a file of a served log."""
    from pyarrow.parquet import ParquetFile  # only logs of earlier versions pay for its import

    with damage_reported(file, "Parquet"), file.open() as stream:
        parquet = ParquetFile(stream)
        if "decision_id" not in parquet.schema_arrow.names:
            return np.zeros(0, np.int64)
        ids = parquet.read(["decision_id"]).column(0).to_pylist()
    matches = (_NUMBER.fullmatch(str(decision)) for decision in ids)
    return np.array([int(match[1]) for match in matches if match], np.int64)


def rollout_events(path: str) -> list[dict[str, Any]]:
    """Returns what happened in the rollouts of a log, from its file ROLLOUT_EVENTS; [] if it has none.

    Raises:
        DataError: a line of the file is no JSON object.
    """
    file = f"{local_path(path).rstrip('/')}/{ROLLOUT_EVENTS}"
    try:
        lines = read_bytes(file).splitlines()
    except (OSError, ImportError):
        return []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise DataError(Problem(f"{file}:{number}", "a JSON object", repr(line[:60])))
        events.append(event)
    return events


def decision_files(folder: Path) -> list[str]:
    """Returns the names of the files of decisions in a log, in the order of their decisions."""
    return sorted(name for name in names_in(folder) if _NAME.fullmatch(name))
