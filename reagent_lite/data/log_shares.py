"""The number of rows that each of several logs contributes to an input."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.frames import location
from reagent_lite.errors import named_counts, pluralize

Shares = list[tuple[str, int, float]]
"""(path, rows, share of all rows) of each of several logs; empty for a single log."""
_ROWS_OF_LOG = "rows_of_log_"
"""Prefix of the counts of rows by log; the number of the log follows."""


def shares_of(path: DataPath, rows: Mapping[int, int]) -> Shares:
    """Returns the shares of several logs; an empty list for a single log.

    Args:
        path: the paths of the logs.
        rows: {number of a log, from 1: its rows}.
    """
    if isinstance(path, str):
        return []
    total = sum(rows.values()) or 1
    return [(log, rows.get(number, 0), rows.get(number, 0) / total) for number, log in enumerate(logs_of(path), 1)]


def shares_of_counts(path: DataPath, counts: Mapping[str, int]) -> Shares:
    """Returns `shares_of` from the counts of a training copy."""
    numbers = range(1, len(logs_of(path)) + 1)
    return shares_of(path, {number: counts.get(f"{_ROWS_OF_LOG}{number}", 0) for number in numbers})


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Returns the counts of a training copy as text; episodes and ends are left out where each row is one."""
    rows = counts.get("rows", 0)
    if counts.get("rows_without_mdp_id") == counts.get("terminal_rows") == rows:
        counts = {
            key: n for key, n in counts.items() if key not in ("episodes", "terminal_rows", "rows_without_mdp_id")
        }
    return named_counts(counts)


def rows_by_log(files: Sequence[InputFile], origin_file: NDArray[np.int32]) -> dict[str, int]:
    """Returns the counts of rows by log, for a training copy; no counts for a single log.

    Args:
        files: the input files.
        origin_file: [R] number of the file that each row is from.
    """
    counts: Counter[str] = Counter()
    for file, rows in zip(files, np.bincount(origin_file, minlength=len(files)).tolist(), strict=True):
        if file.log:
            counts[f"{_ROWS_OF_LOG}{file.log}"] += rows
    return counts


def log_of_rows(counts: Mapping[str, int], origin_file: NDArray[np.int32], num_files: int) -> NDArray[np.int64]:
    """Returns [R] the number of each row's log, from 1, by the counts of a training copy of several logs.

    Args:
        counts: the copy's counts.
        origin_file: [R] number of the file that each row is from; files are in the order of the logs.
        num_files: number of files.
    """
    rows = [counts[name] for name in sorted(counts, key=_number_of) if name.startswith(_ROWS_OF_LOG)]
    last_rows = np.cumsum(np.bincount(origin_file, minlength=num_files))
    return 1 + np.searchsorted(np.cumsum(rows), last_rows)[origin_file]


def _number_of(name: str) -> int:
    number = name.removeprefix(_ROWS_OF_LOG)
    return int(number) if number.isdecimal() else 0


def shares_in_words(shares: Iterable[tuple[str, int, float]]) -> str:
    """Returns the rows of each log as text."""
    return "; ".join(f"{location(log)}: {pluralize(rows, 'row')}, {share:.1%}" for log, rows, share in shares)
