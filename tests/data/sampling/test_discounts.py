"""Discounts by time_diff: medians by hand, and units of time in which they are all 0 or all 1."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.logs import Row, write_lines

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.sampling.discounts import TimeDiscounts, require_discounts, time_discounts
from reagent_lite.errors import DataError

MINUTE = {"s": 60, "ms": 60_000, "us": 60_000_000, "ns": 60_000_000_000}


def events(at: list[Any]) -> list[Row]:
    """Two episodes with these sequence numbers."""
    return [
        {"mdp_id": name, "sequence_number": time, "state_features": {"x": 1.0}, "action": "a", "reward": 1.0,
         "action_probability": 0.5, "possible_actions": ["a", "b"], "terminal": time == at[-1]}
        for name in ("one", "two") for time in at
    ]  # fmt: skip


def copied(path: Any) -> TrainingCopy:
    return prepare_training_copy(Log(path, actions=("a", "b")))


def check(path: Any, **keys: float) -> TimeDiscounts | None:
    """Accepts or refuses the log with a discount of 0.99 per unit."""
    keys = {"unit_length": 1.0, "gamma": 0.99} | keys
    copy = copied(path)
    require_discounts(copy, path, **keys)  # type: ignore[arg-type]
    return time_discounts(copy, **keys)  # type: ignore[arg-type]


def test_medians_by_hand() -> None:
    differences = np.array([1, 2, 40, 2, 2], np.float32)
    discounts = TimeDiscounts.of(differences, unit_length=2.0, gamma=0.25)
    assert discounts is not None
    assert (discounts.rows, discounts.time_diff, discounts.discount) == (5, 2.0, 0.25)
    assert (discounts.negligible, discounts.undiscounted) == (0.2, 0.0)
    assert str(discounts) == "median discount of a step 0.25: 0.25 ** (2 / 2)"
    assert [TimeDiscounts.of(differences, unit_length=1.0, gamma=gamma) for gamma in (0.0, 1.0)] == [None, None]
    assert TimeDiscounts.of(differences[:0], unit_length=1.0, gamma=0.9) is None


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_integers_of_another_unit_are_refused(unit: str, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "log.jsonl", events([MINUTE[unit] * n for n in range(4)])))
    with pytest.raises(DataError, match=f"time_diff.*0.99 \\*\\* .*time_diff_unit_length.*such as {MINUTE[unit]}"):
        check(path)
    in_minutes = check(path, unit_length=MINUTE[unit])
    assert in_minutes is not None
    assert in_minutes.discount == pytest.approx(0.99)


def test_times_and_columns_of_time_are_refused(tmp_path: Path) -> None:
    texts = [f"2026-01-01T00:0{n}:00Z" for n in range(4)]
    with pytest.raises(DataError, match=r"such as 60000000.*60000000 for a minute"):
        check(str(write_lines(tmp_path / "log.jsonl", events(texts))))
    for unit in MINUTE:
        table = pa.Table.from_pylist(events([MINUTE[unit] * n for n in range(4)]))
        times = table["sequence_number"].cast(pa.timestamp(unit))
        table = table.set_column(table.column_names.index("sequence_number"), "sequence_number", times)
        pa.parquet.write_table(table, tmp_path / f"{unit}.parquet")
        with pytest.raises(DataError, match="such as 60000000"):
            check(str(tmp_path / f"{unit}.parquet"))


def test_a_unit_in_which_nothing_is_discounted_is_refused(tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "log.jsonl", events([0, 1, 2, 3])))
    with pytest.raises(DataError, match="a discount of 1 in all of 6 rows"):
        check(path, unit_length=86_400_000.0)
    assert check(path, gamma=1.0) is None


def test_each_of_several_logs_has_the_unit(tmp_path: Path) -> None:
    """An old log in seconds and one in microseconds, as a server numbers its decisions."""
    served = [{**row, "mdp_id": f"s{row['mdp_id']}"} for row in events([MINUTE["us"] * n for n in range(4)])]
    rows = {"old": events([0, 60, 120, 180]), "served": served}
    paths = tuple(str(write_lines(tmp_path / name / "log.jsonl", of_log)) for name, of_log in rows.items())
    with pytest.raises(DataError, match=r"served/log.jsonl: .*all logs need one unit of time"):
        check(paths)
    with pytest.raises(DataError, match=r"served/log.jsonl"):
        check(paths[::-1])
    mixed = tmp_path / "mixed"
    write_lines(mixed / "1.jsonl", rows["old"])
    write_lines(mixed / "2.jsonl", served)
    discounts = check(str(mixed))
    assert discounts is not None
    warning = discounts.warning()
    assert warning is not None
    assert "below 0.001 in 50% of rows" in warning


@pytest.mark.parametrize(("kept", "differs"), [(60.0, False), (5.0, False), (1.0, True), (60_000.0, True)])
def test_a_log_in_another_unit_than_that_of_training(kept: float, differs: bool) -> None:
    discounts = TimeDiscounts.of(np.full(3, 60, np.float32), unit_length=1.0, gamma=0.99)
    assert discounts is not None
    sentence = discounts.differs_from({"time_diff": kept})
    assert (sentence is not None and "the median time_diff is 60 here" in sentence) == differs
    assert discounts.differs_from(None) is None
