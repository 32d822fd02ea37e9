"""Stopping and going on: bit for bit, after every kind of end, on other processes, on full disks, alone in a folder."""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from oracles.disks import small_disk
from oracles.logs import random_rows, write_lines
from oracles.ranks import call_on_ranks, end_ranks, start_ranks
from oracles.resuming import (
    End,
    Laboratory,
    Tree,
    agents,
    candidates,
    checkpoints,
    differences_of_cases,
    different,
    end,
    logged,
    merged,
    mixed,
    read,
    simulated,
    start,
)
from oracles.runs import ALONE, Run, trained
from oracles.waiting import wait_until
from safetensors.torch import load_file

from reagent_lite.config import DqnConfig
from reagent_lite.distributed.worker import STOP_SIGNALS
from reagent_lite.errors import CheckpointError, ConfigError
from reagent_lite.files import alone_in
from reagent_lite.run.launch import main

DROPOUT: Tree = {"training": {"dropout_ratio": 0.2, "lr_policy": "exponential", "lr_decay": 0.7},
                 "rl": {"tensorboard_logging_freq": 5}}  # fmt: skip
PARTS: Tree = {"rl": {"multi_steps": 3, "gamma": 0.9, "tensorboard_logging_freq": 2},
               "training": {"minibatches_per_step": 2, "clip_grad_norm": 1.0}}  # fmt: skip
PRIORITIZED: Tree = {"simulation": {"replay": {"prioritized": True, "capacity": 200}}, "rl": {"multi_steps": 2}}
# 40 rows of a rank are for the kernel of losses, 26 or 27 of the last step too few for so many weights
WIDE: Tree = {"epochs": 2, "training": {"layers": [-1, 128, 128, -1], "activations": ["relu", "relu", "linear"],
                                        "minibatch_size": 40}}  # fmt: skip
CASES: dict[str, tuple[Callable[..., Tree], Tree, list[int]]] = {
    "plain": (logged, {}, [*range(1, 22)]),
    "dropout, decay, in the middle of a report": (logged, DROPOUT, [*range(1, 22)]),
    "n steps, two minibatches a step": (logged, PARTS, [*range(1, 12)]),
    "bcq and conservative": (logged, {"rainbow": {"bcq": True}, "rl": {"cql_alpha": 0.5}}, [6, 20]),
    "categorical": (logged, {"rainbow": {"categorical": True, "qmin": -5, "qmax": 5}}, [6, 20]),
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
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_that_is_stopped_equals_never_stopping(tmp_path: Path, case: str) -> None:
    build, sections, steps = CASES[case]
    steps = steps if len(steps) < 8 else steps[::3]
    assert Laboratory(build(tmp_path, **sections), ALONE, tmp_path).differences(steps) == []


def stopped_on_ranks(folder: Path, world: int, names: list[str], steps: dict[str, list[int]]) -> dict[str, list[str]]:
    cases = {}
    for name in names:
        build, sections, every = CASES[name]
        (folder / name).mkdir()
        cases[name] = {"tree": build(folder / name, **sections), "steps": steps.get(name, every)}
    (folder / "cases.json").write_text(json.dumps(cases))
    runs = call_on_ranks(differences_of_cases, [str(folder / "cases.json")], [folder], [world])
    assert [run.code for run in runs] == [0] * world, runs[0].err[-3000:]
    return runs[0].outcome


def test_several_processes_stopped_equal_never_stopping(tmp_path: Path) -> None:
    """Three, for with two a sum has only one order."""
    steps = {"plain": [2], "mixed": [2], "short last batch": [1, 3], "estimated propensities": [20]}
    assert stopped_on_ranks(tmp_path, 3, list(steps), steps) == {name: [] for name in steps}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_processes_stopped_after_any_step_equal_never_stopping(tmp_path: Path, world: int) -> None:
    names = [name for name in CASES if name != "batch normalization"]
    assert stopped_on_ranks(tmp_path, world, names, {}) == {name: [] for name in names}


# the command line, and what ends a process


def same_end(folder: Path, tree: Tree, root: Path) -> list[str]:
    """Returns how a finished run differs from one that was never stopped."""
    whole = Laboratory(tree, ALONE, root).run("whole", every_steps=1, keep=1000)
    tensors, lines = read(folder)
    return different(whole, End(whole.steps, tensors, lines[: len(whole.lines)], whole.scores))


def test_signals_save_and_end_with_75_wherever_they_come(tmp_path: Path) -> None:
    tree, slow = logged(tmp_path), "fail:rank=0,step=0,kind=slow,seconds=0.1"
    metrics = tmp_path / "out" / "metrics.jsonl"
    tree["checkpoint"] = {"every_steps": None}  # nothing is saved but when a signal asks for it, and at the end
    done = 0
    for number in STOP_SIGNALS:
        run = start(tmp_path, tree, REAGENT_LITE_FAULT=slow)
        wait_until(lambda done=done: metrics.exists() and metrics.read_text().count("\n") > done)  # type: ignore[misc]
        run.send_signal(number)
        ended = end(run)
        assert ended.code == 75, ended.err
        (*_, newest) = checkpoints(tmp_path)
        assert f"{number.name}: checkpoint {newest} is complete" in ended.err
        assert "Traceback" not in ended.err
        done = metrics.read_text().count("\n")
    finished = end(start(tmp_path, tree))
    assert finished.code == 0, finished.err
    assert (finished.outcome["steps"], finished.outcome["rows"]) == (21, 600)
    assert same_end(tmp_path / "out", tree, tmp_path) == []


@pytest.fixture
def disk_of_200_files(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="64m", files=200) as disk:
        yield disk


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_not_the_run(
    tmp_path: Path, disk_of_200_files: Path
) -> None:
    disk, tree = disk_of_200_files, logged(tmp_path) | {"model_output_path": str(disk_of_200_files)}
    run = start(tmp_path, tree, "epochs=5", REAGENT_LITE_FAULT="fail:rank=0,step=0,kind=slow,seconds=0.06")
    wait_until((disk / "checkpoints" / "step_000003").exists)
    fillers = []
    while os.statvfs(disk).f_ffree > 3:
        fillers.append(disk / f"filler_{len(fillers)}")
        fillers[-1].touch()
    wait_until(lambda: "warning: no checkpoint" in run.said)
    for filler in fillers:
        filler.unlink()
    done = end(run)
    assert done.code == 0, done.err
    said = next(line for line in done.err.splitlines() if "warning: no checkpoint" in line)
    assert "No space left on device" in said
    assert checkpoints(tmp_path, "disk") == ["step_000033", "step_000035"]


# what may change between two starts


def unfinished(folder: Path, tree: Tree, step: int) -> Laboratory:
    """A laboratory with a run in `again` that ended after a step."""
    laboratory = Laboratory(tree, ALONE, folder)
    laboratory.run("whole", every_steps=1, keep=1000)
    laboratory.copy("whole", "again", step)
    return laboratory


def test_another_learning_config_is_refused_until_told_otherwise(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    unfinished(tmp_path, tree, 9)
    other = merged(tree, {"training": {"learning_rate": 0.5}, "rl": {"gamma": 0.5}})
    with pytest.raises(ConfigError) as error:
        Laboratory(other, ALONE, tmp_path).run("again")
    assert [problem.where for problem in error.value.problems] == ["rl.gamma", "training.learning_rate"]
    assert "checkpoint.resume=false" in str(error.value)
    assert checkpoints(tmp_path, "again") == ["step_000009"]
    Laboratory(other, ALONE, tmp_path).run("again", resume=False)
    assert checkpoints(tmp_path, "again") == ["step_000021"]


def test_other_data_is_refused(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    unfinished(tmp_path, tree, 9)
    write_lines(Path(tree["training_data_path"]), random_rows(199))
    with pytest.raises(ConfigError, match=r"training_data_path: .* step_000009"):
        trained(tree | {"model_output_path": str(tmp_path / "again")})


def test_more_epochs_continue_and_fewer_than_done_do_not(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    laboratory = unfinished(tmp_path, tree, 9)
    longer = Laboratory(tree | {"epochs": 5}, ALONE, tmp_path)
    whole = longer.run("longer")
    shutil.copytree(tmp_path / "again", tmp_path / "shorter")
    assert different(whole, longer.run("again")) == []
    with pytest.raises(ConfigError, match="epochs: expected at least 2"):
        Laboratory(tree | {"epochs": 1}, ALONE, tmp_path).run("shorter")
    assert different(laboratory.run("third"), laboratory.run("shorter")) == []


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path: Path, disk_of_200_files: Path) -> None:
    laboratory = Laboratory(logged(tmp_path), ALONE, tmp_path)
    laboratory.run("first")
    (disk_of_200_files / "metrics.jsonl").touch()
    (disk_of_200_files / "tensorboard").mkdir()
    while os.statvfs(disk_of_200_files).f_ffree > 5:
        (disk_of_200_files / f"filler_{os.statvfs(disk_of_200_files).f_ffree}").touch()
    with pytest.raises(CheckpointError, match="No space left on device"):
        laboratory.run("disk")


def ranks_of(tree: Tree, folders: list[Path], processes: list[int] | None = None, fault: str = "") -> list[Run]:
    """Runs workflows.dqn with a checkpoint every three steps."""
    config = folders[0].parent / "config.json"
    config.write_text(json.dumps({**tree, "checkpoint": {"every_steps": 3}}))
    command = ["-m", "workflows.dqn", "--config", str(config)]
    return end_ranks(start_ranks(command, folders, processes, REAGENT_LITE_FAULT=fault))


def killed_and_alone(folder: Path, tree: Tree, fault: str, left: list[str]) -> Run:
    """Returns how a run of one process ends that goes on where one of two was killed."""
    lost = ranks_of({"model_output_path": str(folder / "out"), **tree}, [folder / "two"], [2], fault)
    codes = [run.code for run in lost]
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    assert checkpoints(folder) == left
    done = end(start(folder, tree))
    assert done.code == 0, done.err
    return done


def test_two_processes_lost_and_one_goes_on(tmp_path: Path) -> None:
    """With a global minibatch a step reads the same rows however many processes share them."""
    tree = logged(tmp_path)
    del tree["training"]["minibatch_size"]
    tree["data"] = {"global_minibatch_size": 32}
    left = ["step_000006", "step_000009"]
    done = killed_and_alone(tmp_path, tree, "fail:rank=1,step=11,kind=kill", left)
    assert "resuming from checkpoints/step_000009 (epoch 1, 264 rows)\n" in done.err
    whole = Laboratory(tree, ALONE, tmp_path).run("whole")
    newest = tmp_path / "out" / "checkpoints" / "step_000021" / "learner.safetensors"
    for name, tensor in load_file(newest).items():  # sums of two processes are rounded otherwise
        torch.testing.assert_close(tensor, whole.tensors[f"learner.safetensors:{name}"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_simulated_environments_move_to_one_process(tmp_path: Path) -> None:
    tree, left = simulated(tmp_path, training={"minibatch_size": 16}), ["step_000009", "step_000012"]
    done = killed_and_alone(tmp_path, tree, "fail:rank=1,step=14,kind=kill", left)
    assert "resuming from checkpoints/step_000012" in done.err
    # 12 steps of 2 x 16 rows and, of the (300 - 104) // 8 = 24 steps, 12 of 16
    assert (done.outcome["steps"], done.outcome["rows"]) == (24, 12 * 32 + 12 * 16)


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


SLOW = "fail:rank=0,step=0,kind=slow,seconds=1"


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """Then it has the folder, and goes on where the first one was."""
    tree = logged(tmp_path)
    first = start(tmp_path, tree, REAGENT_LITE_FAULT=SLOW)
    wait_until(lambda: len(checkpoints(tmp_path)) > 0)
    second = end(start(tmp_path, tree))
    assert second.code == 5, second.err  # a scheduler must not take it for a wrong config
    holder = rf"host {socket.gethostname()}, pid {first.pid}, since \d{{4}}-"
    assert re.search(rf"model_output_path: .* got {tmp_path}/out, in use by .*{holder}", second.err), second.err
    assert "Traceback" not in second.err
    assert first.poll() is None
    first.kill()
    third = end(start(tmp_path, tree))
    assert third.code == 0, third.err
    assert "resuming from checkpoints/step_" in third.err
    assert third.outcome["rows"] == 600


def test_a_dry_run_does_not_ask_for_the_folder(small: Tree, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "c.json").write_text(json.dumps(small))
    with alone_in(tmp_path / "out", "model_output_path"):
        assert main("workflows.dqn", DqnConfig, "x.json", ["--config", f"{tmp_path}/c.json", "--dry_run"]) == 0
