"""Arrow IPC: files and streams, every way they can be cut, and the types other writers choose."""

from __future__ import annotations

import io
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.data.formats import arrow
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import list_input
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks, read_tables
from reagent_lite.errors import DataError, NoRowsError

TABLE = pa.table({
    "mdp_id": [f"e{number // 3}" for number in range(30)],
    "state_features": pa.array([{"0": number / 4} for number in range(30)]),
    "reward": [float(number) for number in range(30)],
    "price": list(range(30)),
})  # fmt: skip
MAKERS: list[Callable[..., Any]] = [pa.ipc.new_file, pa.ipc.new_stream]


def data_of(table: pa.Table, make: Callable[..., Any], rows: int = 8, **options: Any) -> bytes:
    stream = io.BytesIO()
    with make(stream, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return stream.getvalue()


def written(tmp_path: Path, data: bytes, name: str = "x.arrow") -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [row for table in read_tables(str(file)) for row in table.to_pylist()]


def blocks_of(file: Path) -> list[Block]:
    return list(read_blocks(list_input(str(file), (".arrow",)), lambda one: one, [Position()], None, ALL_COLUMNS))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_lines_and_unknown_columns(tmp_path: Path, make: Callable[..., Any], compression: str | None) -> None:
    file = written(tmp_path, data_of(TABLE, make, compression=compression))
    assert rows_of(file) == [row | {"price": None} for row in TABLE.to_pylist()]
    blocks = blocks_of(file)
    assert [row for block in blocks for row in block.table.to_pylist()] == TABLE.to_pylist()
    assert [int(line) for block in blocks for line in block.lines] == list(range(1, 31))


@pytest.mark.parametrize("make", MAKERS)
def test_a_large_batch_becomes_many_blocks(
    tmp_path: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "BLOCK_VALUES", 40)
    blocks = blocks_of(written(tmp_path, data_of(TABLE, make, rows=30)))
    assert len(blocks) > 3
    assert [row for block in blocks for row in block.table.to_pylist()] == TABLE.to_pylist()
    assert [int(line) for block in blocks for line in block.lines] == list(range(1, 31))


@pytest.mark.parametrize("make", MAKERS)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Between two batches of a stream too, where the format itself would let it end."""
    data = data_of(TABLE, make)
    for end in range(1, len(data), 5 if len(data) % 5 else 7):
        with pytest.raises(DataError, match=r"x\.arrow: expected a complete Arrow IPC file"):
            rows_of(written(tmp_path, data[:end]))
    with pytest.raises(DataError, match="a complete Arrow IPC file"):
        rows_of(written(tmp_path, data[:-8]))
    with pytest.raises(NoRowsError):
        rows_of(written(tmp_path, b""))


NESTED = pa.table({
    "mdp_id": pa.array([f"e{number}" for number in range(6)], pa.string_view()),
    "action": pa.array(["left", "right"] * 3).dictionary_encode(),
    "possible_actions": pa.array([["left", "right"]] * 6, pa.list_view(pa.string_view())),
    "possible_next_actions": pa.array([["left", "right"]] * 6, pa.large_list(pa.large_string())),
    "maps": pa.array([[[(0, 0.5), (3, 1.0)], []]] * 6, pa.list_(pa.map_(pa.int64(), pa.float64()))),
    "state_features": pa.array([{"0": 1.0}] * 6),
    "lists": pa.array([[["a", None], []]] * 6),
    "time_diff": pa.compute.run_end_encode(pa.array([1, 1, 1, 2, 2, 2])),
})  # fmt: skip


def read_damaged(folder: Path, number: int) -> None:
    """Reads a file with one byte changed, 400 times; what it says has to be DataError."""
    data, rng = data_of(NESTED, MAKERS[number], rows=4), np.random.default_rng(0)
    told = []
    for place in rng.integers(8, len(data) - 8, 400).tolist():
        damaged = bytearray(data)
        damaged[place] ^= int(rng.integers(1, 256))
        try:
            blocks_of(written(folder, bytes(damaged)))
        except DataError as error:
            told.append(str(error))
    assert len(told) > 20
    assert all(text.startswith(f"{folder}/x.arrow: expected ") for text in told)


@pytest.mark.parametrize("number", [0, 1])
def test_damage_is_told_or_is_in_the_numbers(tmp_path: Path, number: int) -> None:
    """Offsets that lead outside the file's memory end no process: what is read has been validated."""
    process = multiprocessing.get_context("spawn").Process(target=read_damaged, args=(tmp_path, number))
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.arrow", b"FEA1" + bytes(40), "got Feather version 1. Write it again as version 2"),
        ("x.feather", b"state_features,reward\n1,2\n", "got one that ends early or is damaged"),
        ("x.arrow.gz", b"", "expected an uncompressed Arrow IPC file, got one packed as .gz"),
        ("x.arrow", data_of(TABLE, pa.ipc.new_stream) * 2, "another stream, or other data, follows its end"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(written(tmp_path, data, name))
    assert words in str(caught.value)


def test_types_that_other_writers_choose(tmp_path: Path) -> None:
    """Views as Polars writes them, dictionaries as pandas does, run-end encoding, large lists, maps, half floats."""
    num = 6
    strings = [f"e{number // 2}" for number in range(num)]
    actions = ["left", "right"] * 3
    views = pa.array([["left", "right"]] * num, pa.list_view(pa.string_view()))
    states = [[(0, math.nan), (3, float(number))] for number in range(num)]
    table = pa.table({
        "mdp_id": pa.array(strings, pa.string_view()),
        "action": pa.array(actions).dictionary_encode(),
        "next_action": pa.array(actions, pa.large_string()),
        "possible_actions": views,
        "possible_next_actions": pa.array([[True, True]] * num, pa.list_(pa.bool_(), 2)),
        "state_features": pa.array(states, pa.map_(pa.int64(), pa.float64())),
        "next_state_features": pa.array(states, pa.map_(pa.int32(), pa.float32())),
        "reward": pa.array(np.arange(num), pa.float16()),
        "terminal": pa.array([False] * num),
        "time_diff": pa.compute.run_end_encode(pa.array([1, 1, 1, 2, 2, 2])),
    })  # fmt: skip
    file = written(tmp_path, data_of(table, pa.ipc.new_file))
    copy = prepare_training_copy(str(file), actions=("left", "right"), directory=str(tmp_path / "copy"))
    order = np.array(copy.origin_line) - 1
    np.testing.assert_array_equal(copy.reward, np.arange(num)[order])
    np.testing.assert_array_equal(copy.action, np.array([0, 1] * 3)[order])
    np.testing.assert_array_equal(copy.time_diff, np.array([1, 1, 1, 2, 2, 2])[order])
    np.testing.assert_array_equal(np.array(copy.state)[:num, 1], np.arange(num)[order])
    assert np.isnan(np.array(copy.state)[:num, 0]).all()
    assert copy.state_ids == (0, 3)
    assert copy.mask.tolist() == copy.next_mask.tolist() == [[1, 1]] * num
