"""Many policies on one log: intervals hold together, and the decision about the best holds although it was chosen."""

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pytest

import reagent_lite
from reagent_lite.cli import config_of, options_of, parser_of
from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.errors import ConfigError
from workflows.evaluate import COMMAND

ROWS = 4000


def log_of(gain: float, policies: int = 6) -> pd.DataFrame:
    """Action b earns `gain` more; policy p0 takes it always, the others half of the time by a coin of their own."""
    rng = np.random.default_rng(3)
    b = rng.random(ROWS) < 0.5
    coins = rng.random((ROWS, policies)) < 0.5
    coins[:, 0] = True
    columns = {f"p{number}": (coins[:, number] == b).astype(float) for number in range(policies)}
    return pd.DataFrame({
        "x": rng.random(ROWS), "action": np.where(b, "b", "a"), "reward": rng.normal(size=ROWS) + gain * b,
        "action_probability": 0.5, **columns,
    })  # fmt: skip


def evaluated(folder: Path, log: pd.DataFrame, models: Any, **keys: Any) -> Any:
    config = {"columns": {"state_features": ["x"]}, "actions": ["a", "b"], "output_path": folder / "e.json", **keys}
    return reagent_lite.evaluate(models, log, config=config)


def test_the_best_of_several_is_shipped_by_intervals_that_hold_together(tmp_path: Path) -> None:
    log = log_of(gain=0.3)
    models = [f"column:p{number}" for number in reversed(range(6))]
    result = evaluated(tmp_path, log, models)
    assert result.decision["choice"] == "ship"
    assert result.decision["reason"].startswith(
        "column:p0 is the best of 6 policies (their intervals hold together with 95%): "
    )
    document = json.loads(Path(result.report).read_text())
    page = Path(result.page).read_text()
    assert "Policies, best first" in page
    assert "All intervals hold together with 95%" in page
    assert document["ranking"][0]["policy"] == "column:p0"
    assert sorted(entry["policy"] for entry in document["ranking"]) == sorted(models)
    (best, *others) = document["ranking"]
    assert best["choice"] == "ship"
    assert all(entry["difference"]["low"] <= 0 for entry in others)
    alone = evaluated(tmp_path, log, "column:p0")
    divided = evaluated(tmp_path, log, "column:p0", looks=6)
    widths = []
    for one in (alone, divided, result):
        (row,) = (row for row in one.estimate_rows if (row["estimator"], row["policy"]) in IPS)
        widths.append(row["high"] - row["low"])
    quantile = NormalDist().inv_cdf
    assert widths[1] / widths[0] == pytest.approx(quantile(1 - 0.025 / 6) / quantile(0.975), rel=0.01)
    assert widths[2] == pytest.approx(widths[1], rel=1e-3)


IPS = {("IPS_Reward", "model"), ("IPS_Reward", "column:p0")}


def test_of_policies_that_are_alike_none_is_shipped(tmp_path: Path) -> None:
    log = log_of(gain=0.0, policies=20)
    assert evaluated(tmp_path, log, [f"column:p{n}" for n in range(20)]).decision["choice"] == "not enough to say"


def test_a_column_made_from_the_log_is_flattered(tmp_path: Path) -> None:
    log = log_of(gain=0.5)
    assert evaluated(tmp_path, log, "column:p0").decision["choice"] == "ship"
    made = tmp_path / "made.parquet"
    log.to_parquet(made)
    config = {"fitted_on": {"p0": str(made)}, "data_path": str(made)}
    columns = {"columns": {"state_features": ["x"]}, "actions": ["a", "b"], "output_path": tmp_path / "e.json"}
    result = reagent_lite.evaluate("column:p0", config=columns | config)
    assert result.decision["choice"] == "not enough to say"
    assert "has learned from scored episodes, which flatters it" in result.decision["reason"]
    assert "model was made from this very log: it has seen episodes that are scored" in result.warnings
    other = tmp_path / "other.parquet"
    log_of(gain=0.4).to_parquet(other)
    result = reagent_lite.evaluate("column:p0", config=columns | config | {"fitted_on": {"p0": str(other)}})
    assert result.decision["choice"] == "ship"


def test_several_models_on_the_command_line() -> None:
    arguments = ["--model", "uniform", "column:new", "logged", "--data", "log.csv", "--set", "output_path=e.json"]
    options = options_of(parser_of(COMMAND), arguments)
    overrides = [f"{key}={json.dumps(value)}" for key in COMMAND.flags if (value := getattr(options, key)) is not None]
    assert config_of(COMMAND, options, overrides).policies == {
        "model": "uniform", "model_2": "column:new", "model_3": "logged"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"against": "logged"}, "against: expected absent with several models"),
        ({"simulation": {"env": "cartpole_v0"}}, "simulation: expected absent with several models"),
        ({"fitted_on": {"new": "log.csv"}}, "fitted_on: expected columns of policies"),
        ({"looks": 0}, "looks"),
    ],
)
def test_faults(keys: dict[str, Any], message: str) -> None:
    tree = {"model": ["uniform", "logged"], "data_path": "log.csv", "output_path": "e.json", "gamma": 1.0, **keys}
    with pytest.raises(ConfigError, match=message):
        check(EvaluateConfig, tree)
