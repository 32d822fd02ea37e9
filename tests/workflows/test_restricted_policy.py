"""BCQ on logged rows is evaluated as it plays; that it plays as exported is in test_exported_play.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import Habit
from helpers.logs import random_rows, write_lines
from helpers.runs import ALONE, quick, trained
from safetensors.torch import load_file

from reagent_lite.config import DqnConfig, check
from reagent_lite.export import load_bundle
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.resolved import resolve
from reagent_lite.types import Actions


def test_the_evaluated_policy_is_restricted(tmp_path: Path) -> None:
    """Counterfactual evaluation asks how likely the policy is to do what was logged: never what it may not take."""
    log = write_lines(tmp_path / "log.jsonl", random_rows(50, missing=0))
    config = check(DqnConfig, quick(log, tmp_path, rainbow={"bcq": True, "bcq_drop_threshold": 0.1}))
    source = resolve(config, ALONE).open_source()
    learner = build_learner(source.config, source.spec, ALONE.device)
    learner.behavior_cloning = Habit([0.95, 0.05])
    evaluator = LogEvaluator(source.config, source.data, learner, ALONE)
    state = torch.randn(3, source.spec.num_state_features)
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    assert evaluator.policy.policy(state, Actions(mask=mask)).tolist() == [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize("parametric", [False, True])
def test_bcq_takes_what_the_estimated_logging_policy_takes(tmp_path: Path, parametric: bool) -> None:
    """The log has a in 95 % of the rows with a positive feature, and b in 95 % of the others; b pays more."""
    rng = np.random.default_rng(0)
    choices: list[Any] = [{"7": 1.0, "8": 0.0}, {"7": 0.0, "8": 1.0}] if parametric else ["a", "b"]
    signs = rng.choice((-1.0, 1.0), 1500)
    taken = ((rng.random(1500) < 0.95) == (signs < 0)).astype(int)
    rows = [
        {"mdp_id": str(number), "sequence_number": 0, "state_features": {"0": sign}, "action": choices[index],
         "reward": float(index), "possible_actions": choices, "terminal": True}
        for number, (sign, index) in enumerate(zip(signs.tolist(), taken.tolist(), strict=True))
    ]  # fmt: skip
    log = write_lines(tmp_path / "log.jsonl", rows)
    tree = quick(log, tmp_path / "out", rainbow={"bcq": True, "bcq_drop_threshold": 0.3}, epochs=3,
                 actions=None if parametric else choices, evaluation={"propensities": "estimate"},
                 norm_params={"feature_overrides": {
                     key: "DO_NOT_PREPROCESS" for key in (("0", "7", "8") if parametric else ("0",))}})  # fmt: skip
    model = Path(str(trained(tree).model))
    predicted = load_bundle(model).predict_rows([{"0": 1.0}, {"0": -1.0}], [choices] * 2 if parametric else None)
    assert predicted.mask.tolist() == [[True, False], [False, True]]
    assert 0 <= float(load_file(model / "weights.safetensors")["behavior_cloning.share"]) < 0.2
