"""workflows.convert: the same rows in any format and back; what a format cannot hold is named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.disks import small_disk
from helpers.event_files import small_blocks
from helpers.logs import Row, write_lines
from helpers.runs import Runner
from pyarrow import feather

from reagent_lite.config import check
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.tasks.convert import Converted, convert

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".csv")

LEFT, RIGHT = {"1": 1.0, "2": -0.5}, {"1": 0.0, "2": 0.25}


NAMES: dict[str, list[Any]] = {"names": ["left", "right"], "indices": [0, 1], "maps": [LEFT, RIGHT]}


def events(kind: str) -> list[Row]:
    """60 episodes of 3 rows; features are the shortest texts of float32; what is absent in a row is absent."""
    rng = np.random.default_rng(0)
    left, right = NAMES[kind]
    rows = []
    for episode, step in itertools.product(range(60), range(3)):
        features = {"0": float(str(np.float32(rng.normal()))), "17": -0.0} if step else {"17": 1e-20}
        later = {"action_probability": 0.25, "metrics": {"clicks": 1.5, 'odd "name"': float(step)}}
        cut = {"terminal": False, "truncated": True, "next_state_features": {"0": 0.5, "17": 2.0}}
        last = cut if episode % 3 else {"terminal": True, "truncated": False}
        rows.append({
            "ds": "2026-01-01", "site": 'a "quoted", one\nin two lines', "mdp_id": f"{episode:03d}",
            "sequence_number": step * 3, "state_features": features, "action": left if episode % 2 else right,
            "reward": float(rng.normal()), "possible_actions": [1, 0] if kind == "indices" else [left, right],
            **(later if step else {}), **(last if step == 2 else {}),
        })  # fmt: skip
    return rows


def run_here(source: Path | str, target: Path, **options: Any) -> Converted:
    return convert(check(ConvertConfig, {"data_path": str(source), "output_path": str(target), **options}))


def present(file: Path) -> list[Row]:
    """Rows of JSON lines without what is null."""
    return [
        {name: value for name, value in json.loads(line).items() if value is not None}
        for line in file.read_text().splitlines()
    ]


@pytest.mark.parametrize("kind", ["names", "maps", "indices"])
@pytest.mark.parametrize(("source", "target"), list(zip(SUFFIXES, (*SUFFIXES[2:], *SUFFIXES[:2]), strict=True)))
def test_there_and_back(tmp_path: Path, source: str, target: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format is written from JSON lines, read into another, and that one read back."""
    small_blocks(monkeypatch, 2000, 9000)
    rows = events(kind)
    files = [write_lines(tmp_path / "log.jsonl", rows), *(tmp_path / f"{name}{end}" for name, end in
             (("first", source), ("second", target), ("back", ".jsonl")))]  # fmt: skip
    for origin, copy in itertools.pairwise(files):
        outcome = run_here(origin, copy)
        assert (outcome.rows, set(outcome.columns)) == (len(rows), {name for row in rows for name in row})
    if kind == "indices" and ".csv" in (source, target):
        rows = [row | {"action": str(row["action"])} for row in rows]
    assert present(files[-1]) == rows


def test_types_of_the_written_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One schema for the whole file, also where columns come late or are of the narrower type first."""
    rows: list[Row] = [{"state_features": {}, "action": None, "reward": 1, "possible_actions": []} for _ in range(40)]
    rows += [{"state_features": {"3": 1}, "action": LEFT, "reward": 0.5, "possible_actions": [LEFT], "n": 1}]
    small_blocks(monkeypatch, 500)
    run_here(write_lines(tmp_path / "log.jsonl", rows), tmp_path / "log.parquet")
    schema, maps = pq.read_schema(tmp_path / "log.parquet"), pa.map_(pa.int64(), pa.float32())
    assert {field.name: field.type for field in schema if field.name != "possible_actions"} == {
        "state_features": maps, "action": maps, "reward": pa.float64(), "n": pa.int64(),
    }  # fmt: skip
    assert pq.read_table(tmp_path / "log.parquet")["action"].to_pylist() == [None] * 40 + [[(1, 1.0), (2, -0.5)]]


def test_columns_that_no_log_has_stay_what_they_are(tmp_path: Path) -> None:
    table = pa.table({
        "state_features": pa.array([{"0": 1.0}, {"0": 2.0}]), "action": ["a", "b"], "reward": [1.0, 2.0],
        "when": pa.array([1, 2], pa.timestamp("s")), "nested": pa.array([{"x": [1, 2]}, None]), "count": [7, 8],
    })  # fmt: skip
    files = [tmp_path / name for name in ("log.parquet", "log.arrow", "again.parquet", "log.jsonl")]
    pq.write_table(table, files[0])
    for source, target in itertools.pairwise(files):
        run_here(source, target)
    others = ["when", "nested", "count"]
    assert pq.read_table(files[2]).select(others).to_pylist() == table.select(others).to_pylist()
    assert present(files[3])[0]["nested"] == {"x": [1, 2]}


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("logs", "log.parquet", r"b\.jsonl:1: .* in action, .* got int64"),
        ("lists", "log.parquet", r"a\.jsonl:1: .* in action, got \[1\]"),
        ("empty", "log.csv", r"column action: .* that CSV can hold"),
        ("brace", "log.csv", r"column action: .* that CSV can hold"),
        ("late.arrow", "out.jsonl", r"out\.jsonl: .* got Python int too large"),
        ("logs/a.jsonl", "logs/a.jsonl", "a path apart from the input"),
        ("logs", "logs/all.parquet", "a path apart from the input"),
        ("logs/a.jsonl", "folder.csv", "expected a file"),
    ],
)
def test_what_differs_or_cannot_be_held_is_refused(tmp_path: Path, source: str, target: str, words: str) -> None:
    """Kinds differ between files; CSV and JSON cannot hold each value; a target would hurt its source."""
    for name, action in (("logs/a", "left"), ("logs/b", 1), ("lists/a", [1]), ("empty/c", ""), ("brace/d", "{x")):
        write_lines(tmp_path / f"{name}.jsonl", [{"state_features": {}, "reward": 1.0, "action": action}])
    late = pa.table({"reward": [1.0], "seen": pa.array([10**15], pa.timestamp("s"))})  # after the year 9999
    feather.write_feather(late, tmp_path / "late.arrow", compression="uncompressed")
    (tmp_path / "folder.csv").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises((ConfigError, DataError), match=words):
        run_here(tmp_path / source, tmp_path / target)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    run_here(tmp_path / "logs" / "a.jsonl", tmp_path / "logs" / "c.parquet")  # a file next to its source is another


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet", ".arrow", ".csv"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    rows = [row | {"mdp_id": f"{copy}-{row['mdp_id']}"} for copy in range(15) for row in events("names")]
    with small_disk(tmp_path / "disk", size="16k", files=40) as disk:
        with pytest.raises(DataError, match="No space left"):
            run_here(write_lines(tmp_path / "log.jsonl", rows), disk / f"log{suffix}")
        assert list(disk.iterdir()) == []


def test_the_command_line(run: Runner, tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", events("indices"))
    done = run("convert", {"data_path": str(tmp_path / "log.jsonl"), "output_path": "out/log.csv"})
    assert done.ok.outcome["log"] == str(tmp_path / "out" / "log.csv")
    assert "actions are indices" in done.err
