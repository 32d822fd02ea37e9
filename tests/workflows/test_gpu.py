"""The same job on a GPU: runs where there is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import ROOT, Run, Runner, merged, over_candidates

from reagent_lite.errors import pluralize
from reagent_lite.export import load_bundle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ALL_GPUS = ("use_gpu=true", "use_all_avail_gpus=true")


def done(run: Runner, tree: dict[str, Any] | None, *settings: str) -> Run:
    """Returns a finished run with settings, of the sample config if there is no tree."""
    given = json.loads((ROOT / "configs/cartpole/online.json").read_text()) if tree is None else tree
    workflow = "parametric_dqn" if "training_data_path" in given and "actions" not in given else "dqn"
    return run(workflow, given, *(word for setting in settings for word in ("--set", setting))).ok


@pytest.mark.parametrize(
    ("workflow", "residency", "graph"),
    [
        ("dqn", "device", "true"),
        ("dqn", "device", "false"),
        ("dqn", "host", "true"),
        ("dqn", "host", "false"),
        ("parametric_dqn", "device", "false"),
        ("parametric_dqn", "host", "false"),
    ],
)
def test_a_gpu_run_equals_a_cpu_run(
    run: Runner, small: dict[str, Any], tmp_path: Path, workflow: str, residency: str, graph: str
) -> None:
    tree = merged(small, over_candidates(tmp_path)) if workflow == "parametric_dqn" else small
    cpu = done(run, tree).outcome
    gpu = done(run, tree, "use_gpu=true", f"data.residency={residency}", f"training.cuda_graph={graph}")
    assert "on cuda:0" in gpu.err
    assert load_bundle(gpu.outcome["model"]).manifest["steps"] == cpu["steps"]
    assert gpu.outcome["scores"]["value/model/mean"] == pytest.approx(cpu["scores"]["value/model/mean"], abs=1e-3)


def test_all_gpus(run: Runner, small: dict[str, Any]) -> None:
    assert f"= {pluralize(torch.cuda.device_count(), 'process')} x" in done(run, small, *ALL_GPUS).err


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_one_process_over_all_gpus_learns_what_one_gpu_does(run: Runner, small: dict[str, Any]) -> None:
    alone, over_all = (done(run, small, *settings).outcome["scores"]["td_loss/mean"]
                       for settings in (("use_gpu=true", "parallel=none"), (*ALL_GPUS, "parallel=dp")))  # fmt: skip
    assert over_all == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("graph", ["true", "false"], ids=["captured", "eager"])
@pytest.mark.parametrize("prioritized", ["true", "false"], ids=["prioritized", "uniform"])
def test_simulated_training_on_a_gpu(run: Runner, graph: str, prioritized: str) -> None:
    """The sample config, shortened: environments, replay and updates all on the device, replayed as graphs or not."""
    result = done(run, None, "simulation.total_steps=60000", "simulation.num_evaluations=3",
                  f"training.cuda_graph={graph}", f"simulation.replay.prioritized={prioritized}")  # fmt: skip
    assert "16 environments on cuda" in result.err
    assert result.outcome["scores"]["simulation/return/mean"] > 100  # random actions: 22


def test_compiled_updates_on_a_gpu_learn_as_others_do(run: Runner) -> None:
    """A run long enough to be worth it."""
    result = done(run, None, "simulation.num_envs=4", "simulation.total_steps=300000",
                  "simulation.stop_at_return=150", "simulation.num_evaluations=60")  # fmt: skip
    assert "torch.compile: expected" not in result.err
    assert "updates are compiled" in result.err
    assert result.outcome["scores"]["simulation/return/mean"] > 100


WAITS = """
from torch import nn

class Waits(nn.Module):
    def __init__(self, spec, settings):
        super().__init__()
        self.shape = len(spec.action_names), settings.outputs
        self.layer = nn.Linear(spec.num_state_features, self.shape[0] * self.shape[1])

    def forward(self, state, mask, features):
        if self.training:
            mask.nonzero()
        return self.layer(state).unflatten(1, self.shape)
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param("training.network=waits:Waits",
                     ["waits.py:12 `mask.nonzero()`: expected no call that waits for the GPU"],
                     id="a network that waits is launched one by one"),
        # what happens without PyCUDA: updates are captured, environments step on the host
        pytest.param("simulation.backend=cpu", ["16 environments on cpu", "on cuda:0"],
                     id="environments on the CPU beside a learner on the GPU"),
    ],
)  # fmt: skip
def test_work_of_the_host_beside_the_gpu(run: Runner, tmp_path: Path, setting: str, words: list[str]) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    result = done(run, None, "simulation.total_steps=20000", "simulation.num_evaluations=2", setting)
    assert all(word in result.err for word in words), result.err
