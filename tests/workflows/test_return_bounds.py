"""Values that the data's rewards do not allow, or that tell nothing: log, report and model card warn of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.logs import random_rows, write_lines
from helpers.runs import ALONE, absent, quick, trained

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import ConfigError
from reagent_lite.export.model_card import escape_text
from reagent_lite.run import value_bounds
from reagent_lite.run.logged import prepare
from reagent_lite.run.value_bounds import ReturnBounds, return_bounds


@pytest.mark.parametrize(
    ("bounds", "mean", "excess"),
    [
        ((0, 100), 99.0, 0), ((0, 100), 100.5, 0), ((0, 100), 132.7, 32.7), ((0, 100), -2.0, 2),
        ((-10, 0), -12.0, 2), ((0, float("inf")), 1e9, 0), ((0, float("inf")), -1.0, 0), ((0, 0), 0.01, 0),
    ],
)  # fmt: skip
def test_how_far_outside(bounds: tuple[float, float], mean: float, excess: float) -> None:
    assert ReturnBounds(bounds=bounds).excess(mean) == pytest.approx(excess)


def test_a_warning_comes_again_only_when_it_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    bounds = ReturnBounds(bounds=(0.0, 100.0))
    assert [bounds.warn(mean, before) for mean, before in ((102.0, 0.0), (104.0, 2.0), (105.0, 2.0))] == [2, 2, 5]
    assert [message.split(",")[0][-3:] for message in caplog.messages] == ["102", "105"]


def tree_of(tmp_path: Path, *, reward: float = 1.0, **keys: Any) -> dict[str, Any]:
    rows = [{**row, "reward": reward * (i % 3)} for i, row in enumerate(random_rows(100))]
    log = write_lines(tmp_path / "log.jsonl", rows)
    return quick(log, tmp_path / "out", **{"evaluation": {"models": {"final_fit_passes": 1}}, **keys})


def payable(tree: dict[str, Any], group: Group = ALONE) -> ReturnBounds:
    config = check(DqnConfig, tree)
    return return_bounds(config, prepare(config, ALONE).train.rows, group)


@pytest.mark.parametrize(
    ("rl", "expected"),
    [
        ({"gamma": 0.75}, (0, 8)),  # rewards 0, 1, 2: 2 / (1 - 3/4)
        ({"gamma": 0.75, "reward_boost": {"a": -5.0}}, (-20, 8)),
        ({"gamma": 0.0}, (0, 2)),
        ({"gamma": 0.5, "multi_steps": 2}, (0, 8 / 3)),  # two rows pay 1 + 2/2 or 2 + 0/2: 2 / (1 - 1/4)
    ],
)  # fmt: skip
def test_what_a_log_can_pay(tmp_path: Path, rl: dict[str, Any], expected: tuple[float, float]) -> None:
    assert payable(tree_of(tmp_path, rl=rl)).bounds == pytest.approx(expected)


def test_bounds_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Beside a rank whose rows pay -3 to 5."""
    group = Group(ProcessRanks(), ALONE.device)
    other = torch.tensor([3.0, 5.0, 3.0, 5.0, 0.0, 0.0])
    with patch.object(group, "all_reduce_max", lambda tensor: tensor.maximum(other.to(tensor))):
        assert payable(tree_of(tmp_path, rl={"gamma": 0.75}), group) == ReturnBounds(bounds=(-3.0, 8.0))


def test_a_nan_of_any_rows_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_bounds, "_ROWS_AT_ONCE", 30)
    config = check(DqnConfig, tree_of(tmp_path, rl={"gamma": 0.75}))
    rows = prepare(config, ALONE).train.rows
    reward = rows.reward.clone()
    reward[40] = torch.nan  # no log has one; in the second of several parts
    bounds = return_bounds(config, replace(rows, reward=reward), ALONE)
    assert bounds is not None
    assert np.isnan(bounds.bounds).all()


def test_bounds_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bound"):
        payable(tree_of(tmp_path, rl={"gamma": 1.0, "value_bounds": "rewards", "reward_boost": {"a": -5.0}}))


def test_log_report_and_model_card_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rewards of a millionth: what the network says before it has learned anything is far outside."""
    trained(tree_of(tmp_path, reward=1e-6))
    said = "only allow values from"
    assert sum(said in line for line in caplog.messages) == 1
    evaluation = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    assert evaluation["values"]["high"] == pytest.approx(2e-5)
    assert (
        f"**Warning**: {escape_text(evaluation['warnings'][0])}" in (tmp_path / "out/model/MODEL_CARD.md").read_text()
    )
    assert said in (tmp_path / "out/report.html").read_text()


def test_values_stay_inside_bounds_that_targets_are_clipped_to(tmp_path: Path) -> None:
    rl = {"gamma": 0.99, "target_update_rate": 1.0, "value_bounds": [-0.5, 0.5]}
    outcome = trained(tree_of(tmp_path, rl=rl, epochs=20, training={"learning_rate": 0.03}))
    assert outcome.scores["value/model/mean"] == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize(
    ("rewards", "terminal", "gamma", "vary"),
    [
        ([1, 2], [0, 0], 0.5, True),
        ([1, 1], [0, 1], 0.5, True),  # 1 and more to come, or 1 and the end
        ([1, 1], [0, 0], 0.5, False),
        ([1, 1], [0, 1], 0.0, False),
        ([0, 0], [0, 1], 0.5, False),
        ([-1, -1], [0, 1], 0.5, True),
    ],
)
def test_rewards_from_which_something_can_be_learned(
    tmp_path: Path, rewards: list[int], terminal: list[int], gamma: float, vary: bool
) -> None:
    after = {"next_state_features": {"0": 1.0}, "possible_next_actions": [1, 1]}
    rows = [{**row, **after, "reward": rewards[i % 2], "terminal": bool(terminal[i % 2])}
            for i, row in enumerate(random_rows(40))]  # fmt: skip
    log = write_lines(tmp_path / "log.jsonl", rows)
    assert payable(quick(log, tmp_path / "out", rl={"gamma": gamma})).vary == vary


LEARNED_NOTHING = "the learned values are no better than one value"
FEW_STEPS = "too few optimizer steps"


def single_steps(folder: Path, *, depends: float, noise: float, rows: int = 1200) -> Path:
    """Terminal rows whose reward is `depends` times a feature, with the sign of the action, and noise of that size."""
    rng = np.random.default_rng(0)
    drawn = (rng.normal(size=(rows, 3)).tolist(), rng.integers(2, size=rows), rng.normal(size=rows))
    log = [
        {"mdp_id": str(i), "sequence_number": 0, "state_features": {"0": x[0], "1": x[1], "2": x[2]},
         "action": "ab"[action], "reward": float(3 + depends * (2 * action - 1) * x[0] + noise * shock),
         "action_probability": 0.5, "possible_actions": ["a", "b"], "terminal": True}
        for i, (x, action, shock) in enumerate(zip(*drawn, strict=True))
    ]  # fmt: skip
    return write_lines(folder / "log.jsonl", log)


@pytest.mark.parametrize(
    ("depends", "noise", "epochs", "minibatch", "loss", "said"),
    [
        (1.0, 0.1, 1, 4096, "mse", {LEARNED_NOTHING, FEW_STEPS}),  # one step
        (1.0, 0.1, 20, 32, "huber", set()),
        (0.0, 1.0, 20, 32, "mse", {LEARNED_NOTHING}),  # by a line alone; rewards are noise
        (0.0, 0.0, 20, 32, "mse", set()),  # every reward is 3: there is nothing to learn
    ],
)  # fmt: skip
def test_a_learner_that_learned_nothing_says_so(
    tmp_path: Path, depends: float, noise: float, epochs: int, minibatch: int, loss: str, said: set[str]
) -> None:
    tree = quick(
        single_steps(tmp_path, depends=depends, noise=noise, rows=600), tmp_path / "out", epochs=epochs,
        rl={"gamma": 0.9, "q_network_loss": loss},
        evaluation={"models": {"final_fit_passes": 1}, "calc_cpe_in_training": False},
    )  # fmt: skip
    tree["training"] |= {"minibatch_size": minibatch, "learning_rate": 0.01}
    tree["training"] |= {} if depends else {"layers": [-1, -1], "activations": ["linear"]}
    trained(tree)
    warnings = json.loads((tmp_path / "out/model/evaluation.json").read_text())["warnings"]
    for text in (str(warnings), (tmp_path / "out/report.html").read_text()):
        assert {part for part in (LEARNED_NOTHING, FEW_STEPS) if part in text} == said


def test_few_steps_and_what_to_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """1,200 rows in one minibatch are one step an epoch: 100 steps take 100 epochs, or 10 of 120 rows each."""
    log = single_steps(tmp_path, depends=1.0, noise=0.1)
    tree = quick(log, tmp_path / "out", epochs=10, evaluation={"models": {"final_fit_passes": 1}})
    tree["training"]["minibatch_size"] = 4096
    trained(tree)
    (warning,) = (message for message in caplog.messages if FEW_STEPS in message)
    assert not absent(
        warning,
        "10 in all, 1 for each pass over 1,200 rows",
        "set epochs to at least 100, or training.minibatch_size to at most 120",
    )
    caplog.clear()
    warm = {"minibatch_size": 4096, "warm_start_model_path": str(tmp_path / "out")}
    trained(tree | {"training": {**tree["training"], **warm}, "model_output_path": str(tmp_path / "warm")})
    tree["training"]["minibatch_size"] = 120
    assert trained(tree).steps == 100
    assert FEW_STEPS not in caplog.text
