"""Discounts of time differences, and whether their unit can be that of the config.

A discount gamma ** (time_diff / unit) is meant to lie between 0 and 1. Times in microseconds with a unit of one second
make it 0 in every row, so that a policy learns nothing of later rewards; times in days with a unit in seconds make
it 1.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.formats.frames import location
from reagent_lite.data.log_shares import log_of_rows
from reagent_lite.errors import DataError, Problem

_NEGLIGIBLE = 1e-3  # a smaller discount leaves next to nothing of later rewards
_NEARLY_ALL = 0.95
_UNDISCOUNTED = 1e-6  # a discount that is closer to 1 counts as 1
_SAME_UNIT = 20.0  # largest ratio of two medians in one unit of time; a day has 24 hours, and other units differ more
_SECONDS = 1_000_000  # in microseconds, as which times count
_KEY = "rl.time_diff_unit_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDiscounts:
    """Discounts of the rows that do not end an episode.

    Attributes:
        gamma: discount per unit of time.
        unit_length: rl.time_diff_unit_length.
        rows: number of these rows.
        time_diff: their median time_diff.
        discount: their median discount, gamma ** (time_diff / unit_length).
        negligible: share of rows with a discount below 0.001.
        undiscounted: share of rows with a discount of 1 within 1e-6.
    """

    gamma: float
    unit_length: float
    rows: int
    time_diff: float
    discount: float
    negligible: float
    undiscounted: float

    @classmethod
    def of(cls, time_diff: NDArray[np.float32], *, unit_length: float, gamma: float) -> Self | None:
        """Returns the discounts of time differences above 0, [n]; None if there are none, or nothing is discounted."""
        if not len(time_diff) or not 0 < gamma < 1:
            return None
        discounts = gamma ** (time_diff.astype(np.float64) / unit_length)
        return cls(
            gamma=gamma,
            unit_length=unit_length,
            rows=len(time_diff),
            time_diff=float(np.median(time_diff)),
            discount=float(np.median(discounts)),
            negligible=float(np.mean(discounts < _NEGLIGIBLE)),
            undiscounted=float(np.mean(discounts > 1 - _UNDISCOUNTED)),
        )

    def __str__(self) -> str:
        unit = "" if self.unit_length == 1 else f" / {_plain(self.unit_length)}"
        return f"median discount of a step {self.discount:.3g}: {self.gamma:g} ** ({_plain(self.time_diff)}{unit})"

    def json(self) -> dict[str, float]:
        """Returns what a model keeps, to be compared with other logs."""
        return {"time_diff": self.time_diff, "unit_length": self.unit_length, "discount": self.discount}

    def problem(self, where: str, todo: str) -> Problem | None:
        """Returns the problem of a unit in which nearly all discounts are 0, or all are 1; else None."""
        if self.negligible >= _NEARLY_ALL and self.gamma >= _NEGLIGIBLE:
            share = f"a discount below {_NEGLIGIBLE:g} in {self.negligible:.0%} of {self.rows:,} rows"
        elif self.undiscounted == 1 and self.gamma <= 1 - _UNDISCOUNTED:
            share = f"a discount of 1 in all of {self.rows:,} rows"
        else:
            return None
        expected = f"time_diff in a unit of time by which rl.gamma {self.gamma:g} discounts"
        return Problem(where, expected, f"{share}; {self}", todo)

    def warning(self) -> str | None:
        """Returns a sentence if most, but not nearly all, discounts are next to 0; else None."""
        if self.negligible < 0.5:
            return None
        return (
            f"a discount below {_NEGLIGIBLE:g} in {self.negligible:.0%} of rows, so that what follows them does not "
            f"count: compare time_diff with {_KEY}; {self}"
        )

    def differs_from(self, kept: dict[str, Any] | None) -> str | None:
        """Returns a sentence if the unit seems to be another one than in the log of a model, whose `json` is `kept`."""
        if not kept or 1 / _SAME_UNIT < self.time_diff / kept["time_diff"] < _SAME_UNIT:
            return None
        return (
            f"the median time_diff is {_plain(self.time_diff)} here and was {_plain(kept['time_diff'])} in training. "
            f"If the unit of time is another one, estimates are of another discount; {self}"
        )


def suggested_unit(time_diff: float) -> str:
    """Returns what to do about the unit of a log with this median time difference."""
    return (
        f"Set {_KEY} to the length of a step in the unit of time_diff, such as {_plain(time_diff)}, its median here. "
        f"Times count in microseconds: {_SECONDS} for a second, {60 * _SECONDS} for a minute"
    )


def time_discounts(copy: TrainingCopy, *, unit_length: float, gamma: float) -> TimeDiscounts | None:
    """Returns the discounts of a training copy; None if no row goes on."""
    return TimeDiscounts.of(_differences(copy, np.asarray(copy.bootstrap) > 0), unit_length=unit_length, gamma=gamma)


def require_discounts(copy: TrainingCopy, path: DataPath, *, unit_length: float, gamma: float) -> None:
    """Checks the discounts of a log, or of each of several logs.

    Raises:
        DataError: nearly all discounts of a log are 0, or all are 1.
    """
    logs = logs_of(path)
    log_of_row = log_of_rows(copy.counts, copy.origin_file, len(copy.files)) if len(logs) > 1 else None
    for number, log in enumerate(logs, 1):
        rows = np.asarray(copy.bootstrap) > 0
        if log_of_row is not None:
            rows &= log_of_row == number
        discounts = TimeDiscounts.of(_differences(copy, rows), unit_length=unit_length, gamma=gamma)
        if discounts is None:
            continue
        todo = suggested_unit(discounts.time_diff)
        if log_of_row is not None:
            todo += "; all logs need one unit of time"
        if problem := discounts.problem(location(log), todo):
            raise DataError(problem)


def _plain(number: float) -> str:
    """Returns a number without an exponent if it is large."""
    return f"{float(f'{number:.6g}'):.0f}" if number >= 1000 else f"{number:g}"


def _differences(copy: TrainingCopy, rows: NDArray[np.bool_]) -> NDArray[np.float32]:
    differences = np.asarray(copy.time_diff)[rows]
    return differences[differences > 0]
