"""BCQ on logged rows is evaluated as it plays; that it plays as exported is in test_exported_play.py."""

from pathlib import Path

import torch
from oracles.bundles import Habit
from oracles.logs import random_rows, write_lines
from oracles.runs import ALONE, quick

from reagent_lite.config import DqnConfig, check
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.sources import Logged
from reagent_lite.types import Actions


def test_the_evaluated_policy_is_restricted(tmp_path: Path) -> None:
    """Counterfactual evaluation asks how likely the policy is to do what was logged: never what it may not take."""
    log = write_lines(tmp_path / "log.jsonl", random_rows(50, missing=0))
    config = check(DqnConfig, quick(log, tmp_path, rainbow={"bcq": True, "bcq_drop_threshold": 0.1}))
    source = Logged(config, ALONE)
    learner = build_learner(config, source.spec, ALONE.device)
    learner.imitator = Habit([0.95, 0.05])
    evaluator = LogEvaluator(config, source.data, learner, ALONE)
    state = torch.randn(3, source.spec.num_state_features)
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    propensities = evaluator.policy.policy(state, Actions(mask=mask))
    assert propensities.tolist() == [[1, 0], [0, 1], [1, 0]]
