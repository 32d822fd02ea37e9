"""Arguments, help, schema, dry run, and every bad input: exit code 2, one clear error, nothing half-written."""

import json
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.logs import random_rows, write_json, write_lines
from helpers.runs import ROOT, Runner, absent, merged

from reagent_lite.cli import message_of
from reagent_lite.config import DqnConfig, ParametricDqnConfig
from reagent_lite.errors import KernelBuildError, NoRowsError, Preempted, Problem
from reagent_lite.run.output_folder import TrainResult
from reagent_lite.tasks import train as launch
from reagent_lite.tasks.train import main


def started(arguments: list[str]) -> int:
    return main("workflows.dqn", DqnConfig, "x.json", arguments)


def config_file(tmp_path: Path, **other: Any) -> str:
    tree = {"training_data_path": "d", "model_output_path": "o", "use_gpu": False, "actions": ["a", "b"], **other}
    return str(write_json(tmp_path / "c.json", tree))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoRowsError(Problem("x", "rows", "none")), "data error:\nx: expected rows, got none"),
        (
            KernelBuildError(Problem("e.cuh", "code", "???")),
            "environment cannot be compiled:\ne.cuh: expected code, got ???",
        ),
        (Preempted("SIGTERM", "checkpoint 7 is kept"), "stopped by a signal:\nSIGTERM: checkpoint 7 is kept"),
    ],
)
def test_messages_begin_with_a_natural_title(error: BaseException, message: str) -> None:
    assert message_of(error) == message


@pytest.mark.parametrize(
    ("flag", "index"), [("--config", "--node_index"), ("-p", "-ni"), ("--parameters", "--node-index")]
)
def test_aliases_and_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, index: str
) -> None:
    outcome: dict[str, Any] = {
        "model": "m", "decision": None, "steps": 1, "rows": 2, "rows_per_second": 3.0, "seconds": 4.0,
        "scores": {"x": None},
    }  # fmt: skip

    def train(config: DqnConfig, group: Any) -> TrainResult:
        print("chatter")
        assert config.node_index == 0
        return TrainResult(**outcome)

    monkeypatch.setattr(launch, "train", train)
    assert started([flag, config_file(tmp_path), index, "0"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), "chatter" in err) == (outcome, True)


def test_too_few_files_that_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    assert started(["--config", config_file(tmp_path)]) == 2
    assert "ulimit -n: expected at least 128" in capsys.readouterr().err


def test_without_standard_streams(tmp_path: Path) -> None:
    """As `>&- 2>&-` starts a process: no file takes their numbers, so that no message gets into one."""
    (tmp_path / "c.json").write_text("{}")
    program = (
        "import os, sys; from reagent_lite.cli import main_alone; from workflows.shard import COMMAND\n"
        "os.close(1); os.close(2); sys.stdout = sys.stderr = None\n"
        "code = main_alone(COMMAND, None, ['--config', 'c.json'])\n"
        "assert os.readlink('/proc/self/fd/1') == os.readlink('/proc/self/fd/2') == os.devnull; os._exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2


@pytest.mark.parametrize("model", [DqnConfig, ParametricDqnConfig])
def test_the_schema_explains_every_key(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("workflows.x", model, "x.json", ["--print_schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert [
        key for section in (schema, *schema["$defs"].values()) for key, field in section.get("properties", {}).items()
        if not field.keys() & {"description", "$ref", "allOf"}
    ] == []  # fmt: skip


def test_help_names_flags_codes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        started(["--help"])
    words = ("--config", "--node_index", "--set", "--dry_run", "--print_schema", "examples",
             "\n\nLearns a policy over named actions", "exit codes:\n  0  done\n")  # fmt: skip
    assert not absent(capsys.readouterr().out, *words)


@pytest.mark.parametrize(
    ("other", "arguments", "words"),
    [
        ({}, None, "--config: expected the path"),
        # the flag wins over the file
        ({"node_index": 0}, ["--node_index", "3"], "node_index: expected 0 while num_nodes is 1, got 3"),
        ({"num_nodes": 2, "node_index": 0, "init_method": "share/x"}, ["--dry_run"], "got 'share/x'"),
    ],
)
def test_a_missing_config_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], arguments: list[str] | None, words: str
) -> None:
    assert started([] if arguments is None else ["--config", config_file(tmp_path, **other), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_dry_run_shows_what_differs_or_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, is_shown in (("--dry_run", False), ("--dry_run=all", True)):
        assert started(["--config", config_file(tmp_path), flag, "--set", "training.learning_rate=0.5"]) == 0
        tree = json.loads(capsys.readouterr().out)
        assert tree["training"]["learning_rate"] == 0.5
        assert ("tracking" in tree) is is_shown


@pytest.mark.parametrize("command", ["evaluate --data log", "score --data log --output scores.csv", "serve --log log"])
def test_a_dry_run_loads_the_model(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, *flags, "--model", "nowhere", "--dry_run"])
    monkeypatch.delitem(sys.modules, f"workflows.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"workflows.{name}", run_name="__main__")
    assert ended.value.code == 2
    assert "nowhere: expected the folder of an exported model" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(["--config", config_file(tmp_path, use_gpu=True), "--dry_run"]) == 0
    assert capsys.readouterr().err.count("no GPU was found") == 1


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"training_data_path": "bad/log.jsonl"}, 2, "log.jsonl:41: expected"),
        ({"training_data_path": "bad/log.jsonl", "num_processes_per_node": 2}, 2, "log.jsonl:41: expected"),
        ({"state_norm_data_path": "bad/norm.json"}, 2, "none for 3 of 3: 0, 1, 2"),
        ({"model_output_path": "bad/log.jsonl/out"}, 2, "model_output_path: expected"),
        ({"training": {"optimizer": "SGD", "learning_rate": 1e30}}, 1, "expected a finite loss"),
    ],
    ids=["data", "data of two processes", "normalization", "output", "divergence"],
)
def test_bad_input_is_one_clear_error(
    run: Runner, small: dict[str, Any], tmp_path: Path, changes: dict[str, Any], code: int, words: str
) -> None:
    with write_lines(tmp_path / "bad/log.jsonl", random_rows(40, missing=0.0)).open("a") as log:
        log.write('{"mdp_id": "x", \n')
    write_json(tmp_path / "bad/norm.json", {"9": {"feature_type": "CONTINUOUS", "mean": 0, "stddev": 1}})
    done = run("dqn", merged(small, changes))
    assert (done.code, done.out, done.err.count(words), "Traceback" in done.err) == (code, "", 1, False), done.err
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("environment", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "")]
)
def test_threads_spin_briefly_unless_the_user_says_how(environment: dict[str, str], spins: str) -> None:
    code = "import os, sys, workflows; print(os.environ.get('GOMP_SPINCOUNT', ''), 'torch' in sys.modules)"
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    said = subprocess.check_output([sys.executable, "-c", code], env=inherited | environment, cwd=ROOT, text=True)
    assert said.strip() == f"{spins} False".strip()
