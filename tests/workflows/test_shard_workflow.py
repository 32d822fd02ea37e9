"""workflows.shard as users run it: one machine's part, written once, killed and run again, and every bad input."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.disks import small_disk
from helpers.interpreters import Interpreter, python_path
from helpers.logs import random_rows, write_json, write_lines
from helpers.runs import ROOT, Run, Runner, end, with_config
from helpers.shards import multiset, rows_of, table, write

from reagent_lite.cli import main_alone
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.tasks.shard import shard
from workflows.shard import COMMAND

ROWS = table([4, 3, 5, 2, 6, 4] * 10)
ALL = multiset(ROWS.to_pylist())


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    """run(config tree, *arguments): the whole command line, without a process of its own."""

    def start(tree: dict[str, Any], *arguments: str) -> Run:
        return Run(main_alone(COMMAND, shard, [*with_config(tmp_path, tree), *arguments]), *capsys.readouterr())

    return start


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """Ten files of whole episodes, 24 rows each."""
    for number in range(10):
        write(tmp_path / "in" / f"{number}.parquet", ROWS.slice(24 * number, 24))
    return {"data_path": str(tmp_path / "in"), "output_path": str(tmp_path / "disk" / "shard")}


def test_written_once_and_again_if_something_changes(run: Runner, tree: dict[str, Any], tmp_path: Path) -> None:
    local = tmp_path / "disk" / "shard"
    for node in range(3):
        part = run(tree | {"output_path": str(tmp_path / f"node{node}")}, "--num_nodes=3", f"--node_index={node}").ok
        assert (part.outcome["made"], part.outcome["rows"]) == (True, len(rows_of(tmp_path / f"node{node}")))
    assert multiset([row for node in range(3) for row in rows_of(tmp_path / f"node{node}")]) == ALL
    first = run(tree, "--num_nodes=3", "--node_index=2").ok.outcome
    assert first["path"] == str(local)
    assert not run(tree, "--num_nodes=3", "--node_index=2").ok.outcome["made"]
    write(tmp_path / "in" / "9.parquet", table([5, 5], first=500))
    assert run(tree, "--num_nodes=3", "--node_index=2").ok.outcome["made"]
    one = run(tree).ok.outcome
    assert (one["made"], one["rows"], len(rows_of(local))) == (True, 226, 226)
    (local / "own.txt").write_text("")
    other = run(tree, "--num_nodes=2", "--node_index=0")
    assert (other.code, "output_path: expected a folder that is not there" in other.err) == (2, True)
    assert "node_index: expected this machine's number, 0 to 1" in run(tree, "--num_nodes=2").err


def started(tree: dict[str, Any], config: Path, *arguments: str) -> Interpreter:
    command = ["-m", "workflows.shard", "--config", str(write_json(config, tree)), *arguments]
    return Interpreter(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path(ROOT)})


def killed_when(process: Interpreter, due: Callable[[], bool], seconds: float = 60) -> bool:
    """Kills as soon as something is so; returns whether it came to that."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and not due():
        assert time.monotonic() < deadline
    process.kill()
    return process.wait() == -signal.SIGKILL


def test_killed_while_writing(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, "mdp_id": str(number // 10)} for number, row in enumerate(random_rows(300) * 100)]
    tree["data_path"] = str(write_lines(tmp_path / "log.jsonl", rows))
    disk = tmp_path / "disk"
    assert killed_when(started(tree, tmp_path / "c.json"), lambda: any(disk.glob(".shard.*.tmp")))
    assert [path.name[:7] for path in disk.iterdir()] == [".shard."]
    assert end(started(tree, tmp_path / "c.json")).outcome["rows"] == 30_000
    assert [path.name for path in disk.iterdir()] == ["shard"]


def test_ids_that_float64_does_not_hold_beside_fractions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for name, value in (("a", 2**53 + 1), ("b", 0.5)):
        rows = {"mdp_id": [name, name], "sequence_number": [0, 1], "item": [value, value]}
        pq.write_table(pa.table(rows), tmp_path / f"log/{name}.parquet")
    with pytest.raises(DataError, match=r"column item: expected integers below 2\^53, .* Write ids as strings"):
        shard(ShardConfig(data_path=str(tmp_path / "log"), output_path=str(tmp_path / "shard"), num_nodes=1))


@pytest.mark.parametrize(("path", "message"), [
    ("{in}/", "output_path: expected a path apart from the input"),
    ("{in}/../in", "output_path: expected a path apart from the input"),
    ("{link}", "output_path: expected a path apart from the input"),
    ("{link}/x", "output_path: expected a path apart from the input"),
    ("{in}/..", "output_path: expected a path apart from the input"),
    ("{in}-shard", ""),
])  # fmt: skip
def test_overlapping_paths(tree: dict[str, Any], tmp_path: Path, path: str, message: str) -> None:
    """In any spelling; a path beside another, with a name that begins like it, is allowed."""
    (tmp_path / "link").symlink_to(tmp_path / "in")
    config = ShardConfig(**{**tree, "output_path": path.format_map({name: tmp_path / name for name in ("in", "link")})})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        shard(config)
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == [f"{number}.parquet" for number in range(10)]


@pytest.mark.parametrize("what", ["full", "readonly"])
def test_a_disk_that_cannot_be_written(run: Runner, tree: dict[str, Any], tmp_path: Path, what: str) -> None:
    write(tmp_path / "in" / "10.parquet", table([100] * 100, first=1000))
    with small_disk(tmp_path / "small", size="16k", files=40) as disk:
        if what == "readonly":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = run({**tree, "output_path": str(disk / "shard")})
        words = "No space left on device" if what == "full" else "Read-only file system"
        assert (done.code, words in done.err, "Traceback" in done.err) == (2, True, False), done.err
        assert list(disk.glob("*")) == []
