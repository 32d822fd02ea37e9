"""Comparisons of runs: choice, resumption, lost workers; runs are small programs in the place of training."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.interpreters import Interpreter, python_path
from helpers.logs import random_rows, write_lines
from helpers.runs import ROOT, Runner, Tree, quick
from helpers.waiting import wait_until
from scipy import stats

import reagent_lite
from reagent_lite.config import check
from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.errors import ConfigError, PeerError
from reagent_lite.tasks import compare
from reagent_lite.tasks.run_statistics import bootstrap_interval, interquartile_mean, mean_interval

BASE = {
    "use_gpu": False,
    "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
    "simulation": {"env": "cartpole_v0", "num_envs": 8, "total_steps": 400, "warmup_steps": 100,
                   "num_evaluations": 2, "evaluation_episodes": 4},
}  # fmt: skip
RUN = textwrap.dedent("""
    import json, os, signal, sys, time
    folder, name = sys.argv[1], sys.argv[2]
    run = f"{folder}/runs/{name}"
    config, seed = name.rsplit("-", 1)
    os.makedirs(run, exist_ok=True)
    with open(f"{folder}/starts", "a") as file:
        file.write(f"{name}\\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if config == "bad" and not os.path.exists(f"{folder}/mended"):
        error = "training diverged:\\nstep 7: expected a finite loss, got nan."
        print(error, "a warning of a library:", sep="\\n", file=sys.stderr)
        with open(os.environ["REAGENT_LITE_ERROR_FILE"], "w") as file:
            file.write(error)
        sys.exit(1)
    if config == "killed":
        os.kill(os.getpid(), 9)
    if config == "mute":
        print("python: no such module", file=sys.stderr)
        sys.exit(1)
    step = int(open(f"{run}/step").read()) if os.path.exists(f"{run}/step") else 0
    parent = os.getppid()
    while step < int(os.environ.get("STEPS", 2)) and os.getppid() == parent:
        time.sleep(0.05)
        step += 1
        with open(f"{run}/step{os.getpid()}", "w") as file:
            file.write(str(step))
        os.replace(file.name, f"{run}/step")
    if os.getppid() != parent:
        sys.exit(9)
    score = {"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 9.0], "bad": [0.0, 0.0, 0.0], "half": [8.0, None]}[config][int(seed)]
    with open(f"{run}/metrics.jsonl", "w") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "epoch": step, "simulation/return/mean": step * (score or 0)}) + "\\n")
        file.write(json.dumps({"step": 2, "simulation/return/mean": 100.0}) + "\\n")
    print("a line of a library")
    print(json.dumps({
        "model": f"{run}/model", "steps": 2, "seconds": 0.1,
        "decision": {"choice": "ship", "reason": f"{name} is better", "next": "try it."},
        "scores": {"choosing/simulation/return/mean": score, "simulation/return/mean": 100.0},
    }))
""")


def command_of(workflow: str, folder: Path, name: str) -> list[str]:
    return [sys.executable, "-S", "-c", RUN, str(folder), name]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(compare, "_command_of", command_of)
    configs = {"a": {}, "b": {"training.learning_rate": 0.01}}
    return {"base": BASE, "configs": configs, "output_path": str(tmp_path / "out"), "lost_after_seconds": 1.0}


def starts(tree: Tree) -> list[str]:
    return sorted(Path(tree["output_path"], "starts").read_text().split())


def compared(tree: Tree) -> compare.Compared:
    return compare.compare_runs(check(CompareConfig, tree))


def test_the_best_run_of_the_best_config_is_chosen_and_its_own_decision_stands(tree: Tree) -> None:
    """Scores that choose: a 1, 2, 3; b 2, 4, 9. t(1 - 0.05 / 2 / 2, 2 degrees of freedom) = 6.2053."""
    result = reagent_lite.compare(tree)
    assert (result.chosen, result.compared, result.failed, result.exit_code) == ("b-2", 6, {}, 0)
    reason = "b-2 was chosen from 6 runs by other episodes than those that decide: b-2 is better"
    assert result.decision == {"choice": "ship", "reason": reason, "next": "try it."}
    table = result.table.to_dict("records")
    half = 6.2053 / 3**0.5
    assert table == [
        {"config": "b", "runs": 3, "interquartile_mean": 5.0, "mean": 5.0,
         "low": pytest.approx(5 - half * 13**0.5, rel=1e-4), "high": pytest.approx(5 + half * 13**0.5, rel=1e-4)},
        {"config": "a", "runs": 3, "interquartile_mean": 2.0, "mean": 2.0,
         "low": pytest.approx(2 - half, rel=1e-4), "high": pytest.approx(2 + half, rel=1e-4)},
    ]  # fmt: skip
    curve = result.curves.query("config == 'b'")
    assert curve[["step", "value"]].to_numpy().tolist() == [[1, 5.0], [2, 10.0]]  # the final evaluation has no point
    assert curve["low"].tolist() == [2.0, 4.0]
    runs = result.runs.set_index("run")
    assert runs.loc["b-1", ["config", "seed", "score", "final", "decision"]].tolist() == ["b", 1, 4.0, 100.0, "ship"]
    page = Path(result.page).read_text()
    assert "<script" not in page
    assert "b-2 was chosen from 6 runs" in page
    assert json.loads(Path(result.report).read_text())["chosen"] == "b-2"
    assert starts(tree) == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert compared(tree).table.to_dict("records") == table  # nothing is repeated
    assert len(starts(tree)) == 6
    config = json.loads(Path(tree["output_path"], "comparison/configs/b-1.json").read_text())
    assert (config["seed"], config["training"]["learning_rate"], config["training"]["minibatch_size"]) == (1, 0.01, 32)
    assert (config["evaluation"], config["checkpoint"]) == ({"choosing_share": 0.5}, {"every_minutes": 5.0})


def test_a_failed_run_does_not_lose_the_others_and_is_tried_again(tree: Tree) -> None:
    tree = tree | {"configs": {"a": {}, "bad": {"seed": 3}}, "seeds": [0, 1]}
    result = compared(tree)
    error = "training diverged:\nstep 7: expected a finite loss, got nan."
    assert (result.chosen, result.compared, result.exit_code) == ("a-1", 2, 4)
    assert result.failed == {"bad-0": error, "bad-1": error}
    assert "expected a finite loss" in Path(result.page).read_text()
    assert result.runs.query("run == 'bad-0'")["error"].tolist() == [error]
    Path(tree["output_path"], "mended").touch()
    assert compared(tree).compared == 4
    assert starts(tree) == ["a-0", "a-1", *["bad-0"] * 2, *["bad-1"] * 2]


def test_runs_that_do_not_name_their_error_and_runs_without_the_score(tree: Tree) -> None:
    """A run whose policy has no estimate is shown with the reason; the other run of its config is compared."""
    result = compared(tree | {"configs": {"a": {}, "killed": {"seed": 3}, "mute": {}, "half": {}}, "seeds": [0, 1]})
    assert {name.rpartition("-")[0]: error.partition(" on the")[0] for name, error in result.failed.items()} == {
        "killed": "ended by signal 9", "mute": "python: no such module",
        "half": "no value of simulation/return/mean",
    }  # fmt: skip
    assert (result.chosen, result.compared, result.exit_code) == ("half-0", 3, 4)
    assert result.table["runs"].tolist() == [1, 2]


def test_all_runs_failed(tree: Tree) -> None:
    with pytest.raises(PeerError, match=r"run bad-0: expected a result, got training diverged:\n"):
        compared(tree | {"configs": {"bad": {}}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"configs": {"a": {}, "b": {"training.learning_rate": 0.1}}},
            "run b-0: training.learning_rate: expected 0.01, as",
        ),
        ({"configs": {"a": {}}}, "run b-0: expected a run of this comparison, as when it began, got none"),
        ({"seeds": [0, 1, 2, 3]}, "run a-3: expected a run of this comparison, as when it began, got a new one"),
        (
            {"base": BASE | {"rl": {"gamma": 0.5}}},
            "run a-0: rl.gamma: expected null, as when the comparison began, got 0.5",
        ),
    ],
)
def test_other_runs_in_the_folder_are_refused(
    tree: Tree, changes: Tree, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(compare._Workers, "work", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compared(tree)
    with pytest.raises(ConfigError) as error:
        compared(tree | changes)
    assert message in str(error.value)
    assert not Path(tree["output_path"], "starts").exists()


LOG = {"training_data_path": "log.jsonl", "actions": ["a", "b"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"configs": {"a": {"rl.gama": 0.5}}}, "configs.a.rl.gama: expected a known key"),
        ({"configs": {"a/b": {}}}, "configs: expected names of letters, digits and _ . + -, got 'a/b'"),
        ({"configs": {"a": {"seed.x": 1}}, "base": BASE | {"seed": 1}}, "configs.a.--set seed.x=1: expected an object"),
        ({"configs": {"a": "nowhere.json"}}, "configs.a.nowhere.json: no such file"),
        ({"base": {}}, "base: expected a config, or configs that are all paths"),
        ({"seeds": [1, 1]}, "seeds: expected at least one seed, each once"),
        (
            {"base": LOG, "configs": {"a": {}, "b": {"rl.gamma": 0.5}}},
            "configs.b.rl.gamma: expected 0.9, as in the first",
        ),
        (
            {"configs": {"a": {}, "b": {"simulation.env": "cartpole_v1"}}},
            "configs.b.simulation.env: expected cartpole_v0",
        ),
        (
            {"configs": {"a": {"evaluation.choosing_share": None}}},
            "configs.a.evaluation.choosing_share: expected a share",
        ),
        (
            {"configs": {"a": {"num_nodes": 2, "init_method": "/x"}}},
            "configs.a.num_nodes, simulation.mode: expected one",
        ),
    ],
)
def test_configs_that_cannot_be_compared_are_refused_before_any_run(tree: Tree, changes: Tree, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compared(tree | changes)
    assert message in str(error.value)
    assert not Path(tree["output_path"]).exists()


def test_a_score_that_runs_lack_is_refused_with_those_that_they_have(tree: Tree) -> None:
    expected = "score: expected a score of every run: simulation/return/mean, got CPE/Reward/MAGIC, which a-0 lacks"
    with pytest.raises(ConfigError, match=expected):
        compared(tree | {"score": "CPE/Reward/MAGIC"})
    assert compared(tree | {"score": "simulation/return/mean"}).chosen == "b-2"


def worker(tree: Tree, tmp_path: Path, steps: int) -> Interpreter:
    """A process of the command with programs in the place of training, as on another machine."""
    program = textwrap.dedent(f"""
        import sys, runpy
        from reagent_lite.tasks import compare
        RUN = {RUN!r}
        compare._command_of = lambda workflow, folder, name: [sys.executable, "-S", "-c", RUN, str(folder), name]
        sys.argv[1:] = ["--config", {str(tmp_path / "compare.json")!r}]
        runpy.run_module("workflows.compare", run_name="__main__", alter_sys=True)
    """)
    (tmp_path / "compare.json").write_text(json.dumps(tree))
    environment = {**os.environ, "STEPS": str(steps), "PYTHONPATH": python_path(ROOT)}
    return Interpreter(["-c", program], cwd=tmp_path, env=environment)


def steps_of(tree: Tree, name: str) -> int:
    file = Path(tree["output_path"], "runs", name, "step")
    return int(file.read_text() or 0) if file.exists() else 0


def test_the_run_of_a_killed_worker_is_taken_over_and_continued(tree: Tree, tmp_path: Path) -> None:
    """Two processes with a run each share a folder; one is killed, and the other one has both runs in the end."""
    tree = tree | {"configs": {"a": {}, "b": {}}, "seeds": [0], "processes": 1}
    workers = [worker(tree, tmp_path, steps=40) for _ in range(2)]
    wait_until(lambda: min(steps_of(tree, "a-0"), steps_of(tree, "b-0")) > 2)
    os.kill(workers[0].pid, signal.SIGKILL)
    (held,) = ({"a-0", "b-0"} - {*done(tree)}) - running(tree, workers[1])
    assert workers[0].wait() != 0
    out, err = workers[1].communicate(60)
    assert workers[1].wait() == 0, err
    assert json.loads(out.splitlines()[-1])["compared"] == 2
    assert f"{held}: its machine is silent" in err
    assert starts(tree) == sorted(["a-0", "b-0", held])


@pytest.mark.slow
def test_a_worker_that_was_suspended_leaves_its_run_to_the_one_that_took_it_over(tree: Tree, tmp_path: Path) -> None:
    tree = tree | {"configs": {"a": {}}, "seeds": [0], "processes": 1}
    workers = [worker(tree, tmp_path, steps=200) for _ in range(2)]
    wait_until(lambda: steps_of(tree, "a-0") > 60)  # both have started
    suspended, other = sorted(workers, key=lambda process: not running(tree, process))
    os.kill(suspended.pid, signal.SIGSTOP)
    wait_until(lambda: running(tree, other) == {"a-0"})
    os.kill(suspended.pid, signal.SIGCONT)
    for process in (suspended, other):
        out, err = process.communicate(60)
        assert process.wait() == 0, err
        assert json.loads(out.splitlines()[-1])["chosen"] == "a-0"
        assert ("a-0: taken over by another machine" in err, "a-0: done" in err) == (
            (True, False) if process is suspended else (False, True)
        )


def done(tree: Tree) -> list[str]:
    return sorted(path.name for path in Path(tree["output_path"], "comparison", "done").iterdir())


def running(tree: Tree, process: Interpreter) -> set[str]:
    held = Path(tree["output_path"], "comparison", "held").iterdir()
    return {name for name, _, mark in (path.name.partition("@") for path in held) if mark.startswith(f"{process.pid}-")}


def test_a_signal_ends_all_runs_and_the_same_command_continues(tree: Tree, tmp_path: Path) -> None:
    tree = tree | {"seeds": [0], "processes": 2}
    first = worker(tree, tmp_path, steps=400)
    wait_until(lambda: min(steps_of(tree, "a-0"), steps_of(tree, "b-0")) > 2)
    os.kill(first.pid, signal.SIGTERM)
    _, err = first.communicate(60)
    assert (first.wait(), "the same command continues" in err) == (75, True)
    folder = Path(tree["output_path"], "comparison")
    assert sorted(path.name for path in (folder / "waiting").iterdir()) == ["a-0", "b-0"]
    saved = steps_of(tree, "a-0")
    time.sleep(0.2)
    assert saved == steps_of(tree, "a-0")
    assert compared(tree).compared == 2
    assert starts(tree) == ["a-0", "a-0", "b-0", "b-0"]


def test_interquartile_mean_and_bootstrap_are_those_of_rliable() -> None:
    """Agarwal et al. (2021): scipy.stats.trim_mean(scores, 0.25, axis=None) of runs x tasks, resampled by task."""
    assert interquartile_mean([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert interquartile_mean([1.0, 2.0, 9.0]) == 4.0
    assert interquartile_mean([[0.0, 8.0], [1.0, 9.0], [2.0, 10.0], [3.0, 11.0]]) == (2 + 3 + 8 + 9) / 4
    # two runs: every resample is one of (1, 1), (1, 3), (3, 1), (3, 3), with means 1, 2, 2, 3
    interval = bootstrap_interval([[1.0], [3.0]], 0.95)
    assert (interval.value, interval.low, interval.high) == (2.0, 1.0, 3.0)
    assert bootstrap_interval([[1.0], [3.0]], 0.4).json() == {"value": 2.0, "low": 2.0, "high": 2.0}
    # runs of a task are equal: resampled by task nothing changes, resampled together it would
    equal = bootstrap_interval([[0.0, 8.0]] * 3, 0.95)
    assert equal.low == equal.value == equal.high
    assert np.isnan(bootstrap_interval([[1.0]], 0.95).low)
    scores = np.random.default_rng(0).normal(size=(7, 3))
    rng = np.random.default_rng(1)
    means = [stats.trim_mean([rng.choice(task, 7) for task in scores.T], 0.25, axis=None) for _ in range(4000)]
    interval = bootstrap_interval(scores, 0.9)
    assert [interval.low, interval.high] == pytest.approx(np.quantile(means, [0.05, 0.95]), abs=0.03)


def test_the_interval_of_a_mean_holds_for_few_runs_too() -> None:
    scores = np.random.default_rng(0).normal(size=(2000, 3))
    held = [interval.low < 0 < interval.high for interval in (mean_interval(row, 0.95) for row in scores)]
    assert abs(np.mean(held) - 0.95) < 0.015
    assert np.isnan(mean_interval([1.0], 0.95).low)
    held = [
        interval.low < 0 < interval.high
        for interval in (bootstrap_interval(row[:, None], 0.95) for row in scores[:400])
    ]
    assert abs(np.mean(held) - 0.76) < 0.06  # what docs/compare.md says of the bands of curves


def test_machines_may_see_the_folder_by_different_paths(tree: Tree, tmp_path: Path) -> None:
    compared(tree)
    (tmp_path / "elsewhere").symlink_to(tree["output_path"])
    assert (
        compared(tree | {"output_path": str(tmp_path / "elsewhere")}).model == f"{tree['output_path']}/runs/b-2/model"
    )
    assert len(starts(tree)) == 6


@pytest.mark.slow
def test_trainings_of_a_killed_worker_continue_from_their_checkpoints(tmp_path: Path) -> None:
    """Real runs: a worker is killed after a checkpoint; its run ends with it, and the next command continues it."""
    base: dict[str, Any] = BASE | {"checkpoint": {"every_steps": 100}}
    base["simulation"] = BASE["simulation"] | {"total_steps": 20_000}
    tree = {"base": base, "configs": {"a": {}}, "seeds": [0, 1], "output_path": str(tmp_path / "out"), "processes": 1,
            "lost_after_seconds": 3.0}  # fmt: skip
    (tmp_path / "compare.json").write_text(json.dumps(tree))
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    arguments = ["-m", "workflows.compare", "--config", "compare.json"]
    first = Interpreter(arguments, cwd=tmp_path, env=environment)
    checkpoints = tmp_path / "out/runs/a-0/checkpoints"
    wait_until(lambda: bool([*checkpoints.glob("step_*")]), seconds=120)
    os.kill(first.pid, signal.SIGKILL)
    second = Interpreter(arguments, cwd=tmp_path, env=environment)
    out, err = second.communicate(400)
    assert second.wait() == 0, err
    assert "a-0: its machine is silent" in err
    assert json.loads(out.splitlines()[-1])["compared"] == 2
    assert "resuming from checkpoints/step_" in (tmp_path / "out/logs/a-0.log").read_text()


@pytest.mark.slow
def test_trainings_on_a_log_are_compared_by_episodes_that_do_not_decide(tmp_path: Path) -> None:
    rows = random_rows(600)
    base = quick(write_lines(tmp_path / "log.jsonl", rows), tmp_path / "unused", epochs=2, rl={"gamma": 0.0},
                 evaluation={"learn_from_scored": None})  # fmt: skip
    configs = {"narrow": {}, "wide": {"training.layers": [-1, 32, -1]}}
    result = reagent_lite.compare(
        {"base": base, "configs": configs, "seeds": [0, 1], "output_path": str(tmp_path / "out")}
    )
    assert (result.compared, result.failed) == (4, {})
    for run in result.runs.to_dict("records"):
        document = json.loads(Path(run["folder"], "model", "evaluation.json").read_text())
        tag = "CPE/Reward/Doubly_Robust_Reward"
        assert (run["score"], run["final"]) == (document["scores"][f"choosing/{tag}"], document["scores"][tag])
        assert run["score"] != run["final"]
    chosen = json.loads((tmp_path / "out/runs" / result.chosen / "model/evaluation.json").read_text())["decision"]
    assert result.decision["reason"].endswith(chosen["reason"])


def test_the_command_says_what_it_is(run: Runner) -> None:
    shown = run("compare", {}, "--help")
    assert "divides the runs" in shown.out
    assert run("compare", {}).code == 2
