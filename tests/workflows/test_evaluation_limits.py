"""How much work an evaluation is: rows and passes of a fit, its early end, and its progress lines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.bundles import linear_bundle
from oracles.logs import random_rows, write_lines
from oracles.runs import ALONE
from torch import Tensor

from reagent_lite import console
from reagent_lite.algorithms import cpe_heads
from reagent_lite.algorithms.cpe_heads import CPEHeads
from reagent_lite.config import DqnConfig, check
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.evaluation import fitting
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.run.learner import build_learner
from reagent_lite.run.sources import open_source
from reagent_lite.types import TransitionBatch
from workflows.evaluate import evaluate


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step in which models are fitted."""
    steps: list[int] = []
    forward = CPEHeads.forward

    def counting(self: CPEHeads, batch: TransitionBatch, next_propensities: Tensor) -> Any:
        if torch.is_grad_enabled():
            steps.append(len(batch.reward))
        return forward(self, batch, next_propensities)

    monkeypatch.setattr(CPEHeads, "forward", counting)
    return steps


def at_end(folder: Path, **evaluation: Any) -> Evaluation:
    """Evaluates a policy that has learned nothing on 1000 rows."""
    log = write_lines(folder / "log.jsonl", random_rows(1000, missing=0))
    config = check(DqnConfig, {
        "training_data_path": str(log), "model_output_path": str(folder), "use_gpu": False, "actions": ["a", "b"],
        "rl": {"gamma": 0.0}, "training": {"layers": [-1, 4, -1], "activations": ["relu", "linear"]},
        "evaluation": {"minibatch_size": 64, "bootstrap_resamples": 100, **evaluation},
    })  # fmt: skip
    source = open_source(config, ALONE, None)
    evaluators = source.evaluators(build_learner(config, source.spec, ALONE.device))
    evaluators.after_epoch(final=True)
    return evaluators.at_end()


def of_a_model(folder: Path, **evaluation: Any) -> None:
    """The same with workflows.evaluate."""
    log = write_lines(folder / "log.jsonl", random_rows(1000, missing=0))
    evaluation = {"minibatch_size": 64, "bootstrap_resamples": 100, **evaluation}
    tree = {"model": str(linear_bundle(folder / "model", np.eye(2), ("a", "b"), (0, 1))), "data_path": str(log),
            "output_path": str(folder / "e.json"), "gamma": 0.0, "evaluation": evaluation}  # fmt: skip
    evaluate(check(EvaluateConfig, tree))


@pytest.mark.parametrize("run", [at_end, of_a_model])
@pytest.mark.parametrize(("most", "fewest"), [(3000, 2500), (300, 128)])
def test_a_fit_is_bounded_by_rows(run: Any, tmp_path: Path, fitted: list[int], most: int, fewest: int) -> None:
    """40 passes over 500 to 800 rows are more than 20 000; 300 are fewer than one pass has."""
    run(tmp_path, max_fit_rows=most, final_fit_passes=40)
    assert fewest < sum(fitted) <= most + 64  # one more step is a rehearsal


@pytest.mark.parametrize("run", [at_end, of_a_model])
def test_a_fit_to_noise_ends_early(
    run: Any, tmp_path: Path, fitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpe_heads, fitting):
        monkeypatch.setattr(module, "FEWEST_STEPS", 20)
    monkeypatch.setattr(cpe_heads, "_CHECK_EVERY", 5)
    run(tmp_path, final_fit_passes=300)
    assert 50 <= len(fitted) < 1000


def test_models_that_nothing_could_check_are_not_fitted(tmp_path: Path, fitted: list[int]) -> None:
    """Weights of 20 scored episodes cannot leave 21 effective ones; a fit that is asked for takes place."""
    result = at_end(tmp_path, min_effective_episodes=21).result
    assert sum(fitted) == 0
    assert result is not None
    estimates = {estimate.name: estimate for estimate in result.outcomes[0].estimates}
    assert np.isnan(estimates["Direct_Method_Reward"].figure.value)
    assert "21 effective episodes" in estimates["Direct_Method_Reward"].reason
    assert np.isfinite(estimates["IPS_Reward"].figure.value)
    fitted.clear()
    assert at_end(tmp_path, min_effective_episodes=21, final_fit_passes=1).result is not None
    assert 500 < sum(fitted) < 1000
    fitted.clear()
    assert at_end(tmp_path, min_effective_episodes=1).result is not None
    assert 20_000 < sum(fitted) < 40_000  # 40 passes


def test_work_that_takes_longer_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_end(tmp_path, final_fit_passes=1)
    assert "scoring rows" not in caplog.text  # a matter of milliseconds
    monkeypatch.setattr(console, "_BRIEF_SECONDS", 0.0)
    at_end(tmp_path, final_fit_passes=1)
    said = caplog.text
    for work in ("valuing rows", "measuring outcomes for the policy", "fitting models of the policy",
                 "scoring rows by the policy", "estimating the policy"):  # fmt: skip
        assert f"{work}: " in said
