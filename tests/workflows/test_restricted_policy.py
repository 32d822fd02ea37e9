"""BCQ's policy is one and the same where it plays, is drawn and is judged on logged rows."""

from pathlib import Path
from typing import Any

import torch
from oracles.bundles import Habit
from oracles.logs import random_rows, write_lines
from oracles.runs import ALONE

from reagent_lite.config import DqnConfig, check
from reagent_lite.rl.policies import EpsilonGreedy
from reagent_lite.run.environments import open_simulation, with_actions
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.pictures import record
from reagent_lite.run.sources import Logged, Simulated
from reagent_lite.types import Actions

SHARED: dict[str, Any] = {
    "use_gpu": False,
    "rainbow": {"bcq": True, "bcq_drop_threshold": 0.1},
    "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
}


def test_play_and_pictures_leave_out_what_the_log_hardly_takes(tmp_path: Path) -> None:
    config = check(
        DqnConfig, {**SHARED, "model_output_path": str(tmp_path), "simulation": {"env": "cartpole_v0", "num_envs": 4}}
    )
    simulation = open_simulation(config, ALONE)
    config = with_actions(config, simulation)
    source = Simulated(config, ALONE, simulation)
    learner = build_learner(config, source.spec, ALONE.device)
    learner.imitator = Habit([0.05, 0.95])  # left has 0.053 of right
    env = simulation.envs(0, 4, stream=0)
    env.reset()
    q = source.reader.policy(learner, env.device)(env.observation, env.mask, env.features)
    assert q[:, 0].tolist() == [-torch.inf] * 4
    assert q[:, 1].isfinite().all()
    for exploration in ({"epsilon": torch.zeros(1)}, {"epsilon": torch.zeros(1), "temperature": 0.5}):
        env.act(q, **exploration)
        assert (env.action.tolist(), env.propensity.tolist()) == ([1] * 4, [1] * 4)
    trace = record(source.reader, learner, EpsilonGreedy())
    assert set(trace.action) == {1}


def test_the_evaluated_policy_is_restricted(tmp_path: Path) -> None:
    """Counterfactual evaluation asks how likely the policy is to do what was logged: never what it may not take."""
    log = write_lines(tmp_path / "log.jsonl", random_rows(50, missing=0))
    config = check(DqnConfig, {**SHARED, "model_output_path": str(tmp_path), "training_data_path": str(log),
                               "actions": ["a", "b"], "evaluation": {"calc_cpe_in_training": False}})  # fmt: skip
    source = Logged(config, ALONE)
    learner = build_learner(config, source.spec, ALONE.device)
    learner.imitator = Habit([0.95, 0.05])
    evaluator = LogEvaluator(config, source.data, learner, ALONE)
    state = torch.randn(3, source.spec.num_state_features)
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    propensities = evaluator._policy(state, Actions(mask=mask))
    assert propensities.tolist() == [[1, 0], [0, 1], [1, 0]]
