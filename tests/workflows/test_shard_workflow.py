"""workflows.shard as users run it: made once, fetched by each, killed and run again, and every bad input."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from oracles.disks import small_disk
from oracles.interpreters import Interpreter, python_path
from oracles.logs import random_rows, write_json, write_lines
from oracles.runs import ROOT, Run, Runner, end, with_config
from oracles.shards import multiset, rows_of, stage, table, write
from oracles.waiting import wait_until

from reagent_lite.cli import main_alone
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.shards import sharing
from reagent_lite.data.shards.sharing import fetch, share_shards
from reagent_lite.data.stage_folder import data_files
from reagent_lite.errors import ConfigError, DataError
from workflows.shard import COMMAND

ROWS = table([4, 3, 5, 2, 6, 4] * 10)
ALL = multiset(ROWS.to_pylist())


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    """run(config tree, *arguments): the whole command line, without a process of its own."""

    def start(tree: dict[str, Any], *arguments: str) -> Run:
        return Run(main_alone(COMMAND, share_shards, [*with_config(tmp_path, tree), *arguments]), *capsys.readouterr())

    return start


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """Ten files of whole episodes, 24 rows each; two machines."""
    for number in range(10):
        write(tmp_path / "in" / f"{number}.parquet", ROWS.slice(24 * number, 24))
    return {
        "training_data_path": str(tmp_path / "in"),
        "shards_path": str(tmp_path / "share"),
        "local_path": str(tmp_path / "disk" / "shard"),
        "num_nodes": 2,
    }


def started(tree: dict[str, Any], config: Path, *arguments: str) -> Interpreter:
    command = ["-m", "workflows.shard", "--config", str(write_json(config, tree)), *arguments]
    return Interpreter(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path(ROOT)})


def test_made_fetched_and_made_again_only_if_something_changes(
    run: Runner, tree: dict[str, Any], tmp_path: Path
) -> None:
    made = run(tree, "--num_nodes", "3").ok
    assert (made.outcome["made"], made.outcome["local"], sum(made.outcome["rows"])) == (True, None, 240)
    for node in range(3):
        tree["local_path"] = str(tmp_path / f"node{node}")
        assert not run(tree, "--num_nodes=3", f"--node_index={node}").outcome["made"]
    assert multiset([row for node in range(3) for row in rows_of(tmp_path / f"node{node}")]) == ALL
    again = run(tree, "--num_nodes=3", "--node_index=2")
    assert (again.outcome["made"], again.outcome["fetched"]) == (False, 0)
    write(tmp_path / "in" / "9.parquet", table([5, 5], first=500))
    other = run(tree, "--num_nodes=3", "--node_index=0")
    assert ("made again: " in made.err, "made again: " in other.err) == (False, True)
    assert len(rows_of(Path(tree["local_path"]))) == other.outcome["rows"][0]
    assert "for layout shards, num_nodes 3, seed 0" in run(tree, "--num_nodes=5").err


def test_others_wait_for_machine_0(tree: dict[str, Any], tmp_path: Path) -> None:
    """Two processes on one machine fetch to one place as well: one of them fetches."""
    waiting = [
        started({**tree, "training_data_path": "/not/here"}, tmp_path / f"c{number}.json", "--node_index", "1")
        for number in range(2)
    ]
    wait_until(lambda: all("there is no shards.json yet" in process.said for process in waiting))
    assert all(process.poll() is None for process in waiting)
    first = started({**tree, "local_path": str(tmp_path / "disk0")}, tmp_path / "c.json", "--node_index=0")
    results = [end(process) for process in (first, *waiting)]
    assert [done.code for done in results] == [0, 0, 0], results
    none, some = sorted(done.outcome["fetched"] for done in results[1:])
    assert none == 0 < some
    assert multiset(rows_of(tmp_path / "disk0") + rows_of(tmp_path / "disk" / "shard")) == ALL


def killed_when(process: Interpreter, due: Callable[[], bool], seconds: float = 60) -> bool:
    """Kills as soon as something is so; returns whether it came to that."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and not due():
        assert time.monotonic() < deadline
    process.kill()
    return process.wait() == -signal.SIGKILL


def test_killed_while_making(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, "mdp_id": str(number // 10)} for number, row in enumerate(random_rows(300) * 100)]
    tree["training_data_path"] = str(write_lines(tmp_path / "log.jsonl", rows))  # dealt row by row, for a second or two
    share = tmp_path / "share"
    assert killed_when(started(tree, tmp_path / "c.json"), lambda: any(share.glob(".shards.*.tmp/shard-*/part-*")))
    assert [path.name[:8] for path in share.iterdir()] == [".shards."]
    late = end(started({**tree, "wait_seconds": 0.5}, tmp_path / "late.json", "--node_index=1"))
    assert (late.code, "within 0.5 s" in late.err) == (2, True)  # nothing there looks whole
    assert sum(end(started(tree, tmp_path / "c.json")).outcome["rows"]) == 30_000
    assert [path.name for path in share.iterdir()] == ["shards"]


def test_killed_while_fetching(tree: dict[str, Any], tmp_path: Path) -> None:
    for number in range(40):  # some 20 MB in files of half a megabyte
        write(tmp_path / "in" / f"{number}.parquet", table([100] * 100, first=1000 * number), group=5000)
    stage(tmp_path / "in")
    tree["num_nodes"] = 1
    share_shards(ShardConfig(**tree))
    target = tmp_path / "disk" / "shard"
    process = started(tree, tmp_path / "c.json", "--node_index=0")
    assert killed_when(process, lambda: len(list(target.glob("part-*"))) >= 3)
    with pytest.raises(DataError, match="no such file"):
        data_files(str(target))  # readers refuse what is there
    complete = len([file for file in target.iterdir() if file.name[0] != "."])
    assert 3 <= complete < 41
    done = end(started(tree, tmp_path / "c.json", "--node_index=0"))
    assert done.outcome["fetched"] == 41 - complete  # 40 files and the manifest


@pytest.mark.parametrize(("key", "path", "message"), [
    ("shards_path", "{in}/", "shards_path: .* than training_data_path"),
    ("shards_path", "{in}/../in", "shards_path: .* than training_data_path"),
    ("shards_path", "file://{in}", "shards_path: .* than training_data_path"),
    ("shards_path", "{link}", "shards_path: .* than training_data_path"),
    ("shards_path", "{in}/shards", "shards_path: .* outside training_data_path"),
    ("local_path", "{link}/x", "local_path: .* outside training_data_path"),
    ("local_path", "{share}/x", "local_path: .* outside shards_path"),
    ("shards_path", "{in}-shards", ""),
])  # fmt: skip
def test_places_in_each_others_way(tree: dict[str, Any], tmp_path: Path, key: str, path: str, message: str) -> None:
    """In any spelling; a path beside another, with a name that begins like it, is allowed."""
    (tmp_path / "link").symlink_to(tmp_path / "in")
    config = ShardConfig(**{**tree, key: path.format_map({name: tmp_path / name for name in ("in", "link", "share")})})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        share_shards(config)
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == [f"{number}.parquet" for number in range(10)]


def test_a_fetch_begins_anew_where_shards_are_made_again_meanwhile(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine 1 does not see the input, which changes after it has read shards.json."""
    config = ShardConfig(**tree)
    first = share_shards(config)
    fetch_shard = sharing.fetch_shard

    def late(*given: Any) -> tuple[str, ...]:
        write(tmp_path / "in" / "10.parquet", table([5, 5], first=500))
        share_shards(config)
        return fetch_shard(*given)

    monkeypatch.setattr(sharing, "fetch_shard", late)
    done = share_shards(ShardConfig(**{**tree, "training_data_path": "/not/here", "node_index": 1}))
    assert sum(done.rows) == sum(first.rows) + 10
    assert len(rows_of(Path(tree["local_path"]))) == done.rows[1]


def test_the_generation_that_machine_0_made(tree: dict[str, Any], tmp_path: Path) -> None:
    """The input, here rows of its own, is not read; another generation than the given one is refused."""
    made = share_shards(ShardConfig(**tree))
    write(tmp_path / "other" / "0.parquet", table([3]))
    other = {**tree, "training_data_path": str(tmp_path / "other"), "node_index": 1, "wait_seconds": 0.5}
    fetched = fetch(ShardConfig(**other), made.generation)
    assert (fetched.generation, len(rows_of(Path(fetched.local)))) == (made.generation, made.rows[1])
    with pytest.raises(DataError, match=f"{made.generation} is there, .* 0000"):
        fetch(ShardConfig(**other), "0000")


@pytest.mark.parametrize("what", ["full", "readonly"])
def test_a_share_that_takes_nothing(run: Runner, tree: dict[str, Any], tmp_path: Path, what: str) -> None:
    with small_disk(tmp_path / "small", size="16k", files=40) as disk:
        if what == "readonly":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = run({**tree, "shards_path": str(disk / "shards")})
        words = "No space left on device" if what == "full" else "Read-only file system"
        assert (done.code, words in done.err, "Traceback" in done.err) == (2, True, False), done.err
        assert list(disk.glob("shards/*")) == []
