"""How many rows of an input each of several logs has."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.frames import location
from reagent_lite.errors import counted

Shares = list[tuple[str, int, float]]
"""(path, rows, share of all rows) of each of several logs; empty for one log."""
_ROWS_OF_LOG = "rows_of_log_"  # begins the name of a count; the number of the log follows


def shares_of(path: DataPath, rows: Mapping[int, int]) -> Shares:
    """Returns (path, rows, share of all rows) of each of several logs; nothing for one.

    Args:
        path: the paths of the logs.
        rows: by the number of the log.
    """
    if isinstance(path, str):
        return []
    total = sum(rows.values()) or 1
    return [(log, rows.get(number, 0), rows.get(number, 0) / total) for number, log in enumerate(logs_of(path), 1)]


def shares_of_counts(path: DataPath, counts: Mapping[str, int]) -> Shares:
    """Returns `shares_of` by the counts of a training copy."""
    numbers = range(1, len(logs_of(path)) + 1)
    return shares_of(path, {number: counts.get(f"{_ROWS_OF_LOG}{number}", 0) for number in numbers})


def rows_by_log(files: Sequence[InputFile], origin_file: NDArray[np.int32]) -> dict[str, int]:
    """Returns the counts of rows of each log by the number of the file that each row is from; none for one log."""
    counts: Counter[str] = Counter()
    for file, rows in zip(files, np.bincount(origin_file, minlength=len(files)).tolist(), strict=True):
        if file.log:
            counts[f"{_ROWS_OF_LOG}{file.log}"] += rows
    return counts


def shares_in_words(shares: Iterable[tuple[str, int, float]]) -> str:
    """Returns the rows of each log as text."""
    return "; ".join(f"{location(log)}: {counted(rows, 'row')}, {share:.1%}" for log, rows, share in shares)
