"""This machine and a real local Spark make the same transitions, counts and reports of the same events."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import events as events_oracle
from helpers.event_files import write_events
from helpers.events import NAMES, random_events
from helpers.interpreters import Interpreter
from helpers.logs import Row
from helpers.ranks import free_port
from helpers.runs import ROOT
from helpers.waiting import wait_until

from reagent_lite.categories import code_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.errors import ConfigError, DataError

ENGINES = ("local", "spark")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, and there is no command java")


def config_of(engine: str, query: Row | None) -> Row:
    return {
        "engine": engine,
        "query": query or {},
        **({"master": "local[2]"} if engine == "spark" else {}),
    }


def make(
    capsys: pytest.CaptureFixture[str],
    engine: str,
    events: Path,
    out: Path,
    query: Row | None = None,
    embeddings: Row | None = None,
    **timeline: Any,
) -> Row:
    """What an engine made: files and their bytes, the manifest of the first folder, and what was logged."""
    out.mkdir(parents=True)
    capsys.readouterr()
    timeline |= {"evalTableName": str(out / "eval")} if "evalTableName" in timeline else {}
    top = config_of(engine, query) | {"embeddings": embeddings or {}}
    events_oracle.make(out, events, top, **timeline)
    logged = [line.replace(str(out), "") for line in capsys.readouterr().err.splitlines() if "s left" not in line]
    return {
        "files": {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("part-*")},
        "manifest": json.loads((out / "train/manifest.json").read_text()),
        "logged": "\n".join(logged),
    }


def of_both(made: Iterable[Any]) -> Any:
    """What the engines made, which is the same."""
    ours, theirs = made
    assert theirs == ours
    return ours


@pytest.mark.parametrize(("parametric", "form", "files", "timeline", "query"), [
    pytest.param(False, "jsonl", 2, {
        "numOutputShards": 3, "evalTableName": "eval", "eval_percent": 30, "startDs": "2026-01-02",
        "extraFeatureColumns": ["visits", "city", "new"], "rewardColumns": ["reward", "metrics", "cost"]},
        {"actions": NAMES, "tableSample": 80}, id="discrete, everything on"),
    pytest.param(False, "map.parquet", 1, {
        "steps": 3, "gamma": 0.5, "addTerminalStateRow": True, "outlierEpisodeLengthPercentile": 0.8,
        "percentileFunction": "percentile", "timeWindowLimit": 6, "extraFeatureColumns": ["city", "cost"],
        "rewardColumns": ["reward", "metrics", "visits"]}, {}, id="discrete, three steps", marks=pytest.mark.slow),
    pytest.param(True, "arrow", 1, {
        "steps": 2, "gamma": 0.25, "extraFeatureColumns": ["new"], "numOutputShards": 2, "evalTableName": "eval",
        "eval_percent": 50}, {}, id="parametric, two steps", marks=pytest.mark.slow),
])  # fmt: skip
def test_spark_makes_the_files_that_this_machine_makes(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], parametric: bool, form: str, files: int,
    timeline: Row, query: Row,
) -> None:  # fmt: skip
    rows = [  # some have the index in the name's place
        {**row, "action": NAMES.index(row["action"])} if query.get("actions") and at % 7 == 3 else row
        for at, row in enumerate(random_events(parametric=parametric))
    ]
    named = {"3": "age"} if form in ("jsonl", "csv") else {}  # the other forms have integers as keys
    for row in rows:
        row["state_features"] = {named.get(key, key): value for key, value in row["state_features"].items()}
    events = write_events(rows, tmp_path / "events", form, files)
    manifest = of_both(
        make(capsys, engine, events, tmp_path / engine, query, actionDiscrete=not parametric, **timeline)
        for engine in ENGINES
    )["manifest"]
    assert manifest["report"]["train_rows"] > 20
    assert set(manifest["state_ids"]) == {0, -12, named.get("3", 3)}
    # the user's session is as it was
    assert spark.range(3).count() == 3
    assert spark.catalog.listTables() == []


@pytest.mark.parametrize("parametric", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_make_the_same_files_of_features_that_are_texts(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, parametric: bool
) -> None:
    """The second file alone has texts, so that the first one is read again as one that may have some."""
    rows = sorted(random_events(parametric=parametric), key=lambda row: row["mdp_id"])
    for number, row in enumerate(rows[len(rows) // 2 :]):
        row["state_features"]["city"] = f"ü {number % 7}"
        for candidate in [row["action"], *row["possible_actions"]] if parametric else []:
            candidate["city"] = "x"
    events = write_events(rows, tmp_path / "events", "jsonl", 2)
    made = of_both(make(capsys, engine, events, tmp_path / engine, actionDiscrete=not parametric) for engine in ENGINES)
    assert "city" in made["manifest"]["state_ids"]
    copy = prepare_training_copy(
        Log(
            str(tmp_path / "local" / "train"), actions=None if parametric else NAMES, directory=str(tmp_path / "copies")
        )
    )
    (texts,) = copy.levels["state"].values()
    assert list(texts) == [f"ü {number}" for number in range(7)]
    assert [list(counts) for counts in copy.levels["action"].values()] == ([["x"]] if parametric else [])


def test_several_logs_give_the_same_files(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs that number their episodes alike, and one with seven of the first: executors tell them apart as well."""
    first, second = (random_events(parametric=False, seed=seed, episodes=10) for seed in (0, 1))
    rows = (first, second, first[:20])
    logs = [str(write_events(some, tmp_path / str(number), "jsonl", 1)) for number, some in enumerate(rows)]
    made = of_both(make(capsys, engine, tmp_path, tmp_path / engine, inputTableName=logs) for engine in ENGINES)
    report = made["manifest"]["report"]
    assert report["logs"] == dict(zip(logs, map(len, rows), strict=True))
    assert (report["episodes"], report["duplicate_rows"]) == (27, 6)  # both have three rows twice


def test_the_same_faults_give_the_same_reports(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = write_events(events_oracle.broken_events(), tmp_path / "events", "jsonl", 2)
    query: Row = {"actions": ["l", "r"]}
    of_both(
        make(capsys, engine, events, tmp_path / "reward=7" / engine, query, on_refused="drop_episode")
        for engine in ENGINES
    )
    words = of_both(refusal(engine, events, tmp_path / f"{engine} + refuses %41[1]", query) for engine in ENGINES)
    assert "events-1.jsonl:" in words


def refusal(engine: str, events: Path, out: Path, query: Row | None = None) -> str:
    out.mkdir(parents=True)
    with pytest.raises(DataError) as error:
        events_oracle.make(out, events, config_of(engine, query))
    assert list(out.iterdir()) == []
    return str(error.value)


def test_files_that_cannot_be_read_are_refused_by_name(spark: Any, tmp_path: Path) -> None:
    rows = random_events(parametric=False, episodes=20)
    good = write_events(rows, tmp_path / "good", "map.parquet") / "events-0.map.parquet"
    bad = {
        "early.parquet": (good.read_bytes()[:-9], "early.parquet: expected a complete Parquet file"),
        "ids.jsonl": (
            (json.dumps(rows[0]) + "\n\n" + json.dumps(rows[0] | {"state_features": {"0": 1, "1.0": 2}})).encode(),
            "ids.jsonl:3: expected as a feature id an integer",
        ),
        "none.jsonl": (b"\n", "expected rows of data"),
    }  # fmt: skip
    for name, (data, sentence) in bad.items():
        (tmp_path / name).write_bytes(data)
        assert sentence in of_both(refusal(engine, tmp_path / name, tmp_path / engine / name) for engine in ENGINES)


def test_executors_that_see_no_file_or_have_no_python(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = write_events(random_events(parametric=False), tmp_path / "events", "jsonl")
    (file,) = Log(str(events)).files
    with monkeypatch.context() as patch:
        patch.setattr(Log, "files", (replace(file, path="/nowhere/events.jsonl"),))
        message = refusal("spark", events, tmp_path / "one")
    assert message.startswith("/nowhere/events.jsonl: expected a path that every executor of Spark sees, got nothing")
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    words = "Spark's executors: expected a Python with this version of reagent-lite, got .*/nowhere/python.*name it in "
    assert re.match(words + "PYSPARK_PYTHON", refusal("spark", events, tmp_path / "two"), re.DOTALL)


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_a_connect_address_without_a_server_is_refused_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"master: .*server at 127\.0\.0\.1"):
        SparkEngine(f"sc://127.0.0.1:{free_port()}", tmp_path)
    assert time.monotonic() - start < 15


LACKING_SCRIPT = """
import sys
from pathlib import Path
from reagent_lite.data.timeline.spark_engine import SparkEngine
sys.modules |= dict.fromkeys(sys.argv[1:])
SparkEngine("local[1]", Path("."))
"""


@pytest.mark.parametrize(("lacks", "sentence"), [(["pyspark"], "the package pyspark"), ([], "Java 17 or newer")])
def test_what_spark_needs_is_named(tmp_path: Path, lacks: list[str], sentence: str) -> None:
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    _, errors = Interpreter(["-c", LACKING_SCRIPT, *lacks], cwd=tmp_path, env=environment).communicate(60)
    assert f"expected {sentence}, as it is spark" in errors
    assert "pip install 'reagent-lite[spark]', and Java 17 or newer" in errors


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    import pyspark

    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
               "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2]",
               "--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"]  # fmt: skip
    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2", "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }  # fmt: skip
    command += [word for key, value in options.items() for word in ("--conf", f"{key}={value}")]
    with (
        subprocess.Popen(
            [*command, "spark-internal"],
            cwd=tmp_path,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.terminate)
        wait_until(lambda: answers(port), lambda: f"the server does not answer; exit status {server.poll()}")
        yield f"sc://127.0.0.1:{port}"


CONNECT_SCRIPT = """
import json, sys
from pathlib import Path
from reagent_lite.config import check
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.console import logging_to_stderr
from reagent_lite.data.timeline.stage import run_timeline
with logging_to_stderr():
    run_timeline(check(TimelineConfig, json.loads(sys.argv[1])))
"""


@pytest.mark.slow
def test_spark_connect_makes_the_same_files(connect_server: str, tmp_path: Path) -> None:
    """In a process of its own: a process with a classic session can have no other."""
    events = write_events(random_events(parametric=False), tmp_path / "events", "jsonl")
    for name, top in (("ours", {}), ("theirs", {"engine": "spark", "master": connect_server})):
        section = {"inputTableName": str(events), "outputTableName": f"{tmp_path}/{name}", "numOutputShards": 2}
        command = [sys.executable, "-c", CONNECT_SCRIPT, json.dumps({"timeline": section, **top})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "bytes" in done.stderr
    for file in (tmp_path / "ours").glob("part-*"):
        assert (tmp_path / "theirs" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_both_make_the_same_files_of_ids(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of lists and of ids with scores, which executors read as codes, divided into training and evaluation."""
    rows = random_events(parametric=False)
    for number, row in enumerate(rows):
        row["state_features"] |= {"user": f"u{number % 9}", "seen": [f"i{item}" for item in range(number % 4)]}
        row["state_features"]["rated"] = [
            {"key": f"k{number % 3 + rank}", "value": rank + 0.5} for rank in range(number % 3)
        ]
    events = write_events(rows, tmp_path / "events", "jsonl", 2)
    embeddings = {"user": {}, "seen": {"length": 2}, "rated": {"scores": True, "pooling": "sum", "length": 2}}
    made = of_both(
        make(capsys, engine, events, tmp_path / engine, embeddings=embeddings, evalTableName="eval", eval_percent=40)
        for engine in ENGINES
    )["manifest"]
    assert made["settings"]["ids"] == {"user": [1, False], "seen": [2, False], "rated": [2, True]}
    assert {"user", "seen[0]", "seen[1]", "rated[0]", "rated[1] score"} <= set(made["state_ids"])
    copies = {
        name: prepare_training_copy(
            Log(str(tmp_path / "spark" / name), actions=NAMES, directory=str(tmp_path / "copies"))
        )
        for name in ("train", "eval")
    }
    for copy in copies.values():
        users = np.asarray(copy.state[: len(copy)])[:, list(map(str, copy.state_ids)).index("user")]
        assert set(users[~np.isnan(users)].tolist()) == {code_of(f"u{number}") for number in range(9)}
