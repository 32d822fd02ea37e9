"""Memory of building a copy: bounded by some numbers of 4 and 8 bytes a row, and independent of the parts."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.event_files import blocks_of
from helpers.events import NAMES, random_events, timeline_config
from helpers.logs import candidate_rows, write_lines

from reagent_lite.data.copy import event_log, lists, spool
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.spool import TextSpool
from reagent_lite.data.copy.spooled_log import SpooledLog
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.formats import format_table
from reagent_lite.data.logs import Log


def small_parts(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Has the arrays of a copy made of parts of so many rows."""
    for module, name in (
        (spool, "_AT_ONCE"), (spool, "_FEWEST_AT_ONCE"), (event_log, "_EVENTS_AT_ONCE"), (lists, "_SORTED_AT_ONCE"),
    ):  # fmt: skip
        patch.setattr(module, name, rows)


def write_log(file: Path, rows: int, kind: str) -> Path:
    number = np.arange(rows)
    values = pa.array((number % 1013).astype(np.float32))
    columns = {"state_features": pa.StructArray.from_arrays([values], ["age"]), "reward": number % 3}
    if kind != "alone":
        episodes = number if kind == "candidates" else number // 20
        columns |= {"mdp_id": pa.array([f"user {name * 7919 % rows}" for name in episodes.tolist()])}
        columns |= {"sequence_number": number % 20, "terminal": (number % 20 == 19) | (kind == "candidates")}
    if kind == "transitions":
        columns["next_state_features"] = pa.StructArray.from_arrays([values], ["age"])
    if kind == "candidates":
        items = pa.StructArray.from_arrays([pa.array(np.arange(2 * rows, dtype=np.float32))], ["price"])
        columns["possible_actions"] = pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), items)
        columns["action"] = items.take(pa.array(2 * number))
    else:
        columns["action"] = pa.array(np.where(number % 2, "a", "b"))
    pq.write_table(pa.table(columns), file)
    return file


@pytest.mark.parametrize("kind", ["events", "transitions", "alone", "candidates"])
def test_a_row_takes_at_most_40_bytes_once_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Numpy's peak from the last block on, of a log and of one with five times its rows. Before, 60 to 600 bytes."""
    small_parts(monkeypatch, 1024)
    monkeypatch.setattr(spool, "CHUNK_BYTES", 4096)
    peaks = []
    write = SpooledLog.write

    def measured(log: SpooledLog) -> None:  # type: ignore[type-arg]
        tracemalloc.start()
        write(log)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(SpooledLog, "write", measured)
    actions = None if kind == "candidates" else ("a", "b")
    for rows in (10_000, 50_000):
        log = write_log(tmp_path / f"{rows}.parquet", rows, kind)
        assert len(prepare_training_copy(Log(str(log), actions=actions))) == rows
    assert (peaks[1] - peaks[0]) / 40_000 <= 40


def arrays_of(copy: TrainingCopy) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in copy.folder.glob("*.npy")}


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("parametric", [False, True])
def test_the_arrays_do_not_depend_on_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, parametric: bool
) -> None:
    events = write_lines(tmp_path / "events.jsonl", random_events(parametric=parametric, episodes=25))
    transitions = write_lines(tmp_path / "rows.jsonl", candidate_rows(40))
    actions = None if parametric else NAMES
    query = {"query": {"actions": actions}} if actions else {}
    section = {"steps": 3, "gamma": 0.9, "outlierEpisodeLengthPercentile": 0.9}
    config = timeline_config(tmp_path, events, query, actionDiscrete=not parametric, **section)

    def arrays(folder: str) -> list[dict[str, bytes]]:
        directory = str(tmp_path / folder)
        copies = [prepare_training_copy(Log(str(events), actions=actions, timeline=config, directory=directory))]
        copies += [prepare_training_copy(Log(str(transitions), directory=directory))] if parametric else []
        return [arrays_of(copy) for copy in copies]

    whole = arrays("whole")
    small_parts(monkeypatch, rows)
    assert arrays("parts") == whole


def test_texts_are_those_that_were_added(tmp_path: Path) -> None:
    texts_of_log = TextSpool(tmp_path / "texts.spool")
    added = [pa.array(["a", "bc", ""]), pa.array(["x", "yé", "z"]).slice(1, 1), pa.array([], pa.string())]
    for texts in added:
        texts_of_log.append(texts)
    texts = texts_of_log.map_texts()
    texts_of_log.remove()
    assert (texts.to_pylist(), len(texts_of_log), list(tmp_path.iterdir())) == (["a", "bc", "", "yé"], 4, [])


MAP = pa.map_(pa.string(), pa.float64())
PAIRS = pa.list_(pa.struct({"key": pa.string(), "value": pa.float64()}))


@pytest.mark.parametrize("kind", [MAP, PAIRS, pa.list_(MAP), pa.large_list(PAIRS)], ids=str)
def test_rows_with_few_of_many_features_are_read_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    """100 rows of 100 features in all are a matrix of 10 000 values; 1 000 of them are 10 rows."""
    monkeypatch.setattr(format_table, "_MOST_MAPPED", 1000)
    is_map = kind in (MAP, PAIRS)
    maps = [[{"key": f"feature {number}", "value": 1.0}] for number in range(100)]
    array = pa.array([entries if is_map else [entries] for entries in maps], PAIRS if is_map else pa.list_(PAIRS))
    array = array if array.type == kind else converted(array, kind)
    name = "state_features" if is_map else "possible_actions"
    pq.write_table(pa.table({name: array, "reward": pa.array(range(100))}), tmp_path / "log.parquet")
    blocks = blocks_of(tmp_path / "log.parquet")
    assert [block.table.num_rows for block in blocks] == [10] * 10
    assert [line for block in blocks for line in block.lines.tolist()] == list(range(1, 101))
    assert [reward for block in blocks for reward in block.table["reward"].to_pylist()] == list(range(100))


MAPS = [{f"feature {number}": 1.0, "a": 2} for number in range(100)]
PAIR_TEXTS = [json.dumps([{"key": name, "value": value} for name, value in of_row.items()]) for of_row in MAPS]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("state_features", [json.dumps(of_row) for of_row in MAPS]),
        ("state_features", PAIR_TEXTS),
        ("action", [json.dumps(of_row) for of_row in MAPS]),
        ("possible_actions", [json.dumps([of_row]) for of_row in MAPS]),
    ],
    ids=["maps", "pairs", "actions", "lists"],
)
def test_maps_as_json_texts_are_read_in_small_parts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, texts: list[str]
) -> None:
    """100 rows of 101 or 102 keys: 1 020 values are 10 rows."""
    monkeypatch.setattr(format_table, "_MOST_MAPPED", 1020)
    pq.write_table(pa.table({name: texts, "reward": range(100)}), tmp_path / "log.parquet")
    assert [block.table.num_rows for block in blocks_of(tmp_path / "log.parquet")] == [10] * 10


def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same maps as another type."""
    return pa.array(
        [[[(pair["key"], pair["value"]) for pair in entries] for entries in row] if kind != MAP
         else [(pair["key"], pair["value"]) for pair in row] for row in array.to_pylist()]
        if pa.types.is_map(kind) or pa.types.is_map(kind.value_type) else array.to_pylist(), kind
    )  # fmt: skip
