"""Events of any type a log's writer may choose: what each column takes, and the fault of what it does not."""

from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from oracles.events import make
from oracles.events import read as transitions

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.schema import TEXT_METADATA
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.rows.table import event_table
from reagent_lite.errors import DataError, Problem

FILE = InputFile(path="log.parquet", name="log.parquet", extension=".parquet", compression="", size=1, modified_ns=1)


def block(extra: dict[str, Any] | None = None, rows: int = 2, **columns: Any) -> Block:
    """Rows of "l" in states of one feature; other columns given as Arrow arrays replace or join these."""
    table = {
        "mdp_id": pa.array([f"e{row}" for row in range(rows)]),
        "sequence_number": pa.array(range(rows)),
        "state_features": pa.array([[(0, 1.0)]] * rows, pa.map_(pa.int64(), pa.float32())),
        "action": pa.array(["l"] * rows),
        "reward": pa.array([1.0] * rows),
        **(extra or {}),
        **columns,
    }
    return Block(file=FILE, file_number=0, table=pa.table(table), lines=np.arange(1, rows + 1))


def read(given: Block, *extra: str) -> tuple[pa.Table, list[str | None], dict[str, str]]:
    """The columns, what is wrong with each row, and the kinds of further columns."""
    table, faults, kinds = event_table(given, Contract(actions=(), events=True, extra=extra))
    wrong = {
        one.where.removeprefix("log.parquet:"): f"expected {one.expected}, got {one.got}" for one in faults.first()
    }
    return table, [wrong.get(str(line)) for line in given.lines], kinds


def column(name: str, array: pa.Array) -> tuple[list[Any], list[Any]]:
    """(values of the column, faults) of two rows that hold the array there."""
    table, faults, _ = read(block(**{name: array}))
    return table.column(name).to_pylist(), faults


@pytest.mark.parametrize("kind", [pa.uint64(), pa.int64(), pa.int8(), pa.uint8()])
def test_integers_name_episodes_by_their_digits(kind: pa.DataType) -> None:
    largest = {"uint64": 2**64 - 1, "int64": -(2**63), "int8": -128, "uint8": 255}[str(kind)]
    assert column("mdp_id", pa.array([largest, 7], kind)) == ([str(largest), "7"], [None, None])


def test_sequence_numbers_are_never_wrapped() -> None:
    _, faults = column("sequence_number", pa.array([2**62 - 1, 2**63], pa.uint64()))
    assert faults == [None, "expected an integer within ±2^62 in sequence_number, got 9223372036854775808"]


@pytest.mark.parametrize(
    ("array", "got"), [(pa.array([1.5, 2.0]), "1.5"), (pa.array([date(2026, 1, 31), None]), '"2026-01-31"')]
)
def test_what_names_no_episode(array: pa.Array, got: str) -> None:
    assert column("mdp_id", array)[1][0] == f"expected a string or an integer in mdp_id, got {got}"


MIDNIGHT = datetime(2026, 1, 31)
DAYS = {
    "text": pa.array(["2026-01-31", None]),
    "date32": pa.array([date(2026, 1, 31), None]),
    "date64": pa.array([date(2026, 1, 31), None], pa.date64()),
    "dictionary": pa.array(["2026-01-31", None]).dictionary_encode(),
    "seconds": pa.array([MIDNIGHT, None], pa.timestamp("s")),
    "nanoseconds": pa.array([MIDNIGHT, None], pa.timestamp("ns")),
    "utc": pa.array([MIDNIGHT.replace(tzinfo=UTC), None], pa.timestamp("us", "UTC")),
}


@pytest.mark.parametrize("array", DAYS.values(), ids=DAYS.keys())
def test_days_of_any_type(array: pa.Array) -> None:
    assert column("ds", array) == (["2026-01-31", None], [None, None])


def test_a_time_before_1970_is_of_its_own_day() -> None:
    """1969-12-31 00:00 is 86,400 s before zero."""
    assert column("ds", pa.array([-86400, 0], pa.timestamp("s")))[0] == ["1969-12-31", "1970-01-01"]


NO_DAYS = {
    "integer": (pa.array([20260115, None]), "20260115"),
    "float": (pa.array([1.5, None]), "1.5"),
    "an hour": (pa.array([datetime(2026, 1, 31, 5), None]), '"2026-01-31 05:00:00"'),
    "mixed": (pa.array(["20260115", '"2026-01-31"']), "20260115"),
}


@pytest.mark.parametrize("name", NO_DAYS)
def test_what_is_no_day(name: str) -> None:
    array, got = NO_DAYS[name]
    given = block(ds=array)
    if name == "mixed":  # JSON texts, as of a column with values of several types
        field = pa.field("ds", pa.string(), metadata=TEXT_METADATA)
        table = given.table.set_column(given.table.column_names.index("ds"), field, array)
        given = replace(given, table=table)
    assert read(given)[1] == [f"expected a date such as 2026-01-31 in ds, got {got}", None]


EXTRA = {
    "date": (pa.array([date(2026, 1, 31), None]), "2026-01-31"),
    "time": (pa.array([time(5, 30), None], pa.time32("s")), "05:30:00"),
    "timestamp": (pa.array([MIDNIGHT, None], pa.timestamp("s")), "2026-01-31 00:00:00"),
    "decimal": (pa.array([Decimal("1.50"), None]), "1.50"),
    "nested": (pa.array([{"day": date(2026, 1, 31), "price": Decimal("1.50")}, None]),
               '{"day": "2026-01-31", "price": "1.50"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
def test_further_columns_of_dates_and_decimals_are_text(name: str) -> None:
    array, text = EXTRA[name]
    table, faults, kinds = read(block({"x": array}), "x")
    assert table.column("x").to_pylist() == [text, None]
    assert faults == [None, None]
    assert kinds == {"x": "text"}


@pytest.mark.parametrize("array", [pa.array([b"a", None]), pa.array([[b"a"], []])], ids=["plain", "in a list"])
def test_further_columns_of_bytes_are_refused(array: pa.Array) -> None:
    assert read(block({"x": array}), "x")[1] == ["expected values that can be written as text in x, got bytes", None]


def test_a_log_of_dates_and_bytes_goes_through_a_timeline(tmp_path: Path) -> None:
    """The engine reads such a log row by row; the fault names file and line."""
    days = pa.array([date(2026, 1, 31), date(2026, 2, 1)])
    episode = pa.array(["a", "a"])
    pq.write_table(block(mdp_id=episode, ds=days).table, tmp_path / "log.parquet")
    make(tmp_path, tmp_path / "log.parquet", startDs="2026-01-31", endDs="2026-02-01")
    assert [row["ds"] for row in transitions(tmp_path / "train")] == ["2026-01-31"]
    raw = block({"raw": pa.array([b"a", b"b"])}, mdp_id=episode, ds=days)
    pq.write_table(raw.table, tmp_path / "raw.parquet")
    with pytest.raises(DataError, match=r"raw.parquet:1: expected values that can be written as text in raw"):
        make(tmp_path, tmp_path / "raw.parquet", extraFeatureColumns=["raw"])


def test_a_fault_says_its_rule_and_what_to_do() -> None:
    given = block(mdp_id=pa.array([None, "b"]), terminal=pa.array([None, True]), truncated=pa.array([0, 1]))
    _, faults, _ = event_table(given, Contract(actions=(), events=True))
    assert faults.rules().to_pylist() == ["mdp_id_absent", "terminal_and_truncated"]
    todo = "A true end is terminal; truncated says that a limit cut the episode before one"
    assert faults.first() == [
        Problem("log.parquet:1", "an mdp_id", "null", "It says which rows are one episode"),
        Problem("log.parquet:2", "terminal or truncated, not both", "both", todo),
    ]
