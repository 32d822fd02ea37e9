"""Events of any type a log's writer may choose: what each column takes, and the fault of what it does not."""

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.formats.schema import TEXT_METADATA
from reagent_lite.data.rows.row_rules import RowRules
from reagent_lite.data.rows.typed_columns import event_table
from reagent_lite.errors import Problem

FILE = InputFile(path="log.parquet", name="log.parquet", extension=".parquet", compression="", size=1, modified_ns=1)
MIDNIGHT, DAY = datetime(2026, 1, 31), date(2026, 1, 31)


def block(**columns: Any) -> Block:
    """Two rows of "l" in states of one feature; other columns given as Arrow arrays replace or join these."""
    arrays = {
        "mdp_id": pa.array(["e0", "e1"]),
        "sequence_number": pa.array([0, 1]),
        "state_features": pa.array([[(0, 1.0)]] * 2, pa.map_(pa.int64(), pa.float32())),
        "action": pa.array(["l", "l"]),
        "reward": pa.array([1.0, 1.0]),
        **columns,
    }
    fields = [
        pa.field(name, array.type, metadata=TEXT_METADATA if isinstance(array, pa.ChunkedArray) else None)
        for name, array in arrays.items()
    ]
    return Block(
        file=FILE, file_number=0, table=pa.table(list(arrays.values()), pa.schema(fields)), lines=np.arange(1, 3)
    )


def texts(*values: str) -> pa.ChunkedArray:
    """JSON texts, as of a column with values of several types."""
    return pa.chunked_array([values], pa.string())


ORDER = "an integer or a time such as 2026-01-31T10:00:00 in sequence_number"
RULES = RowRules(actions=(), events=True, extra=("x",))


@pytest.mark.parametrize(
    ("name", "array", "values"),
    [
        *(
            ("mdp_id", pa.array([largest, 7], kind), [str(largest), "7"])
            for kind, largest in [
                (pa.uint64(), 2**64 - 1),
                (pa.int64(), -(2**63)),
                (pa.int8(), -128),
                (pa.uint8(), 255),
            ]
        ),
        *(
            ("ds", array, ["2026-01-31", None])
            for array in [
                pa.array(["2026-01-31", None]),
                *(pa.array([DAY, None], kind) for kind in (pa.date32(), pa.date64())),
                *(pa.array([MIDNIGHT, None], pa.timestamp(unit)) for unit in ("s", "ns")),
                pa.array([MIDNIGHT.replace(tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            ]
        ),
        ("sequence_number", pa.array(["1970-01-01", "1969-12-31"]), [0, -86_400 * 10**6]),
        (
            "sequence_number",
            pa.array(["1970-01-01 01:00:01.5+01:00", "2400-01-01"]),
            [1_500_000, 13_569_465_600_000_000],
        ),
        ("sequence_number", pa.array([1_001, -1], pa.timestamp("ns")), [1, -1]),
        ("sequence_number", pa.array([7, -1], pa.timestamp("ms", "CET")), [7_000, -1_000]),
        ("sequence_number", pa.array([1, -719_162], pa.date32()), [86_400 * 10**6, -719_162 * 86_400 * 10**6]),
        ("sequence_number", texts("7", "8.0"), [7, 8]),
        ("ds", pa.array([-86400, 0], pa.timestamp("s")), ["1969-12-31", "1970-01-01"]),
        ("x", pa.array([DAY, None]), ["2026-01-31", None]),
        ("x", pa.array([time(5, 30), None], pa.time32("s")), ["05:30:00", None]),
        ("x", pa.array([MIDNIGHT, None], pa.timestamp("s")), ["2026-01-31 00:00:00", None]),
        ("x", pa.array([Decimal("1.50"), None]), ["1.50", None]),
        (
            "x",
            pa.array([{"day": DAY, "price": Decimal("1.50")}, None]),
            ['{"day": "2026-01-31", "price": "1.50"}', None],
        ),
    ],
    ids=str,
)
def test_what_a_column_takes(name: str, array: pa.Array, values: list[Any]) -> None:
    table, faults, kinds = event_table(block(**{"x": pa.nulls(2), name: array}), RULES)
    assert (table.column(name).to_pylist(), faults.count, kinds) == (values, 0, {"x": "text"} if name == "x" else {})


@pytest.mark.parametrize(("name", "array", "words"), [
    ("sequence_number", pa.array([2**63, 0], pa.uint64()),
     "an integer within ±2^62 in sequence_number, got 9223372036854775808"),
    ("sequence_number", pa.array(["Friday", "2026-01-01"]), f'{ORDER}, got "Friday"'),
    ("sequence_number", texts('"Friday"', "7"), f'{ORDER}, got "Friday"'),
    ("sequence_number", texts(str(2**64), '"x"'), f"an integer within ±2^62 in sequence_number, got {2**64}"),
    # microseconds in a column of seconds: of which no int64 holds the microseconds
    ("sequence_number", pa.array([1_769_853_600_000_000, 0], pa.timestamp("s")),
     f"{ORDER}, got <value out of range: 1769853600000000>"),
    ("sequence_number", pa.array([253_402_300_800, 0], pa.timestamp("s")), f"{ORDER}, got 10000-01-01 00:00:00"),
    ("sequence_number", pa.array([2**31 - 1, 0], pa.date32()), f"{ORDER}, got <value out of range: 2147483647>"),
    ("ds", pa.array([10**15, None], pa.timestamp("s")),
     "a date such as 2026-01-31 in ds, got <value out of range: 1000000000000000>"),
    ("mdp_id", pa.array([1.5, 2.0]), "a string or an integer in mdp_id, got 1.5"),
    ("mdp_id", pa.array(["", "u"]), "an mdp_id, got null"),
    ("mdp_id", texts('""', "7"), "an mdp_id, got null"),
    ("mdp_id", pa.array([DAY, None]), 'a string or an integer in mdp_id, got "2026-01-31"'),
    ("ds", pa.array([20260115, None]), "a date such as 2026-01-31 in ds, got 20260115"),
    ("ds", texts("20260115", '"2026-01-31"'), "a date such as 2026-01-31 in ds, got 20260115"),
    ("ds", pa.array([1.5, None]), "a date such as 2026-01-31 in ds, got 1.5"),
    ("ds", pa.array([datetime(2026, 1, 31, 5), None]), 'a date such as 2026-01-31 in ds, got "2026-01-31 05:00:00"'),
    ("ds", pa.array([0, None], pa.timestamp("s", "No/Land")), "a time zone that this machine knows in ds, got 1970"),
    ("x", pa.array([b"a", None]), "values that can be written as text in x, got \"b'a'\""),
    ("x", pa.array([[b"a"], []]), "values that can be written as text in x, got [\"b'a'\"]"),
    ("x", pa.array([[10**15], []], pa.list_(pa.duration("s"))),
     "values that can be written as text in x, got [1000000000000000]"),
    ("x", pa.array([0, None], pa.timestamp("s", "Nowhere/Land")), "values that can be written as text in x, got 1970"),
], ids=str)  # fmt: skip
def test_what_a_column_refuses(name: str, array: Any, words: str) -> None:
    _, faults, _ = event_table(block(**{"x": pa.nulls(2), name: array}), RULES)
    assert str(faults.by_kind().problems()[0]).startswith(f"log.parquet:1: expected {words}")


def test_flags_of_possible_actions_are_names_where_actions_are_known() -> None:
    flags = block(possible_actions=pa.array([[True, False], None]), possible_next_actions=pa.array([[0, 0], [1, 1]]))
    table, faults, _ = event_table(flags, RowRules(actions=("l", "r"), events=True))
    lists = [table.column(name).to_pylist() for name in ("possible_actions", "possible_next_actions")]
    assert (lists, faults.count) == ([[["l"], None], [[], ["l", "r"]]], 0)
    _, faults, _ = event_table(flags, RowRules(actions=(), events=True))
    assert faults.by_kind().problems()[0].expected == "a list of action names in possible_actions"


def test_a_fault_says_its_rule_and_what_to_do() -> None:
    _, faults, _ = event_table(
        block(mdp_id=pa.array([None, "b"]), terminal=pa.array([None, True]), truncated=pa.array([0, 1])),
        RowRules(actions=(), events=True),
    )
    assert faults.rules().to_pylist() == ["mdp_id_absent", "terminal_and_truncated"]
    assert faults.by_kind().problems() == [
        Problem("log.parquet:1", "an mdp_id", "null", "It says which rows are one episode"),
        Problem(
            "log.parquet:2",
            "terminal or truncated, not both",
            "both",
            "A true end is terminal; truncated says that a limit cut the episode before one",
        ),
    ]
