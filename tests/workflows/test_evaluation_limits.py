"""How much work an evaluation is: rows and passes of a fit, its early end, and its progress lines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import linear_bundle
from helpers.logs import random_rows, write_lines
from helpers.runs import ALONE, absent
from torch import Tensor

from reagent_lite import console
from reagent_lite.algorithms import reward_and_q_models
from reagent_lite.algorithms.reward_and_q_models import RewardAndQModels
from reagent_lite.config import DqnConfig, check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.evaluation import EvaluationConfig, EvaluationModelsConfig
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.evaluation import policy_models, scored_episodes
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.policy_models import Learning, fit_steps
from reagent_lite.run.evaluators import Evaluators, estimates_due
from reagent_lite.run.learner import build_learner
from reagent_lite.run.resolved import resolve
from reagent_lite.tasks.evaluate import evaluate
from reagent_lite.types import TransitionBatch

Tree = dict[str, Any]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step in which models are fitted."""
    steps: list[int] = []
    forward = RewardAndQModels.forward

    def counting(self: RewardAndQModels, batch: TransitionBatch, next_propensities: Tensor) -> Any:
        if torch.is_grad_enabled():
            steps.append(len(batch.reward))
        return forward(self, batch, next_propensities)

    monkeypatch.setattr(RewardAndQModels, "forward", counting)
    return steps


def evaluators_of(folder: Path, epochs: int = 1, models: Tree | None = None, **evaluation: Any) -> Evaluators:
    """Returns the evaluators of a policy that has learned nothing, on 1000 rows."""
    log = write_lines(folder / "log.jsonl", random_rows(1000, missing=0))
    config = check(DqnConfig, {
        "training_data_path": str(log), "model_output_path": str(folder), "use_gpu": False, "actions": ["a", "b"],
        "epochs": epochs, "rl": {"gamma": 0.0}, "training": {"layers": [-1, 4, -1], "activations": ["relu", "linear"]},
        "evaluation": {"bootstrap_resamples": 100, **evaluation, "models": {"minibatch_size": 64, **(models or {})}},
    })  # fmt: skip
    source = resolve(config, ALONE).open_source()
    return source.evaluators(build_learner(source.config, source.spec, ALONE.device))


def at_end(folder: Path, epochs: int = 1, models: Tree | None = None, **evaluation: Any) -> Evaluation:
    """Evaluates such a policy as at the end of a run."""
    evaluators = evaluators_of(folder, epochs, models, **evaluation)
    evaluators.after_epoch(final=True)
    return evaluators.at_end()


def of_a_model(folder: Path, models: Tree | None = None, **evaluation: Any) -> None:
    """The same with workflows.evaluate."""
    log = write_lines(folder / "log.jsonl", random_rows(1000, missing=0))
    model = linear_bundle(folder / "model", np.eye(2), ("a", "b"), (0, 1))
    evaluate(check(EvaluateConfig, {
        "model": str(model), "data_path": str(log), "output_path": str(folder / "e.json"), "gamma": 0.0,
        "evaluation": {"bootstrap_resamples": 100, **evaluation, "models": {"minibatch_size": 64, **(models or {})}},
    }))  # fmt: skip


@pytest.mark.parametrize("run", [at_end, of_a_model])
@pytest.mark.parametrize(("most", "fewest"), [(3000, 2500), (300, 128)])
def test_a_fit_is_bounded_by_rows(run: Any, tmp_path: Path, fitted: list[int], most: int, fewest: int) -> None:
    """40 passes over 500 to 800 rows are more than 20 000; 300 are fewer than one pass has."""
    run(tmp_path, models={"max_fit_rows": most, "final_fit_passes": 40})
    assert fewest < sum(fitted) <= most + 64  # one more step is a rehearsal


@pytest.mark.parametrize("run", [at_end, of_a_model])
def test_a_fit_to_noise_ends_early(
    run: Any, tmp_path: Path, fitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reward_and_q_models, policy_models):
        monkeypatch.setattr(module, "FEWEST_STEPS", 20)
    monkeypatch.setattr(reward_and_q_models, "_CHECK_EVERY", 5)
    run(tmp_path, models={"final_fit_passes": 300})
    assert 50 <= len(fitted) < 1000


def test_models_that_nothing_could_check_are_not_fitted(tmp_path: Path, fitted: list[int]) -> None:
    """Weights of 20 scored episodes cannot leave 21 effective ones; a fit that is asked for takes place."""
    result = at_end(tmp_path, min_effective_episodes=21).result
    assert sum(fitted) == 0
    estimates = {estimate.name: estimate for estimate in result.outcomes[0].estimates}
    assert "21 effective episodes" in estimates["Direct_Method_Reward"].reason
    assert np.isfinite(estimates["IPS_Reward"].figure.value)
    for least, passes, fewest in ((21, 1, 500), (1, 40, 20_000)):
        fitted.clear()
        at_end(tmp_path, min_effective_episodes=least, models={"final_fit_passes": passes})
        assert fewest < sum(fitted) < 2 * fewest


# at least 120 steps; a quarter of 13 x 840 rows in steps of 16; five passes over these rows
@pytest.mark.parametrize(("epochs", "steps"), [(1, 120), (13, 171), (1000, 263)])
def test_fits_at_the_end_read_a_quarter_of_what_the_policy_learned_from(
    tmp_path: Path, fitted: list[int], epochs: int, steps: int
) -> None:
    at_end(tmp_path, epochs=epochs, models={"minibatch_size": 16}, min_effective_episodes=1)
    assert len(fitted) == pytest.approx(steps, rel=0.03)  # episodes are scored or not by their hashes


@pytest.mark.parametrize(("continues", "steps"), [(True, 164), (False, 265)])
def test_fits_of_episodes_read_a_sixteenth_of_it(continues: bool, steps: int) -> None:
    """Five passes over 840 rows in steps of 16 are 265 steps."""
    settings = EvaluationConfig(models=EvaluationModelsConfig(minibatch_size=16))
    learning = Learning(rows=840, epochs=50, continues=continues)
    assert fit_steps(Shards.alone(ALONE), (840,), settings, learning, final=True) == steps


@pytest.mark.parametrize(
    ("models", "estimates", "fewest", "most"),
    # 750 to 900 rows, as many as are not scored, are 12 to 15 batches of 64
    [({}, True, 2, 2), ({}, False, 0, 0), ({"fit_passes": 1}, True, 12, 15)],
)
def test_fits_after_an_epoch_read_an_eighth_of_what_the_policy_learned_from(
    tmp_path: Path, fitted: list[int], models: Tree, estimates: bool, fewest: int, most: int
) -> None:
    """800 rows are 13 batches of 64, of which the models read 2; and all of them where the config asks for a pass."""
    evaluators = evaluators_of(tmp_path, models=models)
    fitted.clear()  # of the rehearsal
    evaluators.after_epoch(final=False, estimates=estimates)
    assert fewest <= len(fitted) <= most


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "every"),
    [(5, 2, 1), (59, 2, 1), (90, 2, 3), (1000, 2, 10), (1000, 19, 1), (1000, 21, 1)],
)
def test_estimates_are_further_apart_where_epochs_are_short(epochs: int, steps_per_epoch: int, every: int) -> None:
    """At least 20 steps or, where that would leave fewer than 30 estimates, as many as leave these."""
    due = [epoch for epoch in range(1, epochs + 1) if estimates_due(epoch, epochs, steps_per_epoch)]
    assert due == list(range(every, epochs + 1, every))


def test_work_that_takes_longer_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_BRIEF_SECONDS", 0.0)
    at_end(tmp_path, models={"final_fit_passes": 1})
    assert not absent(
        caplog.text,
        "valuing rows: ",
        "measuring outcomes for the policy: ",
        "fitting models of the policy: ",
        "scoring rows by the policy: ",
        "estimating the policy: ",
    )


def test_all_episodes_are_scored_up_to_a_number_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_lines(tmp_path / "log.jsonl", random_rows(300, missing=0))
    tree = {
        "model": "logged", "data_path": str(log), "actions": ["a", "b"], "gamma": 0.0,
        "output_path": str(tmp_path / "e.json"), "evaluation": {"bootstrap_resamples": 100},
    }  # fmt: skip
    monkeypatch.setattr(scored_episodes, "_ALWAYS_SCORED", 10)
    whole = evaluate(check(EvaluateConfig, tree))
    monkeypatch.setattr(scored_episodes, "_MOST_CHOICES", 300)  # of 600 and more, with metrics
    part = evaluate(check(EvaluateConfig, tree))
    assert 10 <= part.episodes < whole.episodes
    (note,) = [warning for warning in part.warnings if "max_episodes" in warning]
    assert note == (
        f"{part.episodes} of {whole.episodes} episodes are scored; evaluation.max_episodes {whole.episodes} scores all"
    )
    assert not any("max_episodes" in warning for warning in whole.warnings)
