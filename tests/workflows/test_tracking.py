"""MLflow and W&B have what TensorBoard has: read back from MLflow's database, and from the calls that W&B takes."""

import json
import os
import signal
import sqlite3
import sys
import time
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
from helpers.ranks import call_on_ranks
from helpers.runs import ALONE, Tree, checked, merged
from helpers.waiting import wait_until
from requests import PreparedRequest, Response
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reagent_lite.config import leaves
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Preempted
from reagent_lite.run.runner import Callback, train
from reagent_lite.training import trackers
from reagent_lite.training.checkpoint_folder import CheckpointFolder
from reagent_lite.training.metrics import MetricsWriter, RunSummary, Sink

# SQLAlchemy deprecates what MLflow's tables are declared with
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def tracked(small: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """The small config with both trackers, in files below tmp_path."""
    folders = dict.fromkeys(("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), str(tmp_path))
    modes = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name, value in {**folders, **modes, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    return merged(small, {"rl": {"tensorboard_logging_freq": 3},
                          "tracking": {"mlflow": {"experiment": "tests"}, "wandb": {"project": "tests"}}})  # fmt: skip


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return list(database.execute(query))


def in_mlflow(folder: Path) -> dict[tuple[str, int], float]:
    """Returns the last value by tag and step."""
    return {
        (key, step): value
        for key, step, value in rows(folder, "select key, step, value from metrics order by timestamp")
    }


@pytest.fixture
def in_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """W&B's runs as they are started, offline; each takes the calls that it is given, and keeps them."""
    wandb = pytest.importorskip("wandb")
    init = wandb.init
    runs: list[Mock] = []

    def start(**given: Any) -> Mock:
        run = init(**given)
        runs.append(Mock(wraps=run, id=run.id, summary={}, given=given))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", start)
    return runs


def test_trackers_have_the_figures_of_tensorboard_the_decision_and_the_model(
    tracked: Tree, in_wandb: list[Mock], tmp_path: Path
) -> None:
    """Of a run that fails after its first epoch and goes on from an earlier step, to one epoch more than before."""
    tracked = merged(tracked, {"checkpoint": {"every_steps": 5}})
    with pytest.raises(ConnectionError):
        train(checked(tracked), ALONE, Mock(spec=Callback, **{"on_epoch.side_effect": ConnectionError}))
    assert rows(tmp_path, "select status from runs") == [("FAILED",)]
    first = in_mlflow(tmp_path)
    time.sleep(1.1)  # W&B and TensorBoard name their files by the second
    train(checked(merged(tracked, {"epochs": 3})), ALONE)

    out = tmp_path / "out"
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    logged = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert {step for tag, step in logged if tag == "train/td_loss"} == {3, 6, 7, 9, 12, 14, 15, 18, 21}
    assert ("CPE/Reward/MAGIC", 21) in logged
    figures = {
        (name, call.kwargs["step"]): value
        for run in in_wandb
        for call in run.log.call_args_list
        for name, value in call.args[0].items()
    }
    assert figures == pytest.approx(logged, rel=1e-6)  # event files hold float32
    timed = {key: value for key, value in first.items() if key[0].startswith(("rate/", "time/"))}
    assert in_mlflow(tmp_path) == pytest.approx({**logged, **timed}, rel=1e-6)  # all else is the same again
    assert rows(tmp_path, "select count(*) from metrics") == [(len(in_mlflow(tmp_path)),)]

    decision = json.loads((out / "model/evaluation.json").read_text())["decision"]
    kept = sorted(str(file.relative_to(out)) for name in ("config.json", "report.html", "model")
                  for file in [out / name, *(out / name).rglob("*")] if file.is_file())  # fmt: skip
    ((name, status, artifacts),) = rows(tmp_path, "select name, status, artifact_uri from runs")
    assert (name, status) == ("out", "FINISHED")
    tags = dict(rows(tmp_path, "select key, value from tags"))
    assert (tags["decision"], decision["reason"] in tags["mlflow.note.content"]) == (decision["choice"], True)
    params = dict(rows(tmp_path, "select key, value from params"))
    # MLflow lets nobody change epochs
    assert params.items() >= {("rl.gamma", "0.9"), ("actions", '["a", "b"]'), ("use_gpu", "False"), ("epochs", "2")}
    assert sorted(str(file.relative_to(artifacts)) for file in Path(artifacts).rglob("*") if file.is_file()) == kept

    given = {(run.given["id"], run.given["project"], run.given["name"]) for run in in_wandb}
    assert given == {(tags["reagent_lite.run"], "tests", "out")}
    last = in_wandb[-1]
    assert leaves(last.given["config"]) == leaves(json.loads((out / "config.json").read_text()))
    assert (last.summary["decision"], decision["reason"] in last.notes) == (decision["choice"], True)
    (artifact,) = last.log_artifact.call_args.args
    assert (artifact.type, sorted(artifact.manifest.entries)) == ("run", kept)
    assert [run.finish.call_args.kwargs["exit_code"] for run in in_wandb] == [1, 0]


def trackers_started(group: Group, tree: str) -> int:
    """Trains, and returns how often this rank starts trackers."""
    with patch("reagent_lite.run.runner.trackers", return_value=[]) as start:
        train(checked(json.loads(tree)), group)
    return start.call_count


def test_of_several_processes_rank_0_alone_has_trackers(small: Tree, tmp_path: Path) -> None:
    runs = call_on_ranks(trackers_started, [json.dumps(small)], [tmp_path / "machine"], [2])
    assert [run.outcome for run in runs] == [1, 0]


@pytest.mark.parametrize(
    ("section", "missing", "where", "message"),
    [
        ({"mlflow": {"uri": "http://user:hidden@localhost"}}, "", "tracking.mlflow.uri", "MLFLOW_TRACKING_USERNAME"),
        ({"mlflow": {}}, "mlflow", "tracking.mlflow", r"pip install 'reagent-lite\[tracking\]'"),
        ({"wandb": {}}, "wandb", "tracking.wandb", r"pip install 'reagent-lite\[tracking\]'"),
        ({"mlflow": {"uri": "sftp://host"}}, "", "tracking.mlflow", "got Unsupported.*sftp"),
        ({"mlflow": {"uri": "http://127.0.0.1:9"}}, "", "tracking.mlflow", "Connection refused"),
        ({"wandb": {"project": "a/b"}}, "", "tracking.wandb", "a/b"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_and_changes_nothing(
    section: Tree, missing: str, where: str, message: str, tracked: Tree, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(trackers._START, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=message) as caught:
        train(checked({**tracked, "tracking": section}), ALONE)
    assert ([problem.where for problem in caught.value.problems], "hidden" in str(caught.value)) == ([where], False)
    assert not (tmp_path / "out").exists()
    assert not trackers._START.keys() & os.environ.keys()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns our own messages: those of other libraries' threads come at any time."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("reagent_lite")]


def test_a_server_that_goes_away_is_one_warning_and_its_password_is_never_shown(
    tracked: Tree, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As much of MLflow's REST API as a run needs, by one answer to everything; nothing listens at its address."""
    users: list[str] = []

    def answer(_: object, request: PreparedRequest, **rest: Any) -> Response:
        users.append(request.headers["Authorization"])
        info = {"run_id": "7", "experiment_id": "1", "status": "RUNNING", "lifecycle_stage": "active"}
        answer = {"experiment": {"experiment_id": "1", "name": "Default"}, "run": {"info": info, "data": {}}}
        return Mock(spec=Response, status_code=200, text=json.dumps(answer), headers={})

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hidden@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with MetricsWriter() as writer:
        with patch("requests.Session.send", answer):
            writer.add(trackers.trackers(checked({**tracked, "tracking": {"mlflow": {}}}), "run"))
        for step in (1, 2, 3):
            writer.write(step, {"x": 1.0})
        writer.conclude(RunSummary(step=3, decision="ship", text="", files=()))
    assert {*users} == {"Basic " + b64encode(b"user:hidden").decode()}
    starting, ends = logged(caplog)
    assert ends.startswith("tracking.mlflow has stopped: MlflowException: ")
    out, err = capfd.readouterr()
    assert (out, "hidden" in err + starting + ends) == ("", False)


def test_a_tracker_that_hangs_delays_no_step_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = Event()
    client = Mock(**{"write.side_effect": lambda *_: released.wait()})
    monkeypatch.setattr(trackers, "_STOP_SECONDS", 0.1)
    tracker = trackers.Tracker("wandb", client)
    for step in range(1000):
        tracker.write(step, {"x": 1.0, "not finite": None})
    tracker.__exit__(Preempted, Preempted("SIGTERM", "saved"), None)
    released.set()
    wait_until(lambda: client.finish.called)
    client.finish.assert_called_once_with("KILLED")
    assert client.write.call_args.args[:2] == (999, {"x": 1.0})
    (warning,) = logged(caplog)
    assert warning.startswith("tracking.wandb: not everything was sent")


def test_a_run_that_is_stopped_while_a_tracker_ends_publishes_again(
    small: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal while the run is marked as ended comes too late: with code 75 the same command would train anew."""
    finish = CheckpointFolder.finish

    def late(*arguments: Any) -> None:
        finish(*arguments)
        signal.raise_signal(signal.SIGTERM)

    slow = MagicMock(spec=Sink, **{"__exit__.side_effect": lambda *_: signal.raise_signal(signal.SIGTERM)})
    again = pytest.raises(Preempted, match="run the same command again to continue")
    with patch("reagent_lite.run.runner.trackers", return_value=[slow]), again:
        train(checked(small), ALONE)
    with patch.object(CheckpointFolder, "finish", late):
        assert train(checked(small), ALONE).model is not None
    assert "resuming from checkpoints/" in caplog.text


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("CPE/Reward/MAGIC", "CPE/Reward/MAGIC"),
        ("actions/model/a b-c.d_é", "actions/model/a b-c.d_é"),
        ("actions/model/+1", "actions/model/_2b_1"),
        ("actions/model/..", "actions/model/_2e2e_"),
        ("actions/model/a//b/", "actions/model/a/__/b/__"),
    ],
)
def test_names_that_mlflow_does_not_take_are_escaped(name: str, legal: str) -> None:
    assert trackers._legal(name) == legal
    pytest.importorskip("mlflow.utils.validation")._validate_metric_name(legal)
