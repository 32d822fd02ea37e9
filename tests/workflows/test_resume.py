"""Stopping and going on: bit for bit, after every kind of end, on other processes, on full disks, alone in a folder."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkstemp

import pytest
import torch
from helpers.disks import small_disk
from helpers.logs import random_rows, write_json, write_lines
from helpers.ranks import call_on_ranks, end_ranks, start_ranks
from helpers.resuming import (
    End,
    Laboratory,
    Tree,
    agents,
    candidates,
    checkpoints,
    decisions,
    differences_of_cases,
    different,
    end,
    logged,
    merged,
    mixed,
    read,
    simulated,
    start,
    with_ids,
)
from helpers.runs import ALONE, Run, trained, with_config
from helpers.waiting import wait_until

from reagent_lite import console
from reagent_lite.config import DqnConfig
from reagent_lite.errors import ConfigError, UnavailableError
from reagent_lite.folder_lock import alone_in
from reagent_lite.tasks.train import main

DROPOUT: Tree = {"training": {"dropout_ratio": 0.2, "lr_policy": "exponential", "lr_decay": 0.7},
                 "rl": {"tensorboard_logging_freq": 5}}  # fmt: skip
PARTS: Tree = {"rl": {"multi_steps": 3, "gamma": 0.9, "tensorboard_logging_freq": 2},
               "training": {"minibatches_per_step": 2, "clip_grad_norm": 1.0}}  # fmt: skip
PRIORITIZED: Tree = {"simulation": {"replay": {"prioritized": True, "capacity": 200}}, "rl": {"multi_steps": 2}}
# 40 rows of a rank are for the kernel of losses, 26 or 27 of the last step too few for so many weights
WIDE: Tree = {"epochs": 2, "training": {"layers": [-1, 128, 128, -1], "activations": ["relu", "relu", "linear"],
                                        "minibatch_size": 40}}  # fmt: skip
KEPT: Tree = {"checkpoint": {"keep_best": True, "patience": 2}, "simulation": {"num_evaluations": 6}}
CASES: dict[str, tuple[Callable[..., Tree], Tree, list[int]]] = {
    "plain": (logged, {}, [*range(1, 22)]),
    "dropout, decay, in the middle of a report": (logged, DROPOUT, [*range(1, 22)]),
    "n steps, two minibatches a step": (logged, PARTS, [*range(1, 12)]),
    "bcq and conservative": (logged, {"rainbow": {"bcq": True}, "rl": {"cql_alpha": 0.5}}, [6, 20]),
    "categorical": (logged, {"rainbow": {"categorical": True, "qmin": -5, "qmax": 5}}, [6, 20]),
    "vectors of ids, the defaults of 2026": (with_ids, {"defaults": "2026"}, [6, 20]),
    "defaults of 2026": (logged, {"defaults": "2026"}, [6, 20]),
    "crr": (logged, {"algorithm": "crr", "training": {"dropout_ratio": 0.2}}, [6, 20]),
    "iql": (logged, {"algorithm": "iql"}, [6, 20]),
    "batch normalization": (logged, {"training": {"use_batch_norm": True}}, [6, 20]),
    "estimated propensities": (logged, {"evaluation": {"propensities": "estimate"}}, [6]),
    "bcq of the estimated policy": (
        logged,
        {"rainbow": {"bcq": True}, "evaluation": {"propensities": "estimate"}},
        [6],
    ),
    "temperature of the log": (logged, {"rl": {"temperature": "auto"}}, [6]),
    "sgd": (logged, {"training": {"optimizer": "SGD"}}, [6, 20]),
    "candidates": (candidates, {}, [6, 20]),
    "simulated": (simulated, {}, [1, 2, 12, 13, 24]),
    "simulated, by priority": (simulated, PRIORITIZED, [1, 2, 12, 13, 24]),
    "agents of two types": (agents, {}, [1, 12, 13, 24]),
    "mixed": (mixed, {}, [1, 2, 12, 13]),
    "short last batch": (logged, WIDE, [1, 2, 3]),
    "best epoch by loss": (decisions, {}, [6, 12, 30, 36]),
    "best evaluation by return, with patience": (simulated, KEPT, [6, 11, 12, 24, 32]),
    "best evaluation of agents of two types": (agents, {"checkpoint": {"keep_best": True}}, [12, 13, 24]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_that_is_stopped_equals_never_stopping(tmp_path: Path, case: str) -> None:
    build, sections, steps = CASES[case]
    assert Laboratory(build(tmp_path, **sections), ALONE, tmp_path).differences(steps[:: 1 + len(steps) // 4]) == []


def stopped_on_ranks(
    folder: Path, world: int, names: list[str], steps: dict[str, list[int]], **keys: int
) -> dict[str, list[str]]:
    cases = {}
    for name in names:
        build, sections, every = CASES[name]
        (folder / name).mkdir()
        cases[name] = {"tree": build(folder / name, **sections) | keys, "steps": steps.get(name, every)}
    file = str(write_json(folder / "cases.json", cases))
    first, *_ = [run.ok for run in call_on_ranks(differences_of_cases, [file], [folder], [world])]
    return first.outcome


def test_several_processes_stopped_equal_never_stopping(tmp_path: Path) -> None:
    """Three, for with two a sum has only one order."""
    steps = {"mixed": [2], "short last batch": [3], "estimated propensities": [13], "best epoch by loss": [13]}
    assert stopped_on_ranks(tmp_path, 3, list(steps), steps, epochs=2) == {name: [] for name in steps}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_processes_stopped_after_any_step_equal_never_stopping(tmp_path: Path, world: int) -> None:
    names = [name for name in CASES if name != "batch normalization"]
    assert stopped_on_ranks(tmp_path, world, names, {}) == {name: [] for name in names}


# the command line, and what ends a process


def test_signals_save_and_end_with_75_wherever_they_come(tmp_path: Path) -> None:
    metrics = tmp_path / "out" / "metrics.jsonl"
    # nothing is saved but when a signal asks for it, and at the end
    tree = logged(tmp_path, checkpoint={"every_steps": None})
    done = 0
    for number in (signal.SIGINT, signal.SIGUSR2):  # the others are in test_signals.py
        run = start(tmp_path, tree, REAGENT_LITE_FAULT="fail:rank=0,step=0,kind=slow,seconds=0.1")
        wait_until(lambda done=done: metrics.exists() and metrics.read_text().count("\n") > done)  # type: ignore[misc]
        run.send_signal(number)
        ended = end(run)
        assert (ended.code, "Traceback" in ended.err) == (75, False), ended.err
        assert f"{number.name}: checkpoint {checkpoints(tmp_path)[-1]} is complete" in ended.err
        done = metrics.read_text().count("\n")
    finished = end(start(tmp_path, tree)).ok
    assert (finished.outcome["steps"], finished.outcome["rows"]) == (21, 600)
    whole = Laboratory(tree, ALONE, tmp_path).run("whole", every_steps=1, keep=1000)
    tensors, lines = read(tmp_path / "out")
    assert different(whole, End(whole.steps, tensors, lines[: len(whole.lines)], whole.scores)) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="64m", files=200) as folder:
        yield folder


def fill(disk: Path, left: int) -> None:
    """Makes files until there may be only so many more."""
    while os.statvfs(disk).f_ffree > left:
        os.close(mkstemp(prefix="filler_", dir=disk)[0])


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_not_the_run(tmp_path: Path, disk: Path) -> None:
    run = start(tmp_path, logged(tmp_path) | {"model_output_path": str(disk)}, "epochs=5",
                REAGENT_LITE_FAULT="fail:rank=0,step=0,kind=slow,seconds=0.06")  # fmt: skip
    wait_until((disk / "checkpoints" / "step_000003").exists)
    fill(disk, 3)
    wait_until(lambda: "warning: no checkpoint" in run.said)
    for filler in disk.glob("filler_*"):
        filler.unlink()
    assert re.search("warning: no checkpoint.*No space left on device", end(run).ok.err)
    assert checkpoints(tmp_path, "disk") == ["step_000033", "step_000035"]


def test_a_disk_that_is_full_at_the_end_is_waited_for(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    laboratory = Laboratory(logged(tmp_path), ALONE, tmp_path)
    laboratory.run("first")
    (disk / "metrics.jsonl").touch()
    (disk / "tensorboard").mkdir()
    fill(disk, 5)
    monkeypatch.setattr(console, "_MOST_FOLDER_SECONDS", 0.1)
    with pytest.raises(UnavailableError, match="no checkpoint at the end of training: No space left on device"):
        laboratory.run("disk")
    # room appears while the run waits
    monkeypatch.setattr(console, "_MOST_FOLDER_SECONDS", 60)
    monkeypatch.setattr(console.time, "sleep", lambda _: [file.unlink() for file in disk.glob("filler_*")])
    assert laboratory.run("disk").steps == laboratory.run("whole").steps


# what may change between two starts


def unfinished(folder: Path, tree: Tree, step: int) -> Laboratory:
    """A laboratory with a run in `again` that ended after a step."""
    laboratory = Laboratory(tree, ALONE, folder)
    laboratory.run("whole", every_steps=1, keep=1000)
    laboratory.copy("whole", "again", step)
    return laboratory


def test_other_data_and_another_learning_config_are_refused_until_told_otherwise(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    unfinished(tmp_path, tree, 9)
    other = Laboratory(merged(tree, {"training": {"learning_rate": 0.5}, "rl": {"gamma": 0.5}}), ALONE, tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint.resume=false") as error:
        other.run("again")
    assert [problem.where for problem in error.value.problems] == ["rl.gamma", "training.learning_rate"]
    data = str(write_lines(tmp_path / "other.jsonl", random_rows(199)))
    with pytest.raises(ConfigError, match=r"training_data_path: .* step_000009"):
        trained(tree | {"training_data_path": data, "model_output_path": str(tmp_path / "again")})
    assert checkpoints(tmp_path, "again") == ["step_000009"]
    other.run("again", resume=False)
    assert checkpoints(tmp_path, "again") == ["step_000021"]


def test_more_epochs_continue_and_fewer_than_done_do_not(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    laboratory = unfinished(tmp_path, tree, 9)
    longer = Laboratory(tree | {"epochs": 5}, ALONE, tmp_path)
    shutil.copytree(tmp_path / "again", tmp_path / "shorter")
    assert different(longer.run("longer"), longer.run("again")) == []
    with pytest.raises(ConfigError, match="epochs: expected at least 2"):
        Laboratory(tree | {"epochs": 1}, ALONE, tmp_path).run("shorter")
    assert different(laboratory.run("third"), laboratory.run("shorter")) == []


def ranks_of(tree: Tree, folders: list[Path], processes: list[int] | None = None, fault: str = "") -> list[Run]:
    """Runs workflows.dqn with a checkpoint every three steps."""
    command = ["-m", "workflows.dqn", *with_config(folders[0].parent, {**tree, "checkpoint": {"every_steps": 3}})]
    return end_ranks(start_ranks(command, folders, processes, REAGENT_LITE_FAULT=fault))


def test_two_processes_lost_and_one_goes_on(tmp_path: Path) -> None:
    """With a global minibatch a step reads the same rows however many processes share them."""
    settings = {"training": {"minibatch_size": None}, "data": {"global_minibatch_size": 32}}
    tree = logged(tmp_path, **settings) | {"model_output_path": str(tmp_path / "out")}
    lost = ranks_of(tree, [tmp_path / "two"], [2], "fail:rank=1,step=11,kind=kill")
    assert (min(run.code for run in lost), all(run.code for run in lost)) == (-signal.SIGKILL, True)
    assert checkpoints(tmp_path) == ["step_000006", "step_000009"]
    assert "resuming from checkpoints/step_000009 (epoch 1, 264 rows)\n" in end(start(tmp_path, tree)).ok.err
    whole = Laboratory(tree, ALONE, tmp_path).run("whole")
    # sums of two processes are rounded otherwise
    torch.testing.assert_close(read(tmp_path / "out")[0], whole.tensors, rtol=0, atol=1e-5)


def test_only_node_zero_needs_the_output_folder_and_what_a_run_starts_from(tmp_path: Path) -> None:
    tree, folders = logged(tmp_path), [tmp_path / "0", tmp_path / "1"]
    trained(tree | {"model_output_path": str(folders[0] / "earlier")})
    shutil.rmtree(folders[0] / "earlier" / "model")
    tree["training"]["warm_start_model_path"] = "earlier"
    tree |= {"model_output_path": "out", "data": {"layout": "replicas", "training_copy_dir": "copy"}}
    first, second = ranks_of(tree, folders, fault="fail:rank=1,step=5,kind=kill")
    assert (first.code, second.code) == (1, -signal.SIGKILL), first.err
    assert "warm start: learner and optimizer of earlier/checkpoints/step_000021" in first.err
    first, second = ranks_of(tree, folders)
    assert (first.code, second.code) == (0, 0), first.err
    assert "resuming from checkpoints/step_000003" in first.err
    assert (folders[0] / "out" / "model" / "manifest.json").is_file()
    assert [path.name for path in folders[1].iterdir()] == ["copy"]


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """Then it has the folder, and goes on where the first one was."""
    tree = logged(tmp_path)
    first = start(tmp_path, tree, REAGENT_LITE_FAULT="fail:rank=0,step=0,kind=slow,seconds=1")
    wait_until(lambda: len(checkpoints(tmp_path)) > 0)
    second = end(start(tmp_path, tree))
    # a scheduler must not take it for a wrong config
    assert (second.code, "Traceback" in second.err) == (5, False), second.err
    holder = rf"host {socket.gethostname()}, pid {first.pid}, since \d{{4}}-"
    assert re.search(rf"model_output_path: .* got {tmp_path}/out, in use by .*{holder}", second.err), second.err
    assert first.poll() is None
    first.kill()
    third = end(start(tmp_path, tree)).ok
    assert "resuming from checkpoints/step_" in third.err
    assert third.outcome["rows"] == 600


def test_a_dry_run_does_not_ask_for_the_folder(small: Tree, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with alone_in(tmp_path / "out", "model_output_path"):
        assert main("workflows.dqn", DqnConfig, "x.json", [*with_config(tmp_path, small), "--dry_run"]) == 0
