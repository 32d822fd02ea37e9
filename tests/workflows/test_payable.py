"""Values outside the range that the data's rewards allow: log, report and model card warn of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.logs import random_rows, write_lines
from oracles.runs import ALONE, quick, trained

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import ConfigError
from reagent_lite.export.model_card import plain
from reagent_lite.run.logged import prepare
from reagent_lite.run.value_bounds import Payable, payable_values


@pytest.mark.parametrize(
    ("bounds", "mean", "excess"),
    [
        ((0, 100), 99.0, 0), ((0, 100), 100.5, 0), ((0, 100), 132.7, 32.7), ((0, 100), -2.0, 2),
        ((-10, 0), -12.0, 2), ((0, float("inf")), 1e9, 0), ((0, float("inf")), -1.0, 0), ((0, 0), 0.01, 0),
    ],
)  # fmt: skip
def test_how_far_outside(bounds: tuple[float, float], mean: float, excess: float) -> None:
    assert Payable(bounds=bounds).excess(mean) == pytest.approx(excess)


def test_a_warning_comes_again_only_when_it_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    before = 0.0
    for mean in range(90, 150):
        before = Payable(bounds=(0.0, 100.0)).warned(float(mean), before)
    said = [line.split("mean value of ")[1].split(",")[0] for line in caplog.messages]
    assert said == ["102", "105", "111", "123", "147"]


def tree_of(tmp_path: Path, *, reward: float = 1.0, **keys: Any) -> dict[str, Any]:
    rows = [{**row, "reward": reward * (i % 3)} for i, row in enumerate(random_rows(100))]
    log = write_lines(tmp_path / "log.jsonl", rows)
    return quick(log, tmp_path / "out", **{"evaluation": {"final_fit_passes": 1}, **keys})


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
    config = check(DqnConfig, tree_of(tmp_path, rl=rl))
    payable = payable_values(config, prepare(config, ALONE).train.rows, ALONE)
    assert payable is not None
    assert payable.bounds == pytest.approx(expected)


def test_bounds_are_those_of_all_ranks(tmp_path: Path) -> None:
    class Another(Group):
        """Beside a rank whose rows pay -3 to 5."""

        def max(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.maximum(tensor, tensor.new_tensor([3.0, 5.0]))

    config = check(DqnConfig, tree_of(tmp_path, rl={"gamma": 0.75}))
    payable = payable_values(config, prepare(config, ALONE).train.rows, Another(Place(), ALONE.device))
    assert payable == Payable(bounds=(-3.0, 8.0))


def test_bounds_that_are_not_there_are_refused(tmp_path: Path) -> None:
    boost = {"gamma": 1.0, "value_bounds": "rewards", "reward_boost": {"a": -5.0}}
    config = check(DqnConfig, tree_of(tmp_path, rl=boost))
    with pytest.raises(ConfigError, match="no bound"):
        payable_values(config, prepare(config, ALONE).train.rows, ALONE)


def test_log_report_and_model_card_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rewards of a millionth: what the network says before it has learned anything is far outside."""
    trained(tree_of(tmp_path, reward=1e-6))
    said = "but the rewards of the training data only allow values from"
    assert sum(said in line for line in caplog.messages) == 1
    evaluation = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    assert evaluation["values"]["high"] == pytest.approx(2e-5)
    assert abs(evaluation["values"]["mean"]) > 2e-5
    assert said in evaluation["warnings"][0]
    assert f"**Warning**: {plain(evaluation['warnings'][0])}" in (tmp_path / "out/model/MODEL_CARD.md").read_text()
    assert said in (tmp_path / "out/report.html").read_text()


def test_values_stay_inside_bounds_that_targets_are_clipped_to(tmp_path: Path) -> None:
    rl = {"gamma": 0.99, "target_update_rate": 1.0, "value_bounds": [-0.5, 0.5]}
    outcome = trained(tree_of(tmp_path, rl=rl, epochs=20, training={"learning_rate": 0.03}))
    assert outcome.scores["value/model/mean"] == pytest.approx(0.5, abs=0.2)
