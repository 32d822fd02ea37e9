"""Stopping and going on: bit for bit after every step, after every kind of end, on other processes and full disks."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from oracles.disks import small_disk
from oracles.logs import random_rows, write_lines
from oracles.ranks import call_on_ranks
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
from oracles.runs import ALONE, trained
from oracles.waiting import wait_until

from reagent_lite.distributed.worker import STOP_SIGNALS
from reagent_lite.errors import CheckpointError, ConfigError

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
    "bcq and conservative": (logged, {"rainbow": {"bcq": True}, "rl": {"cql_alpha": 0.5}}, [1, 6, 7, 20]),
    "categorical": (logged, {"rainbow": {"categorical": True, "qmin": -5, "qmax": 5}}, [1, 6, 7, 20]),
    "crr": (logged, {"algorithm": "crr", "training": {"dropout_ratio": 0.2}}, [1, 6, 7, 20]),
    "iql": (logged, {"algorithm": "iql"}, [1, 6, 7, 20]),
    "batch normalization": (logged, {"training": {"use_batch_norm": True}}, [1, 6, 7, 20]),
    "estimated propensities": (logged, {"evaluation": {"propensities": "estimate"}}, [1, 6, 20]),
    "bcq of the estimated policy": (
        logged,
        {"rainbow": {"bcq": True}, "evaluation": {"propensities": "estimate"}},
        [1, 6, 20],
    ),
    "temperature of the log": (logged, {"rl": {"temperature": "auto"}}, [1, 6, 20]),
    "sgd": (logged, {"training": {"optimizer": "SGD"}}, [1, 6, 7, 20]),
    "candidates": (candidates, {}, [1, 6, 7, 20]),
    "simulated": (simulated, {}, [1, 2, 12, 13, 24]),
    "simulated, by priority": (simulated, PRIORITIZED, [1, 2, 12, 13, 24]),
    "agents of two types": (agents, {}, [1, 12, 13, 24]),
    "mixed": (mixed, {}, [1, 2, 12, 13]),
    "short last batch": (logged, WIDE, [1, 2, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_stopped_after_any_step_equals_never_stopping(tmp_path: Path, case: str) -> None:
    build, sections, steps = CASES[case]
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
    steps = {"plain": [1, 2], "mixed": [1, 2], "short last batch": [1, 3], "estimated propensities": [20]}
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
        assert f"{number.name}: checkpoint {newest} is complete; run the same command again to continue" in ended.err
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
    run = start(tmp_path, tree, "epochs=8", REAGENT_LITE_FAULT="fail:rank=0,step=0,kind=slow,seconds=0.06")
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
    assert "is complete; run the same command again to continue" in said
    assert checkpoints(tmp_path, "disk") == ["step_000054", "step_000056"]


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_that_is_full_or_read_only_while_a_run_begins_again_is_waited_for(
    tmp_path: Path, disk_of_200_files: Path, fault: str
) -> None:
    disk, filler = disk_of_200_files, disk_of_200_files / "filler"
    tree = logged(tmp_path) | {"model_output_path": str(disk), "num_processes_per_node": 2}
    run = start(tmp_path, tree, REAGENT_LITE_FAULT="fail:rank=1,step=5,kind=kill", OMP_NUM_THREADS="1")
    wait_until(lambda: "restart 1 of at most 3" in run.said)
    if fault == "full":
        with suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(bytes(4096)):
                pass
    else:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    reason = os.strerror(errno.ENOSPC if fault == "full" else errno.EROFS)
    wait_until(lambda: f"{disk} cannot be used: {reason}; waiting since" in run.said or run.poll() is not None)
    assert run.poll() is None, run.said
    if fault == "full":
        filler.unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    done = end(run)
    assert done.code == 0, done.err
    assert "resuming from checkpoints/step_000003" in done.err
    assert "restart 2" not in done.err


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
    said = "training_data_path: expected the source of the unfinished run of checkpoint step_000009"
    with pytest.raises(ConfigError, match=said):
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
