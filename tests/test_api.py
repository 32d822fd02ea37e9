"""The Python API: the commands' own work, with frames and objects in the place of files."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.runs import ROOT, Runner, run

import reagent_lite
from reagent_lite.distributed.worker import STOP_SIGNALS
from reagent_lite.errors import BundleError, ConfigError, DataError
from reagent_lite.evaluation.decision import Choice, ShipDecision
from reagent_lite.evaluation.interval import Interval
from reagent_lite.report.content import Table
from reagent_lite.report.result import Brief, Result
from reagent_lite.run import runner as training
from workflows.__main__ import main

__all__ = ["run"]
COLUMNS = {"mdp_id": "customer", "sequence_number": "at", "state_features": ["age", "visits"], "action": "shown",
           "action_probability": "p", "reward": "clicked", "terminal": "last"}  # fmt: skip
HOLED = r"^the frame {}, row 7: expected a finite number in reward, got \w+; 1 more row like it: 9 \(\w+\)\n"
Tree = dict[str, Any]


def holed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame without the rewards of two rows."""
    return frame.assign(clicked=frame["clicked"].mask(frame.index.isin([7, 9])))


@pytest.fixture
def frame() -> pd.DataFrame:
    """Two decisions in each of 40 episodes: mail is worth `age`, a call 1 - `age`."""
    rng = np.random.default_rng(0)
    age, mailed = rng.random(80), rng.random(80) < 0.5
    return pd.DataFrame({
        "customer": [f"c{i // 2}" for i in range(80)], "at": [i % 2 for i in range(80)], "age": age,
        "visits": rng.integers(30, 90, 80), "shown": np.where(mailed, "mail", "call"), "p": 0.5,
        "clicked": np.where(mailed, age, 1 - age), "last": [i % 2 == 1 for i in range(80)],
    })  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {
        "model_output_path": str(tmp_path / "out"), "use_gpu": False, "actions": ["mail", "call"], "epochs": 2,
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 16},
        "data": {"columns": COLUMNS}, "evaluation": {"bootstrap_resamples": 100, "learn_from_scored": True},
    }  # fmt: skip


def test_a_frame_trains_the_model_of_the_same_rows_in_a_file(
    frame: pd.DataFrame, tree: Tree, run: Runner, tmp_path: Path
) -> None:
    file = tmp_path / "log.parquet"
    frame.to_parquet(file)
    command = run("dqn", {**tree, "model_output_path": "by_command", "training_data_path": str(file)})
    assert command.code == 0, command.err
    watching = Mock(spec=reagent_lite.Callback, on_epoch=Mock(return_value=None))
    outcome = reagent_lite.train(tree, frame, callback=watching)
    name = "model/weights.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "by_command" / name).read_bytes()
    assert outcome.scores == command.outcome["scores"]
    # what the run says of its data leads to the very rows
    recorded = json.loads((tmp_path / "out/config.json").read_text())["training_data_path"]
    assert Path(recorded).parent.parent == tmp_path / "cache/reagent-lite/frames"
    assert reagent_lite.read_log(recorded, COLUMNS) == reagent_lite.read_log(file, COLUMNS)
    metrics = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    epochs = [dict(call.args[0]) for call in watching.on_epoch.call_args_list]
    assert epochs == [line for line in metrics if "epoch" in line]
    assert [figures["step"] for figures in epochs] == [5, 10]
    written = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    assert {**written, **watching.on_evaluation.call_args.args[0], "scores": outcome.scores} == written

    evaluated = reagent_lite.evaluate(outcome.model, frame, config={"columns": COLUMNS})
    assert f"<strong>? {evaluated.decision['choice'].capitalize()}:</strong>" in str(evaluated._repr_html_())
    assert 0 < evaluated.rows < 80


def test_a_dict_an_object_and_a_file_are_the_same_config_and_arguments_take_the_place_of_keys(
    tree: Tree, frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Mock()
    monkeypatch.setattr(training, "train", trained)
    tree["training_data_path"] = "last_month.parquet"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tree))
    for config in (tree, reagent_lite.DqnConfig(**tree), str(file), file):
        reagent_lite.train(config, frame)
    first, *others = (call.args[0] for call in trained.call_args_list)
    assert others == [first] * 3
    assert first.training_data_path.startswith(str(tmp_path / "cache"))
    said = "training_data_path: the config has 'last_month.parquet'; the argument of the call is used"
    assert caplog.messages.count(said) == 4


def test_an_environment_is_simulated_and_learned_from(tree: Tree, tmp_path: Path) -> None:
    log = reagent_lite.simulate({"env": "gridworld", "output_path": tmp_path / "log.jsonl", "rows": 200})
    assert f"<td>{log.rows}</td><td>{log.episodes}</td>" in str(log._repr_html_())
    table = reagent_lite.read_log(log.log)
    assert table.num_rows == log.rows >= 200
    names = sorted(set(table["action"].to_pylist()))
    outcome = reagent_lite.train({**tree, "data": {}, "actions": names, "epochs": 1}, log.log)
    played = reagent_lite.evaluate(outcome.model, env="gridworld", config={"simulation": {"evaluation_episodes": 5}})
    assert (played.rows, "Random actions" in str(played._repr_html_())) == (0, True)


def test_the_caller_finds_everything_as_it_was(tree: Tree, frame: pd.DataFrame) -> None:
    callback = Mock(spec=reagent_lite.Callback, on_epoch=lambda figures: signal.raise_signal(signal.SIGTERM))
    logger = logging.getLogger("reagent_lite")
    torch.manual_seed(5)

    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
        random = torch.random.get_rng_state().tolist()
        return handlers, logger.handlers[:], logger.level, logger.propagate, torch.get_num_threads(), random

    before = state()
    with pytest.raises(reagent_lite.Preempted, match="SIGTERM: "):
        reagent_lite.train(tree, frame, callback=callback)
    assert state() == before
    assert reagent_lite.train(tree, frame).steps == 10  # continues: 80 rows in minibatches of 16, twice
    assert state() == before


def test_runs_in_threads_learn_the_same_as_one_alone(tree: Tree, frame: pd.DataFrame, tmp_path: Path) -> None:
    trees = [{**tree, "model_output_path": str(tmp_path / name)} for name in ("alone", "first", "second")]
    reagent_lite.train(trees[0], frame)
    with ThreadPoolExecutor() as threads:
        list(threads.map(partial(reagent_lite.train, data=frame), trees[1:]))
    weights = [(tmp_path / name / "model/weights.safetensors").read_bytes() for name in ("alone", "first", "second")]
    assert weights[1] == weights[0] == weights[2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda tree, frame: reagent_lite.train({**tree, "epoch": 3}, frame), ConfigError, "epoch: .*'epochs'"),
        (lambda tree, frame: reagent_lite.train(tree, frame.drop(columns="clicked")), DataError, "a column 'clicked'"),
        (lambda tree, _: reagent_lite.train(tree, "nowhere.parquet"), DataError, "nowhere.parquet: expected a data"),
        (lambda _, frame: reagent_lite.train("nowhere.json", frame), ConfigError, "nowhere.json: no such file"),
        (lambda _, frame: reagent_lite.train(3, frame), ConfigError, "config: expected a config, a dict, or the path"),
        (lambda tree, _: reagent_lite.train(tree, [{}]), DataError, "data: expected a path, a frame .*, got list: "),
        (lambda tree, frame: reagent_lite.train(tree, frame, callback=print), ConfigError, "callback: expected"),
        (lambda tree, frame: reagent_lite.evaluate(frame, frame), ConfigError, "model: .*, got a DataFrame"),
        (lambda tree, _: reagent_lite.train({**tree, "seed": object()}), ConfigError, "config: expected values that"),
        (lambda tree, frame: reagent_lite.train({**tree, "num_nodes": 2, "init_method": "file:///x"}, frame),
         ConfigError, "num_nodes: expected 1, got 2. train is one process .* run python -m workflows.dqn --config"),
        (lambda tree, frame: reagent_lite.train({**tree, "num_processes_per_node": 2}, frame),
         ConfigError, "num_processes_per_node, use_all_avail_gpus: expected one process, got 2"),
        (lambda _, frame: reagent_lite.evaluate("nowhere", frame), BundleError, "nowhere: expected the folder of an"),
        (lambda _, __: reagent_lite.simulate({"env": "cartpole_v1"}), ConfigError, "output_path: expected a path"),
        (lambda tree, frame: reagent_lite.train(tree, holed(frame)), DataError, HOLED.format("data")),
        (lambda tree, frame: reagent_lite.train(tree, frame, holed(frame)), DataError, HOLED.format("eval_data")),
        (lambda _, frame: reagent_lite.read_log(frame.iloc[:0], COLUMNS), DataError, "^the frame data: expected rows"),
    ],
)  # fmt: skip
def test_errors_are_the_commands_own(
    call: Callable[[Tree, pd.DataFrame], object], error: type[Exception], message: str, tree: Tree, frame: pd.DataFrame
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(tree, frame)
    assert isinstance(caught.value, reagent_lite.ReagentLiteError)
    assert not Path(tree["model_output_path"]).exists()


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import reagent_lite; dir(reagent_lite)\n"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "{'reagent_lite'}\n"
    exec("from reagent_lite import *", names := {})
    assert names["train"].__module__ == "reagent_lite.api"
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        _ = reagent_lite.fit


def called(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["reagent-lite", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    return ended.value.code or 0


def test_a_notebook_shows_the_decision_and_then_figures_with_their_intervals() -> None:
    table = Table(title="Value of <b>", columns=(("Estimator", "name"), ("Estimate", "number"), ("Share", "share")),
                  rows=(("a & b", Interval(value=1.234, low=1.0, high=1.5), 0.25), ("c", None, None)))  # fmt: skip
    decision = ShipDecision(choice=Choice.SHIP, reason="it is > the log", next_step="ship it", findings=())
    assert "".join(str(Result(brief=Brief(decision=decision, tables=(table,)))._repr_html_()).split("\n")) == (
        "<p><strong>✓ Ship:</strong> it is &gt; the log.<br><b>Next:</b> ship it</p>"
        '<table><caption>Value of &lt;b&gt;</caption><thead><tr><th scope="col">Estimator</th>'
        '<th scope="col">Estimate</th><th scope="col">Share</th></tr></thead><tbody>'
        "<tr><td>a &amp; b</td><td>1.23 (1.00 to 1.50)</td><td>25%</td></tr><tr><td>c</td><td>–</td><td>–</td></tr>"
        "</tbody></table>"
    )
    assert Result()._repr_html_() is None


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        ([], 0, "  score           Score rows with an exported model\n"),
        (["tran"], 2, "unknown command tran; did you mean train?"),
        (["dqn", "--config", "nowhere.json"], 2, "nowhere.json: no such file"),
        (["dqn", "x.json"], 2, "unrecognized arguments: x.json. Did you mean --config x.json?"),
        (["timeline", "x.json", "y"], 2, "unrecognized arguments: x.json y. Did you mean --config x.json?"),
        (["timeline", "--print_schema"], 0, '"inputTableName"'),
        (["normalize", "--help"], 0, "usage: python -m workflows.normalize"),
    ],
)
def test_one_command_has_all_workflows(
    arguments: list[str], code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.startswith("workflows.")]:
        monkeypatch.delitem(sys.modules, module)  # runpy warns of a module that is imported already
    assert called(arguments, monkeypatch) == code
    assert shown in "".join(capsys.readouterr())


def test_modules_of_the_working_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program lies in another folder than the user's modules; `python -m` would find them."""
    (tmp_path / "own_module.py").write_text("def network(spec, settings):\n    raise ValueError('it was called')\n")
    config = {"model_output_path": "out", "use_gpu": False, "simulation": {"env": "cartpole_v0", "total_steps": 20000},
              "training": {"network": "own_module:network"}}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    called(["dqn", "--config", "x.json"], monkeypatch)
    assert "it was called" in capsys.readouterr().err


def test_the_sample_configs_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [called(["configs", "--copy", str(tmp_path / "own")], monkeypatch) for _ in range(2)] == [0, 2]
    assert "--copy: expected a folder that does not exist" in capsys.readouterr().err
    copied, configs = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "own", ROOT / "configs")
    )
    pages = {file.name for file in copied if file.parent.name == "docs"}
    assert pages == {file.name for file in (ROOT / "docs").glob("*.md")}
    is_hidden = {file: any(part.startswith((".", "__")) for part in file.parts) for file in configs}
    assert {file: content for file, content in copied.items() if file.parent.name != "docs"} == {
        file: content for file, content in configs.items() if not is_hidden[file]
    }
