"""Logs of which some rows were dropped by what happened in them; `weight` says how many decisions a row stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import reagent_lite
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import DataError
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page, missing_estimates
from reagent_lite.evaluation.evaluation_rows import EvaluationRows

COLUMNS = {"state_features": ["x"]}


def page_of_pairs(episodes: int, steps: int) -> EvaluationRows:
    """Every episode is there twice, next to each other."""
    rng = np.random.default_rng(3)
    rows = episodes * steps
    model = rng.dirichlet([2, 2], rows)
    columns = {
        "action": torch.from_numpy(rng.integers(0, 2, rows)),
        "mask": torch.ones(rows, 2, dtype=torch.bool),
        "steps": torch.ones(rows, dtype=torch.float64),
        "bootstrap": torch.from_numpy(((np.arange(rows) % steps < steps - 1) | (rng.random(rows) < 0.3)).astype(float)),
        "propensity": torch.from_numpy(rng.uniform(0.3, 0.7, rows)),
        "model_propensities": torch.from_numpy(model),
        "outcomes": torch.from_numpy((rng.random((rows, 1)) < 0.4).astype(float)),
        "reward_model": torch.from_numpy(rng.random((rows, 2, 1))),
        "q_values": torch.from_numpy(rng.random((rows, 2, 1))),
        "next_value": torch.from_numpy(rng.random((rows, 1))),
    }
    twice = torch.arange(rows).view(episodes, 1, steps).expand(-1, 2, -1).flatten()
    page = EvaluationRows(
        names=("Reward",),
        episode=torch.arange(2 * episodes).repeat_interleave(steps),
        **{name: column[twice] for name, column in columns.items()},
    )
    return page


def evaluated(page: EvaluationRows, resamples: int = 100) -> CPEResult:
    config = EvaluationConfig(bootstrap_resamples=resamples)
    return evaluate_page(page, gamma=0.9, config=config, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_of_weight_2_is_two_rows(steps: int) -> None:
    """Of every pair of episodes whose first reward is 0 one is dropped, and the other one has weight 6, others 3."""
    whole = page_of_pairs(200, steps)
    first_reward = whole.outcomes[:, 0].view(-1, steps)[:, 0].repeat_interleave(steps)
    second = whole.episode % 2 == 1
    kept = (~second | (first_reward > 0)).nonzero().squeeze(1)
    weight = torch.where(first_reward > 0, 3.0, 6.0).double()
    part = replace(whole.rows(kept), sample_weight=weight[kept])
    complete = evaluated(whole)
    dropped = evaluated(part)
    (of_whole,) = complete.outcomes
    (of_part,) = dropped.outcomes
    for one, other in zip(of_whole.estimates, of_part.estimates, strict=True):
        if one.name != "MAGIC":  # it depends on resamples
            assert other.figure.value == pytest.approx(one.figure.value, rel=1e-12)
    assert of_part.one_step.logged.value == pytest.approx(of_whole.one_step.logged.value, rel=1e-12)
    assert of_part.sequential.logged.value == pytest.approx(of_whole.sequential.logged.value, rel=1e-12)
    assert complete.overlap is not None
    assert dropped.overlap is not None
    for name in ("unsupported_share", "cut_share", "changed_share", "shrunk_share"):
        assert getattr(dropped.overlap, name) == pytest.approx(getattr(complete.overlap, name), rel=1e-12)
    assert dropped.overlap.mean_weight.value == pytest.approx(complete.overlap.mean_weight.value, rel=1e-12)
    assert dropped.overlap.mean_episode_weight.value == pytest.approx(complete.overlap.mean_episode_weight.value)
    assert complete.overlap.effective_sample is None
    exact = float(weight[kept].sum() ** 2 / weight[kept].square().sum())
    assert dropped.overlap.effective_sample == pytest.approx(exact)


def test_equal_weights_change_nothing() -> None:
    page = page_of_pairs(100, 2)
    without, alike = (
        evaluated(part) for part in (page, replace(page, sample_weight=torch.full((len(page),), 7.0).double()))
    )
    for one, other in zip(without.outcomes[0].estimates, alike.outcomes[0].estimates, strict=True):
        for figure in ("figure", "difference"):
            ends = [(getattr(row, figure).low, getattr(row, figure).high) for row in (one, other)]
            assert ends[1] == pytest.approx(ends[0], rel=1e-9)
        assert one.verdict is other.verdict


@pytest.mark.slow
@pytest.mark.parametrize("rare", [0.02, 0.2])
def test_intervals_of_a_log_of_events_hold_the_truth(rare: float) -> None:
    """200 logs in which one of twenty rows without an event was kept; intervals of 95 %."""
    missing = missing_estimates(rows=1, without_propensity=0, unfitted="no models")
    held = dict.fromkeys(("value", "difference"), 0)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        state = rng.normal(size=20_000)
        logging = 1 / (1 + np.exp(-state))
        action = (rng.random(20_000) < logging).astype(int)
        pays = np.stack([np.full(20_000, rare), rare * (1 + np.tanh(state) / 2)], 1)
        event = rng.random(20_000) < pays[np.arange(20_000), action]
        kept = event | (rng.random(20_000) < 0.05)
        model = np.stack([np.full(20_000, 0.3), np.full(20_000, 0.7)], 1)
        rows = int(kept.sum())
        zero = torch.zeros(rows, 2, 1, dtype=torch.float64)
        page = EvaluationRows(
            names=("Reward",),
            episode=torch.arange(rows),
            action=torch.from_numpy(action[kept]),
            mask=torch.ones(rows, 2, dtype=torch.bool),
            steps=torch.ones(rows, dtype=torch.float64),
            bootstrap=torch.zeros(rows, dtype=torch.float64),
            propensity=torch.from_numpy(np.where(action == 1, logging, 1 - logging)[kept]),
            model_propensities=torch.from_numpy(model[kept]),
            outcomes=torch.from_numpy(event[kept].astype(float)).unsqueeze(1),
            reward_model=zero,
            q_values=zero,
            next_value=zero[:, 0],
            sample_weight=torch.from_numpy(np.where(event, 1.0, 20.0)[kept]),
        )
        config = EvaluationConfig(bootstrap_resamples=100)
        generator = torch.Generator().manual_seed(0)
        result = evaluate_page(page, gamma=0.0, config=config, generator=generator, missing=missing)
        (row,) = (row for row in result.outcomes[0].one_step.estimates if row.name == "IPS_Reward")
        truth = rare  # tanh is odd: both actions pay the same on average
        logged = rare * (1 + TANH / 2)
        held["value"] += row.figure.low <= truth <= row.figure.high
        held["difference"] += row.difference.low <= truth - logged <= row.difference.high
    assert min(held.values()) >= 0.92 * 200, held


_POINTS = np.linspace(-8, 8, 20_001)
_DENSITY = np.exp(-(_POINTS**2) / 2) / np.exp(-(_POINTS**2) / 2).sum()
TANH = float((_DENSITY * np.tanh(_POINTS) / (1 + np.exp(-_POINTS))).sum())
"""Mean of sigmoid(x) tanh(x) of standard normal x."""


def log_of_clicks(rows: int = 4_000) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A log in which b is clicked twice as often, and the log without every second row that has no click."""
    rng = np.random.default_rng(0)
    b = rng.random(rows) < 0.5
    log = pd.DataFrame({
        "x": rng.random(rows), "action": np.where(b, "b", "a"), "action_probability": 0.5,
        "reward": (rng.random(rows) < np.where(b, 0.2, 0.1)).astype(float), "wanted": np.where(b, 0.9, 0.1),
    })  # fmt: skip
    unrewarded = log.index[log.reward == 0]
    part = log.drop(unrewarded[1::2]).assign(stands_for=lambda rows: np.where(rows.reward > 0, 1, 2))
    return log, part.reset_index(drop=True)


@pytest.mark.parametrize("estimated", [False, True])
def test_a_log_that_names_its_weights(tmp_path: Path, estimated: bool) -> None:
    log, part = log_of_clicks()
    config = {"columns": {**COLUMNS, "weight": "stands_for"}, "actions": ["a", "b"], "output_path": tmp_path / "e.json"}
    if estimated:
        config["evaluation"] = {"propensities": "estimate"}
        part["action_probability"] = 0.9
    result = reagent_lite.evaluate("column:wanted", part, config=config)
    rows = {row["estimator"]: row for row in result.estimate_rows}
    count = part.stands_for
    weight = part.wanted / 0.5
    by_hand = {
        "IPS_Reward": (count * weight * part.reward).sum() / count.sum(),
        "Self_Normalized_IPS_Reward": (count * weight * part.reward).sum() / (count * weight).sum(),
    }
    tolerance = 0.05 if estimated else 1e-6
    assert {name: rows[name]["estimate"] for name in by_hand} == pytest.approx(by_hand, rel=tolerance)
    # of the whole log: 0.9 * 0.2 + 0.1 * 0.1
    assert rows["IPS_Reward"]["low"] < (2 * log.wanted * log.reward).mean() < rows["IPS_Reward"]["high"]
    overlap = json.loads(Path(result.report).read_text())["model"]["cpe"]["overlap"]
    assert overlap["effective_sample"] == pytest.approx(count.sum() ** 2 / (count**2).sum())
    assert result.rows == len(part)


def test_models_learn_from_rows_by_weight(tmp_path: Path) -> None:
    """Clicks are 0.15 of the log, and 0.26 of the rows that are left."""
    log, part = log_of_clicks()
    config = {"columns": {**COLUMNS, "weight": "stands_for"}, "actions": ["a", "b"], "output_path": tmp_path / "e.json"}
    result = reagent_lite.evaluate("uniform", part, config=config)
    (row,) = (row for row in result.estimate_rows if row["estimator"] == "Direct_Method_Reward")
    assert row["estimate"] == pytest.approx(log.reward.mean(), abs=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stands_for": 0}, "expected a positive number in every row, how many decisions it stands for, got 0"),
        ({"stands_for": None}, "expected a positive number in every row"),
        ({"session": "one"}, "expected one stands_for for all rows of an episode, got several"),
    ],
)
def test_faults_of_weights(tmp_path: Path, change: dict[str, object], message: str) -> None:
    _, part = log_of_clicks(40)
    part = part.assign(session=[f"s{row}" for row in range(len(part))], number=range(len(part)))
    columns = {**COLUMNS, "weight": "stands_for", "mdp_id": "session", "sequence_number": "number"}
    config = {"columns": columns, "actions": ["a", "b"], "gamma": 0.0, "output_path": tmp_path / "e.json"}
    config["timeline"] = {"addTerminalStateRow": True}
    with pytest.raises(DataError, match=message):
        reagent_lite.evaluate("column:wanted", part.assign(**change), config=config)


def _values(folder: Path, log: pd.DataFrame, algorithm: str, **columns: str) -> np.ndarray:
    """Returns the values of a model after one step on all rows at once, or of the fitted reward model."""
    config = {
        "actions": ["a", "b"], "model_output_path": str(folder), "use_gpu": False,
        "data": {"columns": {**COLUMNS, **columns}, "training_copy_dir": str(folder / "copy")},
        "norm_params": {"feature_overrides": {"x": "DO_NOT_PREPROCESS"}},
        "evaluation": {"bootstrap_resamples": 100, "learn_from_scored": True, "models": {"final_fit_passes": 1}},
        "algorithm": algorithm, "epochs": 1,
    }  # fmt: skip
    if algorithm == "boosting":
        config["rl"] = {"gamma": 0}
    else:
        config["training"] = {
            "layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": len(log),
            "optimizer": "SGD", "learning_rate": 0.1,
        }  # fmt: skip
    model = reagent_lite.load_bundle(reagent_lite.train(config, log).model)
    return model.predict_rows([{"x": value} for value in np.linspace(0, 1, 5)]).q


@pytest.mark.parametrize("algorithm", ["dqn", "crr", "boosting"])
def test_a_policy_learns_from_a_row_of_weight_2_as_from_two(tmp_path: Path, algorithm: str) -> None:
    _, part = log_of_clicks(600)
    repeated = part.loc[part.index.repeat(part.stands_for)].reset_index(drop=True)
    weighted = _values(tmp_path / "weighted", part, algorithm, weight="stands_for")
    expected = _values(tmp_path / "repeated", repeated, algorithm)
    alike = _values(tmp_path / "alike", part, algorithm)
    tolerance = 0.03 if algorithm == "boosting" else 1e-5  # folds are divided by row
    np.testing.assert_allclose(weighted, expected, atol=tolerance)
    assert np.abs(alike - expected).max() > 3 * tolerance
    document = json.loads((tmp_path / "weighted/model/evaluation.json").read_text())
    overlap = document["cpe"]["overlap"]
    assert 0.5 * overlap["num_rows"] < overlap["effective_sample"] < 0.95 * overlap["num_rows"]


def test_weights_go_through_a_written_timeline(tmp_path: Path) -> None:
    """Sessions of two rows; transitions are read again for their weights."""
    _, part = log_of_clicks(300)
    row = np.arange(len(part))
    log = part.assign(session=[f"s{number // 2}" for number in row], number=row % 2, stands_for=1 + row // 2 % 3)
    config = {
        "actions": ["a", "b"], "model_output_path": str(tmp_path / "out"), "use_gpu": False,
        "data": {
            "columns": {**COLUMNS, "mdp_id": "session", "sequence_number": "number", "weight": "stands_for"},
            "training_copy_dir": str(tmp_path / "copy"),
        },
        "timeline": {"outputTableName": str(tmp_path / "paired"), "addTerminalStateRow": True},
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "evaluation": {"bootstrap_resamples": 100, "held_out_share": 0.99, "learn_from_scored": True},
    }  # fmt: skip
    model = Path(reagent_lite.train(config, log).model)
    overlap = json.loads((model / "evaluation.json").read_text())["cpe"]["overlap"]
    weight = log.stands_for.groupby(log.session).first()
    exact = 2 * weight.sum() ** 2 / (weight**2).sum()
    assert overlap["effective_sample"] == pytest.approx(exact, rel=0.05)  # a hundredth of the sessions is not scored


def test_inspect_says_what_a_column_of_weights_is_for() -> None:
    _, part = log_of_clicks(400)
    for name in ("weight", "sample_weight", "importance"):
        decide = reagent_lite.inspect(part.rename(columns={"stands_for": name})).decide
        assert any(line.startswith(f"{name}: if it says how many decisions each row stands for") for line in decide)
    equal = reagent_lite.inspect(part.assign(weight=1.0)).decide
    assert not any("stands for" in line for line in equal)
