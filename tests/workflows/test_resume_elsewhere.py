"""A run that goes on with other processes than before, or on machines of which only one has the output folder."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from oracles.ranks import end_ranks, start_ranks
from oracles.resuming import Laboratory, Tree, checkpoints, end, logged, simulated, start
from oracles.runs import ALONE, Run, trained
from safetensors.torch import load_file


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
