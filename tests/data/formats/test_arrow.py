"""Arrow IPC: files and streams, every way they can be cut, and the types other writers choose."""

from __future__ import annotations

import io
import math
import multiprocessing
import random
import resource
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from helpers import logs
from helpers.event_files import blocks_of, lines_of, problems_of, rows_of, values_of
from helpers.event_files import data_of as data_of_rows
from helpers.shards import write as write_parquet
from helpers.transitions import check_arrays

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.formats import arrow
from reagent_lite.data.formats.schema import TEXT_METADATA, to_numpy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError, NoRowsError

TABLE = pa.table({
    "mdp_id": [f"e{number // 3}" for number in range(30)],
    "state_features": pa.array([{"0": number / 4} for number in range(30)]),
    "reward": [float(number) for number in range(30)],
    "price": list(range(30)),
})  # fmt: skip
MAKERS: list[Callable[..., Any]] = [pa.ipc.new_file, pa.ipc.new_stream]


def data_of(table: pa.Table, make: Callable[..., Any] = pa.ipc.new_file, rows: int = 8, **options: Any) -> bytes:
    stream = io.BytesIO()
    with make(stream, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return stream.getvalue()


def written(folder: Path, content: bytes | pa.Table, name: str = "x.arrow") -> Path:
    if name == "x.parquet" and isinstance(content, pa.Table):
        return write_parquet(folder / name, content)
    return logs.written(folder / name, content if isinstance(content, bytes) else data_of(content))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_lines_and_unknown_columns(
    tmp_path: Path, make: Callable[..., Any], compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 30 rows becomes blocks of at most 40 values."""
    file = written(tmp_path, data_of(TABLE, make, compression=compression, rows=30))
    assert (rows_of(file), len(blocks_of(file))) == ([row | {"price": None} for row in TABLE.to_pylist()], 1)
    monkeypatch.setattr(arrow, "BLOCK_VALUES", 40)
    blocks = blocks_of(file)
    assert len(blocks) > 3
    assert [row for block in blocks for row in block.table.to_pylist()] == TABLE.to_pylist()
    assert lines_of(blocks) == list(range(1, 31))


def test_parquet_rows_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """A page that says it has no values: Arrow ends the batches there without an error."""
    table = pa.table({"possible_actions": [["left", "right"]], "reward": [1.0]})
    file = tmp_path / "x.parquet"
    pa.parquet.write_table(table, file, use_dictionary=False)
    content = file.read_bytes()
    two_values = b",\x15\x04\x15"
    assert content.count(two_values) == 1
    file.write_bytes(content.replace(two_values, b",\x15\x00\x15"))
    (problem,) = problems_of(file)
    assert str(problem).endswith("1 row by its metadata, and 0 that can be read. Copy the file again")


def test_blocks_of_parquet_are_bounded_where_values_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 rows of 50 zeros each, which take few bytes in the file."""
    monkeypatch.setattr(arrow, "BLOCK_VALUES", 5_000)
    zeros = pa.array([[0.0] * 50] * 1000)
    blocks = blocks_of(write_parquet(tmp_path / "x.parquet", pa.table({"possible_actions": zeros}), group=1000))
    assert max(block.table.num_rows for block in blocks) <= 100
    assert (lines_of(blocks), values_of(blocks, "possible_actions")) == (list(range(1, 1001)), zeros.to_pylist())


@pytest.mark.parametrize("make", MAKERS)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Between two batches of a stream too, where the format itself would let it end."""
    data = data_of(TABLE, make)
    for end in (*range(1, len(data), 5 if len(data) % 5 else 7), len(data) - 8):
        with pytest.raises(DataError, match=r"x\.arrow: expected a complete"):
            rows_of(written(tmp_path, data[:end]))
    with pytest.raises(NoRowsError):
        rows_of(written(tmp_path, b""))


COUNT = 6
STATES = [[(0, math.nan), (3, float(number))] for number in range(COUNT)]
NESTED = pa.table({
    "mdp_id": pa.array([f"e{number // 2}" for number in range(COUNT)], pa.string_view()),
    "action": pa.array(["left", "right"] * 3).dictionary_encode(),
    "next_action": pa.array(["left", "right"] * 3, pa.large_string()),
    "possible_actions": pa.array([["left", "right"]] * COUNT, pa.list_view(pa.string_view())),
    "possible_next_actions": pa.array([[True, True]] * COUNT, pa.list_(pa.bool_(), 2)),
    "state_features": pa.array(STATES, pa.map_(pa.int64(), pa.float64())),
    "next_state_features": pa.array(STATES, pa.map_(pa.int32(), pa.float32())),
    "reward": pa.array(np.arange(COUNT), pa.float16()),
    "terminal": pa.array([False] * COUNT),
    "time_diff": pa.compute.run_end_encode(pa.array([1, 1, 1, 2, 2, 2])),
    "maps": pa.array([[[(0, 0.5), (3, 1.0)], []]] * COUNT, pa.list_(pa.map_(pa.int64(), pa.float64()))),
    "structs": pa.array([{"0": 1.0}] * COUNT),
    "lists": pa.array([[["a", None], []]] * COUNT, pa.large_list(pa.list_(pa.string()))),
})  # fmt: skip
"""Views as Polars writes them, dictionaries as pandas does, run-end encoding, large lists, maps, half floats."""


def read_damaged(folder: Path, count: int) -> None:
    """Reads a file of each kind with one bit changed, `count` times; what they raise has to be DataError."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))  # damaged lengths ask for any amount
    row = {"mdp_id": "a", "state_features": {"0": 1.0}, "action": "left", "reward": 1.0}
    for name, data in (
        ("file.arrow", data_of(NESTED, pa.ipc.new_file, rows=4)),
        ("stream.arrow", data_of(NESTED, pa.ipc.new_stream, rows=4)),
        ("x.parquet", data_of_rows([row] * 3, "map.parquet")),
    ):
        refused: list[str] = []
        for bit in random.Random(0).sample(range(8 * len(data)), count):
            damaged = (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")
            try:
                blocks_of(written(folder, damaged, name))
            except DataError as error:
                refused.append(str(error))
        assert count / 20 < len(refused) < count
        assert all(text.startswith(f"{folder}/{name}:") for text in refused)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_is_in_the_numbers(tmp_path: Path, count: int) -> None:
    """Metadata and offsets that lead outside the file's memory end no process: what is read has been validated."""
    process = multiprocessing.get_context("spawn").Process(target=read_damaged, args=(tmp_path, count))
    process.start()
    process.join(600)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.parquet", r"x\.parquet:2: expected values that the column's type allows in reward, got .*"),
        ("x.arrow", r"x\.arrow:2: expected values that the column's type allows in mdp_id, got .*"),
    ],
)
@pytest.mark.parametrize("microseconds", [-1, 86_400 * 10**6, 2**62])
def test_times_of_day_beyond_midnight_are_refused(tmp_path: Path, name: str, words: str, microseconds: int) -> None:
    """Python has no time of 2^62 microseconds."""
    times = pa.array([0, microseconds]).view(pa.time64("us"))
    table = pa.table({"reward": pa.StructArray.from_arrays([times, times], ["begin", "begin"]), "mdp_id": times})
    with pytest.raises(DataError, match=rf"{words}time64\[us\] {microseconds} is not within"):
        rows_of(written(tmp_path, table, name))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.arrow", b"FEA1" + bytes(40), "got Feather version 1. Write it again as version 2"),
        ("x.parquet", b"PAR1" + bytes(40), "expected a complete Parquet file, got one that ends early or is damaged"),
        ("x.feather", b"state_features,reward\n1,2\n", "expected Arrow IPC, as its name says, got text"),
        ("x.parquet", data_of(TABLE, pa.ipc.new_file), "got Arrow IPC. Give it the extension .arrow"),
        ("x.arrow.gz", b"", "expected an uncompressed Arrow IPC file, got one packed as .gz"),
        ("x.arrow", data_of(TABLE, pa.ipc.new_stream) * 2, "trailing data after the Arrow stream"),
    ],
)  # fmt: skip
def test_other_formats_are_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    assert words in str(problems_of(written(tmp_path, data, name))[0])


FLAGS = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8()))


@pytest.mark.parametrize(
    ("array", "kind", "values"),
    [
        (pa.array([bytes(15) + b"\1", None], pa.uuid()), pa.string(), ["00000000-0000-0000-0000-000000000001", None]),
        (FLAGS, pa.int8(), [1, 0]),
        (pa.array([date(2026, 1, 31), None]).dictionary_encode(), pa.date32(), [date(2026, 1, 31), None]),
        (pa.array([[1, 0], None], pa.list_(pa.int8(), 2)), pa.list_(pa.int8()), [[1, 0], None]),
        (pa.StructArray.from_arrays([pa.array([2.5, 1.5]).dictionary_encode(), FLAGS], ["0", "1"]),
         pa.struct({"0": pa.float64(), "1": pa.int8()}),
         [{"0": 2.5, "1": 1}, {"0": 1.5, "1": 0}]),
        (pa.array([[("0", 1)], []], pa.map_(pa.string_view(), pa.dictionary(pa.int8(), pa.int64()))),
         pa.map_(pa.large_string(), pa.int64()), [[("0", 1)], []]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)  # fmt: skip
def test_columns_have_plain_types(tmp_path: Path, array: pa.Array, kind: pa.DataType, values: list[Any]) -> None:
    (block,) = blocks_of(written(tmp_path, pa.table({"x": array})))
    assert (block.table.column("x").type, block.table.column("x").to_pylist()) == (kind, values)


def test_types_that_other_writers_choose(tmp_path: Path) -> None:
    copy = prepare_training_copy(
        Log(str(written(tmp_path, NESTED)), actions=("left", "right"), directory=str(tmp_path / "copy"))
    )
    check_arrays(
        copy, np.argsort(copy.origin_line), reward=[0, 1, 2, 3, 4, 5], action=[0, 1] * 3, time_diff=[1, 1, 1, 2, 2, 2],
        mask=[[1, 1]] * COUNT, next_mask=[[1, 1]] * COUNT, state=[[np.nan, number] for number in range(COUNT)],
    )  # fmt: skip
    assert copy.state_ids == (0, 3)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_metadata_that_claim_json_are_not_believed(tmp_path: Path, name: str) -> None:
    def claimed(array: pa.Array) -> Path:
        return written(
            tmp_path, pa.table([array], pa.schema([pa.field("reward", array.type, metadata=TEXT_METADATA)])), name
        )

    assert rows_of(claimed(pa.array([1, 2]))) == [{"reward": 1}, {"reward": 2}]
    assert rows_of(claimed(pa.array(["1", None, '"a"']))) == [{"reward": "1"}, {"reward": None}, {"reward": '"a"'}]
    for text in ("{bad", "[" * 200 + "]" * 200, '{"a": 1, "a": 2}', '"\\ud800"'):
        (problem,) = problems_of(claimed(pa.array(["1", None, text])))
        assert str(problem).startswith(
            f"{tmp_path}/{name}:3: expected JSON in reward, as the metadata of the column say"
        )


def test_a_buffer_may_end_with_a_part_of_a_value() -> None:
    array = pa.Array.from_buffers(pa.int32(), 2, [None, pa.py_buffer(np.arange(3, dtype=np.int32).tobytes()[:11])])
    assert (to_numpy(array).tolist(), to_numpy(array[1:]).tolist()) == ([0, 1], [1])


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_unions_are_refused(tmp_path: Path, kind: str) -> None:
    """Arrow has no kernel that reads them."""
    codes = pa.array([0, 1], pa.int8())
    parts = [pa.array([1.0, 2.0]), pa.array(["a", "b"])]
    offsets = pa.array([0, 0], pa.int32())
    union = (
        pa.UnionArray.from_sparse(codes, parts) if kind == "sparse" else pa.UnionArray.from_dense(codes, offsets, parts)
    )
    table = pa.table({"reward": pa.ListArray.from_arrays([0, 1, 2], union)})
    assert "a union of types in reward" in str(problems_of(written(tmp_path, table, "x.arrow"))[0])
