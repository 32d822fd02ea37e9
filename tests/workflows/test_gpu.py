"""The same job on a GPU: runs where there is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.logs import candidate_rows, write_lines
from oracles.runs import ROOT, Runner

from reagent_lite.errors import counted
from reagent_lite.export import load_bundle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


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
    run: Runner, small: dict[str, Any], tmp_path: Any, workflow: str, residency: str, graph: str
) -> None:
    if workflow == "parametric_dqn":
        del small["actions"]
        small["training_data_path"] = str(write_lines(tmp_path / "candidates.jsonl", candidate_rows(200)))
    cpu = run(workflow, small).outcome
    done = run(workflow, small, "--set", "use_gpu=true", "--set", f"data.residency={residency}",
               "--set", f"training.cuda_graph={graph}")  # fmt: skip
    assert done.code == 0, done.err
    assert "on cuda:0" in done.err
    assert load_bundle(done.outcome["model"]).manifest["steps"] == cpu["steps"]
    assert done.outcome["scores"]["value/model/mean"] == pytest.approx(cpu["scores"]["value/model/mean"], abs=1e-3)


def test_all_gpus(run: Runner, small: dict[str, Any]) -> None:
    done = run("dqn", small, "--set", "use_gpu=true", "--set", "use_all_avail_gpus=true")
    assert done.code == 0, done.err
    assert f"= {counted(torch.cuda.device_count(), 'process')} x" in done.err


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_one_process_over_all_gpus_learns_what_one_gpu_does(run: Runner, small: dict[str, Any]) -> None:
    alone = run("dqn", small, "--set", "use_gpu=true", "--set", "parallel=none").outcome["scores"]["td_loss/mean"]
    done = run("dqn", small, "--set", "use_gpu=true", "--set", "use_all_avail_gpus=true", "--set", "parallel=dp")
    assert done.code == 0, done.err
    assert done.outcome["scores"]["td_loss/mean"] == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("graph", ["true", "false"], ids=["captured", "eager"])
@pytest.mark.parametrize("prioritized", ["true", "false"], ids=["prioritized", "uniform"])
def test_simulated_training_on_a_gpu(run: Runner, graph: str, prioritized: str) -> None:
    """The sample config, shortened: environments, replay and updates all on the device, replayed as graphs or not."""
    config = json.loads((ROOT / "configs/cartpole/online.json").read_text())
    done = run(
        "dqn", config, "--set", "simulation.total_steps=60000", "--set", "simulation.num_evaluations=3",
        "--set", f"simulation.cuda_graph={graph}", "--set", f"simulation.replay.prioritized={prioritized}",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "16 environments on cuda" in done.err
    assert done.outcome["scores"]["simulation/return/mean"] > 100  # random actions: 22


def test_compiled_updates_on_a_gpu_learn_as_others_do(run: Runner) -> None:
    """A run long enough to be worth it."""
    config = json.loads((ROOT / "configs/cartpole/online.json").read_text())
    done = run(
        "dqn", config, "--set", "simulation.num_envs=4", "--set", "simulation.total_steps=300000",
        "--set", "simulation.stop_at_return=150", "--set", "simulation.num_evaluations=60",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "torch.compile: expected" not in done.err
    assert "updates are compiled" in done.err
    assert done.outcome["scores"]["simulation/return/mean"] > 100


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


def test_a_network_that_waits_for_the_gpu_is_launched_one_by_one(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    config = json.loads((ROOT / "configs/cartpole/online.json").read_text())
    done = run(
        "dqn", config, "--set", "simulation.total_steps=20000", "--set", "simulation.num_evaluations=2",
        "--set", "training.network=waits:Waits",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "waits.py:12 `mask.nonzero()`: expected no call that waits for the GPU" in done.err


def test_environments_on_the_cpu_beside_a_learner_on_the_gpu(run: Runner) -> None:
    """What happens without PyCUDA: updates are captured, environments step on the host."""
    config = json.loads((ROOT / "configs/cartpole/online.json").read_text())
    done = run(
        "dqn", config, "--set", "simulation.total_steps=20000", "--set", "simulation.num_evaluations=2",
        "--set", "simulation.backend=cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "16 environments on cpu" in done.err
    assert "on cuda:0" in done.err
