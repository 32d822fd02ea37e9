"""A run that goes on with other processes than before, or on machines of which only one has the output folder."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.ranks import end_ranks, start_ranks
from oracles.resuming import Laboratory, checkpoints, end, logged, simulated, start
from oracles.runs import Runner
from safetensors.torch import load_file

from reagent_lite.config import DqnConfig
from reagent_lite.distributed.group import Group, Place

Tree = dict[str, Any]
ALONE = Group(Place(), torch.device("cpu"))


def ranks_of(folder: Path, tree: Tree, world: int, fault: str = "", *settings: str, nodes: int = 1) -> list[int]:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_output_path": str(folder / "out"), **tree, "checkpoint": {"every_steps": 3}}))
    overrides = [part for setting in settings for part in ("--set", setting)]
    arguments = ["-m", "workflows.dqn", "--config", str(config), *overrides]
    return end_ranks(start_ranks(world, arguments, folder, nodes=nodes, REAGENT_LITE_FAULT=fault))


def test_two_processes_lost_and_one_goes_on(tmp_path: Path) -> None:
    """With a global minibatch a step reads the same rows however many processes share them."""
    tree = logged(tmp_path)
    del tree["training"]["minibatch_size"]
    tree["data"] = {"global_minibatch_size": 32}
    codes = ranks_of(tmp_path, tree, 2, "fail:rank=1,step=11,kind=kill")
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    assert checkpoints(tmp_path) == ["step_000006", "step_000009"]
    done = end(start(tmp_path, tree))
    assert done.code == 0, done.err
    assert "resuming from checkpoints/step_000009 (epoch 1, 264 rows)\n" in done.err
    whole = Laboratory(DqnConfig, tree, ALONE, tmp_path).run("whole")
    newest = tmp_path / "out" / "checkpoints" / "step_000021" / "learner.safetensors"
    for name, tensor in load_file(newest).items():  # sums of two processes are rounded otherwise
        torch.testing.assert_close(tensor, whole.tensors[f"learner.safetensors:{name}"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_another_minibatch_reads_the_epoch_again_and_says_so(tmp_path: Path) -> None:
    """32 rows for each of two processes are 4 steps of an epoch of 200 rows; for one process they are 7."""
    tree = logged(tmp_path)
    ranks_of(tmp_path, tree, 2, "fail:rank=0,step=7,kind=kill")
    assert checkpoints(tmp_path) == ["step_000003", "step_000006"]
    done = end(start(tmp_path, tree))
    assert done.code == 0, done.err
    assert "resuming from checkpoints/step_000006 (epoch 1, 200 rows); 128 rows of an epoch are read again" in done.err
    assert (done.outcome["steps"], done.outcome["rows"]) == (21, 600)


@pytest.mark.slow
def test_simulated_environments_move_to_one_process(tmp_path: Path) -> None:
    tree = simulated(tmp_path, training={"minibatch_size": 16})
    ranks_of(tmp_path, tree, 2, "fail:rank=1,step=14,kind=kill")
    assert checkpoints(tmp_path) == ["step_000009", "step_000012"]
    done = end(start(tmp_path, tree))
    assert done.code == 0, done.err
    assert "resuming from checkpoints/step_000012" in done.err
    # 12 steps of 2 x 16 rows and, of the (300 - 104) // 8 = 24 steps, 12 of 16
    assert (done.outcome["steps"], done.outcome["rows"]) == (24, 12 * 32 + 12 * 16)


def test_only_node_zero_needs_the_output_folder(tmp_path: Path) -> None:
    tree = logged(tmp_path)
    tree["model_output_path"] = "out"  # each node has a place of its own for it
    places = [tmp_path / f"node_{node}" for node in range(2)]
    config = tmp_path / "config.json"
    tree["data"] = {"layout": "replicas", "training_copy_dir": "copy"}
    config.write_text(json.dumps({**tree, "checkpoint": {"every_steps": 3}}))
    for fault, codes in (("fail:rank=1,step=5,kind=kill", {1, -signal.SIGKILL}), ("", {0})):
        ranks = start_ranks(2, ["-m", "workflows.dqn", "--config", str(config)], tmp_path, nodes=2, places=places,
                            REAGENT_LITE_FAULT=fault)  # fmt: skip
        assert set(end_ranks(ranks)) == codes, (tmp_path / "err_0").read_text()
    assert "resuming from checkpoints/step_000003" in (tmp_path / "err_0").read_text()
    assert (places[0] / "out" / "model" / "manifest.json").is_file()
    assert [path.name for path in places[1].iterdir()] == ["copy"]


def test_a_warm_start_is_read_on_node_zero_only(run: Runner, tmp_path: Path) -> None:
    tree = logged(tmp_path) | {"model_output_path": str(tmp_path / "first")}
    assert run("dqn", tree).code == 0
    places = [tmp_path / f"node_{node}" for node in range(2)]
    places[0].mkdir()
    (tmp_path / "first").rename(places[0] / "earlier")
    tree["training"]["warm_start_model_path"] = "earlier"
    tree |= {"model_output_path": "out", "data": {"layout": "replicas", "training_copy_dir": "copy"}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    arguments = ["-m", "workflows.dqn", "--config", str(tmp_path / "config.json")]
    ranks = start_ranks(2, arguments, tmp_path, nodes=2, places=places)
    assert end_ranks(ranks) == [0, 0], (tmp_path / "err_0").read_text()
    assert "warm start: learner and optimizer of earlier/checkpoints/step_000021" in (tmp_path / "err_0").read_text()
