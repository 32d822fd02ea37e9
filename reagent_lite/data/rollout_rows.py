"""Rows of a rollout: decisions of a served log that say which of two policies made them.

| column | meaning |
|---|---|
| rollout | id of the rollout; a log without this column is one rollout |
| policy | "current" or "new": the policy that has the unit, an episode or a single decision; null: not in a rollout |
| share | probability with which the new policy was given the unit, when it began |
| probability_current, probability_new | both policies' probabilities of the action |
| unit_step | number of the unit's decisions before; with it, rows of ended units are known without their names |
| decided | time of the decision, microseconds since 1970 or a timestamp |

The other columns are the standard ones: mdp_id, reward, metrics, terminal, truncated, action_probability.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.console import progress
from reagent_lite.data.formats.blocks import Block, InputFile, Show
from reagent_lite.data.formats.format_table import read_blocks, readers_of
from reagent_lite.data.formats.schema import valid_rows
from reagent_lite.data.rows.block_columns import column_of, flags, integers, numbers, sequence_numbers, texts
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.maps import metrics
from reagent_lite.errors import DataError, Problem

Floats = NDArray[np.float64]
POLICIES: Final = ("current", "new")
ROLLOUT_COLUMNS: Final = (
    "rollout",
    "policy",
    "share",
    "probability_current",
    "probability_new",
    "unit_step",
    "decided",
)
"""Columns that a rollout adds to a log; other readers ignore them."""
_COLUMNS = (*ROLLOUT_COLUMNS, "mdp_id", "reward", "metrics", "terminal", "truncated", "action_probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRows:
    """N rows of a rollout in the order of the log.

    Attributes:
        where: location of the first row.
        rollout: [N] id of the rollout; "" without one.
        unit: [N] mdp_id; None for a decision that is an episode of its own.
        is_new: [N] whether the new policy has the unit.
        share, current, new: [N] share of the unit, and both policies' probabilities of the action.
        step: [N] number of the unit's rows before; None if the log does not have them.
        decided: [N] microseconds since 1970; None if the log does not have them.
        ends: [N] whether the row ends its unit.
        outcomes: [N, 1 + M] reward and metrics; NaN if absent.
        propensity: [N] propensity of the action in the log; NaN if absent.
    """

    where: str
    rollout: Sequence[str]
    unit: Sequence[str | None]
    is_new: NDArray[np.bool_]
    share: Floats
    current: Floats
    new: Floats
    step: NDArray[np.int64] | None
    decided: NDArray[np.int64] | None
    ends: NDArray[np.bool_]
    outcomes: Floats
    propensity: Floats

    def of(self, rollout: str) -> RolloutRows:
        """Returns the rows of one rollout."""
        rows = [number for number, name in enumerate(self.rollout) if name == rollout]
        parts: dict[str, Any] = {
            name: [values[row] for row in rows] if isinstance(values, list) else values[rows]
            for name, values in ((name, getattr(self, name)) for name in self.__slots__ if name != "where")
            if values is not None
        }
        return replace(self, **parts)


def rollout_rows(files: Sequence[InputFile], metric_names: Sequence[str]) -> Generator[RolloutRows]:
    """Yields the rows of rollouts in the order of the log.

    Args:
        files: the files of the log.
        metric_names: metrics to read.

    Raises:
        DataError: a row of a rollout has faults, with file and line; no row is one of a rollout.
    """
    has_rows = False
    with progress("reading the rollout", "bytes") as show, closing(_blocks(files, metric_names, show)) as blocks:
        for rows in blocks:
            has_rows = True
            yield rows
    if not has_rows:
        todo = "Serve with a section `rollout`, or give the log of a server that did"
        got = "no row with a policy"
        raise DataError(Problem(files[0].path, f"rows with columns {', '.join(ROLLOUT_COLUMNS[1:5])}", got, todo))


def rows_in(file: InputFile, metric_names: Sequence[str], rollout: str) -> list[RolloutRows]:
    """Returns the rows of one rollout in a file; see `rollout_rows`."""
    rows = [block.of(rollout) for block in _blocks([file], metric_names)]
    return [block for block in rows if block.unit]


def _blocks(
    files: Sequence[InputFile], metric_names: Sequence[str], show: Show | None = None
) -> Generator[RolloutRows]:
    blocks = read_blocks(tuple(files), lambda block: _rows(block, metric_names), show, readers_of(_COLUMNS))
    with closing(blocks):
        yield from (rows for rows in blocks if rows is not None)


def _rows(block: Block, metric_names: Sequence[str]) -> RolloutRows | None:
    faults = Faults(block)
    policy = texts(column_of(block, "policy"), faults, integers_too=False)
    chosen = valid_rows(policy)
    if not chosen.any():
        return None
    names = np.array(policy.to_pylist(), object)
    faults.add(chosen & ~np.isin(names, POLICIES), f"policy {' or '.join(POLICIES)}", lambda row: names[row])
    share, current, new, reward, propensity = (
        numbers(column_of(block, name), faults)
        for name in ("share", "probability_current", "probability_new", "reward", "action_probability")
    )
    is_new = names == "new"
    for name, values, valid, expected in (
        ("share", share, (share > 0) & (share < 1), "above 0 and below 1"),
        ("probability_current", current, (current >= 0) & (current <= 1), "from 0 to 1"),
        ("probability_new", new, (new >= 0) & (new <= 1), "from 0 to 1"),
        ("the policy's probability", np.where(is_new, new, current), np.where(is_new, new, current) > 0, "above 0"),
        ("reward", reward, ~np.isinf(reward), "that is finite"),
    ):
        faults.add(chosen & ~valid, f"{name} {expected}", lambda row, values=values: values[row])  # type: ignore[misc]
    measured = metrics(column_of(block, "metrics"), faults)
    step, has_step = integers(column_of(block, "unit_step"), faults)
    faults.add(chosen & has_step & (step < 0), "unit_step 0 or more", lambda row: step[row])
    decided, has_time = sequence_numbers(column_of(block, "decided"), faults)
    unit_column = column_of(block, "mdp_id")
    unit = texts(unit_column, faults)
    ends = (flags(column_of(block, "terminal"), faults) == 1) | (flags(column_of(block, "truncated"), faults) == 1)
    faults.by_kind().require_none()
    outcomes = np.full((len(chosen), 1 + len(metric_names)), np.nan)
    outcomes[:, 0] = reward
    for number, name in enumerate(metric_names, 1):
        if name in measured.names:
            outcomes[:, number] = measured.values[:, measured.names.index(name)]
    rows = np.flatnonzero(chosen)
    return RolloutRows(
        where=block.where(int(rows[0])),
        rollout=_strings(texts(column_of(block, "rollout"), faults), rows, ""),
        unit=_strings(unit, rows, None),
        is_new=is_new[rows],
        share=share[rows],
        current=current[rows],
        new=new[rows],
        step=step[rows] if has_step[rows].all() else None,
        decided=decided[rows] if has_time[rows].all() else None,
        ends=ends[rows],
        outcomes=outcomes[rows],
        propensity=propensity[rows],
    )


def _strings(array: pa.Array, rows: NDArray[np.int64], absent: Any) -> list[Any]:
    return [absent if text is None else text for text in array.take(pa.array(rows)).to_pylist()]
